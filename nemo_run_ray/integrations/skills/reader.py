"""Reads cluster files of NeMo-Skills that are for Ray.

It has two ways to Ray, with a schema each: a back-end that submits Ray jobs (``backend: {name:
ray}``, or ``ray_endpoint``), and a staged executor (``executor: ray``).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import yaml

from nemo_run_ray.cluster_files.load import Document, KeyPath, in_file
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.fields import is_credential_name
from nemo_run_ray.integrations.foreign import Translation

FORMAT = "NeMo-Skills"
_KUBERNETES = ("kubernetes-ray", "ray-kubernetes", "ray_kubernetes")
_NO_RAY = ("", "default", "none")
#: Keys by which a file is one of NeMo-Skills.
_MARKS = {"executor", "backend", "execution_backend", "ray_endpoint", "with_ray"} | {
    "containers",
    "required_env_vars",
}
_OURS = frozenset(ClusterFile.model_fields) - {"preflight"}
#: CPUs that the staged executor reserves for a task where its file says nothing.
_STAGED_CPUS = 8
_DEFAULT, _ADDED = ": NeMo-Skills' default", ": NeMo-Skills always does so"

#: The reasons for which keys mean nothing here.
_IGNORED = {
    "executor": "The back-end is Ray, so no other executor starts anything.",
    "backend": "It does not name Ray.",
    "execution_backend": "`backend` comes first, or it does not name Ray.",
    "with_ray": "The file is for Ray already.",
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
    # In the section of the back-end, in `ray` and in `preflight`.
    "precreated_cluster": "A cluster with an address is there already.",
    "control_plane mode": "Jobs reach the cluster in the same way, whatever runs it.",
    "preflight": "NeMo-Skills reads `preflight` at the top of the file only; move it there.",
    "namespace": "Ray jobs of this package share no named actors.",
    "require_ray_endpoint": "Jobs go through the dashboard, whose address the file has.",
}
_TOP = ("containers", "env_vars", "required_env_vars", "preflight")
_LABELS = ("entrypoint_label_selector", "image_label_key", "image_label_selectors")
_ADDRESSES = ("dashboard_url", "jobs_api_url", "endpoint", "ray_endpoint")


def matches(document: Document, profile: str | None = None) -> bool:
    """Whether it is a cluster file of NeMo-Skills, for Ray or not, and not one of this package."""
    keys = document.values.keys()
    return document.path.suffix != ".toml" and not keys & _OURS and bool(keys & _MARKS)


def names_ray(document: Document, profile: str | None = None) -> bool:
    """Whether a file of NeMo-Skills is for Ray; another one is of no interest here.

    Raises:
        ConfigError: its back-end or executor is no text.
    """
    file = Translation(FORMAT, document)
    executor, (_, name) = file.text("executor").lower(), _backend(file)
    endpoint = file.get("ray_endpoint") or file.get("with_ray")
    return name not in _NO_RAY or executor == "ray" or bool(endpoint and executor != "slurm")


def read(document: Document, profile: str | None, environ: Mapping[str, str]) -> Document:
    """Bring a file of NeMo-Skills into our form.

    Args:
        document: the file.
        profile: it has none.
        environ: the caller's environment, for ``$NAME`` in values of variables.

    Raises:
        ConfigError: it is for another executor, has no address of a cluster, or an entry is wrong.
    """
    file = Translation(FORMAT, document)
    section, name = _backend(file)
    executor = file.text("executor").lower()
    if not names_ray(document):
        raise file.refuse(
            ("executor",),
            f"this file of NeMo-Skills is for {executor or 'no executor'!r}, not for Ray. For Ray "
            "it needs `backend: {name: ray, dashboard_url: http://<head>:8265}`, or `executor: "
            "ray` with `ray.address`. `with_ray` with `executor: slurm` means Ray inside a Slurm "
            "allocation, not a cluster that jobs can be sent to.",
        )
    if name in _NO_RAY and executor == "ray":
        why, used = ("executor",), ["executor", "ray"]
        _put_staged(file)
    else:
        why, used = ((section,) if name else ("ray_endpoint",)), [section]
        _put_backend(file, section, name)
        # A driver that calls ray.init with its own runtime_env would fail on what it shares with
        # the job's; NeMo-Skills sets this for each of its Ray jobs, and NeMo-RL needs it.
        file.put(("env", "set", "RAY_OVERRIDE_JOB_RUNTIME_ENV"), "1", why, _ADDED)
    for image, container in file.table("containers").items():
        file.put(("images", image), container, ("containers", image))
    _put_variables(file, why, environ)
    _put_preflight(file)
    file.put(("defaults", "wait_for_nodes"), True, why, _ADDED)
    file.ignore_rest((), [*used, *_TOP], _IGNORED)
    return file.done()


def _backend(file: Translation) -> tuple[str, str]:
    """The section of the back-end, and its name."""
    is_second = file.get("execution_backend") and not file.get("backend")
    section = "execution_backend" if is_second else "backend"
    is_table = isinstance(file.get(section), Mapping)
    return section, file.text(section, *(["name"] if is_table else [])).lower()


def _put_backend(file: Translation, section: str, name: str) -> None:
    kubernetes = (section, "kubernetes")
    if name not in ("ray", *_KUBERNETES, *_NO_RAY):
        raise file.refuse(
            (section, "name"), f"{name!r} is no back-end; expected one of ray, {_KUBERNETES}."
        )
    endpoints: list[KeyPath] = [(section, "ray_endpoint"), (*kubernetes, "endpoint")]
    address = file.first(
        (section, "dashboard_url"),
        (section, "jobs_api_url"),
        (*kubernetes, "dashboard_url"),
        (section, "endpoint"),
        *(reversed(endpoints) if name in _KUBERNETES else endpoints),
        ("ray_endpoint",),
    )
    if address is None:
        raise file.refuse(
            (section, "name"),
            "it says Ray, but no address of a cluster is given; expected "
            f"`{section}.dashboard_url: http://<head>:8265`.",
        )
    file.put_address(address)
    selector, label_key, images = (
        file.first((section, key), (*kubernetes, key)) for key in _LABELS
    )
    if selector:
        file.put(("defaults", "label_selector"), _labels(file.table(*selector)), selector)
    if label_key:
        file.put(("image_label_key",), file.get(*label_key), label_key)
    for image in file.table(*images) if images else ():
        path = (*(images or ()), image)
        labels = _labels(file.table(*path))
        if set(labels) == {"key", "value"}:
            labels = {labels["key"]: labels["value"]}
        file.put(("image_labels", image), labels, path)
    if file.text(section, "working_dir"):
        folder = file.text(section, "working_dir")
        file.put(("defaults", "packager"), {"folder": folder}, (section, "working_dir"))
    if isinstance(file.get(section), Mapping):
        known = ["name", "kubernetes", "working_dir", *_ADDRESSES, *_LABELS]
        file.ignore_rest((section,), known, _IGNORED)
        file.ignore_rest(kubernetes, ["endpoint", "dashboard_url", *_LABELS], _IGNORED)


def _labels(table: Mapping[str, Any]) -> dict[str, Any]:
    """Labels; a number is one as NeMo-Skills writes it."""
    return {key: str(v) if type(v) in (int, float) else v for key, v in table.items()}


def _put_staged(file: Translation) -> None:
    """``executor: ray`` with its section ``ray``."""
    if file.text("ray", "address"):
        file.put_address(("ray", "address"))
    else:
        file.put(("cluster", "address"), "auto", ("ray", "address"), _DEFAULT)
    cpus = file.get("ray", "default_num_cpus")
    path, note = ("ray", "default_num_cpus"), _DEFAULT if cpus is None else ""
    file.put(("defaults", "cpus_per_node"), _STAGED_CPUS if cpus is None else cpus, path, note)
    file.ignore_rest(("ray",), ("address", "default_num_cpus"), _IGNORED)


#: Variables that NeMo-Skills forwards from the caller's environment without being asked.
FORWARDED = [
    *("WANDB_API_KEY", "NVIDIA_API_KEY", "AZURE_OPENAI_API_KEY", "OPENAI_API_KEY"),
    *("GEMINI_API_KEY", "HF_TOKEN", "NGC_API_KEY"),
]
#: The beginning of other names that it forwards, but for those that matter on this side only.
_PREFIX = "NEMO_SKILLS_"
_STAY_HERE = {f"{_PREFIX}{word}" for word in ("SSH_SERVER", "SSH_KEY_PATH", "CONFIG", "CONFIG_DIR")}
_NAME = re.compile(r"[^\s=$]+")
#: ``$NAME`` and ``${NAME}`` in a value of a variable.
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")


def _put_variables(file: Translation, added_by: KeyPath, environ: Mapping[str, str]) -> None:
    """Read the variables of a file, and add those that NeMo-Skills does."""

    def add(kind: tuple[str, ...], name: str, path: KeyPath, note: str = "") -> None:
        """Add a name, unless it has a value or is required already, which is more."""
        if not any(
            name in file.at(*place) for place in (("env", "set"), ("env", "required"), ("secrets",))
        ):
            file.append(kind, name, path, note)

    for key, kind in (("required_env_vars", "required"), ("env_vars", "forward")):
        for number, entry in enumerate(file.items(key)):
            path: KeyPath = (key, number)
            name, equals, value = (part.strip() for part in str(entry).partition("="))
            if not isinstance(entry, str) or not _NAME.fullmatch(name):
                raise file.refuse(
                    path, "it is no variable (not shown here); expected NAME, or NAME=value."
                )
            if equals:
                _put_value(file, path, name, value, environ)
            else:
                add(("env", kind), name, path)
    for name in FORWARDED:
        add(("env", "forward"), name, added_by, _ADDED)
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in _STAY_HERE:
            add(("secrets",), name, added_by, _ADDED)  # nobody but NeMo-Skills knows what they hold


def _put_value(
    file: Translation, path: KeyPath, name: str, value: str, environ: Mapping[str, str]
) -> None:
    """``NAME=value``: plain text, text with ``$OTHER`` in it, or another variable's value."""
    names = [first or second for first, second in _REFERENCE.findall(value)]
    secret = next(filter(is_credential_name, [name, *names]), "")
    if secret and not value:
        file.ignore(path, "The credential is empty.")
    elif secret and _REFERENCE.fullmatch(value):
        file.append(("env", "required"), name, path)
        if names != [name]:
            file.put(("env", "value_from", name), names, path)
    else:
        try:
            filled = _filled(value, environ)
        except KeyError as error:
            raise file.refuse(
                path, f"its value asks for the variable {error.args[0]}, which is not set; set it."
            ) from None
        if not secret:
            file.put(("env", "set", name), filled, path)
            return
        warnings.warn(
            f"{file.document.where(*path)}: {secret} is the name of a credential, and whoever can "
            "read the file can read its value (it is not shown here). The task gets it as a "
            f"secret. Write `{name}`, which takes the value from your environment, or "
            f"`{name}=$OTHER_NAME`.",
            UserWarning,
            stacklevel=2,
        )
        file.append(("secrets",), name, path)
        file.put(("env", "value_from", name), [in_file(file.document.path, name)], path)


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


def _put_preflight(file: Translation) -> None:
    """Read what is looked at before a start, if the file asks for a look."""
    if not file.table("preflight"):
        return
    # Nodes that a task needs may come later; only what the file requires must be there.
    file.put(("preflight", "only_required"), True, ("preflight",), _DEFAULT)
    for key, ours in (("enabled", "enabled"), ("strict_label_check", "strict")):
        given, path = file.get("preflight", key), ("preflight", key)
        note = _DEFAULT if given is None else ""
        file.put(("preflight", ours), True if given is None else given, path, note)
    labels = ("preflight", "required_node_labels")
    file.put(("preflight", "required_labels"), file.items(*labels), labels)
    totals = ("preflight", "min_cluster_resources")
    for name, amount in file.table(*totals).items():
        resource = _RESOURCES.get(name.strip().lower(), name)
        file.put(("preflight", "min_resources", resource), amount, (*totals, name))
    used = ["enabled", "strict_label_check", "required_node_labels", "min_cluster_resources"]
    file.ignore_rest(("preflight",), used, _IGNORED)
