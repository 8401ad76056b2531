"""One replica of a role on its node: ports, processes, readiness, output, end.

``hosts/relay.py`` says how it is started, and why nothing outlives it.

Orders and reports are JSON, one a line. Orders: ``prepare``, ``start``, ``end``. Reports:
``prepared``, ``unprepared``, ``waiting``, ``ready``, ``unready``, ``exited``, ``text``, ``failed``.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any, NoReturn, Sequence

from ..hosts.relay import Channel, become_supervised
from ..hosts.workspace import Workspace
from ..node.output import Lines
from ..node.probe import Probing
from ..node.supervise import Child, Supervisor
from ..spec import Json


def main(argv: Sequence[str]) -> NoReturn:
    """Become the process of a replica; ``argv`` is the package's folder and the socket's number."""
    become_supervised(argv, ReplicaProcess)


class ReplicaProcess:
    """Everything of one replica, in one loop without threads."""

    def __init__(self, channel: Channel, folder: str):
        self._channel = channel
        self._folder = folder
        self._children = Supervisor()
        self._workspace: Any = None  # a ``Workspace`` from the first order on
        self._index = 0
        self._probing: Probing | None = None

    def serve(self) -> None:
        """Serve until the actor is gone."""
        channel, children = self._channel, self._children
        obey = {"prepare": self._prepare, "start": self._start, "end": self._end}
        while True:
            writing = [channel] if channel.unsent else []
            idle_s = 0.2 if self._probing else 60.0
            if channel in children.wait([channel], writing, idle_s, not channel.is_full):
                orders = channel.orders()
                if orders is None:
                    return
                for order in orders:
                    obey[order["do"]](order)
            if children.children:
                is_over = children.step(self._workspace.role.task.grace_s)
                if children.are_ending or is_over:
                    self._stop_probing()
                if is_over:
                    self._report_end()
                elif self._probing:
                    answer, waits = self._probing.step(), self._probing.waiting()
                    if answer is not None:
                        self._probing = None
                        channel.report("unready" if answer else "ready", words=answer)
                    elif waits is not None:
                        channel.report("waiting", words=waits)
            channel.send()

    def abandon(self) -> None:
        """Kill what runs, now, and remove the folders."""
        self._children.stop(0.0)
        if self._workspace:
            self._workspace.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ orders

    def _prepare(self, order: Json) -> None:
        self._workspace, self._index = Workspace(order), order["index"]
        try:
            self._workspace.prepare(self._folder)
        except (OSError, ValueError) as error:
            self._channel.report("unprepared", words=str(error))
            return
        self._channel.report("prepared", ports=self._workspace.ports)

    def _start(self, order: Json) -> None:
        place: Workspace = self._workspace
        role = place.role
        place.begin(order["env"])
        for local_rank in range(role.processes):
            rank = self._index * role.processes + local_rank
            variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)} if role.ranked else {}
            take = partial(self._report_output, Lines())
            child = self._children.add(Child(*place.command(role.task.argv, variables), take))
            if child.code is not None:
                return
        if not role.ready:
            self._channel.report("ready")
        else:
            probe, env, cwd = place.probe_command(role.ready)
            self._probing = Probing(probe, place.address, place.ports, env, cwd)

    def _report_output(self, lines: Lines, data: bytes) -> None:
        text = lines.take(data)
        if text:
            self._channel.report("text", text=text)

    def _end(self, order: Json) -> None:
        if self._children.children and not self._children.are_ending:
            self._stop_probing()  # what it starts from now on would miss the signal
            self._children.end(self._workspace.role.task.grace_s)

    # ------------------------------------------------------------------ the end

    def _stop_probing(self) -> None:
        if self._probing:
            self._probing.close()
            self._probing = None

    def _report_end(self) -> None:
        children, place = self._children.children, self._workspace
        failed = [child for child in children if child.code] or children[:1]
        first = min(failed, key=lambda child: child.ended_at)
        words = first.ending
        if first.code and len(children) > 1:
            words = f"process {children.index(first)}: {words}"
        if place.role.task.keep_run_dir:
            text = f"nemo_run_ray: the run directory is kept: {place.root}\n"
            self._channel.report("text", text=text)
        self._channel.report("exited", code=first.code, words=words)
        self._children.clear()
