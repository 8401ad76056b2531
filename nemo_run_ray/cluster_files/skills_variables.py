"""The variables of a NeMo-Skills file: ``env_vars``, ``required_env_vars``, and those it adds."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

from nemo_run_ray.cluster_files.credentials import REFERENCE, filled, in_lists
from nemo_run_ray.cluster_files.document import KeyPath
from nemo_run_ray.cluster_files.foreign import Draft
from nemo_run_ray.fields import looks_like_credential

#: Variables that NeMo-Skills forwards from the caller's environment without being asked.
FORWARDED = (
    "WANDB_API_KEY",
    "NVIDIA_API_KEY",
    "AZURE_OPENAI_API_KEY",
    "OPENAI_API_KEY",
    "GEMINI_API_KEY",
    "HF_TOKEN",
    "NGC_API_KEY",
)
#: The beginning of other names that it forwards, but for those that matter on this side only.
_PREFIX = "NEMO_SKILLS_"
_STAY_HERE = {f"{_PREFIX}{word}" for word in ("SSH_SERVER", "SSH_KEY_PATH", "CONFIG", "CONFIG_DIR")}
_ADDED = ": NeMo-Skills always forwards it"
_NAME = re.compile(r"[^\s=$]+")


def put_variables(draft: Draft, added_by: KeyPath, environ: Mapping[str, str]) -> None:
    """Read the variables of a file.

    Args:
        draft: gets the section ``env``.
        added_by: the key that makes it a file for Ray, as the source of what NeMo-Skills adds.
        environ: the caller's environment, for ``$NAME`` in values.

    Raises:
        ConfigError: an entry is no ``NAME`` or ``NAME=value``, or names a variable that is not set.
    """
    for key, target in (("required_env_vars", "required"), ("env_vars", "forward")):
        for number, entry in enumerate(draft.keys.texts(key)):
            name, equals, value = (part.strip() for part in entry.partition("="))
            path: KeyPath = (key, number)
            if not _NAME.fullmatch(name):
                raise draft.keys.refuse(
                    path, "it is no variable (not shown here); expected NAME, or NAME=value."
                )
            if equals:
                _put_value(draft, path, name, value, environ)
            elif target == "required" or not _is_known(draft, name):
                draft.append(("env", target), name, path)
    for name in FORWARDED:
        if not _is_known(draft, name):
            draft.append(("env", "forward"), name, added_by, _ADDED)
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in _STAY_HERE and not _is_known(draft, name):
            # Nobody but NeMo-Skills knows what they hold.
            draft.append(("secrets",), name, added_by, _ADDED)
    for name, place in (("NGC_API_KEY", "NVIDIA_API_KEY"), ("HF_TOKEN", _hub_login(environ))):
        if draft.got("env", "value_from", name) is None:
            draft.put(("env", "value_from", name), [name, place], added_by, _ADDED)


def _is_known(draft: Draft, name: str) -> bool:
    """Whether a variable has a value or is required already, which is more than to forward it."""
    places = ("env", "set"), ("env", "required"), ("secrets",)
    return any(name in (draft.got(*place) or ()) for place in places)


def _put_value(
    draft: Draft, path: KeyPath, name: str, value: str, environ: Mapping[str, str]
) -> None:
    """``NAME=value``: plain text, text with ``$OTHER`` in it, or another variable's value."""
    names = [first or second for first, second in REFERENCE.findall(value)]
    secret = [word for word in (name, *names) if looks_like_credential(word)]
    if secret and not value:
        draft.ignore(path, "The credential is empty.")
    elif secret and REFERENCE.fullmatch(value):
        draft.append(("env", "required"), name, path)
        if names != [name]:
            draft.put(("env", "value_from", name), names, path)
    else:
        for asked in names:
            if asked not in environ:
                raise draft.keys.refuse(
                    path, f"its value asks for the variable {asked}, which is not set; set it."
                )
        if not secret:
            draft.put(("env", "set", name), filled(value, environ), path)
            return
        warnings.warn(
            f"{draft.keys.source(path)}: {secret[0]} is the name of a credential, and whoever can "
            "read the file can read its value (it is not shown here). The task gets it as a "
            f"secret. Write `{name}`, which takes the value from your environment, or "
            f"`{name}=$OTHER_NAME`.",
            UserWarning,
            stacklevel=2,
        )
        draft.append(("secrets",), name, path)
        draft.put(("env", "value_from", name), [in_lists(draft.keys.document.path, name)], path)


def _hub_login(environ: Mapping[str, str]) -> str:
    """The file in which Hugging Face's hub keeps the token of a login."""
    if environ.get("HF_TOKEN_PATH"):
        return environ["HF_TOKEN_PATH"]
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return f"{environ.get('HF_HOME') or f'{cache}/huggingface'}/token"
