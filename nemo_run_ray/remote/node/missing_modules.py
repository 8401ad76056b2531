"""Which module is missing on this node, when NeMo-Run's runner could not load a task."""

from __future__ import annotations

import ast
import base64
import json
import os
import socket
import subprocess
import zlib
from contextlib import suppress
from typing import Dict, List, Optional, Set, Union

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


def modules_of(serialized: str) -> Set[str]:
    """Top-level modules that a serialised task refers to, NeMo-Run's own among them.

    The user's ``__main__`` is one of them too.
    """
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
