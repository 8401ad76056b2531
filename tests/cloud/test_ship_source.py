"""``run.run`` with ``ShipSource`` against the platforms' servers, which run what they get."""

import importlib
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nemo_run as run
import pytest
from nemo_run.core.execution.lepton import LeptonExecutor

from nemo_run_ray import patches
from nemo_run_ray.cloud import ShipSource
from nemo_run_ray.errors import TransportError
from tests.cloud.conftest import Platform
from tests.cloud.runs import found, launch, must_succeed
from tests.conftest import wait_for


@pytest.mark.parametrize(
    "kind", ["script", "script from another folder", "shell", "inline", "module"]
)
def test_every_kind_of_script(platform, project, results, unique, kind, monkeypatch):
    path = "src/shippable/main.py"
    if kind != "script from another folder":
        monkeypatch.chdir(project.root)
    task = {
        "script": run.Script(path, entrypoint="python", args=["x"]),
        "script from another folder": run.Script(
            str(project.root / path), entrypoint="python", args=["x"]
        ),
        "shell": run.Script("src/shippable/run.sh", args=["x"]),
        "inline": run.Script(inline="python -m shippable.main x"),
        "module": run.Script("shippable.main", m=True, entrypoint="python", args=["x"]),
    }[kind]
    launch(platform, task, project, unique)
    must_succeed(platform)
    (seen,) = found(results).values()
    assert seen["digest"] == project.digest()
    assert seen["left"] == []
    assert seen["argv"] == ["x"]
    assert "/src-" in seen["file"]
    assert seen["path"].split(":")[0].endswith("/src")
    assert len(platform.movers()) == 1


@pytest.fixture
def partial(project, monkeypatch):
    """A task of the project's own function."""
    monkeypatch.syspath_prepend(str(project.root / "src"))
    for name in [one for one in sys.modules if one.split(".")[0] == "shippable"]:
        monkeypatch.delitem(sys.modules, name)
    yield run.Partial(importlib.import_module("shippable.main").report, tag="partial")
    for name in [one for one in sys.modules if one.split(".")[0] == "shippable"]:
        del sys.modules[name]


def test_a_partial(platform, project, results, unique, partial):
    launch(platform, partial, project, unique)
    must_succeed(platform)
    (seen,) = found(results).values()
    assert (seen["digest"], seen["tag"]) == (project.digest(), "partial")


@pytest.fixture
def strikes(platform, monkeypatch) -> list[float]:
    """Pauses, in seconds, after each of which a pod of the next job dies and is started again.

    All of them die after the first one, which begins when one of them has begun to unpack.
    """
    pauses: list[float] = []
    start = type(platform.cluster).add
    folder = platform.cluster.shared / "runs/.source"

    def add(self, kind, *rest):
        before = set(folder.glob(".src-*"))
        made = start(self, kind, *rest)
        if pauses and kind in ("distributed", "job"):
            wait_for(lambda: set(folder.glob(".src-*")) - before or None not in made.codes())
            time.sleep(pauses.pop())
            made.kill()
            made.start()
        while pauses and kind in ("distributed", "job"):
            time.sleep(pauses.pop())
            victim = made.pods[len(pauses) % len(made.pods)]
            victim.kill()
            victim.start()
        return made

    monkeypatch.setattr(type(platform.cluster), "add", add)
    return pauses


def _chaos(
    platform: Platform, project, results: Path, strikes: list[float], name: str, seed: int
) -> None:
    """Eight pods on one folder; some die at random moments and are started again."""
    dice = random.Random(seed)
    (project.package / "round.py").write_text(f"SEED = {seed}\n")
    for number in range(400):  # which take a while to unpack
        (project.package / f"data/row{number}.csv").write_text(f"{seed},{number}\n")
    shutil.rmtree(results, ignore_errors=True)
    task = run.Script(inline="python -m shippable.main")
    strikes[:] = [*(dice.uniform(0, 0.15) for _ in range(6)), dice.uniform(0, 0.02)]
    launch(platform, task, project, name, detach=True, nodes=8)
    job = platform.jobs()[-1]
    assert len(job.pods) == 8
    assert strikes == []
    wait_for(lambda: None not in job.codes(), within_s=120)
    assert job.codes() == [0] * 8, f"seed {seed}: {job.log()}"
    seen = found(results)
    assert len(seen) == 8
    assert {one["digest"] for one in seen.values()} == {project.digest()}, f"seed {seed}"
    assert all(one["left"] == [] for one in seen.values())


def test_eight_pods_share_one_folder_and_some_die(platform, project, results, strikes, unique):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    print(f"SEED={seed}")
    for number in range(3):
        _chaos(platform, project, results, strikes, f"{unique}{number}", seed + number)
    trees = list((platform.cluster.shared / "runs/.source").glob("src-*"))
    assert len(trees) == 3


