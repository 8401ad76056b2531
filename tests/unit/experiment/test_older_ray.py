"""Label selectors of a task on a simulated Ray of different versions."""

import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import TooOld
from tests.conftest import refused
from tests.unit.experiment.conftest import Handed

LABELS = {"pool": "a"}


@pytest.mark.parametrize("version", ["2.54.0", "2.60.0", "3.0.0"])
def test_ray_places_a_task_by_its_labels(ray, unique, version):
    ray.version = version
    Handed(ray, unique, "job", label_selector=LABELS)
    (body,) = ray.bodies
    assert body["entrypoint_label_selector"] == LABELS


@pytest.mark.parametrize("fields", [{}, {"nodes": 2}])
def test_a_ray_that_knows_no_labels_is_refused_before_anything_is_sent(ray, unique, fields):
    ray.version = "2.53.1"
    executor = RayExecutor(address=ray.url, label_selector=LABELS, **fields)
    message = refused(TooOld, executor, unique)
    assert "needs Ray 2.54 or newer" in message
    assert "runs 2.53.1" in message
    assert ray.writes == []
