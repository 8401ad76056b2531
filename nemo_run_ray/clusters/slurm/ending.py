"""How a life of a cluster on Slurm is ended: commands for a shell beside Slurm's.

Two files end a life. The head reads the first one, ``stop``, and ends Ray, also where Slurm gives
no answer. The second one, ``over``, says that nothing is left to stop. With either of them no
client uses the life, and a job that still waits in Slurm's queue ends when it starts.
"""

from __future__ import annotations

import shlex

from nemo_run_ray.clusters.slurm.login import quoted
from nemo_run_ray.remote.carried_over import RENEWED
from nemo_run_ray.remote.slurm.carry import KEEP, OVER, RELEASED, STOP, USERS

#: Why a life is given up whose last user did not wait until it was ready.
LEFT_EARLY = "its last user left before it was ready"
_UNHEARD = (
    "Slurm gives no answer. A job that waits in its queue stays there, and ends when it starts. "
    "Stop the cluster once more when Slurm answers, to take it out of the queue."
)
#: `cancel` takes the life's own jobs out of Slurm, and fails with 2 where Slurm gives no answer. A
#: job is the life's by its folder. Hosts may have different real paths for one folder: with the
#: number that the life knows the end of the path is enough, and the number alone is not, which
#: may be that of another job by now, or on another Slurm. All of it takes less time than a command
#: on a login node may take.
_END = """\
note() {{ echo {why} > "$1.$$" && [ -s "$1.$$" ] && mv "$1.$$" "$1"; }}
own_jobs() {{
  queue=$(timeout 15 squeue -h -a -u "$(id -un)" -o '%A|%T|%r|%S|%Z' 2>/dev/null) || return 2
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
    timeout 15 scancel $found
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
[ -e {{stop}} ] || note {{stop}}
cancel 2>/dev/null && note {{over}}
exit 0
"""
#: One command: by SSH a shell that has begun it goes on when the connection breaks off. A life with
#: the first file alone can be ended again, and a full disk keeps no job alive. Of a life that has
#: ended Slurm may have the job all the same, to start it again.
_CANCEL = f"""\
{_END}\
cd {{life}} || exit 1
here=$(pwd -P) known=$(cat job 2>/dev/null)
run=$(ls -d run/"$known".* 2>/dev/null | sort -t . -k 2 -n | tail -n 1)
if [ -n {{ended}} ]; then
  own=$(own_jobs) || note {{stop}}  # nobody has said that Slurm does not start it again
  [ -n "$own" ] || exit 0
fi
[ ! -e "$run/end.json" ] || run=""
echo found
note {{stop}}
noted=$? code=0
cancel || code=$?
if [ $code -eq 2 ] && [ $noted -eq 0 ]; then
  [ -z "$run" ] || exit 0  # its head ends it
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
_FILES = {"users": USERS, "released": RELEASED, "keep": KEEP, "renewed": RENEWED}
_FILES |= {"stop": STOP, "over": OVER}


def leave(path: str, user: str) -> str:
    """Take a user off a life; the last one ends one that never was ready and is not to be kept."""
    return _script(_LEAVE, path, LEFT_EARLY, user=user)


def cancel(path: str, why: str, has_ended: bool) -> str:
    """End a life now; prints something if there was anything to end.

    Args:
        path: of the life's folder.
        why: for those who look later.
        has_ended: the run has told its end, and no other one is asked for.
    """
    unheard, ended = shlex.quote(_UNHEARD), shlex.quote("yes" if has_ended else "")
    return _script(_CANCEL, path, why, unheard=unheard, ended=ended)


def give_up(path: str, why: str) -> str:
    """Let nobody use a life whose job Slurm does not have."""
    return _script(_GIVE_UP, path, why)


def _script(template: str, path: str, why: str, **words: str) -> str:
    line = shlex.quote(" ".join(why.split()))
    return template.format(life=quoted(path), why=line, **_FILES, **words)
