"""To look changes nothing: every verb that reads, against a cluster that fails on any write."""

import json
import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import nemo_run as run
import pytest
from nemo_run.config import get_nemorun_home
from typer.testing import CliRunner

from nemo_run_ray import RayExecutor, find
from nemo_run_ray.cli import main as cli
from nemo_run_ray.experiment.dispatch import tend
from nemo_run_ray.remote.spec import status_file_name
from tests import warm
from tests.fake_ray import NODE, FakeRay
from tests.unit.experiment.conftest import Submitted, invoke

READS: dict[str, Callable[[str, FakeRay], object]] = {
    "status": lambda name, ray: invoke("status", name),
    "status --json": lambda name, ray: invoke("status", "--json", name),
    "status --once": lambda name, ray: invoke("status", "--once", name),
    "logs": lambda name, ray: invoke("logs", "--job", "ended", name),
    "logs --follow": lambda name, ray: invoke("logs", "--follow", "--raw", "--job", "ended", name),
    "timeline": lambda name, ray: invoke("timeline", name, "-o", "/dev/null"),
    "Experiment.logs": lambda name, ray: run.Experiment.from_title(name).logs("ended"),
    "job.log": lambda name, ray: list(find(name)[0].log()),
    "doctor": lambda name, ray: invoke("doctor", "--address", ray.url),
    "doctor by a file": lambda name, ray: invoke("doctor", "a-file"),
    "Experiment.status": lambda name, ray: run.Experiment.from_title(name).status(True),
    "find": lambda name, ray: [(one.status, one.attempts, one.name) for one in find(name)],
    "a dry run": lambda name, ray: run.run(
        run.Script(inline="true"), executor=RayExecutor(address=ray.url), dryrun=True
    ),
}


@pytest.fixture
def direct(ray: FakeRay, unique: str) -> Submitted:
    """Jobs without a dispatcher: one has ended, one goes on although it was cancelled."""
    submitted = Submitted(ray, unique, "ended", "goes-on", "starts")
    ray.rows[f"{submitted.id}.ended"].update(status="SUCCEEDED", driver_exit_code=0)
    ray.logs[f"{submitted.id}.ended"] = "words\n"
    ray.rows[f"{submitted.id}.goes-on"].update(
        status="RUNNING", driver_node_id="a node that is gone"
    )
    ray.rows[f"{submitted.id}.starts"]["start_time"] -= 3_600_000
    submitted.claim("goes-on")
    return submitted


@pytest.fixture
def chain(ray: FakeRay, unique: str) -> Submitted:
    """A chain whose dispatcher has died after the first job."""
    submitted = Submitted(ray, unique, "ended", "next after ended")
    ray.dispatch(submitted.dispatch.spec, rounds=3)
    ray.logs[f"{submitted.id}.ended"] = "words\n"
    ray.rows[submitted.dispatch.id].update(status="FAILED", message="killed")
    return submitted


@pytest.fixture(params=["direct", "chain"])
def submitted(request) -> Submitted:
    """Either, beside jobs of a stranger's that look as if nobody looked after them."""
    found: Submitted = request.getfixturevalue(request.param)
    found.stranger("theirs-waits", "PENDING")
    found.stranger("theirs-runs", "RUNNING", driver_node_id="a node that is gone")
    found.ray.requests.clear()
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("verb", READS)
def test_a_verb_that_reads_writes_nothing(submitted, unique, verb, tmp_path, monkeypatch):
    file = tmp_path / "cluster_configs" / "a-file.yaml"
    file.parent.mkdir()
    file.write_text(f"cluster: {{address: '{submitted.ray.url}'}}\n")
    monkeypatch.chdir(tmp_path)
    submitted.ray.takes_writes = False
    home = Path(get_nemorun_home())
    before, files = json.dumps(submitted.ray.rows), files_of(home)
    handler, logger = signal.getsignal(signal.SIGINT), logging.getLogger("httpx")
    level, handlers = logger.level, list(logger.handlers)
    READS[verb](unique, submitted.ray)
    assert files_of(home) == files
    assert submitted.ray.requests or verb == "a dry run"
    assert submitted.ray.writes == []
    assert json.dumps(submitted.ray.rows) == before
    assert signal.getsignal(signal.SIGINT) is handler
    assert (logger.level, logger.handlers) == (level, handlers)
    assert logger.filter(logging.makeLogRecord({"name": "httpx", "levelno": logging.INFO}))


