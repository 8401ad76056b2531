"""A job that was handed over, and what can be done with it: read its log, wait, cancel."""

from __future__ import annotations

import contextlib
import json
import numbers
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from nemo_run_ray.clusters.base import CUT
from nemo_run_ray.dashboard.http import repeat
from nemo_run_ray.dashboard.jobs import PATIENCE_S
from nemo_run_ray.errors import ClusterError, ConfigError, JobError, NemoRunRayError, StillGoesOn
from nemo_run_ray.experiment import keep_logs, notes
from nemo_run_ray.experiment.cancel_loop import JOB_MARGIN_S, Stops, insist
from nemo_run_ray.experiment.dispatch import OUTCOME_S
from nemo_run_ray.experiment.elements import Element, array_file, cancel_elements, elements_of
from nemo_run_ray.experiment.leftovers import leftovers
from nemo_run_ray.experiment.logs import attempt_mark, follow, output_of
from nemo_run_ray.experiment.observed_job import ObservedJob
from nemo_run_ray.experiment.roles_and_elements import elements
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.tend import tend
from nemo_run_ray.remote.array.elements import RESULTS_FILE
from nemo_run_ray.remote.end_record import end_mark
from nemo_run_ray.remote.rows import ArrayRows, fits, nonce_of
from nemo_run_ray.remote.states import JobState, JobStatus, Reason, is_pending

#: Seconds between two looks of a wait.
_WAIT_AGAIN_S = 1.0


