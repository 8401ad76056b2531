"""Ray's folder on a node: for this user, this job and this start of it."""

from __future__ import annotations

import os
import shutil

from .settings import WrongSetting

_ROOT = "/tmp"


def temp_dir_of(job: str) -> str:
    """Ray's folder; short, since Linux limits the names of the sockets inside.

    It lies in one of this user's alone: Ray lets everybody write into its own.
    """
    return os.path.join(_private_of(job), "r")


def _private_of(job: str) -> str:
    return os.path.join(_ROOT, f"nrr-{os.getuid()}-{job}")


def make_private(path: str) -> None:
    """Make a folder; its name can be guessed, so it may be there already.

    Raises:
        WrongSetting: it is another user's.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    if os.path.islink(path) or os.lstat(path).st_uid != os.getuid():
        raise WrongSetting(
            f"the folder {path} for Ray is another user's. Set RAY_TEMP_DIR to one of your own"
        )


def remove_stale(job: str) -> None:
    """Remove what earlier starts of the same job have left here, when Slurm starts it again."""
    number, _, restart = job.rpartition(".")
    start = os.path.basename(_private_of(f"{number}."))
    for name in os.listdir(_ROOT):
        earlier = name[len(start) :]
        if name.startswith(start) and earlier.isdigit() and int(earlier) < int(restart):
            shutil.rmtree(os.path.join(_ROOT, name), ignore_errors=True)
