"""Where hosts of an array can be started, and what is said while none can."""

from __future__ import annotations

import pytest

from nemo_run_ray.remote.array.hosts import HostRoom
from nemo_run_ray.remote.spec import ArraySpec, JobSpec, RoleSpec
from tests.unit.remote.array.pools import Ray


class LabelledRay(Ray):
    """Of its two nodes one has a label."""

    def nodes(self):
        labels = {"n2": {"pool": "gpu"}}
        return [{**row, "Labels": labels.get(row["NodeID"])} for row in super().nodes()]


def room_for(labels: dict[str, str], cpus: float = 1.0) -> HostRoom:
    role = RoleSpec("element", JobSpec(("true",)), resources={"CPU": cpus}, label_selector=labels)
    room = HostRoom(LabelledRay(), ArraySpec(role, "elements"))
    room.look()
    return room


@pytest.mark.parametrize(
    ("labels", "nodes"), [({}, ["n1", "n2"]), ({"pool": "gpu"}, ["n2"]), ({"pool": "cpu"}, [])]
)
def test_hosts_are_started_where_the_labels_are(labels, nodes):
    shares = room_for(labels).shares([], wanted=12, running=0, now=0.0)
    assert sorted(share.node_id for share in shares) == nodes


@pytest.mark.parametrize(
    ("labels", "cpus", "words"),
    [
        ({}, 9.0, "the largest node has CPU 2, it asks for 9; waiting for a node"),
        (
            {"pool": "cpu"},
            1.0,
            "no node has the label pool=cpu; the nodes have pool=gpu; waiting for a node",
        ),
        ({}, 1.0, "no node has room for an element, which needs"),
    ],
)
def test_what_is_waited_for_is_told_each_half_minute(capfd, labels, cpus, words):
    room = room_for(labels, cpus)
    for now, is_told in ((1.0, True), (20.0, False), (32.0, True)):
        room.tell([], now)
        assert (words in capfd.readouterr().out) is is_told
