"""Submitting jobs, on a simulated Ray that refuses, and loses requests and answers."""

import contextlib
import threading
import time
from collections.abc import Callable

import pytest

import nemo_run_ray
from nemo_run_ray.clusters import interrupted
from nemo_run_ray.dashboard import http
from nemo_run_ray.errors import Conflict, JobRefused, NemoRunRayError, SubmissionError
from nemo_run_ray.experiment import dispatch as submitting
from nemo_run_ray.experiment.store import find_experiment, store_of
from nemo_run_ray.remote.status import JobState, Reason
from tests.fake_ray import FakeRay, Trouble, of_the_agent
from tests.unit.experiment.conftest import Submitted


def on_posts(*troubles: Trouble) -> Callable[[str, str], Trouble | None]:
    """What goes wrong with the first requests for a job."""
    left = iter(troubles)
    return lambda method, path: next(left, None) if (method, path) == POST else None


POST = ("POST", "/api/jobs/")
AWAY = Trouble()


def refused(kind: type[NemoRunRayError], ray: FakeRay, title: str, *tasks: str, **fields) -> str:
    """The error of a submission; nothing was started."""
    with pytest.raises(kind) as caught:
        Submitted(ray, title, *tasks, **fields)
    assert ray.started == []
    return str(caught.value)


@pytest.mark.parametrize("tasks", [("job",), ("job", "next after job")], ids=["job", "chain"])
@pytest.mark.parametrize(
    "troubles",
    [
        [Trouble(is_carried_out=True)],
        [Trouble(502, "bad gateway", is_carried_out=True)],
        [AWAY],
        [Trouble(503, "busy")],
        [Trouble(429, "slow down")],
        [AWAY, Trouble(is_carried_out=True)],
        [Trouble(200, "<html>welcome</html>", is_carried_out=True)],
    ],
    ids=["lost answer", "502 and done", "lost", "503", "429", "lost, then lost answer", "a page"],
)
def test_exactly_one_job_comes_of_a_request(ray, unique, tasks, troubles):
    ray.trouble = on_posts(*troubles)
    if troubles[0].status == 200:  # nobody knows what that was: it is an error, and it is noted
        with pytest.raises(NemoRunRayError, match="not a Ray dashboard"):
            Submitted(ray, unique, *tasks)
    else:
        assert set(Submitted(ray, unique, *tasks).states().values()) <= {"PENDING", "WAITING"}
    assert len(ray.started) == 1


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, "Traceback\nTypeError: metadata must be a dict"),
        (500, of_the_agent("metadata must be a dict")),
    ],
)
def test_a_refusal_of_rays_is_told_and_noted_as_the_jobs_end(ray, unique, status, text):
    ray.trouble = on_posts(*[Trouble(status, text)] * 2)
    message = refused(JobRefused, ray, unique, "job")
    assert "metadata must be a dict" in message
    assert "Nothing was started" in message
    assert ray.posts() == 1
    (job,) = nemo_run_ray.find(unique)
    assert (job.status.state, job.status.reason) == (JobState.FAILED, Reason.REFUSED)
    assert "metadata must be a dict" in job.status.message
    assert "resume" not in job.status.message


@pytest.mark.parametrize(
    ("status", "tasks"), [(429, ("job",)), (425, ("job", "next after job"))], ids=["job", "chain"]
)
def test_every_request_is_made_again_when_an_answer_says_later(ray, unique, tasks, status):
    asked: set[tuple[str, str]] = set()

    def later(method: str, path: str) -> Trouble | None:
        if (method, path) in asked:
            return None
        asked.add((method, path))
        return Trouble(status, "slow down")

    ray.trouble = later
    Submitted(ray, unique, *tasks)
    assert len(ray.started) == 1
    assert {method for method, _ in asked} == {"GET", "PUT", "POST"}


def test_a_submission_that_is_not_taken_says_so_and_ends_by_ctrl_c(ray, unique, monkeypatch):
    """Only the main thread sees the signal; NeMo-Run joins the threads that submit."""
    told: list[str] = []
    monkeypatch.setattr(http, "SAY_S", 0.3)
    monkeypatch.setattr(http.log, "warning", lambda form, text: told.append(text))
    ray.trouble = lambda method, path: Trouble(503, "busy") if (method, path) == POST else None

    def submit() -> None:
        with contextlib.suppress(NemoRunRayError):
            Submitted(ray, unique, "job")

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not told and time.monotonic() < deadline:
            time.sleep(0.05)
        interrupted.set()
        thread.join(2)
        assert not thread.is_alive()
    finally:
        interrupted.clear()
        thread.join()
    (line,) = told
    assert line.startswith(f"Waiting for {ray.url} to take the job {unique}_")
    assert "answered 503 to a new job: busy" in line


def test_when_nobody_can_tell_what_became_of_it(ray, unique, monkeypatch):
    monkeypatch.setattr(submitting, "OUTCOME_S", 1.0)
    asked = []

    def trouble(method: str, path: str) -> Trouble | None:
        asked.append((method, path))
        return AWAY if POST in asked else None

    ray.trouble = trouble
    message = refused(SubmissionError, ray, unique, "job")
    assert "It is not known whether the job" in message
    assert "nemo-run-ray status" in message


def test_an_id_that_another_run_has_is_a_conflict(ray, unique):
    first = Submitted(ray, unique, "job")
    ray.rows[f"{first.id}.job"]["metadata"] = {"nemo_run_ray": "theirs"}
    real = ray.add

    def taken(method: str, path: str) -> Trouble | None:
        if (
            method,
            path,
        ) == POST:  # another user is faster, with the id that is about to be asked for
            intents = store_of(find_experiment(unique)).ledger.jobs()
            for name in intents.keys() - ray.rows.keys():
                real(name, {"nemo_run_ray": "theirs"}, entrypoint="python theirs.py")
        return None

    ray.trouble = taken
    with pytest.raises(Conflict, match="another run") as caught:
        Submitted(ray, unique, "job")
    assert "python theirs.py" in str(caught.value)
    assert len(ray.started) == 1


def test_more_jobs_than_the_client_submits_at_once_get_a_dispatcher(ray, unique):
    submitted = Submitted(ray, unique, *(f"job{number}" for number in range(17)))
    assert ray.started == [submitted.dispatch.id]
    assert set(submitted.states().values()) == {"WAITING"}
