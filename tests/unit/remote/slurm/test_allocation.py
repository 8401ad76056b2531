"""When an allocation ends because nobody needs it, on a real folder and a real HTTP server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_run_ray.remote.dashboard import LOG_FILE
from nemo_run_ray.remote.earlier import TABLE
from nemo_run_ray.remote.end_record import EndRecord, lock_of, proof_of
from nemo_run_ray.remote.rows import LOCK_KEY, NONCE_KEY
from nemo_run_ray.remote.slurm.allocation import KEEP, RELEASED, STOP, USERS, Allocation
from nemo_run_ray.remote.slurm.renewal import Renewal
from nemo_run_ray.remote.slurm.run_folder import HeadAddress, RunEnd
from tests.fake_ray import EXIT_CODE_IS_LOST
from tests.http_server import Handler, serving
from tests.unit.remote.slurm.test_slurm_decide import _SETTINGS


class Dashboard(Handler):
    rows: list
    refusals: list

    def answer(self) -> None:
        if self.path == "/api/version":
            return self.send(200, json.dumps({"session_name": "session_1"}))
        if self.path.startswith(LOG_FILE):
            record = EndRecord(0, "NONE", "exit code 0", proof=proof_of("key", 0))
            return self.send(200, f"words\n{record.line('a' * 16)}")
        if self.refusals:
            return self.send(self.refusals.pop(), "not now")
        return self.send(200, json.dumps(self.rows))


class World:
    """An allocation that is idle for at most 60 s, and a clock."""

    def __init__(self, life: Path, url: str, rows: list) -> None:
        (life / USERS).mkdir()
        self.life, self.rows, self.now = life, rows, 100.0
        self.refusals: list[int] = []
        settings = _SETTINGS._replace(life=str(life), run=str(life), idle_timeout_s=60)
        (life / "token").write_text("a" * 64)
        renewal = Renewal(settings, str(life / "token"))
        self.allocation = Allocation(settings, str(life / "token"), renewal, lambda: self.now)
        self.head = HeadAddress("127.0.0.1", 6379, int(url.rpartition(":")[2]))

    def after(self, seconds: float) -> str:
        """Why it ends so many seconds later; empty while it goes on."""
        self.now += seconds
        end = self.allocation.end(self.head)
        assert end is None or end == RunEnd(0, end.why)
        return "" if end is None else end.why


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    rows: list = []
    refusals: list = []
    with serving(Dashboard, rows=rows, refusals=refusals) as url:
        found = World(tmp_path, url, rows)
        found.refusals = refusals
        yield found


def test_it_ends_when_it_was_idle_for_so_long(world):
    assert world.after(6) == ""
    assert world.allocation.session == "session_1"
    world.rows.append({"submission_id": "one", "status": "RUNNING"})
    assert world.after(100) == ""
    world.rows[0]["status"] = "SUCCEEDED"
    assert world.after(6) == ""
    assert world.after(59) == ""
    assert world.after(6) == "no job has run for 60 s"
    assert json.loads((world.life / TABLE).read_text()) == world.rows


def test_who_comes_late_has_time_to_submit(world):
    world.after(6)
    assert world.after(50) == ""
    (world.life / USERS / "late").touch()
    assert world.after(30) == ""
    assert world.after(50) == ""
    assert world.after(30) == "no job has run for 60 s"


def test_it_ends_when_the_last_user_has_left(world):
    user = world.life / USERS / "me"
    user.touch()
    world.after(6)
    assert world.after(6) == ""
    user.unlink()
    assert world.after(6) == "", "nobody has said that it is not needed"
    (world.life / RELEASED).touch()
    (world.life / KEEP).touch()
    assert world.after(6) == ""
    (world.life / KEEP).unlink()
    assert world.after(6) == "its last user has left, and no job runs"


def test_a_folder_that_cannot_be_read_ends_nothing(world):
    world.after(6)
    (world.life / RELEASED).touch()
    (world.life / USERS).rmdir()
    assert world.after(6) == ""


def test_an_end_that_ray_has_lost_is_in_the_table_of_the_next_allocation(world):
    lost = {"submission_id": "one", "driver_node_id": "n1"}
    lost["metadata"] = {NONCE_KEY: "a" * 16, LOCK_KEY: lock_of(proof_of("key", 0))}
    world.rows.append({**lost, **EXIT_CODE_IS_LOST})
    world.allocation.keep_last_table(world.head, RunEnd(0, "its walltime is over", True))
    (row,) = json.loads((world.life / TABLE).read_text())
    assert (row["status"], row["driver_exit_code"]) == ("SUCCEEDED", 0)


@pytest.mark.parametrize(("refusals", "is_kept"), [(0, True), (2, True), (3, False)])
def test_the_last_table_is_asked_for_again_where_chains_go_on(world, capfd, refusals, is_kept):
    world.rows.append({"submission_id": "one", "status": "SUCCEEDED"})
    world.refusals.extend([500] * refusals)
    world.allocation.keep_last_table(world.head, RunEnd(0, "its walltime is over", True))
    assert (world.life / TABLE).exists() == is_kept
    assert ("does not tell its job table" in capfd.readouterr().out) == (not is_kept)


def test_it_is_not_idle_while_chains_are_about_to_go_on(world, monkeypatch):
    monkeypatch.setattr(Renewal, "is_busy", True)
    world.after(6)
    assert world.after(100) == ""
    monkeypatch.setattr(Renewal, "is_busy", False)
    assert world.after(6) == ""
    assert world.after(60) == "no job has run for 60 s"


def test_who_stops_it_does_so_without_slurm(world):
    """Its controller may be away when `nemo-run-ray down` asks it."""
    assert world.allocation.why_stopped() == ""
    (world.life / STOP).write_text("it was ended by `nemo-run-ray down`\n")
    assert world.allocation.why_stopped() == "", "the folder is not asked in every turn"
    for seconds in (5, 1):
        world.now += seconds
        assert world.allocation.why_stopped() == "it was ended by `nemo-run-ray down`"


def test_a_folder_that_cannot_be_read_stops_nothing(world):
    (world.life / STOP).mkdir()
    assert world.allocation.why_stopped() == ""
