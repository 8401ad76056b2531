"""The file that shows where an array is, beside the states of its elements."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_run_ray.remote.array import status_file
from nemo_run_ray.remote.array.progress import ArrayProgress
from nemo_run_ray.remote.array.states_file import StatesFile
from nemo_run_ray.remote.array.status_file import STATES_FILE, StatusFile, file_of
from nemo_run_ray.remote.group.roles_file import file_name

_ID = "run.job"


@pytest.fixture
def seen(tmp_path: Path, monkeypatch) -> list[object]:
    """What is shown of elements that may be left whenever a piece of the states is written."""
    shown: list[object] = []

    def go_on(states: StatesFile, _: ArrayProgress) -> None:
        states.is_written = True
        file = tmp_path / file_name(_ID)
        shown.append(json.loads(file.read_text())["may_be_left"] if file.exists() else None)

    monkeypatch.setattr(StatesFile, "go_on", go_on)
    return shown


def test_what_may_be_left_is_shown_before_its_elements_are_over(tmp_path, seen):
    file = StatusFile(str(tmp_path), _ID)
    for left in ({}, {"n2": [3], "n1": [0]}, {"n2": [3]}):
        file.write(ArrayProgress(3), 0, left)
    file.write(ArrayProgress(3), 0, {"n3": [1]}, is_over=True)
    states_of_an_earlier_driver = None
    assert seen == [
        states_of_an_earlier_driver,
        {},
        {"n2": [3], "n1": [0]},
        {"n2": [3]},
        {"n3": [1]},
    ]


def test_a_disk_that_does_not_take_it_gets_no_states_either(tmp_path, seen, monkeypatch):
    file = StatusFile(str(tmp_path), _ID)
    file.write(ArrayProgress(3), 0, {})

    def write_file(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(status_file, "write_file", write_file)
        file.write(ArrayProgress(3), 0, {"n1": [0]})
        file.write(ArrayProgress(3), 0, {"n1": [0]})
        file.write(ArrayProgress(3), 0, {"n1": [0]}, is_over=True)
    assert seen == [None, {}]
    file._write_at = 0.0
    file.write(ArrayProgress(3), 0, {"n1": [0]})
    assert seen == [None, {}, {"n1": [0]}]


def test_nothing_is_told_of_them_before_this_drivers_states_are_there(tmp_path):
    """The states of an earlier driver, on a disk that takes no other ones, are older."""
    (tmp_path / f"{file_of(_ID, STATES_FILE)}.part").mkdir()
    file = StatusFile(str(tmp_path), _ID)
    file.write(ArrayProgress(3), 0, {})
    shown = tmp_path / file_name(_ID)
    assert json.loads(shown.read_text())["may_be_left"] is None
    (tmp_path / f"{file_of(_ID, STATES_FILE)}.part").rmdir()
    file.write(ArrayProgress(3), 0, {}, is_over=True)
    file.write(ArrayProgress(3), 0, {}, is_over=True)
    assert json.loads(shown.read_text())["may_be_left"] == {}


def test_the_progress_is_told_now_and_then(tmp_path, monkeypatch, capfd):
    now = 0.0
    monkeypatch.setattr(status_file, "time", SimpleNamespace(monotonic=lambda: now))
    file = StatusFile(str(tmp_path), _ID)
    progress = ArrayProgress(4)
    for ended, words in ((0, ""), (2, "2 of 4 elements are over, 1 failed; 0.067 elements/s")):
        for index in range(ended):
            lease = progress.take()
            assert lease is not None
            progress.ended(lease, index, "exit code 1" if index else "")
        file.write(progress, 0, {})
        assert words in capfd.readouterr().out
        now += 30.0
    rows = json.loads((tmp_path / file_name(_ID)).read_text())
    assert (rows["elements_per_s"], rows["left_s"]) == (0.067, 30.0)
