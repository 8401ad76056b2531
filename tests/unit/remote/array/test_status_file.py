"""The file that shows where an array is, beside the states of its elements."""

from __future__ import annotations

import json
from types import SimpleNamespace

from nemo_run_ray.remote.array import driver as status
from nemo_run_ray.remote.array.driver import StatusFile
from nemo_run_ray.remote.array.elements import ENDED, ArrayProgress
from nemo_run_ray.remote.spec import status_file_name

_ID = "run.job"


def test_the_progress_is_told_now_and_then(tmp_path, monkeypatch, capfd):
    now = 0.0
    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=lambda: now))
    file = StatusFile(str(tmp_path), _ID)
    progress = ArrayProgress(4)
    for ended, words in ((0, ""), (2, "2 of 4 elements are over, 1 failed; 0.0667 elements/s")):
        for index in range(ended):
            lease = progress.next_lease(0)
            assert lease is not None
            progress.apply(lease)
            progress.apply(lease._replace(kind=ENDED, code=index), "exit code 1")
        file.write(progress, 0)
        assert words in capfd.readouterr().out
        now += 30.0
    rows = json.loads((tmp_path / status_file_name(_ID)).read_text())
    assert (rows["elements_per_s"], rows["left_s"]) == (0.067, 30.0)
