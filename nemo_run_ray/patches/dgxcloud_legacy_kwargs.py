"""``dgxcloud_legacy_kwargs``: ``app_id`` and ``app_secret`` are understood."""

from __future__ import annotations

import dataclasses
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
    name = "dgxcloud_legacy_kwargs"
    why = (
        "DGX Cloud: app_id and app_secret, the names of client_id and client_secret before "
        "NeMo-Run 0.10, are understood in the constructor and in saved configurations, so that "
        "the jobs of older experiments can still be asked for their state."
    )
    retired_by = "a DGXCloudExecutor that takes the old names as deprecated ones"

    def is_needed(self) -> bool:
        names = {field.name for field in dataclasses.fields(DGXCloudExecutor)}
        return not names & set(RENAMED)

    def edits(self) -> Sequence[Edit]:
        build = self.method(DGXCloudExecutor, "__init__", *RENAMED.values())
        return [
            Edit(DGXCloudExecutor, "__init__", _translating(build)),
            # The constructor's signature is in it, from before.
            Edit(signatures, "_signature_cache", weakref.WeakKeyDictionary()),
        ]


PATCH = DGXCloudLegacyKwargsPatch()


def _translating(build: Any) -> Any:
    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        old = {name: kwargs.pop(name) for name in RENAMED if name in kwargs}
        for name, new in RENAMED.items():
            if kwargs.get(new) is None:
                kwargs.pop(new, None)  # the constructor names what is missing
                kwargs |= {new: old[name]} if name in old else {}
        if old:  # Python shows it for a line of the user's, and not where fiddle builds
            warnings.warn(
                f"DGXCloudExecutor: {', '.join(old)} are now called "
                f"{', '.join(RENAMED[name] for name in old)}; please rename them.",
                DeprecationWarning,
                stacklevel=2,
            )
        build(self, *args, **kwargs)

    __init__.__signature__ = _signature(build)  # type: ignore[attr-defined]
    return __init__


def _signature(build: Any) -> inspect.Signature:
    """The constructor's, with the old names; for fiddle, either name suffices."""
    known = inspect.signature(build)
    parameters = {
        name: parameter.replace(default=None) if name in RENAMED.values() else parameter
        for name, parameter in known.parameters.items()
    }
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):  # a wrapper takes all
        for name in RENAMED:
            parameters[name] = parameters[RENAMED[name]].replace(name=name)
    return known.replace(parameters=list(parameters.values()))
