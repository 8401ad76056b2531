"""The client's half that runs on the login node: it asks Slurm, and reads and writes the cluster's
folder.

A client sends the texts of this file and of ``remote/files.py`` with a request to ``python3 -``;
the answer is JSON. Both import the standard library alone and are written for Python 3.9.

All clients of a cluster meet in its folder, whose files ``clusters/slurm/__init__.py`` lists. The
folder of allocation N is ``lives/N``, and to give a folder that name is to claim the allocation:
one client can, on every file system, and it alone submits the job. An allocation whose client died
before Slurm had the job is passed over; should Slurm get the job after all, the job's script sees
the folder of the next allocation and ends.

The file ``stop`` ends an allocation, also where Slurm gives no answer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from os.path import exists
from pathlib import Path
from typing import Any

from nemo_run_ray.remote.files import why_untrusted, write_file

#: Seconds for an answer of Slurm's controller. All that a request does must take less time than a
#: command on a login node may take.
ANSWER_S = 15.0
#: The reason when the last user of an allocation did not wait until it was ready.
LEFT_EARLY = "its last user left before it was ready"
#: Names and formats of the columns that Slurm gives for each job of this user.
_COLUMNS = {"number": "%A", "state": "%T", "reason": "%r", "start": "%S", "folder": "%Z"}
#: Exit code of a command that took too long, as ``timeout`` has it.
_TIMED_OUT = 124
Row = dict[str, Any]


class ClusterFolder:
    """The folder of a cluster; each public method answers one request of a client."""

    def __init__(self, folder: str):
        self._folder, self._lives = folder, Path(folder, "lives")

    # ------------------------------------------------------------------ looking

    def look(self, pause_s: float) -> Row | None:
        """The newest allocation and what Slurm says of its job; ``None`` before the first one.

        Args:
            pause_s: seconds for which Slurm's last answer is taken for what it says now.
        """
        number = max((int(path.name) for path in self._lives.glob("[0-9]*")), default=0)
        if not number:
            return None
        path = self._lives / str(number)
        os.listdir(path)  # so that a shared file system looks for new files
        found: Row = {
            "number": number,
            "is_sent": exists(f"{path}/sbatch"),
            "is_renewal": exists(f"{path}/renewed"),
            "unchanged_s": time.time() - _changed_at(path),
            **{
                name: " ".join(_read(f"{path}/{name}").split())
                for name in ("claimed", "job", "over", "refused", "stop")
            },
        }
        changed_at, run = _changed_at(f"{path}/job"), _newest_run(path)
        if run:
            os.listdir(run)
            end_at = _changed_at(f"{run}/end.json")
            changed_at = max(changed_at, end_at, _changed_at(f"{run}/ready.json"))
            found["run"], found["token"] = f"run/{run.name}", _read(f"{run}/token").strip()
            found["head"], found["end"] = _json(f"{run}/ready.json"), _json(f"{run}/end.json")
            found["ended_s"] = time.time() - end_at if end_at else 0.0
        queue = self._queue(pause_s, changed_at)
        found["slurm_answered"] = queue is not None
        for row in _jobs_of(path, queue)[:1]:
            # Perhaps no client got sbatch's answer.
            found["queued"], found["job"] = row, row["number"]
        return found

    def _queue(self, pause_s: float, changed_at: float) -> Any:
        """Slurm's jobs of this user; ``None`` without an answer.

        All clients of the cluster ask once in a while, and after a change of the folder: what Slurm
        said before it proves nothing.
        """
        path, of = f"{self._folder}/queue.json", [changed_at, os.uname().nodename]
        kept = _json(path)
        if kept and kept["of"] != of:  # another host may belong to another Slurm
            kept = None
        if kept and 0 <= time.time() - kept["at"] < pause_s:
            return kept["rows"]
        rows = _squeue()
        if rows is None and kept:
            rows = kept["rows"]
        with suppress(OSError):  # a full disk
            write_file(path, json.dumps({"at": time.time(), "of": of, "rows": rows}))
        return rows

    def history(self, pause_s: float, session: str = "", number: int = 0) -> Row | None:
        """The runs whose dispatches continue in one allocation, and the newest allocation of all;
        ``None`` if none is known.

        Args:
            pause_s: as for ``look``.
            session: Ray's name of a run; the newest allocation is taken that continues the run's
                dispatches.
            number: of the allocation, if no session is given.
        """
        if session:
            paths = self._lives.glob("*/run/*/session")
            path = next((path for path in paths if _read(path).strip() == session), None)
            if not path:
                return None
            number = int(path.parts[-4])
            while exists(f"{self._lives}/{number + 1}/renewed"):
                number += 1
        numbers = [number]
        while exists(f"{self._lives}/{numbers[-1]}/renewed"):
            numbers.append(numbers[-1] - 1)
        return {
            "numbers": numbers,
            "runs": [
                {
                    "folder": str(run),
                    "session": _read(f"{run}/session").strip(),
                    "end": _json(f"{run}/end.json"),
                    "table": _read(f"{run}/jobs.json"),
                    "written_at": _changed_at(f"{run}/jobs.json"),
                    "logs": [path.name for path in run.glob("job_logs/*")],
                }
                for number in numbers
                for run in reversed(_runs(self._lives / str(number)))
            ],
            "kept": " ".join(map(_read, Path(self._folder).glob("dispatches/*/ids"))).split(),
            # Looked at last, so that it has the end that its run has.
            "newest": self.look(pause_s),
        }

    def log_end(self, number: int, job: str) -> str:
        """The last lines that an allocation's job has printed, and the path of its log."""
        for path in self._lives.glob(f"{number}/logs/sbatch_*_{job}.out"):
            return "\n".join([f"{path} ends with:", *_read(path).splitlines()[-5:]])
        return ""

    # ------------------------------------------------------------------ claiming and using

    def claim(self, number: int, user: str) -> bool:
        """Whether this client, one of its users then, may submit the job of that allocation.

        The folder takes its name when it is whole: the script's `mv -T` would replace an empty
        folder.
        """
        new = f"{self._lives}/.{user}-{os.urandom(4).hex()}"
        for folder in ("logs", "users"):
            os.makedirs(f"{new}/{folder}")
        Path(f"{new}/users/{user}").touch()
        write_file(f"{new}/claimed", user)
        with suppress(OSError):
            os.rename(new, f"{self._lives}/{number}")
            return True
        shutil.rmtree(new)
        return False

    def submit(self, number: int, script: str) -> None:
        """Hand the job of an allocation to Slurm; ``look`` sees what comes of it.

        The folder ``sbatch`` is made once, before the command: no second job can come of one
        allocation. Slurm keeps the folder by its real path.
        """
        path = os.path.realpath(f"{self._lives}/{number}")
        write_file(f"{path}/ray.sub", script)
        try:
            os.mkdir(f"{path}/sbatch")
        except FileExistsError:
            return
        # In less time than a client waits for a command.
        code, text = _command(
            "sbatch", "--parsable", f"--chdir={path}", script=script, limit_s=80.0
        )
        if code:
            write_file(f"{path}/refused", text)
            return
        job = text.strip().split(";")[0]
        write_file(f"{path}/job", job)
        if exists(f"{path}/stop"):
            _command("scancel", job)

    def note(self, number: int, name: str, text: str = "") -> None:
        """Write a file of an allocation; ``keep`` lets it stay when nobody uses it."""
        write_file(f"{self._lives}/{number}/{name}", text)

    def join(self, number: int, user: str) -> None:
        """Note a program that uses an allocation, so that it does not end before the program."""
        # Not by a temporary file: each file of the folder is a user.
        Path(f"{self._lives}/{number}/users/{user}").touch()
        Path(f"{self._lives}/{number}/released").unlink(missing_ok=True)

    def keep_dispatch(self, dispatcher: str) -> bool:
        """Make the folder of a dispatch that continues; false if it is there and whole."""
        path = f"{self._folder}/dispatches/{dispatcher}"
        os.makedirs(path, exist_ok=True)
        return not exists(f"{path}/ids")

    # ------------------------------------------------------------------ ending

    def detach(self, user: str) -> None:
        """Take a user off its allocations: a renewal takes it along. Its jobs continue."""
        for path in self._lives.glob(f"*/users/{user}"):
            path.unlink()

    def leave(self, user: str) -> None:
        """Take a user off; the last one ends an allocation that never was ready and is not kept."""
        used = [path.parents[1] for path in self._lives.glob(f"*/users/{user}")]
        self.detach(user)
        for path in used:
            if os.listdir(f"{path}/users") or exists(f"{path}/keep"):
                continue
            write_file(f"{path}/released", "")
            # One that Slurm starts again continues, with the jobs that were submitted to it.
            ready = path.glob(f"run/{_read(path / 'job').strip()}.*/ready.json")
            if not exists(f"{path}/renewed") and not any(ready):
                with suppress(OSError):
                    self.cancel(int(path.name), LEFT_EARLY)

    def cancel(self, number: int, why: str) -> bool:
        """End an allocation now, with all that runs in it.

        Args:
            number: of the allocation.
            why: for those who look later.

        Returns:
            Whether there was anything to end.

        Raises:
            OSError: Slurm has not taken its job out of the queue; a second call tries again.
        """
        path = self._lives / str(number)
        was_stopped, run = exists(f"{path}/stop"), _newest_run(path)
        has_ended = run and exists(f"{run}/end.json")
        queue = _squeue() if has_ended else None
        if queue is not None and not _jobs_of(path, queue):
            return False  # it has ended, and Slurm is not about to start it again
        with suppress(OSError):  # a full disk keeps no job alive
            write_file(f"{path}/stop", why)
        queue = _squeue()
        jobs = [row["number"] for row in _jobs_of(path, queue)]
        code, problem = _TIMED_OUT if queue is None else 0, ""
        if jobs:
            code, problem = _command("scancel", *jobs)
        if code == _TIMED_OUT:  # Slurm does not answer
            if run and not has_ended:
                return True  # its head reads `stop` and ends the run
            if run and was_stopped:
                return False  # its head has ended the run, for the `stop` of an earlier call
            raise OSError(
                "Slurm gives no answer. A job that waits in its queue stays there, and ends when "
                "it starts. Stop the cluster once more when Slurm answers, to take it out of the "
                "queue."
            )
        if code != 0:
            raise OSError(problem.strip())
        # True: its job is cancelled, or `stop` comes before there is one. False: it was stopped
        # before, and Slurm has no job of it any more.
        return bool(jobs) or not was_stopped


