import gc
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from nemo_run.core.packaging.base import Packager
from nemo_run.core.packaging.git import GitArchivePackager
from ray._private.runtime_env.packaging import unzip_package

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import ArchiveTooLarge, PackagingFailed
from nemo_run_ray.experiment import archives
from nemo_run_ray.experiment.archives import Archive, code_archive, job_archive, secrets_archive
from nemo_run_ray.experiment.submit import Batch
from nemo_run_ray.plan.job import JobPlan
from nemo_run_ray.remote.node.rundir import JOBS, KEY, MANIFEST, SECRETS, RunDir
from nemo_run_ray.remote.spec import JobSpec, from_json


@dataclass(kw_only=True)
class MemberPackager(Packager):
    """Delivers a tar archive of given members: (name, contents, mode), or links with a kind."""

    members: list = field(default_factory=list)
    mtime: int = 0

    def package(self, path: Path, job_dir: str, name: str) -> str:
        delivered = os.path.join(job_dir, f"{name}.tar.gz")
        with tarfile.open(delivered, "w:gz") as tar:
            for name, contents, mode in self.members:
                info = tarfile.TarInfo(name)
                info.mtime = self.mtime
                if isinstance(contents, bytes):
                    info.size, info.mode = len(contents), mode
                    tar.addfile(info, io.BytesIO(contents))
                else:
                    info.type, info.linkname, info.mode = mode, contents, 0o755
                    tar.addfile(info)
        return delivered


_SYMLINK, _HARDLINK = tarfile.SYMTYPE, tarfile.LNKTYPE
_TREE = [
    ("./a.py", b"print(1)", 0o644),
    ("bin/tool", b"#!/bin/sh\n", 0o755),
    ("bin/latest", "tool", _SYMLINK),
]


@pytest.fixture
def pack(tmp_path) -> Callable[..., Archive]:
    numbers = iter(range(100))
    return lambda *members, **fields: code_archive(
        MemberPackager(members=list(members), **fields), tmp_path, f"code{next(numbers)}"
    )


def _unzip(archive: Archive) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive.pack())) as found:
        assert found.testzip() is None
        return {name: found.read(name) for name in found.namelist()}


def _manifest(archive: Archive) -> dict:
    return json.loads(_unzip(archive)[MANIFEST])


def test_what_travels(pack, hostile):
    name = hostile.replace("\\", "")
    found = _unzip(pack(*_TREE, (f"deep/{name}", b"x", 0o644), ("empty", b"", 0o644)))
    del found[MANIFEST]
    assert found == {
        "a.py": b"print(1)",
        "bin/tool": b"#!/bin/sh\n",
        f"deep/{name}": b"x",
        "empty": b"",
    }


def test_the_same_tree_has_the_same_digest_and_bytes(pack):
    one, two = pack(*_TREE, mtime=1), pack(*reversed(_TREE), mtime=2_000_000_000)
    assert one.uri == two.uri
    assert one.pack() == two.pack()


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "back\\slash", "1:x/y", "caf\udce9", MANIFEST]
)
def test_what_escapes_or_is_not_unpacked_by_ray_is_refused(pack, name):
    with pytest.raises(PackagingFailed, match="Nothing was sent") as caught:
        pack((name, b"x", 0o644))
    assert repr(name)[1:-1] in str(caught.value)


def test_a_python_whose_tarfile_knows_no_filter(pack, monkeypatch):
    digest = pack(*_TREE).digest
    monkeypatch.delattr(tarfile, "tar_filter")
    plain = tarfile.TarFile.extractall
    monkeypatch.setattr(
        tarfile.TarFile, "extractall", lambda self, path, members: plain(self, path, members)
    )
    assert pack(*_TREE).digest == digest


def test_every_file_arrives(pack, tmp_path):
    members = [("deep/a:b", b"x", 0o755), ("other", b"", 0o644), ("deep/link", "a:b", _SYMLINK)]
    (tmp_path / "sent.zip").write_bytes(pack(*members).pack())
    unpacked, run_dir = str(tmp_path / "unpacked"), RunDir("exp.job", str(tmp_path / "base"))
    unzip_package(str(tmp_path / "sent.zip"), unpacked, False, False)
    run_dir.create(str(tmp_path / "jobs"), "job", unpacked)
    code = Path(run_dir.code)
    arrived = {path.relative_to(code).as_posix() for path in code.rglob("*") if not path.is_dir()}
    assert arrived == {"deep/a:b", "other", "deep/link"}
    assert (code / "deep/link").read_bytes() == b"x"
    assert os.access(code / "deep/a:b", os.X_OK)


@pytest.mark.parametrize("members", [[], [("folder", "", tarfile.DIRTYPE)], [_TREE[2]]])
def test_an_archive_without_a_file_is_refused(pack, members):
    with pytest.raises(PackagingFailed, match=r"MemberPackager, cannot be sent.*packed no file"):
        pack(*members)


@pytest.mark.parametrize(
    "links",
    [
        {"out": "/etc/hostname"},
        {"deep/out": "../../x"},
        {"in": ".", "out": "in/../x"},
        {"a": "b", "b": "c", "c": ".."},
    ],
)
def test_a_link_that_leads_out_is_refused(pack, links):
    with pytest.raises(PackagingFailed, match=r"lead out of what it packed.*Nothing was sent"):
        pack(*_TREE[:2], *((name, target, _SYMLINK) for name, target in links.items()))


