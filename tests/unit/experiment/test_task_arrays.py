"""Tasks of an experiment as elements of one job, on a simulated Ray, whose driver the test is."""

from __future__ import annotations

import io
import json
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import Any

import nemo_run as run
import pytest
from typer.testing import CliRunner

from nemo_run_ray import RayExecutor, array
from nemo_run_ray.cli import main as cli
from nemo_run_ray.errors import (
    ClusterError,
    ConfigError,
    JobError,
    NemoRunRayError,
    SubmissionError,
)
from nemo_run_ray.experiment import element_job
from nemo_run_ray.experiment.dispatch import dispatches_of
from nemo_run_ray.experiment.element_job import ElementJob
from nemo_run_ray.experiment.find import find, find_job, tasks_of
from nemo_run_ray.experiment.job import RemoteJob
from nemo_run_ray.experiment.shared_log import SharedLog
from nemo_run_ray.nemo import registry
from nemo_run_ray.nemo.resume import resume_experiment
from nemo_run_ray.plan import task_elements
from nemo_run_ray.remote.array.status_file import file_of
from nemo_run_ray.remote.dashboard import LOG_FILE
from nemo_run_ray.remote.node.output import end_mark
from nemo_run_ray.remote.spec import ArraySpec, from_json
from nemo_run_ray.remote.states import JobState, JobStatus, Reason
from tests.array_tasks import Model, train
from tests.conftest import wait_for
from tests.fake_ray import GOES_ON, NODE, SUCCEEDS, FakeRay, Trouble, fake_ray
from tests.unit.experiment.conftest import ArrayDriver, Handed

pytestmark = pytest.mark.usefixtures("fresh_tables")

TRUE = run.Script(inline="true")


class Sweep:
    """An experiment of three scripts, two functions and a task that is no element."""

    def __init__(self, ray: FakeRay, title: str, **fields: Any) -> None:
        shared = RayExecutor(address=ray.url, as_array=True, **fields)
        with run.Experiment(title, skip_status_at_exit=True) as experiment:
            for index in range(3):
                script = run.Script(inline=f"echo {index}", env={"X": str(index), "Y": "y"})
                experiment.add(script, executor=shared, name=f"say-{index}")
            for index in range(2):
                task = run.Partial(train, seed=index, model=run.Config(Model, width=1))
                experiment.add(task, executor=shared, name=f"train-{index}")
            experiment.add(run.Script(inline="true"), executor=_plain(ray), name="alone")
            experiment.run(detach=True)
        self.id = experiment._id
        self.handles = {one.id: one.handle for one in experiment.jobs}

    def task(self, name: str) -> ElementJob:
        found = find_job(f"{self.id}.{name}")
        assert isinstance(found, ElementJob)
        return found


def _plain(ray: FakeRay) -> RayExecutor:
    return RayExecutor(address=ray.url)


def hand_over(ray: FakeRay, title: str, tasks: Mapping[str, Any], **fields: Any) -> str:
    """Hand tasks over that are elements; the experiment's id."""
    with run.Experiment(title, skip_status_at_exit=True) as experiment:
        for name, task in tasks.items():
            executor = RayExecutor(address=ray.url, as_array=True, **fields)
            experiment.add(task, executor=executor, name=name)
        experiment.run(detach=True)
    return str(experiment._id)


def files_of(ray: FakeRay, spec_name: str) -> dict[str, str]:
    """What was sent for a job, by the name in its folder."""
    found: dict[str, str] = {}
    for data in ray.packages.values():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                _, mine, path = name.partition(f"/{spec_name}/")
                if mine:
                    found[path] = archive.read(name).decode()
    return found


@pytest.fixture
def sweep(ray, unique, monkeypatch) -> Sweep:
    monkeypatch.setattr(element_job, "_AGE_S", 0.0)
    return Sweep(ray, unique)


@pytest.fixture
def running(ray, sweep) -> ArrayDriver:
    """The driver of the scripts' array, which runs."""
    array = sweep.task("say-0").array
    ray.fates[array.id] = GOES_ON
    ray.pass_time(30)
    wait_for(lambda: array.status.node)
    driver = ArrayDriver(ray, array)
    driver.tells([[0, 0, "succeeded", 1, 0], [1, 1, "leased", 1, 0], [2, 2, "waiting", 0, 0]])
    yield driver
    driver.end()


