"""What ``defaults`` and ``pools`` say of an executor's fields, each checked where it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from nemo_run.core.packaging.base import Packager
from nemo_run.core.packaging.git import GitArchivePackager

from nemo_run_ray.cloud.folder_packager import FolderPackager
from nemo_run_ray.cluster_files.document import KeyPath
from nemo_run_ray.cluster_files.images import check_image
from nemo_run_ray.cluster_files.load import Loaded
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.fields import nearest

#: Fields of an executor that a file's defaults cannot give, with the reason.
NOT_IN_DEFAULTS = {
    "cluster": "the section `cluster` says that",
    "address": "the section `cluster` says that",
    "secrets": "the section `secrets` names them",
    "pool": "a task names its pool itself",
    "preflight": "the section `preflight` says that",
    "role": "it belongs to one task",
    "ready": "it belongs to one task",
    "dependencies": "they belong to one task",
    "launcher": "it belongs to one task",
    "resource_group": "NeMo-Run sets it",
    "given_fields": "the executor sets it",
    "experiment_id": "NeMo-Run sets it",
    "experiment_dir": "NeMo-Run sets it",
    "job_dir": "NeMo-Run sets it",
    "_launcher_setup": "NeMo-Run sets it",
}
#: Fields of a pool that are none of an executor.
_OF_THE_POOL = ("image", "address", "notes")
_PACKAGERS: dict[str, Callable[[], Packager]] = {"none": Packager, "git": GitArchivePackager}


def check_fields_of(loaded: Loaded) -> None:
    """Check all that a file says of an executor's fields, whoever uses it.

    Raises:
        ConfigError: a field or a value is wrong.
    """
    default_values(loaded)
    images: dict[KeyPath, Any] = {("defaults", "image"): loaded.file.defaults.get("image")}
    for name, pool in loaded.file.pools.items():
        pool_values(loaded, name)
        images["pools", name, "image"] = pool.image
    for key, image in images.items():
        if image is not None:
            try:
                check_image(str(image), loaded)
            except ConfigError as error:
                raise loaded.refuse(key, str(error)) from error


def default_values(loaded: Loaded) -> dict[str, Any]:
    """The executor's fields that the file's defaults give.

    Raises:
        ConfigError: a field is unknown or cannot be a default, or a value is not allowed.
    """
    known = [field.name for field in fields(RayExecutor) if field.name not in NOT_IN_DEFAULTS]
    for name in loaded.file.defaults:
        if name in NOT_IN_DEFAULTS:
            problem = f"this field of RayExecutor is no default: {NOT_IN_DEFAULTS[name]}."
            raise loaded.refuse(("defaults", name), problem)
        if name not in known:
            meant = nearest(name, known)
            hint = f"did you mean {meant!r}?" if meant else f"it has {', '.join(known)}."
            raise loaded.refuse(("defaults", name), f"RayExecutor has no such field; {hint}")
    return _checked(loaded, ("defaults",), loaded.file.defaults)


def pool_values(loaded: Loaded, pool: str | None) -> dict[str, Any]:
    """The executor's fields that a pool gives.

    Raises:
        ConfigError: a value is not allowed.
    """
    if pool is None:
        return {}
    given = loaded.file.pools[pool].model_dump(exclude_unset=True, exclude=set(_OF_THE_POOL))
    return _checked(loaded, ("pools", pool), given)


def _checked(loaded: Loaded, section: KeyPath, given: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        try:
            found[name] = _packager(value) if name == "packager" else value
            if name != "image":
                RayExecutor(**{name: found[name]})
        except ConfigError as error:
            raise loaded.refuse((*section, name), str(error)) from error
    found.pop("image", None)
    return found


def _packager(value: Any) -> Packager:
    if isinstance(value, str) and value in _PACKAGERS:
        return _PACKAGERS[value]()
    if isinstance(value, dict) and list(value) == ["folder"]:
        return FolderPackager(value["folder"])
    known = ", ".join(_PACKAGERS)
    raise ConfigError(f"found {value!r}; allowed are {known} and {{folder: <path>}}.")
