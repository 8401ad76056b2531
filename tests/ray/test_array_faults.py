"""Arrays on one real Ray whose processes die: an element ends once, never runs twice at a time."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import nemo_run as run
import psutil
import pytest

from nemo_run_ray import ExistingCluster, RayExecutor, array
from nemo_run_ray.experiment.job import RemoteJob, find_job
from nemo_run_ray.remote.array.elements import ENDED, Record, read_records
from nemo_run_ray.remote.node.supervise import is_watchdog
from nemo_run_ray.remote.status import JOURNAL_FILE, file_of
from tests.arrays import COUNT, check, ended, partials, scripts, supervisors
from tests.conftest import processes_of, processes_of_home, wait_for
from tests.flaky_proxy import CutBefore, DropAnswer, Fault, FlakyProxy


def drivers(job: RemoteJob) -> list[int]:
    """The watchdog and the runner of the array's driver."""
    return processes_of_home(lambda _, words: "array" in words and job.id in words)


def hosts(job: RemoteJob) -> list[int]:
    found = supervisors(job)
    return [pid for pid in found if not is_watchdog(pid)]


def actors(job: RemoteJob) -> list[int]:
    return processes_of_home(lambda _, words: words[0].startswith("ray::ReplicaActor"))


def warm(job: RemoteJob) -> list[int]:
    """The processes that fork elements."""
    return [pid for pid in processes_of(job.id) if _parent(pid) in hosts(job) and _is_warm(pid)]


def elements(job: RemoteJob) -> list[int]:
    """All processes of two elements."""
    above = {*hosts(job), *warm(job)}
    first = [pid for pid in processes_of(job.id) if _parent(pid) in above and not _is_warm(pid)][:2]
    return [pid for pid in processes_of(job.id) if _group(pid) in first]


def stopped_hosts(job: RemoteJob) -> list[int]:
    """The actors, after their hosts were stopped: those know nothing of it."""
    for pid in hosts(job):
        os.kill(pid, signal.SIGSTOP)
    return actors(job)


def _parent(pid: int) -> int:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return 0


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _is_warm(pid: int) -> bool:
    """Whether it writes into the log of what forks, and is not its short-lived child."""
    try:
        output = os.readlink(f"/proc/{pid}/fd/1")
        above = os.readlink(f"/proc/{_parent(pid)}/fd/1")
    except OSError:
        return False
    return output.endswith("fork_server.log") and output != above


VICTIMS = (drivers, hosts, actors, warm, elements, stopped_hosts)


def unseen(victims: Callable[[RemoteJob], list[int]]) -> int:
    """How many elements may have noted their own end before such a strike, and run once more:
    nobody has seen their exit codes. A stopped host sees none of those that it runs."""
    return 4 if victims is stopped_hosts else 2


def _retries(strikes: Sequence[Callable[[RemoteJob], list[int]]]) -> int:
    """None where no element is killed: an attempt that is lost with a host costs none."""
    return 6 if elements in strikes else 0


