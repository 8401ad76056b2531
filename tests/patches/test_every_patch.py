"""What every patch of a cloud executor promises, on the NeMo-Run that is installed."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fiddle._src import signatures
from nemo_run.core.execution import dgxcloud
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor, DGXCloudRequest
from nemo_run.core.execution.lepton import LeptonExecutor

from nemo_run_ray import patches
from nemo_run_ray.errors import UnsupportedNemoRun
from nemo_run_ray.patches import Patch
from tests import warm
from tests.conftest import tool
from tests.patches.dgxcloud import ID, make_executor

#: What each of them replaces.
TARGETS: dict[str, list[tuple[Any, str]]] = {
    "data_mover_configs": [
        (LeptonExecutor, "copy_directory_data_command"),
        (DGXCloudExecutor, "copy_directory_data_command"),
        *([(DGXCloudExecutor, "move_data")] if hasattr(DGXCloudExecutor, "MAX_ARGS_CHARS") else []),
    ],
    "dgxcloud_exports": [(DGXCloudRequest, "materialize"), (dgxcloud.logger, "filter")],
    "dgxcloud_legacy_kwargs": [(DGXCloudExecutor, "__init__"), (signatures, "_signature_cache")],
    "dgxcloud_refusal": [(dgxcloud, "requests"), (DGXCloudExecutor, "get_auth_token")],
}
OWNERS = (LeptonExecutor, DGXCloudExecutor, DGXCloudRequest, dgxcloud, dgxcloud.logger, signatures)


@pytest.fixture(params=sorted(name for name in TARGETS if patches.patch(name).is_needed()))
def patch(request) -> Iterator[Patch]:
    one = patches.patch(request.param)
    assert one.status() == "off"
    yield one
    assert one.undo()


def _held() -> list[dict[str, object]]:
    return [dict(vars(owner)) for owner in OWNERS]


def _changed(before: list[dict[str, object]]) -> set[tuple[str, str]]:
    return {
        (str(owner), name)
        for owner, was in zip(OWNERS, before, strict=True)
        for name in was.keys() | vars(owner).keys()
        if name not in was or was[name] is not vars(owner).get(name)
    }


def test_those_named_here_are_those_there_are():
    # Three are not of a cloud executor: test_job_group.py, test_skills_patch.py, test_slurm_ray.py.
    others = {"job_group", "skills_executor", "slurm_ray"}
    assert set(TARGETS) | others == set(patches.MODULES)


def test_apply_changes_its_targets_and_returns_its_undo(patch):
    before = _held()
    undo = patch.apply()
    assert _changed(before) == {(str(owner), name) for owner, name in TARGETS[patch.name]}
    assert patch.status() == "applied"
    assert undo() is True
    assert _changed(before) == set()
    assert patch.status() == "off"


def _wrapped(function: Any) -> Any:
    """Somebody's wrapper of it, as Nemotron's."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def test_somebodys_wrapper_below_is_no_unknown_structure(patch, monkeypatch):
    for owner, name in TARGETS[patch.name]:
        if isinstance(owner, type):
            monkeypatch.setattr(owner, name, _wrapped(vars(owner)[name]))
    before = _held()
    patch.apply()
    assert patch.status() == "applied"
    assert vars(make_executor())[ID] == "id"
    assert patch.undo()
    assert _changed(before) == set()


def test_a_target_that_is_gone_is_refused_by_name(patch):
    owner, name = TARGETS[patch.name][0]
    kept = vars(owner)[name]
    delattr(owner, name)
    try:
        with pytest.raises(UnsupportedNemoRun, match=owner.__name__):
            patch.apply()
        assert name not in vars(owner)
        assert patch.status() == "off"
    finally:
        setattr(owner, name, kept)


_STATES = "import json, nemo_run_ray.patches as p; print(json.dumps(p.status()))"


def _states(tmp_path: Path, value: str | None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NEMORUN_HOME": str(tmp_path)}
    environment.pop(patches.VARIABLE, None)
    if value is not None:
        environment[patches.VARIABLE] = value
    return warm.python("-c", f"import nemo_run_ray; {_STATES}", env=environment, cwd=str(tmp_path))


@pytest.mark.parametrize(
    ("value", "applied"),
    [
        (None, set()),
        ("", set()),
        (" dgxcloud_exports , data_mover_configs,", {"dgxcloud_exports", "data_mover_configs"}),
        ("all", {*TARGETS, "slurm_ray"}),
        ("all,dgxcloud_exports", {*TARGETS, "slurm_ray"}),
    ],
)
def test_the_variable_names_what_importing_applies(tmp_path, value, applied):
    done = _states(tmp_path, value)
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout)
    assert states.pop("job_group") == "applied"
    for name, state in states.items():
        expected = "applied" if name in applied else "off"
        assert state in (expected, "not needed"), (name, state)


def test_a_name_that_is_unknown_is_refused_with_those_there_are(tmp_path):
    """One paragraph, and the line of the program."""
    done = _states(tmp_path, "dgxcloud_export")
    assert done.returncode != 0
    for word in (patches.VARIABLE, "'dgxcloud_export'", *TARGETS, "'all'"):
        assert word in done.stderr.splitlines()[-2]


def test_the_command_shows_them(tmp_path):
    environment = {
        **os.environ,
        "NEMORUN_HOME": str(tmp_path),
        patches.VARIABLE: "dgxcloud_exports",
    }
    shown = tool("nemo-run-ray", "patches", "--json", env=environment)
    assert shown.returncode == 0, shown.stderr
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    assert set(rows) == set(patches.MODULES)
    assert rows["dgxcloud_exports"]["state"] == "applied"
    assert rows["dgxcloud_exports"]["verified"] == ["0.9", "0.12"]
    assert all(row["why"] and row["retired_by"] for row in rows.values())
    text = tool("nemo-run-ray", "patches", env=environment).stdout
    states = {line.split()[0]: line.split()[1] for line in text.splitlines()}
    assert (states["dgxcloud_exports"], states["data_mover_configs"]) == ("applied", "off")
