"""The patch ``dgxcloud_exports`` on the NeMo-Run that is installed."""

import json
import logging
from json import dumps
from types import SimpleNamespace

from nemo_run.core.execution import dgxcloud
from nemo_run.core.execution.dgxcloud import DGXCloudRequest

from nemo_run_ray import patches
from tests.conftest import patched
from tests.patches.dgxcloud import make_executor

SOURCE = {f"_NEMO_RUN_RAY_SRC_{number}": "x{`$" for number in range(3)} | {"_NEMOTRON_SRC_0": "y"}
OTHERS = {
    "EPOCHS": "3",
    "NEMO_RUN_RAY_SRC_0": "another prefix",
    "lower": "case",
    "SRC": "_NEMOTRON_SRC_",
}


def _request(**changes) -> DGXCloudRequest:
    variables = {**OTHERS, **SOURCE}
    known = {
        "launch_cmd": ["python", "train.py"],
        "jobs": ["job"],
        "executor": make_executor(env_vars=dict(variables)),
        "max_retries": 0,
        "extra_env": {**variables, "EXTRA": "1"},
    }
    return DGXCloudRequest(**{**known, **changes})


def _exports(script: str) -> set[str]:
    return {
        line.split()[1].partition("=")[0]
        for line in script.splitlines()
        if line.startswith("export ")
    }


def test_source_stays_out_of_the_script_and_in_the_environment(applied):
    request = _request()
    script = request.materialize()
    assert _exports(script) & {*SOURCE} == set()
    assert {"EPOCHS", "NEMO_RUN_RAY_SRC_0", "LOWER", "SRC", "EXTRA"} <= _exports(script)
    assert request.executor.env_vars == {**OTHERS, **SOURCE}
    assert request.extra_env == {**OTHERS, **SOURCE, "EXTRA": "1"}


def test_without_source_the_script_is_the_same_to_the_letter():
    def script() -> str:
        return _request(executor=make_executor(env_vars=OTHERS), extra_env=OTHERS).materialize()

    before = script()
    with patched("dgxcloud_exports"):
        assert script() == before


def test_filters_that_others_add_meanwhile_stay(monkeypatch):
    monkeypatch.setattr(dgxcloud.logger, "filters", [])
    undo = patches.apply("dgxcloud_exports")
    dgxcloud.logger.addFilter(other := lambda record: False)
    assert not dgxcloud.logger.filter(logging.makeLogRecord({"msg": "text"}))
    assert undo()
    assert dgxcloud.logger.filters == [other]


def test_what_is_logged_has_no_source_and_all_else(applied, monkeypatch):
    lines = _logged_by_creating(monkeypatch)
    payload = json.loads(next(line for line in lines if line.startswith("{")))
    found = {one["name"]: one["value"] for one in payload["spec"]["environmentVariables"]}
    assert found == {**OTHERS, **dict.fromkeys(SOURCE, "\u2026")}
    assert len(lines) == 2
    assert "x{`$" not in "".join(lines)


def _logged_by_creating(monkeypatch) -> list[str]:
    hostile = dict.fromkeys(SOURCE, 'x{`$ "quoted" \\" \n' * 20)
    executor = make_executor(env_vars={**OTHERS, **hostile})
    sent, lines = [], []

    def post(*_, json, **__):
        sent.append(json)
        text = dumps(json, separators=(",", ":"), sort_keys=True)  # the platform repeats it
        return SimpleNamespace(status_code=202, text=text)

    monkeypatch.setattr("requests.post", post)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(dgxcloud.logger, "handlers", [handler])
    monkeypatch.setattr(dgxcloud.logger, "propagate", False)
    level = dgxcloud.logger.level
    dgxcloud.logger.setLevel(logging.DEBUG)
    try:
        executor.create_training_job("token", "1", "c-1", "name")
    finally:
        dgxcloud.logger.setLevel(level)
    (variables,) = (one["spec"]["environmentVariables"] for one in sent)
    assert {one["name"]: one["value"] for one in variables} == {**OTHERS, **hostile}
    return lines
