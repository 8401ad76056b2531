"""What every node does: report, beat, start Ray and its sidecars, watch them, end them."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Dict, List, Mapping, Optional, Set

from ..node.output import say
from ..node.supervise import Runner, describe_exit, explain_start
from .commands import Command, Commands, tail
from .log_copies import JOB_LOGS, LogCopies, keep_job_logs
from .network import Ports
from .ray_start import ray_environment, with_pre_start
from .run_folder import BEAT_S, CLUSTER_FAILED, NodeReport, Pulse, RunEnd, RunFolder
from .settings import Settings, WrongSetting
from .sidecars import Sidecars
from .temp_dir import make_private, remove_stale

#: Seconds of one turn of the loop.
TURN_S = 0.25
#: Seconds between two looks at whether the run is over.
LOOK_S = 1.0
#: From SIGTERM to SIGKILL. Slurm itself gives 30 s.
GRACE_S = 10.0
#: Seconds from the end of a ``ray start`` to the next one.
_AGAIN_S = 5.0
#: Seconds that the head waits at the end until the others have ended what is theirs. The job's
#: script waits for the head 5 s longer.
_LEAVE_S = 20.0
_NOT_FOUND = 127


class NodeProgram(ABC):
    """One node's part in the cluster: one loop, no thread.

    Args:
        settings: of this node.
        folder: that all nodes share.
        commands: starts and ends processes here.
        env: of the job.
    """

    def __init__(
        self, settings: Settings, folder: RunFolder, commands: Commands, env: Mapping[str, str]
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.commands = commands
        self.env = env
        self.report = NodeReport(host=settings.host, log=settings.node_log)
        self._said: Optional[NodeReport] = None
        self.ports = Ports(settings.ports, settings.is_head, _salt(settings.job))
        self.ray: Optional[Command] = None
        self.sidecars = Sidecars(settings, commands, self.ray_env())
        #: Nodes that show no life, of those that are ``watched``.
        self.dead: Set[int] = set()
        self._starts = 0
        self._starts_at = float("inf")  # the next try
        self._claim: Optional[int] = None  # of Ray's folder here, as long as this process lives
        self._pulse = Pulse()
        self._copies = LogCopies(
            settings.temp_dir, settings.ray_logs, settings.log_sync_s, self.commands
        )
        self._leaves_at = float("inf")
        self._beaten_at = self._asked_over_at = float("-inf")

    @abstractmethod
    def greet(self) -> None:
        """Say for the first time that this node is there."""

    @abstractmethod
    def step(self) -> Optional[RunEnd]:
        """One turn of the loop; the end when the run is over."""

    @abstractmethod
    def words(self) -> List[str]:
        """``ray start`` with all its options, for the next try."""

    @abstractmethod
    def failed(self, why: str) -> RunEnd:
        """How the run ends for this node, which cannot go on."""

    @abstractmethod
    def watched(self) -> Set[int]:
        """The ranks whose life this node depends on."""

    def run(self, runner: Runner) -> int:
        """Take part until the run is over; the exit code of this node's task."""
        end = RunEnd(CLUSTER_FAILED, f"node {self.settings.host}: the node program has failed")
        try:
            end = self._begin() or self._loop(runner)
        except WrongSetting as error:
            end = self.failed(str(error))
        except OSError as error:
            end = self.failed(f"{type(error).__name__}: {error}")
        finally:
            code = self.leave(end)
        return code

    def leave(self, end: RunEnd) -> int:
        """End everything of this node, and say so; the exit code of its task."""
        self._leaves_at = time.monotonic() + _LEAVE_S
        self.commands.stop(GRACE_S)
        self.before_removal()
        if not self.env.get("RAY_TEMP_DIR"):
            import shutil  # no node needs it to start

            shutil.rmtree(os.path.dirname(self.settings.temp_dir), ignore_errors=True)
        self.publish(left=True)
        return 0

    def before_removal(self) -> None:
        """Keep what a user wants of Ray's folder."""
        if self.settings.life:
            keep_job_logs(self.settings.temp_dir, self.folder.file(JOB_LOGS))
        with suppress(OSError):
            self._copies.finish(self._leaves_at - time.monotonic())

    def publish(self, **fields: Any) -> None:
        """Say something new of this node; what cannot be written now is written at a later turn."""
        self.report = self.report._replace(**fields)
        if self.report != self._said:
            with suppress(OSError):
                self.folder.report(self.report)
                self._said = self.report

    def say(self, text: str) -> None:
        """Write a line into the job's own log."""
        say(f"{self.settings.host}: {text}")

    def ray_env(self) -> Dict[str, str]:
        """The environment of Ray on this node, and of what runs beside it."""
        return ray_environment(self.env, self.settings, self.folder.file("token"))

    def start_ray(self) -> None:
        """Start Ray on this node.

        Raises:
            WrongSetting: there is no Ray, or no port for it.
        """
        self._starts += 1
        self._starts_at = float("inf")
        ray, env = self.words(), self.ray_env()
        words = with_pre_start(ray, self.settings.pre_start, env)
        try:
            self.ray = self.commands.start("ray start", words, self.settings.node_log, env)
        except FileNotFoundError as error:
            raise WrongSetting(explain_start(words, env, os.getcwd(), error)[1]) from error

    def watch_ray(self) -> Optional[str]:
        """Why Ray is over on this node; ``None`` while it runs or is started again."""
        if self.ray is None or self.ray.exit_code is None or self.folder.end() is not None:
            return None  # once the run is over, Ray has a reason to end
        how, log = describe_exit(self.ray.exit_code), self.settings.node_log
        if not self.folder.is_ready() and self.ray.exit_code != _NOT_FOUND:
            self._retry(how)
            return None
        if self.ray.exit_code == _NOT_FOUND:
            how = f"{how}: there is no program 'ray', or none that a command before it needs"
        return f"Ray has ended: {how}. Its log, {log}, ends with:{tail(log)}"

    def _retry(self, how: str) -> None:
        """Start Ray again after a pause.

        On a busy machine `ray start` gives its own processes up after 15 to 30 s, as often as it is
        tried. So no number of tries ends it, but the time in which the cluster must be ready.
        """
        if self._starts_at == float("inf"):
            self.say(f"`ray start` has ended: {how}. It is started again.")
            log = self.settings.node_log
            ends = f"try {self._starts} of `ray start` has ended: {how}. Its log, {log}, ends with:"
            self.publish(retried=ends + tail(log))
            self.commands.stop(GRACE_S, keep=self.sidecars.running)
            self._starts_at = time.monotonic() + _AGAIN_S
        elif time.monotonic() >= self._starts_at:
            self.start_ray()

    def _begin(self) -> Optional[RunEnd]:
        """Find out whether this node can take part."""
        if not await_shared(self.settings, self.folder):
            return self.failed(
                f"the folder {self.settings.run} is not shared: this node has not seen within "
                f"{self.settings.share_limit_s:g} s what the job's script has written there"
            )
        remove_stale(self.settings.job)
        if not self.env.get("RAY_TEMP_DIR"):
            self._claim = make_private(os.path.dirname(self.settings.temp_dir))
        os.makedirs(self.settings.temp_dir, exist_ok=True)
        self.folder.beat()
        self.greet()
        self.sidecars.start()
        return None

    def _loop(self, runner: Runner) -> RunEnd:
        while True:
            order = runner.order()
            if order is not None:
                return self._cancelled(order)
            self._beat()
            self.commands.reap()
            why = self.sidecars.step()
            if why is not None:
                return self.failed(why)
            self.publish(ready=self.sidecars.ready)
            self._copies.step()
            end = self._over() or self.step()
            if end is not None:
                return end
            time.sleep(TURN_S)

    def _cancelled(self, order: bytes) -> RunEnd:
        """Slurm, or another process, has told this program to end."""
        if not order:
            return self.failed("the program that guards this node's processes was killed")
        at = self.settings.ends_at
        if at is not None and time.time() >= at - 1:
            return RunEnd(143, "Slurm's time limit has ended the job")
        return RunEnd(143, "the job was cancelled")

    def _over(self) -> Optional[RunEnd]:
        if time.monotonic() - self._asked_over_at < LOOK_S:
            return None
        self._asked_over_at = time.monotonic()
        return self.folder.end()

    def _beat(self) -> None:
        if time.monotonic() - self._beaten_at < BEAT_S:
            return
        self._beaten_at = time.monotonic()
        with suppress(OSError):  # one that fails for long is missed by the others
            self.folder.beat()
        watched = self.watched()
        self.dead = self._pulse.round(self.folder.beats(watched), watched)


def await_shared(settings: Settings, folder: RunFolder) -> bool:
    """Wait until this node sees what the job's script has written; whether it does in time."""
    deadline = time.monotonic() + settings.share_limit_s
    while not folder.is_shared():
        if time.monotonic() >= deadline:
            return False
        time.sleep(TURN_S)
    folder.prepare()
    os.makedirs(settings.logs, exist_ok=True)
    return True


def _salt(job: str) -> int:
    number = job.partition(".")[0]
    return int(number) if number.isdigit() else 0
