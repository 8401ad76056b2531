"""What an embedded Ray that is over leaves: why it is over, and of one that died its jobs' logs.

Ray's own folder is removed, so they are copied into one of the session's name first. Those of the
last five that died are kept, and of the last fifty that were stopped the sentence::

    ray_local/<environment>/left/<session>/
        why.txt                  as the end of a sentence
        ray.log                  what `ray start` printed; of a Ray that died. raylet.out if that
                                 was its raylet alone
        job-driver-<id>.log      of each job; of a Ray that died
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from nemo_run_ray.clusters.start_log import end_of_log
from nemo_run_ray.remote.files import replacing, write_file
from nemo_run_ray.remote.node.output import PREFIX

log = logging.getLogger(__name__)

#: Ray's own folder in that of the cluster.
RAY_FOLDER = "r"
#: File in the folder of a cluster that this package has made: no other one is removed.
MARKER = ".nemo_run_ray"
#: How the line begins that stands before the end of a log whose beginning is not kept.
CUT = f"{PREFIX}the first "
_STOPPED = "the embedded Ray that had it has been stopped"
#: Sessions that are kept, and bytes of each log: of a longer one the end.
_SESSIONS, _LOG_BYTES = 5, 64 * 1024**2
#: Of those that were stopped there is a sentence alone.
_STOPPED_SESSIONS = 50
#: Seconds that a caller waits for a folder's removal, which goes on without it.
_REMOVE_WAIT_S = 5.0
_AGAIN = 'sleep 3; rm -rf "$1"; sleep 12; rm -rf "$1";'
#: Bytes of that end in which the beginning of a line is looked for.
_LINE_BYTES = 64 * 1024


def keep(root: Path, home: Path, dead: tuple[str, Path] | None) -> None:
    """Keep what is left of a cluster whose processes have ended.

    What cannot be kept (a full disk) is told in a warning: the next start must not fail for that.

    Args:
        root: the cluster's folder, which is about to be removed.
        home: where ``left`` is made.
        dead: of a cluster that died, the process that is gone and the log that says why; ``None``
            for one that was stopped.
    """
    for session in root.glob(f"{RAY_FOLDER}/session_*"):
        if not session.is_symlink():
            folder = home / "left" / session.name
            try:
                folder.mkdir(parents=True, exist_ok=True)
                why_over = _STOPPED
                if dead is not None:
                    process, its_log = dead
                    _keep_logs(session, its_log, folder)
                    why_over = why_dead(process, folder / its_log.name)
                write_file(folder / "why.txt", why_over)
            except OSError as error:
                log.warning("What the embedded Ray has left is not kept in %s: %s", folder, error)
    by_age = sorted((home / "left").glob("session_*"), key=lambda path: path.stat().st_mtime)
    stopped = [folder for folder in by_age if why(home, folder.name) == _STOPPED]
    died = [folder for folder in by_age if folder not in stopped]
    for folder in (*stopped[:-_STOPPED_SESSIONS], *died[:-_SESSIONS]):
        shutil.rmtree(folder, ignore_errors=True)


def remove(root: Path, has_died: bool) -> None:
    """Remove the folder of a cluster; a large one is removed while the caller goes on.

    Environments of packages make 100,000 files of it, for which a start would wait a minute.

    Args:
        root: the cluster's folder, which is left alone if this package has not made it.
        has_died: nobody stopped it, and programs that it had started may go on to write there.
    """
    if not (root / MARKER).exists():
        log.warning("%s is not removed: it is not the folder of an embedded Ray.", root)
        return
    again = _AGAIN if has_died else ""
    words = [
        "sh",
        "-c",
        f'{{ rm -rf "$1"; {again} }} </dev/null >/dev/null 2>&1 &',
        "sh",
        str(root),
    ]
    subprocess.run(words, cwd="/", start_new_session=True, check=False)
    deadline = time.monotonic() + _REMOVE_WAIT_S
    while root.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def why_dead(process: str, its_log: Path) -> str:
    """Why the cluster of a job is gone, as the end of a sentence."""
    return f"the embedded Ray that had it has died: its {process} is gone. {end_of_log(its_log)}"


def why(home: Path, session: str) -> str:
    """Why a session is over, as the end of a sentence; empty for one of which nothing is kept."""
    try:
        return (home / "left" / session / "why.txt").read_text(encoding="utf-8")
    except OSError:
        return ""


def log_of(home: Path, root: Path | None, session: str, submission_id: str) -> Path | None:
    """The log of a job: with what was kept, or still in the folder of the cluster that died."""
    name = f"job-driver-{submission_id}.log"
    paths = [home / "left" / session / name]
    if root is not None:
        paths.append(root / RAY_FOLDER / session / "logs" / name)
    return next((path for path in paths if os.path.isfile(path)), None)


def text_of(path: Path) -> Iterator[str]:
    """A log's text, piece by piece, as Ray itself would give it."""
    with open(path, encoding="utf-8", errors="replace") as file:
        while text := file.read(65536):
            yield text


def _keep_logs(session: Path, its_log: Path, folder: Path) -> None:
    for log in session.glob("logs/job-driver-*.log"):
        _copy_end(log, folder / log.name)
    if its_log.exists():
        shutil.copyfile(its_log, folder / its_log.name)


def _copy_end(path: Path, to: Path) -> None:
    missing = max(0, path.stat().st_size - _LOG_BYTES)
    with open(path, "rb") as whole, replacing(to) as end:
        whole.seek(missing)
        if missing:
            beginning = whole.read(_LINE_BYTES)
            dropped = beginning.find(b"\n") + 1
            end.write(f"{CUT}{missing + dropped} bytes of this log are not kept\n".encode())
            end.write(beginning[dropped:])
        shutil.copyfileobj(whole, end)
    shutil.copystat(path, to)  # when it was written last is when the job was seen last