def strike(job: RemoteJob, victims: Callable[[RemoteJob], list[int]], within_s: float = 0.0) -> int:
    """Kill them; how many there were.

    Args:
        job: the array.
        victims: who they are now.
        within_s: how long to wait for some. Elements of one length end together, and then none runs
            for a moment.
    """
    deadline = time.monotonic() + within_s
    while not (found := victims(job)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(found)


@pytest.fixture
def logs(dashboard) -> Path:
    """The folder of this Ray's logs, where the journals lie."""
    (pid,) = processes_of_home(lambda _, words: words[0].endswith("gcs_server"))
    (word,) = [one for one in psutil.Process(pid).cmdline() if one.startswith("--log_dir=")]
    return Path(word.partition("=")[2])


def test_an_array_outlives_its_driver_and_its_hosts(start, logs, tmp_path, monkeypatch):
    """The others on one node are tried by real processes without Ray: tests/unit/remote/array."""
    monkeypatch.setenv("ARRAY_SECRET", "x")  # a driver that is started again needs it, too
    job = start(scripts(tmp_path, seconds=0.6), secrets=["ARRAY_SECRET"])
    for victims in (drivers, hosts):
        wait_for(lambda: drivers(job), 90)  # the second time it is one that was started again
        before = ended(tmp_path)
        wait_for(lambda before=before: ended(tmp_path) >= before + 4, 90)
        assert strike(job, victims, within_s=10), "there is something to kill"

    check(job, tmp_path, logs, unseen=unseen(drivers) + unseen(hosts))


@pytest.mark.soak
@pytest.mark.parametrize("victims", VICTIMS)
def test_an_array_outlives(start, logs, tmp_path, victims):
    is_forked = victims is warm
    made = (partials if is_forked else scripts)(tmp_path, seconds=0.6)
    job = start(made, retries=_retries([victims]))
    wait_for(lambda: ended(tmp_path) >= 4, 90)

    assert strike(job, victims, within_s=10), "there is something to kill"

    check(job, tmp_path, logs, unseen=unseen(victims))


@pytest.mark.soak
def test_an_array_in_a_chain_outlives_its_supervisor(existing, logs, unique, tmp_path):
    """Its driver dies with it, and the dispatcher starts another attempt: the journal goes on."""
    # The retry is the job's: none of its elements may need one.
    executor = RayExecutor(cluster=existing, cpus_per_node=1, retries=1, python=sys.executable)
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        before = experiment.add(run.Script(inline="true"), executor=executor, name="before")
        made = scripts(tmp_path, seconds=0.6)
        experiment.add(made, executor=executor, name="array", dependencies=[before])
        experiment.run(detach=True)
    job = find_job(f"{experiment._id}.array")
    wait_for(lambda: ended(tmp_path) >= 4, 120)
    above = psutil.Process(min(drivers(job))).parents()
    (supervisor,) = [one for one in above if one.cmdline()[0].startswith("ray::JobSupervisor")]
    supervisor.kill()

    check(job, tmp_path, logs, unseen=4)
    assert job.status.attempt == 2


@pytest.fixture
def losing(dashboard, existing) -> Iterator[ExistingCluster]:
    """The same Ray behind a network that loses one request in twenty, and as many answers."""
    chance = random.Random(0)

    def choose(request: str) -> Fault:
        return chance.choices([Fault(), CutBefore(), DropAnswer()], [18, 1, 1])[0]

    with FlakyProxy(dashboard.url, choose) as proxy:
        yield ExistingCluster(url=proxy.url)


@pytest.mark.soak
def test_arrays_outlive_everything(start, losing, logs, tmp_path):
    """Up to four strikes at random moments; now and then some elements are cancelled, and every
    second array is submitted and looked at through a network that loses requests and answers."""
    first = int(os.environ.get("SEED", random.randrange(10**6)))
    broken = []
    for seed in range(first, first + int(os.environ.get("RUNS", "100"))):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            _storm(partial(start, cluster=losing) if seed % 2 else start, logs, folder, seed)
        except AssertionError as error:
            print(f"seed {seed} is broken: {error}", flush=True)
            broken.append(seed)
    assert not broken


def _storm(start, logs: Path, folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    make = chance.choice([scripts, partials])
    others = [victims for victims in VICTIMS if victims is not elements]
    strikes = chance.choices(chance.choice([VICTIMS, others]), k=chance.randrange(1, 5))
    made = make(folder, seconds=chance.choice([0.1, 0.5, 1.0]))
    job = start(made, retries=_retries(strikes))
    told, may_be_again = [], 0
    if chance.random() < 0.8:  # else the first strike may come before there is a host
        wait_for(lambda: hosts(job), 90)
    for victims in strikes:
        time.sleep(chance.uniform(0, 4))
        told.append((victims.__name__, strike(job, victims)))
        may_be_again += unseen(victims)
    if chance.random() < 0.3 and ended(folder) and not job.status.state.is_terminal:
        told.append(("cancel", len(job.cancel_elements(f"{chance.randrange(COUNT)}-{COUNT - 1}"))))
    print(f"seed {seed}: {make.__name__} {told}", flush=True)
    check(job, folder, logs, unseen=may_be_again)


@pytest.mark.soak
def test_a_hundred_thousand_elements_end_once_each(start, logs):
    """Also with a driver that is killed in the middle: what has ended is not run again."""
    count = 100_000
    job = start(array(run.Script(inline="true"), over={"env.X": range(count)}))
    wait_for(lambda: (job.elements or {}).get("succeeded", 0) > count // 4, 600)

    assert strike(job, drivers)

    status = job.wait(timeout_s=1800)
    assert status.state.value == "SUCCEEDED", status
    found = job.select_elements()
    assert [one.index for one in found] == list(range(count))
    assert {(one.state, one.exit_code) for one in found} == {("succeeded", 0)}
    records = read_records(str(logs / file_of(job.id, JOURNAL_FILE)))
    ends = Counter(one.element for one in records if isinstance(one, Record) and one.kind == ENDED)
    assert set(ends.values()) == {1}
    assert len(ends) == count
