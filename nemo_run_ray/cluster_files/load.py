"""A cluster file by its name: found, read by the reader of its format, and checked.

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
import itertools
import os
import re
import string
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from nemo_run_ray.cluster_files.schema import ClusterFile, EnvPart
from nemo_run_ray.errors import ConfigError, NoClusterFile
from nemo_run_ray.fields import credentials_in, looks_like_credential, nearest
from nemo_run_ray.remote.files import why_untrusted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: A key's path: ``("pools", "gpu", "image")``; a list's elements count from 0.
KeyPath = tuple[str | int, ...]
FORMAT = "cluster file"
#: Modules that read other projects' files, imported when they are needed. Each has ``matches``,
#: ``names_ray`` and ``read``; the first one also has ``find`` and ``profiles``, and the second one
#: ``value_in``.
_READERS = ("nemo_run_ray.integrations.nemotron", "nemo_run_ray.integrations.skills.reader")
#: Name of the files that hold profiles.
PROFILES_FILE = "env.toml"
_SUFFIXES = (".yaml", ".yml", ".toml")
#: Far more than anybody writes; YAML takes a second for it.
_SIZE_MAX_BYTES, _KEYS_MAX = 256 * 1024, 10_000
#: Longest name of a file.
_NAME_MAX = 255
_NAMES = re.compile(r"\$\{?(\w+)")
#: Names of variables that a file may forward.
_FORWARDED = re.compile(r"[A-Za-z_][\w*?\[\]!-]*")
#: Between a file and the name of a variable whose value the file holds.
_IN_FILE = "#NAME="
#: Variables that give their value where these are not set, as NeMo-Skills does.
_INSTEAD = {"NGC_API_KEY": "NVIDIA_API_KEY"}
_warned: set[tuple[Path, Path]] = set()


# ---------------------------------------------------------------------- a file as plain values


@dataclass(frozen=True)
class Document:
    """The content of a file, and the line of each key, from 1."""

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def where(self, *path: str | int) -> str:
        """``file:line`` of a key, or of the nearest one above it that has a line."""
        for length in range(len(path), 0, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return f"{self.path}:{line}"
        return str(self.path)

    def refuse(self, path: KeyPath, problem: str) -> ConfigError:
        """The error for a key: file, line, key, then what is wrong and what was expected."""
        name = dotted(path)
        return ConfigError(f"{self.where(*path)}: {name + ': ' if name else ''}{problem}")


def dotted(path: KeyPath) -> str:
    """A key's path as people write it: ``pools.gpu.image``, ``preflight.required_labels[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def read(path: Path) -> Document:
    """Read a file, by its suffix.

    Its addresses get this user's variables and token, so nobody else may have written it.

    Raises:
        ConfigError: it cannot be read, another user may write to it, it is no YAML or TOML, names a
            key twice, or holds no table.
    """
    why = why_untrusted(str(path))
    if why:
        raise ConfigError(f"The cluster file {path} is not safe to use. {why}")
    try:
        if path.stat().st_size > _SIZE_MAX_BYTES:
            raise ConfigError(
                f"The cluster file {path} has {path.stat().st_size:,} bytes; expected at most "
                f"{_SIZE_MAX_BYTES:,}."
            )
        text = path.read_text(encoding="utf-8-sig")
        values, lines = _read_toml(path, text) if path.suffix == ".toml" else _read_yaml(path, text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"The cluster file {path} cannot be read: {reason}.") from error
    except RecursionError as error:
        raise ConfigError(f"The cluster file {path} is nested too deeply.") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(
            f"The cluster file {path} holds a {type(values).__name__}; expected keys with values, "
            "such as `cluster:`."
        )
    return Document(path, values, lines)


_TEXT_TAG, _MERGE_TAG = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


