"""``dgxcloud_legacy_kwargs``: ``app_id`` and ``app_secret`` are understood."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import threading
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from nemo_run.core.execution.dgxcloud import DGXCloudExecutor

from nemo_run_ray.patches.base import Edit, Patch, original

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
        fiddle = _Fiddle()
        self.must(isinstance(fiddle.signatures, WeakKeyDictionary), "fiddle's cache")
        self.must(hasattr(fiddle.state, "in_build"), "fiddle.build")
        return [Edit(DGXCloudExecutor, "__init__", _translating(build, _Notice(), fiddle))]

    def refresh(self) -> None:
        # fiddle remembers the signature that it saw first.
        _Fiddle().signatures.pop(DGXCloudExecutor, None)


class _Fiddle:
    """Internal parts of fiddle that this patch needs; ``None`` for one that fiddle has moved."""

    def __init__(self) -> None:
        # It is looked for when it is needed: importing this package must not depend on it.
        self.signatures: Any = _inner("signatures", "_signature_cache")
        self.state: Any = _inner("building", "_state")


def _inner(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"fiddle._src.{module}"), name, None)
    except ImportError:
        return None


class _Notice:
    """Tells once, however often and from however many threads it is asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = False

    def tell(self, text: str) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told:
            warnings.warn(text, DeprecationWarning, stacklevel=3)


def _translating(build: Any, notice: _Notice, fiddle: _Fiddle) -> Any:
    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        old = {name: kwargs.pop(name) for name in RENAMED if name in kwargs}
        for name, value in old.items():
            if value is not None and kwargs.get(RENAMED[name]) is None:
                kwargs[RENAMED[name]] = value
        # No user can fix a saved configuration, which every look at a job's state builds anew.
        if old and not fiddle.state.in_build:
            notice.tell(
                f"DGXCloudExecutor: {', '.join(old)} are now called "
                f"{', '.join(RENAMED[name] for name in old)}; please rename them."
            )
        build(self, *args, **{name: value for name, value in kwargs.items() if _given(name, value)})

    __init__.__signature__ = _signature(build)  # type: ignore[attr-defined]
    return __init__


def _given(name: str, value: object) -> bool:
    """``None`` for a new name is not a value; without it the constructor names what is missing."""
    return value is not None or name not in RENAMED.values()


def _signature(build: Any) -> inspect.Signature:
    """The constructor's, with the old names; for fiddle, either name suffices."""
    known = inspect.signature(original(build, "__init__"))
    parameters = [
        parameter.replace(default=None) if parameter.name in RENAMED.values() else parameter
        for parameter in known.parameters.values()
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str)
        for name in RENAMED
    ]
    return known.replace(parameters=parameters)
