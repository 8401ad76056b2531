"""Changes of NeMo-Run itself, each by its name: ``apply``, ``undo``, ``status``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from nemo_run_ray.errors import PatchError, UnsupportedNemoRun
from nemo_run_ray.patches.base import Patch
from nemo_run_ray.patches.data_mover_configs import DataMoverConfigsPatch
from nemo_run_ray.patches.dgxcloud_exports import DGXCloudExportsPatch
from nemo_run_ray.patches.dgxcloud_legacy_kwargs import DGXCloudLegacyKwargsPatch
from nemo_run_ray.patches.dgxcloud_refusal import DGXCloudRefusalPatch
from nemo_run_ray.patches.job_group import JobGroupPatch
from nemo_run_ray.patches.slurm_ray import SlurmRayPatch

__all__ = [
    "PATCHES",
    "VARIABLE",
    "Patch",
    "add",
    "apply",
    "apply_from_environment",
    "status",
    "undo",
]

log = logging.getLogger(__name__)

#: Names the patches that ``import nemo_run_ray`` applies: separated by commas, or ``all``.
VARIABLE = "NEMO_RUN_RAY_PATCHES"
PATCHES: dict[str, Patch] = {
    patch.name: patch
    for patch in (
        JobGroupPatch(),
        DataMoverConfigsPatch(),
        DGXCloudExportsPatch(),
        DGXCloudLegacyKwargsPatch(),
        DGXCloudRefusalPatch(),
        SlurmRayPatch(),
    )
}


def add(patch: Patch) -> None:
    """Make a patch known that needs more of this package than patches may import."""
    PATCHES.setdefault(patch.name, patch)


def apply(*names: str) -> Callable[[], bool]:
    """Apply the named patches: every one of them or, after an error, none.

    Without a name it applies all that fit; a warning names each that is left out.

    Returns:
        A function that undoes those that this call applied; ``True`` when all of them are off.

    Raises:
        PatchError: there is no patch of that name.
        UnsupportedNemoRun: a patch that is named does not know this NeMo-Run.
    """
    fresh = [patch for patch in _named(names) if patch.status() == "off"]
    done: list[Patch] = []
    try:
        for patch in fresh:
            try:
                patch.apply()
            except UnsupportedNemoRun as error:
                if names:
                    raise
                log.warning("A patch is left out: %s", error)
            else:
                done.append(patch)
    except BaseException:
        _undo(done)
        raise
    return lambda: _undo(done)


def apply_from_environment(environment: Mapping[str, str] = os.environ) -> Callable[[], bool]:
    """Apply what ``NEMO_RUN_RAY_PATCHES`` names; nothing when it is unset or empty.

    ``all`` is ``apply()``.

    Returns:
        As ``apply``.

    Raises:
        PatchError: there is no patch of a name.
        UnsupportedNemoRun: a patch that it names does not know this NeMo-Run.
    """
    text = environment.get(VARIABLE, "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        return lambda: True
    for name in names:
        if name not in PATCHES and name != "all":
            raise PatchError(
                f"{VARIABLE}={text!r}: there is no patch {name!r}; there are "
                f"{', '.join(PATCHES)}, and 'all' for all of them."
            )
    return apply() if "all" in names else apply(*names)


def undo(*names: str) -> bool:
    """Undo the named patches, or all, and return whether all of them are off now."""
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
