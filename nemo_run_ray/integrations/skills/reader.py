"""Reads cluster files of NeMo-Skills that are for Ray.

It has two ways to Ray, with a schema each: a back-end that submits Ray jobs (``backend: {name:
ray}``, or ``with_ray`` and ``ray_endpoint``), and a staged executor (``executor: ray``).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import yaml

from nemo_run_ray.cluster_files.load import Document, KeyPath, dotted, in_file
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.fields import is_amount, is_credential_name
from nemo_run_ray.integrations.foreign import Draft, Keys, shown

FORMAT = "NeMo-Skills"
#: ``$NAME`` and ``${NAME}`` in a value of a variable.
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_KUBERNETES = ("kubernetes-ray", "ray-kubernetes", "ray_kubernetes")
_NO_RAY = ("", "default", "none")
_SUPPORTED = ("ray", *_KUBERNETES, "default", "none")
_MODES = ("offline", "online")
#: Keys by which a file is one of NeMo-Skills.
_MARKS = frozenset(
    [
        "executor",
        "backend",
        "execution_backend",
        "ray_endpoint",
        "with_ray",
        "containers",
        "required_env_vars",
    ]
)
_OURS = frozenset(ClusterFile.model_fields) - {"preflight"}
_INSIDE_SLURM = "means Ray inside a Slurm allocation, not a cluster that jobs can be sent to."
#: CPUs that the staged executor reserves for a task where its file says nothing.
_STAGED_CPUS = 8

#: Why keys mean nothing here.
_IGNORED = {
    "executor": "The back-end is Ray, so no other executor starts anything.",
    "backend": "It does not name Ray.",
    "execution_backend": "`backend` comes first, or it does not name Ray.",
    "with_ray": "The back-end names Ray already.",
    "ray_endpoint": "Another address comes first.",
    "ray": "It belongs to `executor: ray`.",
    "jobs": "Logs are kept with the experiment.",
    "mounts": "The containers of a Ray cluster run already, with the mounts they have.",
    "account partition cpu_partition disable_gpus_per_node dependency_type mail_type "
    "mail_user": "It is for Slurm; on Ray, labels and resources say where a task runs.",
    "timeouts default_timeout": "It limits the time of a Slurm job; a Ray job has no such limit.",
    "ssh_tunnel job_dir": "It is for Slurm over SSH; jobs reach Ray through its dashboard.",
    "job_name_prefix": "A Ray job is named after its experiment.",
    "skip_hf_home_check": "HF_HOME is not checked here.",
    "num_workers": "It is for NeMo-Skills' own processes.",
}
_REASONS = {name: reason for names, reason in _IGNORED.items() for name in names.split()}
_BACKEND_REASONS = {
    "precreated_cluster": "A cluster with an address is there already.",
    "control_plane": "Jobs reach the cluster in the same way, whatever runs it.",
    "preflight": "NeMo-Skills reads `preflight` at the top of the file only; move it there.",
}


def matches(document: Document, profile: str | None = None) -> bool:
    """Whether it is a cluster file of NeMo-Skills, for Ray or not, and not one of this package."""
    keys = document.values.keys()
    return document.path.suffix != ".toml" and not keys & _OURS and bool(keys & _MARKS)


def names_ray(document: Document, profile: str | None = None) -> bool:
    """Whether a file of NeMo-Skills is for Ray; another one is of no interest here.

    Raises:
        ConfigError: its back-end is no text and has no name.
    """
    keys = Keys(document)
    executor = (keys.text("executor") or "").lower()
    name = _backend(keys)[1]
    of_old = (
        not name and executor != "slurm" and (keys.flag("with_ray") or keys.get("ray_endpoint"))
    )
    return name not in _NO_RAY or executor == "ray" or bool(of_old)


def read(document: Document, profile: str | None, environ: Mapping[str, str]) -> Document:
    """Bring a file of NeMo-Skills into our form.

    Args:
        document: the file.
        profile: it has none.
        environ: the caller's environment, for ``$NAME`` in values of variables.

    Raises:
        ConfigError: it is for another executor, has no address of a cluster, gives a credential in
            clear, or a value has the wrong type.
    """
    keys = Keys(document)
    draft = Draft(FORMAT, keys)
    section, name = _backend(keys)
    staged = name in _NO_RAY and (keys.text("executor") or "").lower() == "ray"
    if staged:
        why: KeyPath = ("executor",)
        used = ["executor", "ray"]
        _put_staged(draft)
    elif name in _NO_RAY:
        why = ("ray_endpoint",)
        used = ["with_ray", "ray_endpoint"]
        _check_legacy(keys)
        draft.put(("cluster", "address"), keys.address("ray_endpoint"), ("ray_endpoint",))
    else:
        why = (section, "name") if isinstance(keys.get(section), Mapping) else (section,)
        used = [section]
        _put_backend(draft, section, name, why)
    _put_images(draft)
    put_variables(draft, why, environ)
    if not staged:
        # A driver that calls ray.init with its own runtime_env would fail on what it shares with
        # the job's; NeMo-Skills sets this for each of its Ray jobs, and NeMo-RL needs it.
        override = ("env", "set", "RAY_OVERRIDE_JOB_RUNTIME_ENV")
        draft.put(override, "1", why, ": NeMo-Skills always sets it")
    has_endpoint = staged or any(keys.text(*path) for path in _endpoint_keys(section, False))
    put_preflight(draft, has_endpoint)
    draft.put(("defaults", "wait_for_nodes"), True, why, ": NeMo-Skills waits for nodes to come")
    used += ["containers", "env_vars", "required_env_vars", "preflight"]
    draft.ignore_rest((), used, _REASONS)
    return draft.done()


def _backend(keys: Keys) -> tuple[str, str]:
    """The section of the back-end, and its name."""
    section = "backend" if keys.get("backend") else "execution_backend"
    value = keys.get(section)
    if isinstance(value, str) or not value:
        return section, (value or "").strip().lower()
    if not isinstance(value, Mapping):
        raise keys.refuse(
            (section,), f"it is {shown(value)}; expected a back-end's name, or keys with values."
        )
    name = (keys.text(section, "name") or "").lower()
    return section, name


def _check_legacy(keys: Keys) -> None:
    """Refuse a file without a back-end that is not for Ray."""
    executor, endpoint = keys.text("executor"), keys.text("ray_endpoint")
    # What names the default back-end has chosen it.
    with_ray = keys.flag("with_ray") and not _backend(keys)[1]
    needed = (
        "For Ray it needs `backend: {name: ray, dashboard_url: http://<head>:8265}`, or "
        "`executor: ray` with `ray.address`."
    )
    if with_ray and (executor or "").lower() == "slurm":
        raise keys.refuse(
            ("with_ray",),
            f"with `executor: slurm` it {_INSIDE_SLURM} {needed}",
        )
    if endpoint and not _backend(keys)[1] and (executor or "").lower() != "slurm":
        return  # who names this file means Ray, as a call of NeMo-Skills with `with_ray` does
    if with_ray:
        raise keys.refuse(
            ("with_ray",),
            "no cluster is named; expected `ray_endpoint: ray://<head>:10001` beside it, or "
            "`backend.dashboard_url`.",
        )
    if endpoint:
        raise keys.refuse(("ray_endpoint",), f"it counts with `with_ray: true` only. {needed}")
    if executor:
        raise keys.refuse(
            ("executor",), f"this file of NeMo-Skills is for {executor!r}, not for Ray. {needed}"
        )
    raise keys.refuse((), f"this file of NeMo-Skills names no executor. {needed}")


def _put_backend(draft: Draft, section: str, name: str, why: KeyPath) -> None:
    keys = draft.keys
    if name not in _SUPPORTED:
        raise keys.refuse(why, f"{name!r} is no back-end; expected one of {', '.join(_SUPPORTED)}.")
    endpoints = _endpoint_keys(section, name in _KUBERNETES)
    _put_address(draft, section, [*_dashboard_keys(section), *endpoints])
    selector = _first(keys, section, "entrypoint_label_selector")
    if selector:
        draft.put(("defaults", "label_selector"), _labels(keys, selector), selector)
    label_key = _first(keys, section, "image_label_key")
    if label_key:
        draft.put(("image_label_key",), keys.text(*label_key), label_key)
    images = _first(keys, section, "image_label_selectors")
    if images:
        for image in keys.table(*images):
            path = (*images, image)
            draft.put(("image_labels", image), _image_labels(keys, path), path)
    folder = (section, "working_dir")
    if keys.text(*folder):
        draft.put(("defaults", "packager"), {"folder": keys.text(*folder)}, folder)
    _check_mode(draft, section)
    _ignore_in_backend(draft, section)


def _endpoint_keys(section: str, kubernetes_alias: bool) -> list[KeyPath]:
    """Keys that may hold the address of a Ray Client server, the one that counts first."""
    keys: list[KeyPath] = [(section, "ray_endpoint"), (section, "kubernetes", "endpoint")]
    if kubernetes_alias:
        keys.reverse()
    return [(section, "endpoint"), *keys, ("ray_endpoint",)]


def _dashboard_keys(section: str) -> list[KeyPath]:
    """Keys that may hold the dashboard's address, the one that counts first."""
    return [
        (section, "dashboard_url"),
        (section, "jobs_api_url"),
        (section, "kubernetes", "dashboard_url"),
    ]


