"""A cluster file by its name: found, read, and its keys checked against the schema and each other.

Its errors name the file and the line. Another project's file is read by the reader of its format.
A name is a path, or is looked for in these folders, in their order:

1. ``NEMO_RUN_RAY_CONFIG_DIR``,
2. ``./cluster_configs``,
3. ``$XDG_CONFIG_HOME/nemo_run_ray`` (``~/.config/nemo_run_ray``),
4. ``NEMO_SKILLS_CONFIG_DIR``,
5. the profiles of Nemotron's env.toml; ``path/env.toml:profile`` names one by its file.

In this package's own files ``${NAME}`` in a text is a variable of the environment.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
import re
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from nemo_run_ray.cluster_files import schema
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.errors import ConfigError, NoClusterFile
from nemo_run_ray.fields import credentials_in, is_credential_name, meant
from nemo_run_ray.remote.files import why_untrusted
from nemo_run_ray.remote.spec import Json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: A key's path: ``("pools", "gpu", "image")``; a list's elements count from 0.
KeyPath = tuple[str | int, ...]
FORMAT = "cluster file"
#: Name of the files that hold profiles.
PROFILES_FILE = "env.toml"
#: Modules that read other projects' files, imported when they are needed. Each has ``names_ray``
#: and ``read``; that of profiles has ``find`` and ``profiles``, the other one ``matches``.
_OF_PROFILES = "nemo_run_ray.integrations.nemotron"
_OF_FILES = "nemo_run_ray.integrations.skills.reader"
_SUFFIXES = (".yaml", ".yml", ".toml")
#: The model of each section, by the key in front of it.
_SECTIONS: dict[str | int, type[BaseModel]] = {
    "cluster": schema.ClusterPart,
    "local": schema.LocalPart,
    "slurm": schema.SlurmPart,
    "sidecars": schema.SidecarPart,
    "env": schema.EnvPart,
    "pools": schema.PoolPart,
    "preflight": schema.PreflightPart,
    "required_labels": schema.LabelPart,
}


@dataclass(frozen=True)
class Ignored:
    """A key of another project's file that means nothing on Ray."""

    key: str
    reason: str
    source: str


@dataclass(frozen=True)
class Document:
    """A cluster file.

    Attributes:
        path: of the file.
        values: as the file has them, or as the reader of another project's file has made them.
        sources: ``file:line`` of each value of YAML, and in a foreign file its key there.
        format: whose format the file has, in words.
        ignored: keys that were left out.
        file: the values, checked.
    """

    path: Path
    values: Json
    sources: dict[KeyPath, str] = field(default_factory=dict)
    format: str = FORMAT
    ignored: list[Ignored] = field(default_factory=list)
    file: ClusterFile = field(default_factory=ClusterFile)

    def where(self, *path: str | int) -> str:
        """The source of a value, or of the nearest one above it that has one."""
        if not path:
            return str(self.path)
        return self.sources.get(path) or self.where(*path[:-1])

    def refuse(self, path: KeyPath, problem: str) -> ConfigError:
        """The error for a key: file, line (of YAML), key, then what is wrong and was expected."""
        key = f"{dotted(path)}: " if path else ""
        return ConfigError(f"{self.where(*path)}: {key}{problem}")


def dotted(path: KeyPath) -> str:
    """A key's path as people write it: ``pools.gpu.image``, ``preflight.required_labels[0]``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def load(name: str) -> Document:
    """The cluster file of a name or a path, or a profile of an env.toml.

    Raises:
        ConfigError: it is not found, cannot be read, or says what it must not; the message has
            file, line (of YAML) and key, and what was expected.
    """
    path, profile = find(name)
    document = read(path)
    if not document.values:  # one that is being written is empty
        raise ConfigError(
            f"The cluster file {path} holds no keys with values; expected at least `cluster:`."
        )
    if reader := _reader_of(document, profile):
        document = reader.read(document, profile, os.environ)
    else:
        document = replace(document, values=_filled(document.values, (), document))
    try:
        document = replace(document, file=ClusterFile.model_validate(document.values))
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            # pydantic adds the member of a union behind the key that has the union's type.
            place = tuple(
                part for part in problem["loc"] if part not in ("int", "str", "bool", "float")
            )
            problems.append(str(document.refuse(place, _problem(problem, place))))
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None
    _check(document)
    return document


def is_for_others(path: Path, profile: str) -> str:
    """The format of another project's file that is for another executor; empty for all others."""
    document = read(path)
    reader = _reader_of(document, profile)
    return reader.FORMAT if reader and not reader.names_ray(document, profile) else ""


def _reader_of(document: Document, profile: str) -> Any:
    """The reader of another project's file; ``None`` for one of ours."""
    reader = importlib.import_module(_OF_PROFILES if profile else _OF_FILES)
    return reader if profile or reader.matches(document) else None


# ---------------------------------------------------------------------- a file as plain values


