"""Ray's folder on a node: for this user, this job and this start of it."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress

from .settings import WrongSetting

_ROOT = "/tmp"
#: In the folder: held by the program whose folder it is, and free when that has ended.
_LOCK = "lock"


def temp_dir_of(job: str) -> str:
    """Ray's folder; short, since Linux limits the names of the sockets inside.

    It lies in one of this user's alone: Ray lets everybody write into its own.
    """
    return os.path.join(_private_of(job), "r")


def _private_of(job: str) -> str:
    return os.path.join(_ROOT, f"nrr-{os.getuid()}-{job}")


def make_private(path: str) -> int:
    """Make a folder; its name can be guessed, so it may be there already.

    Returns:
        A descriptor that holds the folder for this process, also when it is killed.

    Raises:
        WrongSetting: it is another user's.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    if os.path.islink(path) or os.lstat(path).st_uid != os.getuid():
        raise WrongSetting(
            f"the folder {path} for Ray is another user's. Set RAY_TEMP_DIR to one of your own"
        )
    lock = os.path.join(path, f"{_LOCK}.{os.getpid()}")
    held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.replace(lock, os.path.join(path, _LOCK))  # so that nobody sees one that is not held yet
    return held


def remove_stale(job: str) -> None:
    """Remove the folders of this user's runs that were killed here, and of this job's starts."""
    number, _, restart = job.rpartition(".")
    own, start = f"nrr-{os.getuid()}-", os.path.basename(_private_of(f"{number}."))
    for name in os.listdir(_ROOT):
        path = os.path.join(_ROOT, name)
        earlier = name[len(start) :]
        is_earlier = name.startswith(start) and earlier.isdigit() and int(earlier) < int(restart)
        if name.startswith(own) and (is_earlier or _is_free(path)):
            shutil.rmtree(path, ignore_errors=True)


def _is_free(path: str) -> bool:
    """Whether the program is dead whose folder it is; one without a lock is left alone."""
    if os.path.islink(path):
        return False
    with suppress(OSError):
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(lock)
        return True
    return False
