"""When an allocation ends so that the next one goes on, and how chains are started in that."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_run_ray.remote.dispatch.time_left import TimeLeft, time_left
from nemo_run_ray.remote.slurm.renewal import Renewal
from nemo_run_ray.remote.slurm.run_folder import CLUSTER_FAILED, HeadAddress, RunEnd, RunFolder
from nemo_run_ray.remote.slurm.spool import Spool
from tests.http_server import Handler, serving
from tests.unit.remote.slurm.test_slurm_decide import _SETTINGS

_DONE = {"submission_id": "a", "status": "SUCCEEDED"}
_DISPATCHER = {"submission_id": "d", "status": "RUNNING"}


@pytest.fixture
def life(tmp_path) -> Path:
    """The second allocation of a cluster with one chain: the dispatcher d, the jobs a and b."""
    dispatch = tmp_path / "dispatches" / "d"
    dispatch.mkdir(parents=True)
    (dispatch / "ids").write_text("d\na\nb\n")
    body = {"submission_id": "d", "entrypoint": "run @submission_id@", "metadata": {"k": "v"}}
    (dispatch / "start.json").write_text(json.dumps({"body": body, "archives": ["x.zip"]}))
    (dispatch / "x.zip").write_bytes(b"code")
    for number, run in (1, "7.0"), (2, "8.0"):
        (tmp_path / "lives" / str(number) / "run" / run).mkdir(parents=True)
    (tmp_path / "lives/2/renewed").touch()
    table = [_DONE, _DISPATCHER, {"submission_id": "d@cancel", "status": "SUCCEEDED"}]
    (tmp_path / "lives/1/run/7.0/jobs.json").write_text(json.dumps(table))
    (tmp_path / "token").write_text("t" * 64)
    return tmp_path / "lives" / "2"


def settings(life: Path, **fields):
    run = next((life / "run").iterdir())
    given = {"life": str(life), "run": str(run), "renew": True, "ends_at": 10_000, **fields}
    return _SETTINGS._replace(**given)


def renewal(life: Path, now: list[float], **fields) -> Renewal:
    found = Renewal(settings(life, **fields), str(life.parent.parent / "token"), lambda: now[0])
    found.step(HeadAddress("10.0.0.1", 0, 0))  # which reads the earlier tables
    return found


def test_it_ends_in_time_for_the_next_one(life):
    now = [9_000.0]
    found = renewal(life, now)
    rows = [_DISPATCHER, _DONE]
    now[0] = 9_899.0
    assert found.end(rows, is_idle=False) is None
    now[0] = 9_900.0  # a tenth of it, at most 120 s before
    end = found.end(rows, is_idle=False)
    assert end is not None
    assert end.renews
    assert "its walltime is over" in end.why


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({"renew": False}, [_DISPATCHER, _DONE]),
        ({"ends_at": None}, [_DISPATCHER, _DONE]),
        ({}, [_DISPATCHER]),
        ({}, [_DISPATCHER, {"submission_id": "b", "status": "PENDING"}]),
        ({}, [_DISPATCHER, {"submission_id": "other", "status": "RUNNING"}]),
        ({}, [_DONE, {"submission_id": "d", "status": "SUCCEEDED"}]),
        ({}, [{"submission_id": "d@3", "status": "FAILED", "driver_exit_code": 8}]),
    ],
)
def test_nothing_is_renewed_for_nothing(life, fields, rows):
    assert renewal(life, [9_000.0], **fields).end(rows, is_idle=True) is None
    assert renewal(life, [9_999.0], **fields).end(rows, is_idle=False) is None


def test_a_chain_that_is_decided_keeps_its_ids_alone(life):
    found = renewal(life, [9_999.0])
    assert found.end([_DISPATCHER, _DONE], is_idle=False) is not None
    rows = [_DONE, {"submission_id": "d", "status": "SUCCEEDED"}]
    assert found.end(rows, is_idle=False) is None
    assert [path.name for path in (life.parent.parent / "dispatches/d").iterdir()] == ["ids"]


def test_a_ray_that_does_not_come_up_is_tried_once_more(life):
    """One bad node must not end a chain of days; where the one before failed too, it does."""
    now = [9_000.0]
    assert not renewal(life, now).may_try_again()
    ready = life.parent / "1/run/7.0/ready.json"
    ready.write_text("{}")
    assert renewal(life, now).may_try_again()
    assert not renewal(life, now, renew=False).may_try_again()
    (life / "renewed").unlink()
    assert not renewal(life, now).may_try_again(), "its user waits for it, and is told"


def test_what_is_left_needs_more_time(life):
    rows = [{"submission_id": "d", "status": "FAILED", "driver_exit_code": 9}]
    assert renewal(life, [9_000.0]).end(rows, is_idle=True) is None, "it has started nothing"
    rows.append({"submission_id": "b", "status": "FAILED"})
    assert renewal(life, [9_000.0]).end(rows, is_idle=False) is None
    end = renewal(life, [9_000.0]).end(rows, is_idle=True)
    assert end is not None
    assert end.renews


def test_a_chain_that_nothing_could_be_done_for_is_not_taken_over_again(life):
    late = [{"submission_id": "d", "status": "FAILED", "driver_exit_code": 9}]
    table = life.parent / "1/run/7.0/jobs.json"
    first = table.read_text()
    table.write_text("[]")
    assert renewal(life, [9_000.0]).end([_DONE], is_idle=True) is None, "it was never started"
    assert renewal(life, [9_000.0]).end(late, is_idle=True).renews, "it came too late for this one"
    table.write_text(first)
    rows = [{"submission_id": "d@2", "status": "FAILED", "driver_exit_code": 9}]
    found = renewal(life, [9_000.0])
    assert found.end(rows, is_idle=True) is None, "which has had all of its time"
    rows.append({"submission_id": "b", "status": "FAILED"})
    assert found.end(rows, is_idle=True).renews


def test_a_signal_before_the_walltime_is_its_end(life):
    rows = [_DONE, {"submission_id": "d", "status": "RUNNING"}]
    found = renewal(life, [9_000.0])
    assert found.end(rows, is_idle=False) is None
    Path(found._settings.run, "signalled").touch()
    assert found.end(rows, is_idle=False).renews
    rows = [{"submission_id": "d", "status": "SUCCEEDED"}]
    end = found.end(rows, is_idle=False)
    assert (end.code, end.renews) == (CLUSTER_FAILED, False)
    assert "SIGUSR1" in end.why


def test_a_dispatcher_that_died_gives_no_idle_allocation_back(life):
    """Whoever uses it for other things keeps it until its walltime."""
    rows = [_DONE, {"submission_id": "d", "status": "FAILED", "driver_exit_code": 3}]
    assert renewal(life, [9_000.0]).end(rows, is_idle=True) is None
    end = renewal(life, [9_999.0]).end(rows, is_idle=True)
    assert end is not None
    assert end.renews


def test_a_dispatcher_knows_when_it_ends(life):
    env = renewal(life, [9_000.0]).environment()
    assert time_left(env, 9_100.0) == TimeLeft(800.0, 870.0, True)
    env = renewal(life, [9_000.0], renew=False).environment()
    assert time_left(env, 9_100.0) == TimeLeft(900.0, 970.0, False)
    assert renewal(life, [9_000.0], ends_at=None).environment() == {}
    job = settings(life)._replace(life="")
    assert Renewal(job, "", lambda: 9_000.0).environment() == {}, "that is NeMo-Run's own"


def test_the_jobs_script_is_told(tmp_path):
    folder = RunFolder(str(tmp_path), 0)
    folder.publish_end(RunEnd(0, "its walltime is over", True))
    assert (tmp_path / "renews").exists()
    assert folder.end() == RunEnd(0, "its walltime is over", True)


class Dashboard(Handler):
    """Refuses the first request of each path, and knows the ids that it has."""

    seen: list
    taken: set

    def answer(self) -> None:
        data = self.body()
        first = not any(path == self.path for _, path, _ in self.seen)
        self.seen.append((self.command, self.path, data))
        if first:
            return self.send(500, "not yet")
        if self.path == "/api/jobs/" and json.loads(data)["submission_id"] in self.taken:
            return self.send(500, "Job with submission_id d@2 already exists.")
        return self.send(200, "{}")


@pytest.fixture(params=[False, True])
def dashboard(request) -> Iterator[tuple[HeadAddress, list]]:
    """One where nobody has started the dispatcher, and one where a client has."""
    seen: list = []
    with serving(Dashboard, seen=seen, taken={"d@2"} if request.param else set()) as url:
        yield HeadAddress("127.0.0.1", 6379, int(url.rpartition(":")[2])), seen


def spool_of(life: Path, now: list[float]) -> Spool:
    return Spool(settings(life), str(life.parent.parent / "token"), lambda: now[0])


def test_its_dispatcher_is_started_once(life, dashboard):
    head, seen = dashboard
    now = [0.0]
    spool = spool_of(life, now)
    for _ in range(9):
        now[0] += 5.0
        spool.step(head)
    assert not spool.is_busy
    posts = [json.loads(data) for method, _, data in seen if method == "POST"]
    assert [post["submission_id"] for post in posts] == ["d@2", "d@2"], "the second one is heard"
    assert posts[0]["entrypoint"] == "run d@2"
    puts = [data for method, path, data in seen if method == "PUT"]
    assert puts == [b"code", b"code"], "the second one is heard, and never sent again"


def test_between_two_requests_the_head_does_other_things(life, dashboard, capfd):
    head, seen = dashboard
    now = [0.0]
    spool = spool_of(life, now)
    for count in range(4):
        assert len(seen) == max(0, count - 1)
        spool.step(head)
        now[0] += 5.0
    assert spool.is_busy
    told = capfd.readouterr().out
    assert told.count("The chain d cannot go on yet: Ray answered 500") == 1
    assert "t" * 64 not in told


def test_a_request_that_failed_is_not_made_again_at_once(life, dashboard):
    head, seen = dashboard
    spool = spool_of(life, [0.0])
    for _ in range(9):
        spool.step(head)
    assert len(seen) == 1


def test_a_chain_that_never_goes_on_holds_no_allocation(life, dashboard, capfd):
    head, _ = dashboard
    (life.parent.parent / "dispatches/d/start.json").unlink()
    now = [0.0]
    spool = spool_of(life, now)
    while spool.is_busy:
        now[0] += 5.0
        assert now[0] < 1000
        spool.step(head)
    told = capfd.readouterr().out
    assert told.count("The chain d cannot go on yet") == 1
    assert "and is given up" in told


def test_earlier_tables_that_can_never_be_read_hold_no_allocation(life, dashboard, capfd):
    head, seen = dashboard
    table = life.parent / "1/run/7.0/jobs.json"
    table.unlink()
    table.mkdir()
    now = [0.0]
    spool = spool_of(life, now)
    while spool.is_busy:
        now[0] += 5.0
        assert now[0] < 1000
        spool.step(head)
    assert seen == []
    assert "none of them goes on here" in capfd.readouterr().out


def test_earlier_tables_that_cannot_be_read_are_read_later(life, dashboard, capfd):
    head, seen = dashboard
    table = life.parent / "1/run/7.0/jobs.json"
    text = table.read_text()
    table.unlink()
    table.mkdir()
    now = [0.0]
    spool = spool_of(life, now)
    for _ in range(3):
        now[0] += 5.0
        spool.step(head)
    assert spool.is_busy
    assert seen == []
    assert capfd.readouterr().out.count("Earlier chains cannot be read yet") == 1
    table.rmdir()
    table.write_text(text)
    for _ in range(9):
        now[0] += 5.0
        spool.step(head)
    assert not spool.is_busy


def test_an_allocation_that_goes_on_with_nothing_forgets_the_code_of_other_chains(life):
    dispatch = life.parent.parent / "dispatches/d"
    Spool(settings(life), "").clear()
    assert len(list(dispatch.iterdir())) == 3, "it goes on with them"
    (life / "renewed").unlink()
    Spool(settings(life), "").clear()
    assert [path.name for path in dispatch.iterdir()] == ["ids"], "old tables are read by them"


def test_code_that_cannot_be_looked_for_is_not_removed(life, monkeypatch):
    """A file system that hiccups is no proof that a chain is decided."""
    found = renewal(life, [9_999.0])
    stat = os.stat

    def broken(path, *args, **fields):
        if str(path).endswith("start.json"):
            raise OSError(116, "Stale file handle")
        return stat(path, *args, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", broken)
        assert found.end([_DISPATCHER, _DONE], is_idle=False) is None
    assert (life.parent.parent / "dispatches/d/x.zip").exists()
    assert found.end([_DISPATCHER, _DONE], is_idle=False) is not None


def test_chains_that_cannot_be_read_now_renew_nothing_yet(life):
    found = renewal(life, [9_999.0])
    ids = life.parent.parent / "dispatches/d/ids"
    ids.unlink()
    ids.mkdir()
    assert found.end([_DISPATCHER, _DONE], is_idle=False) is None
    ids.rmdir()
    ids.write_text("d\na\nb\n")
    assert found.end([_DISPATCHER, _DONE], is_idle=False) is not None


@pytest.mark.parametrize(
    "row",
    [
        {"submission_id": "d", "status": "SUCCEEDED"},
        {"submission_id": "d", "status": "FAILED", "driver_exit_code": 8},
    ],
)
def test_a_chain_that_is_decided_is_not_started(life, dashboard, row):
    head, seen = dashboard
    (life.parent / "1/run/7.0/jobs.json").write_text(json.dumps([row]))
    spool = spool_of(life, [0.0])
    for _ in range(3):
        spool.step(head)
    assert not spool.is_busy
    assert seen == []


def test_a_chain_of_another_allocation_is_not_started(life, dashboard):
    """It was lost with that, and its user knows so."""
    head, seen = dashboard
    (life.parent / "1/run/7.0/jobs.json").write_text(json.dumps([_DONE]))
    spool = spool_of(life, [0.0])
    for _ in range(3):
        spool.step(head)
    assert not spool.is_busy
    assert seen == []


def test_an_allocation_that_is_no_renewal_starts_nothing(life, dashboard):
    head, seen = dashboard
    (life / "renewed").unlink()
    spool = spool_of(life, [0.0])
    for _ in range(3):
        spool.step(head)
    assert not spool.is_busy
    assert seen == []
