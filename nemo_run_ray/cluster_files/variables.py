"""The variables of every task that a file's ``env`` and ``secrets`` ask for."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_run_ray.cluster_files.credentials import value_of
from nemo_run_ray.cluster_files.schema import ClusterFile, EnvPart
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import looks_like_credential


@dataclass(frozen=True)
class Variables:
    """What a file gives every task.

    Attributes:
        clear: variables with their values.
        secrets: names of those whose values are shown nowhere.
    """

    clear: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)


def variables_of(file: ClusterFile, where: str, environ: Mapping[str, str]) -> Variables:
    """The variables that a file's rules give, with the values of this environment.

    Args:
        file: the rules.
        where: name of the file, for errors.
        environ: variables of the caller's environment.

    Raises:
        ConfigError: a required variable is not set.
    """
    wanted = [*file.env.required, *file.secrets]
    missing = [name for name in wanted if _value(name, file.env, environ) is None]
    if missing:
        raise ConfigError(
            f"{where} requires {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} "
            "not set in this environment. Set what is missing; nothing was sent."
        )
    names = [*file.env.required, *_forwarded(file.env, environ)]
    hidden = [name for name in names if _is_credential(name, file.env)]
    clear = {
        name: value
        for name in names
        if name not in hidden and (value := _value(name, file.env, environ)) is not None
    }
    secrets = [*file.secrets, *hidden]
    return Variables({**clear, **file.env.set}, list(dict.fromkeys(secrets)))


def _forwarded(env: EnvPart, environ: Mapping[str, str]) -> list[str]:
    found = []
    for pattern in env.forward:
        if "*" in pattern:
            found += sorted(fnmatch.filter(environ, pattern))
        elif _value(pattern, env, environ) is not None:
            found.append(pattern)
    return found


def _is_credential(name: str, env: EnvPart) -> bool:
    return any(map(looks_like_credential, [name, *env.value_from.get(name, ())]))


def _value(name: str, env: EnvPart, environ: Mapping[str, str]) -> str | None:
    return value_of(name, env.value_from.get(name, ()), environ)
