"""What the log of `ray start` says of an embedded Ray that did not come up, or has died."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

#: How much of the log of `ray start` a message shows. A failed start ends with some lines that say
#: nothing, behind those that say why.
_LINES_SHOWN, _LINE_MAX = 6, 300
#: A pattern of the lines in which `ray start` says how to use what it has started.
_GREETING = re.compile(r"\s(?:INFO|SUCC) \w+\.py:\d+ -- ")
#: What Ray's processes had logged before: their states, information and warnings; and their errors.
_CHATTER = re.compile(r"\[state-dump\]|\[\d{4}-\d\d-\d\d [\d:,.]+ [IW] \d")
_SERIOUS = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,.]+ [ECF] \d")
#: Where `ray start` begins and ends to repeat the log of a process that has died.
_REPEATED = re.compile(r"----- (BEGIN|END) (\S+) tail")
_RAYLET_LOG = "raylet.out"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def end_of_log(path: Path) -> str:
    """The last lines that `ray start` printed, with the path of the file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"Its log {path} cannot be read: {error.strerror}."
    lines = list(_telling(_COLOUR.sub("", text).splitlines()))
    if path.name == _RAYLET_LOG:  # states and statistics, but for its errors
        lines = [line for line in lines if _SERIOUS.search(line)]
    if not lines:
        return (
            f"Its log {path} does not say why. A process that is killed without a word has often "
            "met the machine's out-of-memory killer."
        )
    shown = "\n".join(f"  {line[:_LINE_MAX]}" for line in lines[-_LINES_SHOWN:])
    return f"The end of its log {path}:\n{shown}"


def _telling(lines: Iterable[str]) -> Iterator[str]:
    """What `ray start` says beside how it is used, and beside its processes' own logs.

    What a process has logged of itself is repeated in full, other programs' tracebacks among it;
    of that only errors are taken. What a library printed at its death is in its ``.err`` file.
    """
    is_log = False
    for line in lines:
        mark = _REPEATED.search(line)
        if mark:
            is_log = mark[1] == "BEGIN" and mark[2].endswith(".out")
        elif not line.strip() or _GREETING.search(line) or _CHATTER.search(line):
            continue
        elif not is_log or _SERIOUS.search(line):
            yield line.rstrip()
