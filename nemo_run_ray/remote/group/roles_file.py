"""What the driver knows of a group's roles, in a file beside the job's log, for ``status``.

Ray's log API serves it. Nothing is decided by it.
"""

from __future__ import annotations

import json
import os
from typing import List, Mapping, Optional

from ..files import write_file
from ..fit import Node
from ..hosts.actors import ReplicaId
from ..rows import GroupRows, ReplicaRow
from ..states import Life
from .machine import Group


def file_name(submission_id: str) -> str:
    """Name of the file in Ray's folder of logs."""
    return f"nemo_run_ray-{submission_id}.json"


class RolesFile:
    """The file, written anew at every change; absent when the output goes to no file of Ray's."""

    def __init__(self, submission_id: str) -> None:
        log = os.readlink("/proc/self/fd/1")
        self._path: Optional[str] = None
        if os.path.basename(log) == f"job-driver-{submission_id}.log":
            self._path = os.path.join(os.path.dirname(log), file_name(submission_id))
        self._last = ""

    def write(self, group: Group, nodes: Mapping[ReplicaId, Node], waits_for: str) -> None:
        """Show where the group is.

        Args:
            group: the state.
            nodes: the node of every replica that has one.
            waits_for: why there is no room yet, in words; empty when there is.
        """
        phase = group.phase.value
        values: GroupRows = {
            "phase": phase,
            "waits_for_room": waits_for,
            "roles": _rows(group, nodes),
        }
        text = json.dumps(values)
        if self._path is None or text == self._last:
            return
        try:
            write_file(self._path, text)
        except OSError:  # a full disk: the group goes on, and its roles are not shown
            return
        self._last = text


def _rows(group: Group, nodes: Mapping[ReplicaId, Node]) -> List[ReplicaRow]:
    """One row for every replica."""
    rows: List[ReplicaRow] = []
    for state in group.replicas:
        node = nodes.get(state.replica_id)
        rows.append(
            {
                "role": state.role,
                "replica": state.index,
                "service": state.service,
                "state": state.life.value,
                "exit_code": state.code,
                "waits_for": state.waits_for if state.life is Life.STARTED else "",
                "node": node.node_id if node else "",
                "host": node.host if node else "",
                "address": node.address if node else "",
            }
        )
    return rows
