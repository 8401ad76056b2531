"""Size limits of Lepton and DGX Cloud: a variable, all variables, and the Kubernetes object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_run_ray.errors import SourceTooLarge

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


def check(
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
