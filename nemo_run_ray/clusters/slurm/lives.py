"""The folder in which the clients of a cluster meet with its allocations.

Each allocation is a life of the cluster and has a folder with the next number, see
``remote/slurm/carry.py``. To give a folder that name is to claim the life: one client can, on
every file system, and it alone submits the job. A life whose client died before Slurm had the job
is passed over; should Slurm get the job after all, the job's script sees the next life and ends.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_run_ray.clusters.slurm import ending
from nemo_run_ray.clusters.slurm.life import AllocationLife, end_of, life_of
from nemo_run_ray.clusters.slurm.login import Login, quoted
from nemo_run_ray.clusters.slurm.remains import Remains
from nemo_run_ray.clusters.slurm.series import Series
from nemo_run_ray.errors import ClusterError
from nemo_run_ray.remote.carried_over import DISPATCHES, IDS, RENEWED, START, TABLE
from nemo_run_ray.remote.slurm.carry import KEEP, OVER, RELEASED, STOP, USERS
from nemo_run_ray.remote.slurm.folder import JOB_LOGS

#: Prints of the newest life a line for each file: its name, a tab, its text.
_LOOK = """\
cd {folder} 2>/dev/null || exit 0
number=$(ls lives 2>/dev/null | sort -n | tail -n 1)
[ -n "$number" ] || exit 0
show() {{ [ -e "$2" ] && printf '%s\\t' "$1" && tr '\\n' ' ' < "$2" && echo; }}
echo "number\t$number"
cd "lives/$number" && ls > /dev/null; echo "folder\t$(pwd -P)"
show claimed claimed; show job job; show stopped {stop}; show over {over}; show refused refused
[ ! -d sbatch ] || echo "sent\tsent"; [ ! -e {renewed} ] || echo "renewed\tyes"
job=$(cat job 2>/dev/null)
[ -n "$job" ] || echo "jobless_s	$(( $(date +%s) - $(stat -c %Y .) ))"
[ -n "$job" ] || exit 0
run=$(ls -d run/"$job".* 2>/dev/null | sort -t . -k 2 -n | tail -n 1)
[ -n "$run" ] || exit 0
cd "$run" && ls > /dev/null && echo "run\t$run"
show ready ready.json; show end end.json; show token token; show session session
[ ! -e end.json ] || echo "ended_s	$(( $(date +%s) - $(stat -c %Y end.json) ))"
exit 0
"""
#: Slurm's answer is kept in a file, so that it is not lost with a connection; and no second job can
#: come of one life, whatever breaks off. Slurm keeps the folder as it is given: by its real path.
_SUBMIT = """\
cd {life} || exit 1
[ ! -d sbatch ] || exit 0
mkdir sbatch || {{ [ -d sbatch ] && exit 0; exit 1; }}
base64 -d > ray.sub <<'END' || {{ rmdir sbatch; exit 1; }}
{script}END
if sbatch --parsable --chdir="$(pwd -P)" < ray.sub > sbatch/out 2> sbatch/err; then
  cut -d ';' -f 1 sbatch/out > job.new && mv job.new job
  {{ [ ! -e {over} ] && [ ! -e {stop} ]; }} || scancel "$(cat job)"
else
  mv sbatch/err refused
fi
"""
#: A folder takes its name when it is whole: an empty one would be replaced by a script that claims
#: the life for its dispatches. One that is there was made by another client; every other error is
#: told. `claimed` says whose it is to a client that did not hear so.
_CLAIM = """\
mkdir -m 700 {made} && mkdir {made}/logs {made}/{users} &&
  : > {made}/{users}/{user} && printf %s {user} > {made}/claimed || exit 1
if [ ! -e {life} ] && mv -T {made} {life} 2>/dev/null; then
  echo claimed
else
  [ -d {life} ] || mv -T {made} {life} || exit 1
  rm -rf {made}
