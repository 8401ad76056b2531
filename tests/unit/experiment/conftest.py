"""Experiments that are submitted to a simulated Ray, through NeMo-Run as users do."""

from __future__ import annotations

import json
import shlex
import threading
import time
from pathlib import Path

import nemo_run as run
import pytest
from typer.testing import CliRunner

from nemo_run_ray import RayExecutor
from nemo_run_ray.cli import main as cli
from nemo_run_ray.dashboard import jobs
from nemo_run_ray.experiment.dispatch import Dispatch, Snapshot, claim, dispatches_of
from nemo_run_ray.experiment.job import RemoteJob, jobs_of, record
from nemo_run_ray.experiment.store import find_experiment
from nemo_run_ray.remote.array.cancel_request import request_id
from nemo_run_ray.remote.status import file_of
from tests.fake_ray import FakeRay


@pytest.fixture
def fresh_tables(monkeypatch) -> None:
    """Each look is one of its own: for tests of what is seen, not of how often it is asked for."""
    monkeypatch.setattr(jobs, "TABLE_AGE_S", 0.0)


def invoke(*words: str) -> str:
    """What a command of ours prints that succeeds."""
    done = CliRunner().invoke(cli.build(), list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


class Submitted:
    """One experiment on a simulated Ray.

    Attributes:
        ray: where it is.
        id: of the experiment.
    """

    def __init__(self, ray: FakeRay, title: str, *tasks: str, **fields) -> None:
        """Submit tasks and leave.

        Args:
            ray: where.
            title: of the experiment.
            tasks: ``name``, or ``name after other names``.
            fields: of every executor.
        """
        self.ray = ray
        # NeMo-Run 0.9 counts whole seconds, and one title may come twice in a second.
        id_ = f"{title}_{time.time_ns()}"
        with run.Experiment(title, id=id_, skip_status_at_exit=True) as experiment:
            for task in tasks:
                name, _, after = task.partition(" after ")
                experiment.add(
                    run.Script(inline="true"),
                    executor=RayExecutor(address=ray.url, **fields),
                    name=name,
                    dependencies=after.split(),
                )
            experiment.run(detach=True)
        self.id = id_

    @property
    def exp_dir(self) -> Path:
        found = find_experiment(self.id)
        assert found is not None
        return found

    @property
    def jobs(self) -> dict[str, RemoteJob]:
        return {one.name: one for one in jobs_of(self.exp_dir)}

    @property
    def dispatch(self) -> Dispatch:
        (found,) = dispatches_of(self.exp_dir)
        return found

    def states(self) -> dict[str, str]:
        """The states as they are now, not a moment ago."""
        snapshot = Snapshot(is_fresh=True)
        return {name: one.status_in(snapshot).state.value for name, one in self.jobs.items()}

    def record(self) -> dict[str, str]:
        """Write down what is seen now, as a client that waits does, and return the states."""
        snapshot = Snapshot(is_fresh=True)
        seen = [(job, job.status_in(snapshot)) for job in self.jobs.values()]
        record(seen, snapshot)
        return {job.name: status.state.value for job, status in seen}

    def claim(self, name: str) -> None:
        """Claim the second attempt of a job, as the client does that cancels it."""
        job = self.jobs[name]
        claim(job.api(), f"{job.id}@2", job.record.nonces[-1])

    def stranger(self, name: str, status: str, **fields) -> None:
        """Another user's job in the cluster's table, older than most."""
        self.ray.add(name, {}, status=status, **fields)
        self.ray.rows[name]["start_time"] -= 3_600_000


class ArrayDriver:
    """What the driver of an array has written, and the requests that it takes."""

    def __init__(self, ray: FakeRay, job: RemoteJob) -> None:
        self._ray, self._job = ray, job
        self._ended = threading.Event()
        self.cancelled: list[list[int]] = []
        self.only_waiting = False

    def tells(self, states: list[list[object]]) -> None:
        name = file_of(self._job.id, "states")
        self._ray.files[name] = "".join(json.dumps(row) + "\n" for row in states)

    def takes_request(self, states: list[list[object]]) -> threading.Thread:
        """Take the next request as the driver does, with these states after it."""

        def take() -> None:
            begin = request_id(self._job.id, "")
            while not self._ended.wait(0.02):
                for body in [
                    one for one in self._ray.bodies if one["submission_id"].startswith(begin)
                ]:
                    request = json.loads(shlex.split(body["entrypoint"])[-1])
                    self.cancelled += request["cancel"]
                    self.only_waiting = request["only_waiting"]
                    self.tells(states)
                    self._ray.rows[body["submission_id"]]["status"] = "SUCCEEDED"
                    return

        thread = threading.Thread(target=take)
        thread.start()
        return thread

    def end(self) -> None:
        self._ended.set()
