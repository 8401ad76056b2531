"""Ray's ``runtime_env`` as a user gives it: its fields, what they may hold and which go together.

Ray checks it in its own Python client, which is not used here: its server passes over a field that
it does not know, and looks on the head for a file that the caller has. Read from Ray 2.54 to 2.60,
``ray/runtime_env/runtime_env.py`` and ``ray/_private/runtime_env/validation.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_run_ray.checks import nearest, refuse
from nemo_run_ray.errors import ConfigError

#: Fields that NeMo-Run's packagers stand for.
_PACKAGED = ("working_dir", "py_modules", "excludes")
#: Fields that give the command a Python of their own; Ray takes one of them at a time.
_ENVIRONMENTS = ("pip", "uv", "conda")
#: Fields by which Ray starts a worker in a container, and what it lets them be combined with.
_CONTAINERS, _BESIDE_CONTAINER = ("image_uri", "container"), ("config", "env_vars")
#: Fields that Ray's client adds by itself, which a saved runtime environment may have.
_OF_RAY_ITSELF = ("_ray_release", "_ray_commit", "_inject_current_ray")
#: A line of requirements that names another file, and how deep such files may lie.
_OTHER_FILE = re.compile(
    r"\s*(?P<option>-r|-c|--requirement|--constraint)(?:\s+|=|(?<=-[rc]))(?P<path>[^\s#]+)"
)
_INCLUDES_MAX = 10
#: One string of a new process (MAX_ARG_STRLEN, execve(2)): Ray tries for ever to start its worker.
_VARIABLE_BYTES_MAX = 128 * 1024
#: What may be meant as a package, and not as a file.
_NAME_OF_ONE = re.compile(r"(?!.*\.(?:txt|in)$)[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?([<>=!~]=?.+)?")
_REQUIREMENTS = "a list of requirements, the path of a requirements file, or a dict with 'packages'"


def check(runtime_env: Mapping[str, Any], allow_unknown: bool = False) -> None:
    """Check the fields, the types of their values and that Ray combines them.

    Args:
        runtime_env: as the user gave it.
        allow_unknown: let fields pass that are not in Ray's documentation: those of a newer Ray and
            of runtime environment plug-ins.

    Raises:
        ConfigError: the first field that is wrong.
    """
    given = {name: value for name, value in runtime_env.items() if value is not None}
    for name, value in given.items():
        if name in _PACKAGED:
            refuse(_field(name), value, "absent: the executor's packager says which code is sent")
        if name not in (*_CHECKS, *_OF_RAY_ITSELF) and not allow_unknown:
            raise ConfigError(_unknown(name))
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"RayExecutor.{_field(name)} holds something that JSON cannot carry to the "
                f"cluster: {error}. Use texts, numbers, True, False, None, lists and dicts."
            ) from error
    for name, value in given.items():
        if name in _CHECKS:
            _CHECKS[name](_field(name), value)
    _check_together(list(given))


def resolve(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime environment without names of files of this machine: they are read here.

    Raises:
        ConfigError: a file of requirements, or of a conda environment, cannot be read.
    """
    found = {name: value for name, value in runtime_env.items() if value is not None}
    for name in ("pip", "uv"):
        given = found.get(name)
        if isinstance(given, dict):
            packages = _all_of(f"{_field(name)}['packages']", given["packages"])
            found[name] = {**given, "packages": packages}
        elif given is not None:
            found[name] = _all_of(_field(name), given)
    if _is_conda_file(found.get("conda")):
        found["conda"] = _conda_file(found["conda"])
    return found


def brings_python(runtime_env: Mapping[str, Any]) -> bool:
    """Whether the command's ``python`` is one that Ray prepares: an environment's or an image's."""
    return any(runtime_env.get(name) for name in (*_ENVIRONMENTS, *_CONTAINERS))


def environments(runtime_env: Mapping[str, Any]) -> list[str]:
    """The fields by which Ray makes an environment with packages."""
    return [name for name in _ENVIRONMENTS if runtime_env.get(name)]


def is_container(runtime_env: Mapping[str, Any]) -> bool:
    """Whether the command runs in a container, which Ray combines with no archives of a job."""
    return any(runtime_env.get(name) for name in _CONTAINERS)


def _field(name: str) -> str:
    return f"runtime_env[{name!r}]"


