"""The text of a log, out of the JSON of Ray's Jobs API or the bytes of its state API."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterable, Iterator

from nemo_run_ray.errors import StreamCut

#: Characters within which the log begins; its text is the only field of Ray's answer.
_BEGIN_MAX = 1000
#: The body of a complete escape sequence, or of a plain run, inside a JSON string.
_JSON_TEXT = re.compile(
    r'(?:[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*"
)


def decode_text(pieces: Iterable[bytes]) -> Iterator[str]:
    """The text as Ray's Jobs API reads it: every end of a line is ``\\n``. No byte is lost."""
    utf8 = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    for piece in pieces:
        text = decoder.decode(piece)
        if text:
            yield text
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest


def decode_log(pieces: Iterator[str]) -> Iterator[str]:
    """The text in ``{"logs": "…"}``, decoded piece by piece: a log need not fit into memory."""
    buffer = ""
    inside = False
    for piece in pieces:
        buffer += piece
        if not inside:
            start = re.search(r'"logs":\s*"', buffer)
            if start is None and len(buffer) > _BEGIN_MAX:
                break
            if start is None:
                continue
            buffer, inside = buffer[start.end() :], True
        complete = _JSON_TEXT.match(buffer)
        end = complete.end() if complete is not None else 0
        if end:
            yield json.loads(f'"{buffer[:end]}"', strict=False)
        if buffer[end : end + 1] == '"':
            return
        buffer = buffer[end:]
    raise StreamCut("the log's JSON ended early" if inside else "the answer has no log")
