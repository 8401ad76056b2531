"""Chooses the files of a source tree that are sent, and reads them.

git itself is asked which paths it ignores and which it tracks.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

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
    asked = Walk(root, exclude).below(_globbed(root, include)) | _wanted(scripts, exclude)
    families = _families(scripts, collections)

    def skips(folder: str) -> bool:
        return _is_other_family(root, folder, families, collections)

    walk = Walk(root, exclude, Git(root), LEFT_OUT, skips)
    names = asked | walk.below(_starts(root, roots, scripts, walk))
    chosen = sorted({path for name in names for path in with_links(root, name)})
    _check_chosen(root, chosen, most_bytes)
    tree = {name: read_entry(root, name, chosen) for name in chosen}
    reached = {*asked, *(str(above) for name in asked for above in PurePosixPath(name).parents)}
    ignored, left_out = (sorted(names - reached) for names in (walk.ignored, walk.left_out))
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
        return ("src",)  # the walk refuses it, unless it is left out


def find_module(root: Path, module: str) -> str | None:
    """The file of a module, relative to the root; ``None`` when it is not in this tree."""
    for base in (*import_roots(root), "."):  # commands start in the root
        path = root / base / Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py"):
            if os.path.isfile(file):
                return file.relative_to(root).as_posix()
    return None


def _starts(root: Path, roots: Sequence[str], scripts: Sequence[str], walk: Walk) -> Iterator[str]:
    """The paths whose files are sent for the place where they are."""
    if roots == (".",):
        for name in walk.kept(walk.listed(".")):
            if name.endswith(".py") or _is_package(root / name):
                yield name
    else:
        yield from roots
    for script in scripts:
        yield from _beside(root, root / script, walk)


def _is_package(path: Path) -> bool:
    """Whether a folder has an ``__init__.py``; one that nobody may look into could have it."""
    try:
        return (path / "__init__.py").is_file()
    except PermissionError:
        return True  # the walk refuses it


def _beside(root: Path, script: Path, walk: Walk) -> Iterator[str]:
    """The package that a script is in, or its neighbours: it may import them."""
    package = None
    for folder in script.parents:
        if folder == root or not os.path.isfile(folder / "__init__.py"):
            break
        package = folder
    if package is not None:
        yield package.relative_to(root).as_posix()
        return
    for name in walk.listed(script.parent.relative_to(root).as_posix()):
        if os.path.isfile(root / name) and (script.parent != root or name.endswith(".py")):
            yield name


def _wanted(scripts: Iterable[str], exclude: Sequence[str]) -> set[str]:
    for script in scripts:
        if matches(script, exclude):
            raise TransportError(
                f"ShipSource: exclude={list(exclude)} keeps {script} here, which the task runs. "
                "Nothing was sent."
            )
    return set(scripts)


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


class Walk:
    """The files and links of a tree that are sent. What is left out is not looked into.

    Args:
        root: of the tree; all names are paths relative to it, with ``/``.
        exclude: patterns, relative to the root, or of names, of what is left out.
        git: asked for what ``.gitignore`` names; ``None``: nothing is ignored.
        left_out: patterns of names of what is left out unless git tracks it.
        skips: whether a folder is left out for another reason.
    """

    def __init__(
        self,
        root: Path,
        exclude: Iterable[str] = (),
        git: Git | None = None,
        left_out: Iterable[str] = (),
        skips: Callable[[str], bool] = lambda folder: False,
    ) -> None:
        self._root = root
        self._exclude = ["__pycache__", *exclude]
        self._excluded = _one_of(self._exclude)
        self._git = git
        self._left_out = _one_of(left_out)
        self._skips = skips
        #: Files and folders that ``.gitignore`` keeps here.
        self.ignored: set[str] = set()
        #: Files and folders that ``left_out`` and ``skips`` keep here.
        self.left_out: set[str] = set()

    def below(self, starts: Iterable[str]) -> set[str]:
        """The files and links at or below some paths; ``"."`` is the root.

        Raises:
            TransportError: a folder cannot be read.
        """
        whole = [start for start in starts if start == "." or not matches(start, self._exclude)]
        level = ["."] if "." in whole else self.kept(whole)
        found: set[str] = set()
        while level:  # all folders of one depth at once, since each question starts git anew
            inner: list[str] = []
            for name in level:
                kind = self._kind(name)
                if stat.S_ISDIR(kind) and self._skips(name):
                    self.left_out.add(name)
                elif stat.S_ISDIR(kind):
                    inner += self.listed(name)
                elif stat.S_ISREG(kind) or stat.S_ISLNK(kind):  # a pipe or a socket has no contents
                    found.add(name)
            level = self.kept(inner)
        return found

    def kept(self, names: Iterable[str]) -> list[str]:
        """The names that are not left out; nobody has left out the folders above them."""
        kept = [
            name
            for name in names
            if not (self._excluded(name) or self._excluded(name.rpartition("/")[2]))
        ]
        if self._git is None:
            return kept
        left = {name for name in kept if any(map(self._left_out, name.split("/")))}
        left -= self._git.tracked(left)
        kept = [name for name in kept if name not in left]
        ignored = self._git.ignored(kept)
        ignored -= self._git.tracked(ignored)
        self.left_out |= left
        self.ignored |= ignored
        return [name for name in kept if name not in ignored]

    def listed(self, folder: str) -> list[str]:
        """All that is in a folder.

        Raises:
            TransportError: it cannot be read.
        """
        path = self._root / folder
        try:
            os.stat(os.path.join(path, "."))  # a folder with r and without x can only be listed
            names = os.listdir(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        return names if folder == "." else [f"{folder}/{name}" for name in names]

    def _kind(self, name: str) -> int:
        try:
            return (self._root / name).lstat().st_mode
        except OSError as error:
            raise _unreadable(self._root / name, error) from error


def _one_of(patterns: Iterable[str]) -> Callable[[str], object]:
    """A test whether one of the patterns matches a whole text."""
    each = [fnmatch.translate(str(PurePosixPath(pattern))) for pattern in patterns]
    return re.compile("|".join(each) or "(?!)").match


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names it, a folder that it is in, or a part of its path."""
    path = PurePosixPath(name)
    wholes = [name, *(str(parent) for parent in path.parents)]
    return any(map(_one_of(patterns), (*wholes, *path.parts)))


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


