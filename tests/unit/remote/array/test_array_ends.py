"""How an array ends, also when nothing says that all that a host has left is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from nemo_run_ray.remote.array import driver as driver_module
from nemo_run_ray.remote.array.elements import (
    JOURNAL_FILE,
    ArrayProgress,
    ElementState,
    file_of,
    read_records,
)
from nemo_run_ray.remote.array.hosts import Host
from nemo_run_ray.remote.hosts.calls import Died
from nemo_run_ray.remote.node.output import NO_PROCESS_LEFT
from tests.unit.remote.array.pools import ID, STUCK, Cluster

_MAY_BE_LEFT = "processes of it may be left on {}, where nothing says that all have ended"


class Drive:
    """A driver whose every turn takes a second.

    Hosts that are told to end do so at once, but those that are ``stuck``; ``later`` is done after
    so many seconds.
    """

    def __init__(self, cluster: Cluster, spec, monkeypatch) -> None:
        self.cluster, self.seconds = cluster, 0
        self.stuck: set[int] = set()
        self.later: dict[int, Callable[[], object]] = {}
        self.runner = SimpleNamespace(order=lambda: None, ending="", cancelled=False)
        calls = cluster.calls
        calls.repeat, calls.answers = lambda: None, self._answers
        time = SimpleNamespace(monotonic=cluster.now, sleep=lambda _: self._pass())
        monkeypatch.setattr(driver_module, "time", time)
        self._driver = driver_module._ArrayDriver(
            self.runner,
            spec,
            cluster.leases,
            cluster.pool,
            calls,
            SimpleNamespace(write=lambda *_: None),
            SimpleNamespace(find=lambda _: []),
        )
        self.code = -1

    def cancel(self) -> None:
        self.runner.order = lambda: b"T"

    def run(self) -> None:
        self.code = self._driver.run()

    def _pass(self) -> None:
        self.seconds += 1
        self.cluster.passed_s += 1
        assert self.seconds < 600, "it does not end"
        self.later.pop(self.seconds, lambda: None)()

    def _answers(self) -> Iterator[Died]:
        self._pass()
        told, self.cluster.calls.orders[:] = list(self.cluster.calls.orders), []
        for number, order in told:
            host = self.cluster.pool.hosts.get(number)
            if order["do"] == "end" and host is not None and number not in self.stuck:
                self.cluster.tells(host, at="idle")
        yield from ()


@pytest.fixture
def host(cluster) -> Host:
    """A host on n1 that runs elements, all alone."""
    (other,) = cluster.on("n2")
    del cluster.pool.hosts[other.record.number]
    cluster.ray.alive = ["n1"]
    (found,) = cluster.on("n1")
    cluster.ready(found)
    cluster.feed()
    return found


@pytest.fixture
def drive(cluster, spec, monkeypatch) -> Drive:
    return Drive(cluster, spec, monkeypatch)


def lose(cluster: Cluster, host: Host) -> None:
    """Give a host up; another one is to end what it has left."""
    cluster.pool.give_up(host)
    cluster.look()
    assert host.record.number in cluster.sweeper(host.record.node_id).sweeps


def end_all(cluster: Cluster, host: Host) -> None:
    """Let all elements succeed."""
    while host.in_hand:
        element, attempt = next(iter(host.in_hand.items()))
        cluster.tells(host, at="ended", row=[element, attempt, 0, 0.01, "exit code 0"])
        cluster.feed()


def is_swept(cluster: Cluster, host: Host) -> None:
    sweeper = cluster.sweeper(host.record.node_id)
    cluster.tells(sweeper, at="swept", host=host.record.number, ended=[], begun=[])


def test_an_array_ends_when_its_elements_have(cluster, drive, host):
    end_all(cluster, host)
    drive.run()
    assert (drive.code, drive.runner.ending) == (0, "exit code 0")
    assert drive.seconds <= 2


def test_a_cancelled_array_waits_for_what_a_dead_host_has_left(cluster, drive, host):
    lose(cluster, host)
    drive.cancel()
    drive.later[8] = lambda: is_swept(cluster, host)
    drive.run()
    assert drive.code == 143
    assert drive.runner.ending == f"cancelled; {NO_PROCESS_LEFT}"
    assert drive.seconds == pytest.approx(8, abs=2)
    assert cluster.leases.progress.number(ElementState.CANCELLED) == 12


def test_a_cancelled_array_ends_though_a_process_does_not(cluster, drive, host, spec, tmp_path):
    has = sorted(host.in_hand)
    lose(cluster, host)
    drive.cancel()

    drive.run()

    assert (drive.code, drive.runner.cancelled) == (143, True)
    assert drive.runner.ending == f"cancelled; {_MAY_BE_LEFT.format('n1')}"
    assert drive.seconds == pytest.approx(spec.grace_s + 60, abs=3)
    assert cluster.leases.progress.is_over
    cluster.leases.commit()
    held = ArrayProgress(12).replay(read_records(str(tmp_path / file_of(ID, JOURNAL_FILE))))
    assert sorted(held[host.record.number]) == has, "another attempt waits for them"


def test_an_array_whose_elements_are_over_ends_though_a_process_does_not(
    cluster, drive, host, spec
):
    end_all(cluster, host)
    lose(cluster, host)
    drive.run()
    assert (drive.code, drive.runner.ending) == (0, f"exit code 0; {_MAY_BE_LEFT.format('n1')}")
    assert drive.seconds == pytest.approx(spec.grace_s + 60, abs=3)


def test_a_cancel_while_it_waits_does_not_hide_a_host_that_does_not_end(cluster, drive):
    """What a dead one has left has ended at last, but a process of the living one does not."""
    (host,), (other,) = cluster.on("n1"), cluster.on("n2")
    cluster.ready(host, other)
    cluster.feed()
    end_all(cluster, host)
    end_all(cluster, other)
    lose(cluster, host)
    drive.stuck.add(other.record.number)
    other.actor.handle.close.remote = lambda *_: STUCK
    drive.later[50] = drive.cancel
    drive.later[55] = lambda: is_swept(cluster, host)
    drive.run()
    assert drive.code == 143
    assert drive.runner.ending == f"cancelled; {_MAY_BE_LEFT.format('n2')}"


@pytest.mark.parametrize("spec", [{"max_failures": 0}], indirect=True)
def test_too_many_failures_end_it_though_a_process_does_not(cluster, drive, host):
    element, attempt = next(iter(host.in_hand.items()))
    cluster.tells(host, at="ended", row=[element, attempt, 3, 0.01, "exit code 3"])
    lose(cluster, host)
    drive.run()
    assert (drive.code, drive.runner.ending) == (8, f"exit code 8; {_MAY_BE_LEFT.format('n1')}")


def test_elements_that_were_cancelled_one_by_one_end_it_though_a_process_does_not(
    cluster, drive, host
):
    cluster.leases.cancel(range(12), only_waiting=False)
    lose(cluster, host)
    drive.run()
    assert (drive.code, drive.runner.ending) == (0, f"exit code 0; {_MAY_BE_LEFT.format('n1')}")
    assert cluster.leases.progress.number(ElementState.CANCELLED) == 12


def test_an_element_that_was_cancelled_and_does_not_end_on_a_living_host(cluster, drive, host):
    """Its host says nothing of it, also when it is asked to end."""
    cluster.leases.cancel(range(12), only_waiting=False)
    drive.stuck.add(host.record.number)
    drive.run()
    assert (drive.code, drive.runner.ending) == (0, f"exit code 0; {_MAY_BE_LEFT.format('n1')}")
    assert cluster.leases.progress.number(ElementState.CANCELLED) == 12


def test_a_node_that_dies_meanwhile_is_named_as_dead(cluster, drive, host):
    lose(cluster, host)
    drive.cancel()
    drive.later[5] = lambda: setattr(cluster.ray, "alive", ["n2"])
    drive.run()
    assert drive.seconds <= 8
    assert drive.runner.ending == (
        "cancelled; processes of it may be left for 75 s on n1, which Ray counts as dead"
    )


def test_a_cancel_while_the_heads_disk_is_full_says_so(cluster, drive, host, monkeypatch, capfd):
    end_all(cluster, host)

    def commit() -> None:
        raise OSError(28, "No space left on device")

    cluster.tells(host, at="idle")
    monkeypatch.setattr(cluster.leases._journal, "commit", commit)
    drive.later[20] = drive.cancel
    began = cluster.now()
    drive.run()
    assert drive.code == 143
    assert cluster.now() - began <= 30, "nobody waits for the disk after a cancel"
    assert "disk has not taken how the last elements have ended" in capfd.readouterr().out