def test_tasks_that_reserve_the_same_are_one_job(ray, sweep):
    assert sorted(ray.started) == sorted(
        f"{sweep.id}.{name}" for name in ("say-0-array", "train-0-array", "alone")
    )
    assert [job.name for job in find(sweep.id)] == ["say-0-array", "train-0-array", "alone"]
    files = files_of(ray, "say-0-array")
    spec = from_json(files["spec.json"])
    assert isinstance(spec, ArraySpec)
    assert spec.host.task.env["Y"] == "y", "equal variables are sent once"
    header, *rows = [json.loads(line) for line in files["scripts/elements.jsonl"].splitlines()]
    assert header["fields"] == ["task"]
    assert [(name, env) for name, _, env in rows] == [
        (f"say-{index}", {"X": str(index)}) for index in range(3)
    ]
    assert {f"scripts/say-{index}.sh" for index in range(3)} <= files.keys()


def test_functions_are_forked_from_one_process_and_name_their_configurations(ray, sweep):
    files = files_of(ray, "train-0-array")
    spec = from_json(files["spec.json"])
    assert isinstance(spec, ArraySpec)
    assert spec.runs == "auto"
    _, *rows = [json.loads(line) for line in files["scripts/elements.jsonl"].splitlines()]
    configs = [config.removeprefix("nemo_run/") for _, config, _ in rows]
    assert configs == [f"configs/train-{index}_fn_or_script" for index in range(2)]
    assert set(configs) <= files.keys()


@pytest.mark.parametrize(
    "other",
    [
        {"cpus_per_node": 2},
        {"retries": 1},
        {"runtime_env": {"env_vars": {"A": "b"}}},
        {"label_selector": {"pool": "gpu"}},
        {"secrets": ["HOME"]},
        {"keep_logs_max_bytes": 0},
        {"preflight": False},
    ],
    ids=str,
)
def test_tasks_that_differ_in_what_they_need_do_not_share_a_job(ray, unique, other):
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        for name, fields in (("a", {}), ("b", other), ("c", {})):
            executor = RayExecutor(address=ray.url, as_array=True, **fields)
            experiment.add(run.Script(inline="true"), executor=executor, name=name)
        experiment.run(detach=True)
    tasks = [[task.name for task in tasks_of(job)] for job in find(experiment._id)]
    assert tasks == [["a", "c"], ["b"]]


def test_in_a_chain_tasks_share_a_job_that_wait_for_the_same_and_are_waited_for(ray, unique):
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:

        def add(name: str, *after: str, as_array: bool = True) -> None:
            executor = RayExecutor(address=ray.url, as_array=as_array)
            script = run.Script(inline="true")
            experiment.add(script, executor=executor, name=name, dependencies=list(after))

        add("first", as_array=False)
        for name in ("a", "b", "c"):
            add(name, "first")
        add("last", "a", "b", as_array=False)
        experiment.run(detach=True)
    (array, alone) = [job for job in find(experiment._id) if job.record.is_array]
    assert [task.name for task in tasks_of(array)] == ["a", "b"]
    assert [task.name for task in tasks_of(alone)] == ["c"], "nothing waits for it"
    (dispatch,) = {job.dispatch for job in (array, alone)}
    after = {job.name: job.after for job in dispatch.spec.jobs}
    assert after == {
        "first": (),
        "a-array": ("first",),
        "c-array": ("first",),
        "last": ("a-array",),
    }
    assert find_job(f"{experiment._id}.a").status.state.value == "WAITING"


def test_the_order_in_which_dependencies_are_named_does_not_matter(ray, unique):
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        for name in ("x", "y"):
            experiment.add(TRUE, executor=_plain(ray), name=name)
        for name, after in (("a", ["x", "y"]), ("b", ["y", "x"])):
            executor = RayExecutor(address=ray.url, as_array=True)
            experiment.add(TRUE, executor=executor, name=name, dependencies=after)
        experiment.run(detach=True)
    (array,) = [job for job in find(experiment._id) if job.record.is_array]
    assert [task.name for task in tasks_of(array)] == ["a", "b"]


