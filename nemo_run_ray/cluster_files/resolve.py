"""An executor that names a cluster file becomes one that needs none."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections import ChainMap
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
    places_of,
    variables_of,
)
from nemo_run_ray.cluster_files.schema import ClusterFile, SlurmPart
from nemo_run_ray.clusters import Cluster
from nemo_run_ray.clusters.existing import ExistingCluster
from nemo_run_ray.clusters.local import LocalCluster
from nemo_run_ray.clusters.slurm import Sidecar, SlurmCluster
from nemo_run_ray.errors import ConfigError, NoClusterFile, as_markup
from nemo_run_ray.executor import FILE_VARIABLES, RayExecutor, cluster_of_roles
from nemo_run_ray.fields import PortProbe, meant
from nemo_run_ray.remote.spec import Json

#: Fields with values by name: each name is looked for in the code, the pool, the defaults.
_JOINED = ("env_vars", "label_selector", "resources_per_node", "runtime_env", "ports")
#: Fields of an executor that a file's defaults cannot give.
_NO_DEFAULTS = (
    *("cluster", "address", "pool", "secrets", "preflight"),
    *("role", "ready", "dependencies", "launcher"),
    *("resource_group", "given_fields"),
    *("experiment_id", "experiment_dir", "job_dir", "_launcher_setup"),
)
_DEFAULTS = [field.name for field in fields(RayExecutor) if field.name not in _NO_DEFAULTS]
#: Fields of an SSHTunnel, of a SlurmCluster, and keys that a SlurmExecutor takes otherwise.
_LOGIN = {"host", "user", "port", "identity"}
_OF_CLUSTER = {"nodes", "walltime", "keep", "idle_timeout_s", "renew", "queue_timeout_s"}
_NOT_SLURMS = {*_LOGIN, *_OF_CLUSTER, "name", "job_dir", "sbatch", "sidecars"}
_log_once = functools.cache(CONSOLE.log)


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
    # NeMo-Skills' own default may name a file in its own package, or one for another executor.
    is_default = executor.cluster is None and not os.environ.get(FILE_VARIABLES[0])
    document = None
    try:
        if name is not None and not (is_default and is_for_others(*find(name))):
            document = load(name)
    except NoClusterFile:
        if not is_default:
            raise
    if not document:
        for field in ("pool", "image"):
            if value := getattr(executor, field):
                raise ConfigError(
                    f"RayExecutor.{field} is {value!r}, and no cluster file is named in which it "
                    "could be found. Give cluster='<name of the file>', or set "
                    f"{FILE_VARIABLES[0]}."
                )
        return executor
    if document.ignored:
        message = (
            f"{document.path} ({document.format}): not used on Ray are "
            f"{', '.join(ignored.key for ignored in document.ignored)}. "
            f"`nemo-run-ray clusters {name}` says why."
        )
        _log_once(as_markup(message))
    values = values_of(executor, document)
    # A name that the code has as a variable, or as a secret, is not the other too.
    clear, secrets = variables_of(document)
    clear |= values["env_vars"]
    of_code = {*values["env_vars"], *(executor.runtime_env.get("env_vars") or ())}
    secrets = [*executor.secrets, *(name for name in secrets if name not in of_code)]
    values["secrets"] = list(dict.fromkeys(secrets))
    values["env_vars"] = {
        name: value
        for name, value in clear.items()
        if name in executor.env_vars or name not in secrets
    }
    for field, value in values.items():
        setattr(found, field, value)
    found.cluster = cluster_of(document, executor.pool)
    found.address = found.pool = found.image = None
    found.secret_places = {
        name: places_of(name, document.file.env.value_from)
        for name in found.secrets
        if name not in executor.secrets
    }
    found.resolved_from = str(name)
    try:
        found.check()
    except ConfigError as error:
        raise ConfigError(f"With the cluster file {document.path}: {error}") from error
    return found


def cluster_of(document: Document, pool: str | None = None) -> Cluster:
    """The cluster that a file names, or the one that a pool of it has for itself.

    Raises:
        ConfigError: an address, a header or a token is wrong.
    """
    part = document.file.cluster
    address = (document.file.pools[pool].address if pool else None) or part.address
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
        if part.slurm:
            return _slurm_cluster(part.slurm, document.path)
        return LocalCluster(**part.local.model_dump() if part.local else {})
    except ConfigError as error:
        raise document.refuse(("cluster",), str(error)) from error


def _slurm_cluster(part: SlurmPart, path: Path) -> SlurmCluster:
    tunnel: Any = run.LocalTunnel(job_dir=part.job_dir)
    login = part.model_dump(include=_LOGIN, exclude_none=True)
    if part.identity:
        login["identity"] = str(path.parent / Path(part.identity).expanduser())
    if part.host and part.user:
        tunnel = run.SSHTunnel(job_dir=part.job_dir, **login)
    elif login:
        raise ConfigError(
            "a login needs `host` and `user`; add both, or leave them, `port` and `identity` out "
            "to use Slurm's commands of this machine."
        )
    return SlurmCluster(
        executor=run.SlurmExecutor(
            **part.model_dump(exclude=_NOT_SLURMS, exclude_none=True),
            ntasks_per_node=1,
            additional_parameters=part.sbatch or None,
            tunnel=tunnel,
        ),
        name=part.name or path.stem,
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


def values_of(executor: RayExecutor, document: Document) -> Json:
    """The fields of the executor that the file changes, without the variables of its ``env``.

    Raises:
        ConfigError: the file has no such pool, or a value of it is not allowed.
    """
    file = document.file
    if executor.pool is not None and executor.pool not in file.pools:
        raise ConfigError(
            f"RayExecutor.pool is {executor.pool!r}, and {document.path} has no pool of that name; "
            f"{meant(executor.pool, file.pools)}"
        )
    of_file = fields_of(document)
    of_pool = {} if executor.pool is None else fields_of(document, executor.pool)
    images = [executor.image, of_pool.pop("image", None), of_file.pop("image", None)]
    below = [_of_image(next(filter(None, images), None), document), of_file, of_pool]
    plain = RayExecutor()
    values: Json = {}
    for name in _DEFAULTS:
        layers = [layer[name] for layer in below if name in layer]
        value = getattr(executor, name)
        if name in _JOINED:
            values[name] = dict(ChainMap(value, *reversed(layers)))
        # A list of the executor's may have been added to.
        elif layers and name not in executor.given_fields and value == getattr(plain, name):
            values[name] = layers[-1]
    if executor.preflight is None:
        values["preflight"] = file.preflight.enabled
    return values


def check_fields_of(document: Document) -> Document:
    """The file, of which all that it says of an executor's fields is right, whoever uses it.

    Raises:
        ConfigError: a field or a value is wrong.
    """
    for pool in (None, *document.file.pools):
        fields_of(document, pool)
    return document


def fields_of(document: Document, pool: str | None = None) -> Json:
    """The executor's fields that the file's defaults, or a pool, give.

    Raises:
        ConfigError: a field is unknown or cannot be a default, or a value is not allowed.
    """
    section: KeyPath = ("defaults",)
    given = document.file.defaults
    if pool is not None:
        section, part = ("pools", pool), document.file.pools[pool]
        given = part.model_dump(exclude_unset=True, exclude={"address", "notes"})
    values = {}
    for name, value in given.items():
        try:
            if name in _NO_DEFAULTS:
                raise ConfigError("a task, or another section of this file, gives this field.")
            if name not in _DEFAULTS:
                raise ConfigError(f"this is no field of RayExecutor; {meant(name, _DEFAULTS)}")
            values[name] = _packager(value) if name == "packager" else value
            RayExecutor(**{name: values[name]})
            if name == "image":
                _of_image(value, document)
        except ConfigError as error:
            raise document.refuse((*section, name), str(error)) from error
    return values


def _packager(value: Any) -> Packager:
    match value:
        case "none":
            return Packager()
        case "git":
            return GitArchivePackager()
        case {"folder": folder} if len(value) == 1:
            from nemo_run_ray.plan.folder_packager import FolderPackager

            return FolderPackager(folder)
    raise ConfigError(f"found {value!r}; allowed are none, git and {{folder: <path>}}.")


# ---------------------------------------------------------------------- images


def _of_image(image: str | None, document: Document) -> Json:
    """The fields by which a task gets its image on this cluster.

    Raises:
        ConfigError: no nodes have it by this file.
    """
    file = document.file
    if image is None or file.images_as == "none":
        return {}
    if file.images_as == "image_uri":
        return {"runtime_env": {"image_uri": file.images.get(image, image)}}
    labels = labels_of(image, file)
    is_known = labels or file.defaults.get("label_selector") or image in file.image_labels
    if not is_known and document.format == FORMAT:
        raise ConfigError(
            f"The image {image!r} has no labels in {document.path}, and would run on any node. Add "
            "it to `image_labels`, give `image_label_key`, or say `images_as: none`."
        )
    return {"label_selector": labels}


def labels_of(image: str, file: ClusterFile) -> dict[str, str]:
    """The labels of the nodes that have an image, which may be a name in the file's ``images``.

    They are the entry of ``image_labels`` of this name, else of the image, else the first one of
    another name of the image or of a pattern; else ``image_label_key`` has the image as its value.
    """
    full = file.images.get(image, image)
    labels = file.image_labels
    alike = (key for key in labels if fnmatchcase(full, file.images.get(key, key)))
    for key in (image, full, *alike):
        if key in labels:
            return labels[key]
    if not file.image_label_key:
        return {}
    value = re.sub(r"[^a-z0-9_.]+", "-", full.lower()).strip("-._")
    return {file.image_label_key: value or "unknown"}  # nvcr.io/a/b:1 is nvcr.io-a-b-1
