"""The verbs for NeMo-Run's command line, which loads this module: ``nemo ray <verb>``."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import catalogue
import typer
from nemo_run.cli.api import ROOT_ENTRYPOINT_NAMESPACE

from nemo_run_ray.cli.main import VERBS, guarded


def _add(name: str, parent: typer.Typer) -> None:
    parent.command(name)(guarded(VERBS[name]))


for _name in VERBS:  # each as NeMo-Run's command line takes it: with a path and a way to add itself
    _verb = SimpleNamespace(path=f"ray.{_name}", cli=partial(_add, _name))
    catalogue._set((ROOT_ENTRYPOINT_NAMESPACE, "ray", _name), _verb)
