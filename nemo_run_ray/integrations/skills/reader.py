"""Reads cluster files of NeMo-Skills that are for Ray.

It has two ways to Ray, with a schema each: a back-end that submits Ray jobs (``backend: {name:
ray}``, or ``ray_endpoint``), and a staged executor (``executor: ray``).
"""

from __future__ import annotations

import re
from dataclasses import replace

from nemo_run_ray.cluster_files.load import Document, KeyPath
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.fields import is_credential_name
from nemo_run_ray.integrations.foreign import Translation, at
from nemo_run_ray.remote.spec import Env, Json

FORMAT = "NeMo-Skills"
_KUBERNETES = ("kubernetes-ray", "ray-kubernetes", "ray_kubernetes")
_NO_RAY = ("", "default", "none")
#: Keys by which a file is one of NeMo-Skills.
_MARKS = {
    *("executor", "backend", "execution_backend", "ray_endpoint", "with_ray"),
    *("containers", "required_env_vars"),
}
_OURS = frozenset(ClusterFile.model_fields) - {"preflight"}

#: The reasons for which keys mean nothing here.
_IGNORED = {
    "executor with_ray backend execution_backend ray ray_endpoint dashboard_url jobs_api_url "
    "endpoint": "Another key of the file says how jobs reach Ray.",
    "jobs": "Logs are kept with the experiment.",
    "mounts": "The containers of a Ray cluster run already, with the mounts they have.",
    "account partition cpu_partition disable_gpus_per_node dependency_type mail_type mail_user "
    "timeouts default_timeout ssh_tunnel job_dir": "It is for Slurm.",
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
_LABELS = ("entrypoint_label_selector", "image_label_key", "image_label_selectors")
_RESOURCES = {"gpu": "GPU", "gpus": "GPU", "cpu": "CPU", "cpus": "CPU", "mem": "memory"}
_ADDRESSES = ("dashboard_url", "jobs_api_url", "endpoint", "ray_endpoint")


def matches(document: Document) -> bool:
    """Whether it is a cluster file of NeMo-Skills, for Ray or not, and not one of this package."""
    keys = document.values.keys()
    return document.path.suffix != ".toml" and not keys & _OURS and bool(keys & _MARKS)


def names_ray(document: Document, profile: str = "") -> bool:
    """Whether a file of NeMo-Skills is for Ray; another one is of no interest here.

    Raises:
        ConfigError: its back-end or executor is no text.
    """
    return _opened(document)[-1]


def _opened(document: Document) -> tuple[Translation, str, str, str, bool]:
    """A file, its executor, the key of its back-end, that one's name, and whether it is for Ray.

    The keys below ``kubernetes`` are among those of the back-end, which come first.
    """
    values = dict(document.values)
    is_second = values.get("execution_backend") and not values.get("backend")
    section = "execution_backend" if is_second else "backend"
    if isinstance(values.get(section), str):
        values[section] = {"name": values[section]}
    file = Translation(FORMAT, replace(document, values=values), _IGNORED)
    if values.get(section):
        values[section] = {**file.of(dict, section, "kubernetes"), **file.of(dict, section)}
    name = file.of(str, section, "name").strip().lower()
    executor = file.of(str, "executor").strip().lower()
    has_endpoint = (
        not name and executor != "slurm" and (file.get("ray_endpoint") or file.get("with_ray"))
    )
    is_for_ray = name not in _NO_RAY or executor == "ray" or bool(has_endpoint)
    return file, executor, section, name, is_for_ray


def read(document: Document, profile: str, environ: Env) -> Document:
    """Bring a file of NeMo-Skills into our form.

    Args:
        document: the file.
        profile: it has none.
        environ: the caller's environment, for ``$NAME`` in values of variables.

    Raises:
        ConfigError: it is for another executor, has no address of a cluster, or an entry is wrong.
    """
    file, executor, section, name, is_for_ray = _opened(document)
    if not is_for_ray:
        raise file.document.refuse(
            ("executor",),
            f"this file of NeMo-Skills is for {executor or 'no executor'!r}, not for Ray. For Ray "
            "it needs `backend: {name: ray, dashboard_url: http://<head>:8265}`, or `executor: "
            "ray` with `ray.address`. `with_ray` with `executor: slurm` means Ray inside a Slurm "
            "allocation, not a cluster that jobs can be sent to.",
        )
    if name in _NO_RAY and executor == "ray":
        why, used = "executor", ["executor", "ray"]
        file.put_or(("cluster", "address"), "auto", ("ray", "address"))
        file.put_or(("defaults", "cpus_per_node"), 8, ("ray", "default_num_cpus"))
        file.ignore_rest(("ray",), ("address", "default_num_cpus"))
    else:
        why, used = section if name else "ray_endpoint", [section]
        _put_backend(file, section, name)
        # A driver that calls ray.init with its own runtime_env would fail on what it shares with
        # the job's; NeMo-Skills sets this for each of its Ray jobs, and NeMo-RL needs it.
        file.put(("env", "set", "RAY_OVERRIDE_JOB_RUNTIME_ENV"), "1", (why,))
    for image, container in file.of(dict, "containers").items():
        file.put(("images", image), container, ("containers", image))
    _put_variables(file, (why,), environ)
    if file.of(dict, "preflight"):
        # Nodes that a task needs may come later; only what the file requires must be there.
        file.put(("preflight", "only_required"), True, ("preflight",))
        file.put_or(("preflight", "enabled"), True, ("preflight", "enabled"))
        file.put_or(("preflight", "strict"), True, ("preflight", "strict_label_check"))
        labels = ("preflight", "required_node_labels")
        file.put(
            ("preflight", "required_labels"),
            [_texts(row) if isinstance(row, dict) else row for row in file.of(list, *labels)],
            labels,
        )
        totals = ("preflight", "min_cluster_resources")
        for key, amount in file.of(dict, *totals).items():
            resource = _RESOURCES.get(key.strip().lower(), str(key))
            file.put(("preflight", "min_resources", resource), amount, (*totals, key))
        file.ignore_rest(
            ("preflight",),
            ("enabled", "strict_label_check", "required_node_labels", "min_cluster_resources"),
        )
    file.put(("defaults", "wait_for_nodes"), True, (why,))
    used += ["containers", "env_vars", "required_env_vars", "preflight"]
    file.ignore_rest((), used)
    return file.result


def _put_backend(file: Translation, section: str, name: str) -> None:
    if name not in ("ray", *_KUBERNETES, *_NO_RAY):
        raise file.document.refuse(
            (section, "name"), f"{name!r} is no back-end; expected one of ray, {_KUBERNETES}."
        )
    places = [*((section, key) for key in _ADDRESSES), ("ray_endpoint",)]
    place = next((place for place in places if file.get(*place)), None)
    if not place:
        raise file.document.refuse(
            (section, "name"),
            "it says Ray, but no address of a cluster is given; expected "
            f"`{section}.dashboard_url: http://<head>:8265`.",
        )
    file.put(("cluster", "address"), file.of(str, *place), place)
    selector, label_key, images = ((section, key) for key in _LABELS)
    if file.get(*selector):
        file.put(("defaults", "label_selector"), _texts(file.of(dict, *selector)), selector)
    if file.get(*label_key):
        file.put(("image_label_key",), file.get(*label_key), label_key)
    for image in file.of(dict, *images):
        labels = _texts(file.of(dict, *images, image))
        if set(labels) == {"key", "value"}:
            labels = {labels["key"]: labels["value"]}
        file.put(("image_labels", image), labels, (*images, image))
    if folder := file.of(str, section, "working_dir").strip():
        file.put(("defaults", "packager"), {"folder": folder}, (section, "working_dir"))
    file.ignore_rest((section,), ("name", "kubernetes", "working_dir", place[-1], *_LABELS))


def _texts(labels: Json) -> Json:
    """Labels; a number is one as NeMo-Skills writes it."""
    return {
        key: str(value) if type(value) in (int, float) else value for key, value in labels.items()
    }


#: Variables that NeMo-Skills forwards from the caller's environment without being asked.
FORWARDED = [
    *("WANDB_API_KEY", "NVIDIA_API_KEY", "AZURE_OPENAI_API_KEY", "OPENAI_API_KEY"),
    *("GEMINI_API_KEY", "HF_TOKEN", "NGC_API_KEY"),
]
#: The beginning of other names that it forwards, but for those that matter on this side only.
_PREFIX = "NEMO_SKILLS_"
_STAY_HERE = {f"{_PREFIX}{word}" for word in ("SSH_SERVER", "SSH_KEY_PATH", "CONFIG", "CONFIG_DIR")}
_LISTS = ("required_env_vars", "env_vars")
#: ``$NAME`` and ``${NAME}`` in a value of a variable.
_REFERENCE = re.compile(r"\$(\{)?([A-Za-z_]\w*)(?(1)\})")


def _put_variables(file: Translation, added_by: KeyPath, environ: Env) -> None:
    """Read the variables of a file, and add those that NeMo-Skills does."""

    def add(kind: tuple[str, ...], name: str, path: KeyPath) -> None:
        """Add a name, unless it has a value or is required already, which is more."""
        places = (("env", "set"), ("env", "required"), ("secrets",))
        if not any(name in (at(file.result.values, place) or ()) for place in places):
            file.append(kind, name, path)

    for key in _LISTS:
        for number, entry in enumerate(file.of(list, key)):
            path = (key, number)
            name, equals, value = (part.strip() for part in str(entry).partition("="))
            others = [other for _, other in _REFERENCE.findall(value)]
            secret = next(filter(is_credential_name, others), "")
            if not isinstance(entry, str) or not re.fullmatch(r"[^\s=$]+", name):
                raise file.document.refuse(
                    path, "it is no variable (not shown here); expected NAME, or NAME=value."
                )
            if equals and not value and is_credential_name(name):
                file.ignore(path, "The credential is empty.")
            elif not equals:
                add(("env", "forward" if key == "env_vars" else "required"), name, path)
            elif _REFERENCE.fullmatch(value) and (secret or is_credential_name(name)):
                file.append(("secrets",), name, path)
                file.put(("env", "value_from", name), others, path)
            elif secret:
                raise file.document.refuse(
                    path,
                    f"{secret} is the name of a credential, which would be shown in another text; "
                    f"expected {name}=${secret} and nothing else.",
                )
            else:  # plain text, or text with $OTHER in it
                try:
                    filled = _REFERENCE.sub(lambda match: environ[match[2]], value)
                except KeyError as error:
                    problem = f"its value asks for the variable {error.args[0]}, which is not set."
                    raise file.document.refuse(path, problem) from None
                file.put(("env", "set", name), filled, path)
    for name in FORWARDED:
        add(("env", "forward"), name, added_by)
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in _STAY_HERE:
            add(("secrets",), name, added_by)  # nobody but NeMo-Skills knows what they hold
