"""Which GPUs each slot of a host has."""

import pytest

from nemo_run_ray.remote.array.workers import Slots

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("devices", "count", "gpus", "found"),
    [
        ("4,5,6,7", 4, 1.0, ["4", "5", "6", "7"]),
        ("4,5,6,7", 2, 2.0, ["4,5", "6,7"]),
        ("GPU-a", 4, 0.25, ["GPU-a"] * 4),
        ("3", 3, 0.3, ["3"] * 3),
    ],
)
def test_each_slot_has_gpus_of_its_own_or_a_share_of_one(monkeypatch, devices, count, gpus, found):
    monkeypatch.setenv(VISIBLE, devices)
    slots = Slots(count, gpus)
    assert [slots.take()[1][VISIBLE] for _ in range(count)] == found
    assert not slots.is_free


def test_a_slot_that_is_given_back_has_the_same_gpu_again(monkeypatch):
    monkeypatch.setenv(VISIBLE, "0,1")
    slots = Slots(2, 1.0)
    slots.take()
    slot, variables = slots.take()
    slots.give_back(slot)
    assert slots.take() == (slot, variables)


@pytest.mark.parametrize(("devices", "gpus"), [("0,1", 0.0), ("", 1.0)])
def test_nothing_is_set_without_gpus(monkeypatch, devices, gpus):
    monkeypatch.setenv(VISIBLE, devices)
    assert Slots(1, gpus).take() == (0, {})
