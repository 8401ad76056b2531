"""Requests to cancel elements, from the job that writes them to the driver that takes them."""

from __future__ import annotations

import json
import os
import threading

import pytest

from nemo_run_ray.remote.array import cancel_request
from nemo_run_ray.remote.array.cancel_request import CancelRequests, request_id, run
from tests.conftest import wait_for


@pytest.fixture
def requests(tmp_path, monkeypatch) -> CancelRequests:
    monkeypatch.setattr(cancel_request, "log_folder", lambda _: str(tmp_path))
    return CancelRequests(str(tmp_path), "e_1.array@2")


def test_a_request_is_over_when_the_driver_has_taken_it(requests):
    codes: list[int] = []
    text = json.dumps({"cancel": [[-3, 1], [5, 99]], "only_waiting": True})
    thread = threading.Thread(target=lambda: codes.append(run(request_id("e_1.array", "ab"), text)))
    thread.start()
    wait_for(lambda: list(requests.find(8)))
    (request,) = requests.find(8)
    assert request[1:] == ([(0, 1), (5, 7)], True)
    assert codes == []
    requests.remove(request[0])
    thread.join()
    assert codes == [0]


def test_a_request_that_no_driver_takes_fails_and_is_gone(requests, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(cancel_request, "TAKEN_S", 0.0)
    assert run(request_id("e_1.array", "ab"), "{}") == 1
    assert "the array's driver has not taken the request" in capfd.readouterr().out
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ['{"cancel": [[0', "[]", '{"cancel": 1}', "{}"])
def test_what_is_no_request_is_removed(requests, tmp_path, text):
    (tmp_path / f"{requests._prefix}x").write_text(text)
    assert list(requests.find(8)) == []
    assert os.listdir(tmp_path) == []


def test_a_request_of_another_array_or_user_is_none(requests, tmp_path):
    (tmp_path / f"{requests._prefix}link").symlink_to("/etc/passwd")
    (tmp_path / "nemo_run_ray-e_1.array2.cancel~x").write_text("of another array")
    assert list(requests.find(8)) == []
