"""Nodes and who holds them, as Ray's own code writes them."""

from hypothesis import given
from hypothesis import strategies as st
from ray.dashboard.utils import to_camel_case

from nemo_run_ray.dashboard.nodes import (
    amount_of,
    holdings_of,
    key_of,
    nodes_of_summary,
    nodes_of_table,
    with_names,
)
from tests.rooms import GIB, GROUP, FakeNode, actor, summary, supervisor


@given(st.text(max_size=30))
def test_keys_are_written_as_ray_does(name):
    assert key_of(name) == to_camel_case(name)
    assert key_of(key_of(name)) == key_of(name) or "_" not in name


def test_total_and_free_under_the_names_that_were_given():
    one = FakeNode("a", {"CPU": 4.0, "memory": 8.0 * GIB, "my_fpga": 2.0}, {"CPU": 1.5})
    (node,) = nodes_of_summary(summary(one))
    assert node.total == {"CPU": 4.0, "memory": 8.0 * GIB, "my_fpga": 2.0}
    assert node.free == {"CPU": 2.5, "memory": 8.0 * GIB, "my_fpga": 2.0}
    assert (node.node_id, node.host, node.is_head) == (one.id, "a", False)


def test_what_placement_groups_reserve_is_not_free():
    # 2.25 are held: 1 is reserved by groups, and half of that used; 1.25 by others.
    one = FakeNode(
        "a",
        {"CPU": 4.0, "memory": 8.0 * GIB},
        {"CPU": 2.25, "memory": 2.0 * GIB},
        {"CPU": (1.0, 0.5), "memory": (2.0 * GIB, 0.0)},
    )
    (node,) = nodes_of_summary(summary(one))
    assert node.free == {"CPU": 1.75, "memory": 6.0 * GIB}
    assert node.grouped == {"CPU": 1.0, "memory": 2.0 * GIB}


@given(st.floats(0, 1000, width=32), st.floats(0, 1, width=32), st.floats(0, 2**43).map(round))
def test_any_amount_is_read(total, part, memory):
    one = FakeNode("a", {"GPU": total, "memory": memory}, {"GPU": total * part, "memory": memory})
    (node,) = nodes_of_summary(summary(one))
    assert abs(node.free["GPU"] - total * (1 - part)) < 1e-6 * max(1, total)
    assert node.total["memory"] == memory
    assert node.free["memory"] <= max(1, memory * 0.01)


def test_dead_nodes_are_left_out():
    found = nodes_of_summary(summary(FakeNode("a", {}), FakeNode("b", {}, state="DEAD")))
    assert [node.host for node in found] == ["a"]


def test_a_node_of_which_nothing_is_told_yet_has_totals_only():
    answer = summary(FakeNode("a", {"CPU": 4.0, "my_fpga": 2.0}))
    answer["data"]["nodeLogicalResources"] = {}
    (node,) = nodes_of_summary(answer)
    assert node.free is None
    assert amount_of(node.total, "my_fpga") == 2.0


def test_the_heads_disk_is_that_of_rays_files():
    (node,) = nodes_of_summary(summary(FakeNode("a", {}, is_head=True, disk=(7, 3))))
    assert (node.disk.path, node.disk.free_bytes, node.disk.used_bytes) == ("/tmp/my_ray", 7, 3)


def test_the_table_gives_labels_their_names():
    one = FakeNode("a", {"CPU": 4.0}, labels={"gpu_kind": "h100"})
    nodes = nodes_of_summary(summary(one))
    assert "gpu_kind" not in nodes[0].labels
    (named,) = with_names(nodes, nodes_of_table([one.in_table()]))
    assert named.labels["gpu_kind"] == "h100"
    assert named.free == {"CPU": 4.0}


def test_who_holds_what():
    one = FakeNode("a", {"CPU": 4.0})
    rows = [
        supervisor("exp.a", one, CPU=1.5),
        supervisor("exp.b", None, CPU=16.0),
        actor("03000000", one, CPU=0.25),
        actor("03000000", one, GROUP, CPU=0.5, my_fpga=1.0),
    ]
    first, second, third = holdings_of(rows)
    assert (first.submission_id, first.resources, first.node_id) == ("exp.a", {"CPU": 1.5}, one.id)
    assert (second.submission_id, second.job_id) == ("", "03000000")
    assert third.is_grouped
    assert third.resources == {"CPU": 0.5, "my_fpga": 1.0}
