"""An executor that names a cluster file becomes one that needs none."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import nemo_run as run
from nemo_run.core.frontend.console.api import CONSOLE
from nemo_run.core.packaging.base import Packager
from nemo_run.core.packaging.git import GitArchivePackager

from nemo_run_ray.cluster_files.load import (
    FORMAT,
    KeyPath,
    Loaded,
    Variables,
    find,
    is_for_others,
    load,
    usual_places,
    variables_of,
)
from nemo_run_ray.cluster_files.schema import ClusterFile, SidecarPart, SlurmPart
from nemo_run_ray.clusters import Cluster, ExistingCluster, LocalCluster, Sidecar, SlurmCluster
from nemo_run_ray.errors import ConfigError, NoClusterFile, as_markup
from nemo_run_ray.executor import FILE_VARIABLES, RayExecutor
from nemo_run_ray.fields import PortProbe, nearest

#: Foreign files whose ignored keys were told in this process.
_told: set[Path] = set()
#: Fields with values by name: each name is looked for in the code, the pool, the defaults.
_JOINED = ("env_vars", "label_selector", "resources_per_node", "runtime_env", "ports")


def resolve(executor: RayExecutor) -> RayExecutor:
    """The executor with all that its cluster file says; itself when it names none.

    Raises:
        ConfigError: the file or what it says is wrong, or does not have what the executor names.
    """
    if executor.resource_group:
        found = copy.copy(executor)
        found.resource_group = [resolve(role) for role in executor.resource_group]
        return _with_cluster_of_roles(found)
    name = executor.file_name()
    if name is None or _is_for_others(executor, name):
        _refuse_without_file(executor)
        return executor
    try:
        loaded = load(name)
    except NoClusterFile as error:
        if executor.cluster is not None:
            raise
        variables = " or ".join(FILE_VARIABLES)
        raise NoClusterFile(f"{error} The name comes from the variable {variables}.") from error
    _tell_ignored(loaded)
    found = copy.copy(executor)
    for field, value in _values(executor, loaded).items():
        setattr(found, field, value)
    found.cluster = cluster_of(loaded, executor.pool)
    found.address = found.pool = found.image = None
    own = set(executor.secrets)
    places = loaded.file.env.value_from
    found.secret_places = {
        name: places.get(name) or usual_places(name) for name in found.secrets if name not in own
    }
    found.resolved_from = name
    try:
        found.check()
    except ConfigError as error:
        raise ConfigError(f"With the cluster file {loaded.path}: {error}") from error
    return found


def _with_cluster_of_roles(group: RayExecutor) -> RayExecutor:
    """The group on the cluster that its roles have, each by its own names."""
    first, *others = group.resource_group
    for role in others:
        if role.resolve_cluster().record() != first.resolve_cluster().record():
            raise ConfigError(
                f"The roles {first.role or '0'!r} and {role.role!r} of a group have different "
                f"clusters: {first.resolve_cluster()!r} and {role.resolve_cluster()!r}. Name one "
                "cluster file and pools of one dashboard."
            )
    group.cluster, group.address, group.pool = first.resolve_cluster(), None, None
    group.resolved_from = first.resolved_from
    return group


def _is_for_others(executor: RayExecutor, name: str) -> bool:
    """Whether the name is NeMo-Skills' own default, and its file is not here or not for Ray."""
    if executor.cluster is not None or os.environ.get(FILE_VARIABLES[0]):
        return False
    try:
        path, _ = find(name)
    except NoClusterFile:
        return True  # NeMo-Skills looks in its own package too
    return bool(is_for_others(path))


def _tell_ignored(loaded: Loaded) -> None:
    """Say once what a foreign file has that means nothing on Ray."""
    if loaded.path in _told or not loaded.reading.ignored:
        return
    _told.add(loaded.path)
    keys = ", ".join(ignored.key for ignored in loaded.reading.ignored)
    CONSOLE.log(
        as_markup(
            f"{loaded.path} ({loaded.reading.format}): not used on Ray are {keys}. "
            f"`nemo-run-ray clusters {loaded.name}` says why."
        )
    )


