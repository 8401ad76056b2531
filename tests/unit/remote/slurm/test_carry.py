"""When a named allocation ends, and how the next one continues its dispatches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_run_ray.remote.carried_over import DISPATCHES, TABLE, rows_before
from nemo_run_ray.remote.dashboard import LOG_FILE, DashboardClient
from nemo_run_ray.remote.decide import TimeLeft, time_left
from nemo_run_ray.remote.end_record import EndRecord, lock_of, proof_of
from nemo_run_ray.remote.slurm import carry
from nemo_run_ray.remote.slurm.carry import Allocation
from nemo_run_ray.remote.slurm.folder import CLUSTER_FAILED, RunEnd
from nemo_run_ray.remote.spec import LOCK_KEY, NONCE_KEY
from nemo_run_ray.remote.status import JobState, Reason, attempt_of_row
from tests.fake_ray import EXIT_CODE_IS_LOST
from tests.http_server import Handler, serving
from tests.unit.remote.slurm.test_slurm_decide import settings_with

_DONE = {"submission_id": "a", "status": "SUCCEEDED"}
_DISPATCHER = {"submission_id": "d", "status": "RUNNING"}
_DECIDED = {"submission_id": "d", "status": "SUCCEEDED"}
_SOME_FAILED = {"submission_id": "d", "status": "FAILED", "driver_exit_code": 8}
_NO_TIME = {"submission_id": "d", "status": "FAILED", "driver_exit_code": 9}
_DIED = {"submission_id": "d", "status": "FAILED", "driver_exit_code": 3}


class Dashboard(Handler):
    """Ray's answers. It refuses as often as a test says, and knows the ids that it has."""

    rows: list
    seen: list
    taken: set
    refusals: dict
    protocol_version = "HTTP/1.0"  # no connection stays open

    def answer(self) -> None:
        data = self.body()
        self.seen.append((self.command, self.path, data))
        if self.refusals.get(self.path, 0):
            self.refusals[self.path] -= 1
            return self.send(500, "not yet")
        if self.path == "/api/version":
            return self.send(200, json.dumps({"session_name": "session_1"}))
        if self.path.startswith(LOG_FILE):
            record = EndRecord(0, "NONE", "exit code 0", proof=proof_of("key", 0))
            return self.send(200, f"words\n{record.line('a' * 16)}")
        if self.command == "POST" and json.loads(data)["submission_id"] in self.taken:
            return self.send(500, "Job with submission_id d@2 already exists.")
        return self.send(200, json.dumps(self.rows))


class World:
    """The second allocation of a cluster with one chain: the dispatcher d, the jobs a and b."""

    def __init__(self, folder: Path, fields: dict) -> None:
        self.dispatch = folder / DISPATCHES / "d"
        self.dispatch.mkdir(parents=True)
        (self.dispatch / "ids").write_text("d\na\nb\n")
        body = {"submission_id": "d", "entrypoint": "run @submission_id@", "metadata": {"k": "v"}}
        start = {"body": body, "archives": ["x.zip"]}
        (self.dispatch / "start.json").write_text(json.dumps(start))
        (self.dispatch / "x.zip").write_bytes(b"code")
        self.previous = folder / "lives/1/run/7.0"
        self.path = folder / "lives/2"
        self.run = self.path / "run/8.0"
        for path in (self.previous, self.run, self.path / "users"):
            path.mkdir(parents=True)
        (self.path / "renewed").touch()
        self.table = self.previous / TABLE
        cancel = {"submission_id": "d@cancel", "status": "SUCCEEDED"}
        self.table.write_text(json.dumps([_DONE, _DISPATCHER, cancel]))
        self.rows: list = fields["rows"]
        self.seen: list = fields["seen"]
        self.taken: set = fields["taken"]
        self.refusals: dict[str, int] = fields["refusals"]
        self.dashboard = DashboardClient(fields["url"], lambda: "t" * 64)
        self.now = self.at = 0.0

    def settings(self, **fields):
        paths = {"allocation": str(self.path), "run": str(self.run)}
        return settings_with(**{**paths, "renew": True, "ends_at": 10_000, **fields})

    def allocation(self, at: float = 9_000.0, **fields) -> Allocation:
        """At a time since the epoch, after it has read the table of the run before."""
        self.at = at
        found = Allocation(self.settings(**fields))
        found.dashboard = self.dashboard
        found.begin()
        return found

    def posts(self) -> list[dict]:
        return [json.loads(data) for method, _, data in self.seen if method == "POST"]


