"""Packs what a Ray job needs: the code, this package, the specs of its jobs, the secrets.

Archives are named by the digest of their contents, so equal contents are uploaded once. The digest
is taken before anything is compressed: a second submission of the same code costs one question.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import ntpath
import os
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import starmap
from pathlib import Path
from typing import BinaryIO

from nemo_run.core.packaging.base import Packager
from nemo_run.core.packaging.git import GitArchivePackager

from nemo_run_ray import remote
from nemo_run_ray.dashboard.http import UPLOAD_MAX_BYTES
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ArchiveTooLarge, ConfigError, NemoRunRayError, PackagingFailed
from nemo_run_ray.ids import safe_id
from nemo_run_ray.plan.job import REMOTE_PACKAGE, JobPlan
from nemo_run_ray.remote.node.rundir import JOBS, KEY, MANIFEST, SECRETS, SPEC
from nemo_run_ray.remote.spec import JobSpec, to_json

#: Zip knows no earlier day; a fixed one keeps equal contents equal.
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
#: Bytes that are read, hashed and compressed at once: a file need not fit into memory.
_CHUNK_BYTES = 1024**2
#: Ends of the config files that people read and no process does; they may hold variables in clear.
_FOR_PEOPLE = ("_executor.yaml", "_config.yaml")
#: Characters of an error that a message shows.
_REASON_MAX = 400


@dataclass(frozen=True)
class Entry:
    """One file of an archive, with its contents or where they are."""

    name: str
    source: Path | bytes
    mode: int = 0o644

    def open(self) -> BinaryIO:
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")

    @property
    def size_bytes(self) -> int:
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size


@dataclass(frozen=True)
class Archive:
    """An archive to be sent, not yet packed."""

    #: The subject of messages.
    what: str
    entries: Sequence[Entry]
    digest: str
    #: The files and links of a code archive.
    names: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Ray's name for it."""
        return f"_ray_pkg_{self.digest[:32]}.zip"

    @property
    def uri(self) -> str:
        return f"gcs://{self.name}"

    def pack(self) -> bytes:
        """The zip."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for entry in self.entries:
                info = zipfile.ZipInfo(entry.name, _ZIP_EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = (stat.S_IFREG | entry.mode) << 16
                with entry.open() as source, archive.open(info, "w") as target:
                    while buffer.tell() <= UPLOAD_MAX_BYTES and (data := source.read(_CHUNK_BYTES)):
                        target.write(data)
        if buffer.tell() > UPLOAD_MAX_BYTES:
            largest = sorted(self.entries, key=lambda entry: entry.size_bytes, reverse=True)[:10]
            table = "\n".join(
                f"  {one.size_bytes / 1024**2:8.1f} MiB  {one.name}" for one in largest
            )
            total = sum(entry.size_bytes for entry in self.entries) / 1024**2
            raise ArchiveTooLarge(
                f"{self.what} is {total:.1f} MiB and does not fit into the "
                f"{UPLOAD_MAX_BYTES / 1024**2:.0f} MiB that Ray's dashboard takes as a zip. "
                "Nothing was sent. Leave data and weights out of the packager's pattern and put "
                f"them where the nodes can read them. Its largest entries:\n{table}"
            )
        return buffer.getvalue()


def code_archive(packager: Packager, folder: Path, name: str) -> Archive:
    """The user's code, as the packager delivers it."""
    what = f"The code, {described(packager)},"
    root = Path(tempfile.mkdtemp(prefix="nemo_run_ray_code_")).resolve()
    try:
        delivered = _run(packager, folder, name)
        # ignore_zeros: PatternPackager's and GitArchivePackager's archives are several, end to end.
        with tarfile.open(delivered, ignore_zeros=True) as tar:
            tar.extraction_filter = lambda member, _: member  # ``_plain`` has checked it
            tar.extractall(root, _plain(tar, root))
        paths = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*"))}
        links = {name: os.readlink(path) for name, path in paths.items() if path.is_symlink()}
        files = [name for name, path in paths.items() if name not in links and path.is_file()]
        refused = [name for name in links if not paths[name].resolve().is_relative_to(root)]
        if refused:
            raise ValueError(f"links lead out of what it packed: {', '.join(refused[:5])}")
        if MANIFEST in paths:
            raise ValueError(f"the name {MANIFEST} is this package's own; rename that file")
        if not files:
            raise ValueError("it packed no file; its pattern may match nothing")
        manifest = {
            "executables": [name for name in files if paths[name].stat().st_mode & stat.S_IXUSR],
            "symlinks": links,
        }
        entries = [Entry(MANIFEST, json.dumps(manifest, sort_keys=True).encode())]
        entries += [Entry(name, paths[name]) for name in files]
        archive = Archive(what, entries, _digest(entries), frozenset([*files, *links]))
    except BaseException as error:
        shutil.rmtree(root, ignore_errors=True)
        if isinstance(error, NemoRunRayError) or not isinstance(error, Exception):
            raise
        # A packager is the user's code, and may raise anything.
        printed = getattr(error, "stderr", None) or getattr(error, "output", None) or ""
        printed = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error} {printed}".split())[:_REASON_MAX].rstrip(".")
        raise PackagingFailed(
            f"{what} cannot be sent from {Path.cwd()}: {reason}. Nothing was sent. "
            "Correct the packager's fields or the folder that it packs, or take another packager, "
            "such as FolderPackager(…, exclude=[…])."
        ) from error
    weakref.finalize(archive, shutil.rmtree, root, ignore_errors=True)
    return archive