class RemoteJob(ObservedJob):
    """One job on a cluster: what ``nemo_run_ray.find`` gives."""

    def log(self, follow: bool = False) -> Iterator[str]:
        """Its log's text: all of it if it is over or ``follow`` is set, else what there is now.

        Raises:
            ClusterError: the log cannot be read.
            JobError: there is no log.
        """
        return self._or_kept(lambda: self.cluster_log(follow))

    def output(self, follow: bool = False) -> Iterator[str]:
        """Its log without Ray's lines before the task's first one, and without the last line."""
        marks = tuple(attempt_mark(nonce) for nonce in self.record.nonces)
        return output_of(self.log(follow), self._end_marks, marks)

    @property
    def elements(self) -> ArrayRows | None:
        """How many elements of an array wait, run, and have ended; ``None`` for other jobs."""
        return elements(self, self.status)

    def results(self) -> dict[int, Any]:
        """What the elements of an array have returned, by their indices: of ``run.Partial`` what is
        JSON, up to 64 KiB each.

        Raises:
            ClusterError: the cluster does not answer.
        """
        if not self.record.is_array:
            return {}
        found: dict[int, Any] = {}
        for line in array_file(self, self.status, RESULTS_FILE):
            with contextlib.suppress(ValueError, RecursionError):  # the last one is being written
                row = json.loads(line)
                if fits(row, [int, object]):
                    found[row[0]] = row[1]
        return found

    def select_elements(self, selection: str = "") -> list[Element]:
        """The elements of an array, one by one.

        Args:
            selection: ``waiting``, ``running``, ``succeeded``, ``failed``, ``cancelled``, ``lost``,
                or indices such as ``3,7-9``; empty is all.

        Raises:
            ClusterError: the cluster does not answer.
            ConfigError: the selection cannot be understood.
            JobError: it is no array, has no such element, or nothing is known of its elements.
        """
        return elements_of(self, self.status, selection)

    def cancel_elements(self, selection: str) -> list[Element]:
        """End some elements of an array that goes on, wait until they have ended, and return them.

        Args:
            selection: ``waiting`` (those that begin meanwhile go on), ``running``, or indices.

        Raises:
            ClusterError: the cluster does not answer, or the array's driver does not.
            ConfigError, JobError: as for ``select_elements``; or the selection is of what is over.
        """
        return cancel_elements(self, selection)

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until it has ended, and return how. Meanwhile its experiment is looked after.

        Args:
            timeout_s: seconds to wait at most; without it as long as it takes.

        Raises:
            ConfigError: the time is no number.
            JobError: it will never start: another run has its id, or it never reached the cluster.
            StillGoesOn: it has not ended in that time; it is a ``TimeoutError`` too.
        """
        _check_timeout(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with keep_logs.waiting():
                status = self.status
            if status.state.is_terminal:
                return status
            if self._never_starts(status):
                raise JobError(f"The job {self.id} will not start. {status.message}")
            if deadline is not None and time.monotonic() >= deadline:
                raise StillGoesOn(
                    f"The job {self.id} is {status.state.value} after {timeout_s:.0f} s; it goes "
                    "on. Wait again, or cancel it."
                )
            tend(self.record.exp_dir)
            time.sleep(_WAIT_AGAIN_S)

    def cancel(self) -> JobStatus:
        """Stop it, again and again until it is terminal, and return how it ended.

        Raises:
            ClusterError: it did not end in time, or the cluster stopped answering.
            ConfigError: the cluster's address or credentials cannot be used.
        """
        status = self.answered()
        if status.state.is_terminal or status.state is JobState.WAITING:
            return status
        api = self.api()
        notes.note_cancel(self)
        stops = Stops(api)

        def turn() -> JobStatus | None:
            stops.ask(self.id)
            snapshot = Snapshot(is_fresh=True)
            row = api.job(self.id)
            status = self._absent(api, snapshot) if row is None else self._present(row, snapshot)
            settled = row is None or not is_pending(row) or stops.are_trusted
            return status if status.state.is_terminal and settled else None

        return self._insist(turn)

    def leftovers(self, status: JobStatus) -> str:
        """Proof that no process of it is left after its cancel, in words.

        Raises:
            ClusterError: the cluster cannot be asked.
            JobError: the cluster is gone for good.
        """
        return repeat(lambda: leftovers(self, status), PATIENCE_S)

    def answered(self) -> JobStatus:
        """Its status now; a cluster that does not answer is asked again for a while.

        Raises:
            ClusterError: the cluster cannot be asked.
            ConfigError: its address or credentials cannot be used.
        """
        return insist(
            lambda: self.look(Snapshot(is_fresh=True)), JOB_MARGIN_S, f"the job {self.id}"
        )

    def _never_starts(self, status: JobStatus) -> bool:
        age_s = time.time() - self.record.intended_at
        is_given_up = status.reason is Reason.NOT_SUBMITTED and age_s > OUTCOME_S
        return status.reason is Reason.TAKEN or is_given_up

    def cluster_log(self, is_followed: bool) -> Iterator[str]:
        """Its log from its cluster alone."""
        source = _Log(self)
        if is_followed or source.is_over():
            return follow(source, self._end_marks, time.sleep)
        return source.whole()

    def _or_kept(self, cluster_log: Callable[[], Iterator[str]]) -> Iterator[str]:
        """The log of its cluster, or the one that was kept where the cluster does not have it."""
        # What the embedded Ray had was kept whole, unless the user has set a limit.
        is_whole = self.cluster.runs_here and self.kept.is_whole
        if self.kept.has_log and (is_whole or not self._is_on_cluster()):
            return self.kept.log()
        return self._begun_or_kept(cluster_log)

    def _is_on_cluster(self) -> bool:
        """Whether the cluster answers and has the attempt that the kept log ends with."""
        self._read_record()  # another process may have seen the end since
        if not self.record.terminal:
            return True
        ran_as = self.ran_as(JobStatus.from_json(self.record.terminal))
        try:
            row = self.api().job(ran_as)
        except NemoRunRayError:
            return False
        return row is not None and nonce_of(row) in self.record.nonces

    def _begun_or_kept(self, cluster_log: Callable[[], Iterator[str]]) -> Iterator[str]:
        passed = 0
        try:
            for text in cluster_log():
                passed += len(text)
                yield text
        except (ClusterError, JobError) as error:  # the node that had it is gone, or the cluster
            rest = self.kept.log() if self.kept.has_log else self.left_text()
            beginning = next(rest, "")
            if not beginning or (passed and beginning.startswith(CUT)):
                raise
            yield from _from(passed, chain([beginning], rest))
            if passed and not self.record.terminal:
                raise JobError(f"No more of its log is left. {self.status.message}") from error

    def _insist(self, turn: Callable[[], JobStatus | None]) -> JobStatus:
        page = self.api().dashboard.job_page(self.id)
        limit_s = self.record.grace_s + JOB_MARGIN_S
        return self._named(insist(turn, limit_s, f"the job {self.id} ({page})"))

    @property
    def _end_marks(self) -> tuple[str, ...]:
        return tuple(end_mark(nonce) for nonce in self.record.nonces)


def _from(place: int, texts: Iterable[str]) -> Iterator[str]:
    """What comes after so many characters."""
    for text in texts:
        if len(text) > place:
            yield text[place:]
        place = max(0, place - len(text))


def _check_timeout(timeout_s: object) -> None:
    is_number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and float(timeout_s) >= 0):  # type: ignore[arg-type]
        raise ConfigError(
            f"The timeout_s of a wait is {timeout_s!r}; allowed is a number of seconds from 0, or "
            "None to wait as long as it takes."
        )


class _Log:
    """A job's log as ``follow`` reads it."""

    def __init__(self, job: RemoteJob) -> None:
        self._job = job

    def tail(self) -> Iterator[str]:
        if self._job.look(Snapshot()).state is JobState.CANCELLED:
            return self.whole()  # the stream of one that never starts would never begin
        return self._job.api().logs.tail(self._job.id, lambda: not self.is_over())

    def whole(self) -> Iterator[str]:
        return self._job.api().logs.whole(self._job.id)

    def is_over(self) -> bool:
        status = self._job.look(Snapshot())
        if status.state is JobState.LOST:
            raise JobError(f"There is no log any more. {status.message}")
        if status.state is JobState.WAITING:
            raise JobError(f"There is no log yet. {status.message}")
        return status.state.is_terminal
