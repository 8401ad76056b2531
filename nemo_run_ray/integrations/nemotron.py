"""Reads profiles of Nemotron's env.toml that are for Ray (``executor = "ray"``)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_run_ray.cluster_files.load import PROFILES_FILE, Document, KeyPath
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import is_credential_name
from nemo_run_ray.integrations.foreign import Translation
from nemo_run_ray.remote.spec import Env

FORMAT = "Nemotron env.toml"

#: The reasons for which keys mean nothing here.
_IGNORED = {
    "account partition run_partition batch_partition cpus_per_task time mem exclusive tunnel host "
    "user identity resource_shape node_group node_reservation nemo_run_dir shared_memory_size "
    "image_pull_secrets base_url kube_apiserver_url client_id client_secret app_id app_secret "
    "project_name pvc_nemo_run_dir distributed_framework custom_spec dgxcloud_max_args_chars "
    "runtime ipc_mode shm_size run_command launcher workspace code_src_dir build_partition "
    "build_time build_cache_dir build_registry": "It is for Slurm, Lepton, DGX Cloud, Docker or "
    "Nemotron's own launcher.",
    "mounts lustre_mount pvcs": "The containers of a Ray cluster run already, with the mounts they "
    "have.",
    "setup_lines pre_launch_commands": "It is for another executor; `startup_commands` run before "
    "a task on Ray.",
    "repo_root": "The packager of the executor says which code travels.",
    "ray_version": "The cluster has its own Ray.",
    "existing_ray_cluster": "It is the name of a Ray cluster on Lepton; `ray_address` is for one "
    "that has an address.",
    "pip_extras": "The nodes need these packages already: an environment of the job's own would "
    "keep its Ray programs from setting theirs. `RayExecutor(runtime_env=…)` makes one.",
}
#: Keys that give a field of the executor.
_NUMBERS = ("nodes", "ntasks_per_node", "gpus_per_node")
_FIELDS = ("container_image", *_NUMBERS, "startup_commands")
_KEYS = ("executor", "ray_address", "remote_job_dir", *_FIELDS)
#: Other names of a key, which win.
_ALIASES = {
    "ntasks_per_node": ("nprocs_per_node", "nproc_per_node"),
    "container_image": ("container",),
}
#: A variable of the environment in a text, and a text that is nothing but such variables, each the
#: default of the one before, and at most an empty default.
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)")
_ONLY_VARIABLES = re.compile(rf"\s*(?:{_VARIABLE.pattern}\s*(,?)\s*)+(?:''|\"\"|null)?[\s}}]*")


def find(cwd: Path, environ: Env) -> Path | None:
    """The env.toml of a folder: the one that ``NEMOTRON_ENV_FILE`` names, else upwards.

    Args:
        cwd: where to start; the folder that holds a pyproject.toml is the last one.
        environ: the caller's environment.
    """
    if named := environ.get("NEMOTRON_ENV_FILE"):
        return cwd / Path(named).expanduser()
    for folder in (cwd, *cwd.parents):
        if (folder / PROFILES_FILE).exists():
            return folder / PROFILES_FILE
        if (folder / "pyproject.toml").exists():
            break
    return None


def profiles(document: Document) -> list[str]:
    """Names of the profiles: all tables but the reserved ones."""
    reserved = ("wandb", "cli", "cache", "artifacts")
    return [
        name
        for name, one in document.values.items()
        if isinstance(one, dict) and name not in reserved
    ]


def names_ray(document: Document, profile: str) -> bool:
    """Whether a profile is for Ray; another one is of no interest here.

    Raises:
        ConfigError: there is no such profile, or its ``extends`` lead nowhere or in a circle.
    """
    executors = (document.values[name].get("executor") for name in _chain(document, profile))
    return next(filter(None, executors), None) == "ray"


def read(document: Document, profile: str, environ: Env) -> Document:
    """Bring a profile into our form.

    Args:
        document: the env.toml.
        profile: its name.
        environ: the caller's environment, in which no credential may be that a text shows.

    Raises:
        ConfigError: there is no such profile, it is not for Ray, its ``extends`` lead nowhere or in
            a circle, or a variable that it asks for is not set.
    """
    chain = _chain(document, profile)[::-1]
    try:
        merged = OmegaConf.merge(*(document.values[name] for name in chain))
    except OmegaConfBaseException as error:
        raise _unresolved(document, (profile,), error) from error
    raw: Any = OmegaConf.to_container(merged)
    file = Translation(FORMAT, Document(document.path, dict(raw)), _IGNORED)

    def resolved(*path: str) -> Any:
        try:
            value: Any = merged
            for word in path:
                value = value[word]
            is_table = OmegaConf.is_config(value)
            return OmegaConf.to_container(value, resolve=True) if is_table else value
        except OmegaConfBaseException as error:
            raise _unresolved(file.document, path, error) from error

    for name in _KEYS:
        keys = (*_ALIASES.get(name, ()), name)
        present = [one for one in keys if file.document.values.pop(one, None) is not None]
        if present:
            value = resolved(present[0])
            if name in _NUMBERS and value != raw[present[0]]:
                value = yaml.safe_load(str(value))  # of the environment, where all are texts
            file.document.values[name] = value
    if file.get("executor") != "ray":
        raise file.document.refuse(
            ("executor",),
            f"the profile is for {file.get('executor')!r}, not for Ray; expected executor = "
            '"ray", with the address of a cluster as ray_address, such as http://<head>:8265. A '
            "profile of its own may extend this one and say so.",
        )
    if address := file.of(str, "ray_address"):
        file.put(("cluster", "address"), address, ("ray_address",))
    for name in _FIELDS:
        if file.get(name) is not None:
            field = "image" if name == "container_image" else name
            file.put(("defaults", field), file.get(name), (name,))
    if shared := file.of(str, "remote_job_dir"):
        # As Nemotron does on every executor; env_vars come first.
        file.put(("env", "set", "NEMO_RUN_DIR"), shared, ("remote_job_dir",))
        file.put(("env", "set", "HF_HOME"), f"{shared}/hf", ("remote_job_dir",))
    for name, text in file.of(dict, "env_vars").items():
        path = ("env_vars", name)
        names = _VARIABLE.findall(str(text))
        only = _ONLY_VARIABLES.fullmatch(str(text))
        secret = next(filter(is_credential_name, [name, *names]), "")
        if secret and only:
            # Without a default the variable must be set.
            file.append(("env", "forward" if only[2] else "required"), name, path)
            if names != [name]:
                file.put(("env", "value_from", name), names, path)
            continue
        value = resolved(*path)
        # Another key of the file may have brought it here; a short one may be there by chance.
        for other, held in environ.items():
            if len(held) > 5 and held in str(value) and is_credential_name(other):
                secret = secret or other
        if value is None or (secret and value == ""):
            file.ignore(path, "It has no value.")
        elif secret:
            raise file.document.refuse(
                path,
                f"it is a text, and {secret} is the name of a credential, which a shared file "
                f"must not hold (it is not shown here); expected ${{oc.env:{secret}}} and nothing "
                "else.",
            )
        else:
            text = value if isinstance(value, (dict, list)) else str(value)
            file.put(("env", "set", name), text, path)
    file.ignore_rest((), ("extends", "env_vars", *_KEYS))
    return file.result


def _unresolved(document: Document, path: KeyPath, error: Exception) -> ConfigError:
    return document.refuse(
        path,
        f"it cannot be resolved: {str(error).splitlines()[0]}. Set the variable that it asks for, "
        "or give a default: ${oc.env:NAME,default}.",
    )


def _chain(document: Document, profile: str) -> list[str]:
    """A profile and what it extends, one after the other."""
    known = profiles(document)
    chain: list[str] = []
    name: Any = profile
    while name is not None:
        path = (chain[-1], "extends") if chain else ()
        way = " -> ".join([*chain, str(name)])
        if name in chain:
            raise document.refuse(path, f"the profiles extend each other in a circle: {way}.")
        if name not in known:
            raise document.refuse(path, f"there is no profile {name!r} ({way}); there are {known}.")
        chain.append(name)
        name = document.values[name].get("extends")
    return chain
