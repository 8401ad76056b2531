"""An executor that names a cluster file becomes one that needs none."""

from __future__ import annotations

import copy
import functools
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
    Document,
    KeyPath,
    find,
    is_for_others,
    load,
    usual_places,
    variables_of,
)
from nemo_run_ray.cluster_files.schema import ClusterFile, SlurmPart
from nemo_run_ray.clusters import Cluster, ExistingCluster, LocalCluster, Sidecar, SlurmCluster
from nemo_run_ray.errors import ConfigError, NoClusterFile, as_markup
from nemo_run_ray.executor import FILE_VARIABLES, RayExecutor, cluster_of_roles
from nemo_run_ray.fields import PortProbe, nearest

#: Fields with values by name: each name is looked for in the code, the pool, the defaults.
_JOINED = ("env_vars", "label_selector", "resources_per_node", "runtime_env", "ports")
#: Fields of an executor that a file's defaults cannot give.
_NO_DEFAULTS = (
    *("cluster", "address", "pool", "secrets", "preflight"),
    *("role", "ready", "dependencies", "launcher"),
    *("resource_group", "given_fields"),
    *("experiment_id", "experiment_dir", "job_dir", "_launcher_setup"),
)
_PACKAGERS: dict[str, Callable[[], Packager]] = {"none": Packager, "git": GitArchivePackager}
#: Fields of a SlurmCluster, and keys that a SlurmExecutor takes otherwise.
_OF_CLUSTER = {"nodes", "walltime", "keep", "idle_timeout_s", "renew", "queue_timeout_s"}
_SSH = ("host", "user", "port", "identity")
_NOT_SLURMS = _OF_CLUSTER | {*_SSH, "name", "job_dir", "sbatch", "sidecars"}


def resolve(executor: RayExecutor) -> RayExecutor:
    """The executor with all that its cluster file says; itself when it names none.

    Raises:
        ConfigError: the file or what it says is wrong, or does not have what the executor names.
    """
    found = copy.copy(executor)
    if executor.resource_group:
        found.resource_group = [resolve(role) for role in executor.resource_group]
        found.cluster, found.address = cluster_of_roles(found.resource_group), None
        found.resolved_from = found.resource_group[0].resolved_from
        return found
    name = executor.file_name()
    if name is None or _is_for_others(executor, name):
        for field in ("pool", "image"):
            if getattr(executor, field) is not None:
                raise ConfigError(
                    f"RayExecutor.{field} is {getattr(executor, field)!r}, and no cluster file is "
                    "named in which it could be found. Give cluster='<name of the file>', or set "
                    f"{FILE_VARIABLES[0]}."
                )
        return executor
    try:
        document = load(name)
    except NoClusterFile as error:
        if executor.cluster is not None:
            raise
        variables = " or ".join(FILE_VARIABLES)
        raise NoClusterFile(f"{error} The name comes from the variable {variables}.") from error
    if document.ignored:
        keys = ", ".join(ignored.key for ignored in document.ignored)
        _tell_once(
            f"{document.path} ({document.format}): not used on Ray are {keys}. "
            f"`nemo-run-ray clusters {name}` says why."
        )
    values = values_of(executor, document)
    values |= _variables(executor, document, values["env_vars"])
    for field, value in values.items():
        setattr(found, field, value)
    found.cluster = cluster_of(document, executor.pool)
    found.address = found.pool = found.image = None
    places = document.file.env.value_from
    found.secret_places = {
        name: places.get(name) or usual_places(name)
        for name in found.secrets
        if name not in executor.secrets
    }
    found.resolved_from = name
    try:
        found.check()
    except ConfigError as error:
        raise ConfigError(f"With the cluster file {document.path}: {error}") from error
    return found


def _is_for_others(executor: RayExecutor, name: str) -> bool:
    """Whether the name is NeMo-Skills' own default, and its file is not here or not for Ray."""
    if executor.cluster is not None or os.environ.get(FILE_VARIABLES[0]):
        return False
    try:
        return bool(is_for_others(find(name)[0]))
    except NoClusterFile:
        return True  # NeMo-Skills looks in its own package too


@functools.cache
def _tell_once(text: str) -> None:
    CONSOLE.log(as_markup(text))


