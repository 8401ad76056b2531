"""The output of commands on its way into the job's log."""

from __future__ import annotations

import codecs
import io
import os
import re
from contextlib import suppress

from ..end_record import CUT, PREFIX

#: Bytes of output read at once.
CHUNK_BYTES = 65536
#: Characters after which a line of a group that does not end is cut.
LINE_MAX = 2**20


def say(text: str) -> None:
    """Write one line of this package into the job's log."""
    write(f"{PREFIX}{text}\n")


def write(text: str) -> None:
    """Write into the job's log; on a full disk the output is lost, and the job continues."""
    data = memoryview(text.encode(errors="backslashreplace"))
    with suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


def write_lines(who: str, lines: str) -> None:
    """Write whole lines, each after the name of its writer."""
    write(f"{who}| " + lines[:-1].replace("\n", f"\n{who}| ") + "\n")


def copy_end(path: str, to: str, most_bytes: int) -> None:
    """Copy a log; of one that is longer the last bytes, from the beginning of a line on."""
    import shutil  # no program needs it to start

    from ..files import replacing

    with open(path, "rb") as log, replacing(to) as file:
        start = max(0, os.fstat(log.fileno()).st_size - most_bytes)
        log.seek(start)
        if start:
            start += len(log.readline(CHUNK_BYTES))
            file.write(f"{CUT}{start} bytes of this log are not kept\n".encode())
        shutil.copyfileobj(log, file)
    shutil.copystat(path, to)  # its time says when the job was seen last


def log_end(path: str | os.PathLike[str]) -> str:
    """The last lines of a log as the end of a sentence, each behind ``| ``; empty without a log."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - 8192, 0))
        text = file.read().decode(errors="replace")
        # `ray start` says how to use Ray; its hints do not explain a failure.
        text = re.sub(r".*[ \t](INFO|SUCC) \w+\.py:\d+ -- .*", "", text)
        lines = [line.rstrip() for line in text.split("\n") if line.strip()][-12:]
        if not lines:
            return f". Its log is {path}"
        return "\n    | ".join([f". Its log, {path}, ends with:", *lines])
    return ""


def _line_decoder() -> io.IncrementalNewlineDecoder:
    """Makes of output what Ray reads in a log: strict UTF-8, and ``\\n`` as the end of a line.

    One wrong byte would end every reader's stream, so it becomes ``\\xNN``.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    return io.IncrementalNewlineDecoder(decoder, translate=True)


class Lines:
    """Cuts one process's output into lines: a line is passed on whole, or not yet."""

    def __init__(self) -> None:
        self._decoder = _line_decoder()
        self._begun = ""

    def take(self, data: bytes) -> str:
        """The lines that are complete with this; no data is the end of the output."""
        text = self._begun + self._decoder.decode(data, final=not data)
        end = text.rfind("\n") + 1
        if not data or len(text) - end > LINE_MAX:
            self._begun = ""
            return text if text.endswith("\n") or not text else f"{text}\n"
        self._begun = text[end:]
        return text[:end]


class Output:
    """Passes a command's output on to the job's log at once, without waiting for the line's end.

    All readers must count the same characters, which is how one that was cut off finds its place.
    """

    def __init__(self) -> None:
        self._decoder = _line_decoder()
        self._in_line = False

    def take(self, data: bytes) -> None:
        """Pass on what was read; no data is the end of the output.

        A last line without its end gets one, so that this package's line begins a new one.
        """
        text = self._decoder.decode(data, final=not data)
        if text:
            self._in_line = text[-1] != "\n"
        write(text if data or not self._in_line else f"{text}\n")
