"""The folder in which the clients of a cluster meet with its allocations.

Each allocation is a life of the cluster and has a folder with the next number, see
``remote/slurm/allocation.py``. To give a folder that name is to claim the life: one client can, on
every file system, and it alone submits the job. A life whose client died before Slurm had the job
is passed over; should Slurm get the job after all, the job's script sees the next life and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_run_ray.clusters.slurm.life import AllocationLife, end_of, life_of
from nemo_run_ray.clusters.slurm.login import Login, quoted
from nemo_run_ray.clusters.slurm.remains import Remains
from nemo_run_ray.clusters.slurm.series import Series
from nemo_run_ray.errors import ClusterError
from nemo_run_ray.remote.earlier import DISPATCHES, IDS, RENEWED, START, TABLE
from nemo_run_ray.remote.slurm.allocation import KEEP, OVER, RELEASED, STOP, USERS
from nemo_run_ray.remote.slurm.log_copies import JOB_LOGS

#: Why a life is given up whose last user did not wait until it was ready.
LEFT_EARLY = "its last user left before it was ready"
_UNHEARD = (
    "Slurm gives no answer. A job that waits in its queue stays there, and ends when it starts. "
    "Stop the cluster once more when Slurm answers, to take it out of the queue."
)
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
if sbatch --parsable --chdir="$(pwd -P)" ray.sub > sbatch/out 2> sbatch/err; then
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
mkdir -p {lives} && mkdir -m 700 {made} && mkdir {made}/logs {made}/{users} &&
  : > {made}/{users}/{user} && printf %s {user} > {made}/claimed || exit 1
if [ ! -e {life} ] && mv -T {made} {life} 2>/dev/null; then
  echo claimed
else
  [ -d {life} ] || mv -T {made} {life} || exit 1
  rm -rf {made}
fi
"""
#: Two files end a life. The head reads the first one, `stop`, and ends Ray, also where Slurm gives
#: no answer. The second one, `over`, says that nothing is left to stop. With either of them no
#: client uses the life, and a job that still waits in Slurm's queue ends when it starts.
#:
#: `cancel` takes the life's own jobs out of Slurm, and fails with 2 where Slurm gives no answer. A
#: job is the life's by its folder. Hosts may have different real paths for one folder: with the
#: number that the life knows the end of the path is enough, and the number alone is not, which
#: may be that of another job by now, or on another Slurm. All of it takes less time than a command
#: on a login node may take.
_END = """\
note() {{ echo {why} > "$1.$$" && [ -s "$1.$$" ] && mv "$1.$$" "$1"; }}
own_jobs() {{
  queue=$(timeout 20 squeue -h -a -u "$(id -un)" -o '%A|%T|%r|%S|%Z' 2>/dev/null) || return 2
  printf '%s\\n' "$queue" | while IFS='|' read -r number state reason start folder; do
    case "$number $folder" in
      *" $here" | "$known "*"${{here#"${{here%/*/*/*}}"}}") ;;
      *) continue ;;
    esac
    if [ "$state" = COMPLETING ]; then  # it ends, or Slurm is about to start it again
      timeout 5 scancel "$number" > /dev/null 2>&1 < /dev/null
    else
      echo "$number"
    fi
  done
  return 0
}}
cancel() {{
  here=$(pwd -P) known=$(cat job 2>/dev/null)
  for try in 1 2; do  # a job may have ended since Slurm told of it
    found=$(own_jobs) || return 2
    [ -n "$found" ] || return 0
    timeout 20 scancel $found
    case $? in 0) return 0 ;; 124) return 2 ;; esac
  done
  return 1
}}
"""
#: A life that goes on with dispatches is not cancelled: it ends by itself when they are done.
_LEAVE = f"""\
{_END}\
cd {{life}} 2>/dev/null && [ -e {{users}}/{{user}} ] || exit 0
rm -f {{users}}/{{user}}
[ -z "$(ls {{users}})" ] && [ ! -e {{keep}} ] || exit 0
touch {{released}}
[ ! -e {{renewed}} ] || exit 0
job=$(cat job 2>/dev/null)
# One that Slurm starts again goes on, with the jobs that were handed over to it.
[ -z "$job" ] || ! ls run/"$job".*/ready.json > /dev/null 2>&1 || exit 0
note {{stop}} && note {{over}}
cancel 2>/dev/null
exit 0
"""
#: One command: by SSH a shell that has begun it goes on when the connection breaks off. A life that
#: has only the first file can be ended again. A full disk keeps no job alive.
_CANCEL = f"""\
{_END}\
cd {{life}} || exit 1
note {{stop}}
noted=$? code=0
cancel || code=$?
if [ $code -eq 2 ] && [ $noted -eq 0 ]; then
  # Its head ends it, if there is one yet.
  [ -z "$known" ] || ! ls -d run/"$known".* > /dev/null 2>&1 || exit 0
  echo {{unheard}} >&2
fi
[ $code -eq 0 ] || exit 1
note {{over}} 2>/dev/null
exit 0
"""
_GIVE_UP = f"""\
{_END}\
cd {{life}} && note {{over}}
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

    def path(self, number: int) -> str:
        return os.path.join(self.folder, "lives", str(number))

    def look(self) -> AllocationLife | None:
        """The newest life; ``None`` before the first one.

        Raises:
            ClusterError: the host cannot be asked.
        """
        names = {"stop": STOP, "over": OVER, "renewed": RENEWED}
        told = self.login.run(_LOOK.format(folder=quoted(self.folder), **names))
        rows = dict(line.split("\t", 1) for line in told.splitlines() if "\t" in line)
        return life_of(rows) if rows else None

    def claim(self, number: int, user: str) -> bool:
        """Whether this client, one of its users then, may submit the job of that life."""
        life = quoted(self.path(number))
        lives = quoted(self.folder, "lives")
        made = quoted(self.folder, "lives", f".{user}-{secrets.token_hex(4)}")
        told = self.login.run(
            _CLAIM.format(lives=lives, life=life, made=made, users=USERS, user=user)
        )
        return told.strip() == "claimed"

    def submit(self, number: int, script: str) -> None:
        """Hand the job of a life to Slurm; what comes of it is seen by ``look``."""
        self.login.put(script.encode(), os.path.join(self.path(number), "ray.sub"))
        self.login.run(_SUBMIT.format(life=quoted(self.path(number)), over=OVER, stop=STOP))

    def note_job(self, number: int, job: str) -> None:
        """Write down the number of a job that Slurm has although nobody has heard so."""
        life = quoted(self.path(number))
        self.login.run(f"cd {life} && echo {shlex.quote(job)} > job.new && mv job.new job")

    def give_up(self, number: int, why: str) -> None:
        """Let nobody use a life any more. Its job ends as soon as it starts."""
        words = shlex.quote(" ".join(why.split()))
        self.login.run(_GIVE_UP.format(life=quoted(self.path(number)), over=OVER, why=words))

    def join(self, number: int, user: str) -> None:
        """Say that a program uses a life, so that it does not end before the program."""
        self.login.run(
            f"cd {quoted(self.path(number))} && mkdir -p {USERS} && : > {USERS}/{user} && "
            f"rm -f {RELEASED}"
        )

    def keep(self, number: int) -> None:
        """Let a life stay when nobody uses it."""
        self.login.run(f": > {quoted(self.path(number), KEEP)}")

    def leave(self, number: int, user: str) -> None:
        """Take a user off; the last one ends a life that is not to be kept, once no job runs."""
        names = {
            "users": USERS,
            "released": RELEASED,
            "keep": KEEP,
            "over": OVER,
            "stop": STOP,
            "renewed": RENEWED,
            "why": shlex.quote(LEFT_EARLY),
        }
        self.login.run(_LEAVE.format(life=quoted(self.path(number)), user=user, **names))

    def detach(self, number: int, user: str) -> None:
        """Take a user off whose jobs go on without it."""
        self.login.run(f"rm -f {quoted(self.path(number), USERS, user)}")

    def cancel(self, life: AllocationLife, why: str) -> None:
        """End a life now, with all that runs in it.

        Raises:
            ClusterError: Slurm has not taken its job out of the queue; a second call tries again.
        """
        words = {"why": shlex.quote(why), "unheard": shlex.quote(_UNHEARD)}
        path = quoted(self.path(life.number))
        self.login.run(_CANCEL.format(life=path, stop=STOP, over=OVER, **words))

    def series(self, number: int | None = None, session: str = "") -> Series:
        """The runs whose dispatches go on in one life.

        Args:
            number: of the life; ``None`` for the newest one that has those of ``session``.
            session: Ray's name of a life.
        """
        told = self.login.run(
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
        if self.login.run(f"mkdir -p -m 700 {quoted(folder)} && {there}").strip():
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
            told = self.login.run(
                f"cd {quoted(self.path(life.number))}; for log in logs/sbatch_*_{life.job}.out; do "
                'echo "$PWD/$log ends with:"; tail -n 5 "$log" 2>/dev/null; done; exit 0'
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
