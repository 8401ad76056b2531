"""The words, the environment and the interpreter of the user's command on a node."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from typing import Dict, List, Mapping

from ..spec import JobSpec
from .rundir import RunDir
from .shell import in_shell

#: The variables behind NeMo-Run's macros; nothing else in a command is expanded.
_MACROS = re.compile(
    r"\$(NEMO_RUN_(?:HEAD_NODE_IP|NPROC_PER_NODE|NUM_NODES|NODE_RANK|RDZV_PORT"
    r"|HET_GROUP_HOST_\d+))\b"
)


#: An embedded Ray's variable with the caller's TMPDIR, empty when he had none set.
_TMPDIR = "NEMO_RUN_RAY_TMPDIR"


def restore_tmpdir() -> None:
    """Give jobs of an embedded Ray the caller's TMPDIR: its own is removed when it stops."""
    given = os.environ.pop(_TMPDIR, None)
    if given is not None:
        os.environ.pop("TMPDIR", None)
        if given:
            os.environ["TMPDIR"] = given


def tmpdir() -> str:
    """The folder of temporary files of a process that has called ``restore_tmpdir``."""
    given = os.environ.get(_TMPDIR)
    if given is None:
        return tempfile.gettempdir()
    return given or "/tmp"


def environment(
    spec: JobSpec, run_dir: RunDir, given: Mapping[str, str], secrets: Mapping[str, str]
) -> Dict[str, str]:
    """The variables of a task's command.

    Args:
        spec: the task.
        run_dir: where ``/nemo_run`` is.
        given: what the node has set.
        secrets: the values of those that the task names.
    """
    env = dict(given)
    env.update({name: run_dir.map(value) for name, value in spec.env.items()})
    env.update(secrets)
    if spec.python is not None and os.path.isabs(spec.python):
        env["PATH"] = os.pathsep.join([os.path.dirname(spec.python), env.get("PATH", os.defpath)])
    # A task may call ray.init(runtime_env=…) itself; without this Ray refuses to merge the two.
    env.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    return {**env, **{name: expand(env[name], env) for name in spec.env}}


def words(spec: JobSpec, run_dir: RunDir, env: Mapping[str, str]) -> List[str]:
    """The exact words of a task's command."""
    argv = [expand(run_dir.map(word), env) for word in spec.argv]
    if spec.login_shell or spec.startup:
        startup = [run_dir.map(line) for line in spec.startup]
        return in_shell(argv, spec.login_shell, startup, spec.python)
    if argv[0] == "python":
        argv[0] = _python(spec, env)
    return argv


def expand(word: str, env: Mapping[str, str]) -> str:
    """The word with NeMo-Run's macros replaced by their values."""
    return _MACROS.sub(lambda match: env.get(match.group(1), ""), word)


def _python(spec: JobSpec, env: Mapping[str, str]) -> str:
    """What ``python`` means: the one asked for, the one on PATH, or the one that runs us."""
    if spec.python is not None:
        return spec.python
    return "python" if shutil.which("python", path=env.get("PATH")) else sys.executable
