"""DGX Cloud's data mover with a job's folder that is too large for one command line."""

import random
from pathlib import Path

import pytest
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor

from nemo_run_ray import patches
from nemo_run_ray.patches.data_mover_configs import MOVED
from tests.patches.test_data_mover_configs import HOSTILE

pytestmark = pytest.mark.skipif(
    not hasattr(DGXCloudExecutor, "MAX_ARGS_CHARS"),
    reason="this NeMo-Run sends the whole folder in one command line",
)


@pytest.fixture
def large(tmp_path) -> Path:
    folder = tmp_path / "job"
    (folder / "configs").mkdir(parents=True)
    (folder / "configs/job_config.yaml").write_text("unread")
    (folder / "configs/job_fn_or_script").write_text("read")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("run.sh")
    (folder / "noise.bin").write_bytes(random.Random(7).randbytes(60_000))
    return folder


def _move(runai, folder: Path, target: str = "/shared/runs/job") -> DGXCloudExecutor:
    executor = runai.make()
    executor.job_name = "job"
    executor.job_dir, executor.pvc_job_dir = str(folder), target
    token = executor.get_auth_token()
    assert token
    executor.move_data(token, *executor.get_project_and_cluster_id(token), sleep=0.1)
    return executor


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def applied() -> None:
    patches.apply("data_mover_configs")


def test_it_arrives_in_pieces_whatever_its_files_are_called(applied, runai, cluster, large):
    for name in HOSTILE:
        (large / name).mkdir()
        (large / name / f"{name}.txt").write_text(name)
    executor = _move(runai, large)
    arrived = cluster.shared / "runs/job"
    sent = _contents(large)
    del sent["configs/job_config.yaml"]
    assert _contents(arrived) == {**sent, MOVED: b""}
    assert (arrived / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (arrived / "link").is_symlink()
    command = executor.copy_directory_data_command(executor.job_dir, executor.pvc_job_dir)
    assert len(runai.movers()) == len(command) // executor.MAX_ARGS_CHARS + 2  # and unpacking


def test_a_folder_on_the_cluster_with_quotes(applied, runai, cluster, large):
    _move(runai, large, '/shared/runs/it\'s "mine" $HOME')
    arrived = cluster.shared / 'runs/it\'s "mine" $HOME'
    assert (arrived / "noise.bin").read_bytes() == (large / "noise.bin").read_bytes()
    assert not list(arrived.glob("archive*"))


def test_every_workload_may_run_twice(applied, runai, cluster, large, monkeypatch):
    run_one = DGXCloudExecutor._run_workspace_and_wait

    def twice(self, *args, **kwargs):
        run_one(self, *args, **kwargs)
        run_one(self, *args, **kwargs)

    monkeypatch.setattr(DGXCloudExecutor, "_run_workspace_and_wait", twice)
    _move(runai, large)
    arrived = cluster.shared / "runs/job"
    assert (arrived / "noise.bin").read_bytes() == (large / "noise.bin").read_bytes()
    assert not list(arrived.glob("archive*"))


def test_a_piece_that_got_lost_is_an_error(applied, runai, cluster, large, monkeypatch):
    run_one = DGXCloudExecutor._run_workspace_and_wait

    def losing(self, *args, **kwargs):
        run_one(self, *args, **kwargs)
        (cluster.shared / "runs/job/archive.b64.00001").unlink(missing_ok=True)

    monkeypatch.setattr(DGXCloudExecutor, "_run_workspace_and_wait", losing)
    with pytest.raises(RuntimeError, match="FAILED"):
        _move(runai, large)
