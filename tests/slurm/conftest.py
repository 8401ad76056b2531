"""A real Slurm on hosts of this machine; ``bin/`` has what they lack: pyxis, and a light Ray."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nemo_run as run
import pytest
from nemo_run.run.ray.job import RayJob

from nemo_run_ray import patches
from tests.conftest import processes_where, processes_with, wait_for
from tests.hosts import own_set

_TESTBED = Path(__file__).parent.parent / "hosts" / "testbed.py"
BIN = Path(__file__).parent / "bin"
#: The folder of this interpreter: the shim of a version manager costs more than the node program.
PYTHON = Path(sys.executable).resolve().parent
#: Hosts of these tests. The first one is the head of every cluster that has them all.
COUNT = 4
#: Each test process has a set of its own, beside those of the hosts' tests.
NUMBER = own_set.claim()


#: Requests of ``scontrol show``, ``squeue``, ``sinfo`` and ``sdiag``.
_LOOKS = {
    "REQUEST_BUILD_INFO",
    "REQUEST_FED_INFO",
    "REQUEST_JOB_INFO",
    "REQUEST_JOB_INFO_SINGLE",
    "REQUEST_NODE_INFO",
    "REQUEST_PARTITION_INFO",
    "REQUEST_STATS_INFO",
}


class Slurm:
    """Slurm on the hosts n1, n2, …, and what can happen to them.

    Args:
        folder: that the hosts share, for logs and jobs.
        count: of the hosts.
    """

    def __init__(self, folder: Path, count: int = COUNT) -> None:
        self.folder = folder
        #: A file system of 16 MB that the hosts of the tests share.
        self.small = folder / "small"
        self._count = count
        self.conf = f"/run/testbed{NUMBER}/slurm/slurm.conf"

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Let Slurm's commands of this process find this Slurm."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", self.conf)
            yield

    def bed(self, *arguments: str) -> str:
        return _done([sys.executable, str(_TESTBED), *arguments], {"TESTBED": NUMBER})

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands prints."""
        return _done(list(words), {"SLURM_CONF": self.conf})

    def state(self, job: str) -> tuple[str, str]:
        """(state, exit code) of a job, such as ``COMPLETED``, ``0:0``."""
        told = self.ask("scontrol", "show", "job", job)
        fields = dict(re.findall(r"(\w+)=(\S*)", told))
        return fields["JobState"], fields["ExitCode"]

    def wait(self, job: str, within_s: float = 60) -> tuple[str, str]:
        """Until a job has ended; its state and exit code."""
        live = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING")
        wait_for(lambda: self.state(job)[0] not in live, within_s)
        return self.state(job)

    def wait_idle(self) -> None:
        """Until Slurm would use all hosts."""
        idle = [str(self._count), "idle"]
        wait_for(lambda: self.ask("sinfo", "-h", "-o", "%D %t").split() == idle, 90)

    def rpcs(self) -> dict[str, int]:
        """How often the controller was asked for what, since ``forget_rpcs``.

        What tests and NeMo-Run ask to see where a job is does not count.
        """
        told = self.ask("sdiag").partition("by message type")[2].partition("by user")[0]
        found = {
            name: int(count) for name, count in re.findall(r"(REQUEST_\w+).*count:(\d+)", told)
        }
        return {name: count for name, count in found.items() if name not in _LOOKS}

    def forget_rpcs(self) -> None:
        self.ask("sdiag", "-r")

    def processes(self, text: str) -> list[int]:
        """The processes on this machine that have a text among their words."""
        return processes_where(lambda _, words: any(text in word for word in words))


def _done(words: list[str], variables: dict[str, str]) -> str:
    env = {**os.environ, **variables}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="package")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "slurmctld", "slurmd", "munged", "rsync"):
        if shutil.which(tool) is None:
            pytest.skip(f"the program {tool} is not there (Debian: slurm-wlm, munge, rsync)")
    found = Slurm(tmp_path_factory.mktemp("slurm"))
    found.bed("down")  # of a test process that was killed
    # The hosts have the mounts that are there before them.
    found.small.mkdir()
    _done(["mount", "-t", "tmpfs", "-o", "size=16m", "small", str(found.small)], {})
    try:
        found.bed("up", str(COUNT))
        # Otherwise a batch job waits for up to 3 s until it is looked at, and one whose earliest
        # start was changed for up to 60 s.
        parameters = "SchedulerParameters=batch_sched_delay=0,sched_interval=5"
        # Ray's folders on a node are named after the job's number, and all sets share /tmp.
        found.bed("slurm", parameters, f"FirstJobId={NUMBER}001")
        yield found
    finally:
        found.bed("down")
        _done(["umount", str(found.small)], {})