def _unknown(name: str) -> str:
    meant = nearest(name, _CHECKS)
    documented = ", ".join(field for field in _CHECKS if not field.startswith("_"))
    hint = f"did you mean {meant!r}?" if meant else f"Ray's fields are {documented}."
    return (
        f"RayExecutor.runtime_env has the field {name!r}, which Ray would pass over silently; "
        f"{hint} For a field of a newer Ray, or of a plug-in of your cluster, set "
        "RayExecutor(allow_unknown_runtime_env=True)."
    )


def _check_together(given: Sequence[str]) -> None:
    environments = [name for name in given if name in _ENVIRONMENTS]
    if len(environments) > 1:
        raise ConfigError(
            f"RayExecutor.runtime_env has {' and '.join(environments)}; Ray builds one environment "
            "for a task. Keep one of them: conda can list pip packages of its own."
        )
    for container in (name for name in given if name in _CONTAINERS):
        others = [name for name in given if name not in (container, *_BESIDE_CONTAINER)]
        if others:
            raise ConfigError(
                f"RayExecutor.runtime_env has {container} beside {', '.join(others)}; Ray combines "
                f"{container} with {' and '.join(_BESIDE_CONTAINER)} only. Put the rest into the "
                "image."
            )


def _all_of(field: str, given: str | Sequence[str]) -> list[str]:
    """Requirements that are given as a list, or as the path of a file."""
    if isinstance(given, str):
        return _requirements(field, given)
    return _included(field, given, Path(), 0)


def _requirements(field: str, path: str, depth: int = 0) -> list[str]:
    """The lines of a requirements file, with those of the files that it includes."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = _unreadable(field, path, error, "a requirements file")
        if isinstance(error, FileNotFoundError) and depth == 0 and _NAME_OF_ONE.fullmatch(path):
            found += f" One package is written as a list: [{path!r}]."
        raise ConfigError(found) from error
    return _included(field, text.strip().split("\n"), Path(path).parent, depth)


def _included(field: str, lines: Sequence[str], folder: Path, depth: int) -> list[str]:
    """Requirements without names of other files, which are not on the node."""
    found = []
    for line in lines:
        other = _OTHER_FILE.match(line)
        if other is None:
            found.append(line)
        elif other["option"].lstrip("-").startswith("c") or depth == _INCLUDES_MAX:
            raise ConfigError(
                f"RayExecutor.{field} has the line {line.strip()!r}, whose file is not sent to "
                "the node. Put what it says into the requirements themselves."
            )
        else:
            found += _requirements(field, str(folder / other["path"]), depth + 1)
    return found


def _is_conda_file(given: object) -> bool:
    return isinstance(given, str) and Path(given).suffix in (".yaml", ".yml")


def _conda_file(path: str) -> dict[str, Any]:
    import yaml

    wanted = "a YAML file of a conda environment"
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(_unreadable(_field("conda"), path, error, wanted)) from error
    if not isinstance(found, dict):
        raise ConfigError(_unreadable(_field("conda"), path, "it holds no mapping", wanted))
    _check_conda_file(f"{_field('conda')}, the file {path!r},", found)
    return found


def _check_conda_file(field: str, found: dict[str, Any]) -> None:
    """Refuse what is misspelt; conda's files have more than Ray's documentation."""
    for key in found:
        meant = nearest(key, _CONDA)
        if key not in _CONDA and meant:
            raise ConfigError(f"RayExecutor.{field} has the key {key!r}; did you mean {meant!r}?")
    if found.get("dependencies") is not None:
        _dependencies(f"{field} 'dependencies'", found["dependencies"])


def _unreadable(field: str, path: str, why: object, wanted: str) -> str:
    reason = getattr(why, "strerror", None) or " ".join(str(why).split())
    return (
        f"RayExecutor.{field} names the file {path!r} in {Path.cwd()}, which cannot be read as "
        f"{wanted}: {reason}. It is read here, when the task is planned, not on the cluster."
    )


# ---------------------------------------------------------------------- what a field may hold


def _text(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        refuse(field, value, "a text")


def _texts(field: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        refuse(field, value, "a list of texts")


def _flag(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        refuse(field, value, "True or False")


def _seconds(field: str, value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not (value > 0 or value == -1):
        refuse(field, value, "a whole number of seconds from 1, or -1 for no limit")


def _packages(field: str, value: Any) -> None:
    if isinstance(value, str):
        _text(field, value)
    else:
        _texts(field, value)


def _text_or_dict(field: str, value: Any) -> None:
    if not isinstance(value, (str, dict)) or not value:
        refuse(field, value, "a text or a dict")


def _conda(field: str, value: Any) -> None:
    _text_or_dict(field, value)
    if isinstance(value, dict):
        _keys(field, value, "", _CONDA)


def _dependencies(field: str, value: Any) -> None:
    """conda's own packages by name, and those of pip in a list below ``pip``."""
    if not isinstance(value, list):
        refuse(field, value, "a list")
    for package in value:
        if isinstance(package, dict):
            _keys(field, package, "", {"pip": _texts})
        elif not isinstance(package, str):
            refuse(field, value, "a list of texts, one of which may be a dict with 'pip'")


