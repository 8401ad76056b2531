"""How an array ends when nothing says that all that a dead host has left is gone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nemo_run_ray.remote.array import driver as driver_module
from nemo_run_ray.remote.array.journal import read_records
from nemo_run_ray.remote.array.progress import ArrayProgress, ElementState
from nemo_run_ray.remote.array.status_file import JOURNAL_FILE, file_of
from nemo_run_ray.remote.group.calls import Died
from nemo_run_ray.remote.node.output import NO_PROCESS_LEFT
from tests.unit.remote.array.pools import ID, Cluster


class Drive:
    """A driver whose every turn takes a second, and whose hosts answer as a test lets them."""

    def __init__(self, cluster: Cluster, spec, monkeypatch) -> None:
        self.cluster, self.seconds = cluster, 0
        self.runner = SimpleNamespace(order=lambda: None, ending="", cancelled=False)
        calls = cluster.calls
        calls.repeat, calls.answers = lambda: None, self._answers
        monkeypatch.setattr(driver_module, "time", SimpleNamespace(monotonic=cluster.now))
        self._driver = driver_module._ArrayDriver(
            self.runner,
            spec,
            cluster.leases,
            cluster.pool,
            calls,
            SimpleNamespace(write=lambda *_, **__: None),
            SimpleNamespace(find=lambda _: []),
        )
        self.code = -1

    def run(self) -> None:
        self.code = self._driver.run()

    def _answers(self) -> Iterator[Died]:
        self.seconds += 1
        self.cluster.passed_s += 1
        assert self.seconds < 600, "it does not end"
        yield from ()


@pytest.fixture
def drive(cluster, spec, monkeypatch) -> Drive:
    """A driver of hosts on n1 alone."""
    (other,) = cluster.on("n2")
    del cluster.pool.hosts[other.record.number]
    cluster.ray.alive = ["n1"]
    return Drive(cluster, spec, monkeypatch)


def give_up_the_host(cluster: Cluster) -> None:
    """Give it up; another one is to end what it has left."""
    (host,) = cluster.on("n1")
    cluster.pool.give_up(host)
    cluster.look()
    assert cluster.sweeper("n1").sweeps


def test_a_cancelled_array_ends_though_a_process_does_not(cluster, drive, spec, tmp_path):
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.feed()
    has = sorted(host.in_hand)
    give_up_the_host(cluster)
    drive.runner.order = lambda: b"T"

    drive.run()

    assert (drive.code, drive.runner.cancelled) == (143, True)
    assert drive.runner.ending == (
        "cancelled; processes may go on on n1, where they could not be ended"
    )
    assert drive.seconds == pytest.approx(spec.grace_s + 30 + 60, abs=3)
    assert cluster.leases.progress.is_over
    cluster.leases.commit()
    held = ArrayProgress(12).replay(read_records(str(tmp_path / file_of(ID, JOURNAL_FILE))))
    assert sorted(held[host.record.number]) == has, "another attempt waits for them"


def test_an_array_whose_elements_are_over_ends_though_a_process_does_not(cluster, drive, capfd):
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.feed()
    while host.in_hand:
        element, attempt = next(iter(host.in_hand.items()))
        cluster.tells(host, at="ended", row=[element, attempt, 0, 0.01, "exit code 0"])
        cluster.feed()
    give_up_the_host(cluster)

    drive.run()

    assert (drive.code, drive.runner.ending) == (0, "exit code 0")
    assert drive.seconds == pytest.approx(60, abs=3)
    told = "nothing says that all processes and folders of the array are gone on n1"
    assert told in capfd.readouterr().out


def test_an_array_is_cancelled_at_once_when_nothing_is_left(cluster, drive):
    (host,) = cluster.on("n1")
    cluster.ready(host)
    cluster.feed()
    give_up_the_host(cluster)
    drive.runner.order = lambda: b"T"
    sweeper = cluster.sweeper("n1")
    cluster.tells(sweeper, at="swept", host=host.record.number, ended=[], begun=[])
    cluster.pool._closings._closings.clear()

    drive.run()

    assert drive.code == 143
    assert drive.seconds <= 1
    assert drive.runner.ending == f"cancelled; {NO_PROCESS_LEFT}"
    assert cluster.leases.progress.number(ElementState.CANCELLED) == 12
