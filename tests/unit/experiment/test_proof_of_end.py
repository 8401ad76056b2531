"""What is said of the processes of a cancelled job, by the end of its log."""

import pytest

from nemo_run_ray.dashboard.state import StateApi
from nemo_run_ray.remote.end_record import EndRecord
from nemo_run_ray.remote.status import JobState, JobStatus, Reason
from tests.unit.experiment.conftest import Submitted

_SETTING_UP = "2026-11-22 04:53:24,072\tINFO job_manager.py:581 -- Runtime env is setting up."
_LEFT = "no process of it is left on its node"
_DOUBT = "its node abcdefabcdef did not confirm that all its processes ended"


@pytest.mark.parametrize(
    ("lines", "leftover"),
    [
        (["working", EndRecord(143, "CANCELLED", "cancelled")], _LEFT),
        ([EndRecord(3, "EXIT_CODE", "exit code 3")], _LEFT),  # cancelled between two attempts
        ([EndRecord(137, "", "killed", left_on=None)], _DOUBT),
        (
            [EndRecord(143, "CANCELLED", "cancelled", left_on=("on n1, where", "on n2"))],
            "processes of it may be left on n1, where, and on n2",
        ),
        ([_SETTING_UP], "it never had a process"),
        ([], _DOUBT),
        ([_SETTING_UP, "working"], _DOUBT),
        ([EndRecord(0, "NONE", "").line("01234567")], _DOUBT),  # of another run
    ],
)
def test_what_may_remain_of_a_cancelled_job(ray, unique, monkeypatch, lines, leftover):
    job = Submitted(ray, unique, "job").jobs["job"]
    nonce = job.record.nonces[-1]
    shown = [line if isinstance(line, str) else line.line(nonce) for line in lines]
    monkeypatch.setattr(StateApi, "last_lines", lambda *_: shown)
    status = JobStatus(JobState.CANCELLED, Reason.CANCELLED, node="abcdef" * 5)
    assert job.proof_of_end(status) == leftover


def test_an_attempt_that_never_started_says_nothing_of_the_one_before(ray, unique):
    job = Submitted(ray, unique, "job").jobs["job"]
    status = JobStatus(JobState.CANCELLED, Reason.CANCELLED, attempt=2)
    assert job.proof_of_end(status) == "its attempt 2 never had a process"
