"""Chains on a real Ray: order, attempts, limits, cancelling, and dispatchers that die."""

import hashlib
import itertools
import json
import re
import secrets
import threading
from pathlib import Path

import pytest

from nemo_run_ray import nemo as plugin
from nemo_run_ray.cli import main as cli
from nemo_run_ray.experiment.dispatch import start_dispatcher
from nemo_run_ray.experiment.job import find_job
from nemo_run_ray.remote.status import JobExit, JobState, Reason
from tests.chains import Started, Yard, step
from tests.conftest import files_with, processes_where, wait_for


@pytest.fixture
def yard(tmp_path, existing):
    """Where a test's jobs meet; whatever the test is about, nothing ran twice."""
    yard = Yard(tmp_path, existing)
    yield yard
    yard.open()
    yard.check()


def log_of(started: Started, name: str, follow: bool = False) -> str:
    return "".join(find_job(started.job(name)).log(follow))


def test_a_job_is_tried_again_as_often_as_it_may(yard, unique, api):
    started = yard.start(
        unique,
        step("third", 'echo "try $NEMO_RUN_ATTEMPT"; [ "$NEMO_RUN_ATTEMPT" = 3 ]', retries=2),
        step("never", "exit 5", retries=1),
        step("usage", "exit 64", retries=2, permanent_exit_codes=[64]),
        step("after", after="third"),
    )
    log = log_of(started, "third", follow=True)

    assert started.dispatch_ends(api) == JobExit.SOME_FAILED
    begun = yard.begun()
    assert sorted(begun) == ["after", "never", "never@2", "third", "third@2", "third@3", "usage"]
    assert yard.is_before("third", "after")
    assert re.findall(r"^try (\d)$", log, re.M) == ["1", "2", "3"]
    assert re.findall(r"^try (\d)$", log_of(started, "third"), re.M) == ["1", "2", "3"]
    found = started.statuses()
    assert {name: (one.state.value, one.attempt) for name, one in found.items()} == {
        "third": ("SUCCEEDED", 3),
        "never": ("FAILED", 2),
        "usage": ("FAILED", 1),
        "after": ("SUCCEEDED", 1),
    }


@pytest.mark.soak
def test_what_is_not_placed_in_time_is_given_up(yard, unique, api):
    yard.start(f"{unique}a", step("holder", yard.gate(), cpus_per_node=1))
    wait_for(lambda: yard.begun() == ["holder"])
    started = yard.start(
        unique,
        step("late", cpus_per_node=4, pending_timeout_s=2),
        step("never", cpus_per_node=1000, pending_timeout_s=2),
        step("after", after="late"),
    )
    reading = threading.Thread(
        target=lambda: "".join(find_job(started.job("never")).output(follow=True))
    )
    reading.start()  # while it is pending
    for name in ("late", "never"):
        status = started.wait_until(name, JobState.FAILED)
        assert (status.reason, status.detail) == (Reason.NOT_PLACED, "not placed in time")
    assert started.status("after").detail == "upstream late failed"
    reading.join(15)
    assert not reading.is_alive(), "it follows a log that will never begin"

    assert started.dispatch_ends(api) == JobExit.SOME_FAILED
    yard.open()
    # Ray has let go of what it was told to stop: nothing of it starts now that there is room.
    wait_for(lambda: api.table(fresh=True)[started.job("late")]["status"] == "STOPPED")
    assert yard.begun() == ["holder"]


def test_every_attempt_gets_its_secrets_and_nobody_else(
    yard, unique, api, home, local_cluster, monkeypatch, capfd
):
    value = f"s3cr3t{secrets.token_hex(16)}"
    monkeypatch.setenv("MY_TOKEN", value)
    program = 'printf %s "$MY_TOKEN" | sha256sum; [ "$NEMO_RUN_ATTEMPT" = 2 ]'
    started = yard.start(
        unique, step("first"), step("hidden", program, "first", secrets=["MY_TOKEN"], retries=1)
    )

    assert started.dispatch_ends(api) == JobExit.SUCCEEDED
    assert log_of(started, "hidden").count(hashlib.sha256(value.encode()).hexdigest()) == 2
    assert value not in json.dumps(api.table(fresh=True))
    assert value not in "".join(capfd.readouterr())
    assert files_with(value, home) == []
    ray = Path(local_cluster._read().root)
    assert files_with(value, ray / "r" / "session_latest" / "logs") == []
    assert files_with(value, ray) == []