@pytest.fixture(autouse=True)
def whole(slurm: Slurm, monkeypatch) -> Iterator[None]:
    """All hosts are there for each test, and nothing of it is left on them."""
    # Jobs have the environment that they are submitted from. Ray's helpers leave folders with
    # sockets there when they are killed.
    tmp = slurm.folder / "tmp"
    tmp.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(tmp))
    yield
    slurm.ask("scancel", "--full", "--user=root")
    wait_for(lambda: not slurm.ask("squeue", "-h"), 60)


def _words_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return f"{pid} in {os.readlink(f'/proc/{pid}/ns/pid')}: {words}"
    return f"{pid}"


class RayOnSlurm:
    """A job of Slurm with Ray in it, as NeMo-Run's ``RayJob`` has submitted it.

    Args:
        slurm: where.
        name: of the Ray cluster.
        job: Slurm's number of it.
        jobs: folder of jobs that all hosts share.
    """

    def __init__(self, slurm: Slurm, name: str, job: str, jobs: Path) -> None:
        self.slurm = slurm
        self.job = job
        self.folder = jobs / name
        self.logs = self.folder / "logs"
        self.run = self.folder / "run" / f"{job}.0"

    def wait(self, within_s: float = 60) -> tuple[str, str]:
        return self.slurm.wait(self.job, within_s)

    def wait_ready(self) -> None:
        wait_for(lambda: (self.run / "ready.json").exists(), 60)

    def log(self, name: str) -> str:
        return (self.logs / name).read_text()

    @property
    def told(self) -> str:
        """What the job itself has printed."""
        (path,) = self.logs.glob(f"sbatch_*_{self.job}.out")
        return path.read_text()

    @property
    def why(self) -> str:
        """Why the run was over."""
        return json.loads((self.run / "end.json").read_text())["why"]

    def leftovers(self) -> list[str]:
        """What the job has left: processes, and Ray's folders on the hosts."""
        found = [_words_of(pid) for pid in processes_with(f"NEMO_RUN_RAY_RUN={self.folder}")]
        return found + [str(path) for path in Path("/tmp").glob(f"nrr-*-{self.job}.*")]

    def wait_gone(self) -> None:
        """Until nothing of it is left."""
        deadline = time.monotonic() + 60
        while self.leftovers():
            assert time.monotonic() < deadline, self.leftovers()
            time.sleep(0.2)


Start = Callable[..., RayOnSlurm]


@pytest.fixture
def start(slurm: Slurm, unique: str, tmp_path, monkeypatch) -> Iterator[Start]:
    """Submit a driver; further arguments are the executor's."""
    monkeypatch.setenv("SLURM_CONF", slurm.conf)
    monkeypatch.setenv("PATH", f"{BIN}:{PYTHON}:{os.environ['PATH']}")  # NeMo-Run asks sacct, too
    workdir = tmp_path / "code"
    workdir.mkdir()
    (workdir / "shipped.txt").write_text("here\n")
    undo = patches.apply("slurm_ray")
    jobs = []

    def start(
        command: str | None,
        env: dict[str, str] | None = None,
        name: str = "",
        jobs_in: str = "jobs",
        **fields,
    ) -> RayOnSlurm:
        variables = {
            "PATH": f"{BIN}:{PYTHON}:$PATH",
            "PYXIS_LOG": str(tmp_path / "pyxis"),
            **(env or {}),
        }
        executor = run.SlurmExecutor(
            account="root",
            partition="batch",
            tunnel=run.LocalTunnel(job_dir=str(slurm.folder / jobs_in)),
            packager=run.Packager(),
            env_vars=variables,
            **{"nodes": COUNT, "ntasks_per_node": 1, "time": "00:05:00", **fields},
        )
        name = f"{unique}{name or len(jobs)}"
        job = RayJob(name=name, executor=executor)
        job.start(command=command, workdir=str(workdir))
        jobs.append(RayOnSlurm(slurm, name, str(job.backend.job_id), slurm.folder / jobs_in))
        return jobs[-1]

    yield start
    undo()
    for job in jobs:
        slurm.ask("scancel", job.job)
        job.wait_gone()