def cluster_of(loaded: Loaded, pool: str | None = None) -> Cluster:
    """The cluster that a file names, or the one that a pool of it has for itself.

    Raises:
        ConfigError: an address, a header or a token is wrong.
    """
    part = loaded.file.cluster
    own = loaded.file.pools[pool].address if pool is not None else None
    address = own if own is not None else part.address
    if address is None:
        if part.slurm is not None:
            try:
                return slurm_cluster(part.slurm, loaded.path)
            except ConfigError as error:
                raise loaded.refuse(("cluster", "slurm"), str(error)) from error
        local = part.local
        return LocalCluster(**local.model_dump()) if local is not None else LocalCluster()
    headers = dict(part.headers)
    if part.token_variable is not None:
        if any(name.lower() == "authorization" for name in headers):
            problem = "there is a header Authorization too; expected one of them."
            raise loaded.refuse(("cluster", "token_variable"), problem)
        # Saved as it is, and filled from the environment at every connection.
        headers["Authorization"] = f"Bearer ${{{part.token_variable}}}"
    verify = part.verify
    if isinstance(verify, str):
        verify = str(loaded.path.parent / Path(verify).expanduser())
    try:
        return ExistingCluster(address, headers=headers, verify=verify)
    except ConfigError as error:
        place = ("pools", str(pool), "address") if own is not None else ("cluster",)
        raise loaded.refuse(place, str(error)) from error


def _refuse_without_file(executor: RayExecutor) -> None:
    for field in ("pool", "image"):
        value = getattr(executor, field)
        if value is not None:
            raise ConfigError(
                f"RayExecutor.{field} is {value!r}, and no cluster file is named in which it could "
                "be found. Give cluster='<name of the file>', or set "
                f"{FILE_VARIABLES[0]}."
            )


def _values(executor: RayExecutor, loaded: Loaded) -> dict[str, Any]:
    """The fields of the executor that the file changes."""
    pool = _pool_name(executor, loaded)
    image = _image(executor, loaded)
    below = [_of_image(image, loaded), default_values(loaded), pool_values(loaded, pool)]
    variables = variables_of(loaded.file, str(loaded.path), os.environ)
    values: dict[str, Any] = {}
    for field in fields(executor):
        name = field.name
        if name in NOT_IN_DEFAULTS:
            continue
        layers = [layer[name] for layer in below if name in layer]
        if name in _JOINED:
            layers.append(getattr(executor, name))
            values[name] = {key: value for layer in layers for key, value in layer.items()}
        elif layers and not executor.has_own(name):
            values[name] = layers[-1]
    if executor.preflight is None:
        values.setdefault("preflight", loaded.file.preflight.enabled)
    return {**values, **_with_variables(executor, values["env_vars"], variables)}


def _with_variables(
    executor: RayExecutor, env_vars: dict[str, str], variables: Variables
) -> dict[str, Any]:
    """``env_vars`` and ``secrets``; a name that the code has as one is not the other too."""
    of_ray = executor.runtime_env.get("env_vars") or {}
    secrets = [name for name in variables.secrets if name not in env_vars and name not in of_ray]
    secrets = list(dict.fromkeys([*executor.secrets, *secrets]))
    clear = {
        name: value
        for name, value in {**variables.clear, **env_vars}.items()
        if name in executor.env_vars or name not in secrets
    }
    return {"env_vars": clear, "secrets": secrets}


def _pool_name(executor: RayExecutor, loaded: Loaded) -> str | None:
    pools = loaded.file.pools
    if executor.pool is None or executor.pool in pools:
        return executor.pool
    meant = nearest(executor.pool, pools)
    hint = f"did you mean {meant!r}?" if meant else f"it has {', '.join(pools) or 'none'}."
    raise ConfigError(
        f"RayExecutor.pool is {executor.pool!r}, and {loaded.path} has no pool of that name; {hint}"
    )


def _image(executor: RayExecutor, loaded: Loaded) -> str | None:
    """The image of the code, of the pool or of the defaults."""
    if executor.image is not None:
        return executor.image
    pool = loaded.file.pools.get(executor.pool) if executor.pool is not None else None
    if pool is not None and pool.image is not None:
        return pool.image
    found = loaded.file.defaults.get("image")
    return None if found is None else str(found)


def _of_image(image: str | None, loaded: Loaded) -> dict[str, Any]:
    """The fields by which a task gets its image on this cluster."""
    file = loaded.file
    if image is None or file.images_as == "none":
        return {}
    if file.images_as == "image_uri":
        return {"runtime_env": {"image_uri": file.images.get(image, image)}}
    check_image(image, loaded)
    return {"label_selector": labels_of(image, file)}


_NOT_IN_LABELS = re.compile(r"[^a-z0-9_.-]+")
_HYPHENS = re.compile(r"-{2,}")


def labels_of(image: str, file: ClusterFile) -> dict[str, str]:
    """Labels of the nodes for a task with this image.

    A label that ``defaults.label_selector`` gives wins over the one derived from the image.

    Args:
        image: a name in the file's ``images``, or an image.
        file: the cluster file.
    """
    static = file.defaults.get("label_selector") or {}
    return {**derived_labels(image, file), **static}


