"""Which paths git ignores and which it tracks, asked of git itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path

from nemo_run_ray.errors import TransportError


class Git:
    """What git says about the paths of a folder, which may be in a repository or not.

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
