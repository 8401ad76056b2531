"""Runs a packager of the user's, and says in words why it failed."""

from __future__ import annotations

import copy
import os
import subprocess
import tarfile
from pathlib import Path

from nemo_run.core.packaging.base import Packager
from nemo_run.core.packaging.git import GitArchivePackager

from nemo_run_ray.cloud.folder_packager import FolderPackager
from nemo_run_ray.errors import NemoRunRayError, PackagingFailed

#: How much of an error a message shows.
_WORDS_MAX = 400


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
            f"The packager {kind} failed in {Path.cwd()}: {_in_words(error)}. Nothing was sent. "
            "Correct the packager's fields or the folder it packs."
        ) from error
    if not delivered or not Path(delivered).is_file() or not tarfile.is_tarfile(delivered):
        raise PackagingFailed(
            f"The packager {kind} returned {delivered!r}; expected the path of a tar archive. "
            "Nothing was sent."
        )
    return Path(delivered)


def in_words(packager: Packager) -> str:
    """What a packager sends, for people."""
    if isinstance(packager, FolderPackager):
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


def _in_words(error: Exception) -> str:
    """An error as a part of a sentence, with what the program printed that failed."""
    words = " ".join(f"{type(error).__name__}: {error}".split())[:_WORDS_MAX].rstrip(".")
    if isinstance(error, subprocess.CalledProcessError):
        printed = _last_line(error.stderr) or _last_line(error.output)
        words += f" ({printed})" if printed else ""
    return words


def _last_line(text: bytes | str | None) -> str:
    found = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    lines = [line.strip() for line in found.splitlines() if line.strip()]
    return lines[-1][:_WORDS_MAX].rstrip(".") if lines else ""
