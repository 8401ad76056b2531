"""``dgxcloud_legacy_kwargs``: ``app_id`` and ``app_secret`` are understood."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from fiddle._src import signatures
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor

from nemo_run_ray.patches import Edit, Patch

#: Old name to new name; NeMo-Run 0.10 renamed them.
RENAMED = {"app_id": "client_id", "app_secret": "client_secret"}


class DGXCloudLegacyKwargsPatch(Patch):
    """DGX Cloud: app_id and app_secret, the names of client_id and client_secret before NeMo-Run
    0.10, are understood in the constructor and in saved configurations, so that the jobs of older
    experiments can still be asked for their state.
    """

    name = "dgxcloud_legacy_kwargs"
    retired_by = "a DGXCloudExecutor that takes the old names as deprecated ones"

    def is_needed(self) -> bool:
        fields = DGXCloudExecutor.__dataclass_fields__
        return "client_id" in fields and "app_id" not in fields

    def edits(self) -> Sequence[Edit]:
        return [
            self.wrapped(DGXCloudExecutor, "__init__", _translating),
            # The constructor's signature is in it, from before.
            Edit(signatures, "_signature_cache", weakref.WeakKeyDictionary()),
        ]


PATCH = DGXCloudLegacyKwargsPatch()


def _translating(build: Any) -> Any:
    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        for old in RENAMED.keys() & kwargs.keys():
            # Python shows it for a line of the user's, and not where fiddle builds.
            warnings.warn(
                f"DGXCloudExecutor: {old} is now called {RENAMED[old]}; please rename it.",
                DeprecationWarning,
                stacklevel=2,
            )
            value = kwargs.pop(old)
            if kwargs.get(RENAMED[old]) is None and value is not None:
                kwargs[RENAMED[old]] = value
        build(self, *args, **kwargs)

    known = inspect.signature(build)
    parameters = dict(known.parameters)
    for name, new in RENAMED.items():
        if new in parameters:  # another package's wrapper takes all names
            parameters[new] = parameters[new].replace(default=None)  # either suffices
            parameters[name] = parameters[new].replace(name=name)
    __init__.__signature__ = known.replace(  # type: ignore[attr-defined]
        parameters=list(parameters.values())
    )
    return __init__
