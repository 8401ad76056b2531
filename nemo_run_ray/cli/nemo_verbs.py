"""The verbs for NeMo-Run's command line, which loads this module: ``nemo ray <verb>``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import catalogue
import typer
from nemo_run.cli.api import ROOT_ENTRYPOINT_NAMESPACE

from nemo_run_ray.cli.main import VERBS, guarded


class _Verb:
    """One verb as NeMo-Run's command line takes it: with a path and a way to add itself."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.path = f"ray.{name}"
        self._name = name
        self._function = function

    def cli(self, parent: typer.Typer) -> None:
        parent.command(self._name)(guarded(self._function))


for _name, _function in VERBS.items():
    catalogue._set((ROOT_ENTRYPOINT_NAMESPACE, "ray", _name), _Verb(_name, _function))