def test_too_large_names_limit_size_and_the_ten_largest(pack, monkeypatch):
    monkeypatch.setattr(archives, "UPLOAD_MAX_BYTES", 1024**2)
    members = [(f"file{number:02}", os.urandom(200_000 + number), 0o644) for number in range(12)]
    with pytest.raises(ArchiveTooLarge) as caught:
        pack(*members).pack()
    message = str(caught.value)
    assert "1 MiB" in message
    assert "2.3 MiB" in message
    assert "MemberPackager" in message
    assert [line.split()[-1] for line in message.splitlines()[1:]] == [
        f"file{number:02}" for number in range(11, 1, -1)
    ]


@dataclass(kw_only=True)
class BadPackager(Packager):
    """Fails in one of the ways that packagers fail."""

    how: str

    def package(self, path: Path, job_dir: str, name: str) -> str:
        if self.how == "raises":
            raise OSError("disk full")
        if self.how == "program":
            raise subprocess.CalledProcessError(3, ["pack", "it"], stderr=b"begins\nno space.\n\n")
        if self.how == "empty file":
            Path(job_dir, name).write_text("no tar")
            return str(Path(job_dir, name))
        return {"none": None, "nothing": "", "missing": "/no/such/file", "folder": job_dir}[
            self.how
        ]


@pytest.mark.parametrize(
    "how", ["raises", "program", "none", "nothing", "missing", "folder", "empty file"]
)
def test_a_packager_that_fails(tmp_path, how):
    with pytest.raises(PackagingFailed, match="BadPackager") as caught:
        code_archive(BadPackager(how=how), tmp_path, "code")
    assert "Nothing was sent" in str(caught.value)
    if how == "raises":
        assert "disk full" in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)
    if how == "program":
        assert "begins no space. Nothing" in str(caught.value)
    assert ".." not in str(caught.value)


def test_packagers_of_one_repr_are_packed_apart(tmp_path):
    class Later(MemberPackager):
        extra = b"1"

        def package(self, path: Path, job_dir: str, name: str) -> str:
            self.members = [("a.py", self.extra, 0o644)]
            return super().package(path, job_dir, name)

    batch = SimpleNamespace(_code={}, exp_dir=tmp_path)
    one, two = Later(), Later()
    two.extra = b"2"
    assert repr(one) == repr(two)
    assert Batch._code_archive(batch, one).uri != Batch._code_archive(batch, two).uri


def _code_of(packager: Packager, folder: Path) -> Archive:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # invoke leaves its pipes open
        archive = code_archive(packager, folder, "code")
        gc.collect()
    return archive


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small project. The packagers read the standard input, which pytest forbids."""
    folder = tmp_path / "tree"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "a b.py").write_text("x")
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o755)
    (folder / "latest").symlink_to("tool")
    (folder / "data é").write_text("data")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return folder


@pytest.fixture
def repository(tree, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "x")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "x@example.org")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=tree, check=True)
    return tree


def test_git_archive_packager(repository, tmp_path, monkeypatch):
    (repository / "uncommitted").touch()
    monkeypatch.chdir(repository / "pkg")
    found = _code_of(GitArchivePackager(), tmp_path)
    assert set(_unzip(found)) == {MANIFEST, "pkg/a b.py", "tool", "data é"}
    assert _manifest(found) == {"executables": ["tool"], "symlinks": {"latest": "tool"}}


def test_git_archive_packager_without_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for packager in (GitArchivePackager(), GitArchivePackager(basepath=str(tmp_path))):
        with pytest.raises(PackagingFailed, match="GitArchivePackager, cannot be sent") as caught:
            _code_of(packager, tmp_path)
        assert f"{tmp_path} is in no git repository that can be read: fatal: " in str(caught.value)
        assert "CalledProcessError" not in str(caught.value)


@pytest.fixture
def job_dir(tmp_path):
    folder = tmp_path / "job dir"
    for name in ("configs/job_fn_or_script", "configs/job_packager", "scripts/job.sh"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    for name in ("configs/job_executor.yaml", "configs/job_config.yaml"):
        (folder / name).write_text("TOKEN: in clear")
    return folder


def test_the_job_archive(job_dir, tmp_path):
    main = tmp_path / "main"
    main.write_text("x = 1")
    executor = RayExecutor()
    executor.job_dir = str(job_dir)
    plans = [JobPlan("job", "exp.job", JobSpec(("true",)), executor, {}, {}, {}, {}, ())]
    found = _unzip(job_archive(plans, main))
    assert found[f"{JOBS}/job/configs/job_fn_or_script"] == b"configs/job_fn_or_script"
    assert found[f"{JOBS}/job/scripts/job.sh"] == b"scripts/job.sh"
    assert found[f"{JOBS}/__main__.py"] == b"x = 1"
    assert not [name for name in found if name.endswith(".yaml")]
    assert not [data for data in found.values() if b"TOKEN: in clear" in data]
    assert from_json(found[f"{JOBS}/job/spec.json"].decode()).argv == ("true",)
    assert all(name.startswith(f"{JOBS}/") for name in found)
    main.write_text("")
    assert f"{JOBS}/__main__.py" not in _unzip(job_archive(plans, main))


def test_secrets_are_private(monkeypatch, hostile):
    monkeypatch.setenv("TOKEN", hostile)
    monkeypatch.setenv("EMPTY", "")
    archive = secrets_archive(["TOKEN", "EMPTY"], "nonce", {})
    with zipfile.ZipFile(io.BytesIO(archive.pack())) as file:
        (entry,) = file.infolist()
        assert entry.filename == SECRETS
        assert stat.S_IMODE(entry.external_attr >> 16) == 0o600
        assert json.loads(file.read(entry)) == {"TOKEN": hostile, "EMPTY": ""}
    archive = secrets_archive([], "nonce", {}, key="key")
    with zipfile.ZipFile(io.BytesIO(archive.pack())) as file:
        assert {stat.S_IMODE(entry.external_attr >> 16) for entry in file.infolist()} == {0o600}
        assert file.read(KEY) == b"key"
