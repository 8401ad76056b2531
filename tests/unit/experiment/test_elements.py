"""The elements of an array on a simulated Ray, whose driver the test is."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator

import fiddle as fdl
import nemo_run as run
import pytest
from fiddle.experimental import serialization

from nemo_run_ray import RayExecutor, array, nemo
from nemo_run_ray.errors import ClusterError, ConfigError, JobError
from nemo_run_ray.experiment import job as array_elements
from nemo_run_ray.experiment.dispatch import dispatches_of
from nemo_run_ray.experiment.job import RemoteJob, find_job
from nemo_run_ray.remote.spec import ArraySpec, from_json
from nemo_run_ray.remote.status import file_of
from tests.array_tasks import train
from tests.conftest import wait_for
from tests.fake_ray import GOES_ON, SUCCEEDS, Trouble
from tests.unit.experiment.conftest import ArrayDriver, Submitted

pytestmark = pytest.mark.usefixtures("fresh_tables")

#: First and last element, state, attempts, exit code.
STATES = [
    [0, 2, "succeeded", 1, 0],
    [3, 3, "failed", 2, 9],
    [4, 5, "leased", 1, 0],
    [6, 7, "waiting", 0, 0],
]


@pytest.fixture
def job(ray, unique) -> RemoteJob:
    made = array(run.Script(inline="true"), over={"env.X": [f"v{index}" for index in range(8)]})
    executor = RayExecutor(address=ray.url, cpus_per_node=1)
    with run.Experiment(unique, executor=executor) as experiment:
        experiment.add(made, name="array")
        experiment.run(detach=True)
    found = find_job(f"{experiment._id}.array")
    ray.fates[found.id] = GOES_ON
    ray.pass_time(30)
    wait_for(lambda: found.status.node)
    return found


@pytest.fixture
def driver(ray, job) -> Iterator[ArrayDriver]:
    found = ArrayDriver(ray, job)
    found.tells(STATES)
    yield found
    found.end()


def test_an_array_in_a_chain_is_tried_again_when_it_is_lost_and_not_when_elements_fail(ray, unique):
    made = array(run.Script(inline="true"), over={"env.X": [1]})
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        before = experiment.add(run.Script(inline="true"), executor=RayExecutor(address=ray.url))
        executor = RayExecutor(address=ray.url, retries=2, permanent_exit_codes=[3])
        experiment.add(made, executor=executor, name="array", dependencies=[before])
        experiment.run(detach=True)
    (dispatch,) = dispatches_of(nemo.experiment_dir(experiment))
    (job,) = [planned for planned in dispatch.spec.jobs if planned.name == "array"]
    assert (job.retries, job.permanent_exit_codes) == (2, (8,))


def test_tasks_are_sent_with_their_names_commands_and_variables(ray, unique):
    tasks = [
        run.Script(inline="echo ${x}", env={"X": "1"}),
        run.Script(path="b.py", args=["-v"], entrypoint="python"),
        run.Partial(train, seed=3),
    ]
    made = array(tasks, names=["inline", "path", "function"], max_failures=2)
    executor = RayExecutor(address=ray.url)
    with run.Experiment(unique, executor=executor, skip_status_at_exit=True) as experiment:
        experiment.add(made, name="array")
        experiment.dryrun()
        experiment.run(detach=True)
    files = {}
    for data in ray.packages.values():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                files[name.partition("/array/")[2]] = archive.read(name).decode()
    spec = from_json(files["spec.json"])
    assert isinstance(spec, ArraySpec)
    assert (spec.runs, spec.max_failures) == ("auto", 2)
    rows = [json.loads(line) for line in files[spec.elements].splitlines() if line[:1] == "{"][1:]
    assert [row["name"] for row in rows] == ["inline", "path", "function"]
    command, path = rows[0]["argv"]
    assert (command, rows[0]["env"]) == ("bash", {"X": "1"})
    assert files[path.removeprefix("/nemo_run/")].endswith("echo ${x}")
    assert rows[1]["argv"] == ["python", "b.py", "-v"]
    function = fdl.build(serialization.load_json(rows[2]["template"]))
    assert function()["fields"] == {"seed": 3, "width": 0}
    job = find_job(f"{experiment._id}.array")
    ray.fates[job.id] = GOES_ON
    ray.pass_time(30)
    wait_for(lambda: job.status.node)
    ArrayDriver(ray, job).tells([[0, 2, "waiting", 0, 0]])
    names = [element.values["task"] for element in job.select_elements()]
    assert names == [row["name"] for row in rows]


def test_elements_are_selected_by_state_and_by_index(job, driver):
    found = job.select_elements()
    assert [(one.index, one.state, one.attempts, one.exit_code) for one in found] == [
        (0, "succeeded", 1, 0),
        (1, "succeeded", 1, 0),
        (2, "succeeded", 1, 0),
        (3, "failed", 2, 9),
        (4, "running", 1, None),
        (5, "running", 1, None),
        (6, "waiting", 0, None),
        (7, "waiting", 0, None),
    ]
    assert [one.index for one in job.select_elements("running")] == [4, 5]
    assert [one.index for one in job.select_elements("0, 3-4")] == [0, 3, 4]
    assert job.select_elements("cancelled") == []
    (failed,) = job.select_elements("failed")
    assert (failed.reason, failed.values) == ("exit code 9", {"env.X": "v3"})


def test_a_selection_that_is_none_is_refused(job, driver):
    for selection in ("broken", "-3", "1,,2", "3-", "5-3", "8", "0-99", [3, 7]):
        for ask in (job.select_elements, job.cancel_elements):
            with pytest.raises(ConfigError, match="selects no elements of the array 'array'"):
                ask(selection)


def test_a_job_that_is_no_array_and_one_that_has_not_begun_say_so(ray, unique, job):
    with pytest.raises(JobError, match="Nothing is known of the elements of 'array', which is"):
        job.select_elements()
    other = Submitted(ray, f"{unique}b", "plain").jobs["plain"]
    with pytest.raises(JobError, match="The job 'plain' is no array"):
        other.cancel_elements("3")


def test_elements_are_cancelled_by_a_request_and_their_end_is_waited_for(ray, job, driver):
    after = [
        *STATES[:2],
        [4, 4, "cancelled", 1, 143],
        [5, 5, "leased", 1, 0],
        [6, 7, "waiting", 0, 0],
    ]
    thread = driver.takes_request(after)

    found = job.cancel_elements("2-4")

    thread.join()
    assert driver.cancelled == [[2, 4]]
    assert {one.index: one.state for one in found} == {2: "succeeded", 3: "failed", 4: "cancelled"}


def test_those_that_wait_are_cancelled_and_those_that_have_begun_meanwhile_go_on(job, driver):
    after = [*STATES[:3], [6, 6, "leased", 1, 0], [7, 7, "cancelled", 0, 0]]
    thread = driver.takes_request(after)

    found = job.cancel_elements("waiting")

    thread.join()
    assert (driver.cancelled, driver.only_waiting) == ([[6, 7]], True)
    assert [(one.index, one.state) for one in found] == [(6, "running"), (7, "cancelled")]


def test_a_driver_that_does_not_answer_is_named(job, driver, monkeypatch):
    monkeypatch.setattr("nemo_run_ray.remote.array.cancel_request.TAKEN_S", 0.5)
    monkeypatch.setattr(array_elements, "_BEGUN_S", 0.0)
    with pytest.raises(ClusterError, match="elements of the array 'array' did not end"):
        job.cancel_elements("waiting")
    ranges = ",".join(str(index) for index in range(0, 20_000, 2))
    driver.tells([[0, 19_999, "waiting", 0, 0]])
    with pytest.raises(ConfigError, match="10,000 ranges, too many for one request"):
        job.cancel_elements(ranges)


def test_states_and_results_are_kept_when_the_array_has_ended(ray, job, driver):
    ray.files[file_of(job.id, "results")] = '[0, {"loss": 1.5}]\n[2, null]\n'
    ray.fates[job.id], states, lost = SUCCEEDS, file_of(job.id, "states"), iter([Trouble()] * 2)
    ray.trouble = lambda method, path: next(lost, None) if states in path else None
    ray.pass_time(1000)
    assert job.wait(timeout_s=20).state.is_terminal
    ray.files.clear()
    assert job.results() == {0: {"loss": 1.5}, 2: None}
    assert [one.index for one in job.select_elements("failed")] == [3]
    kept = [job.kept.log.with_suffix(f".{kind}") for kind in ("results", "states")]
    written = [path.stat().st_ino for path in kept]
    find_job(job.id).keep(job.status)
    assert [path.stat().st_ino for path in kept] == written, "what is kept is not written again"