def test_tasks_on_two_clusters_are_two_jobs(ray, unique):
    with fake_ray() as other:
        with run.Experiment(unique, skip_status_at_exit=True) as experiment:
            for index in range(4):
                url = (ray, other)[index % 2].url
                executor = RayExecutor(address=url, as_array=True)
                experiment.add(TRUE, executor=executor, name=f"t{index}")
            experiment.run(detach=True)
        tasks = {job.name: [task.name for task in tasks_of(job)] for job in find(experiment._id)}
        assert tasks == {"t0-array": ["t0", "t2"], "t1-array": ["t1", "t3"]}
        assert (ray.started, other.started) == (
            [f"{experiment._id}.t0-array"],
            [f"{experiment._id}.t1-array"],
        )


def test_a_task_that_shares_its_job_with_no_other_one_is_warned_of(ray, unique, capsys):
    hand_over(ray, unique, {"a": TRUE, "b": TRUE, "c": run.Partial(train, seed=0)})
    told = capsys.readouterr()
    assert (told.out + told.err).count("RayExecutor.as_array of c has no use: no") == 1


def test_the_answer_about_a_dispatch_with_two_arrays_is_lost(ray, unique):
    """Each thread of NeMo-Run's asks for its own array, and the dispatcher is posted once."""
    lost = []

    def trouble(method: str, path: str) -> Trouble | None:
        if (method, path) == ("POST", "/api/jobs/") and not lost:
            lost.append(path)
            return Trouble(is_carried_out=True)
        return None

    ray.trouble = trouble
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        for index in range(6):
            executor = RayExecutor(address=ray.url, as_array=True, cpus_per_node=1 + index % 2)
            experiment.add(TRUE, executor=executor, name=f"t{index}", dependencies=[])
        experiment.add(
            TRUE, executor=_plain(ray), name="last", dependencies=[f"t{i}" for i in range(6)]
        )
        experiment.run(detach=True)
    assert lost
    assert ray.started == [f"{experiment._id}.dispatcher"]
    (dispatch,) = {job.dispatch for job in find(experiment._id)}
    assert [job.name for job in dispatch.spec.jobs] == ["t0-array", "t1-array", "last"]


def test_further_attempts_are_an_elements_own(ray, unique):
    hand_over(ray, unique, {"a": TRUE, "b": TRUE}, retries=2, permanent_exit_codes=[3])
    spec = from_json(files_of(ray, "a-array")["spec.json"])
    assert isinstance(spec, ArraySpec)
    assert (spec.retries, spec.permanent_exit_codes) == (2, (3,))


def test_an_array_in_a_chain_is_tried_again_when_it_is_lost_and_not_when_elements_fail(ray, unique):
    made = array(run.Script(inline="true"), over={"env.X": [1]})
    executor = RayExecutor(address=ray.url, retries=2, permanent_exit_codes=[3])
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        before = experiment.add(TRUE, executor=_plain(ray), name="before")
        experiment.add(made, executor=executor, name="array", dependencies=[before])
        experiment.run(detach=True)
    (dispatch,) = dispatches_of(registry.experiment_dir(experiment))
    (job,) = [one for one in dispatch.spec.jobs if one.name == "array"]
    assert (job.retries, job.permanent_exit_codes) == (2, (8, 9))


def test_an_array_alone_needs_no_dispatcher_for_its_retries(ray, unique):
    made = array(run.Script(inline="true"), over={"env.X": [1]})
    executor = RayExecutor(address=ray.url, retries=2)
    run.run(made, executor=executor, name=unique, detach=True)
    (job,) = find(unique)
    assert not job.record.dispatcher


def test_a_look_at_tasks_notes_the_attempts_of_their_array(sweep, running):
    assert sweep.task("say-0").status.state is JobState.SUCCEEDED
    (attempt,) = find_job(sweep.task("say-0").array.id).record.attempts.values()
    assert attempt.node == NODE


