"""The relays of an actor and the processes behind them, without Ray."""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest


def wait(question: Callable[[], object], within_s: float = 10) -> object:
    deadline = time.monotonic() + within_s
    while not (answer := question()):
        if time.monotonic() > deadline:
            pytest.fail(f"not true within {within_s} s")
        time.sleep(0.01)
    return answer


def holding(text: str, *kinds: str) -> set[int]:
    """Living processes with the text in their ``cmdline`` or ``environ``, or one of them."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for kind in kinds or ("environ", "cmdline"):
            with contextlib.suppress(OSError):  # it ended while we looked
                if text.encode() in Path(f"/proc/{pid}/{kind}").read_bytes():
                    found.add(int(pid))
    return {pid for pid in found if not is_zombie(pid)}


def is_zombie(pid: int) -> bool:
    """Or gone altogether."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


class Relayed:
    """What a driver holds of one process, and the relay of its actor."""

    def __init__(self, relay: Any, folder: Path, place: tuple[str, ...]) -> None:
        self.relay = relay
        self.folder = folder
        self.tag, self.run_dir = place[:2]
        self.reports: list[dict[str, Any]] = []
        self._looked_at = 0
        self._orders = 0

    @property
    def root(self) -> Path:
        """Its run directory."""
        return Path(tempfile.gettempdir()) / f"nemo_run_{os.getuid()}" / self.run_dir

    @property
    def text(self) -> str:
        return "".join(one["text"] for one in self.reports if one["at"] == "text")

    def kinds(self) -> list[str]:
        return [one["at"] for one in self.reports if one["at"] != "text"]

    def order(self, order: Mapping[str, Any]) -> None:
        self.relay.order(self._orders, dict(order))
        self._orders += 1

    def ask(self, seen: int, patience_s: float) -> tuple[int, list[str]]:
        """The number of the first report that is there, and the reports as they came."""
        return self.relay.pull(seen, patience_s, 0.02)

    def pull(self, patience_s: float = 0.1) -> None:
        first, reports = self.ask(len(self.reports), patience_s)
        for number, report in enumerate(reports, start=first):
            if number == len(self.reports):
                self.reports.append(json.loads(report))

    def drain(self) -> None:
        """Forget what is there, so that nothing waits for a pull."""
        seen = 0
        while True:
            first, reports = self.ask(seen, 0.0)
            if not reports:
                return
            seen = first + len(reports)

    def until(self, kind: str, within_s: float = 10) -> dict[str, Any]:
        """The next report of a kind."""
        deadline = time.monotonic() + within_s
        while True:
            while self._looked_at < len(self.reports):
                self._looked_at += 1
                if self.reports[self._looked_at - 1]["at"] == kind:
                    return self.reports[self._looked_at - 1]
            if time.monotonic() > deadline:
                pytest.fail(f"no {kind!r} within {within_s} s; there is {self.reports[-20:]}")
            self.pull()

    def says(self, text: str) -> None:
        deadline = time.monotonic() + 10
        while text not in self.text:
            if time.monotonic() > deadline:
                pytest.fail(f"{text!r} is not said; there is {self.reports[-20:]}")
            self.pull()
