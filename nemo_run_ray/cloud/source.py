"""Chooses the files of a source tree that are sent, reads them, and writes plain tar files of them.

git itself lists them: what it tracks, and what it does not ignore.
"""

from __future__ import annotations

import gzip
import io
import logging
import os
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise, takewhile
from os.path import isfile
from pathlib import Path, PurePosixPath

from nemo_run.core.packaging.base import Packager

from nemo_run_ray.errors import SourceTooLarge, TransportError
from nemo_run_ray.remote.files import replacing

log = logging.getLogger(__name__)

#: Names, or patterns of names, of files and folders that are left out unless git tracks them or
#: ``include`` names them: caches, environments, data and models.
LEFT_OUT = tuple(
    """
    __pycache__ *.py[co] .git .hg .svn .DS_Store *.egg-info .eggs
    .venv venv .tox .nox node_modules .ipynb_checkpoints
    .*_cache .hypothesis .cache
    *.pt *.pth *.bin *.ckpt *.distcp *.safetensors *.gguf *.onnx
    *.nemo *.engine *.h5 *.hdf5 *.np[yz] *.pkl *.pickle
    *.parquet *.arrow *.feather *.jsonl *.tfrecord *.idx *.sqlite *.db
    *.tar *.tar.* *.tgz *.[gx]z *.zst *.zip *.7z *.so *.whl
    *.mp[34] *.wav *.flac *.png *.jpg *.jpeg *.gif *.pdf
    wandb mlruns lightning_logs nemo_experiments checkpoints
""".split()  # noqa: SIM905 as in a .gitignore
)
#: More than that is no source code, and reading and compressing it would take minutes.
_SIZE_MAX_BYTES = 200_000_000


@dataclass(frozen=True)
class File:
    """A file of the tree: its bytes, and whether its owner may execute it."""

    content: bytes
    is_executable: bool = False

    @property
    def mode(self) -> int:
        return 0o755 if self.is_executable else 0o644


@dataclass(frozen=True)
class Link:
    """A symbolic link of the tree, with its target relative to the link's folder."""

    target: str


Entry = File | Link


