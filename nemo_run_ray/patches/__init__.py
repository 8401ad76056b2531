"""Changes of NeMo-Run itself, each by its name: ``apply``, ``undo``, ``status``."""

from __future__ import annotations

from collections.abc import Callable

from nemo_run_ray.errors import PatchError
from nemo_run_ray.patches.base import Patch
from nemo_run_ray.patches.job_group import JobGroupPatch

__all__ = ["PATCHES", "Patch", "apply", "status", "undo"]

PATCHES: dict[str, Patch] = {patch.name: patch for patch in (JobGroupPatch(),)}


def apply(*names: str) -> Callable[[], bool]:
    """Apply the named patches, or all: every one of them or, after an error, none.

    Returns:
        A function that undoes those that this call applied; ``True`` when all of them are off.

    Raises:
        PatchError: there is no patch of that name.
        UnsupportedNemoRun: a patch does not know this NeMo-Run.
    """
    fresh = [one for one in _named(names) if one.status() == "off"]
    done: list[Patch] = []
    try:
        for patch in fresh:
            patch.apply()
            done.append(patch)
    except BaseException:
        _undo(done)
        raise
    return lambda: _undo(fresh)


def undo(*names: str) -> bool:
    """Undo the named patches, or all; whether all of them are off now."""
    return _undo(_named(names))


def status() -> dict[str, str]:
    """The state of every patch, by its name; see ``Patch.status``."""
    return {name: patch.status() for name, patch in PATCHES.items()}


def _undo(patches: list[Patch]) -> bool:
    off = [patch.undo() for patch in reversed(patches)]  # every one, whatever the others say
    return all(off)


def _named(names: tuple[str, ...]) -> list[Patch]:
    for name in names:
        if name not in PATCHES:
            raise PatchError(f"There is no patch {name!r}; there are {', '.join(PATCHES)}.")
    return [PATCHES[name] for name in names or PATCHES]
