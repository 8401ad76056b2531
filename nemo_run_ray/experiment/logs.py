"""Following a job's log: every line once, in order, whatever happens to the connection.

Both ways to read a log begin at its first character and deliver the same text, so a reader's place
is the number of characters that it has passed on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from nemo_run_ray.errors import StreamCut, Unanswered
from nemo_run_ray.remote.node.output import PREFIX

log = logging.getLogger(__name__)

#: A longer line is passed on in pieces of this many characters.
LINE_MAX_CHARS = 1024**2
_BARREN_ROUNDS = 3
#: Attempts to read the log of a job that is over, without progress, before that is an error.
_ROUNDS_AFTER_END = 6
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
#: A job whose first process was killed is over for Ray before its other processes have said why.
_LAST_WORDS_S = 1.0
#: Ray's line after which a log has only lines of the command and of this package begins so.
#: Ray writes it into a buffer, which may be flushed when the command has printed something already.
_ENTRYPOINT = "Running entrypoint for job "
#: Ray's own lines before that one.
OF_RAY = re.compile(r"\d{4}-\d\d-\d\d .* job_manager\.py:\d+ -- ")
#: The one of them that says nothing to who reads the log of a job that never started.
_SETTING_UP = "-- Runtime env is setting up."
#: Lines before that one that are held back: a Ray that words it otherwise must not hide a log.
_HEAD_MAX_LINES = 1000


class LogSource(Protocol):
    """The source of a log: ``JobsApi`` and the job's state, bound to one job."""

    def tail(self) -> Iterator[str]:
        """The text from the start on, as it grows; may end or break at any time."""

    def whole(self) -> Iterator[str]:
        """The text that there is now."""

    def is_over(self) -> bool:
        """Whether the job is terminal. Raises ``ClusterError`` when that cannot be told."""


def follow(
    source: LogSource, end_marks: tuple[str, ...], sleep: Callable[[float], None]
) -> Iterator[str]:
    """The log's text until the job is over and all of it has been passed on.

    The stream's end only means "look again". All has been passed on when the job is over and the
    log ends with the remote half's last line. Where that line is missing (the remote half was
    killed, or a line beyond the WebSocket's limit stopped the stream early), the whole log is read
    the other way, and once more a second later.

    Args:
        source: where to read.
        end_marks: how the remote half may begin the last line of this job's log. It says that the
            log is complete and nothing about the job.
        sleep: waits so many seconds between two attempts.

    Raises:
        ClusterError: the job is over and its log cannot be read, or the cluster wants other
            credentials. An outage while the job goes on is waited for.
        JobError: there is no such log.
    """
    reader = _Reader(end_marks)
    barren, failures, has_waited = 0, 0, False
    while True:
        before, over = reader.place, False
        try:
            over = source.is_over()
            at_once = (over and failures % 2 == 0) or barren >= _BARREN_ROUNDS
            yield from _round(reader, source, over, at_once)
            if over and (reader.is_complete or has_waited):
                return
            failures, has_waited = 0, over
        except (Unanswered, StreamCut) as error:  # the next round goes on at this place
            failures = 0 if reader.place > before else failures + 1
            if over and failures >= _ROUNDS_AFTER_END:
                raise
            if failures == _BARREN_ROUNDS and not over:
                log.warning("The log goes on when the cluster answers again: %s", error)
        barren = 0 if reader.place > before or barren >= _BARREN_ROUNDS else barren + 1
        sleep(_LAST_WORDS_S if has_waited else _PAUSES_S[min(barren, len(_PAUSES_S) - 1)])


def _round(reader: _Reader, source: LogSource, is_over: bool, at_once: bool) -> Iterator[str]:
    """Read on by the WebSocket, or at once all that there is.

    The WebSocket needs two seconds before its first text. Where the whole log breaks off, because
    it is huge, it comes by the WebSocket after all.
    """
    if reader.is_complete:
        return
    yield from reader.read(source.whole() if at_once else source.tail())
    if is_over and not at_once and not reader.is_complete:
        yield from reader.read(source.whole())


class _Reader:
    """Passes on what lies behind its place, and knows how the text so far ends."""

    def __init__(self, end_marks: tuple[str, ...]) -> None:
        self.place = 0
        self._end_marks = end_marks
        self._line = ""  # beginning of the last line

    @property
    def is_complete(self) -> bool:
        return self._line.startswith(self._end_marks) and self._line.endswith("\n")

    def read(self, texts: Iterator[str]) -> Iterator[str]:
        skip = self.place
        for text in texts:
            fresh = text[skip:]
            skip = max(0, skip - len(text))
            if fresh:
                self.place += len(fresh)
                self._line = _last_line(self._line, fresh)
                yield fresh
                if self.is_complete:
                    return  # the server would keep the stream open for seconds more


def attempt_mark(nonce: str) -> str:
    """The beginning of the line that separates the logs of a job's attempts.

    The nonce tells it from a line that the task has printed.
    """
    return f"{PREFIX}attempt {nonce[:8]}: "


