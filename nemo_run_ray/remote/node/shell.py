"""A command that a shell starts: after its profile, and after what the user wants to run before.

The command keeps its exact words: they are the shell's arguments, and no text that it reads.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import List, Optional, Sequence

from .output import PREFIX

#: Characters of a startup command that the log shows when it has failed.
_SHOWN_MAX = 200
#: Told when the shell ends before the command: by a failure, or because a startup command exits.
_FAILED = (
    "nemo_run_ray_failed() { local code=$?; trap - EXIT; "
    f"printf '{PREFIX}the startup command %s ended with exit code %s, and the task was not "
    'started\\n\' "$nemo_run_ray_step" "$code"; '
    '[ "$code" -ne 0 ] || code=1; exit "$code"; }'
)
#: A cancelled task is not one whose startup command has failed.
_STOPPED = "trap 'trap - EXIT TERM; kill -TERM $$' TERM"
_CHECK = 'nemo_run_ray_code=$?; [ "$nemo_run_ray_code" -eq 0 ] || exit "$nemo_run_ray_code"'
#: ``python`` of a node that calls it python3: the one that runs us.
_FIND_PYTHON = (
    '[ "${nemo_run_ray_argv[0]}" != python ] || command -v python >/dev/null || '
    "nemo_run_ray_argv[0]="
)


def in_shell(
    argv: Sequence[str], is_login: bool, startup: Sequence[str], python: Optional[str]
) -> List[str]:
    """The words that run a command in bash.

    Args:
        argv: of the command.
        is_login: the shell reads the profile first, as ``bash -l`` does.
        startup: commands that the same shell runs before, each of which must succeed.
        python: interpreter asked for, which comes first on ``PATH`` after the profile too.
    """
    argv = list(argv)
    if argv[0] == "python" and python is not None:
        argv[0] = python
    lines = ['nemo_run_ray_argv=("$@")', "set --"]  # a startup command may set the arguments
    if python is not None and os.path.isabs(python):
        lines.append(f'export PATH={shlex.quote(os.path.dirname(python))}:"$PATH"')
    if startup:
        lines += [_FAILED, "trap nemo_run_ray_failed EXIT", _STOPPED]
    for command in startup:
        # Behind `eval … ||` a `set -e` of the command would have no effect.
        lines += [f"nemo_run_ray_step={shlex.quote(_shown(command))}"]
        lines += [f"eval {shlex.quote(command)}", _CHECK]
    lines += [f"{_FIND_PYTHON}{shlex.quote(sys.executable)}"]
    lines += ["trap - EXIT TERM", 'exec -- "${nemo_run_ray_argv[@]}"']
    options = ["-l", "-c"] if is_login else ["-c"]
    return ["bash", *options, "\n".join(lines), "bash", *argv]


def _shown(command: str) -> str:
    """A command in one line of a log."""
    line = " ".join(command.split())
    return repr(line if len(line) <= _SHOWN_MAX else f"{line[:_SHOWN_MAX]} …")
