"""Reads profiles of Nemotron's env.toml that are for Ray (``executor = "ray"``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_run_ray.cluster_files.load import PROFILES_FILE, Document, KeyPath
from nemo_run_ray.fields import is_credential_name, nearest
from nemo_run_ray.integrations.foreign import Draft, Keys, at, shown

FORMAT = "Nemotron env.toml"
#: Tables that are no profiles.
RESERVED = ("wandb", "cli", "cache", "artifacts")

#: Why keys mean nothing here.
_IGNORED = {
    "account partition run_partition batch_partition cpus_per_task time mem exclusive": "It is for "
    "Slurm; on Ray, labels and resources say where a task runs.",
    "tunnel host user identity": "It is for Slurm over SSH; jobs reach Ray through its dashboard.",
    "resource_shape node_group node_reservation nemo_run_dir shared_memory_size "
    "image_pull_secrets": "It is for Lepton, which starts no task here.",
    "base_url kube_apiserver_url client_id client_secret app_id app_secret project_name "
    "pvc_nemo_run_dir distributed_framework custom_spec dgxcloud_max_args_chars": "It is for DGX "
    "Cloud, which starts no task here.",
    "runtime ipc_mode shm_size": "It is for Docker, which starts no task here.",
    "mounts lustre_mount pvcs": "The containers of a Ray cluster run already, with the mounts they "
    "have.",
    "setup_lines pre_launch_commands": "It is for another executor; `startup_commands` run before "
    "a task on Ray.",
    "run_command launcher workspace code_src_dir": "It is for Nemotron's own launcher.",
    "build_partition build_time build_cache_dir build_registry": "It is for the building of "
    "images.",
    "repo_root": "The packager of the executor says which code travels.",
    "ray_version": "The cluster has its own Ray.",
    "existing_ray_cluster": "It is the name of a Ray cluster on Lepton; `ray_address` is for one "
    "that has an address.",
    "pip_extras": "The nodes need these packages already: an environment of the job's own would "
    "keep its Ray programs from setting theirs. `RayExecutor(runtime_env=…)` makes one.",
}
_REASONS = {name: reason for names, reason in _IGNORED.items() for name in names.split()}
_PROCESSES = ("nprocs_per_node", "ntasks_per_node", "nproc_per_node")
_IMAGES = ("container_image", "container")
_USED = (
    "extends",
    "executor",
    "ray_address",
    "remote_job_dir",
    "nodes",
    "gpus_per_node",
    "env_vars",
    "startup_commands",
    *_PROCESSES,
    *_IMAGES,
)


def find(cwd: Path, environ: Mapping[str, str]) -> Path | None:
    """The env.toml of a folder: the one that ``NEMOTRON_ENV_FILE`` names, else upwards.

    Args:
        cwd: where to start; the folder that holds a pyproject.toml is the last one.
        environ: the caller's environment.
    """
    named = environ.get("NEMOTRON_ENV_FILE")
    if named:
        return cwd / Path(named).expanduser()
    for folder in (cwd, *cwd.parents):
        if (folder / PROFILES_FILE).exists():
            return folder / PROFILES_FILE
        if (folder / "pyproject.toml").exists():
            return None
    return None


def profiles(document: Document) -> list[str]:
    """Names of the profiles: all tables but the reserved ones."""
    return [
        name
        for name, table in document.values.items()
        if isinstance(table, Mapping) and name not in RESERVED
    ]


def matches(document: Document, profile: str | None) -> bool:
    """Whether it is a profile of an env.toml."""
    return profile is not None


def read(document: Document, profile: str, environ: Mapping[str, str]) -> Document:
    """Bring a profile into our form.

    Args:
        document: the env.toml.
        profile: its name.
        environ: the caller's environment.

    Raises:
        ConfigError: there is no such profile, it is not for Ray, its ``extends`` lead nowhere or in
            a circle, a variable that it asks for is not set, or a value has the wrong type.
    """
    keys = _Profile(document, _chain(document, profile), environ)
    draft = Draft(FORMAT, keys)
    _check_executor(keys)
    address = keys.address("ray_address")
    if address is not None:
        draft.put(("cluster", "address"), address, ("ray_address",))
    _put_first(draft, _IMAGES, "image", keys.text)
    _put_first(draft, ("nodes",), "nodes", keys.whole)
    _put_first(draft, _PROCESSES, "ntasks_per_node", keys.whole)
    _put_first(draft, ("gpus_per_node",), "gpus_per_node", keys.amount)
    if keys.texts("startup_commands"):
        commands = keys.texts("startup_commands")
        draft.put(("defaults", "startup_commands"), commands, ("startup_commands",))
    shared = keys.text("remote_job_dir")
    if shared is not None:  # as Nemotron does on every executor; env_vars come first
        draft.put(("env", "set", "NEMO_RUN_DIR"), shared, ("remote_job_dir",))
        draft.put(("env", "set", "HF_HOME"), f"{shared}/hf", ("remote_job_dir",))
    for name in keys.table("env_vars"):
        _put_variable(draft, keys, name)
    draft.ignore_rest((), _USED, _REASONS)
    return replace(
        draft.done(),
        no_cluster='the profile names no cluster; expected ray_address = "http://<head>:8265".',
    )


#: ``${`` that is not escaped.
_OPENING = re.compile(r"(?<!\\)\$\{")
_REFERENCE = re.compile(r"\s*\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*(,.*)?\}\s*", re.DOTALL)
_EMPTY = ("", "''", '""', "null")
#: Steps from one key to the next after which keys are taken to name each other in a circle.
_STEPS_MAX = 20


class Unresolved(Exception):
    """A text cannot be resolved; the message says why, without file and key."""


@dataclass
class Interpolation:
    """``${oc.env:NAME}``, ``${oc.env:NAME,default}`` and ``${key.below}`` in texts of a table.

    Attributes:
        table: with the keys.
        environ: where variables are looked for.
        asked: names of the variables that were asked for; some are credentials.
    """

    table: Mapping[str, Any]
    environ: Mapping[str, str]
    asked: list[str] = field(default_factory=list)

    def resolve(self, text: str, path: KeyPath, steps: int = 0) -> Any:
        """The value of the text at a path; no text where the whole text names another key.

        Raises:
            Unresolved: a variable or key that it names is missing, or it is not well formed.
        """
        if steps > _STEPS_MAX:
            raise Unresolved("it cannot be resolved: its keys name each other in a circle.")
        parts: list[Any] = []
        position = 0
        while match := _OPENING.search(text, position):
            end = _closing(text, match.end())
            value = self._value(text[match.end() : end].strip(), path, steps + 1)
            if match.start() == 0 and end + 1 == len(text):
                return value
            parts += [text[position : match.start()], value]
            position = end + 1
        return "".join(str(part) for part in [*parts, text[position:]]).replace("\\${", "${")

    def _value(self, inside: str, path: KeyPath, steps: int) -> Any:
        resolver, colon, rest = inside.partition(":")
        if not colon:
            up = len(inside) - len(inside.lstrip("."))  # each dot is a table further up
            key = (*(path[:-up] if up else ()), *inside[up:].split("."))
            value = at(self.table, key)
            if value is None:
                raise Unresolved(f"it cannot be resolved: there is no key {inside!r}.")
            return self.resolve(value, key, steps) if isinstance(value, str) else value
        if resolver.strip() != "oc.env":
            raise Unresolved(f"it cannot be resolved: {resolver.strip()!r} is not known here.")
        name, comma, default = (part.strip() for part in rest.partition(","))
        self.asked.append(name)
        if name in self.environ:
            return self.environ[name]
        if not comma:
            raise Unresolved(
                f"it asks for the variable {name} of your environment, which is not set; set "
                f"it, or give a default: ${{oc.env:{name},default}}."
            )
        if default == "null":
            return None
        is_quoted = len(default) > 1 and default[0] == default[-1] and default[0] in "'\""
        return default[1:-1] if is_quoted else self.resolve(default, path, steps)


def _closing(text: str, position: int) -> int:
    """The position of the brace that closes the one before a position."""
    depth = 1
    for end in range(position, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return end
    raise Unresolved(f"it cannot be resolved: {text!r} lacks a closing brace.")


def variables_of(text: str) -> tuple[list[str], str | None]:
    """The variables of a text that is nothing but one ``${oc.env:…}``, and its last default.

    A default may be such a text again. No variables where the text is something else; the default
    is ``None`` where there is none, and empty for ``''`` and ``null``.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return [], None
    if match[2] is None:
        return [match[1]], None
    default = match[2][1:].strip()
    names, last = variables_of(default)
    if names:
        return [match[1], *names], last
    return [match[1]], "" if default in _EMPTY else default