def write_tar_gz(path: str, entries: Iterable[tuple[str, Entry]]) -> None:
    """Write a ``.tar.gz`` of the entries, without times and owners; equal ones give equal bytes."""
    with (
        replacing(path) as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, entry in entries:
            member = tarfile.TarInfo(name)
            if isinstance(entry, Link):
                member.type, member.linkname = tarfile.SYMTYPE, entry.target
                tar.addfile(member)
            else:
                member.size, member.mode = len(entry.content), entry.mode
                tar.addfile(member, io.BytesIO(entry.content))


@dataclass(kw_only=True)
class SourcePackager(Packager):
    """Chooses and packs the files of a source tree, as they are now, committed or not.

    Attributes:
        root: of the tree. With packages below ``src/`` that folder is sent, otherwise the
            packages and modules in the root itself.
        include: patterns, relative to the root, of more that is sent, whatever ``LEFT_OUT`` and
            ``.gitignore`` say.
        exclude: patterns, relative to the root, or of names, of what is not sent.
        collections: names of folders of which, in the package of a script, only the subfolders
            with a script are sent, and those that begin with ``_``. Without such a script all are
            sent. Another package is sent whole, unless it has subfolders of the same names.
        scripts: paths, relative to the root, of what will run. They are sent whatever ``LEFT_OUT``
            and ``.gitignore`` say, with the packages that they are in or the files beside them.
    """

    root: str = "."
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    collections: Sequence[str] = ()
    scripts: Sequence[str] = ()

    def package(self, path: Path, job_dir: str, name: str) -> str:
        """Write the archive, ``<job_dir>/<name>.tar.gz``; see ``collect``."""
        target = f"{job_dir}/{name}.tar.gz"
        if not os.path.exists(target):
            write_tar_gz(target, self.collect().items())
        return target

    def collect(self) -> dict[str, Entry]:
        """The files and links by their paths relative to the root, with ``/``, in their order.

        Raises:
            TransportError: there is no Python source, a file cannot be read, a link leaves the
                root or what is sent, or ``exclude`` names a script.
            SourceTooLarge: the files are too large.
        """
        root = Path(self.root).resolve()
        if not root.is_dir():
            raise TransportError(f"ShipSource: there is no folder {root}. Nothing was sent.")
        for script in self.scripts:
            if matches(script, self.exclude):
                raise TransportError(
                    f"ShipSource: exclude={list(self.exclude)} keeps {script} here, which the task "
                    "runs. Nothing was sent."
                )
        asked = {*_included(root, self.include, self.exclude), *self.scripts}
        files, ignored = list_files(root, [*_starts(root, self.scripts)], self.exclude, LEFT_OUT)

        def families(name: str) -> set[tuple[str, str, str]]:
            """The families that a path is in, each with its package and its collection."""
            folders = name.split("/")[:-1]
            return {
                ("/".join(folders[:depth]), collection, family)
                for depth, (collection, family) in enumerate(pairwise(folders))
                if collection in self.collections
            }

        chosen = {family for script in self.scripts for family in families(script)}

        def is_sent(package: str, collection: str, family: str) -> bool:
            if family[0] == "_" or (package, collection, family) in chosen:
                return True
            same = {one for _, known, one in chosen if known == collection}
            has_same = any((root / package / collection / one).is_dir() for one in same)
            is_of_script = any(package == known for known, _, _ in chosen)
            return not is_of_script and (family in same or not has_same)

        wanted = asked | {name for name in files if all(is_sent(*one) for one in families(name))}
        if not any(name.endswith(".py") for name in wanted):
            raise TransportError(
                f"ShipSource: no Python source to send in {root}: looked for packages and modules "
                f"in {root / 'src'} and in the folder itself. Give the root of your project, or "
                "name files with include=[…]."
            )
        ignored -= {folder for name in asked for folder in (name, *_folders(name))}
        if ignored:
            log.warning(
                "ShipSource: %d file(s) or folder(s) stay here because .gitignore names them, such "
                "as %s. include=[…] sends them.",
                len(ignored),
                ", ".join(sorted(ignored)[:10]),
            )
        return dict(read_tree(root, wanted))


def import_base(root: Path) -> str:
    """The folder, relative to the root, from which its packages are imported."""
    below = root / "src"
    is_base = any(below.rglob("*.py")) and not isfile(below / "__init__.py")
    return "src" if is_base else "."


def find_module(root: Path, module: str) -> str | None:
    """The file of a module, relative to the root; ``None`` when it is not in this tree."""
    for base in (import_base(root), "."):  # commands start in the root
        path = root / base / Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py"):
            if isfile(file):
                return file.relative_to(root).as_posix()
    return None


def _starts(root: Path, scripts: Sequence[str]) -> Iterator[str]:
    """The paths whose files are sent for the place where they are."""

    def is_package(name: str) -> bool:
        return isfile(root / name / "__init__.py")

    if import_base(root) == "src":
        yield "src"
    else:
        for name in os.listdir(root):
            if name.endswith(".py") or is_package(name):
                yield name
    for script in scripts:  # the package that it is in, or its neighbours: it may import them
        if packages := [*takewhile(is_package, _folders(script))]:
            yield packages[-1]
            continue
        for path in (root / script).parent.iterdir():
            if path.is_file() and (path.parent != root or path.suffix == ".py"):
                yield path.relative_to(root).as_posix()


def _included(root: Path, patterns: Iterable[str], exclude: Sequence[str]) -> Iterator[str]:
    """The files and links at or below the paths that match the patterns."""
    for pattern in patterns:
        paths = [
            path
            for path in root.glob(pattern.lstrip("/"))
            if ".." not in path.parts and path.parent.resolve() == path.parent
        ]
        if not paths:
            raise TransportError(
                f"ShipSource: include={pattern!r} names nothing in {root}; patterns are relative "
                "to it, stay in it and go through no link. Nothing was sent."
            )
        for path in paths:
            for file in (path, *(() if path.is_symlink() else path.rglob("*"))):
                name = file.relative_to(root).as_posix()
                if (file.is_symlink() or not file.is_dir()) and not matches(name, exclude):
                    yield name


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names it, a folder that it is in, or a part of its path."""
    parts = (name, *_folders(name), *name.split("/"))
    plain = [str(PurePosixPath(pattern)) for pattern in (*patterns, "__pycache__")]
    return any(fnmatchcase(part, pattern) for part in parts for pattern in plain)


def read_tree(
    root: Path, names: Iterable[str], where: str = "ShipSource"
) -> Iterator[tuple[str, Entry]]:
    """Read files and links of a folder, given without links on its way, by name.

    Raises:
        TransportError: one cannot be read, or is a link to what is not sent.
        SourceTooLarge: they are too large; none was read.
    """
    chosen = sorted(names)
    # The size of a link is that of the file it points to, which may be what is sent.
    check_source(
        {name: os.path.getsize(root / name) for name in chosen if isfile(root / name)},
        where,
    )
    for name in chosen:
        try:
            yield name, _read_entry(root, name, chosen)
        except FileNotFoundError:  # git tracks it, and it is removed here
            continue
        except (OSError, RuntimeError) as error:  # of a loop of links
            raise TransportError(
                f"{root / name} cannot be read: {getattr(error, 'strerror', error)}. Make it "
                f"readable, or leave it out with exclude=[{Path(name).name!r}]. Nothing was sent."
            ) from error


def _read_entry(root: Path, name: str, chosen: Sequence[str]) -> Entry:
    """One file or link as it is now."""
    path = root / name
    target = path.resolve()
    is_inside = target.is_relative_to(root)
    if is_inside and path.is_symlink():
        is_sent = any((root / one).is_relative_to(target) for one in chosen)
        if is_sent or not target.exists():
            return Link(os.path.relpath(target, path.parent))
    if not is_inside or target.is_dir():
        raise TransportError(
            f"{path} is a link to {target}, which is out of the tree or not sent. Send what it "
            "points to, in the tree (ShipSource has include=[…]), or leave the link out with "
            f"exclude=[{name!r}]. Nothing was sent."
        )
    return File(path.read_bytes(), bool(path.stat().st_mode & 0o100))


def check_source(
    sizes: Mapping[str, int],
    where: str,
    what: str = "the files",
    size: int | None = None,
    limit: int = _SIZE_MAX_BYTES,
) -> None:
    """Refuse source code that is too large: its files, or ``what`` has the size in bytes.

    Raises:
        SourceTooLarge: it is larger; the message has the limit, the size and the largest files.
    """
    size = sum(sizes.values()) if size is None else size
    if size > limit:
        largest = Counter(sizes).most_common(10)
        files = "\n".join(f"  {size_bytes:>10,} {name}" for name, size_bytes in largest)
        raise SourceTooLarge(
            f"The source code is too large for {where}: {what} would have {size:,} bytes, the "
            f"limit is {limit:,}. Nothing was sent. Leave something out with exclude=[…]; the "
            f"largest files are, in bytes:\n{files}"
        )


def _folders(name: str) -> Iterator[str]:
    """The folders above a path, from the nearest one to the last below the root."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def list_files(
    root: Path, starts: Sequence[str], exclude: Sequence[str] = (), left_out: Sequence[str] = ()
) -> tuple[set[str], set[str]]:
    """List a folder by git, which does not look into what is ignored.

    Args:
        root: the folder, in a repository or not; all names are paths relative to it, with ``/``.
        starts: the paths to list; ``"."`` is the root.
        exclude: patterns of what is not sent; ``left_out`` those of what git does not track.

    Returns:
        The files and links that are sent, and the files and folders that ``.gitignore`` keeps here.

    Raises:
        TransportError: git is missing or does not answer, or a folder cannot be read.
    """
    if not starts:  # without a path git lists the whole folder
        return set(), set()
    with tempfile.TemporaryDirectory() as empty:
        done = _git(root, "rev-parse", "--show-prefix")
        prefix = os.fsdecode(done.stdout).removesuffix("\n")
        options = ["--literal-pathspecs"]
        if done.returncode:
            if b"not a git repository" not in done.stderr:
                raise _git_failed(root, done.stderr)  # as it does in one of another owner
            _git(root, "init", "--quiet", "--bare", empty)
            options += [f"--git-dir={empty}", f"--work-tree={root}"]

        def ask(*words: str) -> set[str]:
            done = _git(root, *options, "ls-files", "-z", *words, "--", *starts)
            if done.returncode or (b"could not open" in done.stderr and "--ignored" not in words):
                raise _git_failed(root, done.stderr)
            return {name.rstrip("/") for name in os.fsdecode(done.stdout).split("\0") if name}

        patterns = [str(PurePosixPath(name)) for name in (*left_out, "__pycache__", *exclude)]
        # A plain name would match the folders of the repository above the root, too.
        hidden = [f"--exclude=/{prefix}{'' if '/' in name else '**/'}{name}" for name in patterns]
        ignored = ask("--others", "--ignored", "--directory", "--exclude-standard")
        names = ask("--cached", "--others", "--exclude-standard", *hidden)
    files = set[str]()
    for name in names:
        path = root / name
        if not os.path.isdir(path) or path.is_symlink():
            files.add(name)
        elif (path / ".git").exists():  # a repository answers for itself
            inner, kept = list_files(path, ["."], (), left_out)
            files |= {f"{name}/{one}" for one in inner}
            ignored |= {f"{name}/{one}" for one in kept}
    return {name for name in files if not matches(name, exclude)}, ignored


def _git_failed(folder: Path, reason: bytes) -> TransportError:
    return TransportError(
        f"git cannot list the files of {folder}: {reason.decode(errors='replace').strip()}. "
        "Nothing was sent. Does `git status` work there? What git cannot read, make readable, or "
        "leave it out with exclude=[…]."
    )


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except FileNotFoundError as error:
        raise _git_failed(folder, b"git is not installed") from error