def _runs(path: Path) -> list[Path]:
    """The folders of all runs of an allocation, the oldest first."""
    return sorted(path.glob("run/[0-9]*.[0-9]*"), key=lambda run: int(run.suffix[1:]))


def _newest_run(path: Path) -> Path | None:
    """The folder of the newest run of an allocation's job; ``None`` before the first one."""
    job = _read(f"{path}/job").strip()
    return next((run for run in reversed(_runs(path)) if run.stem == job), None)


def _jobs_of(path: Path, queue: Iterable[Row] | None) -> list[Row]:
    """The jobs in Slurm's queue that are an allocation's, by their folder.

    Hosts may have different real paths for one folder: with the number that the allocation knows
    the end of the path is enough. The number alone is not: Slurm may have given it again.
    """
    real, job = os.path.realpath(path), _read(f"{path}/job").strip()
    end = f"/{'/'.join(real.split('/')[-3:])}"
    return [
        row
        for row in queue or ()
        if row["folder"] == real or (row["number"] == job and row["folder"].endswith(end))
    ]


def _squeue() -> list[Row] | None:
    """This user's jobs in Slurm's queue; ``None`` when it gives no answer."""
    code, text = _command(
        "squeue", "-h", "-a", f"--user={os.getuid()}", "-o", "|".join(_COLUMNS.values())
    )
    if code:
        return None
    lines = (line.split("|", len(_COLUMNS) - 1) for line in text.splitlines())
    # "strict" is unknown to Python 3.9.
    return [dict(zip(_COLUMNS, line)) for line in lines if len(line) == len(_COLUMNS)]  # noqa: B905


