"""Rows that Ray has written over, and what the ends of their logs prove."""

from __future__ import annotations

import pytest

from nemo_run_ray.remote import end_record
from nemo_run_ray.remote.end_record import EndRecord, LostEnds, lock_of, proof_of, record_in
from nemo_run_ray.remote.status import JobState, Reason, status_of_row

NONCE = "0123456789abcdef"
KEY = "the runner's"
OVERWRITTEN = {
    "submission_id": "e.job",
    "status": "FAILED",
    "error_type": "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "message": "Unexpected error occurred: failed to get job supervisor.",
    "driver_node_id": "n1",
    "driver_exit_code": None,
    "end_time": 1,
    "metadata": {"nemo_run_ray": NONCE, "nemo_run_ray_lock": lock_of(proof_of(KEY, 0))},
}
DIED = {"error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": "Job supervisor actor died: x"}
UNRECORDED = {
    "error_type": "JOB_ENTRYPOINT_COMMAND_START_ERROR",
    "message": "Traceback\n    await self._job_info_client.put_status(\nRpcError: Timed out",
}


class Logs:
    """The logs of a cluster by the job's id, and how often they were asked for."""

    now = 0.0

    def __init__(self, **logs: str | None) -> None:
        self.logs = logs
        self.asked: list[str] = []
        self.ends = LostEnds(self.end)

    def end(self, node: str, name: str) -> str | None:
        self.asked.append(name)
        return self.logs.get(name)


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    monkeypatch.setattr(Logs, "now", 0.0)
    monkeypatch.setattr(end_record, "monotonic", lambda: Logs.now)


def end(text: str, code: int, cause: str = "EXIT_CODE") -> str:
    """The last line as the runner writes it."""
    return EndRecord(code, cause, text, proof=proof_of(KEY, code)).line(NONCE)


def restored(cause: str, text: str, code: int, **fields: object) -> dict:
    logs = Logs(**{"e.job": f"line\n{end(text, code, cause)}"})
    return logs.ends.restored({**OVERWRITTEN, **fields})


@pytest.mark.parametrize("row", [{}, DIED, UNRECORDED])
@pytest.mark.parametrize(
    ("cause", "text", "code", "reason"),
    [
        ("NONE", "exit code 0", 0, Reason.NONE),
        ("EXIT_CODE", "exit code 127: there is no program 'x' on node n", 127, Reason.EXIT_CODE),
        ("EXIT_CODE", "killed by SIGSEGV (exit code 139)", 139, Reason.SIGNAL),
        ("SERVICE_ENDED", "server/0: exit code 0, early", 1, Reason.SERVICE_ENDED),
    ],
)
def test_a_proven_record_is_the_end(row, cause, text, code, reason):
    found = restored(cause, text, code, **row)
    status = status_of_row(found)
    assert found["driver_exit_code"] == code
    assert status.state is (JobState.SUCCEEDED if code == 0 else JobState.FAILED)
    assert status.reason is reason


def test_a_record_is_read_as_it_was_written():
    record = EndRecord(3, "EXIT_CODE", 'é "{}\n', 1.5, 2.5, ("on n",), proof_of(KEY, 3))
    for one in (record, record._replace(left_on=None)):
        assert record_in(one.line(NONCE).splitlines(), [NONCE]) == one
    assert record_in([record.line("another").rstrip(), "x"], [NONCE]) is None


def test_a_line_that_a_command_writes_proves_nothing():
    """It knows all but the key: nonce, lock, and, after the end, the proof of another code."""
    lock = OVERWRITTEN["metadata"]["nemo_run_ray_lock"]
    shown = proof_of(KEY, 137)
    up, down = shown.split(".")[1:]
    forged = [
        "",
        f"0.{up}.{down}",
        f"0.{lock}.{lock}",
        "0..",
        f"-1.{up}.{down}",
        "0",
        lock,
        "x.y.z",
    ]
    forged += [proof_of("another's", 0), f"256.{up}.{down}", f"137.{down}.{up}"]
    lines = [EndRecord(0, "NONE", "exit code 0", proof=proof).line(NONCE) for proof in forged]
    for line in lines:
        assert Logs(**{"e.job": line}).ends.restored(OVERWRITTEN) == OVERWRITTEN, line
    logs = Logs(**{"e.job": end("exit code 3", 3) + "".join(lines)})
    assert logs.ends.restored(OVERWRITTEN)["driver_exit_code"] == 3


@pytest.mark.parametrize("code", [0, 1, 137, 255])
def test_a_proof_fits_its_own_exit_code_alone(code):
    proof = proof_of(KEY, code)
    assert lock_of(proof) == lock_of(proof_of(KEY, 0))
    shown = proof.partition(".")[2]
    fits = [n for n in range(256) if lock_of(f"{n}.{shown}") == lock_of(proof)]
    assert fits == [code]


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


def test_a_log_is_asked_for_once():
    logs = Logs(**{"e.job": end("exit code 0", 0, "NONE")})
    for _ in range(3):
        assert logs.ends.restored(OVERWRITTEN)["status"] == "SUCCEEDED"
    assert logs.asked == ["e.job"]
    logs.logs["e.job"] = end("exit code 1", 1)
    later = {**OVERWRITTEN, "end_time": 2}  # the same name in another life of the cluster
    assert logs.ends.restored(later)["driver_exit_code"] == 1


def test_a_node_that_does_not_answer_is_asked_once_for_all_of_its_jobs():
    logs = Logs()
    rows = [{**OVERWRITTEN, "submission_id": f"e.job{number}"} for number in range(5000)]
    for row in rows:
        assert logs.ends.restored(row) is row
    assert len(logs.asked) == 1


def test_a_log_that_proves_nothing_hides_no_other_end():
    logs = Logs(**{"e.lost": "line\n", "e.job": end("exit code 0", 0, "NONE")})
    logs.ends.restored({**OVERWRITTEN, "submission_id": "e.lost"})
    assert logs.ends.restored(OVERWRITTEN)["status"] == "SUCCEEDED"


def test_a_log_without_an_end_is_asked_for_again_after_a_while():
    logs = Logs(**{"e.job": "line\n"})
    for _ in range(100):
        logs.ends.restored(OVERWRITTEN)
        Logs.now += 1
    assert len(logs.asked) == 7
    logs.logs["e.job"] = end("exit code 0", 0, "NONE")
    Logs.now += 15
    assert logs.ends.restored(OVERWRITTEN)["status"] == "SUCCEEDED"