def read(path: Path) -> Document:
    """Read a file, by its suffix.

    Its addresses get this user's variables and token, so nobody else may have written it.

    Raises:
        ConfigError: it cannot be read, another user may write to it, it is no YAML or TOML, names a
            key twice, or holds no table.
    """
    if why := why_untrusted(str(path)):
        raise ConfigError(f"The cluster file {path} is not safe to use. {why}")
    lines: dict[KeyPath, int] = {}
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".toml":
            values: Any = tomllib.loads(text)
        else:
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
            _note_lines(node, (), lines)
            values = loader.construct_document(node) if node else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The cluster file {path} cannot be read: {error}.") from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(f"{where}: {getattr(error, 'problem', error)}.") from error
    values = values if isinstance(values, dict) else {}
    return Document(path, values, {key: f"{path}:{line}" for key, line in lines.items()})


def _note_lines(node: yaml.Node | None, path: KeyPath, lines: dict[KeyPath, int]) -> None:
    """Note the line of every key of YAML below a node, and refuse a key that is given twice."""
    below: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        below = [(str(key.value), key, value) for key, value in node.value if key.value != "<<"]
        for _, key, _ in below:
            key.tag = "tag:yaml.org,2002:str"  # YAML reads `on` and `1` as no texts
    elif isinstance(node, yaml.SequenceNode):
        below = [(number, value, value) for number, value in enumerate(node.value)]
    for name, key, value in below:
        place = (*path, name)
        if place in lines:
            problem = f"{dotted(place)} is given twice, first in line {lines[place]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        lines[place] = key.start_mark.line + 1
        _note_lines(value, place, lines)


# ---------------------------------------------------------------------- values in our form


def _filled(value: Any, path: KeyPath, document: Document) -> Any:
    """A value of a file of ours with the variables filled in."""
    if isinstance(value, dict):
        return {key: _filled(inner, (*path, key), document) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, (*path, number), document) for number, inner in enumerate(value)]
    # Headers are saved as they are, and filled at every connection.
    if not isinstance(value, str) or path[:2] == ("cluster", "headers"):
        return value
    credentials = [*filter(is_credential_name, re.findall(r"\$\{?(\w+)", value))]
    if credentials:
        problem = (
            f"{credentials[0]} is the name of a credential, whose value would be shown; list the "
            "name under `secrets:`, and let the task read the variable."
        )
    else:
        try:
            return string.Template(value).substitute(os.environ)
        except KeyError as error:
            problem = f"the environment variable {error.args[0]} is not set; set it and run again."
        except ValueError:
            problem = f"{value!r} has a '$' that begins no ${{NAME}}; write $$ for a dollar."
    raise document.refuse(path, problem)


def _problem(error: Any, path: KeyPath) -> str:
    found = f"found a {type(error['input']).__name__}."  # a value may be a credential
    if path == ("cluster", "token"):
        return "a token is never in a file; name its variable: token_variable."
    if error["type"] == "extra_forbidden":
        models = (_SECTIONS[key] for key in reversed(path[:-1]) if key in _SECTIONS)
        return f"this key is not known; {meant(path[-1], next(models, ClusterFile).model_fields)}"
    texts = {"missing": "this key is missing.", "model_type": f"expected keys with values; {found}"}
    return texts.get(error["type"], f"{error['msg'][0].lower()}{error['msg'][1:]}; {found}")


def _check(document: Document) -> None:
    """Check the keys that belong together, and that no credential stands in the file."""
    file = document.file
    named = [
        kind for kind in ("address", "local", "slurm") if getattr(file.cluster, kind) is not None
    ]
    if len(named) > 1:
        raise document.refuse(("cluster",), f"names {' and '.join(named)}; expected one of them.")
    if not named and not (file.pools and all(pool.address for pool in file.pools.values())):
        raise document.refuse(
            ("cluster",),
            "the file names no cluster; expected `address: http://<head>:8265` (ray_address in an "
            "env.toml), `local: {}` for the embedded Ray of this machine, or `slurm:` with an "
            "account and a job_dir.",
        )
    has_address = file.cluster.address or any(pool.address for pool in file.pools.values())
    for name in ("token_variable", "headers"):
        if getattr(file.cluster, name) and not has_address:
            problem = f"a Ray by {named[0]!r} has a token of its own and no proxy; leave it out."
            raise document.refuse(("cluster", name), problem)
    for number, pattern in enumerate(file.env.forward):
        if not re.fullmatch(r"[A-Za-z_][\w*?\[\]!-]*", pattern):
            problem = f"{pattern!r} may be your whole environment; expected NAME or NAME_*."
            raise document.refuse(("env", "forward", number), problem)
    for path, value in leaves(document.values):
        if path[-2:-1] in (("env_vars",), ("set",)) and credentials_in({str(path[-1]): value}):
            raise document.refuse(
                path,
                "this looks like a credential, and the file is read by others. Put the value "
                f"into the variable {path[-1]} of your environment, and only its name into the "
                "file.",
            )


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value of a file that is no table, with its key's path; a list is one value."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, (*path, key))
    else:
        yield path, value


