"""What a worker reserves, and how many of them a cluster can have."""

import pytest

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.work.shape import Shape, shape_of


def node(alive: bool = True, labels: dict[str, str] | None = None, **resources: float) -> dict:
    return {"NodeID": "n", "Alive": alive, "Labels": labels or {}, "Resources": resources}


def shape(**fields) -> Shape:
    given = {"cpus": 1, "gpus": 0, "memory": None, "resources": None, "label_selector": None}
    return shape_of(**{**given, "max_workers": None, **fields})


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({}, 12),
        ({"cpus": 4}, 3),
        ({"cpus": 3}, 3),
        ({"cpus": 0.5}, 24),
        ({"cpus": 16}, 0),
        ({"cpus": 1, "gpus": 1}, 2),
        ({"label_selector": {"pool": "a"}}, 8),
        ({"max_workers": 5}, 5),
        ({"cpus": 0, "max_workers": 3}, 3),
        ({"cpus": 0.1}, 120),
        ({"cpus": 0.5, "gpus": 0.2}, 10),
    ],
)
def test_as_many_workers_as_living_nodes_can_have(fields, slots):
    nodes = [node(CPU=8.0, GPU=2.0, labels={"pool": "a"}), node(CPU=4.0), node(False, CPU=64.0)]
    assert shape(**fields).slots(nodes) == slots


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cpus": 64}, "it asks for CPU 64, and the largest node has 8"),
        ({"resources": {"licence": 1}}, "it asks for licence 1, and the largest node has 0"),
        ({"label_selector": {"pool": "b"}}, "No node has the labels {'pool': 'b'}"),
    ],
)
def test_why_no_node_can_have_one(fields, words):
    assert words in shape(**fields).why_never([node(CPU=8.0), node(False, CPU=64.0)])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cpus": -1}, "CPU is -1"),
        ({"cpus": "two"}, "CPU is 'two'"),
        ({"max_workers": 0}, "max_workers must be greater than 0"),
        ({"cpus": 0}, "needs max_workers"),
    ],
)
def test_wrong_amounts_are_named(fields, words):
    with pytest.raises(ConfigError, match=words):
        shape(**fields)


def test_the_actors_options_are_rays():
    found = shape(gpus=0.5, memory=2**30, resources={"disk": 2}).options()
    assert found["num_cpus"] == 1
    assert found["num_gpus"] == 0.5
    assert found["memory"] == 2**30
    assert found["resources"] == {"disk": 2}
    assert found["scheduling_strategy"] == "SPREAD"


def test_what_is_waited_for_is_told():
    words = Shape((("CPU", 2.0), ("GPU", 0.5))).why_waiting({"CPU": 1.0}, 4)
    assert "No worker is ready yet: they start, or wait for room." in words
    assert "Each asks for CPU 2, GPU 0.5;" in words
    assert words.endswith("workers that start have taken already: CPU 1, GPU 0.")
    assert "the nodes can have 4 when nothing else runs" in words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"label_selector": "pool=a"}, "label_selector is 'pool=a'; expected is a dict of values"),
        ({"label_selector": {"zone": ["a"]}}, "expected is a dict of values by label"),
        ({"resources": 5}, "resources is 5; expected is a dict of amounts"),
        ({"resources": {"disk": "much"}}, "disk is 'much'; expected is a number from 0"),
        ({"cpus": 1e-5}, "CPU is 1e-05; expected is 0, or a number from 0.0001"),
    ],
)
def test_what_no_worker_can_reserve_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        shape(**fields)
