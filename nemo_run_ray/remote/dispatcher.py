"""The dispatcher: one small job on the head that hands the other jobs of an experiment over.

It keeps nothing that matters: killed at any line and started again, also twice at the same time,
it continues from the cluster's job table. Ray gives every submission id away once, so what two of
them do at the same moment is done once.
"""

from __future__ import annotations

import copy
import io
import json
import os
import time
import zipfile
from collections import Counter, deque
from contextlib import suppress
from time import monotonic
from typing import Callable, Mapping

from . import carried_over
from .dashboard import DashboardClient, RequestRefused, Unanswered, candidates
from .decide import Action, Decision, Do, decide, time_left
from .end_record import LostEnds, lock_of, proof_of
from .files import DASHBOARD, EMBEDDED, LIFE, RUN
from .node.output import say
from .node.rundir import KEY, SECRETS, read_secrets, remove_secrets
from .spec import LOCK_KEY, SUBMISSION_ID, DispatchedJobSpec, DispatchSpec, Json
from .status import (
    STOP_AGAIN_S,
    STOP_TRUST_S,
    Attempt,
    JobExit,
    JobState,
    Reason,
    attempt_id,
    attempt_of_row,
    claim_body,
    first_id,
    node_dead_s,
)

#: Seconds that the table may lack the dispatcher itself before it believes it: a head that
#: recovers may answer before it knows its jobs.
ABSENT_MAX_S = 60.0
#: Memory of the head for each job's supervisor (measured: 85 to 110 MB).
SUPERVISOR_BYTES = 110 * 10**6


class WrongCluster(Exception):
    """The cluster does not know this dispatcher, so its job table is not that of the dispatch; or
    it is gone for good."""


