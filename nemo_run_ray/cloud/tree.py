"""The files of a folder that are sent: their names, links among them, and their contents.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath

from nemo_run_ray.cloud.encode import Entry, File, Link
from nemo_run_ray.errors import TransportError


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
