"""What is to be said of one look at a cluster, line by line: pure."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import Enum

from nemo_run_ray.dashboard.http import UPLOAD_MAX_BYTES
from nemo_run_ray.dashboard.state import Inspection
from nemo_run_ray.fields import version_of
from nemo_run_ray.remote.dispatch.dispatcher import SUPERVISOR_BYTES, default_limit
from nemo_run_ray.remote.fit import (
    Node,
    ResourceRequest,
    amount_of,
    amount_text,
    amounts_text,
    best,
    fits,
    free_text,
    has_room,
    hosts,
    labelled,
    why_not,
)

#: Seconds by which clocks may differ before durations in tables mislead.
_SKEW_MAX_S = 5.0
#: Part of a disk beyond which Ray writes no objects to it, and bytes without which no archive fits.
_DISK_FULL, _DISK_MIN_BYTES = 0.95, 2**30
_CLOSED = "The cluster does not tell: its state API is closed or did not answer in time."
_NOT_TOLD = "It is not known: see the line about nodes."
_FIT = (
    "Ask for what nodes of this cluster have, or add such a node. Where nodes are started on "
    "demand, launch with preflight=False."
)
_OPEN_IT = "Let GET /nodes and GET /api/v0/… through to Ray's dashboard."


class CheckState(str, Enum):
    """What a line says of what it is about."""

    #: It was looked at and fits.
    OK = "ok"
    #: It works, or may work, with what the sentence says.
    WARNING = "warning"
    #: It cannot work.
    BROKEN = "broken"
    #: The cluster does not tell.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class CheckRow:
    """One line.

    Attributes:
        check: what it is about.
        state: what it says of it.
        message: the same in a sentence.
        next_step: what to do; empty when there is nothing to do.
    """

    check: str
    state: CheckState
    message: str
    next_step: str = ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "state": self.state.value}


class _Lines:
    """The lines about one look, in the order in which they are asked for.

    Args:
        found: the look.
        is_strict: what is not told of nodes, labels and resources counts as broken.

    Attributes:
        rows: the lines so far.
    """

    def __init__(self, found: Inspection, is_strict: bool) -> None:
        self._found = found
        self._is_strict = is_strict
        self.rows: list[CheckRow] = []

    def _ok(self, what: str, message: str) -> None:
        self._add(what, CheckState.OK, message)

    def _unknown(self, what: str, message: str, step: str) -> None:
        self._add(what, CheckState.UNKNOWN, message, step)

    def _broken(self, what: str, message: str, step: str = "") -> None:
        self._add(what, CheckState.BROKEN, message, step)

    def _add(self, what: str, state: CheckState, message: str, step: str = "") -> None:
        self.rows.append(CheckRow(what, state, message, step))


class _OfHead(_Lines):
    """The lines about the head and its dashboard."""

    def head_memory(self, max_in_flight: int | None) -> None:
        """The head's memory against the jobs that may run at once."""
        what = "memory of the head"
        head = self._head()
        if head is None or head.memory is None:
            self._unknown(what, "The dashboard does not tell.", "")
            return
        total, available = head.memory
        each = f"{SUPERVISOR_BYTES / 10**6:.0f} MB for each job"
        if max_in_flight is None:
            limit = default_limit(int(total))
            self._ok(what, f"It suffices for {limit} jobs at once, the limit of a dispatcher.")
            return
        wanted = max_in_flight * SUPERVISOR_BYTES
        asks = f"max_in_flight is {max_in_flight}: {_gib(wanted)}, {each}"
        step = f"Lower max_in_flight to {max(1, int(available / SUPERVISOR_BYTES))}."
        if wanted > total:
            self._broken(what, f"{asks}; the head has {_gib(total)}.", step)
        elif wanted > available:
            has = f"the head has {_gib(available)} available of {_gib(total)}"
            self._add(what, CheckState.WARNING, f"{asks}; {has}.", step)
        else:
            self._ok(what, f"{asks}; the head has {_gib(available)} available.")

    def package_size(self) -> None:
        """What the dashboard takes. Code that is larger is refused when it is packed."""
        message = (
            f"Ray's dashboard takes {UPLOAD_MAX_BYTES / 1024**2:.0f} MiB in one request; a proxy "
            "before it may take less, and neither tells its limit."
        )
        self._unknown("package size", message, "")

    def clock(self) -> None:
        """The cluster's clock against this machine's."""
        skew_s = self._found.skew_s
        if skew_s is None:
            self._unknown("clock", "The dashboard does not tell its time.", "")
        elif abs(skew_s) > _SKEW_MAX_S:
            order = "ahead of" if skew_s > 0 else "behind"
            self._add(
                "clock",
                CheckState.WARNING,
                f"The cluster's clock is {abs(skew_s):.0f} s {order} this machine's; durations in "
                "`status` and in timelines are wrong by that.",
                "Set both by NTP.",
            )
        else:
            self._ok("clock", f"The two clocks differ by less than {_SKEW_MAX_S:.0f} s.")

    def disk(self) -> None:
        """The disk of the head with Ray's files: archives, logs, spilled objects."""
        what = "disk of the head"
        head = self._head()
        if head is None or head.disk is None:
            self._unknown(what, "The dashboard does not tell.", "")
            return
        path, free, in_use = head.disk
        used = in_use / max(1.0, in_use + free)
        has = f"Ray's files are in {path}, with {_gib(free)} free"
        step = "Remove files of old sessions there, or give Ray another --temp-dir."
        if free < _DISK_MIN_BYTES:
            self._broken(what, f"{has}; archives and logs need more.", step)
        elif used > _DISK_FULL:
            self._add(what, CheckState.WARNING, f"{has}; it is {used:.0%} full.", step)
        else:
            self._ok(what, f"{has}.")

    def _head(self) -> Node | None:
        return next((node for node in self._found.nodes or () if node.is_head), None)


