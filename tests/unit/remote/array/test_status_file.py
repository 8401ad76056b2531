"""The file that shows where an array is."""

from __future__ import annotations

import json

from nemo_run_ray.remote.array.progress import ArrayProgress
from nemo_run_ray.remote.array.states_file import StatesFile
from nemo_run_ray.remote.array.status_file import StatusFile
from nemo_run_ray.remote.group.roles_file import file_name

_ID = "run.job"


def test_where_processes_may_be_left_is_shown_before_their_elements_are_over(tmp_path, monkeypatch):
    file = StatusFile(str(tmp_path), _ID)
    seen: list[list[str]] = []

    def go_on(*_: object) -> None:
        seen.append(json.loads((tmp_path / file_name(_ID)).read_text())["may_be_left_on"])

    monkeypatch.setattr(StatesFile, "go_on", go_on)
    for nodes in ([], {"n2", "n1"}, {"n2"}):
        file.write(ArrayProgress(3), 0, nodes)
    file.write(ArrayProgress(3), 0, {"n3"}, is_over=True)
    assert seen == [[], ["n1", "n2"], ["n2"], ["n3"]]
