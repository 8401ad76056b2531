"""The folder through which the nodes of a cluster communicate, and NeMo-Run's marker files.

It lies on the file system that all nodes share. Every file has one writer and takes its name when
it is complete, so that a reader sees a whole file or none. Clocks of nodes may differ by minutes:
no time in a file is compared with a reader's clock. The folder above it, of an allocation, is
explained in ``clusters/slurm/__init__.py``. The files of one run, a start of Slurm's job::

    job                 written by the job's script; a node that does not see it shares no folder
    node.pyz            this program
    token               Ray's token
    command, workdir    the driver, a line for bash, and its folder; written after env.sh
    driver_exit_code    of a driver that the job's script runs itself
    nodes/3.json        the report of the node with rank 3
    sandbox.err         messages of the srun whose step runs the sandbox in another container
    beats/3             a number that grows while the program of rank 3 lives, written in place
    ready.json          addresses of Ray's GCS and dashboard, once the cluster is ready
    session             Ray's name of its session, in a named allocation
    job_logs/           the logs of jobs, which outlive the nodes
    jobs.json           Ray's job table, in a named allocation; see ``../carried_over.py``
    end.json            the exit code of the run that is over, and the reason
    renews              asks the job's script, at its end, to submit the next allocation
    exit_code           the number alone, for the job's script
    signalled           the job's script has got the signal that --signal asks for
    script_failed       why the job's script cannot continue; the head ends the run then
    env.sh              the variables of a driver, for shells; written once the cluster is ready
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, Callable, Iterable, NamedTuple, Sequence, TypeVar

from ..files import write_file
from ..spec import Env

#: Seconds from one heartbeat to the next.
BEAT_S = 3.0
#: A node counts as dead after this number of rounds without a new heartbeat. A round is
#: ``BEAT_S`` or longer, by the reader's clock: a file system that stands still makes the rounds
#: longer, not more.
LATE_ROUNDS = 10
#: Exit code of the job when the cluster, not the driver, has failed.
CLUSTER_FAILED = 70
#: Names of files with a ``HeadAddress`` and with the ``RunEnd``.
READY, END = "ready.json", "end.json"
#: Folder of the logs of jobs, in that of the run.
JOB_LOGS = "job_logs"
_Row = TypeVar("_Row")


class NodeReport(NamedTuple):
    """The state of a node, as it reports it."""

    host: str  # Slurm's name of the node
    address: str = ""  # of its Ray; empty until that starts
    ray: Sequence[Any] = ()  # the head's ``HeadAddress``, once its raylet is registered
    ready: Sequence[str] = ()  # names of its sidecars that are ready
    failed: str = ""  # why it cannot continue
    log: str = ""  # path of the log that says more
    retried: str = ""  # how its last ``ray start`` has ended, while another one is tried
    left: bool = False  # it has ended all its processes


class HeadAddress(NamedTuple):
    """The address of the head's Ray."""

    address: str
    port: int
    dashboard_port: int
    #: Counts the starts of Ray on the head. Workers of an earlier start belong to a Ray that is
    #: gone, also if the ports are the same.
    start: int = 1

    @property
    def gcs(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def dashboard(self) -> str:
        return f"http://{self.address}:{self.dashboard_port}"


class RunEnd(NamedTuple):
    """The end of a run."""

    code: int  # the job's exit code
    why: str
    renews: bool = False  # the job's script asks for the next allocation


class RunFolder:
    """One run's folder, as one node reads and writes it."""

    def __init__(self, path: str, rank: int):
        self.path = path
        self._rank = rank
        self._beats = 0
        #: The last heartbeat of each node that was looked at, and the rounds without a new one.
        self._seen: dict[int, tuple[str, int]] = {}

    def text(self, name: str) -> str | None:
        """The content of a file; ``None`` while it does not exist.

        To look at the folder is how a new file is seen soon: NFS remembers for up to a minute that
        a file does not exist, unless its folder has changed.
        """
        with suppress(OSError):
            if "/" not in name:  # reports are many, and their folder is listed once
                os.listdir(self.path)
            with open(f"{self.path}/{name}", "rb") as file:
                return os.fsdecode(file.read())
        return None

    def read(self, name: str, kind: Callable[..., _Row]) -> _Row | None:
        """The named tuple in a file; ``None`` while it does not exist."""
        text = self.text(name)
        return kind(**json.loads(text)) if text else None

    def write(self, name: str, row: Any) -> None:
        """Write a file with the fields of a named tuple."""
        write_file(f"{self.path}/{name}", json.dumps(row._asdict()))

    def reports(self) -> dict[int, NodeReport]:
        """The reports of all nodes, by rank."""
        rows: dict[int, NodeReport] = {}
        with suppress(OSError, ValueError):  # a crash may tear a file
            for name in os.listdir(f"{self.path}/nodes"):
                if name.endswith(".json") and (row := self.read(f"nodes/{name}", NodeReport)):
                    rows[int(name[:-5])] = row
        return rows

    def beat(self) -> None:
        """Show that this node's program lives.

        The file is overwritten in place, which needs no room on a full disk. A reader looks for
        another text, and half of one is another one too.
        """
        self._beats += 1
        flags = os.O_WRONLY | os.O_CREAT
        with open(os.open(f"{self.path}/beats/{self._rank}", flags, 0o600), "wb") as file:
            file.write(b"%012d" % self._beats)

    def silent(self, ranks: Iterable[int]) -> set[int]:
        """Look at heartbeats, at least ``BEAT_S`` after the last look; the nodes that seem dead."""
        for rank in ranks:
            last, missed = self._seen.get(rank, ("", 0))
            beat = ""  # one that cannot be read is not missed
            with suppress(OSError), open(f"{self.path}/beats/{rank}") as file:
                beat = file.read()
            self._seen[rank] = beat, missed + 1 if beat and beat == last else 0
        return {rank for rank in ranks if self._seen[rank][1] >= LATE_ROUNDS}

    def publish_ready(self, head: HeadAddress, env: Env, names: Env) -> None:
        """Let a driver start. ``ready.json`` comes last: whoever sees it finds the rest.

        Args:
            head: the address of the cluster.
            env: variables that a driver needs.
            names: those that NeMo-Run's script has for commands, and does not export.
        """
        import shlex  # no node needs it to start

        lines = ["unset RAY_AUTH_TOKEN"]  # one of another cluster's
        lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        lines += [f"{name}={shlex.quote(value)}" for name, value in names.items()]
        lines += [f"head_node_ip={head.address}", f"ip_head={head.gcs}", ""]
        write_file(f"{self.path}/env.sh", "\n".join(lines))
        self.write(READY, head)

    def end(self) -> RunEnd | None:
        return self.read(END, RunEnd)

    def publish_end(self, end: RunEnd) -> RunEnd:
        """Publish that the run is over, unless an end is published; the end that counts."""
        published = self.end()
        if published:
            return published
        if end.renews:
            write_file(f"{self.path}/renews", "")
        self.write(END, end)
        write_file(f"{self.path}/exit_code", f"{end.code}\n")
        return end
