from dataclasses import replace

import pytest
from ray.job_submission import JobErrorType
from ray.job_submission import JobStatus as RaysJobStatus
from torchx.specs import AppState, is_terminal

from nemo_run_ray.nemo.scheduler import torchx_state
from nemo_run_ray.remote.end_record import EndRecord
from nemo_run_ray.remote.status import (
    FROM_RAY,
    FROM_RAY_ERROR,
    JobState,
    JobStatus,
    Reason,
    status_of_row,
)

_MARKER = "last available logs (truncated to 20,000 chars):\n"


def _failed(code: int | None, message: str, error: str = "JOB_ENTRYPOINT_COMMAND_ERROR") -> dict:
    return {
        "status": "FAILED",
        "driver_exit_code": code,
        "message": message,
        "error_type": error,
        "driver_node_id": "abc",
    }


@pytest.mark.parametrize("status", [one.value for one in RaysJobStatus])
def test_every_status_of_this_ray_is_known(status):
    state = status_of_row({"status": status}).state
    assert state is FROM_RAY[status]
    assert state.is_terminal == RaysJobStatus(status).is_terminal()


@pytest.mark.parametrize("error", [one.value for one in JobErrorType])
def test_every_error_of_this_ray_is_known(error):
    status = status_of_row({**_failed(None, "Ray's own words", error), "driver_node_id": None})
    assert status.reason is FROM_RAY_ERROR[error]
    assert status.reason is not Reason.NONE
    assert "Ray's own words" in status.message


@pytest.mark.parametrize("row", [{"status": "PAUSED"}, {"status": None}, {}, {"status": 3}])
def test_a_status_of_a_newer_ray_is_no_end(row):
    status = status_of_row(row)
    assert status.state is JobState.UNKNOWN
    assert not status.state.is_terminal
    assert status.message


@pytest.mark.parametrize("state", JobState)
def test_torchx_agrees_on_what_is_an_end(state):
    assert isinstance(torchx_state(JobStatus(state)), AppState)
    assert is_terminal(torchx_state(JobStatus(state))) == state.is_terminal


def test_exit_code_and_the_logs_end():
    logs = (
        "2026-01-01 00:00:00,000\tINFO job_manager.py:531 -- Runtime env is setting up.\n"
        "Running entrypoint for job exp.job: exec python3 -I\n"
        "Traceback\n"
        "ValueError: no\n"
    )
    status = status_of_row(
        _failed(3, f"Job entrypoint command failed with exit code 3, {_MARKER}{logs}")
    )
    assert (status.state, status.reason) == (JobState.FAILED, Reason.EXIT_CODE)
    assert (status.detail, status.tail) == ("exit code 3", "Traceback\nValueError: no")
    shown = "exit code 3; the last lines of its log:\nTraceback\nValueError: no\n"
    assert status.message == f"{shown}Its whole log: `nemo-run-ray logs <its id>`."
    named = replace(status, job="exp.a", experiment="exp")
    assert named.message == f"{shown}Its whole log: `nemo-run-ray logs exp.a`."
    assert named == status, "the names are no part of what happened"
    assert status.node == "abc"


@pytest.mark.parametrize(
    ("code", "name"), [(137, "SIGKILL"), (-9, "SIGKILL"), (139, "SIGSEGV"), (-15, "SIGTERM")]
)
def test_a_signal_is_named(code, name):
    status = status_of_row(_failed(code, "Job entrypoint command failed"))
    assert status.reason is Reason.SIGNAL
    assert f"killed by {name} (exit code {code})" in status.detail
    assert ("the node's memory" in status.message) == (name == "SIGKILL")
    assert status.message.endswith("\nIts whole log: `nemo-run-ray logs <its id>`.")


@pytest.mark.parametrize(
    ("code", "log", "told"),
    [
        (127, "sh: 1: nope: not found", "a command was not found on that node"),
        (127, "nemo_run_ray| no Python of version 3.9 or newer", ""),
        (
            2,
            "/v/bin/python: can't open file '/tmp/x/nemo_run/code/mine.py': [Errno 2] No such file "
            "or directory",
            "mine.py is not on that node",
        ),
        (1, "cat: /x/nemo_run/code/last.ckpt: No such file or directory\nCUDA out of memory", ""),
        (127, "bash: line 1: /x/nemo_run/code/a.sh: No such file or directory", "a.sh is not on"),
        (2, "FileNotFoundError: [Errno 2] No such file or directory: 'data'", ""),
        (
            1,
            "ModuleNotFoundError: No module named 'a.b'\nFiddle context: …",
            "the module 'a.b' is not on",
        ),
        (
            1,
            "role/0| ModuleNotFoundError: No module named 'foo'\nnemo_run_ray| role/0 ended\n"
            + EndRecord(1, "EXIT_CODE", "role/0: exit code 1").line("01234567"),
            "the module 'foo' is not on",
        ),
        (
            1,
            "WARNING:root:Failed to load external main: No module named 'helper'\n1\n2\n3\n4\n"
            "AttributeError: module '__main__' has no attribute 'task'",
            "the module 'helper' is not on",
        ),
        (
            1,
            "python: Error while finding module specification for 'nemo_run.core.runners' "
            "(ModuleNotFoundError: No module named 'nemo_run')",
            "the module 'nemo_run' is not on that node; the executor's `packager`",
        ),
    ],
)
def test_what_a_user_forgot_is_said(code, log, told):
    message = f"Job failed, last available logs (truncated to 20,000 chars):\n{log}"
    detail = status_of_row(_failed(code, message)).detail
    assert detail.startswith(f"exit code {code}")
    assert told in detail
    assert ("packager" in detail) == bool(told)


