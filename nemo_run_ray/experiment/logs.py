"""Following a job's log: every line once, in order, whatever happens to the connection.

Both ways to read a log begin at its first character and deliver the same text, so a reader's place
is the number of characters that it has passed on.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from nemo_run_ray.errors import JobError, StreamCut, Unanswered
from nemo_run_ray.remote.end_record import PREFIX

log = logging.getLogger(__name__)

#: A longer line is passed on in pieces of this many characters.
LINE_MAX_CHARS = 1024**2
#: Characters that hold the longest line of an end record.
_ENDING_CHARS = 2**14
#: The two ways to read a log, as the argument of ``read``.
_AS_IT_GROWS, _WHOLE = False, True
#: Barren rounds, which are those without new text, until one round reads the whole log.
_BARREN_ROUNDS = 3
#: Attempts to read the log of a job that is over, without progress, before that is an error.
_ROUNDS_AFTER_END = 6
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
#: Ray's line after which a log has only lines of the command and of this package begins so.
#: Ray writes it into a buffer, which may be flushed when the command has printed something already.
_ENTRYPOINT = "Running entrypoint for job "
#: Ray's own lines before the line of the entrypoint.
OF_RAY = re.compile(r"\d{4}-\d\d-\d\d .* job_manager\.py:\d+ -- ")
#: One of Ray's own lines, which tells the reader nothing when the job never started.
_SETTING_UP = re.compile(rf"{OF_RAY.pattern}Runtime env is setting up\.")
#: Maximum number of lines that are held back before the line of the entrypoint: a Ray that words
#: that line otherwise must not hide a log.
_HEAD_MAX_LINES = 1000


def _ways(over: bool, barren: int, failures: int) -> list[bool]:
    """The ways in which one round of ``follow`` reads the log, in this order."""
    if barren >= _BARREN_ROUNDS or (over and failures % 2 == 0):
        # The WebSocket needs two seconds before its first text; some proxies pass on none.
        return [_WHOLE]
    if over:
        # The whole log broke off, because it is huge, so it comes by the WebSocket. That may stop
        # early: then the job's last lines come the other way.
        return [_AS_IT_GROWS, _WHOLE]
    return [_AS_IT_GROWS]


def follow(
    read: Callable[[bool], Iterator[str]],
    is_over: Callable[[], bool],
    end_marks: tuple[str, ...],
    sleep: Callable[[float], None],
) -> Iterator[str]:
    """The log's text until the job is over and all of it has been passed on.

    The stream's end only means "look again". All has been passed on when the job is over and the
    log ends with the remote half's last line. Where that line is missing (the remote half was
    killed, or a line beyond the WebSocket's limit stopped the stream early), the whole log is read
    the other way, and once more a second later.

    Args:
        read: the text from the start on: all that there is now (``True``), or by the WebSocket, as
            it grows. Either may end or break at any time.
        is_over: whether the job is terminal, which it remains.
        end_marks: how the remote half may begin the last line of this job's log. It says that the
            log is complete and nothing about the job.
        sleep: waits so many seconds between two attempts.

    Raises:
        ClusterError: the job is over and its log cannot be read, or the cluster wants other
            credentials. An outage while the job continues is waited for.
        JobError: there is no such log.
    """
    place, ending = 0, ""  # characters that were passed on, and the last ones
    over = is_complete = False
    was_read_after_end = False  # one whole round has read the log after the job's end
    # barren: rounds without new text; after three of them one round reads the whole log, and the
    # count starts again. failures: rounds in a row that failed without new text.
    barren = failures = 0
    while True:
        before = place
        try:
            over = over or is_over()
            for way in _ways(over, barren, failures):
                if is_complete:
                    break
                for fresh in beyond(place, read(way)):
                    place += len(fresh)
                    ending = (ending + fresh)[-_ENDING_CHARS:]
                    yield fresh
                    last_line = ending.removesuffix("\n").rpartition("\n")[2]
                    is_complete = last_line.startswith(end_marks) and ending.endswith("\n")
                    if is_complete:
                        break  # the server would keep the stream open for seconds more
            if over and (is_complete or was_read_after_end):
                return
            failures, was_read_after_end = 0, over
        except (Unanswered, StreamCut) as error:  # the next round continues at this place
            failures = 0 if place > before else failures + 1
            if over and failures >= _ROUNDS_AFTER_END:
                raise
            if failures == _BARREN_ROUNDS and not over:
                log.warning("The log continues when the cluster answers again: %s", error)
        if place > before or barren >= _BARREN_ROUNDS:
            barren = 0
        else:
            barren += 1
        # A job whose first process was killed is over for Ray before the others have said why.
        sleep(1.0 if was_read_after_end else _PAUSES_S[min(barren, len(_PAUSES_S) - 1)])


def beyond(place: int, texts: Iterable[str]) -> Iterator[str]:
    """The text behind its first ``place`` characters."""
    for text in texts:
        if text[place:]:
            yield text[place:]
        place = max(0, place - len(text))


def attempt_mark(nonce: str) -> str:
    """The beginning of the line that separates the logs of a job's attempts.

    The nonce tells it from a line that the task has printed.
    """
    return f"{PREFIX}attempt {nonce[:8]}: "


def output_of(
    texts: Iterable[str], end_marks: tuple[str, ...], attempt_marks: tuple[str, ...] = ()
) -> Iterator[str]:
    """The output of the task: the log without the lines before its start and the end record.

    A line that has no end yet is passed on, as far as it is there, when it cannot be one of ours.
    The head of the log of a job that never started is all that there is, and is passed on.
    """
    # The lines before the line of the entrypoint; ``None`` when that line has been read.
    head: list[str] | None = []
    at_start = True  # the next text begins a line: no part of that line was passed on

    def is_tasks(begun: str) -> bool:
        may_be_ours = PREFIX.startswith(begun) or begun.startswith(PREFIX)
        return head is None and not (at_start and may_be_ours)

    try:
        for line in lines(texts, "\r\n", is_tasks):  # a progress bar returns to its beginning
            was_at_start, at_start = at_start, line.endswith(("\r", "\n"))
            if head is None and not was_at_start:
                yield line
                continue
            if line.startswith(end_marks):
                continue
            if line.startswith(attempt_marks):
                yield from head or ()  # the lines of an attempt that never started
                yield f"{PREFIX}attempt {line.rpartition(' ')[2]}"
                head = []
            elif head is None:
                yield line
            elif _ENTRYPOINT in line:
                yield from (printed for printed in head if not OF_RAY.match(printed))
                head, early = None, line.partition(_ENTRYPOINT)[0]
                if early:  # the task's words, which Ray's line has cut in two
                    yield early
            elif not _SETTING_UP.match(line):
                head.append(line)
                if len(head) > _HEAD_MAX_LINES:
                    yield from head
                    head = None
    except Exception:
        yield from head or ()
        raise
    yield from head or ()


def lines(
    texts: Iterable[str], ends: str = "\n", at_once: Callable[[str], bool] = lambda _: False
) -> Iterator[str]:
    """Complete lines with their ends; a very long one in pieces, the last one as it is."""
    # str.splitlines also cuts at form feeds and the like, which are no line's end in a log.
    end = re.compile(f"(?<=[{ends}])")
    line = ""
    try:
        for text in texts:
            for piece in end.split(text):
                line += piece
                if piece.endswith(tuple(ends)) or len(line) >= LINE_MAX_CHARS:
                    yield from _pieces(line)
                    line = ""
            if line and at_once(line):
                yield from _pieces(line)
                line = ""
    except Exception:
        yield from _pieces(line)
        raise
    yield from _pieces(line)


def _pieces(line: str) -> Iterator[str]:
    return (line[at : at + LINE_MAX_CHARS] for at in range(0, len(line), LINE_MAX_CHARS))


def last_lines(
    log_text: Callable[[bool], Iterator[str]], count: int, is_followed: bool
) -> Iterator[str]:
    """The last lines of a log and, if it is followed, then what it grows by until its end.

    ``log_text(True)`` follows the log to its end, ``log_text(False)`` is the text that is there.
    """
    passed, end = 0, deque[str](maxlen=count)
    try:
        for line in lines(log_text(False)):
            passed += len(line)
            end.append(line)
    except JobError:  # it has not begun
        if not is_followed:
            raise
    yield from end
    if is_followed:
        yield from beyond(passed, log_text(True))


def only(who: str, pieces: Iterable[str]) -> Iterator[str]:
    """The lines of one role of a group, of one replica ``role/0``, or of the element ``17``."""
    replica = "" if re.search(r"(^|/)\d+$", who) else r"/\d+"
    begins = re.compile(rf"{re.escape(who)}{replica}\| ")
    wanted, whole = False, True
    for piece in pieces:
        if whole:  # else it continues a line that was too long
            wanted = begins.match(piece) is not None
        whole = piece.endswith("\n")
        if wanted:
            yield piece