class Dispatcher:
    """Looks, decides, acts; see ``decide``."""

    def __init__(
        self,
        dispatch: DispatchSpec,
        own_id: str,
        api: DashboardClient,
        secrets: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ):
        self._dispatch = dispatch
        self._own_id = own_id
        self._api = api
        self._secrets = secrets
        self._clock = clock
        self._parent = os.getppid()
        self._jobs = {job.name: job for job in dispatch.jobs}
        self._ids = dispatch.ids
        self._reported: dict[str, tuple[JobState, int, Reason]] = {}
        self._stops: dict[str, tuple[float, float]] = {}  # first and last request, by attempt
        self._errors: dict[str, float] = {}  # first unexplained error of an attempt
        self._troubles: dict[str, str] = {}  # in the log already, by what they are about
        self._changed_at = self._present_at = clock()
        self._looks_s = deque[float](maxlen=3)
        self._earlier: dict[str, Attempt] | None = None  # not read yet
        self._ends = LostEnds(api.log_end)

    def run(self, sleep: Callable[[float], None] = time.sleep) -> int:
        """Continue until everything is decided, and return the exit code.

        Raises:
            WrongCluster: the cluster has no record of this dispatcher, or will not come back.
        """
        while True:
            if (code := self.round()) is not None:
                return code
            # Look again soon while things happen, and never be a burden. The quickest look counts:
            # a head that is busy for a moment may take long for one.
            idle_s = self._clock() - self._changed_at
            sleep(max(0.2, min(idle_s / 20, 5.0), min(min(self._looks_s, default=0.0) * 4, 20.0)))

    def round(self) -> int | None:
        """Look once and act; the exit code when there is nothing left to do."""
        try:
            table = self._look()
        except (Unanswered, OSError) as error:  # or an earlier table cannot be read now
            self._complain("", str(error))
            self._present_at = self._clock()
            self._errors.clear()
            # Another Ray comes up again and continues its jobs.
            if os.environ.get(EMBEDDED) and os.getppid() != self._parent:
                raise WrongCluster("the embedded Ray that ran this dispatcher has died") from error
            return None
        if table is None:
            return None
        now = self._clock()
        decision = decide(self._dispatch, table, now, node_dead_s(), time_left(os.environ, now))
        self._report(decision)
        is_waiting = False
        for action in decision.actions:
            try:
                is_waiting |= self._act(action, table)
            except (Unanswered, RequestRefused) as error:
                self._complain(action.submission_id, f"{action.submission_id}: {error}")
                is_waiting = True
        self._present_at = self._clock()  # a head that hangs makes each action slow
        if decision.is_out_of_time:
            say("the other jobs need more time than this allocation has; the next one continues")
            return JobExit.OUT_OF_TIME
        if not decision.is_over or is_waiting:
            return None
        states = Counter(status.state for status in decision.statuses.values())
        counts = (f"{count} {state.value}" for state, count in sorted(states.items()))
        say(f"all is decided: {', '.join(counts)}")
        return JobExit.SUCCEEDED if states.keys() <= {JobState.SUCCEEDED} else JobExit.SOME_FAILED

    def _look(self) -> dict[str, Attempt] | None:
        """The table, or ``None`` when it is not (yet) the one that has this dispatcher."""
        if self._earlier is None:
            rows = carried_over.rows_before(os.environ.get(LIFE, ""), os.environ.get(RUN, ""))
            self._earlier = {name: attempt_of_row(row) for name, row in rows.items()}
        began = monotonic()
        table = dict(self._earlier)
        for row in self._api.rows():
            name = str(row["submission_id"])
            if first_id(name) in self._ids:
                table[name] = attempt_of_row(self._ends.restored(row))
        self._looks_s.append(monotonic() - began)
        self._troubles.pop("", None)
        own = table.get(self._own_id)
        if own and own.nonce == self._dispatch.nonce:
            if own.status.state.is_terminal:
                raise WrongCluster(f"Ray says that this dispatcher is {own.status.state.value}")
            self._present_at = self._clock()
            return table
        if self._clock() - self._present_at > ABSENT_MAX_S:
            raise WrongCluster(f"the job table of {self._api.url} does not have this dispatcher")
        return None

    def _act(self, action: Action, table: Mapping[str, Attempt]) -> bool:
        """Carry one action out, and return whether the next round must look after it."""
        now, name, job = self._clock(), action.submission_id, self._jobs[action.job]
        why = action.why
        if action.do is Do.STOP:
            first, last = self._stops.get(name, (now, 0.0))
            if now - last >= STOP_AGAIN_S:
                self._api.stop(name)
                if name not in self._stops:
                    say(f"stopping {name}: {why}")
                self._stops[name] = first, now
            return table[name].status.state is not JobState.PENDING or now - first < STOP_TRUST_S
        self._changed_at = now
        if action.do is Do.SUBMIT:
            number = int(name.partition("@")[2] or 1)
            before = attempt_id(job.id, number - 1)
            if before in table and table[before].status.reason is Reason.START_TIMEOUT:
                # Ray has given the start up, and some versions start it later all the same.
                self._api.stop(before)
            try:
                self._api.post(self._body(job, number))
                return True
            except RequestRefused as error:
                why = str(error)
            except Unanswered as error:
                if now - self._errors.setdefault(name, now) < 180.0:
                    raise  # an error of Ray's own, which may pass
                why = f"not taken: {error}"
        self._api.post(claim_body(name, job.nonce, why))
        return True

    def _body(self, job: DispatchedJobSpec, number: int) -> Json:
        """The body of the request for a job's n-th attempt. Its archive with the values of its
        secrets and the key of its end is uploaded."""
        missing = [secret for secret in job.secrets if secret not in self._secrets]
        if missing:
            raise RequestRefused(f"the dispatcher was started without {', '.join(missing)}")
        values = {name: self._secrets[name] for name in job.secrets}
        key, buffer = os.urandom(16).hex(), io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for file, content in ((SECRETS, json.dumps(values)), (KEY, key)):
                info = zipfile.ZipInfo(file)
                info.external_attr = 0o600 << 16
                archive.writestr(info, content)
        package = f"_ray_pkg_{os.urandom(16).hex()}.zip"
        self._api.put_package(package, buffer.getvalue())
        name, body = attempt_id(job.id, number), copy.deepcopy(job.body)
        body["submission_id"] = name
        body["entrypoint"] = body["entrypoint"].replace(SUBMISSION_ID, name)
        body["runtime_env"]["env_vars"]["NEMO_RUN_ATTEMPT"] = str(number)
        body["runtime_env"]["py_modules"].append(f"gcs://{package}")
        body["metadata"][LOCK_KEY] = lock_of(proof_of(key, 0))
        return body

    def _report(self, decision: Decision) -> None:
        """Say one line for every job whose status has changed since the last look."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))
        for name, status in decision.statuses.items():
            now = status.state, status.attempt, status.reason
            # At first there may be thousands, and none happened now.
            before, self._reported[name] = self._reported.get(name, now), now
            if before != now:
                self._changed_at = self._clock()
                submission_id = attempt_id(self._jobs[name].id, max(1, status.attempt))
                detail = " ".join(status.detail.split())
                say(f"{at} {status.state.value} {submission_id} {detail}".rstrip())

    def _complain(self, about: str, text: str) -> None:
        if self._troubles.get(about) != text:
            say(f"{text}; asking again")
            self._troubles[about] = text


def run(dispatch: DispatchSpec, submission_id: str) -> int:
    """Run the dispatcher's job and return its exit code."""
    if dispatch.max_in_flight is None:  # as many as half of the head's memory has room for
        limit = max(4, memory_bytes() // 2 // SUPERVISOR_BYTES)
        dispatch = dispatch._replace(max_in_flight=limit)
    say(f"{len(dispatch.jobs)} jobs, at most {dispatch.max_in_flight} at once")
    secrets = read_secrets()
    try:
        code = Dispatcher(dispatch, submission_id, find_dashboard(dispatch), secrets).run()
    except WrongCluster as error:
        say(f"{error}; nothing more is started")
        code = JobExit.WRONG_CLUSTER
    remove_secrets()
    return code


def find_dashboard(dispatch: DispatchSpec) -> DashboardClient:
    """The dashboard that belongs to the dispatch's session, however long it is away.

    Raises:
        WrongCluster: only dashboards of other sessions have answered for a while.
    """
    # Whoever has started this Ray has set its address; an embedded one that a job has started
    # inherits that of the cluster around it. No other port is shown the token.
    own = "" if os.environ.get(EMBEDDED) else os.environ.get(DASHBOARD)
    give_up_at = float("inf")
    while monotonic() < give_up_at:
        for url in [own] if own else candidates(dispatch.dashboards):
            with suppress(Unanswered):
                session = DashboardClient(url, timeout_s=5.0).session()
                # A dispatch continues in the next allocation, whose Ray has another name.
                if own or session == dispatch.session:
                    return DashboardClient(url)
                give_up_at = min(give_up_at, monotonic() + 120.0)
        time.sleep(1.0)
    raise WrongCluster(
        f"other sessions than {dispatch.session} answer here; tried {dispatch.dashboards}"
    )


def memory_bytes() -> int:
    """This node's memory, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            total = min(total, int(file.read()))  # "max" is no limit
    return total