def test_cancelling_an_experiment_ends_all_of_it(yard, unique, api, capsys):
    started = yard.start(
        unique,
        step("runs", yard.gate(), retries=1),
        step("pends", cpus_per_node=1000),
        step("waits", after="runs"),
    )
    wait_for(lambda: yard.begun() == ["runs"])
    started.wait_until("pends", JobState.PENDING)

    cli.cancel(started.id)

    cancelled = re.findall(r"^(\w+) is cancelled", capsys.readouterr().out, re.M)
    assert sorted(cancelled) == ["pends", "runs", "waits"]
    assert started.dispatch_ends(api) == JobExit.SOME_FAILED
    assert set(started.states().values()) == {"CANCELLED"}
    yard.open()
    assert yard.begun() == ["runs"]


@pytest.mark.soak  # tests/unit/experiment/test_named_dependencies.py has it on a simulated Ray
def test_a_job_waits_for_jobs_of_other_experiments(yard, unique, api):
    alone = yard.start(f"{unique}a", step("alone", yard.gate()))
    dispatch = yard.start(f"{unique}b", step("good", yard.gate()), step("bad", "exit 3", retries=1))
    handles = {
        name: plugin.handle(one.job(name))
        for one, name in ((alone, "alone"), (dispatch, "good"), (dispatch, "bad"))
    }
    started = yard.start(
        unique,
        step("both", dependencies=[handles["alone"], handles["good"]]),
        step("lost", dependencies=[handles["bad"]]),
        step("after", after="both"),
    )

    status = started.wait_until("lost", JobState.CANCELLED)
    assert status.detail == f"upstream {dispatch.job('bad')} failed"
    waits = started.status("both")
    assert (waits.state, waits.reason) == (JobState.WAITING, Reason.WAITS)
    assert waits.waits_for == (alone.job("alone"), dispatch.job("good"))
    yard.open()
    assert started.dispatch_ends(api) == JobExit.SOME_FAILED
    assert sorted(yard.begun()) == ["after", "alone", "bad", "bad@2", "both", "good"]
    assert yard.is_before("alone", "both")
    assert yard.is_before("good", "both")
    assert yard.is_before("both", "after")


def dispatchers(submission_id: str) -> list[int]:
    """Processes of a dispatcher, without the shell around them."""
    words = ("dispatch", submission_id)
    return processes_where(lambda _, found: words in itertools.pairwise(found))


def test_a_client_that_waits_starts_a_dispatcher_again_that_was_stopped(yard, unique, api):
    steps = step("first", yard.gate()), step("second", after="first")
    waits = threading.Thread(
        target=yard.start, args=(unique, *steps), kwargs={"detach": False}, daemon=True
    )
    waits.start()
    wait_for(lambda: yard.begun() == ["first"])
    (dispatcher,) = [
        name
        for name in api.table(fresh=True)
        if name.startswith(f"{unique}_") and name.endswith(".dispatcher")
    ]
    api.stop(dispatcher)
    wait_for(lambda: f"{dispatcher}@2" in api.table(fresh=True))
    yard.open()
    waits.join(120)
    assert not waits.is_alive(), "the client has seen the end"
    assert yard.begun() == ["first", "second"]


@pytest.mark.soak
def test_two_dispatchers_at_the_same_time_do_no_harm(yard, existing, unique, api):
    started = yard.start(
        unique,
        step("first", '[ "$NEMO_RUN_ATTEMPT" = 2 ]', retries=1),
        *(step(f"job{number}", after="first") for number in range(3)),
        step("bad", "exit 1", after="job0 job1 job2", retries=1),
    )
    assert start_dispatcher(started.dispatch, api, existing.record()) == f"{started.dispatch.id}@2"

    for number in (1, 2):
        assert started.dispatch_ends(api, number) == JobExit.SOME_FAILED
    begun = yard.begun()
    assert begun[:2] == ["first", "first@2"]
    assert sorted(begun[2:5]) == ["job0", "job1", "job2"]
    assert begun[5:] == ["bad", "bad@2"]
