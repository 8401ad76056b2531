"""The section ``preflight`` of a NeMo-Skills file."""

from __future__ import annotations

from typing import Any

from nemo_run_ray.cluster_files.document import KeyPath
from nemo_run_ray.cluster_files.foreign import Draft, shown
from nemo_run_ray.fields import is_amount

_RESOURCES = {
    "gpu": "GPU",
    "gpus": "GPU",
    "cpu": "CPU",
    "cpus": "CPU",
    "mem": "memory",
    "memory": "memory",
}
_USED = (
    "enabled",
    "require_ray_endpoint",
    "strict_label_check",
    "required_node_labels",
    "min_cluster_resources",
)
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
