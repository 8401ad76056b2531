"""The patch ``dgxcloud_legacy_kwargs`` on the NeMo-Run that is installed."""

import base64
import json
import zlib

import fiddle as fdl
import nemo_run as run
import pytest
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo_run_ray import patches
from tests.conftest import python
from tests.patches.dgxcloud import fields, make_executor


def _old(**changes) -> dict[str, object]:
    known = fields(**changes)
    return {
        {"client_id": "app_id", "client_secret": "app_secret"}.get(name, name): value
        for name, value in known.items()
    }


def _saved(**changes) -> str:
    """An executor as an older NeMo-Run saved it."""
    raw = base64.urlsafe_b64decode(
        ZlibJSONSerializer().serialize(make_executor(**changes).to_config())
    )
    text = zlib.decompress(raw).decode()
    for new, old in (("client_id", "app_id"), ("client_secret", "app_secret")):
        text = text.replace(new, old)
    return base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def test_the_constructor_understands_them(applied):
    with pytest.warns(DeprecationWarning, match="app_id is now called client_id"):
        executor = DGXCloudExecutor(**_old())
    assert (executor.client_id, executor.client_secret) == ("id", "secret")
    assert executor == make_executor()


def test_new_names_win_and_one_of_each_suffices(applied):
    with pytest.warns(DeprecationWarning, match="is now called"):
        executor = DGXCloudExecutor(**fields(), app_id="old", app_secret="old")
    assert executor == make_executor()
    known = fields()
    del known["client_id"]
    with pytest.warns(DeprecationWarning, match="app_id is now called client_id"):
        executor = DGXCloudExecutor(**known, app_id="old")
    with pytest.warns(DeprecationWarning, match="app_id is now called client_id"):
        assert DGXCloudExecutor(**known, client_id=None, app_id="old") == executor
    assert executor.clone() == executor == make_executor(client_id="old")
    assert "app_id" not in executor.to_config().__arguments__


def test_what_is_missing_is_said_by_its_new_name(applied):
    known = _old()
    del known["app_secret"]
    with (
        pytest.warns(DeprecationWarning, match="is now called"),
        pytest.raises(TypeError, match="'client_secret'"),
    ):
        DGXCloudExecutor(**known)
    with pytest.raises(TypeError, match="app_key"):
        DGXCloudExecutor(**fields(), app_key="x")


def test_a_new_configuration_takes_them(applied):
    config = fdl.Config(DGXCloudExecutor, **_old())
    config.app_id = "other"
    with pytest.warns(DeprecationWarning, match="is now called"):
        assert fdl.build(config).client_id == "other"
    with pytest.warns(DeprecationWarning, match="is now called"):
        assert fdl.build(run.Config(DGXCloudExecutor, **_old())) == make_executor()


def test_undone_the_old_names_are_refused_again():
    patches.apply("dgxcloud_legacy_kwargs")()
    with pytest.raises(TypeError, match="app_id"):
        DGXCloudExecutor(**_old())
    with pytest.raises(TypeError, match="app_id"):
        fdl.Config(DGXCloudExecutor, **_old())
    assert fdl.build(fdl.Config(DGXCloudExecutor, **fields())) == make_executor()


_POLLS = """
import sys
import nemo_run_ray
from nemo_run.run.torchx_backend.schedulers import dgxcloud
for _ in range(5):
    (row,) = dgxcloud._get_job_dirs().values()
    assert row["executor"].nodes == 3, row
"""


def test_polls_of_an_older_experiments_jobs_print_nothing(tmp_path, monkeypatch):
    """The registry that every look at a job reads, in a process with the patch."""
    (tmp_path / ".dgx_jobs.json").write_text(
        json.dumps({"e___r___j": {"job_status": "Running", "executor": _saved(nodes=3)}})
    )
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    unpatched = python("-c", _POLLS)
    assert unpatched.returncode != 0
    monkeypatch.setenv(patches.VARIABLE, "dgxcloud_legacy_kwargs")
    done = python("-W", "always::DeprecationWarning:__main__", "-c", _POLLS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "app_id" not in done.stderr
