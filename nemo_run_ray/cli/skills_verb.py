"""``nemo-run-ray ns …``: a command of NeMo-Skills, whose tasks run on Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version

from nemo_run_ray import patches
from nemo_run_ray.errors import ConfigError

#: Name of NeMo-Skills' command.
COMMAND = "ns"


def run_ns(arguments: Sequence[str]) -> object:
    """Run NeMo-Skills' own command in this process, with the patch ``skills_executor``.

    Args:
        arguments: those of ``ns``, exactly as they are.

    Raises:
        ConfigError: NeMo-Skills is not installed beside this package, or with a typer that does not
            know its options.
        UnsupportedNemoRun: it is not as the patch knows it.
    """
    command = _command()
    patches.apply("skills_executor")
    app = command.load()
    _check_options(app)
    sys.argv = [COMMAND, *arguments]
    return app()


def _check_options(app: object) -> None:
    """Refuse a typer that makes ``--server-type`` of what NeMo-Skills calls ``--server_type``."""
    import typer

    if not isinstance(app, typer.Typer):
        return
    commands = getattr(typer.main.get_command(app), "commands", {}).values()
    options = [(option.name or "", option.opts) for each in commands for option in each.params]
    renamed = [f"--{name}" for name, opts in options if f"--{name.replace('_', '-')}" in opts]
    unknown = [option for option in renamed if "_" in option]
    if unknown and not any(f"--{name}" in opts for name, opts in options if "_" in name):
        raise ConfigError(
            f"typer {version('typer')} does not know NeMo-Skills' options that have an underscore, "
            f"such as {unknown[0]}. Install an older one beside it: pip install 'typer<0.27'."
        )


def _command() -> EntryPoint:
    for found in entry_points(group="console_scripts", name=COMMAND):
        if found.value.startswith("nemo_skills."):
            return found
    raise ConfigError(
        "NeMo-Skills, whose command `ns` this would run, is not installed beside nemo_run_ray "
        f"({sys.executable}). Install it there, from its source."
    )
