"""Programs that a test machine cannot have: their environments and images come from hubs.

They do what Ray asks of the real ones, refuse what they do not know, and run real processes.
"""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

#: The only conda environment, and the only image, that there are.
CONDA_ENVIRONMENT, IMAGE = "trainer", "registry.example.org/trainer:1"

_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
_CONDA = """\
#!/bin/sh
case "$*" in
    --help) ;;
    "info --json") echo '{info}' ;;
    *) echo "conda: unknown command: $*" >&2; exit 2 ;;
esac
"""
_ACTIVATE = """\
conda() {{
    [ "$1" = activate ] && [ -d "{envs}/$2" ] || {{ echo "conda: $*" >&2; return 1; }}
    export CONDA_PREFIX="{envs}/$2" CONDA_DEFAULT_ENV="$2" PATH="{envs}/$2/bin:$PATH"
}}
"""
_PODMAN = '''\
#!{python}
"""``podman run``: a clean environment, the folders and variables that are given, and no others."""
import os, sys

WITH_VALUE = ("-v", "--env", "--entrypoint", "--userns")
words, folders, env = sys.argv[1:], {{}}, {{"PATH": "{path}", "container": "podman"}}
entrypoint = None
if words.pop(0) != "run":
    sys.exit("podman: unknown command")
while words[0].startswith("-"):
    word = words.pop(0)
    name, _, value = word.partition("=")
    if word in WITH_VALUE:
        value = words.pop(0)
    if name == "-v":
        outside, inside = value.split(":")[:2]
        folders[inside] = outside
    elif name == "--env":
        key, _, given = value.partition("=")
        env[key] = given.strip("'")
    elif name == "--entrypoint":
        entrypoint = value
    elif name not in ("--rm", "--cgroup-manager", "--network", "--pid", "--ipc", "--userns"):
        sys.exit(f"podman: unknown option {{word}}")
image = words.pop(0)
if image != "{image}":
    print("Error: initializing source: name unknown", file=sys.stderr)
    sys.exit(125)
command = [entrypoint, *words] if entrypoint else words
assert command[0] == "python", command
# A folder that is mounted elsewhere: in the program's text, since nothing is mounted here.
for inside, outside in folders.items():
    command = [one.replace(inside, outside) for one in command]
os.execve("{python}", ["{python}", *command[1:]], env)
'''


def conda(home: Path) -> None:
    """Make ``RAY_CONDA_HOME`` with one environment: this Python's, behind a path of its own."""
    envs = home / "envs"
    info = json.dumps({"conda_prefix": str(home), "envs": [str(envs / CONDA_ENVIRONMENT)]})
    _program(home / "bin" / "conda", _CONDA.format(info=info))
    activate = home / "etc" / "profile.d" / "conda.sh"
    activate.parent.mkdir(parents=True, exist_ok=True)
    activate.write_text(_ACTIVATE.format(envs=envs))
    for name in ("python", "python3"):
        text = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        _program(envs / CONDA_ENVIRONMENT / "bin" / name, text)


def podman(folder: Path) -> None:
    """Make ``podman`` in a folder that is on Ray's ``PATH``."""
    text = _PODMAN.format(python=sys.executable, image=IMAGE, path=_PATH)
    _program(folder / "podman", text)


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
