"""Chains for tests: jobs in shell that tell in one file when they begin and end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import nemo_run as run

from nemo_run_ray import RayExecutor
from nemo_run_ray.clusters import Cluster
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.experiment.dispatch import Dispatch
from nemo_run_ray.experiment.job import find_job
from nemo_run_ray.ids import dispatcher_id
from nemo_run_ray.remote.status import JobState, JobStatus
from tests.conftest import wait_for

#: Seconds after which a job that waits for its gate gives up.
GATE_S = 120


@dataclass
class Step:
    """One job: its shell program, the jobs that it comes after, and its executor's fields."""

    name: str
    program: str = "true"
    after: tuple[str, ...] = ()
    fields: dict = field(default_factory=dict)


def step(name: str, program: str = "true", after: str = "", **fields) -> Step:
    """``after`` holds names with blanks between them."""
    return Step(name, program, tuple(after.split()), fields)


class Yard:
    """The folder in which the jobs of a test tell what they do, and wait for its gate to open."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder
        self._cluster = cluster

    def gate(self) -> str:
        """A program that waits for the gate."""
        path = self.folder / "gate"
        tries = GATE_S * 10
        return f"for i in $(seq {tries}); do [ -e {path} ] && break; sleep 0.1; done; [ -e {path} ]"

    def open(self) -> None:
        (self.folder / "gate").touch()

    def program(self, name: str, program: str) -> str:
        """The program of a job, which tells when each attempt begins and ends."""
        say = f'echo $1 {name} "${{NEMO_RUN_ATTEMPT:-1}}" >> {self.folder}/told'
        return f"tell() {{ {say}; }}\ntell begin\ntrap 'tell end' EXIT\n{program}\n"

    def script(self, one: Step) -> run.Script:
        return run.Script(inline=self.program(one.name, one.program))

    def start(self, name: str, *steps: Step, **options) -> Started:
        """Submit an experiment and leave."""
        with run.Experiment(name, skip_status_at_exit=True) as experiment:
            for one in steps:
                executor = RayExecutor(cluster=self._cluster, **one.fields)
                experiment.add(
                    self.script(one), executor=executor, name=one.name, dependencies=[*one.after]
                )
            experiment.run(**{"detach": True, **options})
        return Started(experiment._id, Path(experiment._exp_dir))

    def told(self) -> list[tuple[str, str, int]]:
        """``begin`` or ``end``, the job and its attempt, in their order."""
        path = self.folder / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(what, name, int(number)) for what, name, number in map(str.split, lines)]

    def begun(self) -> list[str]:
        """``job`` or ``job@2``, in the order of their beginning."""
        return [
            name if number == 1 else f"{name}@{number}"
            for what, name, number in self.told()
            if what == "begin"
        ]

    def is_before(self, first: str, second: str) -> bool:
        """Whether one job's last attempt ended before the first of another one began."""
        told = self.told()
        begin = told.index(("begin", second, 1))
        ends = [n for n, (what, name, _) in enumerate(told) if (what, name) == ("end", first)]
        return bool(ends) and max(ends) < begin

    def check(self) -> None:
        """Whatever happened, no attempt began twice and no two of a job lived at once."""
        twice = [one for one, count in Counter(self.begun()).items() if count > 1]
        assert twice == []
        alive: set[str] = set()
        for what, name, _ in self.told():
            assert (what == "begin") == (name not in alive), self.told()
            alive.symmetric_difference_update({name})


@dataclass
class Started:
    """An experiment that was submitted."""

    id: str
    exp_dir: Path

    @property
    def dispatch(self) -> Dispatch:
        return Dispatch.of(self.exp_dir, dispatcher_id(self.id))

    def job(self, name: str) -> str:
        """Its submission id."""
        return f"{self.id}.{name}"

    def status(self, name: str) -> JobStatus:
        return find_job(self.job(name)).status

    def statuses(self) -> dict[str, JobStatus]:
        return {job.name: self.status(job.name) for job in self.dispatch.spec.jobs}

    def states(self) -> dict[str, str]:
        return {name: status.state.value for name, status in self.statuses().items()}

    def wait_until(self, name: str, state: JobState) -> JobStatus:
        wait_for(lambda: self.status(name).state is state)
        return self.status(name)

    def dispatch_ends(self, api: JobsApi, number: int = 1, within_s: float = 120) -> int:
        """Exit code of a dispatcher, once it has ended; nothing but its row is asked."""
        name = self.dispatch.id if number == 1 else f"{self.dispatch.id}@{number}"
        wait_for(lambda: "driver_exit_code" in api.table(fresh=True)[name], within_s)
        return api.table()[name]["driver_exit_code"]
