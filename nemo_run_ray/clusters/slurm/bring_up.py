"""The way of a client to a cluster on Slurm: take the one that lives, or submit and wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from nemo_run_ray.clusters.base import interrupted
from nemo_run_ray.clusters.slurm.allocations import (
    LEFT_EARLY,
    RENEWAL_S,
    Allocations,
    QueuedJob,
    SlurmAllocation,
)
from nemo_run_ray.errors import ClusterError, Unanswered

#: Seconds between two looks at the folder of the cluster.
_LOOK_S = 2.0
#: Seconds after which a claimed allocation that Slurm does not know is passed over. Its client has
#: died, or it waits for Slurm for longer than anybody waits for `sbatch`.
_CLAIM_S = 45.0
#: Number of submissions to a controller of Slurm that gives no answer.
_SUBMISSIONS = 4
#: Errors of `sbatch` that do not say whether the controller has the job.
_AWAY = ("Unable to contact", "timed out", "Connection refused", "Zero Bytes", "temporarily")
_NO_REASON = ("", "None", "(null)")


@dataclass
class BringUp:
    """One client's way to a cluster that is ready.

    Attributes:
        name: of the cluster.
        allocations: of the cluster.
        script: makes the job's script, of the folder of its allocation.
        user: name of this client among the users.
        keep: whether the cluster stays when nobody uses it.
        queue_timeout_s: how long to wait in Slurm's queue; ``None`` for as long as it takes.
        say: shows what is waited for, at each change.
        clock: seconds that only grow.
        pause: waits for some seconds; returns whether the wait was interrupted.
    """

    name: str
    allocations: Allocations
    script: Callable[[str], str]
    user: str
    keep: bool
    queue_timeout_s: float | None
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], bool] = interrupted.wait
    _joined: int = 0
    _submissions: int = 0
    _answered: bool = False
    #: Shown last; empty if there was no wait.
    said: str = ""
    _began: float = 0.0
    #: When an allocation without a job was seen first, by its number.
    _jobless_since: tuple[int, float] = (0, 0.0)
    #: The run whose job Slurm starts again.
    _requeued: str | None = None

    def run(self) -> SlurmAllocation:
        """The allocation to use, with this client among its users.

        Raises:
            ClusterError: Slurm does not take the job, Ray does not come up in it, or it waits in
                the queue for too long.
        """
        self._began = self.clock()
        while True:
            try:
                allocation = self._step()
            except Unanswered as error:
                if not self._answered:
                    raise
                self._say(str(error))
                allocation = None
            if allocation is not None:
                return allocation
            if self.pause(_LOOK_S):
                raise ClusterError(
                    f"Interrupted while waiting for the cluster {self.name!r} on Slurm. Its job is "
                    "taken out of the queue, or ends when it starts, unless another program waits "
                    "for it."
                )

    def _say(self, text: str) -> None:
        if text != self.said:
            self.said = text
            self.say(text)

    def _step(self) -> SlurmAllocation | None:
        allocation = self.allocations.look()
        self._answered = True
        if allocation is None or self._passes_over(allocation):
            if allocation is not None and allocation.is_renewing:
                self._say(f"The allocation of the cluster {self.name!r} is being renewed.")
            else:
                self._claim_next(allocation)
            return None
        if self._joined != allocation.number:
            self.allocations.ask("join", number=allocation.number, user=self.user)
            self._joined = allocation.number
            return self._step()  # it may have ended meanwhile
        if allocation.claimed == self.user and not allocation.is_sent:
            self._submit(allocation.number)
        elif (
            allocation.end is not None
            or not (allocation.head and allocation.token)
            or self._starts_again(allocation)
        ):
            self._wait(allocation)
        else:
            if self.keep:
                self.allocations.ask("note", number=allocation.number, name="keep")
            return allocation
        return None

    def _passes_over(self, allocation: SlurmAllocation) -> bool:
        """Whether an allocation is over; one that Slurm has no job of is given up.

        Raises:
            ClusterError: this client waited for it, and it has not come up.
        """
        if (
            allocation.end is not None
            and not (allocation.stop or allocation.over)
            and self._starts_again(allocation)
        ):
            return False
        if allocation.stop and not allocation.why_over:
            with contextlib.suppress(ClusterError):  # Slurm may not have heard of it
                self.allocations.cancel(allocation, allocation.stop)
        why = allocation.why_over or allocation.stop or self._give_up_lost(allocation)
        # Of several clients that wait, none submits again what would fail again.
        waited = allocation.number == self._joined and allocation.head is None and why != LEFT_EARLY
        if (
            why
            and waited
            and (allocation.job or allocation.refused)
            and not self._was_unheard(allocation)
        ):
            log = "" if allocation.refused or "\n" in why else self.allocations.log_end(allocation)
            raise ClusterError(_why_not_up(self.name, allocation, why, log))
        return bool(why)

    def _was_unheard(self, allocation: SlurmAllocation) -> bool:
        """Whether Slurm's controller was away when the allocation's job was submitted."""
        away = any(words in allocation.refused for words in _AWAY)
        return away and self._submissions < _SUBMISSIONS

    def _give_up_lost(self, allocation: SlurmAllocation) -> str:
        """Give up an allocation that Slurm has no job of, and return why; empty otherwise."""
        if self._jobless_since[0] != allocation.number:
            self._jobless_since = allocation.number, self.clock()
        if not allocation.has_queue or allocation.queued is not None:
            return ""
        if allocation.job:
            job = allocation.job
            why = f"Slurm has no job {job} any more; `sacct -j {job}` may say why"
        elif self.clock() - self._jobless_since[1] >= (
            RENEWAL_S if allocation.renewed else _CLAIM_S
        ):
            why = "its client ended before Slurm had the job"
        else:
            return ""
        self.allocations.ask("note", number=allocation.number, name="over", text=why)
        return why

    def _starts_again(self, allocation: SlurmAllocation) -> bool:
        """Whether Slurm starts the job of an allocation again, whose last start is over.

        It takes the nodes away from an allocation that was ready, which may have written its end.
        """
        if allocation.has_queue and (allocation.queued is None or allocation.queued.waits):
            self._requeued = None if allocation.queued is None else allocation.run
        return self._requeued == allocation.run  # without an answer it is as it was

    def _claim_next(self, last: SlurmAllocation | None) -> None:
        """Claim the next allocation and submit its job, unless another client does."""
        number = 1 if last is None else last.number + 1
        # One that cannot be made claims nothing.
        script = self.script(self.allocations.path(number))
        if self.allocations.ask("claim", number=number, user=self.user):
            self._joined = number
            self._submit(number, script)

    def _submit(self, number: int, script: str = "") -> None:
        """Submit the job of an allocation that this client has claimed."""
        if interrupted.is_set():
            return
        self._submissions += 1
        self._say(f"Submitting a job to Slurm for the cluster {self.name!r} …")
        script = script or self.script(self.allocations.path(number))
        self.allocations.ask("submit", number=number, script=script)

    def _wait(self, allocation: SlurmAllocation) -> None:
        """Say what is waited for, and give up when it takes too long."""
        waited = self.clock() - self._began
        has_begun = bool(allocation.run) and allocation.end is None
        job = None if has_begun and allocation.head is None else allocation.queued
        if job is not None and job.waits:
            what = f"waits in the queue{_why_waits(job)}"
            has_begun = False
        elif allocation.end is not None:
            what = "is to start again"
        else:
            what = "starts Ray on its nodes" if has_begun or job is not None else "is submitted"
        self._say(f"Slurm job {allocation.job or '…'} of the cluster {self.name!r} {what}.")
        late = self.queue_timeout_s is not None and waited >= self.queue_timeout_s
        if late and not has_begun:
            raise ClusterError(
                f"Slurm job {allocation.job} of the cluster {self.name!r} has not started within "
                f"queue_timeout_s={self.queue_timeout_s:g}: it {what}."
            )


def _why_not_up(name: str, allocation: SlurmAllocation, why: str, log: str) -> str:
    end = "" if why.endswith(".") else "."
    if allocation.refused:
        return (
            f"Slurm does not take the job of the cluster {name!r}: {why}{end} Correct the "
            "SlurmExecutor."
        )
    message = (
        f"Ray did not come up in Slurm job {allocation.job} of the cluster {name!r}: {why}{end}"
    )
    return f"{message} {log}" if log else message


def _why_waits(job: QueuedJob) -> str:
    """The reason and the expected start of a job that waits, as the end of a sentence."""
    reason = "" if job.reason in _NO_REASON else f": {job.reason}"
    return reason if job.start == "N/A" else f"{reason}; Slurm expects it to start at {job.start}"
