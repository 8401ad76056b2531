"""Runs jobs through a proxy that misbehaves, and kills clients, with a seed.

``python chaos.py URL RUNS SEED WORKERS TROUBLE_S`` prints one JSON object per run: what was done,
and every promise that was broken. The token is taken from RAY_AUTH_TOKEN.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import nemo_run as run
from nemo_run.config import set_nemorun_home

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flaky_proxy import Answer500, CutAfter, CutBefore, DropAnswer, Fault, FlakyProxy, Hang

from nemo_run_ray import ExistingCluster, RayExecutor
from nemo_run_ray.cli import main as cli
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.experiment.job import RemoteJob, jobs_of
from nemo_run_ray.experiment.store import Ledger

NETWORK = ("drop answer", "cut before", "errors while waiting", "hang while waiting", "cut logs")
KILLS = (
    *("after intent", "before post", "late post"),
    *("before answer", "after answer", "after submitted"),
)
#: Seconds that the network holds a dead client's request back: its heir acts meanwhile.
LATE_S = 4.0
LINES = 40
END_S = 240


class Kill(Fault):
    """SIGKILL for the client at one moment of its POST."""

    def __init__(self, moment: str, pid: int) -> None:
        self._moment, self._pid = moment, pid

    def before(self) -> bool:
        if self._moment in ("before post", "late post"):
            os.kill(self._pid, signal.SIGKILL)
        if self._moment == "late post":
            time.sleep(LATE_S)
        return self._moment != "before post"

    def forwarded(self) -> None:
        if self._moment == "before answer":
            os.kill(self._pid, signal.SIGKILL)

    def answer(self, data: bytes) -> bytes | None:
        if self._moment == "after answer":
            os.kill(self._pid, signal.SIGKILL)
        return data


class Trouble:
    """Chooses the faults of one run's requests."""

    def __init__(self, kind: str, chance: random.Random, seconds: float) -> None:
        self.kind = kind
        self.pid = 0
        self._chance = chance
        self._seconds = seconds
        self._posts = 0
        self._trouble_until: float | None = None

    def __call__(self, line: str) -> Fault:
        if line.startswith("POST /api/jobs/ "):
            self._posts += 1
            if self.kind in KILLS and self.pid:
                return Kill(self.kind, self.pid)
            if self._posts == 1 and self.kind == "drop answer":
                return DropAnswer()
            if self._posts == 1 and self.kind == "cut before":
                return CutBefore()
        if self._posts and self.kind in ("errors while waiting", "hang while waiting"):
            if self._trouble_until is None:
                self._trouble_until = time.monotonic() + self._seconds
            if time.monotonic() < self._trouble_until:
                hang = self.kind == "hang while waiting"
                return Hang(self._trouble_until) if hang else Answer500()
        if self.kind == "cut logs" and "/logs/tail" in line:
            return CutAfter(self._chance.uniform(0.1, 2.0))
        return Fault()


def one_run(url: str, number: int, seed: int, seconds: float) -> dict:
    chance = random.Random(f"{seed}/{number}")
    kinds = (*NETWORK, *KILLS)
    kind = kinds[number % len(kinds)]
    title = f"chaos{seed}n{number}"
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    ran = folder / "ran"
    report: dict = {"run": number, "kind": kind, "broken": []}
    script = run.Script(
        inline=f"echo $$ >> {ran}\nfor i in $(seq {LINES}); do echo line $i; sleep 0.05; done\n"
    )
    trouble = Trouble(kind, chance, seconds)
    set_nemorun_home(str(folder))
    with FlakyProxy(url, trouble) as proxy:
        output = folder / "client.out"
        client = _fork(lambda: _client(proxy.url, title, script, kind), output)
        trouble.pid = client.pid
        client.join(END_S)
        if kind in KILLS:
            if client.exitcode != -signal.SIGKILL:
                report["broken"].append(
                    f"the client was to be killed, its exit is {client.exitcode}"
                )
            trouble.pid = 0
            heir = _fork(lambda: _heir(folder), folder / "heir.out")
            heir.join(END_S)
            if heir.exitcode != 0:
                report["broken"].append(f"heir: {(folder / 'heir.out').read_text()[-2000:]}")
        elif client.exitcode != 0:
            report["broken"].append(f"client: {output.read_text()[-2000:]}")
        else:
            shown = re.findall(r"^\S+/0 line (\d+)$", _plain(output.read_text()), re.M)
            _expect(report, "lines that NeMo-Run showed", shown, [str(i + 1) for i in range(LINES)])
        client.kill()
    try:
        _check(report, url, folder, title, ran)
    except Exception:
        report["broken"].append(traceback.format_exc())
    return report


def _client(url: str, title: str, script: run.Script, kind: str) -> None:
    """What a user's script does."""
    write_all = Ledger.write_all

    def write_and_die(self: Ledger, events: list) -> None:
        write_all(self, events)
        if kind == f"after {events[0][0]}":
            os.kill(os.getpid(), signal.SIGKILL)

    Ledger.write_all = write_and_die  # type: ignore[method-assign]
    executor = RayExecutor(cluster=ExistingCluster(url=url))
    run.run(script, executor=executor, name=title)


def _heir(folder: Path) -> None:
    """What a user does in a new process after his script was killed."""
    (experiment_dir,) = (folder / "experiments").glob("*/*")
    experiment = run.Experiment.from_id(experiment_dir.name)
    experiment.status()
    cli.resume(experiment_dir.name)
    deadline = time.monotonic() + END_S / 2
    while True:
        (status,) = run.Experiment.from_id(experiment_dir.name).status(return_dict=True).values()
        if str(status["status"]) == "SUCCEEDED":
            return
        if time.monotonic() > deadline:
            sys.exit(f"still {status} after {END_S / 2} s")
        time.sleep(1.5)


def _check(report: dict, url: str, folder: Path, title: str, ran: Path) -> None:
    from nemo_run_ray.clusters import Dashboard

    dashboard = Dashboard(url, {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"})
    rows = {
        one: row for one, row in JobsApi(dashboard).table().items() if one.startswith(f"{title}_")
    }
    _expect(report, "jobs on the cluster", len(rows), 1)
    _expect(report, "state", [row["status"] for row in rows.values()], ["SUCCEEDED"])
    _expect(report, "runs of the command", len(ran.read_text().split()) if ran.exists() else 0, 1)
    (experiment_dir,) = (folder / "experiments").glob("*/*")
    (job,) = jobs_of(experiment_dir)
    direct = RemoteJob(job.record)
    direct.cluster = ExistingCluster(url=url)  # the proxy is gone
    lines = re.findall(r"^line (\d+)$", "".join(direct.log(follow=True)), re.M)
    _expect(report, "lines of the log", lines, [str(i + 1) for i in range(LINES)])


def _expect(report: dict, what: str, found: object, expected: object) -> None:
    if found != expected:
        report["broken"].append(f"{what}: found {found}, expected {expected}")


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _fork(work, output: Path) -> multiprocessing.Process:
    def child() -> None:
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


def main(url: str, runs: int, seed: int, workers: int, seconds: float) -> None:
    numbers = list(range(runs))
    random.Random(seed).shuffle(numbers)  # or one worker would get all the slow kinds

    def share(worker: int) -> None:
        for number in numbers[worker::workers]:
            try:
                report = one_run(url, number, seed, seconds)
            except Exception:
                report = {"run": number, "kind": "?", "broken": [traceback.format_exc()]}
            os.write(1, f"{json.dumps(report)}\n".encode())  # whole lines, from all workers

    processes = [
        multiprocessing.get_context("fork").Process(target=share, args=(worker,))
        for worker in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
