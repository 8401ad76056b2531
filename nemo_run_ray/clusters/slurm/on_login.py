"""The client's half that runs on the login node: it asks Slurm, and reads and writes the cluster's
folder.

A client sends this file's text and a request to ``python3 -``; the answer is JSON. It imports the
standard library alone and is written for Python 3.9.

All clients of a cluster meet in its folder, where each allocation has a folder with the next number
in ``lives``, see ``remote/slurm/carry.py``. To give a folder that name is to claim the
allocation: one client can, on every file system, and it alone submits the job. An allocation whose
client died before Slurm had the job is passed over; should Slurm get the job after all, the job's
script sees the next allocation and ends.

Two files end an allocation. The head reads the first one, ``stop``, and ends Ray, also where Slurm
gives no answer. The second one, ``over``, says that nothing is left to stop. With either of them no
client uses the allocation, and a job that waits in Slurm's queue ends when it starts.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

#: Seconds for an answer of Slurm's controller. All that a request does must take less time than a
#: command on a login node may take.
ANSWER_S = 15.0
_UNHEARD = (
    "Slurm gives no answer. A job that waits in its queue stays there, and ends when it starts. "
    "Stop the cluster once more when Slurm answers, to take it out of the queue."
)
Rows = list[list[str]]
#: Name of the folder of a run: Slurm's number of the job, and how often it was restarted.
_RUN = re.compile(r"\d+\.\d+")


class ClusterFolder:
    """The folder of a cluster; each public method answers one request of a client."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lives = os.path.join(folder, "lives")

    # ------------------------------------------------------------------ looking

    def look(self, pause_s: float) -> dict[str, Any] | None:
        """The newest allocation and what Slurm says of its job; ``None`` before the first one.

        Args:
            pause_s: seconds for which Slurm's last answer is taken for what it says now.
        """
        number = max(self._numbers(), default=0)
        if not number:
            return None
        path = self._path(number)
        os.listdir(path)  # so that a shared file system looks for new files
        files = {"stopped": "stop", "over": "over", "refused": "refused"}
        texts = {key: " ".join(_read(path, name).split()) for key, name in files.items()}
        job = _read(path, "job").strip()
        found = {
            "number": number,
            "folder": os.path.realpath(path),
            "claimed": _read(path, "claimed").strip(),
            "job": job,
            "is_sent": os.path.isdir(os.path.join(path, "sbatch")),
            "renewed": os.path.exists(os.path.join(path, "renewed")),
            "jobless_s": 0.0 if job else time.time() - os.stat(path).st_mtime,
            **texts,
        }
        changed_at = _changed_at(path, "job")
        run = self._newest_run(path, job)
        if run:
            os.listdir(run)
            end_at = _changed_at(run, "end.json")
            changed_at = max(changed_at, end_at, _changed_at(run, "ready.json"))
            found["run"] = os.path.relpath(run, path)
            found["head"], found["end"] = _json(run, "ready.json"), _json(run, "end.json")
            found["token"] = _read(run, "token").strip()
            found["ended_s"] = time.time() - end_at if end_at else 0.0
        rows = self._queue(pause_s, changed_at)
        found["has_queue"] = rows is not None
        found["queued"] = next((row for row in rows or () if self._is_job(row, found)), None)
        return found

    def history(self, session: str, number: int, table: str, logs: str) -> dict[str, Any] | None:
        """The runs whose dispatches continue in one allocation; ``None`` if none is known.

        Args:
            session: Ray's name of a run; the newest allocation that continues its dispatches.
            number: of the allocation, without a session.
            table: name of the file with a run's job table.
            logs: name of the folder with a run's logs.
        """
        if session:
            pattern = os.path.join(self._lives, "*", "run", "*", "session")
            paths = [path for path in glob.glob(pattern) if _read(path).strip() == session]
            if not paths:
                return None
            number = int(paths[0].split("/")[-4])
            while os.path.exists(os.path.join(self._path(number + 1), "renewed")):
                number += 1
        numbers = [number]
        while os.path.exists(os.path.join(self._path(numbers[-1]), "renewed")):
            numbers.append(numbers[-1] - 1)
        runs = [
            {
                "folder": run,
                "session": _read(run, "session").strip(),
                "end": _json(run, "end.json"),
                "has_left": not os.path.exists(os.path.join(run, "token")),
                "table": _read(run, table),
                "written_at": _changed_at(run, table),
                "logs": _names(os.path.join(run, logs)),
            }
            for path in map(self._path, numbers)
            for run in reversed(_runs(path))
        ]
        kept = glob.glob(os.path.join(self._folder, "dispatches", "*", "ids"))
        return {
            "numbers": numbers,
            "runs": runs,
            "kept": " ".join(_read(path) for path in kept).split(),
        }

    def log_end(self, number: int, job: str) -> str:
        """The last lines that an allocation's job has printed, and the path of its log."""
        for path in glob.glob(os.path.join(self._path(number), "logs", f"sbatch_*_{job}.out")):
            return "\n".join([f"{path} ends with:", *_read(path).splitlines()[-5:]])
        return ""

    # ------------------------------------------------------------------ claiming and using

    def claim(self, number: int, user: str) -> bool:
        """Whether this client, one of its users then, may submit the job of that allocation.

        A folder takes its name when it is whole: an empty one would be replaced by a script that
        claims the allocation for its dispatches.
        """
        os.umask(0o022)
        os.makedirs(self._folder, exist_ok=True)
        os.umask(0o077)
        os.makedirs(self._lives, exist_ok=True)
        path, new = self._path(number), os.path.join(self._lives, f".{user}-{os.urandom(4).hex()}")
        for folder in ("logs", "users"):
            os.makedirs(os.path.join(new, folder))
        _touch(os.path.join(new, "users", user))
        _write(os.path.join(new, "claimed"), user)
        try:
            if not os.path.lexists(path):
                os.rename(new, path)
                return True
        except OSError:
            if not os.path.isdir(path):
                raise
        shutil.rmtree(new)
        return False

    def submit(self, number: int, script: str) -> None:
        """Hand the job of an allocation to Slurm; ``look`` sees what comes of it.

        Slurm's answer is kept in a file, so that it is not lost with a connection, and no second
        job can come of one allocation. Slurm keeps the folder as it is given: by its real path.
        """
        os.chdir(self._path(number))
        try:
            os.mkdir("sbatch")
        except FileExistsError:
            return
        try:
            _write("ray.sub", script)
        except OSError:
            os.rmdir("sbatch")
            raise
        command = ["sbatch", "--parsable", f"--chdir={os.path.realpath('.')}"]
        with (
            open("ray.sub", encoding="utf-8") as text,
            open("sbatch/out", "w", encoding="utf-8") as out,
            open("sbatch/err", "w", encoding="utf-8") as err,
        ):
            try:
                done = subprocess.run(command, stdin=text, stdout=out, stderr=err, check=False)
                code = done.returncode
            except FileNotFoundError:
                code = err.write("there is no command 'sbatch' on this host")
        if code:
            os.rename("sbatch/err", "refused")
            return
        job = _read("sbatch/out").strip().split(";")[0]
        _write("job", job)
        if os.path.exists("over") or os.path.exists("stop"):
            subprocess.run(["scancel", job], check=False)

    def note_job(self, number: int, job: str) -> None:
        """Write down the number of a job that Slurm has although nobody has heard so."""
        _write(os.path.join(self._path(number), "job"), job)

    def join(self, number: int, user: str) -> None:
        """Note a program that uses an allocation, so that it does not end before the program."""
        path = self._path(number)
        os.makedirs(os.path.join(path, "users"), exist_ok=True)
        _touch(os.path.join(path, "users", user))
        _remove(os.path.join(path, "released"))

    def keep(self, number: int) -> None:
        """Let an allocation stay when nobody uses it."""
        _touch(os.path.join(self._path(number), "keep"))

    def keep_dispatch(self, dispatcher: str) -> bool:
        """Make the folder of a dispatch that continues; false if it is there and whole."""
        path = os.path.join(self._folder, "dispatches", dispatcher)
        os.makedirs(path, exist_ok=True)
        return not os.path.exists(os.path.join(path, "ids"))

    # ------------------------------------------------------------------ ending

    def detach(self, number: int, user: str) -> None:
        """Take a user off whose jobs continue without it."""
        _remove(os.path.join(self._path(number), "users", user))

    def leave(self, number: int, user: str, why: str) -> None:
        """Take a user off; the last one ends an allocation that never was ready and is not kept."""
        path = self._path(number)
        if not os.path.exists(os.path.join(path, "users", user)):
            return
        self.detach(number, user)
        if _names(os.path.join(path, "users")) or os.path.exists(os.path.join(path, "keep")):
            return
        _touch(os.path.join(path, "released"))
        # One that Slurm starts again continues, with the jobs that were handed over to it.
        ready = os.path.join(path, "run", f"{_read(path, 'job').strip()}.*", "ready.json")
        if os.path.exists(os.path.join(path, "renewed")) or glob.glob(ready):
            return
        if not os.path.exists(os.path.join(path, "stop")):
            _write(os.path.join(path, "stop"), why)
        with contextlib.suppress(OSError):
            self._cancel(path)
            _write(os.path.join(path, "over"), why)

    def give_up(self, number: int, why: str) -> None:
        """Let nobody use an allocation any more. Its job ends as soon as it starts."""
        _write(os.path.join(self._path(number), "over"), why)

    def cancel(self, number: int, why: str, has_ended: bool) -> bool:
        """End an allocation now, with all that runs in it; whether there was anything to end.

        Args:
            number: of the allocation.
            why: for those who look later.
            has_ended: its run is over; Slurm may have its job, to start it again.

        Raises:
            OSError: Slurm has not taken its job out of the queue; a second call tries again.
        """
        path = self._path(number)
        stop, is_noted = os.path.join(path, "stop"), False
        if has_ended:
            rows = self._jobs_of(path)
            if rows is None:  # nobody has said that Slurm does not start it again
                _write(stop, why)
            if not rows:
                return False
        run = self._newest_run(path, _read(path, "job").strip())
        has_head = bool(run) and not os.path.exists(os.path.join(run, "end.json"))
        with contextlib.suppress(OSError):  # a full disk keeps no job alive
            _write(stop, why)
            is_noted = True
        try:
            self._cancel(path)
        except TimeoutError:
            if is_noted and has_head:
                return True  # its head ends it
            raise TimeoutError(_UNHEARD if is_noted else "Slurm gives no answer.") from None
        with contextlib.suppress(OSError):
            _write(os.path.join(path, "over"), why)
        return True

    def _cancel(self, path: str) -> None:
        """Take an allocation's own jobs out of Slurm.

        Raises:
            TimeoutError: Slurm gives no answer.
            OSError: Slurm does not do it.
        """
        problem = ""
        for _ in range(2):  # a job may have ended since Slurm named it
            rows = self._jobs_of(path)
            if rows is None:
                raise TimeoutError
            for row in rows:
                if row[1] == "COMPLETING":  # it ends, or Slurm is about to start it again
                    with contextlib.suppress(TimeoutError):
                        _command("scancel", row[0])
            waiting = [row[0] for row in rows if row[1] != "COMPLETING"]
            if not waiting:
                return
            code, problem = _command("scancel", *waiting)
            if code == 0:
                return
        raise OSError(problem.strip() or "scancel has failed.")

    # ------------------------------------------------------------------ Slurm's queue

    def _jobs_of(self, path: str) -> Rows | None:
        """Ask Slurm now for an allocation's jobs; ``None`` without an answer."""
        allocation = {"folder": os.path.realpath(path), "job": _read(path, "job").strip()}
        text = _squeue()
        rows = None if text is None else _rows(text)
        return rows and [row for row in rows if self._is_job(row, allocation)]

    def _is_job(self, row: list[str], allocation: dict[str, Any]) -> bool:
        """Whether a job is an allocation's, by its folder.

        Hosts may have different real paths for one folder: with the number that the allocation
        knows the end of the path is enough. The number alone is not: by now it may be that of
        another job, or on another Slurm.
        """
        end = "/".join(["", *allocation["folder"].split("/")[-3:]])
        has_number = row[0] == allocation["job"] and row[4].endswith(end)
        return row[4] == allocation["folder"] or has_number

    def _queue(self, pause_s: float, changed_at: float) -> Rows | None:
        """Slurm's jobs of this user; ``None`` without an answer.

        All clients of the cluster ask once in a while. What Slurm said before the folder was
        changed proves nothing; both times are the file system's.
        """
        path = os.path.join(self._folder, "queue.json")
        kept, began_at = _json(path) or {}, _changed_at(path)
        if began_at > changed_at and 0 <= time.time() - kept.get("at", 0.0) < pause_s:
            return None if kept["text"] is None else _rows(kept["text"])
        began_at, new = 0.0, f"{path}.{os.uname().nodename}.{os.getpid()}.began"
        with contextlib.suppress(OSError), open(new, "w", encoding="utf-8") as file:
            began_at = os.fstat(file.fileno()).st_mtime
        _remove(new)
        text = _squeue()
        with contextlib.suppress(OSError):
            _write(path, json.dumps({"at": time.time(), "text": text}))
            os.utime(path, (began_at, began_at))
        return None if text is None else _rows(text)

    # ------------------------------------------------------------------ names

    def _path(self, number: int) -> str:
        return os.path.join(self._lives, str(number))

    def _numbers(self) -> list[int]:
        return [int(name) for name in _names(self._lives) if name.isdigit()]

    def _newest_run(self, path: str, job: str) -> str:
        """Folder of the newest run of an allocation's job; empty before the first one."""
        starts = [run for run in _runs(path) if os.path.basename(run).startswith(f"{job}.")]
        return starts[-1] if job and starts else ""


