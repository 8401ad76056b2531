import base64
import json
import os
import sys
import zlib

import fiddle as fdl
import nemo_run as run
import pytest
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo_run_ray.remote.node.command import explain, modules_of


def _task(path: str) -> str:
    return path


def _serialize(task: fdl.Buildable) -> str:
    return ZlibJSONSerializer().serialize(task)


def test_modules_of_a_task():
    task = run.Partial(json.dumps, obj=run.Config(_task, path="x"))
    found = modules_of(_serialize(task))
    assert {"nemo_run", "json", __name__.partition(".")[0]} <= found
    assert "__main__" not in found
    assert "builtins" not in found


@pytest.fixture
def config(tmp_path):
    """Writes a task as NeMo-Run does; its function lies in module ``gone_module``."""
    serialized = _serialize(run.Partial(_task, path="x"))
    text = zlib.decompress(base64.urlsafe_b64decode(serialized)).decode()
    text = text.replace(f'"{__name__}"', '"gone_module.part"')
    path = tmp_path / "task é"
    path.write_bytes(base64.urlsafe_b64encode(zlib.compress(text.encode())))
    return path


def with_python(folder, command: str) -> dict[str, str]:
    """An environment in which ``python`` is this command."""
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    wrapper.chmod(0o755)
    return {"PATH": f"{wrapper.parent}:{os.defpath}"}


def test_the_missing_module_is_named(config, tmp_path):
    hint = explain(str(tmp_path), config.name, with_python(tmp_path, sys.executable), str(tmp_path))
    assert "'gone_module'" in hint
    assert "packager" in hint
    assert "'nemo_run'" not in hint


def test_the_imports_of_the_users_main_are_looked_for(config, tmp_path):
    """Its functions are found by running it again, which ends at the first missing import."""
    tree = {"module": "__main__", "name": "own"}
    config.write_bytes(base64.urlsafe_b64encode(zlib.compress(json.dumps(tree).encode())))
    main = "'Text.'\nimport json, __main__, sibling.part\nfrom other import x\nfrom . import y\n"
    later = "sys.path.insert(0, 'libs')\nz = 1\nimport mylib\n"
    (tmp_path / "__main__.py").write_text(main + later)
    hint = explain(str(tmp_path), config.name, with_python(tmp_path, sys.executable), "/")
    assert hint.startswith("the task needs 'other', 'sibling', which python on node")


def test_a_main_that_this_python_cannot_read_hides_nothing(config, tmp_path):
    task = {"a": {"module": "__main__"}, "b": {"module": "gone_module"}}
    config.write_bytes(base64.urlsafe_b64encode(zlib.compress(json.dumps(task).encode())))
    (tmp_path / "__main__.py").write_text("type of tomorrow = 1\n")
    hint = explain(str(tmp_path), config.name, with_python(tmp_path, sys.executable), "/")
    assert hint.startswith("the task needs 'gone_module', which")


def test_only_nemo_run_is_missing(tmp_path):
    path = tmp_path / "task"
    path.write_text(_serialize(run.Partial(json.dumps, obj=1)))
    bare = with_python(tmp_path, f"{sys.executable} -S -I")  # without site-packages
    hint = explain(str(tmp_path), path.name, bare, str(tmp_path))
    assert "'nemo_run'" in hint
    assert "pip" in hint


def test_an_interpreter_that_does_not_start_explains_nothing(config, tmp_path):
    assert (
        explain(str(tmp_path), config.name, with_python(tmp_path, "/no/python"), str(tmp_path))
        is None
    )
