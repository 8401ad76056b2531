"""The files of a folder that are sent: their names, links among them, and their contents."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from nemo_run_ray.errors import TransportError
from nemo_run_ray.transport.encode import Entry, File, Link


def walk(root: Path, start: Path, skipped: Collection[str] = ("__pycache__",)) -> Iterator[str]:
    """The names of all files and links at or below a path, relative to the root.

    Args:
        root: of the tree.
        start: a file, a link, or a folder.
        skipped: names of folders that are not looked into.

    Raises:
        TransportError: a folder cannot be read.
    """
    if start.is_symlink() or not start.is_dir():
        yield start.relative_to(root).as_posix()
        return

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error)

    for folder, folders, files in os.walk(start, onerror=refuse):
        links = [subfolder for subfolder in folders if Path(folder, subfolder).is_symlink()]
        for name in files + links:
            yield Path(folder, name).relative_to(root).as_posix()
        folders[:] = sorted(
            subfolder
            for subfolder in folders
            if subfolder not in links and subfolder not in skipped
        )


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names it, a folder that it is in, or a part of its path."""
    path = PurePosixPath(name)
    wholes = [name, *(str(parent) for parent in path.parents)]
    return any(
        fnmatch.fnmatchcase(part, str(PurePosixPath(pattern)))
        for pattern in patterns
        for part in (*wholes, *path.parts)
    )


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