def _put_address(draft: Draft, section: str, candidates: list[KeyPath]) -> None:
    keys = draft.keys
    given = [path for path in candidates if keys.text(*path)]
    if not given:
        problem = (
            "it says Ray, but no address of a cluster is given; expected "
            f"`{section}.dashboard_url: http://<head>:8265`."
        )
        if (keys.text("executor") or "").lower() == "slurm":
            problem += f" With `executor: slurm` it {_INSIDE_SLURM}"
        raise keys.refuse((section, "name"), problem)
    draft.put(("cluster", "address"), keys.address(*given[0]), given[0])
    for path in given[1:]:
        draft.ignore(path, f"{dotted(given[0])} comes first.")


def _put_staged(draft: Draft) -> None:
    """``executor: ray`` with its section ``ray``."""
    keys = draft.keys
    address, cpus = keys.address("ray", "address"), keys.amount("ray", "default_num_cpus")
    note = _DEFAULT if address is None else ""
    draft.put(("cluster", "address"), address or "auto", ("ray", "address"), note)
    note = _DEFAULT if cpus is None else ""
    cpus = _STAGED_CPUS if cpus is None else cpus
    draft.put(("defaults", "cpus_per_node"), cpus, ("ray", "default_num_cpus"), note)
    reasons = {"namespace": "Ray jobs of this package share no named actors."}
    draft.ignore_rest(("ray",), ("address", "default_num_cpus"), reasons)


