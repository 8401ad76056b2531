"""What one worker reserves, and how many of them a cluster can have: no cluster is asked here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import LABELS, RESOURCE_MAX, RESOURCE_MIN, are_labels, is_amount, is_whole
from nemo_run_ray.remote.group.packing import amount_text, matches


@dataclass(frozen=True)
class Shape:
    """What one worker reserves.

    Attributes:
        resources: by Ray's names (``CPU``, ``GPU``, ``memory`` in bytes, and the cluster's own).
        label_selector: nodes that may have one.
        max_workers: at most so many at once; ``None`` is what fits.
    """

    resources: tuple[tuple[str, float], ...]
    label_selector: tuple[tuple[str, str], ...] = ()
    max_workers: int | None = None

    def options(self) -> dict[str, Any]:
        """The options of the actor; Ray spreads them over the nodes."""
        asked = dict(self.resources)
        options: dict[str, Any] = {
            "num_cpus": asked.pop("CPU", 0),
            "num_gpus": asked.pop("GPU", 0),
            "memory": int(asked.pop("memory", 0)) or None,
            "resources": asked or None,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
        }
        if self.label_selector:
            options["label_selector"] = dict(self.label_selector)
            del options["scheduling_strategy"]  # Ray takes one or the other
        return {name: value for name, value in options.items() if value is not None}

    def slots(self, nodes: Sequence[Mapping[str, Any]]) -> int:
        """How many workers the living nodes can have at once.

        Args:
            nodes: as ``ray.nodes()`` gives them.
        """
        fitting = [node for node in nodes if self._may_be_on(node)]
        if not self.resources:  # then there is a limit of workers, see shape_of
            return (self.max_workers or 0) if fitting else 0
        found = sum(self._on(node) for node in fitting)
        return found if self.max_workers is None else min(found, self.max_workers)

    def why_never(self, nodes: Sequence[Mapping[str, Any]]) -> str:
        """Why no node can have a worker, in words."""
        alive = [node for node in nodes if node["Alive"]]
        fitting = [node for node in alive if self._may_be_on(node)]
        if alive and not fitting:
            return f"No node has the labels {dict(self.label_selector)}."
        for name, asked in self.resources:
            most = max((node["Resources"].get(name, 0.0) for node in fitting), default=0.0)
            if most < asked:
                has = amount_text(name, most)
                return (
                    f"No node can have a worker: it asks for {name} {amount_text(name, asked)}, "
                    f"and the largest node has {has}."
                )
        return f"No node can have a worker: none has {self._asked} at once."

    def why_waiting(self, available: Mapping[str, float], slots: int) -> str:
        """What is waited for, in words: Ray does not tell a worker that starts from one that waits.

        Args:
            available: what the cluster has free, by resource.
            slots: how many workers its nodes could have if nothing else ran.
        """
        free = ", ".join(
            f"{name} {amount_text(name, available.get(name, 0.0))}" for name, _ in self.resources
        )
        return (
            f"No worker is ready yet: they start, or wait for room. Each asks for {self._asked}; "
            f"the nodes can have {slots} when nothing else runs. Free in the cluster, without what "
            f"workers that start have taken already: {free}."
        )

    @property
    def _asked(self) -> str:
        return ", ".join(f"{name} {amount_text(name, value)}" for name, value in self.resources)

    def _may_be_on(self, node: Mapping[str, Any]) -> bool:
        return bool(node["Alive"]) and matches(dict(self.label_selector), node.get("Labels") or {})

    def _on(self, node: Mapping[str, Any]) -> int:
        return min(
            int(node["Resources"].get(name, 0.0) / value + 1e-9) for name, value in self.resources
        )


def shape_of(
    cpus: float,
    gpus: float,
    memory: int | None,
    resources: Mapping[str, float] | None,
    label_selector: Mapping[str, str] | None,
    max_workers: int | None,
) -> Shape:
    """The shape that a user's arguments describe.

    Raises:
        ConfigError: one of them is wrong.
    """
    if resources is not None and not _are_named(resources):
        raise ConfigError(
            f"resources is {resources!r}; expected is a dict of amounts by the name of a resource."
        )
    if label_selector is not None and not are_labels(label_selector):
        raise ConfigError(f"label_selector is {label_selector!r}; expected is a dict of {LABELS}.")
    amounts = {"CPU": cpus, "GPU": gpus, "memory": memory or 0, **(resources or {})}
    for name, value in amounts.items():
        if not is_amount(value):
            raise ConfigError(f"{name} is {value!r}; expected is a number from 0.")
        if 0 < value < RESOURCE_MIN or value > RESOURCE_MAX:
            raise ConfigError(
                f"{name} is {value!r}; expected is 0, or a number from {RESOURCE_MIN}, the step in "
                f"which Ray counts, to {RESOURCE_MAX}."
            )
    if max_workers is not None and not is_whole(max_workers, 1):
        raise ConfigError(f"max_workers must be greater than 0, and whole; it is {max_workers!r}.")
    asked = {name: float(value) for name, value in amounts.items() if value}
    if not asked and max_workers is None:
        raise ConfigError(
            "A worker that reserves nothing needs max_workers: else there is no limit of workers. "
            "Expected is cpus above 0, or max_workers."
        )
    labels = tuple(sorted((label_selector or {}).items()))
    return Shape(tuple(sorted(asked.items())), labels, max_workers)


def _are_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
