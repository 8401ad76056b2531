"""CPU work that loses a host: its items are called again elsewhere, and each has one result."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.hosts.conftest import HEAD, TOKEN, Hosts, bed
from tests.hosts.test_arrays_across import FAULTS, cut_for_a_moment, cut_for_long, whole

__all__ = ["whole"]
COUNT = 100
_ROUNDS = 2


def _work(hosts: Hosts, folder: Path, fault: Callable[[], None]) -> set[str]:
    """Let a program's items lose a host; the numbers of those that were called again."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    begun, code, log = folder / "begun", folder / "code", folder / "log"
    program = Path(__file__).with_name("spread_work.py")
    root = Path(__file__).resolve().parents[2]
    given = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token} PYTHONPATH={root} HOME={folder}"
    words = f"env {given} {sys.executable} {program} {HEAD}:6379 {folder} {COUNT}"
    bed("spawn", "n1", str(log), "--", "sh", "-c", f"{words}; echo $? > {code}")

    def places() -> list[list[str]]:
        return [line.split() for line in begun.read_text().splitlines()] if begun.exists() else []

    wait_for(lambda: sum(host == "n2" for _, host in places()) >= 4, 120)
    fault()
    wait_for(code.exists, 420)
    assert code.read_text() == "0\n", log.read_text()
    results = json.loads((folder / "results").read_text())
    assert [number for number, _ in results] == list(range(COUNT)), log.read_text()
    calls = Counter(number for number, _ in places())
    again = {number for number, count in calls.items() if count > 1}
    assert all("n2" in [host for other, host in places() if other == number] for number in again)
    return again


# Ray's raylets here notice after 150 s that they are alone, and its clients after 300 s that an
# answer was lost while a cable was cut.
@pytest.mark.soak
def test_work_outlives_every_loss(hosts, tmp_path, whole):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    order = [fault for fault in FAULTS for _ in range(_ROUNDS)]
    random.Random(seed).shuffle(order)
    print(f"seed {seed}", file=sys.stderr)
    for number, fault in enumerate(order):
        folder = tmp_path / str(number)
        folder.mkdir()
        again = _work(hosts, folder, lambda fault=fault: fault(hosts, None))
        assert again or fault in (cut_for_a_moment, cut_for_long), "it hit no item"
        print(f"{number} {fault.__name__}: held", file=sys.stderr)
        whole()
        wait_for(lambda: not hosts.processes(_is_worker))


def _is_worker(pid: int, words: list[str]) -> bool:
    return words[0].startswith("ray::call_items")
