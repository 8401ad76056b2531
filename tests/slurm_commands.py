"""Slurm's commands as files, without a Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

#: Each reads and writes $SLURM: `queue` has a line for each job, in the form of `squeue`.
_COMMANDS = {
    "sbatch": """\
[ ! -e "$SLURM/refuse" ] || { cat "$SLURM/refuse" >&2; exit 1; }
for word in "$@"; do case "$word" in --chdir=*) folder=${word#--chdir=};; esac; done
number=$(($(cat "$SLURM/last" 2>/dev/null || echo 100) + 1)); echo $number > "$SLURM/last"
echo "$number|PENDING|Resources|N/A|$folder" >> "$SLURM/queue"
[ ! -e "$SLURM/breaks" ] || kill -9 $PPID
echo "$number;cluster"
""",
    "squeue": """\
echo asked >> "$SLURM/asked"
[ ! -e "$SLURM/away" ] || exit 1
cat "$SLURM/queue" 2>/dev/null; exit 0
""",
    "scancel": """\
[ ! -e "$SLURM/away" ] || { echo "scancel: error: Unable to contact slurm controller" >&2; exit 1; }
for number in "$@"; do echo "$number" >> "$SLURM/cancelled"
grep -v "^$number|" "$SLURM/queue" > "$SLURM/queue.new"; mv "$SLURM/queue.new" "$SLURM/queue"; done
""",
}


def put_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put them first on the path; ``$SLURM`` and the home of NeMo-Run are below a folder."""
    for name in ("slurm", "bin"):
        (folder / name).mkdir()
    for name, text in _COMMANDS.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("SLURM", str(folder / "slurm"))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("NEMORUN_HOME", str(folder / "home"))
