"""Which module is missing on this node, when NeMo-Run's runner could not load a task."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import zlib
from typing import Dict, List, Optional, Set

_PROBE = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(name) is not None
    except ImportError:
        found = False
    if not found:
        print(name)
"""


def modules_of(serialized: str) -> Set[str]:
    """Top-level modules that a serialised task refers to, NeMo-Run's own among them."""
    tree = json.loads(zlib.decompress(base64.urlsafe_b64decode(serialized)))
    names = {"nemo_run"}
    queue = [tree]
    while queue:
        node = queue.pop()
        if isinstance(node, dict):
            queue.extend(node.values())
            module = node.get("module")
            if isinstance(module, str) and module not in ("__main__", "builtins"):
                names.add(module.partition(".")[0])
        elif isinstance(node, list):
            queue.extend(node)
    return names


def explain(config: str, env: Dict[str, str], cwd: str) -> Optional[str]:
    """One line that names the missing modules, or ``None`` when that is not the trouble."""
    try:
        with open(config, encoding="ascii") as file:
            wanted = sorted(modules_of(file.read()))
    except (OSError, ValueError, zlib.error):
        return None  # the task removed it, or it is of a NeMo-Run that writes it otherwise
    missing = _missing(wanted, env, cwd)
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
