"""A worker: waits until the head's Ray is there, joins it, and stays while the head lives."""

from __future__ import annotations

import time
from typing import Any, List, Optional, Set

from .network import reached, way_to
from .node import GRACE_S, LOOK_S, NodeProgram
from .ray_start import worker_words
from .run_folder import CLUSTER_FAILED, HeadAddress, RunEnd

#: Seconds in which a worker that reaches no address of the head tries again.
_GREETING_S = 30.0


class Worker(NodeProgram):
    """A node that is not the head."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._head: Optional[HeadAddress] = None
        self._address = ""
        self._was_ready = False
        self._began = time.monotonic()
        self._looked_at = float("-inf")

    def greet(self) -> None:
        self.publish()

    def step(self) -> Optional[RunEnd]:
        if 0 in self.dead:
            why = f"the head's program writes nothing into {self.settings.run} any more"
            self.say(f"{why}; this node ends what is its own.")
            return RunEnd(CLUSTER_FAILED, why)
        if self._head is None:
            self._join()
            late = time.monotonic() - self._began >= self.settings.start_limit_s
            # A head that has begun gives the start up itself, and knows why.
            if self._head is None and late and self.folder.report_of(0) is None:
                return self.failed(f"no head was there within {self.settings.start_limit_s:g} s")
            return None
        self._follow()
        broken = self.watch_ray()
        return None if broken is None else self.failed(broken)

    def words(self) -> List[str]:
        assert self._head is not None
        return worker_words(self.settings, self._head, self._address, self.ports.choose())

    def failed(self, why: str) -> RunEnd:
        """Tell the head, which decides; without a shared folder only the job's own log is left."""
        end = self.folder.end()
        if end is not None:  # the head has left, and Ray with it
            return end
        self.say(why)
        self.publish(failed=why)
        return RunEnd(CLUSTER_FAILED, why)

    def leave(self, end: RunEnd) -> int:
        if self.folder.end() is None and not self.report.failed:
            self.publish(failed=end.why)  # the others go on: they must know why it does not
        return super().leave(end)

    def watched(self) -> Set[int]:
        return {0}

    def _join(self) -> None:
        if self.report.reached is None:
            head = self.folder.addresses()
            if head is not None and head.port:
                found = reached(head.addresses, head.port)
                if found or time.monotonic() - self._began >= _GREETING_S:
                    self.publish(reached=tuple(found))
        self._head = self.folder.head()
        if self._head is not None:
            self._address = way_to(self._head.address)
            self.publish(address=self._address)
            self.start_ray()

    def _follow(self) -> None:
        """Join again where the head has started its Ray again; a cluster that was ready never does.

        What waits for the Ray before, or is joined to it, would not notice for minutes.
        """
        if time.monotonic() - self._looked_at < LOOK_S or self._was_ready:
            return
        self._looked_at = time.monotonic()
        self._was_ready = self.folder.is_ready()
        head = self.folder.head()
        if head is not None and head != self._head:
            self.say("The head has started Ray again, and so does this node.")
            self._head = head
            self.commands.stop(GRACE_S, keep=self.sidecars.running)
            self.start_ray()