@pytest.mark.soak
def test_twenty_rounds(platform, project, results, strikes, unique):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    print(f"SEED={seed}")
    for number in range(20):
        _chaos(platform, project, results, strikes, f"{unique}{number}", seed + number)
    halves = list((platform.cluster.shared / "runs/.source").glob(".src-*"))
    print(f"{len(halves)} died while they unpacked")
    assert halves, "every pod died before or after it unpacked, which proves nothing about it"


def test_a_second_job_uses_the_tree_of_the_first(platform, project, results, unique):
    task = run.Script(inline="python -m shippable.main")
    launch(platform, task, project, f"{unique}a")
    (tree,) = (platform.cluster.shared / "runs/.source").iterdir()
    marks = {path: path.stat().st_ino for path in tree.rglob("*.py")}
    launch(platform, task, project, f"{unique}b")
    must_succeed(platform)
    assert list((platform.cluster.shared / "runs/.source").iterdir()) == [tree]
    assert {path: path.stat().st_ino for path in tree.rglob("*.py")} == marks


def environment(platform: Platform, project, name: str, **variables: str) -> dict[str, str]:
    """Of a command, when these variables were submitted."""
    (project.package / "show.sh").write_text("env -0 > /shared/environment\n")
    task = run.Script(inline="sh src/shippable/show.sh")
    launch(platform, task, project, name, env_vars=variables)
    must_succeed(platform)
    text = (platform.cluster.shared / "environment").read_text()
    return dict(line.split("=", 1) for line in text.split("\0") if line)


@pytest.mark.parametrize("own", ["/opt/image", None])
def test_a_pythonpath_that_extends_that_of_the_image(platform, project, unique, own):
    if own:
        platform.cluster.image.variables["PYTHONPATH"] = own
    found = environment(platform, project, unique, PYTHONPATH="/mine:${PYTHONPATH}")
    assert found["PYTHONPATH"].split(":")[1:] == ["/mine", own or ""]


def test_a_driver_that_was_shipped_itself_ships(platform, project, results, unique):
    """Its environment says already where its own tree is."""
    task = run.Script(inline="python -m shippable.main")
    launch(platform, task, project, unique, env_vars={"NEMO_RUN_RAY_SRC": "/other"})
    must_succeed(platform)
    (seen,) = found(results).values()
    assert seen["digest"] == project.digest()
    assert seen["left"] == []


@pytest.mark.parametrize(
    "executor", [run.DockerExecutor(container_image="i"), run.SlurmExecutor(account="a")]
)
def test_native_packagers_are_used_and_nothing_else_changes(project, executor, tmp_path):
    executor = executor.clone()
    before = {name: value for name, value in vars(executor).items() if name != "packager"}
    task = run.Script(inline="true")
    ShipSource(project.root).setup(task, executor)
    assert {name: value for name, value in vars(executor).items() if name != "packager"} == before
    assert task == run.Script(inline="true")
    assert patches.status()["data_mover_configs"] == "off"
    (tmp_path / "job").mkdir()
    made = executor.clone().packager.package(tmp_path, str(tmp_path / "job"), "name")
    assert made == str(tmp_path / "job/name.tar.gz")
    subprocess.run(["tar", "-xzf", made, "-C", str(tmp_path / "job")], check=True)
    arrived = tmp_path / "job/src/shippable"
    for path in project.package.rglob("*"):
        if path.is_file():
            assert (arrived / path.relative_to(project.package)).read_bytes() == path.read_bytes()


def test_setting_up_twice_is_setting_up_once(project):
    executor = LeptonExecutor(container_image="i", nemo_run_dir="/shared/runs")
    executor.lepton_job_dir = "/shared/runs/job"
    executor.env_vars = {"PYTHONPATH": "/mine"}
    ship = ShipSource(project.root)
    ship.setup(run.Script(inline="true"), executor)
    once = (dict(executor.env_vars), list(executor.pre_launch_commands))
    ship.setup(run.Script(inline="true"), executor)
    assert (executor.env_vars, executor.pre_launch_commands) == once


@pytest.mark.parametrize("folder", ["/shared/my exp/1/t", "/shared/it's", "nemo"])
def test_a_folder_that_scripts_cannot_name_without_quotes_is_refused(project, folder):
    executor = LeptonExecutor(container_image="i", nemo_run_dir="/shared/runs")
    executor.lepton_job_dir = folder
    with pytest.raises(TransportError, match="expected is an absolute path without blanks"):
        ShipSource(project.root).setup(run.Script(inline="true"), executor)