def test_states_are_kept_also_where_logs_are_not(ray, unique, monkeypatch):
    monkeypatch.setattr(element_job, "_AGE_S", 0.0)
    sweep = Sweep(ray, unique, keep_logs_max_bytes=0)
    array = sweep.task("say-0").array
    ray.fates[array.id] = GOES_ON
    ray.pass_time(30)
    wait_for(lambda: array.status.node)
    ArrayDriver(ray, array).tells([[0, 2, "succeeded", 1, 0]])
    ray.fates[array.id] = SUCCEEDS
    ray.pass_time(1000)
    wait_for(lambda: array.status.state.is_terminal)
    ray.files.clear()
    monkeypatch.setattr(element_job._LastElements, "_shared", {})
    assert sweep.task("say-2").status.state is JobState.SUCCEEDED
    assert not array.kept.has_log


def test_the_command_line_knows_tasks(sweep, running):
    shown = CliRunner().invoke(cli.build(), ["status", "--json", "--job", "say-1", sweep.id])
    (found,) = json.loads(shown.output)
    array = sweep.task("say-1").array.id
    assert (found["job"], found["array"], found["element"]) == ("say-1", array, 1)
    wrong = CliRunner().invoke(cli.build(), ["status", "--job", "say-7", sweep.id])
    words = " ".join(wrong.output.split())
    assert "has no job 'say-7'; it has say-0-array, train-0-array, alone, and 5 tasks" in words
    assert "Did you mean 'say-" in words


def test_every_task_has_its_own_state(sweep, running):
    states = {f"say-{index}": sweep.task(f"say-{index}").status for index in range(3)}
    assert {name: status.state.value for name, status in states.items()} == {
        "say-0": "SUCCEEDED",
        "say-1": "RUNNING",
        "say-2": "PENDING",
    }
    assert "waits for its turn in the array" in states["say-2"].message
    assert sweep.task("train-0").array.id != sweep.task("say-0").array.id


def test_how_tasks_have_ended_is_told_and_stays_so(ray, sweep, running):
    running.tells([[0, 0, "succeeded", 1, 0], [1, 1, "failed", 2, 9], [2, 2, "cancelled", 1, 143]])
    found = {index: sweep.task(f"say-{index}").status for index in range(3)}
    assert [status.state.value for status in found.values()] == [
        "SUCCEEDED",
        "FAILED",
        "CANCELLED",
    ]
    assert (found[1].attempt, found[1].detail) == (2, "exit code 9")
    array = sweep.task("say-0").array
    ray.fates[array.id] = SUCCEEDS
    ray.pass_time(1000)
    wait_for(lambda: array.status.state.is_terminal)
    ray.files.clear()
    assert sweep.task("say-1").status.detail == "exit code 9", "it was kept"


def test_what_was_not_over_when_the_array_ended_is_lost(ray, sweep, running):
    array = sweep.task("say-0").array
    ray.fates[array.id] = SUCCEEDS
    ray.pass_time(1000)
    wait_for(lambda: array.status.state.is_terminal)
    status = sweep.task("say-1").status
    assert status.state.value == "LOST"
    assert "was not over when its array ended" in status.message


@pytest.mark.parametrize("answer", [None, Trouble(200, "")], ids=["500", "no byte"])
def test_a_bad_answer_at_the_arrays_end_says_nothing_of_its_tasks(ray, sweep, running, answer):
    """Ray answers with 200 and no byte, too, when it has other requests."""
    told = dict(ray.files)
    array = sweep.task("say-0").array
    ray.files.clear()
    ray.trouble = lambda _, path: answer if path == LOG_FILE else None
    ray.fates[array.id] = SUCCEEDS
    ray.pass_time(1000)
    wait_for(lambda: array.status.state.is_terminal)
    assert sweep.task("say-0").status.state.value == "UNKNOWN"
    ray.trouble = lambda *_: None
    ray.files.update(told)
    assert sweep.task("say-0").status.state.value == "SUCCEEDED", "the next look tells"


def test_tasks_of_an_array_that_could_not_run_have_its_reason(ray, sweep, running):
    running.tells([[0, 2, "cancelled", 0, 0]])
    task = sweep.task("say-0")
    why = JobStatus(JobState.FAILED, Reason.RUNTIME_ENV, "pip failed", node=NODE)
    assert task._status(task._ask(why), why) == why


