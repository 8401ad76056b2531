"""Errors of this package that end a program: one paragraph, as on the command line.

They are about a value that the user gave, or about the network. The line of the user's program says
where; the frames of NeMo-Run, and the causes in httpx and other libraries, tell the user nothing.
A program that catches the error has them: nothing is taken from it. Other errors are not touched.
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import nemo_run
from nemo_run.config import get_nemorun_home
from rich.markup import escape

from nemo_run_ray.errors import NO_SPACE, NemoRunRayError, shown

#: Environment variable that brings the tracebacks back, for a report of a fault of this package.
VARIABLE = "NEMO_RUN_RAY_TRACEBACK"
_LIBRARIES = (Path(__file__).parent, Path(nemo_run.__file__).parent)
_PYTHONS = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


def install() -> None:
    """Let Python print such an error as a paragraph; a second call changes nothing."""
    before = sys.excepthook
    if getattr(before, "_of_nemo_run_ray", False):
        return

    def excepthook(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        if isinstance(error, NemoRunRayError) and not needs_traceback(error):
            print(paragraph(error, frames), file=sys.stderr)
        elif getattr(error, "_is_explained", False) and not os.environ.get(VARIABLE):
            print(shown(str(error)), file=sys.stderr)
        elif isinstance(error, OSError) and _is_of_a_full_disk(error):
            print(shown(_full(error, frames)), file=sys.stderr)
        else:
            before(kind, error, frames)

    excepthook._of_nemo_run_ray = True  # type: ignore[attr-defined]
    sys.excepthook = excepthook


def as_markup(text: str) -> str:
    """The markup of ``rich`` that shows this text, whatever is in it."""
    return escape(shown(text))


def explained(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """The interrupt, marked so that it ends a program with its text alone, without its frames."""
    interrupt._is_explained = True  # type: ignore[attr-defined]
    return interrupt


def needs_traceback(error: BaseException) -> bool:
    """Whether the traceback is asked for, or tells of an error that the user's program handled."""
    if os.environ.get(VARIABLE):
        return True
    seen: BaseException | None = error
    while seen is not None:
        if not isinstance(seen, NemoRunRayError) and _is_of_the_user(seen):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def paragraph(error: NemoRunRayError, frames: TracebackType | None) -> str:
    """The error, and the line of the user's program that led to it."""
    kind = type(error)
    notes = getattr(error, "__notes__", ())
    text = "\n".join([f"{kind.__module__}.{kind.__qualname__}: {error}", *notes])
    text = shown(_elsewhere(error) + text)
    place = _place(frames)
    hint = f"{VARIABLE}=1 shows the traceback"
    return f"{text}\n({place}; {hint})" if place else f"{text}\n({hint})"


def _is_of_a_full_disk(error: OSError) -> bool:
    """Whether NeMo-Run or this package had no room for a file, and no traceback is asked for."""
    if error.errno not in NO_SPACE or os.environ.get(VARIABLE):
        return False
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    below = list(itertools.dropwhile(lambda file: not _is_in(file, _LIBRARIES), files))
    # The user's own function may run below NeMo-Run, and meet the full disk itself.
    installed = (*_LIBRARIES, *_PYTHONS)
    return bool(below) and all(file[:1] == "<" or _is_in(file, installed) for file in below)


def _is_in(file: str, folders: Iterable[Path]) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)


def _full(error: OSError, frames: TracebackType | None) -> str:
    file = error.filename or f"A file in {get_nemorun_home()}"
    return (
        f"{file} cannot be written: {error.strerror}. Jobs that were handed over before continue: "
        "`nemo-run-ray status` shows them. Make room, or name another home by NEMORUN_HOME.\n"
        f"({_place(frames)}; {VARIABLE}=1 shows the traceback)"
    )


def _elsewhere(error: BaseException) -> str:
    """The traceback of its cause in the process where the user's function has raised it."""
    cause = error.__cause__
    while cause is not None:
        text = getattr(cause, "traceback_elsewhere", "")
        if text:
            return f"{text.strip()}\n\n"
        cause = cause.__cause__
    return ""


def _is_of_the_user(error: BaseException) -> bool:
    """Whether the user's program caught it, and no library did."""
    frames = traceback.extract_tb(error.__traceback__, limit=1)
    return bool(frames) and not _is_in(frames[0].filename, (*_LIBRARIES, *_PYTHONS))


def _place(frames: TracebackType | None) -> str:
    """The last line before NeMo-Run or this package was called."""
    found = ""
    for frame in traceback.extract_tb(frames):
        if _is_in(frame.filename, _LIBRARIES):
            break
        found = f"{frame.filename}, line {frame.lineno}"
    return found