@pytest.fixture
def world(tmp_path, monkeypatch) -> Iterator[World]:
    fields: dict = {"rows": [], "seen": [], "taken": set(), "refusals": {}}
    with serving(Dashboard, **fields) as url:
        found = World(tmp_path, {**fields, "url": url})
        monkeypatch.setattr(carry, "monotonic", lambda: found.now)
        monkeypatch.setattr(carry, "time", SimpleNamespace(time=lambda: found.at + found.now))
        yield found


def test_the_kept_table_has_the_end_that_ray_has_lost(world):
    lost = {"submission_id": "one", "driver_node_id": "n1"}
    lost["metadata"] = {NONCE_KEY: "a" * 16, LOCK_KEY: lock_of(proof_of("key", 0))}
    world.rows.append({**lost, **EXIT_CODE_IS_LOST})
    world.allocation().keep_table()
    row = json.loads((world.run / TABLE).read_text())[-1]
    assert (row["status"], row["driver_exit_code"]) == ("SUCCEEDED", 0)


@pytest.mark.parametrize(
    ("at", "is_idle", "fields", "rows", "why"),
    [
        (9_899.0, False, {}, [_DISPATCHER, _DONE], ""),
        # A tenth of its time before the walltime, at most 120 s.
        (9_900.0, False, {}, [_DISPATCHER, _DONE], "its walltime is over"),
        (9_999.0, False, {"renew": False}, [_DISPATCHER, _DONE], ""),
        (9_999.0, False, {"ends_at": None}, [_DISPATCHER, _DONE], ""),
        # No job of the chain was started in this run.
        (9_999.0, False, {}, [_DISPATCHER], ""),
        (9_999.0, False, {}, [_DISPATCHER, {"submission_id": "b", "status": "PENDING"}], ""),
        (9_999.0, False, {}, [_DISPATCHER, {"submission_id": "other", "status": "RUNNING"}], ""),
        # The chain is decided.
        (9_999.0, False, {}, [_DONE, _DECIDED], ""),
        (9_999.0, False, {}, [{**_SOME_FAILED, "submission_id": "d@3"}], ""),
        # Its dispatcher had no time for the remaining jobs.
        (9_000.0, True, {}, [_DONE, _NO_TIME], "the remaining jobs need more time than it has"),
        (9_000.0, False, {}, [_DONE, _NO_TIME], ""),
        # A dispatcher that died gives no idle allocation back before its walltime.
        (9_000.0, True, {}, [_DONE, _DIED], ""),
        (9_999.0, True, {}, [_DONE, _DIED], "its walltime is over"),
    ],
)
def test_when_the_next_allocation_continues(world, at, is_idle, fields, rows, why):
    allocation = world.allocation(**fields)
    world.now = at - 9_000.0
    assert allocation.renewal(rows, is_idle) == (RunEnd(0, why, True) if why else None)


def test_a_chain_that_gained_nothing_is_not_carried_over_again(world):
    late = [_NO_TIME]
    first = world.table.read_text()
    world.table.write_text("[]")
    assert world.allocation().renewal(late, True).renews, "it came too late for this one"
    world.table.write_text(first)
    rows = [{"submission_id": "d@2", "status": "FAILED", "driver_exit_code": 9}]
    assert world.allocation().renewal(rows, True) is None, "it has had all of its time"
    rows.append({"submission_id": "b", "status": "FAILED"})
    assert world.allocation().renewal(rows, True).renews


def test_a_signal_before_the_walltime_ends_the_allocation(world):
    allocation = world.allocation()
    (world.run / "signalled").touch()
    assert allocation.renewal([_DONE, _DISPATCHER], False).renews
    end = allocation.renewal([_DECIDED], False)
    assert (end.code, end.renews) == (CLUSTER_FAILED, False)
    assert "SIGUSR1" in end.why


def test_a_ray_that_does_not_come_up_is_tried_once_more(world):
    """One bad node must not end a chain of days; two in a row do."""
    assert not world.allocation().may_try_again()
    (world.previous / "ready.json").write_text("{}")
    assert world.allocation().may_try_again()
    assert not world.allocation(renew=False).may_try_again()
    (world.path / "renewed").unlink()
    assert not world.allocation().may_try_again(), "its user waits for it, and sees the error"


