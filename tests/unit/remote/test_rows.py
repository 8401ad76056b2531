"""Rows of a job table that anybody may have written."""

import json
import math
from dataclasses import asdict

import pytest

from nemo_run_ray.remote.spec import ArrayRows, GroupRows, fits, job_row, job_rows
from nemo_run_ray.remote.status import attempt_of_row

ROW = {
    "type": "SUBMISSION",
    "submission_id": "e.a",
    "job_id": None,
    "status": "FAILED",
    "entrypoint": "true",
    "message": "oops",
    "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR",
    "start_time": 1_800_000_000_000,
    "end_time": 1_800_000_001_000,
    "metadata": {"nemo_run_ray": "n"},
    "runtime_env": {"pip": ["x"]},
    "driver_node_id": "f" * 56,
    "driver_exit_code": 3,
}
HOSTILE = [1, 1.5, "x", True, [1], [None], {"a": 1}, 10**18, 10**30, -1, math.nan, math.inf]


def test_a_row_of_rays_stays_as_it_is():
    of_ray = {name: value for name, value in ROW.items() if name != "type" and value is not None}
    assert job_row(ROW) == of_ray


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
@pytest.mark.parametrize("name", ROW)
def test_a_value_of_another_type_is_left_out(name, value):
    row = json.loads(json.dumps({**ROW, name: value}))
    (found,) = job_rows([row]) or [{**ROW, "status": ""}]
    attempt = attempt_of_row(found)
    assert abs(attempt.posted_at) < 4.2e9
    assert abs(attempt.ended_at) < 4.2e9
    assert isinstance(attempt.status.detail, str)
    json.dumps(asdict(attempt.status), allow_nan=False)


def test_another_program_may_have_written_the_metadata():
    metadata = {"nemo_run_ray_retries": "many", "nemo_run_ray_permanent": "1, x"}
    attempt = attempt_of_row(ROW | {"metadata": metadata})
    assert (attempt.retries, attempt.permanent_exit_codes) == (0, (1,))


@pytest.mark.parametrize("table", [None, 1, "x", {}, [1], [None], [[]], [ROW, "x"]], ids=repr)
def test_what_is_no_job_table_is_not_taken_for_an_empty_one(table):
    with pytest.raises(ValueError, match="expected is"):
        job_rows(table)


@pytest.mark.parametrize("kind", [GroupRows, ArrayRows])
@pytest.mark.parametrize(
    "value", [*HOSTILE, None, {}, [], {"phase": "over", "roles": [1]}], ids=repr
)
def test_what_a_driver_did_not_write_has_not_its_shape(value, kind):
    assert not fits(value, kind)
