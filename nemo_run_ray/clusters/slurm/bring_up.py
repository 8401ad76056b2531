"""The way of a client to a cluster on Slurm: take the one that lives, or submit and wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from nemo_run.core.frontend.console.api import CONSOLE
from rich.errors import LiveError

from nemo_run_ray.clusters.base import interrupted
from nemo_run_ray.clusters.slurm.ending import LEFT_EARLY
from nemo_run_ray.clusters.slurm.life import RENEWAL_S, AllocationLife
from nemo_run_ray.clusters.slurm.lives import Lives
from nemo_run_ray.clusters.slurm.slurm_queue import QueuedJob, SlurmQueue
from nemo_run_ray.errors import ClusterError, Unanswered, as_markup


class Progress:
    """A line that is updated on a terminal; elsewhere, a line at each change."""

    def __init__(self) -> None:
        self._last = ""
        self._status: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Show what is waited for now."""
        if text == self._last:
            return
        self._last = text
        if not CONSOLE.is_terminal:
            CONSOLE.log(as_markup(text))
        elif self._status is None:
            status = CONSOLE.status(as_markup(text))
            try:
                status.start()
            except LiveError:  # another thread shows a line
                CONSOLE.log(as_markup(text))
                return
            self._status = status
        else:
            self._status.update(as_markup(text))

    def done(self, text: str) -> None:
        """Say how it ended, if there was a wait."""
        if self._last:
            CONSOLE.log(as_markup(text))


#: Seconds between two looks at the folder of the cluster.
_LOOK_S = 2.0
#: Seconds after which a claimed life that Slurm does not know is passed over. Its client has died,
#: or it waits for Slurm for longer than anybody waits for `sbatch`.
_CLAIM_S = 45.0
#: Seconds within which the host with Slurm must answer for the first time.
_FIRST_ANSWER_S = 60.0
#: How often a job is submitted to a controller of Slurm that gives no answer.
_SUBMISSIONS = 4
#: What `sbatch` says when it does not know whether the controller has the job.
_AWAY = ("Unable to contact", "timed out", "Connection refused", "Zero Bytes", "temporarily")
_NO_REASON = ("", "None", "(null)")
#: Slurm's reasons that no waiting takes away.
_LASTING = {
    "PartitionConfig": "it asks for more nodes than the partition has",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives to a job",
    "PartitionTimeLimit": "it asks for more time than the partition gives to a job",
    "BadConstraints": "no node is as it asks for",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "you hold it; `scontrol release` lets it go",
    "InvalidAccount": "its account is not one of Slurm's",
    "InvalidQOS": "its quality of service is not one of Slurm's",
}


