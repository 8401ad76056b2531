"""The folder by which the nodes of a cluster talk to each other.

It lies on the file system that all nodes share. Every file has one writer and takes its name when
it is complete, so that a reader sees a whole file or none. Clocks of nodes may differ by minutes:
no time in a file is compared with a reader's clock.

    job                 written by the job's script; who does not see it has another file system
    node.pyz            this program
    token               Ray's token
    command, workdir    the driver, a line for bash, and where it runs; written once env.sh is there
    driver_exit_code    of a driver that the job's script runs itself
    nodes/3.json        what the node with rank 3 says of itself
    beside/             the same for a step with sidecars in another container, which sees no more
    beats/3             a number that grows while the program of rank 3 lives, written in place
    addresses.json      where the head may be reached, for the workers to find out
    head.json           where Ray's GCS and dashboard are, once the head's own raylet is registered
    ready.json          the same, once the cluster is ready
    session             Ray's name of this life of the cluster, of one that a client asked for
    end.json            that the run is over, its exit code, and why
    renews              the job's script submits the allocation that goes on
    exit_code           the number alone, for the job's script
    script_failed       why the job's script cannot go on; the head ends the run then
    env.sh              the variables of a driver, for shells; written once the cluster is ready
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from ..files import write_file

#: Rounds without a new beat of a node after which it is taken for dead. A round is ``BEAT_S`` or
#: longer, by the reader's clock: a file system that stands still makes the rounds longer, not more.
LATE_ROUNDS = 10
#: Seconds from one beat to the next.
BEAT_S = 3.0
#: Exit code of the job when the cluster, not the driver, has failed.
CLUSTER_FAILED = 70


class NodeReport(NamedTuple):
    """What a node says of itself.

    Attributes:
        host: Slurm's name of the node.
        reached: those of the head's addresses that this worker has reached; ``None`` until tried.
        address: that its Ray has; empty until Ray starts there.
        ready: names of its sidecars that are ready.
        failed: why its part of the cluster cannot go on; empty while it can.
        log: path of the log that says more.
        retried: how its last ``ray start`` has ended, once one is tried again; else empty.
        left: whether it has ended everything of its own.
    """

    host: str
    reached: Optional[Tuple[str, ...]] = None
    address: str = ""
    ready: Tuple[str, ...] = ()
    failed: str = ""
    log: str = ""
    retried: str = ""
    left: bool = False


class HeadAddresses(NamedTuple):
    """Where the head may be reached, before it is known which of its networks is the right one.

    Attributes:
        addresses: the likeliest first.
        port: takes connections that find out which of them are reached; 0 when there is one alone.
    """

    addresses: Tuple[str, ...]
    port: int


class HeadAddress(NamedTuple):
    """Where the head's Ray is reached.

    Attributes:
        start: how often the head has started Ray. Workers of an earlier start belong to a Ray that
            is gone, also where the ports are the same.
    """

    address: str
    port: int
    dashboard_port: int
    start: int = 1

    @property
    def gcs(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def dashboard(self) -> str:
        return f"http://{self.address}:{self.dashboard_port}"


class RunEnd(NamedTuple):
    """How the run is over.

    Attributes:
        code: the job's exit code.
        why: in words.
        renews: whether another allocation goes on with what is left.
    """

    code: int
    why: str
    renews: bool = False


class RunFolder:
    """One run's folder, as one node reads and writes it.

    Args:
        path: of the folder.
        rank: of this node.
    """

    def __init__(self, path: str, rank: int) -> None:
        self.path = path
        self._rank = rank
        self._beats = 0

    def is_shared(self) -> bool:
        """Whether this node sees what the job's script has written."""
        return os.path.isfile(self.file("job"))

    def prepare(self) -> None:
        for name in ("nodes", "beats"):
            os.makedirs(self.file(name), exist_ok=True)

    def report(self, report: NodeReport) -> None:
        """Say something of this node, or, in the folder beside, of the sidecars of a step there."""
        self._write(os.path.join("nodes", f"{self._rank}.json"), report._asdict())

    def reports(self) -> Dict[int, NodeReport]:
        """What every node says of itself, by rank."""
        found = self._reports("nodes")
        for rank, beside in self._reports(os.path.join("beside", "nodes")).items():
            if rank in found:
                own = found[rank]
                ready, failed = (*own.ready, *beside.ready), own.failed or beside.failed
                found[rank] = own._replace(ready=ready, failed=failed)
        return found

    def report_of(self, rank: int) -> Optional[NodeReport]:
        """What one node says of itself; ``None`` while it has said nothing."""
        row = self._read(os.path.join("nodes", f"{rank}.json"))
        return None if row is None else _report(row)

    def _reports(self, folder: str) -> Dict[int, NodeReport]:
        found = {}
        for name in self._names(folder):
            rank, _, end = name.partition(".")
            if rank.isdigit() and end == "json":
                row = self._read(os.path.join(folder, name))
                if row is not None:
                    found[int(rank)] = _report(row)
        return found

    def beat(self) -> None:
        """Show that this node's program lives.

        The file is written over, and none is made but the first: a disk that is full takes that. A
        reader looks for another text, and half of one is another one too.
        """
        self._beats += 1
        file = os.open(self.file("beats", str(self._rank)), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, b"%012d" % self._beats, 0)
        finally:
            os.close(file)

    def beats(self, ranks: Set[int]) -> Dict[int, str]:
        """The last beat of these nodes; one that has none is left out."""
        found = {}
        for rank in ranks:
            with contextlib.suppress(OSError), open(self.file("beats", str(rank))) as file:
                found[rank] = file.read()
        return found

    def publish_addresses(self, found: HeadAddresses) -> None:
        """Let the workers find out which of the head's addresses they reach."""
        self._write("addresses.json", found._asdict())

    def addresses(self) -> Optional[HeadAddresses]:
        row = self._read("addresses.json")
        return None if row is None else HeadAddresses(tuple(row["addresses"]), row["port"])

    def publish_head(self, head: HeadAddress) -> None:
        """Let the workers join."""
        self._write("head.json", head._asdict())

    def publish_ready(
        self, head: HeadAddress, env: Mapping[str, str], names: Mapping[str, str]
    ) -> None:
        """Let a driver start. ``ready.json`` comes last: who sees it finds the rest.

        Args:
            head: where the cluster is reached.
            env: variables that a driver needs.
            names: those that NeMo-Run's script has for commands, and does not export.
        """
        import shlex  # no node needs it to start

        lines = ["unset RAY_AUTH_TOKEN"]  # one of another cluster's
        lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        lines += [f"{name}={shlex.quote(value)}" for name, value in names.items()]
        lines += [f"head_node_ip={head.address}", f"ip_head={head.gcs}", ""]
        write_file(self.file("env.sh"), "\n".join(lines))
        self._write("ready.json", head._asdict())

    def publish_session(self, session: str) -> None:
        """Say by which name Ray knows this life of the cluster."""
        write_file(self.file("session"), session)

    def head(self) -> Optional[HeadAddress]:
        row = self._read("head.json")
        return None if row is None else HeadAddress(**row)

    def is_ready(self) -> bool:
        """Whether the cluster has been ready."""
        return os.path.isfile(self.file("ready.json"))

    def end(self) -> Optional[RunEnd]:
        row = self._read("end.json")
        return None if row is None else RunEnd(**row)

    def publish_end(self, end: RunEnd) -> RunEnd:
        """Say that the run is over, unless it has been said; the end that holds."""
        said = self.end()
        if said is not None:
            return said
        if end.renews:
            write_file(self.file("renews"), "")
        self._write("end.json", end._asdict())
        write_file(self.file("exit_code"), f"{end.code}\n")
        return end

    def text(self, name: str) -> Optional[str]:
        """What one of the job's script's files holds; ``None`` while it is not there."""
        self._names("")
        try:
            with open(self.file(name), encoding="utf-8", errors="surrogateescape") as file:
                return file.read()
        except OSError:
            return None

    def file(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    def _names(self, folder: str) -> List[str]:
        """The names of the files in a folder.

        To look at the folder is also how a file that was not there before is seen soon: NFS keeps
        for up to a minute that a file is not there, unless its folder has changed.
        """
        try:
            return os.listdir(self.file(folder))
        except OSError:
            return []

    def _write(self, name: str, row: Dict[str, Any]) -> None:
        write_file(self.file(name), json.dumps(row))

    def _read(self, name: str) -> Optional[Dict[str, Any]]:
        if os.sep not in name:
            self._names("")
        try:
            with open(self.file(name), encoding="utf-8") as file:
                row = json.load(file)
        except (OSError, ValueError):  # not there, or replaced meanwhile: the next look sees it
            return None
        return row if isinstance(row, dict) else None


def _report(row: Mapping[str, Any]) -> NodeReport:
    """A report from a file, where JSON has lists."""
    found: Dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in row.items()
    }
    return NodeReport(**found)


class Pulse:
    """Which nodes have shown no life for long, by this reader's own rounds."""

    def __init__(self) -> None:
        self._last: Dict[int, str] = {}
        self._missed: Dict[int, int] = {}

    def round(self, beats: Dict[int, str], ranks: Set[int]) -> Set[int]:
        """Take one look, at least ``BEAT_S`` after the last one; the nodes taken for dead."""
        for rank in ranks:
            if beats.get(rank) != self._last.get(rank, beats.get(rank)):
                self._missed[rank] = 0
            else:
                self._missed[rank] = self._missed.get(rank, 0) + (rank in self._last)
            if rank in beats:
                self._last[rank] = beats[rank]
        return {rank for rank in ranks if self._missed.get(rank, 0) >= LATE_ROUNDS}