def _read_yaml(path: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        keys = iter(()) if node is None else _yaml_keys(node, (), path)
        lines = dict(itertools.islice(keys, _KEYS_MAX + 1))
        if len(lines) > _KEYS_MAX:  # by aliases of aliases a short text has any number of keys
            raise ConfigError(f"{path}: the file has too many keys, or too deep.")
        return yaml.safe_load(text), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error


def _yaml_keys(node: yaml.Node, path: KeyPath, file: Path) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if key.tag not in (_TEXT_TAG, _MERGE_TAG):
                raise ConfigError(
                    f"{file}:{line}: {dotted((*path, name))}: YAML reads this key as something "
                    f'else than a text; write "{name}" in quotes.'
                )
            if name in seen and name != "<<":
                raise ConfigError(
                    f"{file}:{line}: {dotted((*path, name))} is there twice, first in line "
                    f"{seen[name]}; expected one of them."
                )
            seen[name] = line
            yield (*path, name), line
            yield from _yaml_keys(value, (*path, name), file)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield (*path, number), value.start_mark.line + 1
            yield from _yaml_keys(value, (*path, number), file)


_TOML_TABLE = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?")
_TOML_KEY = re.compile(
    r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_TOML_WORD = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


def _read_toml(path: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        position = re.search(r" \(at line (\d+), column \d+\)", str(error))
        where = f"{path}:{position.group(1)}" if position else str(path)
        problem = str(error).replace(position.group(0), "") if position else str(error)
        raise ConfigError(f"{where}: {problem}.") from error
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header, key = _TOML_TABLE.fullmatch(line), _TOML_KEY.match(line)
        if header:
            table = _toml_path(header.group(1))
            lines[table] = number
        elif key:
            lines |= {(*table, *_toml_path(key.group(1))): number}
    return values, lines


def _toml_path(text: str) -> KeyPath:
    return tuple(word.strip("\"'") for word in _TOML_WORD.findall(text))


# ---------------------------------------------------------------------- values in our form


@dataclass(frozen=True)
class Ignored:
    """A key of another project's file that means nothing on Ray, with the reason and its line."""

    key: str
    reason: str
    where: str


@dataclass(frozen=True)
class Reading:
    """A file in our form.

    Attributes:
        format: whose format the file has, in words.
        values: sections and keys of ``schema.ClusterFile``, not checked yet.
        sources: where a value comes from, ``file:line`` and, in a foreign file, its key there; by
            the path of the value in ``values``.
        ignored: keys that were left out.
        no_cluster: what a user does where the file names no cluster.
    """

    format: str
    values: dict[str, Any]
    sources: dict[KeyPath, str] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
    no_cluster: str = (
        "the file names no cluster; expected `address: http://<head>:8265`, `local: {}` for the "
        "embedded Ray of this machine, or `slurm:` with an account and a job_dir."
    )


def _filled(value: Any, path: KeyPath, document: Document, environ: Mapping[str, str]) -> Any:
    """A value of a file of ours with the variables filled in."""
    if path[:2] == ("cluster", "headers"):  # saved as it is and filled at every connection
        return value
    if isinstance(value, dict):
        return {
            key: _filled(inner, (*path, str(key)), document, environ)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [
            _filled(inner, (*path, number), document, environ) for number, inner in enumerate(value)
        ]
    if not isinstance(value, str) or "$" not in value:
        return value
    for name in _NAMES.findall(value):
        if looks_like_credential(name):
            raise document.refuse(
                path,
                f"{name} is the name of a credential, whose value would be shown; list the name "
                "under `secrets:`, and let the task read the variable.",
            )
    try:
        return string.Template(value).substitute(environ)
    except KeyError as error:
        problem = f"the environment variable {error.args[0]} is not set; set it and run again."
    except ValueError:
        problem = f"{value!r} has a '$' that begins no ${{NAME}}; write $$ for a dollar."
    raise document.refuse(path, problem)


# ---------------------------------------------------------------------- values of variables


def value_of(
    name: str, places: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> str | None:
    """The value of a variable; ``None`` where no place has one.

    Args:
        name: of the variable.
        places: variables, files where there is a ``/``, and ``in_file``: the first that exists has
            the value. Without any, those of ``usual_places``.
        environ: variables of the caller's environment.
    """
    for place in places or usual_places(name, environ):
        value = _content(place, environ) if os.sep in place else environ.get(place)
        if value is not None:
            return value
    return None


def usual_places(name: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Where a variable that a cluster file asks for gets its value, if the file says nothing.

    It is the variable of that name; then for ``HF_TOKEN`` the file of ``huggingface-cli login``,
    and for ``NGC_API_KEY`` the variable ``NVIDIA_API_KEY``.
    """
    places = [name, *([_INSTEAD[name]] if name in _INSTEAD else [])]
    if name == "HF_TOKEN":
        cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = environ.get("HF_HOME") or f"{cache}/huggingface"
        places.append(environ.get("HF_TOKEN_PATH") or f"{home}/token")
    return places


def in_file(path: Path, name: str) -> str:
    """The place of a value that a file of NeMo-Skills gives as ``NAME=value``."""
    return f"{path.absolute()}{_IN_FILE}{name}"


def _content(path: str, environ: Mapping[str, str]) -> str | None:
    path, _, name = path.partition(_IN_FILE)
    if path.startswith("~/"):
        path = f"{environ.get('HOME') or ''}{path[1:]}"
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
        value = _reader(1).value_in(text, name, environ) if name else text
        return value or None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, AttributeError):
        return None  # nobody has logged in, or the file is another one now


@dataclass(frozen=True)
class Variables:
    """What a file gives every task: variables with their values, and names of secrets."""

    clear: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)


def variables_of(file: ClusterFile, where: str, environ: Mapping[str, str]) -> Variables:
    """The variables that a file's ``env`` and ``secrets`` give, with this environment's values.

    Args:
        file: the rules.
        where: name of the file, for errors.
        environ: variables of the caller's environment.

    Raises:
        ConfigError: a required variable is not set.
    """
    env = file.env
    missing = [
        name for name in [*env.required, *file.secrets] if _value(name, env, environ) is None
    ]
    if missing:
        raise ConfigError(
            f"{where} requires {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} "
            "not set in this environment. Set what is missing; nothing was sent."
        )
    clear: dict[str, str] = {}
    secrets = list(file.secrets)
    for name in [*env.required, *_forwarded(env, environ)]:
        value = _value(name, env, environ)
        if any(map(looks_like_credential, [name, *env.value_from.get(name, ())])):
            secrets.append(name)
        elif value is not None:
            clear[name] = value
    return Variables({**clear, **env.set}, list(dict.fromkeys(secrets)))


def _forwarded(env: EnvPart, environ: Mapping[str, str]) -> Iterator[str]:
    for pattern in env.forward:
        if "*" in pattern:
            yield from sorted(fnmatch.filter(environ, pattern))
        elif _value(pattern, env, environ) is not None:
            yield pattern


def _value(name: str, env: EnvPart, environ: Mapping[str, str]) -> str | None:
    return value_of(name, env.value_from.get(name, ()), environ)


# ---------------------------------------------------------------------- which file


def folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The folders in which a name is looked for, those that exist."""
    config_home = environ.get("XDG_CONFIG_HOME")
    home = Path(config_home) if config_home else Path(environ.get("HOME") or "/", ".config")
    candidates = [
        environ.get("NEMO_RUN_RAY_CONFIG_DIR"),
        "cluster_configs",
        str(home / "nemo_run_ray"),
        environ.get("NEMO_SKILLS_CONFIG_DIR"),
    ]
    absolute = dict.fromkeys(Path(folder).absolute() for folder in candidates if folder)
    return [folder for folder in absolute if folder.is_dir()]


def files(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Every cluster file, in the order in which a name is looked for."""
    for folder in folders(environ):
        try:
            paths = sorted(folder.iterdir())
        except OSError as error:
            raise ConfigError(f"The folder {folder} cannot be read: {error.strerror}.") from error
        for path in paths:
            if path.suffix in _SUFFIXES and path.is_file() and path.name != PROFILES_FILE:
                yield path


def find(name: str, environ: Mapping[str, str] = os.environ) -> tuple[Path, str | None]:
    """The file of a name, and its profile if it is an env.toml.

    Of two files of one name the first is taken, with one warning.

    Args:
        name: a path, a file's name without its suffix, or a profile's name.
        environ: variables of the environment.

    Raises:
        ConfigError: there is none; it names the nearest name and the folders.
    """
    before, toml, profile = name.partition(".toml:")
    path = Path(os.path.expanduser(f"{before}.toml" if toml else name))
    if path.suffix in _SUFFIXES or os.sep in name:
        if len(path.name) > _NAME_MAX or not path.is_file():
            raise ConfigError(f"There is no cluster file {str(path)!r} (from {Path.cwd()}).")
        if path.name == PROFILES_FILE and not profile:
            raise ConfigError(f"{path} has profiles; name one of them: {path}:<profile>.")
        return path.absolute(), profile or None
    known = list(files(environ))
    same_name = [path for path in known if path.stem == name]
    if not same_name:
        with_profiles, profiles = profiles_here(environ)
        if with_profiles is not None and name in profiles:
            return with_profiles, name
        names = [*(path.stem for path in known), *profiles]
        raise NoClusterFile(_not_found(name, names, folders(environ)))
    for other in same_name[1:2]:
        if (same_name[0], other) not in _warned:
            _warned.add((same_name[0], other))
            warnings.warn(
                f"Two cluster files have the name {name!r}: {same_name[0]} and {other}. The first "
                "is taken; give its path to silence this.",
                UserWarning,
                stacklevel=2,
            )
    return same_name[0], None


def profiles_here(environ: Mapping[str, str] = os.environ) -> tuple[Path | None, list[str]]:
    """The env.toml of the current folder, and its profiles.

    Raises:
        ConfigError: it cannot be read, or is not there, and a variable names it.
    """
    path = _reader(0).find(Path.cwd(), environ)
    if path is not None and not path.is_file():
        raise ConfigError(f"The variable NEMOTRON_ENV_FILE names {path}, which is no file.")
    return path, [] if path is None else _reader(0).profiles(read(path))


def _not_found(name: str, known: list[str], looked_in: list[Path]) -> str:
    meant = nearest(name, known)
    hint = f" Did you mean {meant!r}?" if meant else ""
    if name == "auto" or ":" in name:
        hint = f" For a cluster's address give RayExecutor(address={name!r})."
    where = ", ".join(str(folder) for folder in looked_in)
    if not where:
        where = "no folder: none of ./cluster_configs and ~/.config/nemo_run_ray exists"
    return (
        f"There is no cluster file of the name {name!r}.{hint} Looked for {name}.yaml, .yml and "
        f".toml in {where}. `nemo-run-ray clusters` lists all; `nemo-run-ray init` writes one."
    )


# ---------------------------------------------------------------------- a checked file


@dataclass(frozen=True)
class Loaded:
    """A checked cluster file: the name by which it was asked for, its path, its values, and where
    each of them comes from."""

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
    path, profile = find(name, environ)
    document = read(path)
    if not document.values:
        raise ConfigError(
            f"The cluster file {path} is empty; expected keys with values, such as `cluster:`."
        )
    reader = _reader_of(document, profile)
    if reader is not None:
        reading: Reading = reader.read(document, profile, environ)
    else:
        values = _filled(document.values, (), document, environ)
        sources = {key: document.where(*key) for key in document.lines}
        reading = Reading(FORMAT, values, sources)
    loaded = Loaded(name, path, _parse(document, reading), reading)
    _check(loaded)
    return loaded


def is_for_others(path: Path, profile: str | None = None) -> str:
    """The format of another project's file that is for another executor; empty for all others."""
    document = read(path)
    reader = _reader_of(document, profile)
    return reader.FORMAT if reader is not None and not reader.names_ray(document, profile) else ""


def _reader(number: int) -> Any:
    return importlib.import_module(_READERS[number])


def _reader_of(document: Document, profile: str | None) -> Any:
    """The reader of another project's file; ``None`` for one of ours."""
    readers = (_reader(number) for number in range(len(_READERS)))
    return next((reader for reader in readers if reader.matches(document, profile)), None)


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
    """The part of a path that the values have."""
    for length, key in enumerate(path):
        is_there = key in values if isinstance(values, dict) else isinstance(values, list)
        if not is_there:
            return path[:length]
        values = values[key]
    return path


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
    # A value is shown only where it cannot be or hold a credential.
    value = error["input"]
    is_public = path[:1] in (("pools",), ("preflight",), ("images_as",)) and "env_vars" not in path
    is_shown = isinstance(value, (bool, int, float)) or (is_public and isinstance(value, str))
    shown = repr(value) if is_shown else f"a {type(value).__name__}"
    if error["type"] == "model_type":
        return f"expected keys with values; found {shown}."
    return f"{error['msg'][0].lower()}{error['msg'][1:]}; found {shown}."


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
    models = (_model_in(inner) for inner in getattr(annotation, "__args__", ()))
    return next((model for model in models if model is not None), None)


def _check(loaded: Loaded) -> None:
    """Check the keys that belong together, and that no credential stands in the file."""
    file = loaded.file
    cluster = file.cluster
    kinds = ("address", "local", "slurm")
    named = [kind for kind in kinds if getattr(cluster, kind) is not None]
    if len(named) > 1:
        raise loaded.refuse(("cluster",), f"names {' and '.join(named)}; expected one of them.")
    if not named:
        pools = file.pools.values()
        if not pools or any(pool.address is None for pool in pools):
            raise loaded.refuse(("cluster",), loaded.reading.no_cluster)
    for name in ("token_variable", "headers"):
        if named and cluster.address is None and getattr(cluster, name):
            whose = "the embedded Ray" if cluster.local is not None else "Ray on Slurm"
            problem = f"{whose} has a token of its own and no proxy; leave it out."
            raise loaded.refuse(("cluster", name), problem)
    for number, pattern in enumerate(file.env.forward):
        if not _FORWARDED.fullmatch(pattern):
            problem = f"{pattern!r} may be your whole environment; expected NAME or NAME_*."
            raise loaded.refuse(("env", "forward", number), problem)
    of_ray = file.defaults.get("runtime_env")
    places: dict[KeyPath, Any] = {
        ("env", "set"): file.env.set,
        ("defaults", "env_vars"): file.defaults.get("env_vars"),
        ("defaults", "runtime_env", "env_vars"): isinstance(of_ray, dict)
        and of_ray.get("env_vars"),
        **{("pools", name, "env_vars"): pool.env_vars for name, pool in file.pools.items()},
        ("cluster", "slurm", "env_vars"): cluster.slurm and cluster.slurm.env_vars,
    }
    for path, variables in places.items():
        for name in credentials_in(variables) if isinstance(variables, dict) else ():
            raise loaded.refuse(
                (*path, name),
                "this looks like a credential, and the file is read by others. Put the value "
                f"into the variable {name} of your environment, and the name under `secrets:`.",
            )
