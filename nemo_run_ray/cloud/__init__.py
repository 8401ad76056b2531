"""Source code for tasks on Lepton and DGX Cloud. Archives of Ray jobs are in ``experiment/``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_run_ray.cloud.ship_source import ShipSource, SourcePackager
    from nemo_run_ray.cloud.source import LEFT_OUT

__all__ = ["LEFT_OUT", "ShipSource", "SourcePackager"]


def __getattr__(name: str) -> Any:
    """Import the modules for these platforms when they are used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.ship_source"), name)
