"""Files: written so that readers see them whole, and trusted only where nobody else may write.

A file or folder that is found by its name may be trusted if it belongs to this user or to root, and
nobody else may write to it or to a folder above it. Folders above it may have the sticky bit, as
``/tmp`` has: there nobody can replace what belongs to another user. OpenSSH has the same rule for
its files (``StrictModes``). A login node gets the text of this module.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import contextmanager, suppress
from typing import IO, Iterator, Union

#: Variable in every process of an embedded Ray: its folder.
EMBEDDED = "NEMO_RUN_RAY_LOCAL"
#: Variable of jobs with the dashboard's address, where this package has started Ray.
DASHBOARD = "NEMO_RUN_RAY_DASHBOARD"
#: In jobs on an allocation of Slurm: the folder of this run of Slurm's job, and that of the
#: allocation where a client has asked for it by a name.
RUN, LIFE = "NEMO_RUN_RAY_RUN", "NEMO_RUN_RAY_LIFE"
#: In the same jobs: when the allocation ends, in seconds since the epoch by the head's clock; how
#: many seconds it lasts from Ray's start; and ``1`` where another one goes on with jobs.
ENDS_AT, LASTS_S, RENEWS = "NEMO_RUN_RAY_ENDS_AT", "NEMO_RUN_RAY_LASTS_S", "NEMO_RUN_RAY_RENEWS"


def write_file(path: Union[str, os.PathLike[str]], content: Union[str, bytes]) -> None:
    """Replace a file's content at once. Text becomes UTF-8.

    Raises:
        OSError: it cannot be written; the file is what it was.
    """
    with replacing(path) as file:
        file.write(content if isinstance(content, bytes) else content.encode())


@contextmanager
def replacing(path: Union[str, os.PathLike[str]]) -> Iterator[IO[bytes]]:
    """A file to write to that takes the path's place at the end, and only if all went well."""
    # Where others may write, a name that can be guessed may be a link of theirs.
    temporary = f"{os.fspath(path)}.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and error.filename in (None, temporary):
            error.filename = os.fspath(path)  # a write that fails names no file
        raise


# ---------------------------------------------------------------- trust


def why_untrusted(path: str) -> str:
    """The reason for not trusting a path, with the next step; empty if it may be trusted.

    If the path does not exist, only the folders above it count. It is then safe to create it with a
    call that fails if it exists. Below a folder that nobody else can enter, modes do not count.
    """
    owners = _owners()
    closed = set()  # folders that others cannot enter, and all below
    for step, found, is_above in _steps(os.path.join(os.getcwd(), path)):
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in owners:
            return (
                f"{step} belongs to {_user(found.st_uid)} (mode {mode:o}), expected is "
                f"{_user(os.getuid())} or root, since its owner could replace {path}. Use another "
                f"folder, or let root run: chown {_user(os.getuid())} {step}"
            )
        if stat.S_ISLNK(found.st_mode) or os.path.dirname(step) in closed:
            if not stat.S_ISLNK(found.st_mode):
                closed.add(step)
            continue
        is_writable = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_own(found.st_gid))
        if not mode & 0o011 and stat.S_ISDIR(found.st_mode):
            closed.add(step)
        elif is_writable and not (is_above and mode & stat.S_ISVTX):
            return (
                f"Others than its owner {_user(found.st_uid)} may write to {step} (mode {mode:o}), "
                f"and could replace {path}. Use another folder, or run: chmod go-w {step}"
            )
    return ""


def open_own(path: str, flags: int) -> int:
    """Open a file in a folder in which others may write; one that is made is its owner's alone.

    Raises:
        PermissionError: the path is a link or no plain file, or another user may write to it.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise PermissionError(errno.EPERM, "it is a link, expected is a file", path) from None
    found = os.fstat(fd)
    is_own = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    if stat.S_ISREG(found.st_mode) and is_own and found.st_nlink == 1:
        return fd
    os.close(fd)
    problem = f"it is not a file of {_user(os.geteuid())} that nobody else may write to"
    raise PermissionError(errno.EPERM, problem, path)


def own_folder(path: str) -> str:
    """A path for a folder of this user: the given one, or with a number where another has that."""
    for number in range(100):
        name = path if number == 0 else f"{path}~{number}"
        try:
            found = os.lstat(name)
        except FileNotFoundError:
            return name
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            return name
    return path


def log_folder() -> str:
    """Ray's folder of logs, seen from a job: its output goes to a file there."""
    return os.path.dirname(os.readlink("/proc/self/fd/1"))


def _steps(path: str) -> Iterator[tuple[str, os.stat_result, bool]]:
    """The folders and links on the way to a path, and itself, as far as they exist."""
    step, names, links = "/", path.split("/")[::-1], 0
    yield step, os.lstat(step), any(names)
    while names:
        name = names.pop()
        above = step
        step = os.path.dirname(above) if name == ".." else os.path.join(above, name)
        if name in ("", ".", ".."):
            continue
        try:
            found = os.lstat(step)
        except OSError:  # it does not exist, or cannot be reached at all
            return
        yield step, found, any(names)
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > 40:
                return  # Linux opens nothing by it
            target = os.readlink(step)
            step = "/" if target.startswith("/") else above
            names += target.split("/")[::-1]


def _owners() -> tuple[int, ...]:
    """Ids of the users who may own what is trusted: this one, and root.

    In a user namespace without the host's root, as in many containers, root's files show the id of
    users who are not known there.
    """
    with open("/proc/self/uid_map", encoding="ascii") as file:
        has_root = any(line.split()[1] == "0" for line in file)
    if has_root:
        return 0, os.getuid()
    with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
        return 0, os.getuid(), int(file.read())


def _is_own(group: int) -> bool:
    """Whether a group is root's, or has no member but this user, as many systems make for each."""
    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return group == 0
    is_private = group == user.pw_gid and found.gr_name == user.pw_name
    return group == 0 or (is_private and set(found.gr_mem) <= {user.pw_name})


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