def _runs(path: str) -> list[str]:
    """The folders of all runs of an allocation, the oldest first."""
    names = [name for name in _names(os.path.join(path, "run")) if _RUN.fullmatch(name)]
    names.sort(key=lambda name: int(name.rpartition(".")[2]))
    return [os.path.join(path, "run", name) for name in names]


def _rows(text: str) -> Rows:
    """Number, state, reason, start and folder of each job."""
    rows = (line.split("|", 4) for line in text.splitlines())
    return [row for row in rows if len(row) == 5]


def _squeue() -> str | None:
    """Ask Slurm for this user's jobs; ``None`` when its controller is away."""
    user = pwd.getpwuid(os.getuid()).pw_name
    try:
        code, text = _command("squeue", "-h", "-a", "-u", user, "-o", "%A|%T|%r|%S|%Z")
    except TimeoutError:
        return None
    return None if code else text


def _command(*argv: str) -> tuple[int, str]:
    """Exit code and output of a command, or its errors where it failed.

    Raises:
        TimeoutError: it has not ended in time.
    """
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S, check=False
        )
    except FileNotFoundError:
        return 127, f"there is no command {argv[0]!r} on this host"
    except subprocess.TimeoutExpired:
        raise TimeoutError("Slurm gives no answer.") from None
    output = done.stderr if done.returncode else done.stdout
    return done.returncode, output.decode(errors="replace")


