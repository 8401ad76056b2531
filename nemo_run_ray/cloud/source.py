"""Chooses the files of a source tree that are sent, and reads them.

git itself lists them: what it tracks, and what it does not ignore.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nemo_run_ray.cloud.encode import Entry, File, Link, check_source
from nemo_run_ray.errors import TransportError

#: Names, or patterns of names, of files and folders that are left out unless git tracks them or
#: ``include`` names them: caches, environments, data and models.
LEFT_OUT: tuple[str, ...] = (
    *("__pycache__", "*.py[co]", ".git", ".hg", ".svn", ".DS_Store", "*.egg-info", ".eggs"),
    *(".venv", "venv", ".tox", ".nox", "node_modules", ".ipynb_checkpoints"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".cache"),
    *("*.pt", "*.pth", "*.bin", "*.ckpt", "*.distcp", "*.safetensors", "*.gguf", "*.onnx"),
    *("*.nemo", "*.engine", "*.h5", "*.hdf5", "*.npy", "*.npz", "*.pkl", "*.pickle"),
    *("*.parquet", "*.arrow", "*.feather", "*.jsonl", "*.tfrecord", "*.idx", "*.sqlite", "*.db"),
    *("*.tar", "*.tar.*", "*.tgz", "*.gz", "*.xz", "*.zst", "*.zip", "*.7z", "*.so", "*.whl"),
    *("*.mp4", "*.wav", "*.flac", "*.mp3", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.pdf"),
    *("wandb", "mlruns", "lightning_logs", "nemo_experiments", "checkpoints"),
)


@dataclass(frozen=True)
class Source:
    """The files to be sent.

    Attributes:
        tree: the entries, by path relative to the root, with ``/``.
        roots: the folders of it that belong on ``PYTHONPATH``.
        ignored: files and folders that ``.gitignore`` keeps here.
        left_out: files and folders that ``LEFT_OUT`` or a collection keeps here.
        packages_left_out: Python packages that ``LEFT_OUT`` keeps here.
    """

    tree: dict[str, Entry]
    roots: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    left_out: tuple[str, ...] = field(default=(), repr=False)
    packages_left_out: tuple[str, ...] = ()

    def largest(self, count: int = 10) -> list[tuple[str, int]]:
        """The largest files, with their sizes in bytes."""
        sizes = [(n, len(e.content)) for n, e in self.tree.items() if isinstance(e, File)]
        return sorted(sizes, key=lambda file: (-file[1], file[0]))[:count]


def collect(
    root: Path,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    collections: Sequence[str] = (),
    scripts: Sequence[str] = (),
    most_bytes: int | None = None,
) -> Source:
    """Choose and read the files of a source tree, as they are now, committed or not.

    Args:
        root: of the tree. With packages below ``src/`` that folder is sent, otherwise the
            packages and modules in the root itself.
        include: patterns, relative to the root, of more that is sent, whatever ``LEFT_OUT`` and
            ``.gitignore`` say.
        exclude: patterns, relative to the root, or of names, of what is not sent.
        collections: names of folders of which only the subfolder with a script is sent. One that
            no script is in stays here, when a script is in another one of the same package.
        scripts: paths, relative to the root, of what will run. They are sent whatever ``LEFT_OUT``
            and ``.gitignore`` say, with the packages that they are in or the files beside them.
        most_bytes: more than that is refused before it is read.

    Raises:
        TransportError: there is no Python source, a file cannot be read, a link leaves the root or
            what is sent, or ``exclude`` names a script.
        SourceTooLarge: the files have more than ``most_bytes``.
    """
    if not root.is_dir():
        raise TransportError(f"ShipSource: there is no folder {root}. Nothing was sent.")
    roots = import_roots(root)
    for script in scripts:
        if matches(script, exclude):
            raise TransportError(
                f"ShipSource: exclude={list(exclude)} keeps {script} here, which the task runs. "
                "Nothing was sent."
            )
    asked = _below(root, _globbed(root, include), exclude) | set(scripts)
    listing = list_files(root, [*_starts(root, roots, scripts)], exclude, LEFT_OUT)
    families = _families(scripts, collections)
    others: set[str] = set()
    for name in listing.files:
        above = reversed(list(_folders(name)))
        other = next((f for f in above if _is_other_family(root, f, families, collections)), None)
        others |= {other} if other else set()
    names = {name for name in listing.files if not others & {*_folders(name)}} | asked
    chosen = sorted({path for name in names for path in with_links(root, name)})
    _check_chosen(root, chosen, most_bytes)
    tree = {name: read_entry(root, name, chosen) for name in chosen}
    reached = {*asked, *(above for name in asked for above in _folders(name))}
    ignored = sorted(listing.ignored - reached)
    left_out = sorted((listing.left_out | others) - listing.ignored - reached)
    return Source(tree, roots, tuple(ignored), tuple(left_out), _packages(root, left_out))


def _check_chosen(root: Path, chosen: Sequence[str], most_bytes: int | None) -> None:
    """Refuse a choice without Python source, and one that is too large."""
    if not any(name.endswith(".py") for name in chosen):
        raise TransportError(
            f"ShipSource: no Python source to send in {root}: looked for packages and modules in "
            f"{root / 'src'} and in the folder itself. Give the root of your project, or name "
            "files with include=[…]."
        )
    if most_bytes is not None:
        # The size of a link is that of the file it points to, which may be what is sent.
        sizes = [(name, size) for name in chosen if (size := file_size(root / name)) is not None]
        check_source(sizes, most_bytes)


def import_roots(root: Path) -> tuple[str, ...]:
    """The folders, relative to the root, from which its packages are imported."""
    below = root / "src"
    try:
        is_src = below.is_dir() and any(
            entry.suffix == ".py" or (entry.is_dir() and any(entry.rglob("*.py")))
            for entry in below.iterdir()
        )
        return ("src",) if is_src and not (below / "__init__.py").exists() else (".",)
    except PermissionError:
        return ("src",)  # git refuses it, unless it is ignored


def find_module(root: Path, module: str) -> str | None:
    """The file of a module, relative to the root; ``None`` when it is not in this tree."""
    for base in (*import_roots(root), "."):  # commands start in the root
        path = root / base / Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py"):
            if os.path.isfile(file):
                return file.relative_to(root).as_posix()
    return None


def _starts(root: Path, roots: Sequence[str], scripts: Sequence[str]) -> Iterator[str]:
    """The paths whose files are sent for the place where they are."""
    if roots == (".",):
        for name in os.listdir(root):
            if name.endswith(".py") or _is_package(root / name):
                yield name
    else:
        yield from roots
    for script in scripts:
        yield from _beside(root, root / script)


def _is_package(path: Path) -> bool:
    """Whether a folder has an ``__init__.py``; one that nobody may look into could have it."""
    try:
        return (path / "__init__.py").is_file()
    except PermissionError:
        return True  # git refuses it, unless it is ignored


def _beside(root: Path, script: Path) -> Iterator[str]:
    """The package that a script is in, or its neighbours: it may import them."""
    package = None
    for folder in script.parents:
        if folder == root or not os.path.isfile(folder / "__init__.py"):
            break
        package = folder
    if package is not None:
        yield package.relative_to(root).as_posix()
        return
    for path in script.parent.iterdir():
        if path.is_file() and (script.parent != root or path.suffix == ".py"):
            yield path.relative_to(root).as_posix()


def _globbed(root: Path, patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        if PurePosixPath(pattern).is_absolute() or ".." in PurePosixPath(pattern).parts:
            raise TransportError(
                f"ShipSource: include={pattern!r} leaves {root}; patterns are relative to it and "
                "stay in it. Nothing was sent."
            )
        found = list(root.glob(pattern))
        if not found:
            raise TransportError(f"ShipSource: include={pattern!r} names nothing in {root}.")
        yield from (path.relative_to(root).as_posix() for path in found)


def _below(root: Path, starts: Iterable[str], exclude: Sequence[str]) -> set[str]:
    """The files and links at or below some paths, but for what is excluded."""

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    found: set[str] = set()
    for start in starts:
        if os.path.isfile(root / start) or os.path.islink(root / start):
            found.add(start)
            continue
        for folder, folders, files in os.walk(root / start, onerror=refuse):
            above = Path(folder).relative_to(root)
            folders[:] = [name for name in folders if not matches(f"{above / name}", exclude)]
            links = [name for name in folders if os.path.islink(Path(folder, name))]
            found.update((above / name).as_posix() for name in (*files, *links))
    return {name for name in found if not matches(name, exclude)}


def _packages(root: Path, left_out: Iterable[str]) -> tuple[str, ...]:
    """The Python packages among what is left out for its name."""
    named = (name for name in left_out if matches(PurePosixPath(name).name, LEFT_OUT))
    return tuple(name for name in named if os.path.isfile(root / name / "__init__.py"))


#: The subfolders that scripts are in, by the package and the name of a collection. A script that is
#: in no subfolder adds none.
_Families = Mapping[tuple[str, str], set[str]]


def _families(scripts: Iterable[str], collections: Sequence[str]) -> _Families:
    families: dict[tuple[str, str], set[str]] = {}
    for script in scripts:
        parts = script.split("/")
        for depth, name in enumerate(parts[:-1]):
            if name in collections:
                family = families.setdefault(("/".join(parts[:depth]), name), set())
                family.update(parts[depth + 1 : -1][:1])
    return families


def _is_other_family(
    root: Path, folder: str, families: _Families, collections: Sequence[str]
) -> bool:
    """Whether a folder is a collection, or a family of one, that no script is in.

    Folders whose names begin with ``_`` are shared by the families. Another package is sent whole,
    unless it has families of the same names.
    """
    above, _, name = folder.rpartition("/")
    packages = {package for (package, _), family in families.items() if family}
    if name in collections and above in packages and (above, name) not in families:
        return True
    package, _, collection = above.rpartition("/")
    wanted = families.get((package, collection))
    if wanted is None and package not in packages:
        same = [family for (_, other), family in families.items() if other == collection]
        wanted = {one for one in set().union(*same) if (root / above / one).is_dir()}
    return not (not wanted or name in wanted or name.startswith("_"))


def scripts_in(text: str) -> tuple[list[str], list[str]]:
    """Paths of Python files and names of modules (after ``-m``) in a shell script."""
    return re.findall(r"[\w./-]+\.py\b", text), re.findall(r"(?<!\S)-m\s+([\w.]+)", text)


@cache
def _one_of(patterns: tuple[str, ...]) -> Callable[[str], object]:
    """A test whether one of the patterns matches a whole text."""
    each = [fnmatch.translate(str(PurePosixPath(pattern))) for pattern in patterns]
    return re.compile("|".join(each) or "(?!)").match


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names it, a folder that it is in, or a part of its path."""
    is_one = _one_of((*patterns, "__pycache__"))
    return any(map(is_one, (name, *_folders(name), *name.split("/"))))


