"""The words, the environment and the interpreter of the user's command on a node."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from typing import Sequence

from ..end_record import PREFIX
from ..spec import Env, JobSpec
from .rundir import RunDir

#: The variables behind NeMo-Run's macros; nothing else in a command is expanded.
_MACROS = re.compile(
    r"\$(NEMO_RUN_(?:HEAD_NODE_IP|NPROC_PER_NODE|NUM_NODES|NODE_RANK|RDZV_PORT"
    r"|HET_GROUP_HOST_\d+))\b"
)
#: The shell's message when it ends before the command: a startup command has failed, or exited.
_FAILED = (
    "nemo_run_ray_failed() { local code=$?; trap - EXIT; "
    f"printf '{PREFIX}the startup command %s ended with exit code %s, and the task was not "
    'started\\n\' "$nemo_run_ray_step" "$code"; '
    '[ "$code" -ne 0 ] || code=1; exit "$code"; }'
)
#: SIGTERM ends the shell without that message: a cancelled task is no failed startup command.
_STOPPED = "trap 'trap - EXIT TERM; kill -TERM $$' TERM"
_CHECK = 'nemo_run_ray_code=$?; [ "$nemo_run_ray_code" -eq 0 ] || exit "$nemo_run_ray_code"'
#: Replaces ``python``, where a node has only python3, by the interpreter that runs us.
_FIND_PYTHON = (
    '[ "${nemo_run_ray_argv[0]}" != python ] || command -v python >/dev/null || '
    f"nemo_run_ray_argv[0]={shlex.quote(sys.executable)}"
)


def environment(spec: JobSpec, run_dir: RunDir, given: Env, secrets: Env) -> dict[str, str]:
    """The variables of a task's command, over those that the node has set."""
    own = {name: run_dir.map(value) for name, value in spec.env.items()}
    env = {**given, **own, **secrets}
    if spec.python and os.path.isabs(spec.python):
        env["PATH"] = os.pathsep.join([os.path.dirname(spec.python), env.get("PATH", os.defpath)])
    # A task may call ray.init(runtime_env=…) itself; without this Ray refuses to merge the two.
    env.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    return {**env, **{name: expand(env[name], env) for name in spec.env}}


def argv_of(spec: JobSpec, run_dir: RunDir, env: Env) -> list[str]:
    """The exact words of a task's command."""
    argv = [expand(run_dir.map(word), env) for word in spec.argv]
    if spec.login_shell or spec.startup:
        startup = [run_dir.map(line) for line in spec.startup]
        return in_shell(argv, spec.login_shell, startup, spec.python)
    if argv[0] == "python":  # the one asked for, the one on PATH, or the one that runs us
        is_there = shutil.which("python", path=env.get("PATH"))
        argv[0] = spec.python or ("python" if is_there else sys.executable)
    return argv


def expand(word: str, env: Env) -> str:
    """The word with NeMo-Run's macros replaced by their values."""
    return _MACROS.sub(lambda match: env.get(match.group(1), ""), word)


def in_shell(
    argv: list[str], is_login: bool, startup: Sequence[str], python: str | None
) -> list[str]:
    """The words that run a command in bash, after startup commands in the same shell.

    The interpreter comes first on ``PATH``, also after the profile.
    """
    if argv[0] == "python" and python:
        argv = [python, *argv[1:]]
    lines = ['nemo_run_ray_argv=("$@")', "set --"]  # a startup command may set the arguments
    if python and os.path.isabs(python):
        lines.append(f'export PATH={shlex.quote(os.path.dirname(python))}:"$PATH"')
    if startup:
        lines += [_FAILED, "trap nemo_run_ray_failed EXIT", _STOPPED]
    for command in startup:
        # Behind `eval … ||` a `set -e` of the command would have no effect.
        shown = repr(" ".join(command.split())[:200])
        lines += [f"nemo_run_ray_step={shlex.quote(shown)}", f"eval {shlex.quote(command)}", _CHECK]
    lines += [_FIND_PYTHON, "trap - EXIT TERM", 'exec -- "${nemo_run_ray_argv[@]}"']
    return ["bash", "-lc" if is_login else "-c", "\n".join(lines), "bash", *argv]