def cluster_of(document: Document, pool: str | None = None) -> Cluster:
    """The cluster that a file names, or the one that a pool of it has for itself.

    Raises:
        ConfigError: an address, a header or a token is wrong.
    """
    part = document.file.cluster
    own = document.file.pools[pool].address if pool is not None else None
    place: KeyPath = ("cluster",) if own is None else ("pools", str(pool), "address")
    address = part.address if own is None else own
    headers = dict(part.headers)
    if part.token_variable is not None:
        if any(name.lower() == "authorization" for name in headers):
            problem = "there is a header Authorization too; expected one of them."
            raise document.refuse(("cluster", "token_variable"), problem)
        # Saved as it is, and filled from the environment at every connection.
        headers["Authorization"] = f"Bearer ${{{part.token_variable}}}"
    verify = part.verify
    if isinstance(verify, str):
        verify = str(document.path.parent / Path(verify).expanduser())
    try:
        if address is not None:
            return ExistingCluster(address, headers=headers, verify=verify)
        if part.slurm is not None:
            place = ("cluster", "slurm")
            return _slurm_cluster(part.slurm, document.path)
        return LocalCluster(**part.local.model_dump() if part.local is not None else {})
    except ConfigError as error:
        raise document.refuse(place, str(error)) from error


def _slurm_cluster(part: SlurmPart, path: Path) -> SlurmCluster:
    by_ssh = [name for name in _SSH if getattr(part, name) is not None]
    tunnel: run.LocalTunnel | run.SSHTunnel = run.LocalTunnel(job_dir=part.job_dir)
    if part.host is not None and part.user is not None:
        identity = part.identity
        if identity is not None:
            identity = str(path.parent / Path(identity).expanduser())
        tunnel = run.SSHTunnel(
            host=part.host, user=part.user, port=part.port, identity=identity, job_dir=part.job_dir
        )
    elif by_ssh:
        raise ConfigError(
            f"`{by_ssh[0]}` says how to log in, which needs `host` and `user`; add both, "
            "or leave that out to use Slurm's commands of this machine."
        )
    executor = run.SlurmExecutor(
        **part.model_dump(exclude=_NOT_SLURMS, exclude_none=True),
        ntasks_per_node=1,
        additional_parameters=dict(part.sbatch) or None,
        tunnel=tunnel,
    )
    return SlurmCluster(
        executor=executor,
        name=part.name if part.name is not None else path.stem,
        sidecars=[
            Sidecar(
                one.name,
                one.command,
                everywhere=one.everywhere,
                ready=None if one.port is None else PortProbe(one.port),
            )
            for one in part.sidecars
        ],
        **part.model_dump(include=_OF_CLUSTER),
    )


# ---------------------------------------------------------------------- fields


def values_of(executor: RayExecutor, document: Document) -> dict[str, Any]:
    """The fields of the executor that the file changes, without the variables of its ``env``.

    Raises:
        ConfigError: the file has no such pool, or a value of it is not allowed.
    """
    file = document.file
    if executor.pool is not None and executor.pool not in file.pools:
        meant = nearest(executor.pool, file.pools)
        hint = f"did you mean {meant!r}?" if meant else f"it has {', '.join(file.pools) or 'none'}."
        raise ConfigError(
            f"RayExecutor.pool is {executor.pool!r}, and {document.path} has no pool of that name; "
            f"{hint}"
        )
    of_pool = {} if executor.pool is None else _pool_values(document, executor.pool)
    of_file = default_values(document)
    images = [executor.image, of_pool.pop("image", None), of_file.pop("image", None)]
    image = next((image for image in images if image is not None), None)
    below = [_of_image(image, document), of_file, of_pool]
    plain = RayExecutor()
    values: dict[str, Any] = {}
    for name in _default_fields():
        layers = [layer[name] for layer in below if name in layer]
        if name in _JOINED:
            layers.append(getattr(executor, name))
            values[name] = {key: value for layer in layers for key, value in layer.items()}
        elif layers and name not in executor.given_fields:
            # A list of the executor's may have been added to.
            is_default = getattr(executor, name) == getattr(plain, name)
            values[name] = layers[-1] if is_default else getattr(executor, name)
    if executor.preflight is None:
        values["preflight"] = file.preflight.enabled
    return values


def _variables(
    executor: RayExecutor, document: Document, env_vars: Mapping[str, str]
) -> dict[str, Any]:
    """``env_vars`` and ``secrets``; a name that the code has as one is not the other too."""
    clear, secrets = variables_of(document)
    of_code = {*env_vars, *(executor.runtime_env.get("env_vars") or ())}
    secrets = [*executor.secrets, *(name for name in secrets if name not in of_code)]
    clear = {
        name: value
        for name, value in {**clear, **env_vars}.items()
        if name in executor.env_vars or name not in secrets
    }
    return {"env_vars": clear, "secrets": list(dict.fromkeys(secrets))}