def file_size(path: Path) -> int | None:
    """The size of a file, or of what a link points to, in bytes; ``None`` if that is no file."""
    return os.path.getsize(path) if os.path.isfile(path) else None


def with_links(root: Path, name: str) -> Iterator[str]:
    """The name without links to folders on its way, and those links."""
    yield _behind_links(root, name)
    for folder in list(PurePosixPath(name).parents)[:-1]:
        if (root / folder).is_symlink():
            yield _behind_links(root, str(folder))


def _behind_links(root: Path, name: str) -> str:
    """The name without links to folders of the tree, which are sent as links."""
    path = root / name
    real = path.parent.resolve() / path.name
    inside = real.is_relative_to(root.resolve())
    return real.relative_to(root.resolve()).as_posix() if inside else name


def read_entry(root: Path, name: str, chosen: Sequence[str]) -> Entry:
    """One file or link as it is now.

    Args:
        root: of the tree.
        name: relative to it.
        chosen: the names of all that is sent.

    Raises:
        TransportError: it cannot be read, or is a link to what is not sent.
    """
    path = root / name
    target = _target(path, name)
    if not target.is_relative_to(root.resolve()):
        raise TransportError(
            f"{path} is a link to {target}, out of the tree, or lies behind one. Copy what it "
            f"points to, or leave it out with exclude=[{name!r}]. Nothing was sent."
        )
    if path.is_symlink():
        aim = target.relative_to(root.resolve()).as_posix()
        if aim in chosen or not target.exists() or _is_above(aim, chosen):
            return Link(os.path.relpath(target, path.parent.resolve()))
        if target.is_dir():
            raise TransportError(
                f"{path} is a link to {target}, which is not sent. Send that too (ShipSource has "
                f"include=[{aim!r}]), or leave the link out with exclude=[{name!r}]. Nothing was "
                "sent."
            )
    try:
        is_executable = bool(path.stat().st_mode & 0o100)
        return File(path.read_bytes(), is_executable)
    except OSError as error:
        raise _unreadable(path, error) from error