# ---------------------------------------------------------------------- values of variables


def variables_of(document: Document) -> tuple[dict[str, str], list[str]]:
    """The variables that every task gets, with their values, and the names of its secrets.

    Raises:
        ConfigError: a required variable is not set.
    """
    env, secrets = document.file.env, list(document.file.secrets)
    needed = [*env.required, *secrets]
    names = [*needed]
    for pattern in env.forward:
        names += sorted(fnmatch.filter(os.environ, pattern)) or [pattern]
    clear, missing = {}, []
    for name in names:
        places = places_of(name, env.value_from)
        value = value_of(places)
        if value is None:
            missing += [name] if name in needed else []
        elif any(map(is_credential_name, [name, *places])):
            secrets.append(name)
        elif name not in secrets:
            clear[name] = value
    if missing:
        raise ConfigError(
            f"{document.path} requires variables that are not set in this environment: "
            f"{', '.join(dict.fromkeys(missing))}. Set them; nothing was sent."
        )
    return {**clear, **env.set}, secrets


def value_of(places: Sequence[str]) -> str | None:
    """The value of a variable: of the first that exists of some variables, and of some files, whose
    paths have a ``/``.
    """
    for place in places:
        with suppress(KeyError, OSError, ValueError):  # it is not set, or nobody has logged in
            if os.sep not in place:
                return os.environ[place]
            if text := Path(place).expanduser().read_text("utf-8").strip():
                return text
    return None


def places_of(name: str, value_from: Mapping[str, list[str]]) -> list[str]:
    """The places of a variable's value: those that a cluster file names, or else the variable.

    For ``HF_TOKEN`` the file of ``huggingface-cli login`` is the next, and for ``NGC_API_KEY`` the
    variable ``NVIDIA_API_KEY``, as NeMo-Skills does.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    login = os.environ.get("HF_TOKEN_PATH") or f"{home}/token"
    others = {"HF_TOKEN": [login], "NGC_API_KEY": ["NVIDIA_API_KEY"]}
    return value_from.get(name) or [name, *others.get(name, ())]


# ---------------------------------------------------------------------- which file


def folders() -> list[Path]:
    """The folders in which a name is looked for, those that exist."""
    candidates = [
        os.environ.get("NEMO_RUN_RAY_CONFIG_DIR"),
        "cluster_configs",
        f"{os.environ.get('XDG_CONFIG_HOME') or '~/.config'}/nemo_run_ray",
        os.environ.get("NEMO_SKILLS_CONFIG_DIR"),
    ]
    absolute = dict.fromkeys(Path(name).expanduser().absolute() for name in candidates if name)
    return [folder for folder in absolute if folder.is_dir()]


def files() -> Iterator[Path]:
    """Every cluster file, in the order in which a name is looked for."""
    for folder in folders():
        for path in sorted(folder.glob("*")):
            if path.suffix in _SUFFIXES and path.is_file() and path.name != PROFILES_FILE:
                yield path


def find(name: str) -> tuple[Path, str]:
    """The file of a name, and the profile if it is an env.toml's. The first of several is taken.

    Args:
        name: a path, a file's name without its suffix, or a profile's name.

    Raises:
        ConfigError: there is none; it names the nearest name and the folders.
    """
    before, toml, profile = name.partition(".toml:")
    path = Path(f"{before}.toml" if toml else name).expanduser()
    if path.suffix in _SUFFIXES or os.sep in name:
        if not path.is_file():
            raise ConfigError(f"There is no cluster file {str(path)!r} (from {Path.cwd()}).")
        if path.name == PROFILES_FILE and not profile:
            raise ConfigError(f"{path} has profiles; name one of them: {path}:<profile>.")
        return path.absolute(), profile
    known = {path.stem: path for path in reversed([*files()])}
    if name in known:
        return known[name], ""
    with_profiles, profiles = profiles_here()
    if with_profiles and name in profiles:
        return with_profiles, name
    raise NoClusterFile(
        f"There is no cluster file of the name {name!r}; {meant(name, [*known, *profiles])} Looked "
        f"for {name}.yaml, .yml and .toml in "
        f"{', '.join(map(str, folders())) or 'no folder (./cluster_configs does not exist)'}. "
        "`nemo-run-ray clusters` lists all; "
        "`nemo-run-ray init` writes one. For a cluster's address give RayExecutor(address=…). If "
        "the code names none, the name is that in the variable NEMO_RUN_RAY_CLUSTER."
    )


def profiles_here() -> tuple[Path | None, list[str]]:
    """The env.toml of the current folder, and its profiles.

    Raises:
        ConfigError: it cannot be read, or is not there, and a variable names it.
    """
    nemotron = importlib.import_module(_OF_PROFILES)
    path = nemotron.find(Path.cwd(), os.environ)
    if path and not path.is_file():
        raise ConfigError(f"The variable NEMOTRON_ENV_FILE names {path}, which is no file.")
    return path, nemotron.profiles(read(path)) if path else []
