"""Source code as text: packed in one order, compressed, in characters that no platform changes.

The pod's half, which undoes this, is ``pod.py``. The size limits of Lepton and DGX Cloud are below:
a variable, all variables, and the Kubernetes object.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import lzma
import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from nemo_run_ray.cloud.pod import INDENTS
from nemo_run_ray.errors import SourceTooLarge
from nemo_run_ray.remote.files import replacing

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


def write_tar(path: str | os.PathLike[str], entries: Iterable[tuple[str, Entry]]) -> None:
    """Write a ``.tar.gz`` of the entries, without times and owners."""
    with (
        replacing(path) as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, entry in entries:
            member = tarfile.TarInfo(name)
            if isinstance(entry, Link):
                member.type, member.linkname = tarfile.SYMTYPE, entry.target
                tar.addfile(member)
            else:
                member.size = len(entry.content)
                member.mode = 0o755 if entry.is_executable else 0o644
                tar.addfile(member, io.BytesIO(entry.content))


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


#: Limit of an object in etcd, which holds it for Kubernetes: --max-request-bytes, 1.5 MiB.
_OBJECT_BYTES = 1_572_864
#: Limit of all arguments and variables of a new process: a quarter of a stack of 8 MiB, execve(2).
_PROCESS_BYTES = 2_097_152
#: Reserve for other contents: the object's status and managed fields, the platform's own variables.
_RESERVE_BYTES = 131_072
#: Approximate size of one variable's entry in the managed fields of a Kubernetes object.
_MANAGED_BYTES = 80


@dataclass(frozen=True)
class Limits:
    """The limits of one platform.

    Attributes:
        platform: its name, for messages.
        value_chars: of one variable's value.
        process_bytes: of all arguments and variables of a process.
        object_bytes: of the object that describes the workload.
        copies: how often the object repeats the variables.
    """

    platform: str
    value_chars: int
    process_bytes: int = _PROCESS_BYTES - _RESERVE_BYTES
    object_bytes: int = _OBJECT_BYTES - _RESERVE_BYTES
    copies: int = 1


#: One string of a new process is at most 128 KiB with its name and end: MAX_ARG_STRLEN, execve(2).
LEPTON = Limits("Lepton", value_chars=120_000)


def dgxcloud(nodes: int) -> Limits:
    """The limits of run:ai, which answers 400 for a value of more than 10,000 characters.

    A distributed workload holds its variables twice: for the master, and for the workers.
    """
    return Limits("DGX Cloud", value_chars=9_500, copies=2 if nodes > 1 else 1)


#: More than that is no source code, and reading and compressing it would take minutes.
MOST_SOURCE_BYTES = 200_000_000


def check_source(
    sizes: Sequence[tuple[str, int]], most_bytes: int, where: str = "ShipSource"
) -> None:
    """Refuse a tree that is too large even to be compressed.

    Args:
        sizes: the files, with their sizes in bytes.
        most_bytes: of all of them.
        where: what would send them, for the message.

    Raises:
        SourceTooLarge: they have more; the message has the limit, the size and the largest files.
    """
    found = sum(size_bytes for _, size_bytes in sizes)
    if found > most_bytes:
        largest = sorted(sizes, key=lambda file: (-file[1], file[0]))[:10]
        _refuse(where, "the files", found, most_bytes, largest)


def check_limits(
    limits: Limits,
    source: Mapping[str, str],
    others: Mapping[str, str],
    largest: Sequence[tuple[str, int]],
) -> None:
    """Refuse what the platform would refuse, or break on.

    Args:
        limits: of the platform.
        source: the variables that carry the source code.
        others: the job's other variables.
        largest: the largest files, with their sizes in bytes.

    Raises:
        SourceTooLarge: a limit is exceeded; the message has the limit, the size and the files.
    """
    variables = {**others, **source}
    for name, value in source.items():
        if len(value) > limits.value_chars:
            _refuse(
                limits.platform, f"the variable {name}", len(value), limits.value_chars, largest
            )
    process = sum(len(f"{name}={value}".encode()) + 9 for name, value in variables.items())
    if process > limits.process_bytes:
        _refuse(limits.platform, "a process's variables", process, limits.process_bytes, largest)
    listed = json.dumps([{"name": name, "value": value} for name, value in variables.items()])
    size = limits.copies * (len(listed) + _MANAGED_BYTES * len(variables))
    if size > limits.object_bytes:
        what = "the workload's description"
        if limits.copies > 1:
            what += f", which repeats the variables {limits.copies} times,"
        _refuse(limits.platform, what, size, limits.object_bytes, largest)


def _refuse(
    where: str, what: str, size: int, limit: int, largest: Sequence[tuple[str, int]]
) -> None:
    files = "\n".join(f"  {size_bytes:>10,} {name}" for name, size_bytes in largest)
    raise SourceTooLarge(
        f"The source code is too large for {where}: {what} would have {size:,} bytes, "
        f"the limit is {limit:,}. Nothing was sent. Leave something out with exclude=[…]; the "
        f"largest files are, in bytes:\n{files}"
    )