def _put_images(draft: Draft) -> None:
    for name, image in draft.keys.table("containers").items():
        path = ("containers", name)
        if not isinstance(image, str) or not image.strip():
            raise draft.keys.refuse(path, f"it is {shown(image)}; expected a container image.")
        draft.put(("images", name), image, path)


def _first(keys: Keys, section: str, key: str) -> KeyPath | None:
    """A key of the back-end, or else of its section ``kubernetes``."""
    for path in ((section, key), (section, "kubernetes", key)):
        if keys.get(*path):
            return path
    return None


def _labels(keys: Keys, path: KeyPath) -> dict[str, str]:
    labels = {}
    for key, value in keys.table(*path).items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise keys.refuse(
                (*path, key), f"it is {shown(value)}; expected a label's value, in quotes."
            )
        labels[key] = str(value)
    return labels


def _image_labels(keys: Keys, path: KeyPath) -> dict[str, str]:
    """``{key: K, value: V}``, or labels."""
    labels = _labels(keys, path)
    return {labels["key"]: labels["value"]} if set(labels) == {"key", "value"} else labels


def _check_mode(draft: Draft, section: str) -> None:
    path: KeyPath = (section, "kubernetes", "mode")
    mode = draft.keys.text(*path)
    if mode is not None and mode.lower() not in _MODES:
        raise draft.keys.refuse(path, f"it is {mode!r}; expected {' or '.join(_MODES)}.")
    if mode is not None:
        draft.ignore(path, "It changes nothing in how a job runs.")


def _ignore_in_backend(draft: Draft, section: str) -> None:
    if not isinstance(draft.keys.get(section), Mapping):
        return
    shared = ["entrypoint_label_selector", "image_label_key", "image_label_selectors"]
    kubernetes = [*shared, "mode", "endpoint", "dashboard_url"]
    addresses = ["dashboard_url", "jobs_api_url", "endpoint", "ray_endpoint"]
    used = ["name", "kubernetes", "working_dir", *addresses, *shared]
    draft.ignore_rest((section,), used, _BACKEND_REASONS)
    draft.ignore_rest((section, "kubernetes"), kubernetes, {})
    for key in shared:
        second: KeyPath = (section, "kubernetes", key)
        if draft.keys.get(section, key) and draft.keys.get(*second):
            draft.ignore(second, f"{section}.{key} comes first.")


