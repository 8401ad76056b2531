"""Who has an element, where hosts start, when dead ones are proven dead, how an array ends."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_run_ray.remote.array import driver
from nemo_run_ray.remote.array.driver import Host, HostState, hosts_to_start
from nemo_run_ray.remote.array.elements import (
    LEASED,
    ArrayProgress,
    ElementState,
    Leases,
    LinesFile,
    Record,
    read_records,
)
from nemo_run_ray.remote.end_record import NO_PROCESS_LEFT
from nemo_run_ray.remote.status import JOURNAL_FILE, NODE_DEAD_S, Reason, file_of
from tests.unit.remote.array.pools import ID, ROLE, Actors, Cluster, close

LABELLED = ROLE._replace(label_selector={"pool": "gpu"})
UNLABELLED = ROLE._replace(label_selector={"pool": "cpu"})
LARGE = ROLE._replace(resources={"CPU": 9.0})
NO_ROOM = "Traceback\nOSError: no room"


def row(element: int, code: int = 0, attempt: int = 1) -> list[Any]:
    return [element, attempt, code, 0.01, f"exit code {code}"]


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def held_in_journal(tmp_path) -> dict[int, dict[int, int]]:
    """What another driver would find."""
    progress = ArrayProgress(12)
    for record in read_records(str(tmp_path / file_of(ID, JOURNAL_FILE))):
        if isinstance(record, Record):
            progress.apply(record)
    return progress.held


@pytest.mark.parametrize(
    ("available", "need", "wanted", "hosts"),
    [
        ({"a": {"CPU": 4.0}, "b": {"CPU": 2.0}, "c": {}}, {"CPU": 1.0}, 100, [("a", 4), ("b", 2)]),
        ({"a": {"CPU": 4.0}, "b": {"CPU": 2.0}, "c": {}}, {"CPU": 1.0}, 3, [("a", 2), ("b", 1)]),
        ({"a": {"CPU": 4.0}}, {"CPU": 1.0}, 0, []),
        ({"a": {"CPU": 4.0}}, {"CPU": 8.0}, 10, []),
        ({"a": {"GPU": 2.0}}, {"GPU": 0.25}, 100, [("a", 4), ("a", 4)]),
        ({"a": {"GPU": 4.0}}, {"GPU": 2.0}, 100, [("a", 2)]),
    ],
)
def test_hosts_are_spread_evenly_and_have_one_gpu_or_whole_ones(available, need, wanted, hosts):
    assert sorted(hosts_to_start(available, need, wanted)) == hosts


@pytest.mark.parametrize(("seconds", "held"), [(None, 4), (0.001, 260), (1.0, 6), (60.0, 4)])
def test_short_elements_wait_at_their_host_and_long_ones_do_not(leases, seconds, held):
    leases.seconds = seconds
    assert leases.most_held(4) == held


@pytest.mark.parametrize(
    ("spec", "nodes", "line"),
    [
        ({"host": ROLE}, ["n1", "n2"], ""),
        ({"host": LABELLED}, ["n2"], ""),
        ({"host": UNLABELLED}, [], "the label pool=cpu; the nodes have pool=gpu; waiting"),
        ({"host": LARGE}, [], "the largest node has CPU 2, it asks for 9; waiting"),
    ],
    indirect=["spec"],
)
def test_hosts_start_where_an_element_fits_or_a_line_says_why_not(capfd, cluster, nodes, line):
    assert sorted(host.node.node_id for host in cluster.driver.hosts.values()) == nodes
    assert line in capfd.readouterr().out
    cluster.look(later_s=20)
    assert not capfd.readouterr().out
    cluster.look(later_s=11)
    assert line in capfd.readouterr().out


def test_a_node_that_cannot_run_elements_is_tried_later(cluster, capfd):
    (good,), (bad,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(good)
    cluster.tells(bad, at="unprepared", words=NO_ROOM)
    cluster.look()
    cluster.sweep(bad)
    cluster.look(later_s=4)
    assert cluster.on("n2") == []
    cluster.look(later_s=2)
    assert cluster.on("n2")
    assert cluster.driver.broken is None
    line = "a host on n2 could not begin; another one is tried later: OSError: no room"
    assert line in capfd.readouterr().out


@pytest.mark.parametrize("is_there", [True, False])
def test_an_array_that_no_node_can_run_is_broken_with_the_reason(cluster, is_there):
    """Also when one of two nodes had no room until now."""
    (first,), (second,) = cluster.on("n1"), cluster.on("n2")
    if not is_there:
        del cluster.driver.hosts[second.number]
    cluster.tells(first, at="unprepared", words=NO_ROOM)
    assert cluster.driver.broken is None, "the other one may show that it works"
    cluster.look()
    (second,) = cluster.on("n2")
    cluster.tells(second, at="unprepared", words=NO_ROOM)
    assert cluster.driver.broken == (Reason.NOT_STARTED, "on n2: OSError: no room")


@pytest.mark.parametrize("are_busy", [True, False])
def test_three_nodes_that_cannot_run_elements_decide_when_no_other_is_free(cluster, are_busy):
    cluster.ray.alive = [f"n{number}" for number in range(1, 6)]
    cluster.look()
    for number in range(1, 6):
        if are_busy and number > 3:
            for host in cluster.on(f"n{number}"):
                del cluster.driver.hosts[host.number]
    for number in range(1, 4):
        cluster.tells(cluster.on(f"n{number}")[0], at="unprepared", words=NO_ROOM)
    assert (cluster.driver.broken is not None) is are_busy


def test_a_host_that_returns_elements_gets_no_others_until_one_has_ended(cluster):
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.leases.seconds = 0.1
    cluster.feed()
    held = cluster.leases.progress.held[host.number]
    assert len(held) > host.slots
    for index in list(held)[1:]:
        cluster.tells(host, at="ended", row=[index, 1, None])
    cluster.feed()
    assert len(held) == 1
    cluster.tells(host, at="ended", row=[0, 1, 0, 0.1, ""])
    cluster.feed()
    assert len(held) > host.slots


def test_what_never_started_has_left_nothing_and_is_no_end_on_one_node(cluster):
    (first,), (second,) = cluster.on("n1"), cluster.on("n2")
    words = "it could not be built: disk full"
    cluster.tells(second, at="died", words=words, cause=Reason.RUNTIME_ENV)
    assert not cluster.driver.dead
    assert cluster.driver.broken is None
    cluster.tells(first, at="died", words=words, cause=Reason.RUNTIME_ENV)
    assert cluster.driver.broken[0] is Reason.RUNTIME_ENV


def test_the_disk_has_a_lease_before_a_host_hears_of_it(cluster, tmp_path, monkeypatch):
    path = str(tmp_path / file_of(ID, JOURNAL_FILE))
    heard: list[tuple[int, int]] = []

    def order(actors: Actors, replica: object, what: dict) -> None:
        if what["do"] == "run":
            records = [one for one in read_records(path) if one.kind == LEASED]
            written = {(one.element, one.attempt) for one in records}
            rows = {(element, attempt) for element, attempt, _ in what["elements"]}
            assert rows <= written
            heard.extend(rows)

    cluster.ready(*cluster.on("n1"))
    monkeypatch.setattr(Actors, "order", order)
    cluster.feed()
    assert sorted(heard) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_no_element_starts_until_the_disk_has_it(cluster, drive, monkeypatch, capfd, is_cancelled):
    (host,) = cluster.on("n1")
    cluster.ready(host)
    commit = LinesFile.commit

    def fails(file: LinesFile) -> None:
        if is_cancelled:
            drive.cancel()
        if is_cancelled or drive.seconds < 3:
            full_disk()
        commit(file)

    monkeypatch.setattr(LinesFile, "commit", fails)
    cluster.feed()
    assert "cannot write its journal ([Errno 28] No space left" in capfd.readouterr().out
    rows = [order["elements"] for _, order in cluster.actors.orders if order["do"] == "run"]
    assert len(rows) == (not is_cancelled)
    assert drive.seconds == (1 if is_cancelled else 3)


def test_what_a_dead_host_had_not_begun_costs_no_attempt(cluster):
    """It had five in hand: one has ended, one had begun, and three waited behind them."""
    (host,), (other,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(host)
    cluster.leases.seconds = 0.2
    cluster.feed()
    assert sorted(cluster.held(host)) == [0, 1, 2, 3, 4]
    cluster.dies(host)

    cluster.sweep(host, ended=[row(0)], begun=[[1, 1]])

    assert cluster.starts.forgotten == [host.run_dir]
    assert cluster.attempts() == [1, 1, *[0] * 10]
    assert cluster.leases.progress.number(ElementState.WAITING) == 11
    cluster.ready(other)
    cluster.feed()
    assert cluster.held(other)[1] == 2, "the attempt that had begun is not made a second time"
    assert cluster.held(other)[2] == 1


def test_what_a_host_reports_after_it_was_given_up_counts_no_more(cluster):
    """Its notes are read for that: else another attempt would begin twice."""
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.feed()
    late = {"at": "ended", "row": row(0)}
    cluster.tells(host, {"at": "unprepared", "words": "ImportError: x"}, late)
    assert cluster.leases.progress.state(0) is ElementState.LEASED


@pytest.mark.parametrize("spec", [{"max_in_flight": 2}], indirect=True)
def test_what_may_still_run_counts_among_those_in_flight(cluster):
    (host,), (other,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(host, other)
    cluster.feed()
    for one in (host, other):
        cluster.tells(one, at="failed", words="it was killed")
    cluster.look(later_s=60)
    assert not cluster.driver.hosts
    cluster.sweep(host)
    cluster.look(later_s=60)
    assert sum(one.slots for one in cluster.driver.hosts.values()) == 1


def test_what_does_not_end_on_a_node_is_named_and_looked_at_again(cluster, capfd):
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.dies(host)
    cluster.starts.answers["n1"] = {"swept": [], "remaining": "process 7 (sleep, D)"}
    cluster.look()
    assert "a dead host on n1 may still run elements: process 7" in capfd.readouterr().out
    cluster.starts.sweeps.clear()
    cluster.look(later_s=4)
    assert not cluster.starts.sweeps
    cluster.look(later_s=2)
    assert cluster.starts.sweeps["n1"] == [host.number]
    assert cluster.on("n1"), "elements that may begin anew do so meanwhile"
    cluster.sweep(host)
    assert not cluster.driver.dead


def test_a_further_host_that_cannot_begin_is_no_end_of_one_that_runs(cluster, host):
    cluster.look()
    _, further = cluster.on("n1")
    cluster.tells(further, at="unprepared", words=NO_ROOM)
    assert cluster.driver.broken is None
    cluster.tells(host, at="unprepared", words=NO_ROOM)
    assert cluster.driver.broken is not None


@pytest.mark.parametrize("end", ["left", "killed", "stuck"])
def test_a_host_that_does_not_leave_is_swept(cluster, end):
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.leases.cancel([(0, 11)], only_waiting=False)
    cluster.look()
    cluster.tells(host, at="idle")
    assert (host.state, cluster.actors.orders[-1][1]) == (HostState.LEAVING, {"do": "leave"})
    if end != "stuck":
        cluster.tells(host, at="gone", was_killed=end == "killed")
    cluster.look(later_s=31 if end == "stuck" else 0)
    assert host.actor in cluster.ray.killed
    assert (host.number in cluster.driver.dead) is (end != "left")


def test_what_a_dead_node_had_waits_until_the_node_itself_has_noticed(cluster):
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.feed()
    cluster.ray.alive = ["n2"]
    cluster.look()
    cluster.look(later_s=NODE_DEAD_S - 1)
    assert cluster.leases.progress.state(0) is ElementState.LEASED
    cluster.look(later_s=2)
    assert cluster.leases.progress.state(0) is ElementState.WAITING
    assert not cluster.driver.dead


def test_hosts_of_an_earlier_driver_that_has_leased_nothing_are_swept_too(tmp_path, spec, leases):
    record = leases.add_host("n1")
    leases.commit()
    close(leases)
    again = Leases(spec, str(tmp_path / "elements"), ID, str(tmp_path))
    assert again.hosts == [record]
    assert Cluster(again, spec, tmp_path).driver.dead == {0: record}
    close(again)


MAY_BE_LEFT = "processes of it may be left on {}, where nothing says that all have ended"


@pytest.fixture
def host(cluster) -> Host:
    """A host on n1 that runs elements, all alone."""
    (other,) = cluster.on("n2")
    del cluster.driver.hosts[other.number]
    cluster.ray.alive = ["n1"]
    (found,) = cluster.on("n1")
    cluster.ready(found)
    cluster.feed()
    return found


def test_a_host_leaves_at_once_when_the_last_element_has_ended(cluster, drive, host):
    drive._pass = lambda: cluster.end_all(host)  # a turn takes no second here
    for _ in range(3):
        cluster.driver._turn()
    assert not cluster.driver.hosts


def test_a_cancelled_array_waits_for_what_a_dead_host_has_left(cluster, drive, host):
    cluster.dies(host)
    drive.cancel()
    drive.later[8] = lambda: cluster.sweep(host, ended=[row(0, 143), row(1)])
    assert (drive.run(), drive.code) == (f"cancelled; {NO_PROCESS_LEFT}", 143)
    assert drive.seconds == pytest.approx(8, abs=3)
    states = [cluster.leases.progress.state(index) for index in (0, 1)]
    assert states == [ElementState.CANCELLED, ElementState.SUCCEEDED], "the end has caused the 143"


def test_a_cancelled_array_ends_though_a_process_does_not(cluster, drive, host, spec, tmp_path):
    has = sorted(cluster.held(host))
    cluster.dies(host)
    drive.cancel()
    assert (drive.run(), drive.code) == (f"cancelled; {MAY_BE_LEFT.format('n1')}", 143)
    assert drive.seconds == pytest.approx(spec.grace_s + 60, abs=5)
    cluster.leases.commit()
    held = held_in_journal(tmp_path)[host.number]
    assert sorted(held) == has, "another attempt waits for them"


def test_a_node_that_dies_meanwhile_is_named_and_not_waited_for(cluster, drive, host):
    cluster.dies(host)
    drive.cancel()
    drive.later[5] = lambda: setattr(cluster.ray, "alive", ["n2"])
    assert drive.run() == f"cancelled; {MAY_BE_LEFT.format('n1')}"
    assert drive.seconds <= 9


def test_a_cancel_while_the_heads_disk_is_full_says_so(cluster, drive, host, monkeypatch, capfd):
    cluster.end_all(host)
    monkeypatch.setattr(LinesFile, "commit", full_disk)
    drive.later[20] = drive.cancel
    drive.run()
    assert drive.code == 143
    assert drive.seconds <= 30, "nobody waits for the disk after a cancel"
    assert "cannot write its journal ([Errno 28] No space" in capfd.readouterr().out


def test_an_array_fails_when_the_disk_stays_full(cluster, drive, host, monkeypatch):
    cluster.end_all(host)
    monkeypatch.setattr(LinesFile, "commit", full_disk)
    monkeypatch.setattr(driver, "_DISK_S", 300.0)
    words = "the head could not write the array's journal for 300 s: [Errno 28] No space"
    assert drive.run().startswith(words)
    assert drive.code == 1
    assert 300 <= drive.seconds <= 315
    assert cluster.runner.left_on == ()


def test_with_a_full_disk_nothing_is_started_and_notes_stay(cluster, drive, host, monkeypatch):
    told: list[str] = []
    order = cluster.actors.order
    monkeypatch.setattr(
        cluster.actors, "order", lambda host, one: (told.append(one["do"]), order(host, one))
    )
    cluster.actors.orders.clear()
    monkeypatch.setattr(LinesFile, "commit", full_disk)
    monkeypatch.setattr(driver, "_DISK_S", 300.0)
    element, attempt = next(iter(cluster.held(host).items()))
    cluster.tells(host, at="ended", row=[element, attempt, 0, 0.01, "exit code 0"])
    drive.run()
    assert (drive.code, told, cluster.driver.hosts) == (1, ["end"], {})
    assert cluster.runner.left_on == ()