def script_problem(task: JobSpec, code: Archive | None) -> str:
    """Say why the script of a command would not exist on the node; empty if it may exist.

    NeMo-Run puts a script behind its interpreter. A startup command could make it, and only the
    node knows other folders than the task's own.
    """
    interpreter, path = (*task.argv[:2], "", "")[:2]
    known = re.fullmatch(r"(.*/)?(bash|sh|python[\d.]*)", interpreter)
    if not known or task.startup or not path or path.startswith("-") or "$" in path:
        return ""
    if task.cwd:  # of the embedded Ray, where bash looks for a mere name in PATH
        place = os.path.join(task.cwd, path)
        is_there = os.path.exists(place) or path.startswith("/nemo_run/") or shutil.which(path)
        return "" if is_there else f"there is no {place}. Correct the script's path."
    path = os.path.normpath(path.removeprefix("/nemo_run/code/"))
    if path.startswith(("/", "../")):
        return ""
    if code is None:
        return (
            f"no code is sent, so that its script {path!r} would not be on the node. Let the "
            "executor's packager send it, or give an absolute path that the nodes see."
        )
    # A link to a folder may be above it, and Python runs folders.
    if code.names.intersection([path, f"{path}/__main__.py", *map(str, Path(path).parents)]):
        return ""
    return (
        f"its script {path!r} is not among the {len(code.names)} file(s) that are sent. Paths are "
        "relative to the folder that is packed: correct the path, or what the packager includes."
    )


@cache
def package_archive() -> Archive:
    """This package, and the half of it that runs on the cluster under a name of its own.

    It is equal for all jobs, so a node unpacks and compiles it once. ``nemo_run_ray`` itself is
    sent too: functions of the user's ``__main__`` are found by running that file again on the
    node, and it imports this package.
    """
    here = Path(remote.FOLDER).parent
    found = [
        *_folder(here, "nemo_run_ray", lambda path: path.suffix in (".py", ".typed")),
        *_folder(here / "remote", REMOTE_PACKAGE, lambda path: path.suffix == ".py"),
    ]
    # Read once: a package that is installed anew must not go up under the name of the old one.
    entries = [Entry(name, path.read_bytes()) for name, path in found]
    return Archive("nemo_run_ray itself", entries, _digest(entries))


