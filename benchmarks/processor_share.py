"""The same share of a processor for each of many hosts on one machine.

Hosts of a real cluster have processors of their own. On one machine each gets less of the two there
are, the more hosts there are; with a share of its own a host is as slow among four as among many.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_PERIOD_US = 100_000
#: Version 1 of control groups has a hierarchy for processors alone, version 2 one for all.
_VERSION_1, _VERSION_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_PROCESSES = "cgroup.procs"


@contextmanager
def processor_share(hosts: Mapping[str, Iterable[int]], share: float) -> Iterator[None]:
    """Let the processes of each host, and what they start, have no more than a share meanwhile.

    Args:
        hosts: processes by host.
        share: of one processor.

    Raises:
        OSError: this machine lets nobody limit processors.
    """
    root = _VERSION_1 if _VERSION_1.is_dir() else _VERSION_2
    own = root / f"nrr-bench-{os.getpid()}"
    groups = [own / host for host in hosts]
    try:
        own.mkdir()
        if root == _VERSION_2:
            (own / "cgroup.subtree_control").write_text("+cpu")
        for group, processes in zip(groups, hosts.values(), strict=True):
            group.mkdir()
            _limit(group, round(share * _PERIOD_US), root == _VERSION_2)
            for process in processes:
                (group / _PROCESSES).write_text(str(process))
        yield
    finally:
        for group in filter(Path.is_dir, [*groups, own]):
            _leave(group, root)


def _limit(group: Path, quota_us: int, is_version_2: bool) -> None:
    if is_version_2:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))


def _leave(group: Path, root: Path) -> None:
    """Move the group's processes out, also those that are started meanwhile, and remove it."""
    for _ in range(100):
        for process in (group / _PROCESSES).read_text().split():
            with suppress(OSError):  # it has ended
                (root / _PROCESSES).write_text(process)
        with suppress(OSError):  # a process has come
            group.rmdir()
            return
        time.sleep(0.05)
    raise OSError(f"the control group {group} is not empty")
