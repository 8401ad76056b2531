"""A folder or a zip as the code of a task."""

import json
import os
import tarfile
import zipfile
from pathlib import Path

import nemo_run as run
import pytest
from nemo_run.config import Config
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer
from torchx.specs import AppDef, Role

from nemo_run_ray import FolderPackager, LocalCluster, RayExecutor
from nemo_run_ray.errors import ConfigError, PackagingFailed
from nemo_run_ray.experiment.archives import code_archive
from nemo_run_ray.plan.job import plan
from tests.conftest import refused

APP = AppDef("job", [Role("job", image="", entrypoint="true")])


def filled(folder: Path) -> Path:
    for name in ("main.py", "p/__init__.py", "data/big.bin", "__pycache__/x.pyc", ".git/config"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / ".gitignore").write_text("data/\n")
    (folder / "link.py").symlink_to("main.py")
    os.mkfifo(folder / "pipe")
    return folder


def names(packager: FolderPackager, folder: Path) -> set[str]:
    with tarfile.open(packager.package(Path.cwd(), str(folder), "code")) as tar:
        return {one.name for one in tar}


@pytest.fixture
def out(tmp_path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_a_folder_without_what_is_ignored(weird_tmp_path, out):
    packager = FolderPackager(str(filled(weird_tmp_path)), exclude=["p"])
    assert names(packager, out) == {"main.py", "run.sh", ".gitignore", "link.py"}


def test_executables_and_links_reach_the_archive(tmp_path, out):
    packager = FolderPackager(str(filled(tmp_path / "in")))
    archive = code_archive(packager, out, "code")
    (entry,) = [one for one in archive.entries if "manifest" in one.name]
    with entry.open() as file:
        manifest = json.load(file)
    assert manifest["executables"] == ["run.sh"]
    assert manifest["symlinks"] == {"link.py": "main.py"}


def test_equal_contents_give_equal_bytes(tmp_path, out):
    packed = []
    for number in range(2):
        folder = filled(tmp_path / str(number))
        os.utime(folder / "main.py", (number, number))
        packed.append(Path(FolderPackager(str(folder)).package(Path.cwd(), str(out), f"c{number}")))
    assert packed[0].read_bytes() == packed[1].read_bytes()


def test_a_zip(tmp_path, out):
    path = tmp_path / "code.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("p/main.py", "x")
        executable = zipfile.ZipInfo("run.sh")
        executable.external_attr = 0o100755 << 16
        archive.writestr(executable, "x")
        archive.writestr("secret.txt", "x")
    packager = FolderPackager(str(path), exclude=["secret.*"])
    assert names(packager, out) == {"p/main.py", "run.sh"}
    with tarfile.open(out / "code.tar.gz") as tar:
        assert {one.name: one.mode for one in tar} == {"p/main.py": 0o644, "run.sh": 0o755}


def test_a_zip_that_reaches_out_of_its_folder_is_refused(tmp_path, out):
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("../up.py", "x")
    with pytest.raises(PackagingFailed, match="leads out of what it packed"):
        code_archive(FolderPackager(str(tmp_path / "bad.zip")), out, "code")
    with pytest.raises(PackagingFailed, match=r"zip .*bad\.zip, cannot .*it packed no file"):
        code_archive(FolderPackager(str(tmp_path / "bad.zip"), exclude=["../up.py"]), out, "other")


def test_an_empty_folder_is_named_with_its_variable(tmp_path, out, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.setenv("NEMO_RUN_CODE_DIR", str(tmp_path / "in"))
    (packager,) = planned(address="http://h:1").packagers.values()
    with pytest.raises(PackagingFailed, match=r"/in, named by NEMO_RUN_CODE_DIR, .* no file"):
        code_archive(packager, out, "code")


@pytest.mark.parametrize(
    "fields", [{"path": ""}, {"path": 3}, {"path": "a", "exclude": "b"}, {"path": "a", "size": 1}]
)
def test_bad_fields(fields):
    with pytest.raises(ConfigError, match="FolderPackager"):
        FolderPackager(**fields)


def test_it_survives_saving_and_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packager = FolderPackager("in", exclude=["a*"])
    executor = RayExecutor(address="http://h:1", packager=packager)
    saved = ZlibJSONSerializer().serialize(executor.to_config())
    monkeypatch.chdir("/")
    found = run.config.fdl.build(ZlibJSONSerializer().deserialize(saved)).packager
    assert found == packager
    assert found.path == str(tmp_path / "in")
    assert isinstance(executor.clone().packager, FolderPackager)
    assert run.config.fdl.build(Config(FolderPackager, path="/x")).path == "/x"


def test_what_is_not_there_is_refused_before_anything_is_sent(ray, unique, tmp_path):
    for name, words in (("nowhere", "does not exist"), ("text", "is no zip")):
        (tmp_path / "text").write_text("no zip")
        executor = RayExecutor(address=ray.url, packager=FolderPackager(str(tmp_path / name)))
        message = refused(ConfigError, executor, f"{unique}-{name}")
        assert f"FolderPackager cannot send the folder {tmp_path / name}: it {words}" in message
    assert ray.requests == []


@pytest.fixture
def code_dir(tmp_path, monkeypatch) -> Path:
    folder = filled(tmp_path / "in")
    monkeypatch.setenv("NEMO_RUN_CODE_DIR", str(folder))
    return folder


def planned(**fields):
    return plan(APP, RayExecutor(**fields), "exp.job", "job")


def test_the_variable_is_for_tasks_without_a_packager_on_other_machines(code_dir, monkeypatch):
    found = planned(address="http://h:1")
    assert found.spec.has_code
    assert [one.path for one in found.packagers.values()] == [str(code_dir)]
    own = run.PatternPackager(include_pattern="*", relative_path=".")
    assert planned(address="http://h:1", packager=own).packagers == {"job": own}
    here = planned(cluster=LocalCluster())
    assert (here.packagers, here.spec.has_code) == ({}, False)
    monkeypatch.setenv("NEMO_RUN_CODE_DIR", "")
    assert planned(address="http://h:1").packagers == {}


def test_a_groups_own_packager_comes_before_the_variable(code_dir):
    roles = [RayExecutor(address="http://h:1", role=name) for name in ("a", "b")]
    merged = RayExecutor.merge(roles, 2)
    app = AppDef("job", [Role(f"job-{n}", image="", entrypoint="true") for n in range(2)])
    found = plan(app, merged, "exp.job", "job").packagers
    assert [one.path for one in found.values()] == [str(code_dir)] * 2
    merged.packager = run.GitArchivePackager()
    made = plan(app, merged, "exp.job", "job")
    assert list(made.packagers.values()) == [merged.packager] * 2
    assert all(role.task.has_code for role in made.spec.roles)


def test_the_dry_run_says_what_is_sent(code_dir, unique):
    with run.Experiment(unique) as experiment:
        experiment.add(
            run.Script(inline="true"), executor=RayExecutor(address="http://h:1"), name="job"
        )
        experiment.dryrun(log=False)
    (info,) = [str(job._dryrun_info) for job in experiment.jobs]
    assert f"code, the folder {code_dir}, named by NEMO_RUN_CODE_DIR" in info
