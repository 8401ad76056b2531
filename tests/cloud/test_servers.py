"""The test servers refuse what the platforms refuse, and run what they get as it is."""

import json
import random

import nemo_run as run
import pytest
import requests
from nemo_run.core.execution import dgxcloud

from nemo_run_ray.cloud import ShipSource
from tests.cloud.pods import expand, expanded
from tests.cloud.runs import launch
from tests.conftest import wait_for
from tests.patches.dgxcloud import SECRET


@pytest.fixture
def headers(runai) -> dict[str, str]:
    asked = {"grantType": "client_credentials", "clientId": "id", "clientSecret": "secret"}
    answer = requests.post(f"{runai.server.url}/token", json=asked, timeout=10)
    return {"Authorization": f"Bearer {answer.json()['accessToken']}"}


def _create(runai, headers, kind="trainings", top=None, **spec) -> requests.Response:
    known = {"command": "true", "image": "i", "storage": {"pvc": [{"path": "/shared"}]}}
    body = {"name": "n", "projectId": "1", "clusterId": "c-1", "spec": {**known, **spec}}
    return requests.post(
        f"{runai.server.url}/workloads/{kind}",
        json={**body, **(top or {})},
        headers=headers,
        timeout=10,
    )


def _variables(count: int, size: int) -> list[dict[str, str]]:
    return [{"name": f"N{number}", "value": "x" * size} for number in range(count)]


def test_runai_takes_what_is_within_its_limits(runai, headers):
    assert _create(runai, headers, environmentVariables=_variables(1, 10_000)).status_code == 200
    assert _create(runai, headers, environmentVariables=_variables(150, 10_000)).status_code == 200


@pytest.mark.parametrize(
    ("changes", "status", "word"),
    [
        ({"environmentVariables": _variables(1, 10_001)}, 400, "10000 characters"),
        ({"args": "x" * 10_001}, 400, "spec.args"),
        ({"environmentVariables": _variables(160, 10_000)}, 413, "too large"),
        (
            {"kind": "distributed", "environmentVariables": _variables(80, 10_000)},
            413,
            "too large",
        ),
        ({"kind": "inference"}, 404, "no endpoint"),
        ({"imagePull": "x"}, 400, "imagePull"),
        ({"top": {"priority": 1}}, 400, "priority"),
        ({"environmentVariables": [{"name": "A B", "value": ""}]}, 400, "A B"),
        ({"environmentVariables": [{"name": "A", "value": "", "secret": 1}]}, 400, "secret"),
        ({"numWorkers": 2}, 400, "numWorkers"),
    ],
)
def test_runai_refuses_the_rest(runai, headers, changes, status, word):
    answer = _create(runai, headers, **changes)
    assert answer.status_code == status
    assert word in answer.json()["message"]
    assert runai.cluster.submitted == []


def test_nobody_gets_in_without_a_token(runai, lepton_ai):
    assert _create(runai, {}).status_code == 401
    assert requests.get(f"{lepton_ai.server.url}/jobs/x", timeout=10).status_code == 401


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"spec": {"unknown": 1}}, 400),
        ({"metadata": {"id": "Not_valid"}}, 400),
        ({"status": {}}, 400),
        ({"spec": {"envs": _variables(16, 100_000)}}, 413),
    ],
)
def test_lepton_refuses_the_rest(lepton_ai, changes, status):
    body = {"metadata": {"id": "job"}, "spec": {"container": {"command": ["true"]}}, **changes}
    answer = requests.post(
        f"{lepton_ai.server.url}/jobs",
        json=body,
        headers={"Authorization": f"Bearer {lepton_ai.server.token}"},
        timeout=10,
    )
    assert answer.status_code == status, answer.text
    assert lepton_ai.cluster.submitted == []


def test_a_pod_has_exactly_the_environment_that_was_submitted(runai, headers):
    sent = [
        {"name": "A", "value": "1 $$(A) '\""},
        {"name": "B", "value": "$(A)$(NOBODY)$$"},
    ]
    program = "import os, json; print(json.dumps(dict(os.environ)))"
    _create(runai, headers, command="python -c", args=f"'{program}'", environmentVariables=sent)
    (job,) = runai.cluster.submitted
    wait_for(lambda: job.codes() == [0])
    seen = json.loads(job.pods[0].log())
    image = runai.cluster.image.environment()
    assert seen.pop("A") == "1 $(A) '\""
    assert seen.pop("B") == "1 $(A) '\"$(NOBODY)$"
    assert seen.pop("LC_CTYPE", "") in ("", "C.UTF-8")  # Python's own doing
    assert seen == {**image, "HOSTNAME": job.pods[0].name, "LEPTON_JOB_WORKER_INDEX": "0"}


def test_expansion_is_kubernetes():
    assert expand("$(A) $$(A) $A $(", {"A": "x"}) == "x $(A) $A $("
    assert expanded([("A", "1"), ("B", "$(A)"), ("C", "$(D)"), ("D", "")])["C"] == "$(D)"


def test_the_kernels_limit_on_one_argument_is_real(lepton_ai, unique, tmp_path, monkeypatch):
    """What users of NeMo-Run alone see when their code is too large for a command line."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "noise.txt").write_text(random.Random(1).randbytes(150_000).hex())
    packager = run.PatternPackager(
        include_pattern=str(tmp_path / "code"), relative_path=str(tmp_path)
    )
    with pytest.raises(RuntimeError, match="failed with status"):
        run.run(
            run.Script(inline="true"),
            executor=lepton_ai.make(packager=packager),
            name=unique,
            tail_logs=False,
        )
    assert "Argument list too long" in lepton_ai.movers()[0].log()


def test_wrong_credentials_on_dgx_cloud(runai, project, unique, caplog, monkeypatch):
    """The platform's reason, once; NeMo-Run alone asks three times and logs it each time."""
    # Whether NeMo-Run's loggers pass records on depends on whether an experiment ran before.
    monkeypatch.setattr(dgxcloud.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(dgxcloud.logger, "propagate", False)
    with pytest.raises(RuntimeError, match="auth token"):
        launch(
            runai,
            run.Script(inline="true"),
            project,
            unique,
            ship=ShipSource(project.root),
            **{SECRET: "wrong"},
        )
    assert caplog.text.count("credentials are invalid or were revoked") == 1
    assert [path for _, path, _ in runai.server.requests] == [f"{runai.server.prefix}/token"]
    assert runai.cluster.submitted == []
