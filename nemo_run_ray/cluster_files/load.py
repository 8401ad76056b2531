"""A cluster file by its name: found, read by the reader of its format, and checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from nemo_run_ray.cluster_files import env_toml, own_format, search, skills
from nemo_run_ray.cluster_files.document import Document, KeyPath, dotted
from nemo_run_ray.cluster_files.document import read as read_document
from nemo_run_ray.cluster_files.reading import Reading
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import credentials_in, nearest

_ENV_TOML = "Nemotron env.toml"
#: Names of variables that a file may forward.
_NAMES = re.compile(r"[A-Za-z_][\w*?\[\]!-]*")
#: What is said of a file without an address: ours, and a profile of Nemotron's.
_NO_CLUSTER = (
    "the file names no cluster; expected `address: http://<head>:8265`, `local: {}` for the "
    "embedded Ray of this machine, or `slurm:` with an account and a job_dir.",
    'the profile names no cluster; expected ray_address = "http://<head>:8265".',
)


@dataclass(frozen=True)
class Loaded:
    """A checked cluster file.

    Attributes:
        name: by which it was asked for.
        path: of the file.
        file: what it says.
        reading: where each value comes from, and what was ignored.
    """

    name: str
    path: Path
    file: ClusterFile
    reading: Reading

    def where(self, *path: str | int) -> str:
        """Where a value comes from, or the nearest one above it that has a place."""
        for length in range(len(path), 0, -1):
            source = self.reading.sources.get(path[:length])
            if source is not None:
                return source
        return str(self.path)

    def refuse(self, path: KeyPath, problem: str) -> ConfigError:
        """The error for a key: where it is, its name, and the problem."""
        return ConfigError(f"{self.where(*path)}: {dotted(path)}: {problem}")


def load(name: str, environ: Mapping[str, str] = os.environ) -> Loaded:
    """The cluster file of a name or a path, or a profile of an env.toml.

    Raises:
        ConfigError: it is not found, cannot be read, or says what it must not; the message has
            file, line and key, and what was expected.
    """
    path, profile = search.find(name, environ)
    document = read_document(path)
    if not document.values:
        raise ConfigError(
            f"The cluster file {path} is empty; expected keys with values, such as `cluster:`."
        )
    if profile is not None:
        reading = env_toml.read(document, profile, environ)
    elif skills.is_skills(document):
        reading = skills.read(document, environ)
    else:
        reading = own_format.read(document, environ)
    loaded = Loaded(name, path, _parse(document, reading), reading)
    _check(loaded)
    return loaded


def _parse(document: Document, reading: Reading) -> ClusterFile:
    try:
        return ClusterFile.model_validate(reading.values)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            # pydantic adds the member of a union behind the key that has the union's type.
            path = _existing(problem["loc"], reading.values)
            where = reading.sources.get(path) or document.where(*path)
            problems.append(f"{where}: {dotted(path)}: {_problem(problem, path)}")
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None


def _existing(path: KeyPath, values: Any) -> KeyPath:
    """The part of a path that there is in the values."""
    found: KeyPath = ()
    for word in path:
        is_there = word in values if isinstance(values, dict) else isinstance(values, list)
        if not is_there:
            return found
        values, found = values[word], (*found, word)
    return found


def _problem(error: Any, path: KeyPath) -> str:
    if error["type"] == "extra_forbidden":
        known = list(_section(path[:-1]))
        if path == ("cluster", "token"):
            return "a token is never in a file; name its variable: token_variable."
        meant = nearest(path[-1], known)
        hint = f"did you mean {meant!r}?" if meant else f"known are {', '.join(known)}."
        return f"this key is not known; {hint}"
    if error["type"] == "missing":
        return f"{error['loc'][-1]!r} is missing."
    if error["type"] == "model_type":
        return f"expected keys with values; found {_shown(error['input'], path)}."
    return f"{error['msg'][0].lower()}{error['msg'][1:]}; found {_shown(error['input'], path)}."


def _shown(value: Any, path: KeyPath) -> str:
    """A value in a message; only its kind where it may be or hold a credential."""
    is_public = path[:1] in (("pools",), ("preflight",), ("images_as",)) and "env_vars" not in path
    if isinstance(value, (bool, int, float)) or (is_public and isinstance(value, str)):
        return repr(value)
    return f"a {type(value).__name__}"


def _section(path: KeyPath) -> dict[str, Any]:
    """The fields of the model at a path."""
    model: type[BaseModel] = ClusterFile
    for word in path:
        fields = model.model_fields
        if str(word) in fields:
            model = _model_in(fields[str(word)].annotation) or model
    return model.model_fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in ``Model``, ``Model | None``, ``dict[str, Model]`` or ``list[Model]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(inner) for inner in getattr(annotation, "__args__", ()))
    return next((model for model in found if model is not None), None)


# ---------------------------------------------------------------------- what belongs together


def _check(loaded: Loaded) -> None:
    cluster = loaded.file.cluster
    kinds = ("address", "local", "slurm")
    named = [kind for kind in kinds if getattr(cluster, kind) is not None]
    if len(named) > 1:
        raise loaded.refuse(("cluster",), f"names {' and '.join(named)}; expected one of them.")
    if not named:
        pools = loaded.file.pools.values()
        if not pools or any(pool.address is None for pool in pools):
            raise loaded.refuse(("cluster",), _NO_CLUSTER[loaded.reading.format == _ENV_TOML])
    for name in ("token_variable", "headers"):
        if named and cluster.address is None and getattr(cluster, name):
            whose = "the embedded Ray" if cluster.local is not None else "Ray on Slurm"
            problem = f"{whose} has a token of its own and no proxy; leave it out."
            raise loaded.refuse(("cluster", name), problem)
    for number, pattern in enumerate(loaded.file.env.forward):
        if not _NAMES.fullmatch(pattern):
            problem = f"{pattern!r} may be your whole environment; expected NAME or NAME_*."
            raise loaded.refuse(("env", "forward", number), problem)
    _check_credentials(loaded)


def _check_credentials(loaded: Loaded) -> None:
    """A file is shared: no credential may stand in it."""
    file = loaded.file
    places: dict[KeyPath, Mapping[str, Any]] = {("env", "set"): file.env.set}
    of_ray = file.defaults.get("runtime_env")
    inner = of_ray.get("env_vars") if isinstance(of_ray, dict) else None
    for key, found in {
        ("defaults", "env_vars"): file.defaults.get("env_vars"),
        ("defaults", "runtime_env", "env_vars"): inner,
    }.items():
        if isinstance(found, dict):
            places[key] = found
    for name, pool in file.pools.items():
        places["pools", name, "env_vars"] = pool.env_vars
    if file.cluster.slurm is not None:
        places["cluster", "slurm", "env_vars"] = file.cluster.slurm.env_vars
    for path, variables in places.items():
        for name in credentials_in(variables):
            raise loaded.refuse(
                (*path, name),
                "this looks like a credential, and the file is read by others. Put the value "
                f"into the variable {name} of your environment, and the name under `secrets:`.",
            )