def test_a_line_that_comes_in_two_pieces_is_followed_whole(ray, sweep, running, monkeypatch):
    task = sweep.task("say-0")
    pieces = ["0| first\n", "0| resu", "lt=42\n"]
    monkeypatch.setattr(task.array, "output", lambda follow=False: iter(pieces))
    assert "".join(task.log(follow=True)) == "first\nresult=42\n"


def test_the_log_of_an_array_is_followed_once_for_all_of_its_tasks(sweep, running, monkeypatch):
    """One that follows later gets its earlier lines, too."""
    running.tells([[0, 2, "leased", 1, 0]])
    so_far: list[str] = []
    stream: SimpleQueue[str | None] = SimpleQueue()
    streams = []

    def output(array: RemoteJob, follow: bool = False) -> Iterator[str]:
        if not follow:
            return iter(list(so_far))
        streams.append(array.id)
        return iter(stream.get, None)

    def write(*texts: str) -> None:
        so_far.extend(texts)
        for text in texts:
            stream.put(text)

    monkeypatch.setattr(RemoteJob, "output", output)
    found: dict[int, list[str]] = {0: [], 1: [], 2: []}

    def follow(index: int) -> None:
        for line in sweep.task(f"say-{index}").log(follow=True):
            found[index].append(line)

    threads = [threading.Thread(target=follow, args=[index]) for index in found]
    threads[0].start()
    write("0| a\n", "1| early\n", "10| no\n")
    wait_for(lambda: found[0])
    threads[1].start()
    threads[2].start()
    wait_for(lambda: found[1])
    shared = SharedLog.of(sweep.task("say-0").array)
    wait_for(lambda: len(shared._followers) == 3)
    write("1| la", "te\n", "0| b\n")
    stream.put(None)
    for thread in threads:
        thread.join(30)
    assert found == {0: ["a\n", "b\n"], 1: ["early\n", "late\n"], 2: []}
    assert len(streams) == 1


def test_a_task_that_is_over_is_followed_no_longer(ray, sweep, running, monkeypatch):
    """Also when its array prints nothing: nobody waits for the next line."""
    silent = threading.Event()

    def output(array: RemoteJob, follow: bool = False) -> Iterator[str]:
        yield "0| only\n"
        if follow:
            silent.wait(60)

    monkeypatch.setattr(RemoteJob, "output", output)
    began = time.monotonic()
    assert list(sweep.task("say-0").log(follow=True)) == ["only\n"]
    assert time.monotonic() - began < 30
    silent.set()


def test_an_error_of_the_arrays_log_is_one_of_each_task(sweep, running, monkeypatch):
    running.tells([[0, 2, "leased", 1, 0]])

    def output(array: RemoteJob, follow: bool = False) -> Iterator[str]:
        if follow:
            raise ClusterError("no answer")
        return iter(())

    monkeypatch.setattr(RemoteJob, "output", output)
    for index in range(2):
        with pytest.raises(ClusterError, match="no answer"):
            list(sweep.task(f"say-{index}").log(follow=True))


def test_an_array_has_no_name_that_another_job_of_the_experiment_has(ray, unique):
    id_ = hand_over(ray, unique, {"a": TRUE, "a-array": run.Script(inline="false")})
    assert [job.name for job in find(id_)] == ["a-array-array"]


def test_what_was_seen_of_a_task_stays_when_its_cluster_is_gone(ray, sweep, running):
    before = [sweep.task(f"say-{index}").status.state.value for index in range(2)]
    ray.rows.clear()
    ray.session = "another"
    wait_for(lambda: sweep.task("say-0").array.status.state.value == "LOST")
    after = [sweep.task(f"say-{index}").status.state.value for index in range(2)]
    assert (before, after) == (["SUCCEEDED", "RUNNING"], ["SUCCEEDED", "LOST"])


def test_an_array_without_elements_yet_is_not_asked_for_every_task(ray, sweep, monkeypatch):
    array = sweep.task("say-0").array
    ray.fates[array.id] = GOES_ON
    ray.pass_time(30)
    wait_for(lambda: array.status.node)
    monkeypatch.setattr(element_job, "_AGE_S", 60.0)
    ray.requests.clear()
    states = {sweep.task(f"say-{index}").status.state.value for index in range(3)}
    assert states == {"PENDING"}
    assert len([path for _, path in ray.requests if "logs" in path]) <= 1


