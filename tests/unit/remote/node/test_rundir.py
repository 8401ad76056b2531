import json
import os
from pathlib import Path

import pytest

from nemo_run_ray.remote.node.rundir import (
    JOB_CONFIG,
    KEY,
    MANIFEST,
    SECRETS,
    RunDir,
    take_key,
    take_secrets,
)


@pytest.fixture
def jobs(tmp_path, hostile):
    """The job archive's folder: one job with a config and a script, and the user's main."""
    folder = tmp_path / "jobs"
    for kind in ("configs", "scripts"):
        (folder / "job" / kind).mkdir(parents=True)
    (folder / "job" / "configs" / hostile).write_text("config")
    (folder / "job" / "scripts" / "job.sh").write_bytes(b"cd /nemo_run/code\r\n# \xff kept\n")
    (folder / "__main__.py").write_text("main = 1")
    return folder


@pytest.fixture
def code(tmp_path, hostile):
    """Ray's working directory: unpacked without executable bits and symlinks."""
    folder = tmp_path / "working_dir"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "tool").write_text("#!/bin/sh\n")
    (folder / "bin" / "tool").chmod(0o644)
    (folder / hostile).write_text("data")
    links = {"latest": "bin/tool", "new/é": "../bin", "dangling": "nowhere"}
    manifest = {"executables": ["bin/tool"], "symlinks": links}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def run_dir(tmp_path, jobs, code):
    found = RunDir("exp.job", str(tmp_path / "base"))
    found.create(str(jobs), "job", str(code))
    return found


def test_somebody_elses_base_is_refused(tmp_path, jobs):
    base = tmp_path / "base"
    base.mkdir()
    if os.getuid() == 0:
        os.chown(base, 12345, -1)
    else:
        base = Path("/usr")
    with pytest.raises(PermissionError, match="belongs to user"):
        RunDir("exp.job", str(base)).create(str(jobs), "job", None)


def test_code_keeps_executables_and_links(run_dir, hostile):
    code = Path(run_dir.code)
    assert os.access(code / "bin" / "tool", os.X_OK)
    assert (code / hostile).read_text() == "data"
    assert os.readlink(code / "latest") == "bin/tool"
    assert os.readlink(code / "new" / "é") == "../bin"
    assert os.readlink(code / "dangling") == "nowhere"
    assert not (code / MANIFEST).exists()


def test_configs_scripts_and_main(run_dir, hostile):
    assert Path(run_dir.mount, "configs", hostile).read_text() == "config"
    script = Path(run_dir.mount, "scripts", "job.sh")
    assert script.read_bytes() == b"cd %s\r\n# \xff kept\n" % os.fsencode(run_dir.code)
    assert os.access(script, os.X_OK)
    assert Path(run_dir.root, "__main__.py").read_text() == "main = 1"


def test_removal_leaves_other_jobs_alone(jobs, run_dir):
    other = RunDir("exp.other", run_dir.base)
    other.create(str(jobs), "job", None)
    run_dir.remove()
    assert os.listdir(run_dir.base) == ["exp.other"]


@pytest.mark.parametrize(
    ("word", "mapped"),
    [
        ("/nemo_run", "{}"),
        ("/nemo_run/code/x y.py", "{}/code/x y.py"),
        ("--config=/nemo_run/configs/a", "--config={}/configs/a"),
        ("/nemo_run/a:/nemo_run/b", "{}/a:{}/b"),
        ("'/nemo_run/a'", "'{}/a'"),
        ("cd /nemo_run; ls", "cd {}; ls"),
        ("/nemo_run\n/nemo_run", "{}\n{}"),
    ],
)
def test_the_mount_is_mapped(tmp_path, word, mapped):
    run_dir = RunDir("exp.job", str(tmp_path / r"back\1slash"))
    assert run_dir.map(word) == mapped.replace("{}", run_dir.mount)


@pytest.mark.parametrize(
    "word",
    [
        "nemo_run",
        "/nemo_runner",
        "/nemo_run_2/x",
        "/home/me/nemo_run/x",
        "./nemo_run/x",
        "$HOME/nemo_run/x",
        "http://host/nemo_run/x",
        "*/nemo_run/x",
    ],
)
def test_other_paths_stay(tmp_path, word):
    assert RunDir("exp.job", str(tmp_path)).map(word) == word


def test_secrets_are_read_once(tmp_path, monkeypatch, hostile):
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / SECRETS).write_text(json.dumps({"A": hostile, "B": ""}))
    monkeypatch.setenv("PYTHONPATH", f":/nowhere:{folder}")
    assert take_secrets(("A", "B")) == {"A": hostile, "B": ""}
    assert not (folder / SECRETS).exists()
    with pytest.raises(FileNotFoundError, match="A, B"):
        take_secrets(("A", "B"))


def test_the_key_is_gone_before_the_command_starts(tmp_path, monkeypatch):
    """From the node, and from what workers of a command that is a Ray program would unpack."""
    folder = tmp_path / "_ray_pkg_1"
    folder.mkdir()
    (folder / KEY).write_text("key")
    modules = ["gcs://_ray_pkg_0.zip", "gcs://_ray_pkg_1.zip"]
    monkeypatch.setenv("PYTHONPATH", f":/nowhere:{folder}")
    monkeypatch.setenv(JOB_CONFIG, json.dumps({"runtime_env": {"py_modules": modules}}))
    assert take_key() == "key"
    assert list(folder.iterdir()) == []
    assert json.loads(os.environ[JOB_CONFIG]) == {"runtime_env": {"py_modules": modules[:1]}}
    assert take_key() == "", "a driver that is started again proves nothing"
