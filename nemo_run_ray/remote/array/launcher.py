"""Starts the elements of a host in its slots: commands, forked processes, new interpreters."""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Dict, List, Mapping, Optional

from ..hosts.workspace import Workspace
from ..node.supervise import kill
from .element import ATTEMPT, INDEX, RunningElement
from .elements import Target, applied
from .forking import PROGRAM, Forking, result_of
from .progress import LOST_CODE
from .slots import Slots
from .starting import (
    NoRoomOnNode,
    Order,
    blame_node,
    message_of,
    result_path,
    start_words,
)

#: How many processes may die that were to become an element.
_ASKED_MAX = 20
#: Variable of every element: how many there are.
SIZE = "NEMO_RUN_ARRAY_SIZE"


class Launcher:
    """What a host starts elements with.

    Args:
        place: the host's.
        order: the driver's, to prepare.

    Attributes:
        slots: of the host.
        forking: the process that forks elements, if one does.

    Raises:
        OSError: the interpreter cannot be started.
    """

    def __init__(self, place: Workspace, order: Mapping[str, Any]) -> None:
        self._place = place
        self._targets: List[Any] = order["targets"]
        self._runs: str = order["runs"]
        self._count: int = order["count"]
        self._elements = os.path.join(place.root, "nemo_run", order["elements"])
        self.slots = Slots(order["slots"], order["gpus"])
        self.forking: Optional[Forking] = None
        if self._runs == "fork":
            self.forking = Forking(place, self._elements)

    def start(self, order: Order) -> RunningElement:
        """Start an element in a free slot; it has ended already when it cannot be started.

        Raises:
            NoRoomOnNode: it can be started later, or on another node.
        """
        slot, of_slot = self.slots.take()
        try:
            return self._start(order, slot, of_slot)
        except OSError as error:
            self.slots.give_back(slot)
            blame_node(error)
            raise
        except NoRoomOnNode:
            self.slots.give_back(slot)
            raise

    def _start(self, order: Order, slot: int, of_slot: Mapping[str, str]) -> RunningElement:
        env = dict(of_slot)
        env[INDEX], env[SIZE] = str(order.lease.element), str(self._count)
        env[ATTEMPT] = str(order.lease.attempt)
        argv = self._place.role.task.argv if self._runs == "command" else []
        own = applied([Target(*target) for target in self._targets], order.values, argv, env)
        if own.words:
            return start_words(self._place, order.lease, own.words, slot, own.env)
        message = message_of(self._place, order.lease.element, own)
        if self.forking is None:
            env = message.pop("env")
            argv = ["python", PROGRAM, "once", self._elements, json.dumps(message)]
            return start_words(self._place, order.lease, argv, slot, env)
        element = RunningElement(order.lease, slot, 0, None)
        self.forking.ask(element, message)
        return element

    @property
    def can_start(self) -> bool:
        """Whether an element can be started now."""
        return self.slots.is_free and (self.forking is None or self.forking.is_ready)

    def obstacles(self) -> List[str]:
        """What a fork would lack that the imports have made; nothing is forked then."""
        if self.forking is None:
            return []
        found, self.forking.obstacles = self.forking.obstacles, []
        if found:
            self.stop_forking()
        return found

    @property
    def has_unsent(self) -> bool:
        """Whether the process that forks is there and has not read all that it was asked for."""
        return self.forking is not None and self.forking.has_unsent

    def withdraw(self, element: RunningElement) -> bool:
        """Ask no more for an element; false when it may have been begun."""
        return self.forking is not None and self.forking.withdraw(element)

    def stop_forking(self) -> None:
        """End the process that forks elements; those that have begun go on."""
        if self.forking is not None:
            kill(self.forking.pid, signal.SIGTERM)
            self.forking.close()
            self.forking = None

    def row_of(self, element: RunningElement) -> List[Any]:
        """What is noted and reported of an element that has ended; its slot is free again."""
        self.slots.give_back(element.slot)
        row = [*element.lease, element.code, round(element.seconds, 4), element.why()]
        if self._runs != "command":
            result = result_of(result_path(self._place, element.lease.element))
            row.append(result if element.code == 0 else None)
        return row

    def heard(self, running: Dict[int, RunningElement]) -> None:
        """Read what the process says that forks elements, and note it of those that run.

        Args:
            running: by process id, which is negative until it is known.
        """
        forking = self.forking
        if forking is None:
            return
        forking.read()
        for element, pid in forking.begun:
            if running.pop(element.pid, None) is not None:
                element.has_begun(pid)
                running[pid] = element
        for pid, code in forking.ended:
            if pid in running:
                running[pid].ended(code)
        forking.begun, forking.ended = [], []

    def has_died(self, pid: int, code: int, running: Dict[int, RunningElement]) -> bool:
        """Whether a process that was collected has no exit code of an element to tell.

        When it is the one that forks, another one is started. Its elements have this process as
        their parent now.

        Raises:
            CannotPrepare: it ends again and again before an element has begun.
        """
        if self.forking is None or pid != self.forking.pid:
            return False
        self.heard(running)
        for element in running.values():
            is_here = element.pid < 0 or os.path.exists(f"/proc/{element.pid}")
            if element.code is None and not is_here:
                element.ended(LOST_CODE)
                element.is_lost = True
        try:
            self.forking.has_died(code)
        finally:
            self.heard(running)  # of what it forked last: it must not be taken for an orphan
        return True

    def ask_again(self, element: RunningElement, running: Dict[int, RunningElement]) -> None:
        """An element's output has ended before a process said that it is the element's."""
        self.heard(running)
        if element.pid >= 0:
            return
        if self.forking is None:  # given up meanwhile: another process is to run it
            element.ended(LOST_CODE)
            element.is_lost = True
        elif element.asked >= _ASKED_MAX:
            element.words = f"each of {element.asked} processes has died before the element began"
            element.ended(LOST_CODE)
        else:
            del running[element.pid]
            self.forking.ask_again(element)
            running[element.pid] = element