def test_a_ray_of_the_tasks_own_is_told_which_variables_to_unset():
    """Ray's error names neither: it proposes a longer time for uploads."""
    log = (
        "OSError: Failed to download runtime_env file package gcs://_ray_pkg_2f4a.zip from the GCS "
        "to the Ray worker node. The package may have prematurely been deleted from the GCS"
    )
    detail = status_of_row(_failed(1, f"{_MARKER}Traceback\n{log}\n\n")).detail
    assert "unset RAY_JOB_CONFIG_JSON_ENV_VAR, and RAY_ADDRESS," in detail


def test_a_worker_that_never_came_up_is_its_runtime_environments_fault():
    message = (
        "Job supervisor actor could not be scheduled: worker startup repeatedly failed on the "
        "node, for example by a broken py_executable"
    )
    row = _failed(None, message, "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE")
    status = status_of_row(row)
    assert status.reason is Reason.RUNTIME_ENV
    assert "broken py_executable" in status.message
    assert "Correct `runtime_env`" in status.message


def test_a_supervisor_that_ran_and_is_gone_is_a_death():
    message = "Unexpected error occurred: failed to get job supervisor."
    row = _failed(None, message, "JOB_SUPERVISOR_ACTOR_START_FAILURE")
    assert status_of_row(row).reason is Reason.NODE_DIED
    # Without a node it never ran: another monitor has found it given up, and written this over it.
    assert status_of_row({**row, "driver_node_id": None}).reason is Reason.START_TIMEOUT
    row["message"] = "Failed to start supervisor actor x: 'Invalid label selector'"
    assert status_of_row({**row, "driver_node_id": None}).reason is Reason.NOT_STARTED


def test_an_end_that_ray_could_not_record_is_no_start_that_failed():
    """Ray calls both the same; the traceback of its own is what differs."""
    error = "JOB_ENTRYPOINT_COMMAND_START_ERROR"
    frame = (
        'Traceback (most recent call last):\n  File "job_supervisor.py", line {}, in run\n    {}\n'
    )
    line = "await self._job_info_client.put_status(self._job_id, JobStatus.SUCCEEDED)"
    lost = status_of_row(_failed(None, frame.format(446, line) + "RpcError: Timed out", error))
    assert lost.reason is Reason.UNRECORDED
    assert lost.detail == "Ray could not record how it ended: RpcError: Timed out"
    assert "the last lines of `nemo-run-ray logs <its id>`" in lost.message

    line = "child_process = self._exec_entrypoint(env, log_path)"
    words = frame.format(380, line) + "OSError: [Errno 28] No space left on device"
    assert status_of_row(_failed(None, words, error)).reason is Reason.NOT_STARTED


def test_of_a_replica_that_could_not_be_prepared_our_own_words_are_all():
    """Ray's traceback about its runtime environment is in the log before them."""
    logs = "Traceback (most recent call last):\nRuntimeError: Podman\n" + EndRecord(
        1, "NOT_STARTED", "a/0: no worker: name unknown"
    ).line("01234567")
    status = status_of_row(
        _failed(1, f"Job entrypoint command failed with exit code 1, {_MARKER}{logs}")
    )
    assert status.reason is Reason.NOT_STARTED
    assert status.detail == "exit code 1: a/0: no worker: name unknown"


@pytest.mark.parametrize(
    ("words", "reason", "step"),
    [
        ("on n: ModuleNotFoundError: No module named 'x'", Reason.NO_MODULE, "packager"),
        ("on n: exit code 127: there is no program 'python9'", Reason.NO_PROGRAM, "image"),
        ("a/0: the port 80 is taken", Reason.NOT_STARTED, "Correct"),
    ],
)
def test_what_keeps_a_command_from_its_start_is_told_apart(words, reason, step):
    tail = EndRecord(1, "NOT_STARTED", words).line("01234567")
    of_group = status_of_row(_failed(1, f"{_MARKER}{tail}"))
    message = f"Traceback (most recent call last):\n  …\n{words}"
    of_ray = status_of_row(_failed(None, message, "JOB_ENTRYPOINT_COMMAND_START_ERROR"))
    for status in (of_group, of_ray):
        assert status.reason is reason
        assert step in status.message.rpartition("\n")[2]