def _texts_by_text(field: str, value: Any) -> None:
    allowed = "a dict of texts by text"
    if not isinstance(value, dict):
        refuse(field, value, allowed)
    for name, text in value.items():
        if not isinstance(name, str):
            refuse(f"{field} for the name {name!r}", type(name), allowed)
        if not isinstance(text, str):  # the value may be a credential
            refuse(f"{field}[{name!r}]", type(text), "a text")
        size_bytes = len(f"{name}={text}".encode(errors="surrogatepass")) + 1
        if size_bytes > _VARIABLE_BYTES_MAX:
            refuse(
                f"{field}[{name!r}], in bytes with its name,",
                size_bytes,
                f"at most {_VARIABLE_BYTES_MAX}, else no worker of Ray starts; put it into a file",
            )


_CONDA: dict[str, _Check] = {
    "name": _text,
    "channels": _texts,
    "dependencies": _dependencies,
    "prefix": _text,
    "variables": _texts_by_text,
}


def _keys(field: str, value: dict[str, Any], required: str, checks: Mapping[str, _Check]) -> None:
    for key in value:
        if key not in checks:
            meant = nearest(key, checks)
            hint = f"did you mean {meant!r}? " if meant else ""
            raise ConfigError(
                f"RayExecutor.{field} has the key {key!r}; {hint}allowed is a dict with some of "
                f"{', '.join(checks)}."
            )
    if required and required not in value:
        refuse(field, value, f"a dict with {required!r}")
    for key, check_one in checks.items():
        if key in value:
            check_one(f"{field}[{key!r}]", value[key])


def _installer(name: str) -> _Check:
    """The check of ``pip`` or ``uv``."""
    options = "pip_install_options" if name == "pip" else "uv_pip_install_options"
    keys = {
        "packages": _packages,
        f"{name}_check": _flag,
        f"{name}_version": _text,
        options: _texts,
    }

    def check_one(field: str, value: Any) -> None:
        if isinstance(value, dict):
            _keys(field, value, "packages", keys)
        elif isinstance(value, (str, list)):
            _packages(field, value)
        else:
            refuse(field, value, _REQUIREMENTS)

    return check_one


def _container(field: str, value: Any) -> None:
    if not isinstance(value, dict):
        refuse(field, value, "a dict with 'image'")
    keys = {"image": _text, "worker_path": _text, "run_options": _texts}
    _keys(field, value, "image", keys)


def _config(field: str, value: Any) -> None:
    if not isinstance(value, dict):
        refuse(field, value, "a dict")
    keys = {"setup_timeout_seconds": _seconds, "eager_install": _flag, "log_files": _texts}
    _keys(field, value, "", keys)


_Check = Callable[[str, Any], None]
#: Every field that Ray's documentation lists, and those that its client makes of some of them.
_CHECKS: dict[str, _Check] = {
    "pip": _installer("pip"),
    "uv": _installer("uv"),
    "conda": _conda,
    "env_vars": _texts_by_text,
    "image_uri": _text,
    "container": _container,
    "py_executable": _text,
    "worker_process_setup_hook": _text,
    "nsight": _text_or_dict,
    "rocprof_sys": _text_or_dict,
    "java_jars": _texts,
    "config": _config,
    "_nsight": _text_or_dict,
    "_rocprof_sys": _text_or_dict,
}