def output_of(
    texts: Iterable[str], end_marks: tuple[str, ...], attempt_marks: tuple[str, ...] = ()
) -> Iterator[str]:
    """The task's own output: the log without the lines before its start and the end record.

    The head of the log of a job that never started is all that there is, and is passed on.

    Args:
        texts: the log, in pieces of any size.
        end_marks: how the remote half may begin the last line.
        attempt_marks: how a line may begin after which the log of another attempt follows.
    """
    frame = _Frame(end_marks, attempt_marks)
    try:
        for text in texts:
            for piece in _split(text):
                yield from frame.passes(piece)
    except Exception:
        yield from frame.rest()
        raise
    yield from frame.rest()


class _Frame:
    """Takes a log's frame away, and holds back no more than it needs to know what a line is."""

    def __init__(self, end_marks: tuple[str, ...], attempt_marks: tuple[str, ...]) -> None:
        self._end_marks = end_marks
        self._attempt_marks = attempt_marks
        self._head: list[str] = []
        self._in_head = True
        self._begun = ""  # beginning of a line that may be a part of the frame
        self._at_start = True

    def passes(self, piece: str) -> Iterator[str]:
        """The part of a line, or of its beginning, that the task has printed."""
        if not self._at_start:
            self._at_start = piece.endswith("\n")
            yield piece
            return
        self._begun += piece
        is_whole = self._begun.endswith("\n")
        if not is_whole and (self._in_head or self._may_be_ours()):
            return
        line, self._begun, self._at_start = self._begun, "", is_whole
        if self._in_head:
            yield from self._of_head(line)
        elif line.startswith(self._attempt_marks):
            self._in_head = True
            yield self._readable(line)
        elif not line.startswith(self._end_marks):
            yield line

    def rest(self) -> Iterator[str]:
        """The lines that were held back, at the log's end."""
        # The head of a log of which only the end was kept may hold the last line too.
        yield from (line for line in self._never_started() if not line.startswith(self._end_marks))
        if self._begun and not self._begun.startswith(self._end_marks):
            yield self._begun

    def _never_started(self) -> list[str]:
        """The log of an attempt that never started."""
        return [line for line in self._head if _SETTING_UP not in line]

    def _may_be_ours(self) -> bool:
        return PREFIX.startswith(self._begun) or self._begun.startswith(PREFIX)

    def _of_head(self, line: str) -> Iterator[str]:
        early, is_entrypoint, _ = line.partition(_ENTRYPOINT)
        if is_entrypoint:
            frame = self._end_marks
            yield from (
                printed
                for printed in self._head
                if not (OF_RAY.match(printed) or printed.startswith(frame))
            )
            self._head, self._in_head = [], False
            if early:  # of a line that goes on behind Ray's
                self._at_start = False
                yield early
            return
        if line.startswith(self._attempt_marks):  # the last attempt never started
            yield from self._never_started()
            yield self._readable(line)
            self._head = []
            return
        self._head.append(line)
        if len(self._head) > _HEAD_MAX_LINES:
            yield from self._head
            self._head, self._in_head = [], False

    def _readable(self, separator: str) -> str:
        return f"{PREFIX}attempt {separator.rpartition(' ')[2]}"


def lines(texts: Iterator[str]) -> Iterator[str]:
    """Complete lines with their ends; a very long one in pieces, the last one as it is."""
    parts: list[str] = []
    size = 0
    for text in texts:
        for piece in _split(text):
            parts.append(piece)
            size += len(piece)
            if piece.endswith("\n") or size >= LINE_MAX_CHARS:
                yield from _pieces("".join(parts))
                parts, size = [], 0
    if parts:
        yield from _pieces("".join(parts))


def only(role: str, pieces: Iterable[str]) -> Iterator[str]:
    """The lines of one role of a group's log, or of one replica ``role/0``."""
    name = re.escape(role) if re.search(r"/\d+$", role) else rf"{re.escape(role)}/\d+"
    return _beginning(re.compile(rf"{name}\| "), pieces)


def of_element(index: int, pieces: Iterable[str]) -> Iterator[str]:
    """The lines of one element of an array's log."""
    return _beginning(re.compile(rf"{index}\| "), pieces)


def _beginning(begins: re.Pattern[str], pieces: Iterable[str]) -> Iterator[str]:
    """The lines that begin so."""
    wanted, whole = False, True
    for piece in pieces:
        if whole:  # else it goes on with a line that was too long
            wanted = begins.match(piece) is not None
        whole = piece.endswith("\n")
        if wanted:
            yield piece


def _pieces(line: str) -> Iterator[str]:
    for start in range(0, len(line), LINE_MAX_CHARS):
        yield line[start : start + LINE_MAX_CHARS]


def _split(text: str) -> Iterator[str]:
    # str.splitlines also cuts at form feeds and the like, which are no line's end in a log.
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        yield text[start:end]
        start = end


def _last_line(before: str, text: str) -> str:
    """The beginning of the last line after ``text``."""
    body = text[:-1] if text.endswith("\n") else text
    at = body.rfind("\n")
    line = before.rstrip("\n") + body if at < 0 and not before.endswith("\n") else body[at + 1 :]
    return line[:200] + ("\n" if text.endswith("\n") else "")
