"""How long ago a job got to where it is, as ``status`` says it."""

import pytest

from nemo_run_ray.cli.status_report import since


@pytest.mark.parametrize(
    ("state", "moments", "expected"),
    [
        ("PENDING", {}, "1m 40s ago"),
        ("RUNNING", {"running_at": 40.0}, "1m 0s ago"),
        ("SUCCEEDED", {"running_at": 40.0, "ended_at": 70.0}, "30s ago"),
        ("FAILED", {}, ""),
    ],
)
def test_since(state, moments, expected):
    times = {"running_at": None, "ended_at": None, "seen_at": None, **moments}
    row = {"state": state, "attempts": [{"posted_at": 0.001, **times}]}
    assert since(row, 100.001) == expected