class _Profile(Keys):
    """A profile with what it extends, and with its texts resolved where they are asked for."""

    def __init__(self, document: Document, chain: list[str], environ: Mapping[str, str]) -> None:
        super().__init__(document)
        self._chain = chain
        self._merged: dict[str, Any] = {}
        for name in reversed(chain):
            self._merged = _merge(self._merged, document.values[name])
        self._environ = environ

    def written(self, path: KeyPath) -> KeyPath:
        for name in self._chain:
            if at(self.document.values[name], path) is not None:
                return (name, *path)
        return (self._chain[0], *path)

    def raw(self, *path: str | int) -> Any:
        """The value as the file has it."""
        return at(self._merged, path)

    def get(self, *path: str | int) -> Any:
        return self._resolve(path)[0]

    def asked(self, *path: str | int) -> tuple[str, ...]:
        """Names of variables that the value asks for."""
        return self._resolve(path)[1]

    def _resolve(self, path: KeyPath) -> tuple[Any, tuple[str, ...]]:
        raw = self.raw(*path)
        if isinstance(raw, list):
            return [self.get(*path, number) for number in range(len(raw))], ()
        if not isinstance(raw, str) or "${" not in raw:
            return raw, ()
        interpolation = Interpolation(self._merged, self._environ)
        try:
            value = interpolation.resolve(raw, path)
        except Unresolved as error:
            raise self.refuse(path, str(error)) from error
        return value, tuple(interpolation.asked)

    def _number(self, path: KeyPath) -> Any:
        """A number; a variable of the environment is a text, and may stand for one."""
        value = self.get(*path)
        if value == self.raw(*path) or not isinstance(value, str):
            return value
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
        return value