def job_archive(plans: Sequence[JobPlan], main: Path) -> Archive:
    """The specs, configs and scripts of an experiment's jobs."""
    # NeMo-Run leaves an empty file for a notebook; an array would import NeMo-Run only to run it.
    has_script = main.exists() and main.stat().st_size
    entries = [Entry(f"{JOBS}/__main__.py", main)] if has_script else []
    for planned in sorted(plans, key=lambda plan: plan.job):
        prefix = f"{JOBS}/{safe_id(planned.job)}"
        entries.append(Entry(f"{prefix}/{SPEC}", to_json(planned.spec).encode()))
        for kind in ("configs", "scripts"):
            files = _folder(
                Path(planned.executor.job_dir, kind),
                f"{prefix}/{kind}",
                lambda path: not path.name.endswith(_FOR_PEOPLE),
            )
            entries += starmap(Entry, files)
    return Archive("The experiment's configs and scripts", entries, _digest(entries))


def secrets_archive(
    names: Sequence[str], nonce: str, places: Mapping[str, Sequence[str]], key: str = ""
) -> Archive:
    """The values of the secrets, from this process's environment or where a cluster file says."""
    values = {}
    if names:  # most jobs have none, and need no reader of cluster files
        from nemo_run_ray.cluster_files.load import value_of

        values = {name: value_of(places.get(name, (name,))) for name in names}
    for name, value in values.items():
        if value is None:
            raise ConfigError(
                f"RayExecutor.secrets names {name}, which is not set in this environment; set it "
                "(its value is sent to the cluster and written nowhere else) or leave it out."
            )
    entries = [Entry(SECRETS, json.dumps(values).encode(), 0o600)]
    if key:
        entries.append(Entry(KEY, key.encode(), 0o600))
    # It is made from the nonce alone: archive names are public.
    digest = hashlib.sha256(nonce.encode()).hexdigest()
    return Archive("The secrets", entries, digest)


def upload(api: JobsApi, archive: Archive) -> None:
    """Send an archive that Ray does not have; it forgets those unused for some minutes."""
    if not api.has_package(archive.name):
        api.put_package(archive.name, archive.pack())


def described(packager: Packager) -> str:
    """Describe for people what a packager sends."""
    if hasattr(packager, "exclude"):  # a FolderPackager
        return str(packager)
    return f"packed by {type(packager).__name__}"


def _run(packager: Packager, folder: Path, name: str) -> str:
    """The tar archive that a packager delivers."""
    packager = copy.copy(packager)  # GitArchivePackager changes its own fields
    start = str(Path.cwd())
    if isinstance(packager, GitArchivePackager):
        start = packager.basepath or start
        words = ["git", "rev-parse", "--show-toplevel"]
        done = subprocess.run(words, cwd=start, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{start} is in no git repository that can be read: {done.stderr}")
        start = packager.basepath or done.stdout.removesuffix("\n")
    delivered = packager.package(Path(start), str(folder), name)
    if not delivered or not Path(delivered).is_file() or not tarfile.is_tarfile(delivered):
        raise ValueError(f"it returned {delivered!r}, which is no path of a tar archive")
    return str(delivered)


def _plain(tar: tarfile.TarFile, root: Path) -> Iterator[tarfile.TarInfo]:
    """The members with the modes that the node gives them, each checked when it is unpacked."""
    for member in map(copy.copy, tar):
        member.name = member.name.lstrip("/")
        path = Path(os.path.realpath(root / member.name))
        if not path.is_relative_to(os.path.realpath(root)):
            raise ValueError(f"{member.name!r} leads out of what it packed")
        is_executable = member.isdir() or member.mode & stat.S_IXUSR
        member.mode = 0o755 if is_executable else 0o644
        yield member


def _folder(root: Path, prefix: str, wanted: Callable[[Path], bool]) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and wanted(path):
            yield f"{prefix}/{path.relative_to(root).as_posix()}", path


def _digest(entries: Sequence[Entry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        # Ray drops names with a backslash or a drive, silently.
        if re.search("[\\\\\ud800-\udfff]", entry.name) or ntpath.splitdrive(entry.name)[0]:
            raise PackagingFailed(
                f"The file {entry.name!r} cannot be sent: its name has a backslash, begins like a "
                "drive, or is no UTF-8. Nothing was sent. Rename it, or leave it out."
            )
        digest.update(f"{entry.name}\0{entry.mode:o}\0{entry.size_bytes}\0".encode())
        with entry.open() as source:
            while data := source.read(_CHUNK_BYTES):
                digest.update(data)
    return digest.hexdigest()
