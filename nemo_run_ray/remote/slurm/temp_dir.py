"""Ray's folder on a node: for this user, this job and this start of it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from ..trust import own_folder
from .settings import WrongSetting

_ROOT = "/tmp"
#: How files in the folder begin that are held by a program whose folder it is: several where nodes
#: share it. They are free when the programs have ended, however they ended.
_LOCK = "lock-"


def temp_dir_of(job: str) -> str:
    """Ray's folder; short, since Linux limits the names of the sockets inside.

    It lies in one of this user's alone: Ray lets everybody write into its own.
    """
    return os.path.join(own_folder(_private_of(job)), "r")


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
    name = os.urandom(8).hex()
    new = os.path.join(path, f"new-{name}")
    held = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(new, os.path.join(path, f"{_LOCK}{name}"))  # nobody sees one that is not held yet
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
            import shutil  # no node needs it to start

            shutil.rmtree(path, ignore_errors=True)


def _is_free(path: str) -> bool:
    """Whether the programs are dead whose folder it is; one without a lock is left alone."""
    with suppress(OSError):  # a lock is held, or the folder has gone meanwhile
        if os.path.islink(path):
            return False
        locks = [name for name in os.listdir(path) if name.startswith(_LOCK)]
        for name in locks:
            lock = os.open(os.path.join(path, name), os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(lock)
        return bool(locks)
    return False
