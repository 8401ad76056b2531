"""What hosts are told, and when: after the disk has it, and not where it does not take it."""

from __future__ import annotations

from nemo_run_ray.remote.array.elements import (
    JOURNAL_FILE,
    LEASED,
    ElementState,
    Journal,
    file_of,
    read_records,
)
from tests.unit.remote.array.pools import ID, Calls


def test_the_disk_has_a_lease_before_a_host_hears_of_it(cluster, tmp_path, monkeypatch):
    path = str(tmp_path / file_of(ID, JOURNAL_FILE))
    heard: list[tuple[int, int]] = []

    def order(calls: Calls, replica: object, what: dict) -> None:
        if what["do"] == "run":
            written = {(r.element, r.attempt) for r in read_records(path) if r.kind == LEASED}
            rows = {(element, attempt) for element, attempt, _ in what["elements"]}
            assert rows <= written
            heard.extend(rows)

    cluster.ready(*cluster.on("n1"))
    monkeypatch.setattr(Calls, "order", order)
    cluster.feed()
    assert sorted(heard) == [(0, 1), (1, 1)]


def test_no_element_is_started_while_the_disk_takes_no_journal(cluster, monkeypatch, capfd):
    def commit(_: Journal) -> None:
        raise OSError(28, "No space left on device")

    (host,) = cluster.on("n1")
    cluster.ready(host)
    with monkeypatch.context() as full:
        full.setattr(Journal, "commit", commit)
        cluster.feed()
    told = capfd.readouterr().out
    assert "the head cannot write its journal" in told
    assert "No space left on device" in told
    assert [order for _, order in cluster.calls.orders if order["do"] == "run"] == []
    assert host.in_hand == {}
    assert cluster.leases.progress.number(ElementState.WAITING) == 12
    cluster.feed()
    rows = [order["elements"] for _, order in cluster.calls.orders if order["do"] == "run"]
    assert sorted(row[:2] for row in rows[0]) == [[0, 1], [1, 1]], "it has cost no attempt"


def test_a_node_that_joins_is_used(cluster):
    cluster.ray.alive.append("n3")
    assert cluster.on("n3") == []
    cluster.look()
    (host,) = cluster.on("n3")
    cluster.ready(host)
    cluster.feed()
    assert len(host.in_hand) == 2
