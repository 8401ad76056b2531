"""What is said of one look at a cluster."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_run_ray.cluster_files.check import CheckRow, CheckState, check, pool_asks
from nemo_run_ray.cluster_files.load import Document
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.dashboard.jobs import Inspection
from nemo_run_ray.dashboard.state import room_of
from nemo_run_ray.remote.fit import ResourceRequest
from tests.rooms import GIB, FakeNode, room

HEAD = FakeNode("head", {"CPU": 8.0}, {"CPU": 6.0})
FOUND = Inspection(
    "http://head:8265",
    version="2.60.0",
    jobs=(2, 1),
    nodes=room(HEAD).nodes,
    python="{}.{}.4".format(*sys.version_info),
)


def document(**file) -> Document:
    return Document(Path("team.yaml"), file, file=ClusterFile.model_validate(file))


def of(name: str, found: Inspection, asks: dict | None = None, **file) -> CheckRow:
    rows = check(found, document(**file), asks)
    (row,) = (row for row in rows if row.check == name)
    return row


@pytest.mark.parametrize(
    ("version", "has_labels", "state"),
    [
        ("2.60.0", True, CheckState.OK),
        ("2.54.0", True, CheckState.OK),
        ("2.53.1", True, CheckState.BROKEN),
        ("2.53.1", False, CheckState.WARNING),
        ("3.0.0.dev0", True, CheckState.OK),
    ],
)
def test_rays_version_against_the_labels_in_use(version, has_labels, state):
    pools = {"gpu": {"label_selector": {"kind": "x"}}} if has_labels else {}
    assert of("Ray", replace(FOUND, version=version), pools=pools).state is state


@pytest.mark.parametrize(
    ("cpus", "state"), [(2.0, CheckState.OK), (3.0, CheckState.WARNING), (9.0, CheckState.BROKEN)]
)
def test_a_pool_now_and_ever(cpus, state):
    assert of("pool p", FOUND, pools={"p": {"cpus_per_node": cpus}}).state is state


def test_where_it_is_not_told_what_is_free_a_pool_is_unknown():
    found = replace(FOUND, nodes=room_of([HEAD.row()], None).nodes)
    assert of("pool p", found, pools={"p": {"cpus_per_node": 1.0}}).state is CheckState.UNKNOWN
    assert of("pool p", found, pools={"p": {"cpus_per_node": 9.0}}).state is CheckState.BROKEN


def test_tasks_are_looked_at_in_place_of_the_pools():
    asks = {"task train": ResourceRequest({"GPU": 1.0})}
    names = [row.check for row in check(FOUND, document(pools={"p": {}}), asks)]
    assert "pool p" not in names
    assert "no node has GPU, it asks for 1" in of("task train", FOUND, asks).message


def test_an_address_that_a_file_must_have():
    assert of("address", FOUND, preflight={"require_address": True}).state is CheckState.BROKEN


@pytest.mark.parametrize("is_strict", [False, True])
def test_what_is_not_told_is_never_ok(is_strict):
    file = {
        "pools": {"p": {"cpus_per_node": 1.0}},
        "preflight": {
            "strict": is_strict,
            "required_labels": [{"key": "kind", "value": "x"}],
            "min_resources": {"CPU": 1.0},
        },
    }
    last = list(check(replace(FOUND, nodes=None), document(**file)))[-1]
    state = CheckState.BROKEN if is_strict else CheckState.UNKNOWN
    assert (last.check, last.state) == ("nodes", state)


def test_a_cluster_without_a_living_node_is_broken():
    row = of("nodes", replace(FOUND, nodes=()))
    assert (row.state, row.message) == (CheckState.BROKEN, "No node lives.")
    assert row.next_step


def test_a_pools_fields_lie_over_the_defaults_and_those_over_the_images_labels():
    file = document(
        defaults={
            "cpus_per_node": 4,
            "memory_per_node": "2GiB",
            "label_selector": {"a": "b", "image": "default"},
            "image": "vllm",
        },
        image_labels={
            "vllm": {"of": "vllm", "image": "x"},
            "sandbox": {"of": "sandbox", "image": "y"},
        },
        pools={
            "own": {"cpus_per_node": 0.0, "label_selector": {"kind": "x"}},
            "plain": {"resources_per_node": {"fpga": 1.0}, "image": "sandbox"},
        },
    )
    assert pool_asks(file) == {
        "pool own": ResourceRequest(
            {"memory": 2.0 * GIB}, {"of": "vllm", "image": "default", "a": "b", "kind": "x"}
        ),
        "pool plain": ResourceRequest(
            {"CPU": 4.0, "memory": 2.0 * GIB, "fpga": 1.0},
            {"of": "sandbox", "image": "default", "a": "b"},
        ),
    }