class Git:
    """Answers of git about the paths of a folder, which may be in a repository or not.

    Args:
        root: the folder; all names are paths relative to it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tracked: dict[str, set[str]] = {}

    def ignored(self, names: Collection[str]) -> set[str]:
        """The names that ``.gitignore`` files name; a tracked file is never one of them.

        Raises:
            TransportError: git is needed, and is missing or does not answer.
        """
        if self._is_repository:
            found: set[str] = set()
            for base, below in self._by_repository(names).items():
                inner = [name.removeprefix(base) for name in below]
                found |= {base + name for name in _ignored(self._root / base, inner)}
            return found
        folders = {folder for name in names for folder in _folders(name)}
        if not any(os.path.exists(self._root / folder / ".gitignore") for folder in folders):
            return set()
        if not shutil.which("git"):
            raise TransportError(
                f"{self._root} has .gitignore files, and git, which knows what they mean, is not "
                "installed. Install it; nothing was sent."
            )
        with tempfile.TemporaryDirectory() as empty:
            _run_git(["init", "--quiet", "--bare", empty])
            options = [f"--git-dir={empty}", f"--work-tree={self._root}"]
            return _ignored(self._root, names, options)

    def tracked(self, names: Collection[str]) -> set[str]:
        """The names of tracked files, and of folders with tracked files below them."""
        found: set[str] = set()
        for base, below in self._by_repository(names).items() if self._is_repository else ():
            if base not in self._tracked:
                files = _answer(self._root / base, ["ls-files", "-z"])
                self._tracked[base] = {*files, *(f for name in files for f in _folders(name))}
            found |= {name for name in below if name.removeprefix(base) in self._tracked[base]}
        return found

    @cached_property
    def _is_repository(self) -> bool:
        if not shutil.which("git"):
            return False
        done = _run_git(["-C", str(self._root), "rev-parse", "--git-dir"])
        if done.returncode and b"not a git repository" not in done.stderr:
            raise _git_failed(self._root, done)  # as it does in a repository of another owner
        return done.returncode == 0

    def _by_repository(self, names: Collection[str]) -> dict[str, list[str]]:
        """The names by the repository that they are in: submodules answer for themselves.

        The key is the path of the repository below the root, ``""`` or with a ``/`` at its end.
        """
        bases: dict[str, str] = {}
        found: dict[str, list[str]] = {}
        for name in names:
            folder = os.path.dirname(name)
            if folder not in bases:
                inner = (above for above in _folders(name) if self._is_repository_in(above))
                bases[folder] = next((f"{base}/" for base in inner), "")
            found.setdefault(bases[folder], []).append(name)
        return found

    def _is_repository_in(self, folder: str) -> bool:
        return folder != "" and os.path.exists(self._root / folder / ".git")


def _folders(name: str) -> Iterator[str]:
    """The folders above a path, from the nearest one to the root, which is ``""``."""
    while name:
        name = os.path.dirname(name)
        yield name


def _ignored(folder: Path, names: Collection[str], options: Collection[str] = ()) -> set[str]:
    text = os.fsencode("\0".join(names))
    return _answer(folder, [*options, "check-ignore", "-z", "--stdin"], text)


def _answer(folder: Path, words: list[str], text: bytes = b"") -> set[str]:
    done = _run_git(["-C", str(folder), *words], text)
    if done.returncode not in (0, 1):  # 1: no path is ignored
        raise _git_failed(folder, done)
    return set(filter(None, os.fsdecode(done.stdout).split("\0")))


def _git_failed(folder: Path, done: subprocess.CompletedProcess[bytes]) -> TransportError:
    return TransportError(
        f"git cannot say in {folder} what .gitignore keeps here: "
        f"{done.stderr.decode(errors='replace').strip()}. Nothing was sent; does `git status` work "
        "there?"
    )


def _run_git(words: list[str], text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    english = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(["git", *words], input=text, capture_output=True, env=english)