def _command(*argv: str, script: str = "", limit_s: float = ANSWER_S) -> tuple[int, str]:
    """Exit code and output of a command, or its errors where it failed."""
    try:
        done = subprocess.run(argv, input=script.encode(), capture_output=True, timeout=limit_s)
    except FileNotFoundError:
        return 127, f"there is no command {argv[0]!r} on this host"
    except subprocess.TimeoutExpired:
        return _TIMED_OUT, f"{argv[0]} timed out: Slurm gives no answer."
    output = done.stderr if done.returncode else done.stdout
    return done.returncode, output.decode(errors="replace")


def _read(path: str | os.PathLike[str]) -> str:
    """The text of a file; empty without one."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def _json(path: str) -> Row | None:
    """The object that another of our programs has written; ``None`` before it has."""
    with suppress(ValueError):  # empty, or torn by a crash
        return dict(json.loads(_read(path)))
    return None


def _changed_at(path: str | os.PathLike[str]) -> float:
    """When a file was written, by the clock of its file system; 0 without one."""
    with suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def main(request: Row) -> None:
    """Answer one request, unless another user may write into the folder.

    Args:
        request: the folder, the name of a method and its arguments.
    """
    os.umask(0o077)
    folder = request["folder"]
    why = why_untrusted(f"{folder}/lives")
    if why:
        print(json.dumps({"untrusted": why}))
        return
    try:
        answer = getattr(ClusterFolder(folder), request["do"])(**request["with"])
    except OSError as error:
        sys.exit(str(error))
    print(json.dumps({"answer": answer}))
