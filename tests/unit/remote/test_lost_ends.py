"""Rows that Ray has written over, and what the ends of their logs prove."""

from __future__ import annotations

import pytest

from nemo_run_ray.remote.lost_ends import LostEnds
from nemo_run_ray.remote.node.output import end_mark
from nemo_run_ray.remote.states import JobState, Reason, status_of_row

NONCE = "0123456789abcdef"
MARK = end_mark(NONCE)
OVERWRITTEN = {
    "submission_id": "e.job",
    "status": "FAILED",
    "error_type": "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "message": "Unexpected error occurred: failed to get job supervisor.",
    "driver_node_id": "n1",
    "driver_exit_code": None,
    "end_time": 1,
    "metadata": {"nemo_run_ray": NONCE},
}
DIED = {"error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": "Job supervisor actor died: x"}
UNRECORDED = {
    "error_type": "JOB_ENTRYPOINT_COMMAND_START_ERROR",
    "message": "Traceback\n    await self._job_info_client.put_status(\nRpcError: Timed out",
}


class Logs:
    """The logs of a cluster by the job's id, and how often they were asked for."""

    def __init__(self, **logs: str | None) -> None:
        self.logs = logs
        self.asked: list[str] = []
        self.now = 0.0
        self.ends = LostEnds(self.end, lambda: self.now)

    def end(self, node: str, name: str) -> str | None:
        self.asked.append(name)
        return self.logs.get(name)


def restored(words: str, **fields: object) -> dict:
    return Logs(**{"e.job": f"line\n{MARK}{words}\n"}).ends.restored({**OVERWRITTEN, **fields})


@pytest.mark.parametrize("row", [{}, DIED, UNRECORDED])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("exit code 0", 0),
        ("exit code 3", 3),
        ("exit code 8; processes of it may be left on n, where nothing says that", 8),
        ("exit code 127: there is no program 'x' on node n", 127),
        ("killed by SIGSEGV (exit code 139)", 139),
        ("[exit code] client/0: exit code 7", 7),
        ("[a service ended early] server/0: exit code 0, before the primaries", 1),
        ("[not ready in time] server/0: no answer", 1),
    ],
)
def test_the_last_line_of_the_log_is_the_end(row, words, code):
    found = restored(words, **row)
    status = status_of_row(found)
    assert found["driver_exit_code"] == code
    assert status.state is (JobState.SUCCEEDED if code == 0 else JobState.FAILED)
    if code:
        assert status.reason not in (Reason.NODE_DIED, Reason.UNRECORDED)


@pytest.mark.parametrize(
    "words",
    [
        "cancelled; no process of it is left",
        "cancelled before it started",
        "the package's process on this node was killed, and 3 others with it",
        "the command cannot be run: OSError: no",
    ],
)
def test_what_proves_no_end_of_the_command_changes_nothing(words):
    assert restored(words) == OVERWRITTEN


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "RUNNING", "error_type": None},
        {"status": "SUCCEEDED", "error_type": None, "driver_exit_code": 0},
        {"error_type": "JOB_ENTRYPOINT_COMMAND_ERROR", "driver_exit_code": 1},
        {"error_type": "RUNTIME_ENV_SETUP_FAILURE"},
        {"driver_node_id": None},
        {"error_type": "JOB_ENTRYPOINT_COMMAND_START_ERROR", "message": "OSError: no space"},
    ],
)
def test_of_other_rows_no_log_is_asked_for(fields):
    logs = Logs()
    row = {**OVERWRITTEN, **fields}
    assert logs.ends.restored(row) is row
    assert logs.asked == []


def test_a_line_that_another_submission_or_a_program_wrote_proves_nothing():
    row = {**OVERWRITTEN, "metadata": {"nemo_run_ray": "fedcba98"}}
    assert Logs(**{"e.job": f"{MARK}exit code 0\n"}).ends.restored(row) == row
    row = {**OVERWRITTEN, "metadata": {}}
    assert Logs(**{"e.job": f"{MARK}exit code 0\n"}).ends.restored(row) == row
    text = f"{MARK}exit code 0\n"
    assert Logs(**{"e.job": f"it said {text}"}).ends.restored(OVERWRITTEN) == OVERWRITTEN


def test_a_log_is_asked_for_once():
    logs = Logs(**{"e.job": f"{MARK}exit code 0\n"})
    for _ in range(3):
        assert logs.ends.restored(OVERWRITTEN)["status"] == "SUCCEEDED"
    assert logs.asked == ["e.job"]
    logs.logs["e.job"] = f"{MARK}exit code 1\n"
    later = {**OVERWRITTEN, "end_time": 2}  # the same name in another life of the cluster
    assert logs.ends.restored(later)["driver_exit_code"] == 1


def test_a_log_without_an_end_is_asked_for_ever_more_seldom():
    logs = Logs(**{"e.job": "line\n"})
    for _ in range(3600):
        logs.ends.restored(OVERWRITTEN)
        logs.now += 1
    assert 5 < len(logs.asked) < 15
    logs.logs["e.job"] = f"{MARK}exit code 0\n"
    logs.now += 3600
    assert logs.ends.restored(OVERWRITTEN)["status"] == "SUCCEEDED"


def test_a_node_that_does_not_answer_is_asked_once_for_all_of_its_jobs():
    logs = Logs()
    rows = [{**OVERWRITTEN, "submission_id": f"e.job{number}"} for number in range(5000)]
    for row in rows:
        assert logs.ends.restored(row) is row
    assert len(logs.asked) == 1


def test_a_look_waits_for_one_node_of_many_that_are_cut_off():
    logs = Logs()

    def slow(node: str, name: str) -> None:
        logs.now += 3
        logs.asked.append(name)

    ends = LostEnds(slow, lambda: logs.now)
    rows = [{**OVERWRITTEN, "driver_node_id": f"n{number}"} for number in range(100)]
    for row in rows:
        assert ends.restored(row) is row
    assert len(logs.asked) == 1


def test_a_look_at_many_such_rows_asks_for_few_of_them():
    rows = [{**OVERWRITTEN, "submission_id": f"job{number}"} for number in range(100)]
    logs = Logs(**{row["submission_id"]: f"{MARK}exit code 0\n" for row in rows})
    found = [logs.ends.restored(row)["status"] for row in rows]
    assert found.count("SUCCEEDED") == len(logs.asked) == 20
    for _ in range(5):
        logs.now += 10
        found = [logs.ends.restored(row)["status"] for row in rows]
    assert set(found) == {"SUCCEEDED"}
