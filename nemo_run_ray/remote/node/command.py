"""The words, the environment and the interpreter of the user's command on a node."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from contextlib import suppress
from typing import Dict, List, Mapping, Optional, Sequence, Set, Union

from ..spec import JobSpec
from .output import PREFIX
from .rundir import RunDir

#: The variables behind NeMo-Run's macros; nothing else in a command is expanded.
_MACROS = re.compile(
    r"\$(NEMO_RUN_(?:HEAD_NODE_IP|NPROC_PER_NODE|NUM_NODES|NODE_RANK|RDZV_PORT"
    r"|HET_GROUP_HOST_\d+))\b"
)
#: An embedded Ray's variable with the caller's TMPDIR, empty when he had none set.
_TMPDIR = "NEMO_RUN_RAY_TMPDIR"
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
_PROBE = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(name) is not None
    except ImportError:
        found = False
    except ValueError:
        found = True
    if not found:
        print(name)
"""


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
    """The interpreter for ``python``: the one asked for, the one on PATH, or ours."""
    if spec.python is not None:
        return spec.python
    return "python" if shutil.which("python", path=env.get("PATH")) else sys.executable


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


def modules_of(serialized: str) -> Set[str]:
    """Top-level modules that a serialised task refers to, NeMo-Run's own among them.

    The user's ``__main__`` is one of them too.
    """
    import base64
    import zlib

    return {"nemo_run"} | modules_in(zlib.decompress(base64.urlsafe_b64decode(serialized)))


def modules_in(configuration: Union[str, bytes]) -> Set[str]:
    """Top-level modules that a configuration in Fiddle's JSON refers to."""
    names: Set[str] = set()
    queue = [json.loads(configuration)]
    while queue:
        node = queue.pop()
        if isinstance(node, dict):
            queue.extend(node.values())
            module = node.get("module")
            if isinstance(module, str) and module != "builtins":
                names.add(module.partition(".")[0])
        elif isinstance(node, list):
            queue.extend(node)
    return names


def imported_by(program: str) -> Set[str]:
    """Top-level modules that a program imports before it does anything else.

    What comes later may depend on that: on a folder that it puts on the path, say.
    """
    import ast

    names: Set[str] = set()
    for statement in ast.parse(program).body:
        if isinstance(statement, ast.Import):
            names.update(alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            if statement.module and not statement.level:
                names.add(statement.module)
        elif not isinstance(statement, ast.Expr):  # a docstring is one
            break
    return {name.partition(".")[0] for name in names}


def explain(root: str, config: str, env: Dict[str, str], cwd: str) -> Optional[str]:
    """One line that names the missing modules, or ``None`` when that is not the trouble.

    Args:
        root: the run directory, with the user's ``__main__.py``.
        config: path of the serialised task, below it.
        env: of the command.
        cwd: of the command.
    """
    import socket
    import zlib

    try:
        with open(os.path.join(root, config), encoding="ascii") as file:
            wanted = modules_of(file.read())
    except (OSError, ValueError, zlib.error):
        return None  # the task removed it, or it is of a NeMo-Run that writes it otherwise
    if "__main__" in wanted:
        wanted.remove("__main__")
        main = os.path.join(root, "__main__.py")
        # It may be written for a newer Python.
        unreadable = (OSError, ValueError, SyntaxError, RecursionError)
        with suppress(*unreadable), open(main, encoding="utf-8") as file:
            wanted |= imported_by(file.read())
    missing = _missing(sorted(wanted), env, cwd)
    if not missing:
        return None
    names = ", ".join(repr(name) for name in missing)
    advice = (
        "install it in the node's image, or give it in `runtime_env={'pip': […]}`"
        if missing == ["nemo_run"]
        else "let the executor's `packager` ship it, install it in the node's image, or give it in "
        "`runtime_env={'pip': […]}`"
    )
    return f"the task needs {names}, which python on node {socket.gethostname()} lacks: {advice}"


def _missing(names: List[str], env: Dict[str, str], cwd: str) -> List[str]:
    import subprocess

    try:
        done = subprocess.run(
            ["python", "-c", _PROBE, *names],
            env=env,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []  # this only explains; the failure itself has been reported
    return done.stdout.split()