class CheckRows(_OfHead):
    """All lines about one look, see ``_Lines``."""

    # ------------------------------------------------------------------ the front

    def address(self, address: str | None) -> None:
        """The file must name a cluster that exists."""
        if address is None:
            message = "The cluster file names no address, and preflight.require_address is set."
            self._broken("address", message, "Give cluster.address in the file.")
        else:
            self._ok("address", f"The cluster file names {address}.")

    def front(self) -> bool:
        """Whether it can be asked at all, and takes the credentials."""
        found = self._found
        if found.unreachable:
            self._broken("dashboard", found.unreachable)
            return False
        self._ok("dashboard", f"{found.url} answers.")
        if found.unauthorised:
            self._broken("credentials", found.unauthorised)
            return False
        if found.jobs is None:
            message = "The job table did not answer in time, which would show that it takes them."
            self._unknown("credentials", message, "Try again later; the table may be long.")
        else:
            known = "it knows {} job(s), {} of them pending or running".format(*found.jobs)
            self._ok("credentials", f"It takes them, and {known}.")
        return True

    def ray(
        self,
        since: tuple[int, int] | None,
        labels_since: tuple[int, int],
        alone_since: tuple[int, int],
    ) -> None:
        """Ray's version against what the tasks use.

        Args:
            since: first version that can do it; ``None`` when any can.
            labels_since: first version that knows label selectors.
            alone_since: first version that knows the label selector of a task alone; before it, a
                task that has one runs through the driver of a group.
        """
        version = self._found.version
        runs = f"The cluster runs Ray {version}"
        if not version:
            self._unknown("Ray", "The cluster does not tell its version of Ray.", "")
        elif since is not None and version_of(version) < since:
            self._broken(
                "Ray",
                f"{runs}; the label selectors in use need {_dotted(since)} or newer.",
                "Upgrade it, or reserve a custom resource of the nodes (resources_per_node).",
            )
        elif version_of(version) < labels_since:
            self._add(
                "Ray",
                CheckState.WARNING,
                f"{runs}; label selectors need {_dotted(labels_since)} or newer.",
                "Upgrade it before tasks choose their nodes by labels.",
            )
        elif version_of(version) < alone_since:
            driver = "a task with a label selector runs through the driver of a group"
            self._ok("Ray", f"{runs}; before {_dotted(alone_since)} {driver}.")
        else:
            self._ok("Ray", f"{runs}.")

    def python(self, client: str) -> None:
        """Python on the head against the client's, by which Partials are made."""
        there = self._found.python
        if not there:
            self._unknown("Python", "The cluster does not tell its version of Python.", "")
        elif version_of(there) != version_of(client):
            self._add(
                "Python",
                CheckState.WARNING,
                f"The head has Python {_minor(there)}, this client {_minor(client)}; a run.Partial "
                "is made by one and run by the other.",
                "Use the same minor version on both sides, or name one: RayExecutor(python=…).",
            )
        else:
            self._ok("Python", f"The head and this client have Python {_minor(there)}.")

    # ------------------------------------------------------------------ nodes

    def nodes(self) -> None:
        """The living nodes and what they have together."""
        nodes = self._told("nodes")
        if nodes is None:
            return
        if not nodes:
            self._broken("nodes", "No node lives.", "Look at the cluster's nodes in its dashboard.")
            return
        total: dict[str, float] = {}
        for node in nodes:
            for name, amount in node.resources.items():
                total[name] = total.get(name, 0.0) + amount
        self._ok("nodes", f"{len(nodes)} node(s) live, with {amounts_text(total)} in all.")

    def label(self, key: str, value: str) -> None:
        """A label that some node must have."""
        what = f"label {key}={value}"
        nodes = self._told(what)
        if nodes is None:
            return
        count = len(labelled({key: value}, nodes))
        if count:
            self._ok(what, f"{count} of {len(nodes)} node(s) have it.")
        else:
            never = why_not(ResourceRequest(selector={key: value}), nodes)
            is_plain = re.fullmatch(r"[\w.-]+", value)
            step = f"Start a node with it: ray start --labels={key}={value} …" if is_plain else ""
            self._broken(what, _sentence(never), step)

    def resource(self, name: str, least: float) -> None:
        """An amount that the cluster must have in all."""
        what = f"total {name}"
        nodes = self._told(what)
        if nodes is None:
            return
        total = sum(amount_of(node.resources, name) for node in nodes)
        has = f"The cluster has {amount_text(name, total)} in all"
        wanted = f"wanted are {amount_text(name, least)}"
        if fits({name: least}, {name: total}):
            self._ok(what, f"{has}; {wanted}.")
        else:
            self._broken(what, f"{has}; {wanted}.", "Add nodes, or lower preflight.min_resources.")

    def room(self, what: str, ask: ResourceRequest) -> None:
        """Whether one replica can ever be placed, and whether it can now."""
        nodes = self._told(what)
        if nodes is None:
            return
        asks = f"One replica asks for {ask}"
        never = why_not(ask, nodes)
        if never:
            self._broken(what, f"{asks}; no node can ever take it: {never}.", _FIT)
            return
        can = hosts(ask, nodes)
        now = [node for node in can if has_room(ask, node)]
        node = best(ask, nodes)
        if now or node is None:
            has = f"{len(can)} node(s) can take it, {len(now)} of them now"
            self._ok(what, f"{asks}; {has}.")
        elif not self._found.is_free_told:
            message = f"{asks}; {len(can)} node(s) can take it, and what is free is not told."
            self._unknown(what, message, _OPEN_IT)
        else:
            has = f"{len(can)} node(s) can take it, and none has room now"
            most = f"the best, {node.host}, has {free_text(ask, node)}"
            step = "It will wait; `nemo-run-ray status` says who holds the room."
            self._add(what, CheckState.WARNING, f"{asks}; {has}: {most}.", step)

    def elsewhere(self, what: str, address: str) -> None:
        """Nodes of another dashboard, which was not asked."""
        message = f"Its nodes belong to {address}, which was not looked at."
        self._unknown(what, message, f"nemo-run-ray doctor --address {address}")

    def _told(self, what: str) -> tuple[Node, ...] | None:
        """The nodes; a line says so when they are not told."""
        if self._found.nodes is None:
            state = CheckState.BROKEN if self._is_strict else CheckState.UNKNOWN
            is_first = what == "nodes"
            self._add(what, state, *((_CLOSED, _OPEN_IT) if is_first else (_NOT_TOLD, "")))
        return self._found.nodes


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
