"""An array in a chain goes on without its client, and is looked at from another machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import tool, wait_for
from tests.hosts.conftest import TOKEN, bed
from tests.hosts.detached_sweep import COUNT

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


def test_an_array_is_seen_and_cut_short_from_another_machine(hosts, unique, tmp_path):
    laptop, elsewhere, work = (tmp_path / name for name in ("laptop", "elsewhere", "work"))
    for folder in (laptop, elsewhere, work):
        folder.mkdir()
    client = Path(__file__).with_name("detached_sweep.py")
    given = [f"NEMORUN_HOME={laptop}", f"RAY_AUTH_TOKEN={TOKEN}", f"HOME={laptop}"]
    command = [sys.executable, str(client), hosts.cluster.url, unique, str(work)]
    bed(
        "exec", "n5", "--", "sh", "-c", f"env {' '.join([*given, *command])} > /dev/null 2>&1; true"
    )
    bed("cut", "n5")
    try:
        (exp_dir,) = laptop.glob(f"experiments/{unique}/*")
        name = exp_dir.name
        shutil.move(exp_dir, elsewhere / "experiments" / unique / name)
        env = {**os.environ, "NEMORUN_HOME": str(elsewhere), "RAY_AUTH_TOKEN": TOKEN}

        def ask(*words: str) -> subprocess.CompletedProcess:
            done = tool("nemo-run-ray", *words, env=env)
            assert done.returncode == 0, done.stdout + done.stderr
            return done

        def counts() -> dict[str, int]:
            jobs = {one["job"]: one for one in json.loads(ask("status", name, "--json").stdout)}
            return jobs["sweep"]

        wait_for(lambda: counts().get("succeeded") == 500, within_s=180)
        assert ask("logs", name, "--job", "sweep", "--element", "17").stdout == "17| n17 is 17\n"
        wait_for(lambda: " running " in _table(ask, name, "running"), within_s=60)

        cut = ask("cancel", name, "--job", "sweep", "--elements", f"480-520,900-{COUNT - 1}")
        states = [line.split()[1] for line in cut.stdout.splitlines()[1:]]
        assert states == ["succeeded"] * 20 + ["cancelled"] * (21 + COUNT - 900)
        assert "env.NAME=n999" in cut.stdout

        (work / "go").touch()
        wait_for((work / "report").exists, within_s=180)
        found = counts()
        kinds = found["succeeded"], found["cancelled"], found["failed"]
        assert kinds == (COUNT - 121, 121, 0)
        begun = (work / "begun").read_text().split()
        assert len(set(begun)) == len(begun), "none was begun twice"
        assert len(begun) == int((work / "report").read_text())
        assert not {str(index) for index in range(900, COUNT)} & set(begun)
    finally:
        bed("heal", "n5")


def _table(ask, name: str, selection: str) -> str:
    return str(ask("status", name, "--job", "sweep", "--elements", selection).stdout)