def _chain(document: Document, profile: str) -> list[str]:
    """A profile and what it extends, one after the other."""
    known = profiles(document)
    if profile not in known:
        reserved = ", which is a table for other things" if profile in RESERVED else ""
        raise document.refuse(
            (), f"there is no profile {profile!r}{reserved}{_meant(profile, known)}."
        )
    chain = [profile]
    while (parent := document.values[chain[-1]].get("extends")) is not None:
        path = (chain[-1], "extends")
        way = " -> ".join([*chain, str(parent)])
        if not isinstance(parent, str):
            raise document.refuse(path, "it is no text; expected the name of a profile.")
        if parent in chain:
            raise document.refuse(path, f"the profiles extend each other in a circle: {way}.")
        if parent not in known:
            raise document.refuse(
                path, f"there is no profile {parent!r} ({way}){_meant(parent, known)}."
            )
        chain.append(parent)
    return chain


def _meant(name: str, known: list[str]) -> str:
    like = nearest(name, known)
    if like:
        return f"; the nearest one is {like!r}"
    return f"; expected one of {', '.join(known)}" if known else "; the file has no profile"


def _merge(parent: Any, child: Any) -> Any:
    if not isinstance(parent, Mapping) or not isinstance(child, Mapping):
        return child
    merged = dict(parent)
    for key, value in child.items():
        merged[key] = _merge(parent[key], value) if key in parent else value
    return merged


def names_ray(document: Document, profile: str) -> bool:
    """Whether a profile is for Ray; another one is of no interest here.

    Raises:
        ConfigError: there is no such profile, or its ``extends`` lead nowhere or in a circle.
    """
    tables = [document.values[name] for name in _chain(document, profile)]
    return next((table["executor"] for table in tables if "executor" in table), None) == "ray"


def _check_executor(keys: Keys) -> None:
    executor = keys.text("executor")
    if executor == "ray":
        return
    found = f"the profile is for {executor!r}" if executor else "the profile names no executor"
    raise keys.refuse(
        ("executor",),
        f'{found}, not for Ray; expected executor = "ray", with the address of a cluster as '
        "ray_address, such as http://<head>:8265. A profile of its own may extend this "
        "one and say so.",
    )


def _put_first(
    draft: Draft, names: tuple[str, ...], field: str, value_of: Callable[[str], Any]
) -> None:
    """Set a default from the first of some keys that has a value."""
    given = [name for name in names if value_of(name) is not None]
    if given:
        draft.put(("defaults", field), value_of(given[0]), (given[0],))
    for name in given[1:]:
        draft.ignore((name,), f"{given[0]} comes first.")


def _put_variable(draft: Draft, keys: _Profile, name: str) -> None:
    """A variable: a text, or the value of one of the caller's, which may be a credential."""
    path: KeyPath = ("env_vars", name)
    raw = keys.raw(*path)
    names, default = variables_of(raw) if isinstance(raw, str) else ([], None)
    if any(map(is_credential_name, [name, *names])) and names and not default:
        draft.append(("env", "required" if default is None else "forward"), name, path)
        if names != [name]:
            draft.put(("env", "value_from", name), names, path)
        return
    value = keys.get(*path)
    secret = [word for word in (name, *keys.asked(*path)) if is_credential_name(word)]
    if isinstance(value, (Mapping, list)):
        raise keys.refuse(path, f"it is {shown(value)}; expected a text or a number.")
    if value is None or (secret and value == ""):
        draft.ignore(path, "It has no value.")
    elif secret:
        raise keys.refuse(
            path,
            f"it is a text, and {secret[0]} is the name of a credential, which a shared file must "
            f"not hold (it is not shown here); expected ${{oc.env:{secret[0]}}} and nothing else.",
        )
    else:
        draft.put(("env", "set", name), str(value), path)
