"""Whether a cluster fits what is to run on it, known before anything is sent; a first cluster file.

What the cluster does not tell is "unknown", never "ok".
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from nemo_run_ray.cluster_files.load import Document
from nemo_run_ray.cluster_files.resolve import values_of
from nemo_run_ray.dashboard.jobs import Inspection
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.fields import version_of
from nemo_run_ray.plan.roles import SELECTORS_SINCE, amounts_of
from nemo_run_ray.remote.fit import (
    Node,
    ResourceRequest,
    amount_text,
    amounts_text,
    fits,
    hosts,
    labelled,
    scarce,
    why_not,
)

_OPEN_IT = "Let GET /api/v0/… through to Ray's dashboard."


class CheckState(str, Enum):
    """The result of one check."""

    #: It was looked at and fits.
    OK = "ok"
    #: It works, or may work, with what the sentence says.
    WARNING = "warning"
    #: It cannot work.
    BROKEN = "broken"
    #: The cluster does not tell.
    UNKNOWN = "unknown"


OK, WARNING, BROKEN, UNKNOWN = CheckState


@dataclass(frozen=True)
class CheckRow:
    """One check: its name, its result, the result in a sentence, and the next step, if any."""

    check: str
    state: CheckState
    message: str
    next_step: str = ""


def check(
    look: Inspection,
    document: Document | None = None,
    asks: Mapping[str, ResourceRequest] | None = None,
) -> Iterator[CheckRow]:
    """Say of each thing that was seen of a cluster whether it fits; a pure function.

    Args:
        look: at the cluster.
        document: its cluster file, if it has one.
        asks: before a start, what one replica of each task asks for, by a name for people; then
            pools do not matter.
    """
    document = document or Document(Path(), {})
    file, nodes = document.file, look.nodes
    preflight = file.preflight
    if preflight.require_address and file.cluster.address is None:
        message = "The cluster file names no address, and preflight.require_address is set."
        yield CheckRow("address", BROKEN, message, "Give cluster.address in the file.")
    if look.unreachable:
        yield CheckRow("dashboard", BROKEN, look.unreachable)
        return
    yield CheckRow("dashboard", OK, f"{look.url} answers.")
    if look.unauthorised:
        yield CheckRow("credentials", BROKEN, look.unauthorised)
        return
    if look.jobs is None:
        message = "The job table did not answer in time, which would show that it takes them."
        yield CheckRow("credentials", UNKNOWN, message, "Try again later; it may be long.")
    else:
        known = "it knows {} job(s), {} of them pending or running".format(*look.jobs)
        yield CheckRow("credentials", OK, f"It takes them, and {known}.")
    labels = {f"label {one.key}={one.value}": one for one in preflight.required_labels}
    totals = {f"total {name}": name for name in sorted(preflight.min_resources)}
    if preflight.only_required and asks is not None:  # `doctor` looks at all
        asks = {}
        if not labels and not totals:
            return
    else:
        asks = pool_asks(document) if asks is None else asks
        if version_of(look.version) >= SELECTORS_SINCE:
            yield CheckRow("Ray", OK, f"The cluster runs Ray {look.version}.")
        else:
            yield CheckRow(
                "Ray",
                BROKEN if any(ask.selector for ask in asks.values()) else WARNING,
                f"The cluster runs Ray {look.version}; label selectors need 2.54 or newer.",
                "Upgrade it, or reserve a custom resource of the nodes (resources_per_node).",
            )
        head, here = ".".join(look.python.split(".")[:2]), "{}.{}".format(*sys.version_info)
        if not head:
            yield CheckRow("Python", UNKNOWN, "The cluster does not tell its version of Python.")
        elif head == here:
            yield CheckRow("Python", OK, f"The head and this client have Python {head}.")
        else:
            yield CheckRow(
                "Python",
                WARNING,
                f"The head has Python {head}, this client {here}; a run.Partial is made by one and "
                "run by the other.",
                "Use the same minor version on both sides, or name one: RayExecutor(python=…).",
            )
    if nodes is None:
        state = BROKEN if preflight.strict else UNKNOWN
        message = "The cluster does not tell: its state API is closed or did not answer in time."
        yield CheckRow("nodes", state, message, _OPEN_IT)
        for name in (*labels, *totals, *asks):
            yield CheckRow(name, state, "It is not known: see the line about nodes.")
        return
    total = Counter[str]()
    for node in nodes:
        total.update(node.resources)
    if not nodes:
        yield CheckRow("nodes", BROKEN, "No node lives.", "Look at the cluster's dashboard.")
    else:
        message = f"{len(nodes)} node(s) live, with {amounts_text(total)} in all."
        yield CheckRow("nodes", OK, message)
    for name, label in labels.items():
        if count := len(labelled({label.key: label.value}, nodes)):
            yield CheckRow(name, OK, f"{count} of {len(nodes)} node(s) have it.")
        else:
            step = "Start a node with it: ray start --labels=…"
            yield CheckRow(name, BROKEN, "No node has it.", step)
    for name, resource in totals.items():
        least = preflight.min_resources[resource]
        has, wanted = amount_text(resource, total[resource]), amount_text(resource, least)
        message = f"The cluster has {has} in all; wanted are {wanted}."
        if fits({resource: least}, total):
            yield CheckRow(name, OK, message)
        else:
            step = "Add nodes, or lower preflight.min_resources."
            yield CheckRow(name, BROKEN, message, step)
    for name, ask in asks.items():
        pool = file.pools.get(name.removeprefix("pool "))
        if pool and pool.address and pool.address != file.cluster.address:
            message = f"Its nodes belong to {pool.address}, which was not looked at."
            yield CheckRow(name, UNKNOWN, message, f"nemo-run-ray doctor --address {pool.address}")
        else:
            yield _room(name, ask, nodes)


def _room(name: str, ask: ResourceRequest, nodes: Sequence[Node]) -> CheckRow:
    """Whether one replica can ever be placed, and whether it can now."""
    asks = f"One replica asks for {ask}"
    if never := why_not(ask, nodes):
        return CheckRow(
            name,
            BROKEN,
            f"{asks}; no node can ever take it: {never}.",
            "Ask for what nodes of this cluster have, or add such a node. Where nodes are started "
            "on demand, launch with preflight=False.",
        )
    can = hosts(ask, nodes)
    now = sum(not scarce(ask, node) for node in can)
    message = f"{asks}; {len(can)} node(s) can take it, {now} of them now."
    if now:
        return CheckRow(name, OK, message)
    if any(node.free is None for node in nodes):
        return CheckRow(name, UNKNOWN, f"{message} What is free is not told.", _OPEN_IT)
    step = "It will wait; `nemo-run-ray status` says who holds the room."
    return CheckRow(name, WARNING, message, step)


def pool_asks(document: Document) -> dict[str, ResourceRequest]:
    """The request of one replica in each pool."""
    asks = {}
    for name in document.file.pools:
        executor = RayExecutor(**values_of(RayExecutor(pool=name), document))
        asks[f"pool {name}"] = ResourceRequest(amounts_of(executor), executor.label_selector)
    return asks


# ---------------------------------------------------------------------- a first file


_HEAD = """\
# Where and how to run tasks on Ray; docs/reference/cluster_file.md describes every key.
# Use it by its name: RayExecutor(cluster={name}), and a pool of it by pool="…".
cluster:
{cluster}
  # token_variable: MY_RAY_TOKEN      # variable of your environment with Ray's token
  # headers: {{X-Proxy-Token: "${{PROXY_TOKEN}}"}}
  # verify: ca.pem                    # a CA, beside this file

