"""``nemo-run-ray ns …``: a command of NeMo-Skills, whose tasks run on Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from nemo_run_ray import patches
from nemo_run_ray.errors import ConfigError

#: Name of NeMo-Skills' command.
COMMAND = "ns"


def run_ns(arguments: Sequence[str]) -> object:
    """Run NeMo-Skills' own command in this process, with the patch ``skills_executor``.

    Args:
        arguments: those of ``ns``, exactly as they are.

    Raises:
        ConfigError: NeMo-Skills is not installed beside this package.
        UnsupportedNemoRun: it is not as the patch knows it.
    """
    command = _command()
    patches.apply("skills_executor")
    sys.argv = [COMMAND, *arguments]
    return command.load()()


def _command() -> EntryPoint:
    for found in entry_points(group="console_scripts", name=COMMAND):
        if found.value.startswith("nemo_skills."):
            return found
    raise ConfigError(
        "NeMo-Skills, whose command `ns` this would run, is not installed beside nemo_run_ray "
        f"({sys.executable}). Install it there, from its source."
    )
