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
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

from nemo_run.core.packaging.base import Packager
from nemo_run.core.packaging.git import GitArchivePackager

from nemo_run_ray import remote
from nemo_run_ray.dashboard.http import UPLOAD_MAX_BYTES
from nemo_run_ray.errors import ArchiveTooLarge, ConfigError, NemoRunRayError, PackagingFailed
from nemo_run_ray.experiment.store import store_of
from nemo_run_ray.plan.job import REMOTE_PACKAGE, JobPlan
from nemo_run_ray.remote.node.rundir import (
    JOBS,
    KEY,
    MANIFEST,
    RENAMED,
    SECRETS,
    SPEC,
    is_behind,
    links_out,
)
from nemo_run_ray.remote.spec import JobSpec

#: Zip knows no earlier day; a fixed one keeps equal contents equal.
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_FILE, _PRIVATE = 0o644, 0o600
#: Bytes that are read, hashed and compressed at once: a file need not fit into memory.
_CHUNK_BYTES = 1024**2
#: Ends of the config files that people read and no process does; they may hold variables in clear.
_FOR_PEOPLE = ("_executor.yaml", "_config.yaml")


@dataclass(frozen=True)
class Archive:
    """An archive to be sent, not yet packed.

    Attributes:
        what: the subject of messages.
        digest: names the contents.
        entries: gives every file, in order; called anew for every pass.
    """

    what: str
    digest: str
    entries: Callable[[], Iterator[Entry]]

    @property
    def name(self) -> str:
        """Ray's name for it."""
        return f"_ray_pkg_{self.digest[:32]}.zip"

    @property
    def uri(self) -> str:
        return f"gcs://{self.name}"

    @cached_property
    def names(self) -> frozenset[str]:
        """The files and links of a code archive."""
        entries = {entry.name: entry for entry in self.entries()}
        manifest = json.loads(_read(entries.pop(MANIFEST)))
        return frozenset([*entries, *manifest["symlinks"], *manifest["renamed"].values()])

    def pack(self) -> bytes:
        """The zip.

        Raises:
            ArchiveTooLarge: it exceeds what Ray takes.
        """
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for entry in self.entries():
                info = zipfile.ZipInfo(entry.name, _ZIP_EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = (stat.S_IFREG | entry.mode) << 16
                with entry.open() as source, archive.open(info, "w") as target:
                    while buffer.tell() <= UPLOAD_MAX_BYTES and (data := source.read(_CHUNK_BYTES)):
                        target.write(data)
                if buffer.tell() > UPLOAD_MAX_BYTES:
                    break
        if buffer.tell() > UPLOAD_MAX_BYTES:
            raise ArchiveTooLarge(_too_large(self.what, list(self.entries())))
        return buffer.getvalue()


@dataclass(frozen=True)
class Entry:
    """One file of an archive."""

    name: str
    mode: int
    size_bytes: int
    open: Callable[[], BinaryIO]


def code_archive(packager: Packager, folder: Path, name: str) -> Archive:
    """The user's code, as the packager delivers it.

    Args:
        packager: any but NeMo-Run's base packager.
        folder: where the packager may write ``<name>.tar.gz``; one that is there is used.
        name: names the packager among the experiment's.

    Raises:
        PackagingFailed: the packager raised or left no file, or a link leads out of what it packed.
    """
    plain = _plain_tar(run_packager(packager, folder, name))
    manifest = _manifest(plain, type(packager).__name__)
    sent_as = {name: f"{RENAMED}/{sent}" for sent, name in manifest["renamed"].items()}

    def entries() -> Iterator[Entry]:
        yield _text(MANIFEST, json.dumps(manifest, sort_keys=True).encode())
        for entry in _tar_files(plain):
            yield replace(entry, name=sent_as.get(entry.name, entry.name))

    return Archive(f"The code, {described(packager)},", _digest(entries()), entries)


def script_problem(task: JobSpec, code: Archive | None) -> str:
    """Say why the script of a command would not exist on the node; empty if it may exist.

    NeMo-Run puts a script behind its interpreter. A startup command could make it, and only the
    node knows other folders than the task's own.

    Args:
        task: what runs.
        code: what is sent for it.
    """
    interpreter, path = (*task.argv[:2], "", "")[:2]
    known = re.fullmatch(r"(.*/)?(bash|sh|python[\d.]*)", interpreter)
    if not known or task.startup or not path or path.startswith("-") or "$" in path:
        return ""
    if task.cwd is not None and not path.startswith("/nemo_run/"):
        there = os.path.join(task.cwd, path)
        if os.path.exists(there) or (os.sep not in path and shutil.which(path)):
            return ""
        return f"there is no {there}. Correct the script's path."
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


def packager_key(packager: Packager) -> str:
    """A key that is equal for packagers that deliver the same."""
    values = repr(sorted(vars(packager).items(), key=lambda item: item[0]))
    kind = f"{type(packager).__module__}.{type(packager).__qualname__}"
    return hashlib.sha256(f"{kind} {values}".encode()).hexdigest()[:12]


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
    kept = [_text(entry.name, _read(entry), entry.mode) for entry in found]
    return Archive("nemo_run_ray itself", _digest(iter(kept)), lambda: iter(kept))


def job_archive(plans: Sequence[JobPlan], job_dirs: Mapping[str, Path], main: Path) -> Archive:
    """The specs, configs and scripts of an experiment's jobs.

    Args:
        plans: the experiment's jobs on this cluster.
        job_dirs: NeMo-Run's folder of each job, by the job's name.
        main: NeMo-Run's copy of the user's ``__main__``; may be absent.
    """

    def entries() -> Iterator[Entry]:
        if main.exists():
            yield _file(main, f"{JOBS}/__main__.py")
        for planned in sorted(plans, key=lambda plan: plan.job):
            name = planned.spec_name
            yield _text(f"{JOBS}/{name}/{SPEC}", planned.spec.to_json().encode())
            for kind in ("configs", "scripts"):
                folder = job_dirs[planned.job] / kind
                yield from _folder(folder, f"{JOBS}/{name}/{kind}", _is_needed)

    return Archive("The experiment's configs and scripts", _digest(entries()), entries)


def secrets_archive(
    names: Sequence[str],
    nonce: str,
    places: Mapping[str, Sequence[str]] = MappingProxyType({}),
    key: str = "",
) -> Archive:
    """The values of the secrets, from this process's environment or where a cluster file says.

    Args:
        names: variables to read.
        nonce: makes the archive this submission's own, since its reader removes it.
        places: where values come from instead of the variables of their names.
        key: proves the end of the job.

    Raises:
        ConfigError: a variable is not set.
    """
    values = {}
    if names:  # most jobs have none, and need no reader of cluster files
        from nemo_run_ray.cluster_files.load import value_of

        values = {name: value_of(name, places.get(name, (name,))) for name in names}
    for name, value in values.items():
        if value is None:
            raise ConfigError(
                f"RayExecutor.secrets names {name}, which is not set in this environment; set it "
                "(its value is sent to the cluster and written nowhere else) or leave it out."
            )
    text = json.dumps(values).encode()

    def entries() -> Iterator[Entry]:
        yield _text(SECRETS, text, _PRIVATE)
        if key:
            yield _text(KEY, key.encode(), _PRIVATE)

    digest = hashlib.sha256(nonce.encode()).hexdigest()  # holds no value, since names are public
    return Archive("The secrets", digest, entries)


def single_file(what: str, name: str, data: bytes, digest: str) -> Archive:
    """An archive of one file.

    Args:
        what: the subject of messages.
        name: of the file.
        data: its contents.
        digest: names the contents.
    """
    return Archive(what, digest, lambda: iter([_text(name, data)]))


def _plain_tar(path: Path) -> BinaryIO:
    """The archive without its compression, in a file that vanishes when it is closed.

    Members are read in the order of their names, and going back in a compressed file means to
    decompress it from its start: 92 s instead of 1 s for 2,000 files.
    """
    plain = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 lives as long as the archive
    with tarfile.open(path, "r:*", ignore_zeros=True) as tar:
        if tar.fileobj is None:
            raise PackagingFailed(f"The packager's archive {path} cannot be read.")
        tar.fileobj.seek(0)
        shutil.copyfileobj(cast(BinaryIO, tar.fileobj), plain)
    return cast(BinaryIO, plain)


def _open_tar(plain: BinaryIO) -> tarfile.TarFile:
    # ignore_zeros: PatternPackager's and GitArchivePackager's archives are several, end to end.
    plain.seek(0)
    return tarfile.open(fileobj=plain, mode="r:", ignore_zeros=True)


def _tar_files(plain: BinaryIO) -> Iterator[Entry]:
    with _open_tar(plain) as tar:
        for member in sorted(_last_of_name(tar).values(), key=lambda info: info.name):
            if member.isfile() or member.islnk():
                opener = partial(_contents, tar, member)
                yield Entry(_relative(member.name), _FILE, member.size, opener)


def _manifest(plain: BinaryIO, packager: str) -> dict[str, Any]:
    """List what Ray's unpacking loses and a node restores; see ``MANIFEST``."""
    with _open_tar(plain) as tar:
        members = _last_of_name(tar)
    files = sorted(name for name, member in members.items() if member.isfile() or member.islnk())
    links = {name: member.linkname for name, member in members.items() if member.issym()}
    if not files:
        raise PackagingFailed(
            f"The packager {packager} packed no file. Nothing was sent. Correct its pattern, which "
            "may match nothing, or the folder that it packs."
        )
    refused = [*links_out(links), *(name for name in files if is_behind(name, links))]
    if refused:
        raise PackagingFailed(
            f"What the packager {packager} packed has links that lead out of it, or files behind "
            f"links: {', '.join(map(repr, refused[:5]))}. Nothing was sent. Leave them out, as by "
            "FolderPackager(…, exclude=[…]); a task may use absolute paths of its node."
        )
    return {
        "executables": [name for name in files if members[name].mode & stat.S_IXUSR],
        "symlinks": links,
        "renamed": {str(n): name for n, name in enumerate(filter(_needs_another_name, files))},
    }


def _needs_another_name(name: str) -> bool:
    return _ray_skips(name) or name.split("/")[0] in (MANIFEST, RENAMED)


def _ray_skips(name: str) -> bool:
    """Whether Ray leaves out a file of this name, without an error, when it unpacks an archive."""
    return "\\" in name or bool(ntpath.splitdrive(name)[0])


def _last_of_name(tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    """The members as unpacking would leave them: of several with one name the last counts."""
    return {_relative(member.name): member for member in tar}


def _relative(name: str) -> str:
    clean = os.path.normpath(name)
    if clean == ".." or clean.startswith(("/", "../")):
        raise PackagingFailed(
            f"The packager's archive holds {name!r}, which lies outside of it. Nothing was sent. "
            "Set the packager's relative path to a folder above all that it includes."
        )
    return clean


def _contents(tar: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    file = tar.extractfile(member)
    if file is None:
        raise PackagingFailed(
            f"The packager's archive does not hold the contents of {member.name!r}."
        )
    return cast(BinaryIO, file)


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise PackagingFailed(
            f"The name of the file {name!r} is not UTF-8, which a zip needs. Nothing was sent. "
            "Rename it or leave it out of the packager's pattern."
        ) from error
    if _ray_skips(name):
        raise PackagingFailed(
            f"Ray does not unpack the file {name!r}, since its name has a backslash. Nothing was "
            "sent. Rename it, or the task that it is named after."
        )


def _folder(root: Path, prefix: str, wanted: Callable[[Path], bool]) -> Iterator[Entry]:
    for path in sorted(root.rglob("*")) if root.is_dir() else ():
        if path.is_file() and "__pycache__" not in path.parts and wanted(path):
            yield _file(path, f"{prefix}/{path.relative_to(root).as_posix()}")


def _file(path: Path, name: str) -> Entry:
    return Entry(name, _FILE, path.stat().st_size, lambda: path.open("rb"))


def _text(name: str, data: bytes, mode: int = _FILE) -> Entry:
    return Entry(name, mode, len(data), lambda: io.BytesIO(data))


def _is_needed(path: Path) -> bool:
    return not path.name.endswith(_FOR_PEOPLE)


def _digest(entries: Iterator[Entry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        _check_name(entry.name)
        head = f"{entry.name}\0{entry.mode:o}\0{entry.size_bytes}\0"
        digest.update(head.encode())
        with entry.open() as source:
            while data := source.read(_CHUNK_BYTES):
                digest.update(data)
    return digest.hexdigest()


def _too_large(what: str, entries: list[Entry]) -> str:
    largest = sorted(entries, key=lambda entry: entry.size_bytes, reverse=True)[:10]
    table = "\n".join(f"  {entry.size_bytes / 1024**2:8.1f} MiB  {entry.name}" for entry in largest)
    total = sum(entry.size_bytes for entry in entries) / 1024**2
    return (
        f"{what} is {total:.1f} MiB and does not fit into the {UPLOAD_MAX_BYTES / 1024**2:.0f} MiB "
        "that Ray's dashboard takes as a zip. Nothing was sent. Leave data and weights out of the "
        f"packager's pattern and put them where the nodes can read them. Its largest "
        f"entries:\n{table}"
    )


def _read(entry: Entry) -> bytes:
    with entry.open() as file:
        return file.read()


class ArchiveCache:
    """The archives of one experiment, each packed once.

    Args:
        exp_dir: NeMo-Run's folder of it.
    """

    def __init__(self, exp_dir: Path) -> None:
        self._exp_dir = exp_dir
        self._code: dict[str, Archive] = {}
        self._jobs: tuple[tuple[str, ...], Archive] | None = None

    def code(self, packager: Packager) -> Archive:
        """The code that a packager delivers; see ``code_archive`` for what it raises."""
        key = packager_key(packager)
        if key not in self._code:
            with store_of(self._exp_dir).packing:  # another cluster's batch writes the same file
                self._code[key] = code_archive(packager, self._exp_dir, f"ray_code_{key}")
        return self._code[key]

    def jobs(self, plans: Sequence[JobPlan], folders: Mapping[str, Path]) -> Archive:
        """The specs, configs and scripts of jobs; packed again when there are others.

        Args:
            plans: the jobs.
            folders: where the files of each are, by the job's name.
        """
        names = tuple(sorted(planned.job for planned in plans))
        if self._jobs is None or self._jobs[0] != names:
            self._jobs = names, job_archive(plans, folders, self._exp_dir / "__main__.py")
        return self._jobs[1]


#: Characters of an error that a message shows.
_REASON_MAX = 400


def run_packager(packager: Packager, folder: Path, name: str) -> Path:
    """The archive that a packager delivers.

    Args:
        packager: any but NeMo-Run's base packager.
        folder: where it may write ``<name>.tar.gz``.
        name: names it among the experiment's.

    Raises:
        PackagingFailed: it raised, or left no archive.
        ConfigError, TransportError: a FolderPackager cannot pack what it names.
    """
    kind = type(packager).__name__
    packager = copy.copy(packager)  # GitArchivePackager changes its own fields
    try:
        start = _git_root(packager) if isinstance(packager, GitArchivePackager) else Path.cwd()
        delivered = packager.package(start, str(folder), name)
    except NemoRunRayError:  # it says what is wrong
        raise
    except Exception as error:  # a packager is the user's code, and may raise anything
        raise PackagingFailed(
            f"The packager {kind} failed in {Path.cwd()}: {_reason(error)}. Nothing was sent. "
            "Correct the packager's fields or the folder it packs."
        ) from error
    if not delivered or not Path(delivered).is_file() or not tarfile.is_tarfile(delivered):
        raise PackagingFailed(
            f"The packager {kind} returned {delivered!r}; expected the path of a tar archive. "
            "Nothing was sent."
        )
    return Path(delivered)


def described(packager: Packager) -> str:
    """Describe for people what a packager sends."""
    if hasattr(packager, "check_path"):  # a FolderPackager
        return str(packager)
    return f"packed by {type(packager).__name__}"


def _git_root(packager: GitArchivePackager) -> Path:
    folder = Path(packager.basepath or Path.cwd())
    words = ["git", "rev-parse", "--show-toplevel"]
    done = subprocess.run(words, cwd=folder, capture_output=True)
    if done.returncode:
        said = os.fsdecode(done.stderr)
        fatal = next((line for line in said.splitlines() if line.startswith("fatal:")), said)
        what = "is in no git repository" if "not a git repository" in said else "is refused by git"
        raise PackagingFailed(
            f"The packager {type(packager).__name__} failed: the folder {folder} {what} "
            f"({_last_line(fatal)}). Nothing was sent. Correct that, set the packager's basepath, "
            "or take another packager, such as PatternPackager."
        )
    return folder if packager.basepath else Path(os.fsdecode(done.stdout).removesuffix("\n"))


def _reason(error: Exception) -> str:
    """An error as a part of a sentence, with what the program printed that failed."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_MAX].rstrip(".")
    if isinstance(error, subprocess.CalledProcessError):
        printed = _last_line(error.stderr) or _last_line(error.output)
        reason += f" ({printed})" if printed else ""
    return reason


def _last_line(text: bytes | str | None) -> str:
    found = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    lines = [line.strip() for line in found.splitlines() if line.strip()]
    return lines[-1][:_REASON_MAX].rstrip(".") if lines else ""
