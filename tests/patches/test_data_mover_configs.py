"""The patch ``data_mover_configs`` on the NeMo-Run that is installed."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor
from nemo_run.core.execution.lepton import LeptonExecutor

from tests.patches.dgxcloud import make_executor

HOSTILE = ["plain", "with space", "it's", 'say "hi"', "a$HOME`id`", "back\\slash", "line\nbreak",
           "-dash", "\u00e4\u00f6\u6587", "semi;colon&more", "*?[x]", "$(touch oops)"]  # fmt: skip


@pytest.fixture(params=["lepton", "dgxcloud"])
def executor(request):
    one = (
        LeptonExecutor(container_image="i", nemo_run_dir="/shared")
        if request.param == "lepton"
        else make_executor()
    )
    one.job_name = "job"
    return one


@pytest.fixture
def folder(tmp_path) -> Path:
    """A job's folder as NeMo-Run leaves it, and files whose names only look alike."""
    job = tmp_path / "job"
    for name in (
        "configs/job_executor.yaml",
        "configs/job_config.yaml",
        "configs/job_fn_or_script",
        "configs/job_packager",
        "configs/other_config.yaml",
        "configs/job_executor.yaml.bak",
        "code/configs/job_config.yaml",
        "code/job_executor.yaml",
        "launch_script.sh",
        ".hidden",
    ):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_text(name)
    (job / "empty").mkdir()
    (job / "code" / "run.sh").write_text("#!/bin/sh\n")
    (job / "code" / "run.sh").chmod(0o755)
    (job / "code" / "link").symlink_to("run.sh")
    return job


def argv(executor, source: Path | str, target: Path | str) -> list[str]:
    """What the pod runs: DGX Cloud splits a command line, in which the script is quoted."""
    made = executor.copy_directory_data_command(str(source), str(target))
    if isinstance(executor, DGXCloudExecutor):
        return [*shlex.split("sh -c"), *shlex.split(f"'{made}'")]
    return made


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_what_no_process_reads_stays_behind_and_the_rest_arrives(
    applied, executor, folder, tmp_path
):
    subprocess.run(argv(executor, folder, tmp_path / "to"), check=True)
    assert _names(folder) - _names(tmp_path / "to") == {
        "configs/job_executor.yaml",
        "configs/job_config.yaml",
    }
    assert _names(tmp_path / "to") <= _names(folder)
    assert (tmp_path / "to/configs/job_fn_or_script").read_text() == "configs/job_fn_or_script"
    assert os.access(tmp_path / "to/code/run.sh", os.X_OK)
    assert os.readlink(tmp_path / "to/code/link") == "run.sh"
    assert (tmp_path / "to/empty").is_dir()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_paths_survive(applied, executor, folder, tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = folder.rename(tmp_path / f"{name} source")
    target = tmp_path / "below" / name / "to"
    subprocess.run(argv(executor, source, target), check=True)
    assert (target / "launch_script.sh").read_text() == "launch_script.sh"
    assert not (tmp_path / "oops").exists()


def test_the_same_files_give_the_same_command(applied, executor, folder, tmp_path):
    first = argv(executor, folder, "/to")
    for path in folder.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    assert argv(executor, folder, "/to") == first
    (folder / "launch_script.sh").write_text("other")
    assert argv(executor, folder, "/to") != first


@pytest.mark.parametrize("name", ["a file", "nothing"])
def test_what_cannot_be_read_is_refused_before_anything_is_sent(applied, executor, tmp_path, name):
    (tmp_path / "a file").write_text("x")
    with pytest.raises(OSError, match=name):
        executor.copy_directory_data_command(str(tmp_path / name), "/to")
