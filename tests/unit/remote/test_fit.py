"""Whether a node can take a replica, and the words when it cannot."""

import pytest

from nemo_run_ray.remote.fit import (
    ResourceRequest,
    best,
    free_text,
    hosts,
    request_of,
    scarce,
    slots,
    why_not,
)
from tests.rooms import GIB, FakeNode, room

NODES = room(
    FakeNode("head", {"CPU": 8.0, "memory": 16.0 * GIB}, {"CPU": 8.0}),
    FakeNode("a", {"CPU": 8.0, "GPU": 8.0}, {"GPU": 6.0}, labels={"gpu_kind": "a100"}),
    FakeNode("b", {"CPU": 4.0, "GPU": 8.0}, {"GPU": 7.0}, labels={"gpu_kind": "l40"}),
).nodes


def test_a_reservation_is_what_rays_request_says():
    reservation = {
        "entrypoint_num_cpus": 2,
        "entrypoint_num_gpus": 0,
        "entrypoint_memory": 3 * GIB,
        "entrypoint_resources": {"fpga": 1},
        "entrypoint_label_selector": {"gpu_kind": "in(a100,l40)"},
    }
    ask = request_of(reservation)
    assert ask.resources == {"CPU": 2.0, "memory": 3.0 * GIB, "fpga": 1}
    assert str(ask) == "CPU 2, fpga 1, memory 3.00 GiB on a node with gpu_kind: in(a100,l40)"
    assert not request_of({})
    assert not request_of({"entrypoint_num_cpus": 0})


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, ["a", "b", "head"]),
        ({"gpu_kind": "a100"}, ["a"]),
        ({"gpu_kind": "in(a100, l40)"}, ["a", "b"]),
        ({"gpu_kind": "!a100"}, ["b", "head"]),
        ({"gpu_kind": "!in(a100,l40)"}, ["head"]),
    ],
)
def test_labels_are_matched_by_rays_grammar(selector, expected):
    assert (
        sorted(node.host for node in hosts(ResourceRequest({"CPU": 1.0}, selector), NODES))
        == expected
    )


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (ResourceRequest({"GPU": 8.0}), ""),
        (ResourceRequest({"GPU": 16.0}), "the largest node has GPU 8, it asks for 16"),
        (ResourceRequest({"TPU": 1.0}), "no node has TPU, it asks for 1"),
        (
            ResourceRequest({"CPU": 8.0}, {"gpu_kind": "l40"}),
            "the largest node with gpu_kind=l40 has CPU 4, it asks for 8",
        ),
        (
            ResourceRequest({"GPU": 1.0, "memory": 1.0 * GIB}),
            "no node has GPU 1, memory 1.00 GiB at once",
        ),
        (
            ResourceRequest({}, {"gpu_kind": "h100"}),
            "no node has the label gpu_kind=h100; the nodes have gpu_kind=a100, l40",
        ),
        (
            ResourceRequest({}, {"gpu_kind": "in(h100,h200)"}),
            "no node has the label gpu_kind: in(h100,h200); the nodes have gpu_kind=a100, l40",
        ),
        (ResourceRequest({}, {"zone": "x"}), "no node has the label zone=x; none has zone"),
        (
            ResourceRequest({}, {"gpu_kind": "a100", "ray.io/node-id": NODES[2].node_id}),
            f"no node has all of the labels gpu_kind=a100, ray.io/node-id={NODES[2].node_id}",
        ),
    ],
)
def test_why_no_node_can_ever_take_it(ask, words):
    assert why_not(ask, NODES) == words


def test_the_best_node_lacks_least():
    node = best(ResourceRequest({"GPU": 4.0}), NODES)
    assert node.host == "a"
    assert free_text(ResourceRequest({"GPU": 4.0}), node) == "GPU 2 of 8 free"
    assert scarce(ResourceRequest({"GPU": 4.0}), node) == ["GPU"]
    assert not scarce(ResourceRequest({"GPU": 2.0}), node)


def test_slots_are_what_the_scarcest_resource_allows():
    assert slots({"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}) == 2
    assert slots({"CPU": 0.9999999}, {"CPU": 1.0}) == 1, "Ray counts in steps of 0.0001"
    assert slots({"CPU": 4.0}, {"CPU": 1.0, "gold": 1.0}) == 0