#: Variables that NeMo-Skills forwards from the caller's environment without being asked.
FORWARDED = [
    "WANDB_API_KEY",
    "NVIDIA_API_KEY",
    "AZURE_OPENAI_API_KEY",
    "OPENAI_API_KEY",
    "GEMINI_API_KEY",
    "HF_TOKEN",
    "NGC_API_KEY",
]
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


def _is_known(draft: Draft, name: str) -> bool:
    """Whether a variable has a value or is required already, which is more than to forward it."""
    places = ("env", "set"), ("env", "required"), ("secrets",)
    return any(name in (draft.got(*place) or ()) for place in places)


def _put_value(
    draft: Draft, path: KeyPath, name: str, value: str, environ: Mapping[str, str]
) -> None:
    """``NAME=value``: plain text, text with ``$OTHER`` in it, or another variable's value."""
    names = [first or second for first, second in _REFERENCE.findall(value)]
    secret = [word for word in (name, *names) if is_credential_name(word)]
    if secret and not value:
        draft.ignore(path, "The credential is empty.")
    elif secret and _REFERENCE.fullmatch(value):
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
            draft.put(("env", "set", name), _filled(value, environ), path)
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
        draft.put(("env", "value_from", name), [in_file(draft.keys.document.path, name)], path)


def value_in(text: str, name: str, environ: Mapping[str, str]) -> str | None:
    """The value that the text of a file gives a variable as ``NAME=value``."""
    value = None
    for key in ("required_env_vars", "env_vars"):
        for entry in yaml.safe_load(text).get(key) or ():
            given, equals, content = (part.strip() for part in entry.partition("="))
            if equals and given == name:
                value = _filled(content, environ)
    return value


def _filled(value: str, environ: Mapping[str, str]) -> str:
    """A value with the variables of the environment for ``$NAME`` and ``${NAME}``."""
    return _REFERENCE.sub(lambda match: environ[match[1] or match[2]], value)


_RESOURCES = {
    **dict.fromkeys(("gpu", "gpus"), "GPU"),
    **dict.fromkeys(("cpu", "cpus"), "CPU"),
    **dict.fromkeys(("mem", "memory"), "memory"),
}
_USED = [
    "enabled",
    "require_ray_endpoint",
    "strict_label_check",
    "required_node_labels",
    "min_cluster_resources",
]
_LABELS: KeyPath = ("preflight", "required_node_labels")
_MINIMUM: KeyPath = ("preflight", "min_cluster_resources")
_DEFAULT = ": NeMo-Skills' default"


def put_preflight(draft: Draft, has_endpoint: bool) -> None:
    """Read what is looked at before a start, if the file asks for a look.

    Args:
        draft: gets the section ``preflight``.
        has_endpoint: whether the file gives the address of a Ray Client server.
    """
    keys = draft.keys
    if not keys.table("preflight"):
        return
    # Nodes that a task needs may come later; only what the file requires must be there.
    draft.put(("preflight", "only_required"), True, ("preflight",), _DEFAULT)
    for key, ours, default in (
        ("enabled", "enabled", True),
        ("require_ray_endpoint", "require_address", has_endpoint),
        ("strict_label_check", "strict", True),
    ):
        path: KeyPath = ("preflight", key)
        value = keys.flag(*path)
        if value is None:
            draft.put(("preflight", ours), default, ("preflight",), _DEFAULT)
        elif key == "require_ray_endpoint" and value and not has_endpoint:
            draft.ignore(path, "Jobs go through the dashboard, whose address the file has.")
        else:
            draft.put(("preflight", ours), value, path)
    labels = [_label(draft, number) for number in range(len(keys.items(*_LABELS)))]
    if labels:
        draft.put(("preflight", "required_labels"), labels, _LABELS)
    for name, amount in keys.table(*_MINIMUM).items():
        path = (*_MINIMUM, name)
        if not is_amount(amount):
            raise keys.refuse(path, f"it is {shown(amount)}; expected a number from 0.")
        resource = _RESOURCES.get(name.strip().lower(), name)
        draft.put(("preflight", "min_resources", resource), amount, path)
    draft.ignore_rest(("preflight",), _USED, {})


def _label(draft: Draft, number: int) -> dict[str, Any]:
    path = (*_LABELS, number)
    entry = draft.keys.table(*path)
    key, value = (str(entry.get(word, "")).strip() for word in ("key", "value"))
    if not key or set(entry) != {"key", "value"}:
        raise draft.keys.refuse(path, "it is no label; expected {key: NAME, value: VALUE}.")
    return {"key": key, "value": value}
