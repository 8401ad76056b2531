"""What is said of the processes of a cancelled job, by the end of its log."""

import pytest

from nemo_run_ray.dashboard.state import StateApi
from nemo_run_ray.experiment.leftovers import leftovers
from nemo_run_ray.remote.node.output import end_mark
from nemo_run_ray.remote.states import JobState, JobStatus, Reason
from tests.unit.experiment.conftest import Handed

_SETTING_UP = "2026-11-22 04:53:24,072\tINFO job_manager.py:581 -- Runtime env is setting up."
_LEFT = "no process of it is left on its node"
_DOUBT = "its node abcdefabcdef did not confirm that all its processes ended"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["working", "{end}cancelled; no process of it is left"], _LEFT),
        (["{end}exit code 3"], _LEFT),  # it was cancelled between two attempts
        (["{end}the package's process on this node was killed, and 0 others with it"], _DOUBT),
        ([_SETTING_UP], "it never had a process"),
        ([], _DOUBT),
        ([_SETTING_UP, "working"], _DOUBT),
        (["nemo_run_ray| end 01234567: exit code 3"], _DOUBT),  # of another run
    ],
)
def test_what_is_left_of_a_cancelled_job(ray, unique, monkeypatch, lines, told):
    handed = Handed(ray, unique, "job")
    job = handed.jobs["job"]
    end = end_mark(job.record.nonces[-1])
    shown = [line.format(end=end) for line in lines]
    monkeypatch.setattr(StateApi, "last_lines", lambda *_: shown)
    status = JobStatus(JobState.CANCELLED, Reason.CANCELLED, node="abcdef" * 5)
    assert leftovers(job, status) == told


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("cancelled; no process of it is left", _LEFT),
        ("exit code 8", _LEFT),
        (
            "cancelled; processes of it may be left on n1, where",
            "processes of it may be left on n1",
        ),
        ("exit code 8; processes of it may be left on n1, where", "processes of it may be left on"),
        ("the package's process on this node was killed, and 0 others with it", _DOUBT),
        ("the command cannot be run: RayError: no answer", _DOUBT),
    ],
)
def test_an_array_says_itself_whether_processes_are_left(ray, unique, monkeypatch, ending, told):
    job = Handed(ray, unique, "job").jobs["job"]
    job.record.is_array = True
    lines = ["0| no process of it is left", end_mark(job.record.nonces[-1]) + ending]
    monkeypatch.setattr(StateApi, "last_lines", lambda *_: lines)
    status = JobStatus(JobState.CANCELLED, Reason.CANCELLED, node="abcdef" * 5)
    assert leftovers(job, status).startswith(told)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["{end}cancelled; no process of it is left"], _LEFT),
        (["{end}cancelled; not every node has confirmed it"], _DOUBT),
        (["server/0| no process of it is left", "{end}exit code 1"], _DOUBT),
    ],
)
def test_a_group_says_itself_whether_processes_are_left(ray, unique, monkeypatch, lines, told):
    job = Handed(ray, unique, "job").jobs["job"]
    job.record.has_roles = True
    end = end_mark(job.record.nonces[-1])
    monkeypatch.setattr(StateApi, "last_lines", lambda *_: [one.format(end=end) for one in lines])
    status = JobStatus(JobState.CANCELLED, Reason.CANCELLED, node="abcdef" * 5)
    assert leftovers(job, status) == told
