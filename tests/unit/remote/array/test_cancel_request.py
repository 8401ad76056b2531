"""Requests to cancel elements, from the job that writes them to the driver that takes them."""

from __future__ import annotations

import json
import os
import threading

import pytest

from nemo_run_ray.remote.array import cancel_request, driver
from nemo_run_ray.remote.array.cancel_request import request_id, request_paths, run
from tests.conftest import wait_for
from tests.unit.remote.array.pools import ID


@pytest.fixture
def folder(tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(cancel_request, "log_folder", lambda: str(tmp_path))
    return str(tmp_path)


def test_a_request_is_over_when_the_driver_has_taken_it(folder, cluster):
    codes: list[int] = []
    text = json.dumps({"cancel": [[-3, 1], [5, 99]], "only_waiting": True})
    thread = threading.Thread(target=lambda: codes.append(run(request_id(ID, "ab"), text)))
    thread.start()
    wait_for(lambda: request_paths(folder, f"{ID}@2"))
    assert codes == []
    cluster.look()
    cluster.driver._cancel_requested()
    thread.join()
    assert codes == [0]
    states = [row[2] for row in cluster.leases.progress.stretches()]
    assert states == ["cancelled", "waiting", "cancelled"]


def test_a_request_that_no_driver_takes_fails_and_is_gone(folder, monkeypatch, capfd):
    monkeypatch.setattr(cancel_request, "TAKEN_S", 0.0)
    assert run(request_id(ID, "ab"), "{}") == 1
    assert "the array's driver has not taken the request" in capfd.readouterr().out
    assert not request_paths(folder, ID)


@pytest.mark.parametrize("text", ['{"cancel": [[0', "[]", '{"cancel": 1}', "{}", ""])
def test_what_is_no_request_is_removed(cluster, tmp_path, text):
    path = tmp_path / f"nemo_run_ray-{ID}.cancel~x"
    if text:
        path.write_text(text)
    else:
        path.symlink_to("/etc/passwd")
    cluster.driver._cancel_requested()
    assert not os.path.lexists(path)
    assert cluster.leases.progress.ended_count == 0


def test_a_request_whose_client_has_given_up_is_passed_over(cluster, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(driver, "request_paths", lambda *_: [str(tmp_path / "gone")])
    cluster.driver._cancel_requested()
    assert not capfd.readouterr().out


def test_a_request_of_another_array_is_none(folder, tmp_path):
    (tmp_path / "nemo_run_ray-e_1.array2.cancel~x").write_text("of another array")
    assert request_paths(folder, ID) == []