fi
"""
#: Prints the ids of kept dispatches, and then the runs whose dispatches go on in a life, or in the
#: one with a name of Ray's, the newest first: of each its folder, a line for each file, and the
#: names of its logs.
_SERIES = """\
cd {folder}/lives 2>/dev/null || exit 0
number={number}
if [ -z "$number" ]; then
  found=$(grep -lx {session} */run/*/session 2>/dev/null | head -n 1)
  [ -n "$found" ] || exit 0
  number=${{found%%/*}}
  while [ -e "$((number + 1))/renewed" ]; do number=$((number + 1)); done
fi
show() {{ [ -e "$2" ] && printf '%s\\t' "$1" && tr '\\n' ' ' < "$2" && echo; }}
echo "kept	$(cat ../{dispatches}/*/ids 2>/dev/null | tr '\\n' ' ')"
while :; do
  for run in $(ls -d "$number"/run/*.* 2>/dev/null | sort -t . -k 2 -n -r); do
    echo "run\t$run"; show session "$run/session"; show end "$run/end.json"
    show table "$run/{table}" && echo "at\t$(stat -c %Y "$run/{table}")"
    [ ! -e "$run/token" ] || echo "goes\ton"
    ls "$run/{logs}" 2>/dev/null
  done
  [ -e "$number/renewed" ] || exit 0
  number=$((number - 1))
done
"""


class Lives:
    """The lives of one cluster.

    Args:
        login: where the folder is.
        folder: of the cluster, absolute.
    """

    def __init__(self, login: Login, folder: str) -> None:
        self.login = login
        self.folder = folder

    @property
    def key(self) -> tuple[str, str]:
        """All by which this cluster differs from others."""
        return self.login.key, self.folder

    @property
    def _lives(self) -> str:
        return os.path.join(self.folder, "lives")

    def path(self, number: int) -> str:
        return os.path.join(self._lives, str(number))

    def _run(self, script: str) -> str:
        """Run a script in the folder, if no other user may write there; what it prints."""
        self.login.require_trusted(self._lives)
        return self.login.run(f"umask 077\n{script}")

    def look(self) -> AllocationLife | None:
        """The newest life; ``None`` before the first one.

        Raises:
            ClusterError: the host cannot be asked.
        """
        names = {"stop": STOP, "over": OVER, "renewed": RENEWED}
        told = self._run(_LOOK.format(folder=quoted(self.folder), **names))
        rows = dict(line.split("\t", 1) for line in told.splitlines() if "\t" in line)
        return life_of(rows) if rows else None

    def claim(self, number: int, user: str) -> bool:
        """Whether this client, one of its users then, may submit the job of that life."""
        life = quoted(self.path(number))
        self._run(
            f"umask 022; mkdir -p {quoted(self.folder)} && mkdir -p -m 700 {quoted(self._lives)}"
        )
        made = quoted(self._lives, f".{user}-{secrets.token_hex(4)}")
        told = self._run(_CLAIM.format(life=life, made=made, users=USERS, user=user))
        return told.strip() == "claimed"

    def submit(self, number: int, script: str) -> None:
        """Hand the job of a life to Slurm; what comes of it is seen by ``look``."""
        encoded = base64.encodebytes(script.encode()).decode()
        words = {"life": quoted(self.path(number)), "script": encoded, "over": OVER, "stop": STOP}
        self._run(_SUBMIT.format(**words))

    def note_job(self, number: int, job: str) -> None:
        """Write down the number of a job that Slurm has although nobody has heard so."""
        life = quoted(self.path(number))
        self._run(f"cd {life} && echo {shlex.quote(job)} > job.new && mv job.new job")

    def give_up(self, number: int, why: str) -> None:
        """Let nobody use a life any more. Its job ends as soon as it starts."""
        self._run(ending.give_up(self.path(number), why))

    def join(self, number: int, user: str) -> None:
        """Say that a program uses a life, so that it does not end before the program."""
        self._run(
            f"cd {quoted(self.path(number))} && mkdir -p {USERS} && : > {USERS}/{user} && "
            f"rm -f {RELEASED}"
        )

    def keep(self, number: int) -> None:
        """Let a life stay when nobody uses it."""
        self._run(f": > {quoted(self.path(number), KEEP)}")

    def leave(self, number: int, user: str) -> None:
        """Take a user off; the last one ends a life that is not to be kept, once no job runs."""
        self._run(ending.leave(self.path(number), user))

    def detach(self, number: int, user: str) -> None:
        """Take a user off whose jobs go on without it."""
        self._run(f"rm -f {quoted(self.path(number), USERS, user)}")

    def cancel(self, life: AllocationLife, why: str) -> bool:
        """End a life now, with all that runs in it; whether there was anything to end.

        Raises:
            ClusterError: Slurm has not taken its job out of the queue; a second call tries again.
        """
        has_ended = life.end is not None and not life.is_asked_for(0.0)
        return bool(self._run(ending.cancel(self.path(life.number), why, has_ended)))

    def cancel_newest(self, why: str) -> bool:
        """End the newest life, as ``cancel`` does; whether there was anything to end."""
        life = self.look()
        if life is None or life.over or life.refused:
            return False
        return self.cancel(life, why)

    def series(self, number: int | None = None, session: str = "") -> Series:
        """The runs whose dispatches go on in one life.

        Args:
            number: of the life; ``None`` for the newest one that has those of ``session``.
            session: Ray's name of a life.
        """
        told = self._run(
            _SERIES.format(
                folder=quoted(self.folder),
                number="" if number is None else number,
                session=shlex.quote(session),
                dispatches=DISPATCHES,
                table=TABLE,
                logs=JOB_LOGS,
            )
        )
        head, *blocks = f"\n{told}".split("\nrun\t")
        kept = [line.partition("\t")[2] for line in head.splitlines() if line.startswith("kept\t")]
        runs = tuple(_remains(self.folder, *block.splitlines()) for block in blocks)
        return Series(self.login, runs, frozenset(" ".join(kept).split()))

    def keep_dispatch(
        self,
        dispatcher: str,
        ids: Sequence[str],
        body: dict[str, Any],
        archives: Callable[[], Mapping[str, bytes]],
    ) -> None:
        """Keep a dispatch, so that it goes on in the next life."""
        folder = os.path.join(self.folder, DISPATCHES, dispatcher)
        there = f"[ ! -e {quoted(folder, IDS)} ] || echo there"
        if self._run(f"mkdir -p -m 700 {quoted(folder)} && {there}").strip():
            return
        files = archives()
        for name, data in files.items():
            self.login.put(data, os.path.join(folder, name))
        start = json.dumps({"body": body, "archives": list(files)})
        self.login.put(start.encode(), os.path.join(folder, START))
        # The last one: it says that the others are whole.
        self.login.put("\n".join([dispatcher, *ids, ""]).encode(), os.path.join(folder, IDS))

    def log_end(self, life: AllocationLife) -> str:
        """The last lines that a life's job has printed, and the path of its log."""
        with contextlib.suppress(ClusterError):
            told = self._run(
                f"cd {quoted(self.path(life.number))}; for log in logs/sbatch_*_{life.job}.out; do "
                '[ -e "$log" ] || continue; echo "$PWD/$log ends with:"; tail -n 5 "$log"; done; '
                "exit 0"
            )
            return told.strip()
        return ""


def _remains(folder: str, run: str, *lines: str) -> Remains:
    rows = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return Remains(
        folder=os.path.join(folder, "lives", run),
        session=rows.get("session", "").strip(),
        end=end_of(rows.get("end", "")),
        is_whole="end" in rows and "goes" not in rows,
        table=rows.get("table", ""),
        written_at=float(rows.get("at", "0")),
        logs=tuple(line for line in lines if "\t" not in line),
    )
