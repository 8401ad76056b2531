"""Source code as text: packed in one order, compressed, in characters that no platform changes.

The pod's half, which undoes this, is ``pod.py``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import lzma
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from nemo_run_ray.cloud.pod import INDENTS

#: Kubernetes makes ``$`` of ``$$`` in a value, and Go writes ``<``, ``>`` and ``&`` as six
#: characters in JSON. Base 85 has them; these four it does not have.
_TO_SAFE = str.maketrans("$<>&", ".,/:")
#: Compressing is a matter of seconds: larger trees are done in parts, one a core.
_PART_BYTES = 5 * 1024**2
#: Preset 6, tuned to text: more of a character's high bits, none of its alignment. A lower
#: depth of search saves a fifth of the time and costs a thousandth of the size.
_FILTERS = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 6,
        "dict_size": 1 << 24,
        "depth": 20,
        "lc": 4,
        "lp": 0,
        "pb": 0,
    }
]


@dataclass(frozen=True)
class File:
    """A file of the tree.

    Attributes:
        content: its bytes.
        is_executable: whether its owner may execute it.
    """

    content: bytes
    is_executable: bool = False


@dataclass(frozen=True)
class Link:
    """A symbolic link of the tree.

    Attributes:
        target: relative to the link's folder.
    """

    target: str


Entry = File | Link


def pack(tree: Mapping[str, Entry]) -> bytes:
    """All of a tree in one piece; the same tree gives the same bytes.

    The first line is JSON: ``[[path, size, is_executable], [path, target], …]``, sorted by path;
    the contents follow in that order.

    Args:
        tree: by path, relative, with ``/``.
    """
    rows: list[list[object]] = []
    contents = []
    for path, entry in sorted(tree.items()):
        if isinstance(entry, Link):
            rows.append([path, entry.target])
        else:
            rows.append([path, len(entry.content), int(entry.is_executable)])
            contents.append(entry.content)
    index = json.dumps(rows, separators=(",", ":")).encode()
    return b"\n".join([index, b"".join(contents)])


def digest(packed: bytes) -> str:
    """SHA-256 of what ``pack`` made, in hexadecimal."""
    return hashlib.sha256(packed).hexdigest()


def encode(packed: bytes) -> str:
    """Compressed text: ASCII without quotes, backslashes, ``$``, ``<``, ``>`` and ``&``."""
    short = _shorten(packed)
    count = -(-len(short) // _PART_BYTES)
    size = -(-len(short) // count)
    parts = [short[start : start + size] for start in range(0, len(short), size)]
    with ThreadPoolExecutor() as pool:  # the compressor lets other threads run
        compressed = b"".join(pool.map(_compress, parts))
    return base64.b85encode(compressed).decode("ascii").translate(_TO_SAFE)


def _shorten(packed: bytes) -> bytes:
    """Code with a byte for each indentation, which is a sixth of it and slow to compress.

    The first line has those bytes, in the order of ``INDENTS``: bytes that the rest has not, and
    fewer or none where it has them all.
    """
    unused = (bytes([value]) for value in range(256) if value not in packed)
    marks = list(islice(unused, len(INDENTS)))
    for mark, indent in zip(marks, INDENTS, strict=False):
        packed = packed.replace(indent, mark)
    return b"\n".join([b"".join(marks), packed])


def _compress(part: bytes) -> bytes:
    return lzma.compress(part, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=_FILTERS)


def chunks(text: str, size_chars: int) -> list[str]:
    """The text in pieces of at most that many characters."""
    return [text[start : start + size_chars] for start in range(0, len(text), size_chars)]