def check_fields_of(document: Document) -> Document:
    """The file, of which all that it says of an executor's fields is right, whoever uses it.

    Raises:
        ConfigError: a field or a value is wrong.
    """
    of_file = default_values(document)
    images: dict[KeyPath, Any] = {("defaults", "image"): of_file.get("image")}
    for pool in document.file.pools:
        images["pools", pool, "image"] = _pool_values(document, pool).get("image")
    for key, image in images.items():
        try:
            _of_image(image, document)
        except ConfigError as error:
            raise document.refuse(key, str(error)) from error
    return document


def default_values(document: Document) -> dict[str, Any]:
    """The executor's fields that the file's defaults give.

    Raises:
        ConfigError: a field is unknown or cannot be a default, or a value is not allowed.
    """
    known = _default_fields()
    for name in document.file.defaults:
        if name not in known:
            meant = nearest(name, known)
            hint = f"did you mean {meant!r}?" if meant else f"known are {', '.join(known)}."
            if name in _NO_DEFAULTS:
                hint = "a task, or another section of this file, gives it."
            problem = f"this is no field of RayExecutor that a file can give; {hint}"
            raise document.refuse(("defaults", name), problem)
    return _checked(document, ("defaults",), document.file.defaults)


def _default_fields() -> list[str]:
    return [field.name for field in fields(RayExecutor) if field.name not in _NO_DEFAULTS]


def _pool_values(document: Document, pool: str) -> dict[str, Any]:
    """The executor's fields that a pool gives."""
    given = document.file.pools[pool].model_dump(exclude_unset=True, exclude={"address", "notes"})
    return _checked(document, ("pools", pool), given)


def _checked(document: Document, section: KeyPath, given: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, value in given.items():
        try:
            values[name] = _packager(value) if name == "packager" else value
            RayExecutor(**{name: values[name]})
        except ConfigError as error:
            raise document.refuse((*section, name), str(error)) from error
    return values


def _packager(value: Any) -> Packager:
    if isinstance(value, str) and value in _PACKAGERS:
        return _PACKAGERS[value]()
    if isinstance(value, dict) and list(value) == ["folder"]:
        from nemo_run_ray.plan.folder_packager import FolderPackager

        return FolderPackager(value["folder"])
    known = ", ".join(_PACKAGERS)
    raise ConfigError(f"found {value!r}; allowed are {known} and {{folder: <path>}}.")


# ---------------------------------------------------------------------- images


def _of_image(image: str | None, document: Document) -> dict[str, Any]:
    """The fields by which a task gets its image on this cluster.

    Raises:
        ConfigError: no nodes have it by this file, or its names disagree about them.
    """
    file = document.file
    if image is None or file.images_as == "none":
        return {}
    if file.images_as == "image_uri":
        return {"runtime_env": {"image_uri": file.images.get(image, image)}}
    labels = labels_of(image, file)
    is_known = labels or file.defaults.get("label_selector") or image in file.image_labels
    if not is_known and document.format == FORMAT:
        meant = None if image in file.images else nearest(image, [*file.images, *file.image_labels])
        hint = f" Did you mean {meant!r}?" if meant else ""
        raise ConfigError(
            f"The image {image!r} has no labels in {document.path}, and would run on any node."
            f"{hint} Add it to `image_labels`, give `image_label_key`, or say `images_as: none`."
        )
    return {"label_selector": labels}


def labels_of(image: str, file: ClusterFile) -> dict[str, str]:
    """The labels of the nodes that have an image.

    Every entry of ``image_labels`` that matches contributes, and the first one wins a label; but an
    entry of just this name or image comes in place of those of other names of the image. Only
    where none matches, ``image_label_key`` gives a label with the image as its value.

    Args:
        image: a name in the file's ``images``, or an image.
        file: the cluster file.

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
    if not matching and file.image_label_key and image:
        return {file.image_label_key: label_value(image)}
    labels: dict[str, str] = {}
    by_name: dict[str, tuple[str, str]] = {}
    for key, entry in matching.items():
        for label, value in entry.items():
            labels.setdefault(label, value)
            if key not in file.images:
                continue
            name, other = by_name.setdefault(label, (key, value))
            if other != value:
                raise ConfigError(
                    f"The image {image!r} has the names {name!r} and {key!r}, and they disagree "
                    f"about its nodes: the label {label} is {other!r} for the one and {value!r} "
                    "for the other. Ask for one of the names instead of the image."
                )
    return labels


def label_value(image: str) -> str:
    """An image as the value of a label: ``nvcr.io/a/b:1`` is ``nvcr.io-a-b-1``."""
    return re.sub(r"[^a-z0-9_.]+", "-", image.lower()).strip("-._") or "unknown"
