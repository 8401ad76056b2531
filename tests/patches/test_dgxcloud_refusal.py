"""The patch ``dgxcloud_refusal`` on the NeMo-Run that is installed, with a real HTTP server."""

import json
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import requests
from nemo_run.core.execution import dgxcloud
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor

from nemo_run_ray import patches
from tests.http_server import Handler, serving
from tests.patches.dgxcloud import make_executor

REASON = "the client's credentials were revoked"
TOKEN = json.dumps({"accessToken": "t"})


class Platform:
    """A token endpoint that gives the answers it is told, the last one for ever."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[tuple[int, str]] = []
        self.asked: list[dict] = []

    def answer(self, *answers: tuple[int, str]) -> DGXCloudExecutor:
        self.answers = list(answers)
        return make_executor(base_url=self.url)


class _Handler(Handler):
    platform: Platform

    def answer(self) -> None:
        self.platform.asked.append(json.loads(self.body()))
        answers = self.platform.answers
        self.send(*(answers.pop(0) if len(answers) > 1 else answers[0]))


@pytest.fixture
def platform() -> Iterator[Platform]:
    one = Platform()
    with serving(_Handler, platform=one) as url:
        one.url = f"{url}/api/v1"
        yield one


@pytest.fixture(autouse=True)
def slept(monkeypatch) -> list[float]:
    """The pauses that NeMo-Run wanted."""
    found: list[float] = []
    monkeypatch.setattr(dgxcloud, "time", SimpleNamespace(sleep=found.append))
    return found


@pytest.fixture
def logged(monkeypatch, caplog) -> Callable[[], list[str]]:
    # Whether NeMo-Run's loggers pass records on depends on whether an experiment ran before.
    monkeypatch.setattr(dgxcloud.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(dgxcloud.logger, "propagate", False)
    return lambda: [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_refusal_is_final_and_its_reason_logged_once(applied, platform, slept, logged, status):
    executor = platform.answer((status, json.dumps({"message": REASON})))
    assert executor.get_auth_token() is None
    assert len(platform.asked) == 1
    assert slept == []
    (line,) = logged()
    for word in (REASON, str(status), f"{platform.url}/token"):
        assert word in line


@pytest.mark.parametrize("status", [200, 404, 429, 500, 503])
def test_other_answers_are_repeated_as_without_the_patch(platform, slept, logged, caplog, status):
    seen = []
    for names in ((), ("dgxcloud_refusal",)):
        undo = patches.apply(*names) if names else lambda: True
        try:
            executor = platform.answer((status, "later"))
            assert executor.get_auth_token() is None
        finally:
            assert undo()
        seen.append((len(platform.asked), list(slept), logged()))
        platform.asked.clear()
        slept.clear()
        caplog.clear()
    assert seen[0] == seen[1]
    assert seen[0][0] == 3


def test_other_requests_of_the_executor_see_refusals_as_before(applied, platform):
    platform.answer((403, "no"))
    assert dgxcloud.requests.post(f"{platform.url}/workloads", json={}).status_code == 403
    assert dgxcloud.requests.get is requests.get


def test_a_stand_in_for_post_works_as_before(applied, platform, monkeypatch):
    """As tests of NeMo-Run and of its users replace it."""
    answer = SimpleNamespace(text=TOKEN, status_code=200)
    for target in ("requests.post", "nemo_run.core.execution.dgxcloud.requests.post"):
        with monkeypatch.context() as other:
            other.setattr(target, lambda *args, **kwargs: answer)
            assert make_executor().get_auth_token() == "t"
    assert platform.answer((401, REASON)).get_auth_token() is None
    assert len(platform.asked) == 1