def test_a_task_has_its_own_log_and_result(ray, sweep, running):
    array = sweep.task("say-0").array
    ray.logs[array.id] = "0| hello\n1| other\nnemo_run_ray| 3 elements\n0| bye\n10| no\n"
    assert list(sweep.task("say-0").log()) == ["hello\n", "bye\n"]
    ray.files[file_of(array.id, "results")] = '[0, {"loss": 1.5}]\n[2, null]\n'
    assert sweep.task("say-0").results() == {0: {"loss": 1.5}}
    assert sweep.task("say-1").results() == {}


def test_a_task_is_cancelled_alone(sweep, running):
    after = [[0, 0, "succeeded", 1, 0], [1, 1, "cancelled", 1, 143], [2, 2, "waiting", 0, 0]]
    thread = running.takes_wishes(after)
    task = sweep.task("say-1")
    status = task.cancel()
    thread.join()
    assert status.state.value == "CANCELLED"
    assert running.cancelled == [[1, 1]]
    assert "does not tell now" in task.leftovers(status)
    running.shows(may_be_left=None)  # as of a driver that does not tell
    assert "does not tell now" in task.leftovers(status)
    running.shows()
    assert task.leftovers(status) == "no process of it is left on its node"
    running.shows(may_be_left={"n1": [0, 2]})
    assert task.leftovers(status) == "no process of it is left on its node"
    running.shows(may_be_left={"n1": [0], "0123456789abcdef": [1, 2]})
    told = "processes of it may be left on 0123456789ab, which its array does not wait for"
    assert task.leftovers(status) == told
    running.shows()
    running.tells([[0, 0, "succeeded", 1, 0], [1, 1, "leased", 1, 0], [2, 2, "waiting", 0, 0]])
    assert "ask again" in task.leftovers(status), "an earlier driver has said that it was over"
    running.tells([])
    assert "ask again" in task.leftovers(status), "nothing says that it still is"
    running.tells(after)
    assert sweep.task("say-0").cancel().state.value == "SUCCEEDED"


def test_of_an_array_that_is_over_its_own_last_line_says_what_is_left(ray, sweep, running):
    running.tells([[0, 0, "cancelled", 1, 0], [1, 2, "cancelled", 0, 0]])
    array = sweep.task("say-0").array
    ray.fates[array.id] = SUCCEEDS
    ray.pass_time(1000)
    wait_for(lambda: array.status.state.is_terminal)
    mark = end_mark(array.record.nonces[-1])
    left = {}
    for ending in ("exit code 9", "exit code 9; processes of it may be left on n1"):
        ray.logs[array.id] = f"0| hello\n{mark}{ending} proof 9.up.down\n"
        task = sweep.task("say-0")
        left[ending] = task.leftovers(task.status)
    proven, doubtful = left.values()
    assert "no process of it is left" in proven
    assert doubtful == "processes of it may be left on n1"
    never = sweep.task("say-1")
    assert never.leftovers(never.status) == "it never had a process"


def test_a_task_of_an_array_that_has_not_begun_is_not_cancelled_alone(sweep):
    task = sweep.task("say-1")
    with pytest.raises(JobError, match=f"nemo-run-ray cancel {task.array.id}"):
        task.cancel()


def test_an_experiment_of_nemo_run_knows_its_tasks(ray, sweep, running):
    experiment = registry.load_experiment(sweep.id)
    status = experiment.status(return_dict=True)
    assert status["say-0"]["handle"] == sweep.handles["say-0"]
    assert {name: str(told["status"]) for name, told in status.items()}["say-0"] == "SUCCEEDED"
    assert {name: str(told["status"]) for name, told in status.items()}["say-1"] == "RUNNING"


def test_many_tasks_cost_one_look(ray, sweep, running, monkeypatch):
    monkeypatch.setattr(element_job, "_AGE_S", 60.0)
    states = [sweep.task("say-0").status.state]
    ray.requests.clear()
    states += [sweep.task(f"say-{index}").status.state for index in range(3)]
    assert len(set(states)) == 3
    assert not [path for _, path in ray.requests if "logs" in path]