# Fields of RayExecutor for every task; what the code gives wins.
defaults:
  # packager: git                     # sends what git has of the current folder
  retries: 0

# Variables of every task. What looks like a credential travels as a secret.
env:
  # set: {{NCCL_DEBUG: WARN}}
  forward: ["WANDB_*", HF_TOKEN]

# Container images by a name, and the labels of the nodes that run them.
# images: {{vllm: "vllm/vllm-openai:v0.8.5"}}
# image_labels: {{vllm: {{image: vllm}}}}

# Nodes of one kind: their labels, and what one replica of a task reserves there.
{pools}
# preflight: {{enabled: true}}          # look before every experiment whether it fits
"""
_LOCAL = "  local: {}                         # the embedded Ray; or address: http://ray-head:8265"
_NO_POOLS = """\
# pools:
#   gpu: {label_selector: {pool: gpu}, gpus_per_node: 8}
"""


def sample(name: str, address: str | None, nodes: Sequence[Node]) -> str:
    """The text of a file.

    Args:
        name: of the file, without its suffix.
        address: of a dashboard; ``None`` is the embedded Ray.
        nodes: those that live there.
    """
    cluster = _LOCAL if address is None else f"  address: {json.dumps(address)}"
    by_labels: dict[tuple[tuple[str, str], ...], list[Node]] = {}
    for node in nodes:  # a pool for every set of labels that their owner gave
        own = [label for label in node.labels.items() if not label[0].startswith("ray.io/")]
        if own:
            by_labels.setdefault(tuple(sorted(own)), []).append(node)
    pools: dict[str, str] = {}
    for labels, members in sorted(by_labels.items()):
        texts = "-".join(text for _, text in labels)
        pool = re.sub(r"[^A-Za-z0-9_.-]+", "-", texts).strip("-") or "pool"
        while pool in pools:
            pool += "-2"
        most = Counter[str]()
        for node in members:
            most |= Counter(node.resources)
        pools[pool] = (
            f"  # {len(members)} node(s), each with up to {amounts_text(most)}\n"
            f"  {json.dumps(pool)}:\n    label_selector: {json.dumps(dict(labels))}\n"
        )
    text = "".join(["pools:\n", *pools.values()]) if pools else _NO_POOLS
    return _HEAD.format(name=json.dumps(name), cluster=cluster, pools=text)