@dataclass
class BringUp:
    """One client's way to a cluster that is ready.

    Attributes:
        name: of the cluster.
        lives: its lives.
        queue: what Slurm says.
        script: makes the job's script, of the folder of its life.
        user: name of this client among the users.
        keep: whether the cluster stays when nobody uses it.
        queue_timeout_s: how long to wait in Slurm's queue; ``None`` for as long as it takes.
        say: shows what is waited for; called at every look.
        clock: seconds that only grow.
        pause: waits so many seconds; whether the wait was interrupted.
        held: number of the life that this client may be a user of, to be left if it gives up.
    """

    name: str
    lives: Lives
    queue: SlurmQueue
    script: Callable[[str], str]
    user: str
    keep: bool
    queue_timeout_s: float | None
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], bool] = interrupted.wait
    held: int = 0
    _joined: int = 0
    _submissions: int = 0
    _answered: bool = False
    _began: float = 0.0
    _seen_since: tuple[tuple[int, str], float, float] = ((0, ""), 0.0, 0.0)
    _asked_since: tuple[int, float] = (0, 0.0)
    _ready_since: tuple[str, float] = ("", 0.0)
    _again: str | None = None

    def run(self) -> AllocationLife:
        """The life to use, with this client among its users.

        Raises:
            ClusterError: Slurm does not take the job, Ray does not come up in it, or it waits in
                the queue for too long.
        """
        self._began = self.clock()
        while True:
            try:
                life = self._step()
            except Unanswered as error:
                if not self._answered and self.clock() - self._began >= _FIRST_ANSWER_S:
                    raise ClusterError(
                        f"The cluster {self.name!r} cannot be looked for: {error}"
                    ) from error
                self.say(str(error))
                life = None
            if life is not None:
                return life
            if self.pause(_LOOK_S):
                raise ClusterError(
                    f"Interrupted while waiting for the cluster {self.name!r} on Slurm. Its job is "
                    "taken out of the queue, or ends when it starts, unless another program waits "
                    "for it."
                )

    def _step(self) -> AllocationLife | None:
        life = self.lives.look()
        self._answered = True
        if life is None or self._passes_over(life):
            if life is None or not self._is_asked_for(life):
                self._claim_next(life)
            return None
        if self._joined != life.number:
            self.held = life.number
            self.lives.join(life.number, self.user)
            self._joined = life.number
            return self._step()  # it may have ended meanwhile
        if life.claimed == self.user and not life.sent:
            self._submit(life.number)
        elif life.end is not None or not (life.head and life.token) or self._starts_again(life):
            self._wait(life)
        else:
            if self.keep:
                self.lives.keep(life.number)
            return life
        return None

    def _passes_over(self, life: AllocationLife) -> bool:
        """Whether there is nothing to be had of a life; one that Slurm has no job of is given up.

        Raises:
            ClusterError: this client waited for it, and it has not come up.
        """
        if life.end is not None and not (life.stopped or life.over) and self._starts_again(life):
            return False
        if life.stopped and not life.why_over:
            with contextlib.suppress(ClusterError):  # Slurm may not have heard of it
                self.lives.cancel(life, life.stopped)
        why = life.why_over or life.stopped or self._give_up_lost(life)
        # Of several clients that wait, none submits again what would fail again.
        waited = life.number == self._joined and life.head is None and why != LEFT_EARLY
        if why and waited and (life.job or life.refused) and not self._was_unheard(life):
            log = "" if life.refused or "\n" in why else self.lives.log_end(life)
            raise ClusterError(_why_not_up(self.name, life, why, log))
        return bool(why)

    def _was_unheard(self, life: AllocationLife) -> bool:
        """Whether Slurm's controller was away when the life's job was submitted."""
        away = any(words in life.refused for words in _AWAY)
        return away and self._submissions < _SUBMISSIONS

    def _give_up_lost(self, life: AllocationLife) -> str:
        """Give a life up that Slurm has no job of, and say why; empty while it may have one."""
        # What Slurm said before its job was known proves nothing.
        seen, since, at = self._seen_since
        if seen != (life.number, life.job):
            self._seen_since = (life.number, life.job), self.clock(), time.time()
            return ""
        jobs = self.queue.jobs(after=at)
        if jobs is None:
            return ""
        found = _job_of(life, jobs)
        if found is not None:
            if not life.job:
                self.lives.note_job(life.number, found.number)
            return ""
        if life.job:
            why = f"Slurm has no job {life.job} any more; `sacct -j {life.job}` may say why"
        elif self.clock() - since >= (RENEWAL_S if life.renewed else _CLAIM_S):
            why = "its client ended before Slurm had the job"
        else:
            return ""
        self.lives.give_up(life.number, why)
        return why

    def _starts_again(self, life: AllocationLife) -> bool:
        """Whether Slurm has said that it starts the job of a life again, whose last start is over.

        It takes the nodes away from a life that was ready, which may have told its end.
        """
        if self._ready_since[0] != life.run:
            self._ready_since = life.run, time.time()
        # What Slurm said before that proves nothing. The end is known in whole seconds.
        ended_at = time.time() - max(0.0, life.ended_s - 1)
        after = self._ready_since[1] if life.end is None else ended_at
        jobs = self.queue.jobs(after=after)
        if jobs is not None:  # else it is as it was
            job = _job_of(life, jobs)
            if job is None or job.waits:
                self._again = None if job is None else life.run
        return self._again == life.run

    def _is_asked_for(self, life: AllocationLife) -> bool:
        """Whether the script of a life that has ended is about to submit the next one."""
        if self._asked_since[0] != life.number:
            self._asked_since = life.number, self.clock()
        if not life.is_asked_for(self.clock() - self._asked_since[1]):
            return False
        self.say(f"The allocation of the cluster {self.name!r} is being renewed.")
        return True

    def _claim_next(self, last: AllocationLife | None) -> None:
        """Claim the next life and submit its job, unless another client does."""
        number = 1 if last is None else last.number + 1
        script = self.script(self.lives.path(number))  # one that cannot be made claims nothing
        self.held = number  # whether the answer comes or not
        if self.lives.claim(number, self.user):
            self._joined = number
            self._submit(number, script)

    def _submit(self, number: int, script: str = "") -> None:
        """Submit the job of a life that this client has claimed."""
        if interrupted.is_set():
            return
        self._submissions += 1
        self.say(f"Submitting a job to Slurm for the cluster {self.name!r} …")
        self.lives.submit(number, script or self.script(self.lives.path(number)))

    def _wait(self, life: AllocationLife) -> None:
        """Say what is waited for, and give up when it takes too long."""
        waited = self.clock() - self._began
        has_begun = bool(life.run) and life.end is None
        job = None if has_begun and life.head is None else _job_of(life, self.queue.jobs() or ())
        if job is not None and job.waits:
            what = f"waits in the queue{_why_waits(job)}"
            has_begun = False
        elif life.end is not None:
            what = "is to start again"
        else:
            what = "starts Ray on its nodes" if has_begun or job is not None else "is submitted"
        self.say(f"Slurm job {life.job or '…'} of the cluster {self.name!r} {what}.")
        late = self.queue_timeout_s is not None and waited >= self.queue_timeout_s
        if late and not has_begun:
            raise ClusterError(
                f"Slurm job {life.job} of the cluster {self.name!r} has not started within "
                f"queue_timeout_s={self.queue_timeout_s:g}: it {what}."
            )


def _job_of(life: AllocationLife, jobs: Iterable[QueuedJob]) -> QueuedJob | None:
    """Slurm's job of a life, by its number, or by its folder while nobody knows that."""
    for job in jobs:
        if job.number == life.job or (not life.job and job.folder == life.folder):
            return job
    return None


def _why_not_up(name: str, life: AllocationLife, why: str, log: str) -> str:
    end = "" if why.endswith(".") else "."
    if life.refused:
        return (
            f"Slurm does not take the job of the cluster {name!r}: {why}{end} Correct the "
            "SlurmExecutor."
        )
    told = f"Ray did not come up in Slurm job {life.job} of the cluster {name!r}: {why}{end}"
    return f"{told} {log}" if log else told


def _why_waits(job: QueuedJob) -> str:
    """The reason and the expected start of a job that waits, as the end of a sentence."""
    found = "" if job.reason in _NO_REASON else f": {job.reason}"
    if job.reason in _LASTING:
        return f"{found} ({_LASTING[job.reason]})"
    return found if job.start == "N/A" else f"{found}; Slurm expects it to start at {job.start}"