def test_what_never_arrived_is_handed_over_as_it_was(ray, unique):
    ray.trouble = lambda method, path: Trouble(200, "a page") if path == "/api/version" else None
    with pytest.raises(NemoRunRayError):
        Sweep(ray, unique)
    ray.trouble = lambda method, path: None
    experiment = registry.load_experiment(unique)
    told = list(resume_experiment(experiment))
    assert len([line for line in told if line.endswith("handed over")]) == 6
    tending = [thread for thread in threading.enumerate() if thread.name.endswith(experiment._id)]
    assert tending == [], "nobody stays for them"
    assert len(ray.started) == 3
    again = list(resume_experiment(registry.load_experiment(unique)))
    assert len([line for line in again if line.endswith("PENDING, left as it is")]) == 6
    assert len(ray.started) == 3


def test_an_array_that_cannot_be_sent_is_asked_for_once(ray, unique):
    posts = []

    def trouble(method: str, path: str) -> Trouble | None:
        if (method, path) == ("POST", "/api/jobs/"):
            posts.append(path)
            return Trouble(400, "no")
        return None

    ray.trouble = trouble
    with pytest.raises(SubmissionError):
        hand_over(ray, unique, {f"t{index}": TRUE for index in range(20)})
    assert len(posts) == 1


def test_another_experiment_waits_for_whole_arrays(ray, unique):
    first = Sweep(ray, f"{unique}-first")
    handed = Handed(ray, unique, "job", dependencies=[first.id])
    (job,) = handed.dispatch.spec.jobs
    assert sorted(one.id for one in job.outside) == sorted(
        f"{first.id}.{name}" for name in ("alone", "say-0-array", "train-0-array")
    )
    with pytest.raises(SubmissionError, match="can wait for the whole array only"):
        Handed(ray, f"{unique}-b", "job", dependencies=[first.handles["say-1"]])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nodes": 2}, "RayExecutor.nodes is 2, and each element of an array is one process"),
        ({"ports": {"http": 0}}, "RayExecutor.ports is set, and an array has none"),
        ({"time_s": 5}, "RayExecutor.time_s is set"),
        ({"launcher": "torchrun"}, "RayExecutor.launcher is torchrun"),
    ],
    ids=str,
)
def test_what_an_element_cannot_have_is_refused(ray, unique, fields, words):
    with pytest.raises(ConfigError, match=words):
        hand_over(ray, unique, {"job": TRUE}, **fields)
    assert ray.started == []


def test_a_group_is_no_element(ray, unique):
    with pytest.raises(ConfigError, match="is a group"):
        hand_over(ray, unique, {"job": [TRUE, TRUE]})


@pytest.mark.parametrize("is_first", [True, False])
def test_an_array_is_no_task_of_a_group(ray, unique, is_first):
    elements = array(run.Script(inline="true"), over={"env.X": [1, 2]})
    tasks = [elements, TRUE] if is_first else [TRUE, elements]
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        experiment.add(tasks, executor=RayExecutor(address=ray.url), name="job")
        with pytest.raises(ConfigError, match="An array is a job of its own"):
            experiment.run(detach=True)
    assert ray.started == []


def test_a_task_too_large_to_be_an_element_is_refused(ray, unique):
    large = run.Script(inline="true", env={"X": "x" * 40_000})
    with pytest.raises(ConfigError, match="the task 'b' have"):
        hand_over(ray, unique, {"a": TRUE, "b": large})
    assert ray.started == []


def test_tasks_too_large_together_are_refused(ray, unique, monkeypatch):
    monkeypatch.setattr(task_elements, "ARRAY_MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="the 2 tasks that share the job 'a-array' have 0 MiB"):
        hand_over(ray, unique, {"a": TRUE, "b": run.Script(inline="true", env={"X": "x" * 90})})
    assert ray.started == []


def test_a_dry_run_shows_what_a_task_would_be(ray, unique, capsys):
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        executor = RayExecutor(address=ray.url, as_array=True)
        experiment.add(run.Script(inline="true", env={"X": "1"}), executor=executor, name="job")
        experiment.dryrun()
    shown = capsys.readouterr().out
    assert "one job with all tasks of the experiment" in shown
    assert "X=1" in shown
    assert ray.started == []