_IMPORTED = """
import logging, signal
import nemo_run
known = logging.getLogger("httpx")
before = known.level, list(known.handlers), list(known.filters), signal.getsignal(signal.SIGINT)
import nemo_run_ray
import nemo_run_ray.cli.main
after = known.level, list(known.handlers), list(known.filters), signal.getsignal(signal.SIGINT)
print(before == after)
"""


def test_an_import_changes_no_logger_and_no_signal_handler(tmp_path):
    env = {**os.environ, "NEMORUN_HOME": str(tmp_path)}
    done = warm.python("-c", _IMPORTED, env=env, cwd=str(tmp_path))
    assert done.stdout == "True\n", done.stderr


def test_what_is_not_ours_is_not_tended(submitted):
    theirs = {name: dict(submitted.ray.rows[name]) for name in ("theirs-waits", "theirs-runs")}
    for _ in range(3):
        tend(submitted.exp_dir)
    assert submitted.ray.writes, "ours is looked after"
    assert all("theirs" not in path for _, path in submitted.ray.requests)
    assert all("theirs" not in body.decode(errors="replace") for body in submitted.ray.sent)
    assert {name: submitted.ray.rows[name] for name in theirs} == theirs


def test_one_answer_comes_from_one_look(ray, unique):
    Submitted(ray, unique, *(f"job{number}" for number in range(5)))
    ray.requests.clear()
    invoke("status", "--json", unique)
    assert [path for _, path in ray.requests if path == "/api/jobs/"] == ["/api/jobs/"]
    assert len(ray.requests) == 1


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (("SUCCEEDED", "RUNNING"), 0),
        (("SUCCEEDED", "FAILED"), 3),
        (("STOPPED", "FAILED"), 3),
        (("SUCCEEDED", None), 4),
        (("SUCCEEDED", "PAUSED"), 5),
        (("SUCCEEDED", "STOPPED"), 6),
    ],
)
def test_one_look_has_an_exit_code_that_says_how_the_jobs_are(ray, unique, states, code):
    submitted = Submitted(ray, unique, *(f"job{number}" for number in range(len(states))))
    for job, state in zip(submitted.jobs.values(), states, strict=True):
        ray.rows[job.id].update(status=state)
        if state is None:  # the cluster has no record of it any more
            del ray.rows[job.id]
    build = cli.build()
    assert CliRunner().invoke(build, ["status", "--once", unique]).exit_code == code
    assert CliRunner().invoke(build, ["status", "--json", unique]).exit_code == 0


_WORDS = "[/x] \x1b]0;mine\x07\x1b[31mred\x1b[0m\x9b2J"


@pytest.mark.parametrize("verb", ["status", "cancel", "clusters", "doctor"])
def test_words_of_others_are_shown_as_text(ray, unique, verb, tmp_path, monkeypatch):
    """A host's name, a message and a file's words neither style a terminal nor end a verb."""
    submitted = Submitted(ray, unique, "group", nodes=2)
    job = submitted.jobs["group"]
    ray.rows[job.id].update(status="FAILED", driver_node_id=NODE, message=_WORDS)
    row = {"role": _WORDS, "replica": 0, "service": False, "state": "ended", "exit_code": 1}
    row["node"] = NODE
    told = {
        "phase": _WORDS,
        "waits_for_room": "",
        "roles": [{**row, "host": _WORDS, "address": ""}],
    }
    ray.files[status_file_name(job.id)] = json.dumps(told)
    file = tmp_path / "cluster_configs" / "wrong.yaml"
    file.parent.mkdir()
    file.write_text("cluster: {address: '[/x] \\e]0;mine\\a'}\n")
    monkeypatch.chdir(tmp_path)
    words = {
        "status": ["status", "--once", unique],
        "cancel": ["cancel", "--job", _WORDS, unique],
        "clusters": ["clusters"],
        "doctor": ["doctor", "--address", f"http://{_WORDS}"],
    }[verb]
    done = CliRunner().invoke(cli.build(), words)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert re.search(r"\[ ?/x\]", done.output)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", done.output)