def test_a_dispatcher_knows_when_its_allocation_ends(world):
    env = world.allocation().ray_env
    assert time_left(env, 9_100.0) == TimeLeft(800.0, 870.0, True)
    env = world.allocation(renew=False).ray_env
    assert time_left(env, 9_100.0) == TimeLeft(900.0, 970.0, False)
    assert world.allocation(ends_at=None).ray_env == {}
    assert Allocation(world.settings(allocation="")).ray_env == {}, "NeMo-Run's own cluster"


@pytest.mark.parametrize("is_taken", [False, True], ids=["free", "started by a client"])
def test_its_dispatcher_is_started_once(world, is_taken):
    world.taken |= {"d@2"} if is_taken else set()
    world.refusals.update({"/api/packages/gcs/x.zip": 1, "/api/jobs/": 2})
    allocation = world.allocation(ends_at=None)
    for _ in range(9):
        world.now += 5.0
        allocation.step()
    posts = world.posts()
    assert [post["submission_id"] for post in posts] == ["d@2", "d@2"], "the first was refused"
    assert posts[0]["entrypoint"] == "run d@2"
    puts = {data for method, _, data in world.seen if method == "PUT"}
    assert puts == {b"code"}


@pytest.mark.parametrize("text", [None, '{"body": {', "{}"])
def test_a_chain_that_cannot_continue_is_given_up(world, capfd, text):
    start = world.dispatch / "start.json"
    start.unlink() if text is None else start.write_text(text)
    allocation = world.allocation(ends_at=None)
    for _ in range(100):
        world.now += 5.0
        allocation.step()
    assert world.posts() == []
    printed = capfd.readouterr().out
    assert printed.count("The chain d cannot continue yet: ") == 1
    assert "The chain d cannot continue, and is given up: " in printed


@pytest.mark.parametrize(
    ("table", "is_renewed"),
    [
        ([_DECIDED], True),
        ([_SOME_FAILED], True),
        ([_DONE], True),  # the chain of another allocation, which was lost with that
        ([_DONE, _DISPATCHER], False),
    ],
)
def test_nothing_to_continue_starts_nothing(world, table, is_renewed):
    world.table.write_text(json.dumps(table))
    if not is_renewed:
        (world.path / "renewed").unlink()
    allocation = world.allocation(ends_at=None)
    allocation.step()
    assert world.posts() == []


def _row(name: str, status: str) -> dict:
    return {"submission_id": name, "status": status, "start_time": 1000}


def test_each_run_hands_one_table_on_to_the_next(world):
    """Also after a requeue, and over a run that never had a Ray."""
    table = [_row("a", "SUCCEEDED"), _row("b", "RUNNING"), _row("d", "RUNNING")]
    world.table.write_text(json.dumps([*table, _row("other", "RUNNING")]))
    (world.previous / "end.json").write_text('{"code": 0, "why": "its walltime"}')
    world.rows[:] = [_row("b@2", "PENDING"), _row("d@2", "RUNNING"), _row("else", "RUNNING")]
    world.allocation().keep_table()
    world.table.unlink()
    (world.run / "end.json").write_text("{")  # it only explains
    (world.path / "run/8.1").mkdir()
    (world.path / "run/8.1" / TABLE).write_text("[{")  # torn by a crash
    third = world.path.parent / "3"
    (third / "run/9.0").mkdir(parents=True)
    (third / "run/.DS_Store").write_bytes(b"\xff")
    (third / "renewed").touch()
    for run in (world.path / "run/8.1", third / "run/9.0"):
        rows = rows_before(str(run.parent.parent), f"/elsewhere/run/{run.name}/")
        assert list(rows) == ["a", "b", "d", "b@2", "d@2"]
    attempt = attempt_of_row(rows["b"])
    assert (attempt.status.state, attempt.status.reason) == (JobState.FAILED, Reason.ALLOCATION)
    assert "its allocation of Slurm has ended: its walltime" in attempt.status.detail
    waiting = attempt_of_row(rows["b@2"])
    assert waiting.status.reason is Reason.START_TIMEOUT, "which counts as no attempt"
    assert attempt_of_row(rows["a"]).status.state is JobState.SUCCEEDED