def _read(*parts: str) -> str:
    """The text of a file; empty without one."""
    path = os.path.join(*parts)
    absent = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with absent, open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def _json(*parts: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        row = json.loads(_read(*parts))
        return row if isinstance(row, dict) else None
    return None


def _changed_at(*parts: str) -> float:
    """When a file was written, by the clock of its file system; 0 without one."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(*parts)).st_mtime
    return 0.0


def _names(folder: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


def _write(path: str, text: str) -> None:
    """Write a file, whole or not at all."""
    new = f"{path}.{os.uname().nodename}.{os.getpid()}"
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else f"{text}\n")
        os.replace(new, path)
    except OSError:
        _remove(new)
        raise


def _touch(path: str) -> None:
    with open(path, "w", encoding="utf-8"):
        pass


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def main(request: dict[str, Any], why_untrusted: Callable[[str], str]) -> None:
    """Answer one request, unless another user may write into the folder.

    Args:
        request: the folder, the name of a method and its arguments.
        why_untrusted: of ``remote/trust.py``.
    """
    os.umask(0o077)
    folder = request["folder"]
    why = why_untrusted(os.path.join(folder, "lives"))
    if why:
        print(json.dumps({"untrusted": why}))
        return
    try:
        answer = getattr(ClusterFolder(folder), request["do"])(**request["with"])
    except OSError as error:
        sys.exit(str(error))
    print(json.dumps({"answer": answer}))
