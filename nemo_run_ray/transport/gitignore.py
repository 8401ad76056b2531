"""Which paths git ignores, asked of git itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from nemo_run_ray.errors import TransportError


def ignored(root: Path, names: Sequence[str]) -> set[str]:
    """The names that ``.gitignore`` files keep out; tracked ones never are.

    Args:
        root: of the tree, in a repository or not.
        names: paths relative to it.

    Raises:
        TransportError: there is something to ask git, and git is missing or does not answer.
    """
    if not names:
        return set()
    git = shutil.which("git")
    inside = git is not None and _is_repository(git, root)
    if not inside and not any(root.rglob(".gitignore")):
        return set()
    if git is None:
        raise TransportError(
            f"{root} has .gitignore files, and git, which knows what they mean, is not "
            "installed. Install it; nothing was sent."
        )
    if not inside:
        with tempfile.TemporaryDirectory() as folder:
            _run_git([git, "init", "--quiet", "--bare", folder])
            return _asked([git, f"--git-dir={folder}", f"--work-tree={root}"], root, names)
    found: set[str] = set()
    for base, below in _by_repository(root, names).items():
        start = "" if base == "." else f"{base}/"
        inner = [name.removeprefix(start) for name in below]
        found |= {start + name for name in _asked([git], root / base, inner)}
    return found


def _is_repository(git: str, root: Path) -> bool:
    done = _run_git([git, "-C", str(root), "rev-parse", "--git-dir"])
    if done.returncode and b"not a git repository" not in done.stderr:
        raise _git_failed(root, done)  # as it does in a repository of another owner
    return done.returncode == 0


def _by_repository(root: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """The names by the folder of the repository that they are in: submodules ask for themselves."""
    found: dict[str, list[str]] = {}
    for name in names:
        above = [str(folder) for folder in PurePosixPath(name).parents]
        base = next(
            (folder for folder in above if folder == "." or (root / folder / ".git").exists()), "."
        )
        found.setdefault(base, []).append(name)
    return found


def _asked(git: list[str], folder: Path, names: Sequence[str]) -> set[str]:
    text = os.fsencode("\0".join(names))
    done = _run_git([git[0], "-C", str(folder), *git[1:], "check-ignore", "-z", "--stdin"], text)
    if done.returncode not in (0, 1):  # 1: none of them is ignored
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
    return subprocess.run(words, input=text, capture_output=True, check=False, env=english)
