"""Where a cluster's name is looked for: a path, then the folders below, in their order.

1. ``NEMO_RUN_RAY_CONFIG_DIR``,
2. ``./cluster_configs``,
3. ``$XDG_CONFIG_HOME/nemo_run_ray`` (``~/.config/nemo_run_ray``),
4. ``NEMO_SKILLS_CONFIG_DIR``,
5. the profiles of Nemotron's env.toml; ``path/env.toml:profile`` names one by its file.

An executor without a name takes that in ``NEMO_RUN_RAY_CLUSTER``, else in ``NEMO_SKILLS_CONFIG``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_run_ray.cluster_files import env_toml
from nemo_run_ray.cluster_files.document import SUFFIXES, read
from nemo_run_ray.errors import ConfigError, NoClusterFile
from nemo_run_ray.fields import nearest

#: Longest name of a file.
_NAME_MAX = 255
_warned: set[tuple[Path, Path]] = set()


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
    found = [Path(folder).absolute() for folder in candidates if folder]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def files(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Every cluster file there is, in the order in which a name is looked for."""
    for folder in folders(environ):
        try:
            found = sorted(folder.iterdir())
        except OSError as error:
            raise ConfigError(f"The folder {folder} cannot be read: {error.strerror}.") from error
        for path in found:
            if path.suffix in SUFFIXES and path.is_file() and path.name != env_toml.NAME:
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
    if path.suffix in SUFFIXES or os.sep in name:
        if len(path.name) > _NAME_MAX or not path.is_file():
            raise ConfigError(f"There is no cluster file {str(path)!r} (from {Path.cwd()}).")
        if path.name == env_toml.NAME and not profile:
            raise ConfigError(f"{path} has profiles; name one of them: {path}:<profile>.")
        return path.absolute(), profile or None
    known = list(files(environ))
    found = [path for path in known if path.stem == name]
    if not found:
        with_profiles, profiles = profiles_here(environ)
        if with_profiles is not None and name in profiles:
            return with_profiles, name
        names = [*(path.stem for path in known), *profiles]
        raise NoClusterFile(_not_found(name, names, folders(environ)))
    for other in found[1:2]:
        if (found[0], other) not in _warned:
            _warned.add((found[0], other))
            warnings.warn(
                f"Two cluster files have the name {name!r}: {found[0]} and {other}. The first is "
                "taken; give its path to silence this.",
                UserWarning,
                stacklevel=2,
            )
    return found[0], None


def profiles_here(environ: Mapping[str, str] = os.environ) -> tuple[Path | None, list[str]]:
    """The env.toml of the current folder, and its profiles.

    Raises:
        ConfigError: it cannot be read, or is not there, and a variable names it.
    """
    path = env_toml.find(Path.cwd(), environ)
    if path is not None and not path.is_file():
        raise ConfigError(f"The variable NEMOTRON_ENV_FILE names {path}, which is no file.")
    return path, [] if path is None else env_toml.profiles(read(path))


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
