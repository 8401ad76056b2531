"""The side that NeMo-Run calls, and its registries."""

from __future__ import annotations

import logging
from importlib.metadata import version

log = logging.getLogger(__name__)


def register() -> None:
    """Tell NeMo-Run about ``RayExecutor``; a second call changes nothing.

    A NeMo-Run that keeps its registries elsewhere gets one warning, and everything else of it, and
    of the programs that import this package, works on.
    """
    try:
        from nemo_run_ray.nemo import registry

        registry.register()
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        log.warning(
            "RayExecutor cannot be used with NeMo-Run %s, whose registries are not those that "
            "nemo_run_ray knows (%s: %s). Install a version of nemo_run_ray for it.",
            version("nemo-run"),
            type(error).__name__,
            error,
        )
