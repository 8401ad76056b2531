"""An executor that names a cluster file becomes one that needs none.

For every field the code wins over the pool, the pool over the file's defaults, and those over the
variables of the environment. Fields that hold values by name are joined, name by name.
"""

from __future__ import annotations

import copy
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from nemo_run.core.frontend.console.api import CONSOLE

from nemo_run_ray.cluster_files import skills
from nemo_run_ray.cluster_files.credentials import usual_places
from nemo_run_ray.cluster_files.defaults import NOT_IN_DEFAULTS, default_values, pool_values
from nemo_run_ray.cluster_files.document import read
from nemo_run_ray.cluster_files.images import check_image, labels_of
from nemo_run_ray.cluster_files.load import Loaded, load
from nemo_run_ray.cluster_files.search import find
from nemo_run_ray.cluster_files.slurm_part import slurm_cluster
from nemo_run_ray.cluster_files.variables import Variables, variables_of
from nemo_run_ray.clusters import Cluster, ExistingCluster, LocalCluster
from nemo_run_ray.errors import ConfigError, NoClusterFile, as_markup
from nemo_run_ray.executor import FILE_VARIABLES, RayExecutor
from nemo_run_ray.fields import nearest

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
    document = read(path)
    return skills.is_skills(document) and not skills.names_ray(document)


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
