"""The dictionary that NeMo-Skills' functions pass around for a cluster, made from a file for Ray.

It says ``executor: slurm``, because that is NeMo-Skills' word for a cluster: only there it hands
over dependencies of other experiments, groups of several tasks, and detaches. What it asks such a
dictionary for, and has no meaning on Ray, is there with a value that lets it pass.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_run_ray.cluster_files.load import Document, load
from nemo_run_ray.cluster_files.load import read as read_document
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import is_credential_name
from nemo_run_ray.integrations.skills import reader

#: Key of the dictionary that says that it is for Ray.
_KEY = "nemo_run_ray"
#: Key of the file's path in a dictionary that is for Ray only where a call says ``with_ray``.
_FILE_KEY = "nemo_run_ray_file"
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_LISTS = ("env_vars", "required_env_vars")
#: Keys that would make NeMo-Skills act for another executor, or use this machine's paths.
_DROPPED = frozenset(
    {"backend", "execution_backend", "with_ray", "ray_endpoint", "ray", "preflight", "mounts"}
    | {"ssh_tunnel", "job_dir", "timeouts", "default_timeout", "executor"}
    | {"account", "partition", "cpu_partition"}
)


@dataclass(frozen=True)
class SkillsVariables:
    """Variables that NeMo-Skills added for one task.

    Attributes:
        clear: by their names.
        secrets: names of those that look like credentials.
    """

    clear: Mapping[str, str]
    secrets: tuple[str, ...]


def read(path: Path) -> dict[str, Any] | None:
    """The dictionary of a file of NeMo-Skills; ``None`` where it is not for Ray.

    Raises:
        ConfigError: it is for Ray, and is wrong.
    """
    path = path.absolute()  # it is read again when the task is handed over
    try:
        document = read_document(path)
    except ConfigError:
        if _seems_for_ray(path):
            raise
        return None  # NeMo-Skills is more lenient, and its files for Slurm are its own affair
    if not reader.matches(document) or not reader.names_ray(document):
        return None
    load(str(path))
    return _for_skills(document)


def with_file(config: Any, path: Path) -> Any:
    """A dictionary that NeMo-Skills has read, with its file where a call may mean Ray by it."""
    if not isinstance(config, dict) or not config.get("ray_endpoint"):
        return config
    return {**config, _FILE_KEY: str(path.absolute())}


def file_of(config: Mapping[str, Any]) -> str:
    """The file that a dictionary for Ray was read from."""
    return str(config[_KEY]["file"])


def for_ray(config: Any, with_ray: bool = False) -> Mapping[str, Any] | None:
    """The dictionary for Ray that a call means; ``None`` where it means another executor.

    Args:
        config: the dictionary of the call.
        with_ray: what the call says; a file's ``ray_endpoint`` counts where one of both says it.

    Raises:
        ConfigError: it is for Ray, and was not read by this package.
    """
    if not isinstance(config, Mapping):
        return None
    if _KEY in config:
        return config
    asked = with_ray and bool(config.get("ray_endpoint"))
    values = {**config, "with_ray": config.get("with_ray") or asked}
    try:
        is_for_ray = reader.names_ray(Document(Path("cluster_config"), values, {}))
    except ConfigError:
        return None  # NeMo-Skills says itself what it makes of it
    if not is_for_ray:
        return None
    if _FILE_KEY not in config:
        raise ConfigError(
            "This cluster_config of NeMo-Skills is for Ray, and was not read from a file by the "
            "patch skills_executor. Start the command as `nemo-run-ray ns …`, or apply the patch "
            "before get_cluster_config, and pass it the file's name."
        )
    found = _for_skills(read_document(Path(config[_FILE_KEY])))
    return {**found, **{kind: list(config[kind]) for kind in _LISTS if config.get(kind)}}


def added_variables(
    config: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> SkillsVariables:
    """The variables that NeMo-Skills has added to those of the file.

    Raises:
        ConfigError: one is required and not set, or a credential has another value than in the
            environment.
    """
    mark = config[_KEY]
    clear: dict[str, str] = {}
    secrets: list[str] = []
    for kind in _LISTS:
        known = mark[kind]
        for entry in config.get(kind) or ():
            if entry in known:
                continue
            name, equals, value = (part.strip() for part in str(entry).partition("="))
            found = os.path.expandvars(value) if equals else environ.get(name)
            names = [name, *(part for pair in _REFERENCE.findall(value) for part in pair if part)]
            if found is None and kind == "required_env_vars":
                raise ConfigError(f"The variable {name} is required, and is not set; set it.")
            if found is None:
                continue
            if not any(is_credential_name(name) for name in names):
                clear[name] = found
            elif found == environ.get(name):
                secrets.append(name)
            else:
                raise ConfigError(
                    f"NeMo-Skills gives {name} a value for one task, and it looks like a "
                    "credential, or has one in it (it is not shown here). Set it in your "
                    "environment instead."
                )
    return SkillsVariables(clear, tuple(secrets))


def _seems_for_ray(path: Path) -> bool:
    """Whether a file that cannot be read here is for Ray, as NeMo-Skills would read it."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError):
        return False
    try:
        return isinstance(values, dict) and reader.names_ray(Document(path, values, {}))
    except ConfigError:
        return True


def _for_skills(document: Document) -> dict[str, Any]:
    config = {
        key: copy.deepcopy(value)
        for key, value in document.values.items()
        if key not in _DROPPED and value is not None
    }
    lists = {kind: list(config.get(kind) or ()) for kind in _LISTS}
    config.update(
        executor="slurm",
        account="",
        # With a partition for CPUs, a task that asks for no GPU is not given one.
        partition="",
        cpu_partition="ray",
        # Every path is the nodes' own.
        mounts=_Mounts(["/:/"]),
    )
    config.setdefault("skip_hf_home_check", True)
    # Two containers may have one image, and nodes of their own: tasks ask for them by their names.
    names = config.get("containers")
    config["containers"] = {name: name for name in names} if names else _NoContainers()
    config[_KEY] = {"file": str(document.path), **lists}
    return config


class _Mounts(list[str]):
    """The mounts of all paths; one more means nothing, and its source is not on this machine."""

    def append(self, mount: str) -> None:
        """Leave it out."""


class _NoContainers(dict[str, str]):
    """The containers of a file that names none: every task runs in the cluster's own."""

    def __missing__(self, name: str) -> str:
        return ""
