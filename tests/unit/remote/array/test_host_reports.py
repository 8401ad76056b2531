"""What becomes of a host's reports: who has an element, and where hosts are started again."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_run_ray.remote.array.driver import take_back
from nemo_run_ray.remote.array.elements import (
    JOURNAL_FILE,
    ArrayProgress,
    ElementState,
    file_of,
    read_records,
)
from nemo_run_ray.remote.array.hosts import Host
from nemo_run_ray.remote.hosts.calls import Died
from nemo_run_ray.remote.status import Reason
from tests.unit.remote.array.pools import ID, STUCK, Cluster


def row(element: int, code: int = 0, attempt: int = 1, seconds: float = 0.01) -> list[Any]:
    return [element, attempt, code, seconds, f"exit code {code}"]


# ---------------------------------------------------------------------- nodes that cannot


def test_a_node_that_cannot_run_elements_is_left_alone_for_longer_each_time(cluster, capfd):
    (good,), (bad,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(good)
    for pause_s in (5, 10, 20):
        cluster.tells(bad, at="unprepared", words="Traceback\nOSError: no room")
        cluster.look()
        sweeper = cluster.sweeper("n2")
        cluster.tells(sweeper, at="swept", host=bad.record.number, ended=[], begun=[])
        cluster.look(pause_s - 1)
        assert cluster.on("n2") == []
        cluster.look(2)
        (bad,) = cluster.on("n2")
    assert cluster.reports.broken is None
    told = "a host on n2 could not begin; another one is tried later: OSError: no room"
    assert capfd.readouterr().out.count(told) == 3


def test_an_array_that_no_node_can_run_is_broken_with_the_reason(cluster):
    (first,), (second,) = cluster.on("n1"), cluster.on("n2")
    cluster.tells(first, at="unprepared", words="Traceback\nImportError: no module x")
    assert cluster.reports.broken is None, "the other one may show that it works"
    cluster.tells(second, at="unprepared", words="Traceback\nImportError: no module x")
    assert cluster.reports.broken == (Reason.NOT_STARTED, "ImportError: no module x")


def test_nothing_has_run_of_a_host_whose_start_has_failed(cluster):
    (host,) = cluster.on("n2")
    cluster.reports.died(Died(host.actor, "it failed at its start: disk full", is_start=True))
    assert cluster.on("n2") == []
    assert not cluster.pool.dead_hosts
    assert cluster.reports.broken is None


def test_another_node_is_tried_before_an_array_is_broken(cluster):
    """One of two nodes had no room until now."""
    (first,), (second,) = cluster.on("n1"), cluster.on("n2")
    cluster.pool.hosts.pop(second.record.number)
    cluster.tells(first, at="unprepared", words="OSError: no room")
    assert cluster.reports.broken is None
    cluster.look()
    (second,) = cluster.on("n2")
    cluster.tells(second, at="unprepared", words="OSError: no room")
    assert cluster.reports.broken == (Reason.NOT_STARTED, "on n2: OSError: no room")


def test_no_array_is_broken_while_elements_may_run(cluster):
    """Those of a host are long; those of another one may run, as it has just died."""
    (first,), (second,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(first)
    cluster.feed()
    for _ in range(3):
        refuses(cluster, second)
        (second,) = cluster.on("n2")
    cluster.tells(first, at="gone")
    cluster.tells(second, at="unprepared", words="OSError: no room")
    assert cluster.reports.broken is None


def refuses(cluster: Cluster, host: Host) -> None:
    """Let a host refuse, and the next one come in its place."""
    cluster.tells(host, at="unprepared", words="OSError: no room")
    cluster.look()
    sweeper = cluster.sweeper(host.record.node_id)
    cluster.tells(sweeper, at="swept", host=host.record.number, ended=[], begun=[])
    cluster.look(later_s=300)


def test_a_dead_node_that_the_end_did_not_wait_for_still_has_its_elements(cluster, tmp_path):
    """For the next driver: it waits until it is proven that nothing of them runs."""
    (first,), (second,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(first, second)
    cluster.feed()
    cluster.ray.alive = ["n2"]
    cluster.pool.end()
    cluster.look()
    assert cluster.leases.progress.state(0) is ElementState.CANCELLED
    cluster.leases.commit()
    records = read_records(str(tmp_path / file_of(ID, JOURNAL_FILE)))
    held = ArrayProgress(12).replay(records)
    assert sorted(held[first.record.number]) == sorted(first.in_hand)


def test_a_host_that_dies_before_it_is_ready_is_tried_less_and_less_often(cluster):
    for _ in range(5):
        assert cluster.reports.broken is None
        for node in ("n1", "n2"):
            (host,) = cluster.on(node)
            cluster.tells(host, at="gone")
        cluster.look()
        for node in ("n1", "n2"):
            sweeper = cluster.sweeper(node)
            (number,) = sweeper.sweeps
            cluster.tells(sweeper, at="swept", host=number, ended=[], begun=[])
        cluster.look(later_s=1)
        assert cluster.on("n1") == cluster.on("n2") == []
        cluster.look(later_s=300)
    assert cluster.reports.broken == (Reason.NOT_STARTED, "on n2: it was killed")


def test_an_environment_that_one_node_cannot_build_does_not_end_the_array(cluster):
    (first,), (second,) = cluster.on("n1"), cluster.on("n2")
    died = Died(second.actor, "it could not be built: disk full", is_env=True)
    cluster.reports.died(died)
    assert cluster.reports.broken is None
    cluster.reports.died(died._replace(actor=first.actor))
    assert cluster.reports.broken is not None
    assert cluster.reports.broken[0] is Reason.RUNTIME_ENV


# ---------------------------------------------------------------------- hosts that die


def test_what_a_host_reports_after_it_was_given_up_counts_no_more(cluster):
    """It hands back what its notes are read for: else another attempt would begin twice."""
    (host,), (other,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(host)
    cluster.leases.pace.measured(0.2)
    cluster.feed()
    cluster.answers(
        host,
        {"at": "unprepared", "words": "ImportError: x"},
        {"at": "handed_back", "leases": [[4, 1]]},
    )
    assert cluster.leases.progress.state(4) is ElementState.LEASED
    cluster.ready(other)
    cluster.feed()
    assert 4 not in other.in_hand


def test_what_a_dead_host_had_not_begun_costs_no_attempt(cluster):
    """It had five in hand: one has ended, one had begun, and three waited behind them."""
    (host,), (other,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(host)
    cluster.leases.pace.measured(0.2)
    cluster.feed()
    assert sorted(host.in_hand) == [0, 1, 2, 3, 4]
    cluster.tells(host, at="failed", words="it was killed")
    cluster.look()
    sweeper = cluster.sweeper("n1")

    cluster.tells(sweeper, at="swept", host=0, ended=[row(0)], begun=[[1, 1]])

    assert cluster.attempts() == [1, 1, *[0] * 10]
    assert cluster.leases.progress.number(ElementState.WAITING) == 11
    cluster.ready(other)
    cluster.feed()
    assert other.in_hand[1] == 2, "the attempt that had begun is not made a second time"
    assert other.in_hand[2] == 1


def test_a_host_without_room_for_processes_gets_nothing_for_a_while(cluster, monkeypatch):
    (host,), (other,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(host)
    cluster.feed()
    had = list(host.in_hand)
    words = "node n1 has no room for another process"
    cluster.tells(host, at="handed_back", leases=[[0, 1]], words=words)
    cluster.ready(other)
    cluster.feed()
    assert 0 in other.in_hand
    assert list(host.in_hand) == had[1:]
    assert cluster.attempts()[0] == 1
    monkeypatch.setattr(host, "rests_until", 0.0)
    cluster.feed()
    assert len(host.in_hand) == len(had)


def test_a_failure_that_the_end_has_caused_is_none(cluster):
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.feed()
    cluster.tells(host, at="failed", words="it was killed")
    cluster.look()
    sweeper = cluster.sweeper("n1")
    cluster.pool.end()
    cluster.tells(sweeper, at="swept", host=0, ended=[row(0, 143), row(1)], begun=[])
    states = [cluster.leases.progress.state(index) for index in (0, 1)]
    assert states == [ElementState.CANCELLED, ElementState.SUCCEEDED]


@pytest.mark.parametrize("spec", [{"max_in_flight": 2}], indirect=True)
def test_what_may_still_run_counts_among_those_in_flight(cluster):
    (host,) = [*cluster.on("n1"), *cluster.on("n2")][:1]
    (other,) = [one for one in cluster.pool.hosts.values() if one is not host]
    cluster.ready(host, other)
    cluster.feed()
    for one in (host, other):
        cluster.tells(one, at="failed", words="it was killed")
    cluster.look(later_s=60)
    assert [one.slots for one in cluster.pool.hosts.values()] == [0, 0], "they end what is left"
    sweeper = cluster.sweeper(host.record.node_id)
    cluster.tells(sweeper, at="swept", host=host.record.number, ended=[], begun=[])
    cluster.look(later_s=60)
    assert sum(one.slots for one in cluster.pool.hosts.values()) == 1


@pytest.fixture
def dead_and_sweeper(cluster) -> tuple[Host, Host]:
    """A host of n1 that has died, and the one that is to end what it has left."""
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.tells(host, at="gone")
    cluster.look()
    return host, cluster.sweeper("n1")


def test_a_host_that_was_to_end_what_is_left_is_ended_too(cluster, dead_and_sweeper):
    """When it has died itself: its process may be stopped, and nobody else knows of it."""
    dead, sweeper = dead_and_sweeper
    cluster.tells(sweeper, at="gone")
    cluster.look(later_s=6)
    assert set(cluster.sweeper("n1").sweeps) == {dead.record.number, sweeper.record.number}


def test_one_that_does_not_close_is_followed_later_and_later(cluster, dead_and_sweeper):
    """Each has ended what was left, and then its own process does not end."""
    _, sweeper = dead_and_sweeper
    for pause_s in (5, 10, 20):
        sweeper.actor.handle.close.remote = lambda *_: STUCK
        for record in list(sweeper.sweeps.values()):
            cluster.tells(sweeper, at="swept", host=record.number, ended=[], begun=[])
        for _ in range(3):
            cluster.pool.let_hosts_end(cluster.now())
        assert cluster.pool.dead_hosts.node_ids == {"n1"}
        cluster.look(pause_s - 1)
        assert not any(host.sweeps for host in cluster.pool.hosts.values())
        cluster.look(later_s=2)
        sweeper = cluster.sweeper("n1")


def test_one_whose_start_has_failed_left_nothing(cluster, dead_and_sweeper):
    dead, sweeper = dead_and_sweeper
    cluster.reports.died(Died(sweeper.actor, "disk full", is_start=True))
    cluster.look(later_s=6)
    assert set(cluster.sweeper("n1").sweeps) == {dead.record.number}
    assert cluster.reports.broken is None


# ---------------------------------------------------------------------- elements that wait


def test_what_waits_behind_a_long_element_is_handed_back_and_runs_elsewhere(cluster):
    (host,), (other,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(host)
    cluster.leases.pace.measured(0.2)
    cluster.feed()
    take_back(cluster.leases, cluster.pool, cluster.calls)
    assert cluster.calls.orders[-1][1]["do"] == "run", "nothing is held up yet"
    host.heard_at -= 10
    for _ in range(2):  # it is asked once
        take_back(cluster.leases, cluster.pool, cluster.calls)
    asked = [order for order in cluster.calls.orders if order[1]["do"] == "hand_back"]
    assert asked == [(host.record.number, {"do": "hand_back", "count": 3})]

    cluster.tells(host, at="handed_back", leases=[[4, 1], [3, 1]])  # the third one has begun

    assert sorted(host.in_hand) == [0, 1, 2]
    cluster.ready(other)
    cluster.feed()
    assert {3, 4} <= set(other.in_hand)
    assert sorted(host.in_hand) == [0, 1, 2], "it gets none while it is held up"
    cluster.tells(host, at="ended", row=row(0))
    cluster.feed()
    assert len(host.in_hand) > 2


def test_without_a_note_all_that_a_dead_host_had_counts_as_begun(cluster):
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.feed()
    cluster.tells(host, at="failed", words="it was killed")
    cluster.look()
    cluster.tells(cluster.sweeper("n1"), at="swept", host=0, ended=[], begun=None)
    assert cluster.attempts()[:3] == [1, 1, 0]