def _target(path: Path, name: str) -> Path:
    """The path without links on its way and at its end."""
    try:
        target = path.resolve()
        if path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # it may point to nothing, here
                path.stat()
    except (OSError, RuntimeError) as error:  # a loop of links; from 3.13 resolve() keeps quiet
        raise TransportError(
            f"{path} cannot be followed: {error}. Leave it out with exclude=[{name!r}]. Nothing "
            "was sent."
        ) from error
    return target


def _is_above(folder: str, chosen: Sequence[str]) -> bool:
    start = "" if folder == "." else f"{folder}/"
    return any(name.startswith(start) for name in chosen)


def _unreadable(path: Path, error: OSError) -> TransportError:
    return TransportError(
        f"{path} cannot be read: {error.strerror}. Make it readable, or leave it out with "
        f"exclude=[{path.name!r}]. Nothing was sent."
    )


def _folders(name: str) -> Iterator[str]:
    """The folders above a path, from the nearest one to the last below the root."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


class Listing(NamedTuple):
    """The files of a folder, as git lists them.

    Attributes:
        files: the files and links that are sent.
        ignored: files and folders that ``.gitignore`` keeps here.
        left_out: files and folders whose names are left out, and which git does not track.
    """

    files: set[str]
    ignored: set[str]
    left_out: set[str]


def list_files(
    root: Path, starts: Sequence[str], exclude: Sequence[str] = (), left_out: Sequence[str] = ()
) -> Listing:
    """List a folder by git, which does not look into what is ignored.

    Args:
        root: the folder, in a repository or not; all names are paths relative to it, with ``/``.
        starts: the paths to list; ``"."`` is the root.
        exclude: patterns of names, or of paths below the root, of what is not sent.
        left_out: patterns of names of what is not sent unless git tracks it.

    Raises:
        TransportError: git is missing or does not answer, or a folder cannot be read.
    """
    if not starts:  # without a path git lists the whole folder
        return Listing(set(), set(), set())
    with _repository(root) as (options, prefix):

        def ask(*words: str) -> set[str]:
            words = (*options, "--literal-pathspecs", "ls-files", "-z", *words, "--", *starts)
            done = _run_git(root, words)
            if done.returncode or (b"could not open" in done.stderr and "--ignored" not in words):
                raise _git_failed(root, done)
            return {name.rstrip("/") for name in os.fsdecode(done.stdout).split("\0") if name}

        def below(name: str) -> str:
            # A plain name would match the folders of the repository above the root, too.
            return f"--exclude=/{prefix}{name if '/' in name else f'**/{name}'}"

        by_name = list(map(below, left_out))
        pruned = [below(str(PurePosixPath(name))) for name in ("__pycache__", *exclude)]
        names = ask("--cached") | ask("--others", "--exclude-standard", *by_name, *pruned)
        report = ("--others", "--ignored", "--directory")
        listing = Listing(
            set(),
            ask(*report, "--exclude-standard"),
            ask(*report, *by_name) if by_name else set(),
        )
    for name in names:
        path = root / name
        try:
            is_folder = stat.S_ISDIR(path.lstat().st_mode)
        except FileNotFoundError:
            continue  # git tracks it, and it is removed here
        except OSError as error:
            raise _unreadable(path, error) from error
        if not is_folder and not matches(name, exclude):
            listing.files.add(name)
        elif is_folder and (path / ".git").exists():  # a repository answers for itself
            inner = list_files(path, ["."], (), left_out)
            for ours, theirs in zip(listing, inner, strict=True):
                ours |= {f"{name}/{one}" for one in theirs if not matches(f"{name}/{one}", exclude)}
    return listing


@contextlib.contextmanager
def _repository(root: Path) -> Iterator[tuple[list[str], str]]:
    """git's options for a folder, and its path in the repository; an empty one serves without."""
    if not shutil.which("git"):
        raise TransportError(
            f"git, which lists the files of {root}, is not installed. Install it; nothing was sent."
        )
    done = _run_git(root, ["rev-parse", "--show-prefix"])
    if done.returncode == 0:
        yield [], os.fsdecode(done.stdout).removesuffix("\n")
    elif b"not a git repository" not in done.stderr:
        raise _git_failed(root, done)  # as it does in a repository of another owner
    else:
        with tempfile.TemporaryDirectory() as empty:
            _run_git(root, ["init", "--quiet", "--bare", empty])
            yield [f"--git-dir={empty}", f"--work-tree={root}"], ""


def _git_failed(folder: Path, done: subprocess.CompletedProcess[bytes]) -> TransportError:
    return TransportError(
        f"git cannot list the files of {folder}: {done.stderr.decode(errors='replace').strip()}. "
        "Nothing was sent. Does `git status` work there? What git cannot read, make readable, or "
        "leave it out with exclude=[…]."
    )


def _run_git(folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    english = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, env=english)