def check_image(image: str, loaded: Loaded) -> None:
    """Check that one of this package's files says which nodes have an image.

    Raises:
        ConfigError: it says of none, and the task would run on any node.
    """
    file = loaded.file
    if file.images_as != "label" or loaded.reading.format != FORMAT:
        return
    if labels_of(image, file) or image in file.image_labels:
        return
    meant = None if image in file.images else nearest(image, [*file.images, *file.image_labels])
    hint = f" Did you mean {meant!r}?" if meant else ""
    raise ConfigError(
        f"The image {image!r} has no labels in {loaded.path}, and would run on any node.{hint} "
        "Add it to `image_labels`, give `image_label_key`, or say `images_as: none`."
    )


def derived_labels(image: str, file: ClusterFile) -> dict[str, str]:
    """Labels that the file derives from an image alone.

    Every entry of ``image_labels`` that matches contributes, and the first one wins a label; but an
    entry of just this name or image comes in place of those of other names of the image. Only
    where none matches, ``image_label_key`` gives a label with the image as its value.

    Raises:
        ConfigError: the image has several names, whose entries disagree.
    """
    asked, image = image, file.images.get(image, image)
    matching = {}
    for key, entry in file.image_labels.items():
        pattern = file.images.get(key, key)
        is_left_out = key in file.images and key != asked and asked in file.image_labels
        if not is_left_out and (image == pattern or fnmatchcase(image, pattern)):
            matching[key] = entry
    _check_agreement(image, {key: matching[key] for key in matching if key in file.images})
    labels: dict[str, str] = {}
    for entry in matching.values():
        labels = {**entry, **labels}
    if not matching and file.image_label_key and image:
        labels = {file.image_label_key: label_value(image)}
    return labels


def _check_agreement(image: str, by_name: Mapping[str, Mapping[str, str]]) -> None:
    first: dict[str, str] = {}
    for name, entry in by_name.items():
        for label, value in entry.items():
            other = first.setdefault(label, name)
            if by_name[other][label] != value:
                raise ConfigError(
                    f"The image {image!r} has the names {other!r} and {name!r}, and they disagree "
                    f"about its nodes: the label {label} is {by_name[other][label]!r} for the one "
                    f"and {value!r} for the other. Ask for one of the names instead of the image."
                )


def label_value(image: str) -> str:
    """An image as the value of a label: ``nvcr.io/a/b:1`` is ``nvcr.io-a-b-1``."""
    text = _HYPHENS.sub("-", _NOT_IN_LABELS.sub("-", image.lower()))
    return text.strip("-._") or "unknown"


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
        from nemo_run_ray.plan.folder_packager import FolderPackager

        return FolderPackager(value["folder"])
    known = ", ".join(_PACKAGERS)
    raise ConfigError(f"found {value!r}; allowed are {known} and {{folder: <path>}}.")


# ---------------------------------------------------------------------- Slurm

_SSH = ("host", "user", "port", "identity")
_OWN = ("name", "nodes", "walltime", "keep", "idle_timeout_s", "renew", "queue_timeout_s")
_NOT_SLURMS = {*_SSH, *_OWN, "job_dir", "sbatch", "sidecars"}


def slurm_cluster(part: SlurmPart, path: Path) -> SlurmCluster:
    """The cluster of a section.

    Args:
        part: the section.
        path: of its file, for the cluster's default name and the key's file.

    Raises:
        ConfigError: a value is not allowed.
    """
    fields: dict[str, Any] = part.model_dump(exclude=_NOT_SLURMS, exclude_none=True)
    executor = run.SlurmExecutor(
        **fields,
        ntasks_per_node=1,
        additional_parameters=dict(part.sbatch) or None,
        tunnel=_tunnel(part, path),
    )
    own = {name: getattr(part, name) for name in _OWN if name != "name"}
    return SlurmCluster(
        executor=executor,
        name=part.name if part.name is not None else path.stem,
        sidecars=[_sidecar(sidecar) for sidecar in part.sidecars],
        **own,
    )


def _tunnel(part: SlurmPart, path: Path) -> run.LocalTunnel | run.SSHTunnel:
    if part.host is None:
        given = [name for name in _SSH if getattr(part, name) is not None]
        if given:
            raise ConfigError(
                f"`{given[0]}` says how to log in, and there is no `host` to log in to; add it, or "
                "leave that out to use Slurm's commands of this machine."
            )
        return run.LocalTunnel(job_dir=part.job_dir)
    if part.user is None:
        raise ConfigError(f"`host` is {part.host!r}, and there is no `user` to log in as; add it.")
    identity = part.identity
    if identity is not None:
        identity = str(path.parent / Path(identity).expanduser())
    return run.SSHTunnel(
        host=part.host, user=part.user, port=part.port, identity=identity, job_dir=part.job_dir
    )


def _sidecar(part: SidecarPart) -> Sidecar:
    ready = None if part.port is None else PortProbe(part.port)
    return Sidecar(part.name, part.command, everywhere=part.everywhere, ready=ready)
