"""The verbs for NeMo-Run's command line, which loads this module: ``nemo ray <verb>``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import catalogue
import typer
from nemo_run.cli.api import ROOT_ENTRYPOINT_NAMESPACE

from nemo_run_ray.cli.main import VERBS, guarded


def _verb(name: str, function: Callable[..., Any]) -> SimpleNamespace:
    """A verb as NeMo-Run's command line takes it: with a path and a way to add itself."""

    def cli(parent: typer.Typer) -> None:
        parent.command(name)(guarded(function))

    return SimpleNamespace(path=f"ray.{name}", cli=cli)


for _name, _function in VERBS.items():
    catalogue._set((ROOT_ENTRYPOINT_NAMESPACE, "ray", _name), _verb(_name, _function))
