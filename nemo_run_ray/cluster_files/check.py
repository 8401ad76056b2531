"""Whether a cluster fits what is to run on it, known before anything is sent; a first cluster file.

What the cluster does not tell is "unknown", never "ok".
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
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
    if not look.jobs:
        message = "The job table did not answer in time, which would show that it takes them."
        yield CheckRow("credentials", UNKNOWN, message, "Try again later; it may be long.")
    else:
        message = "The dashboard takes them. It has {} job(s), {} of them pending or running."
        yield CheckRow("credentials", OK, message.format(*look.jobs))
    if preflight.only_required and asks is not None:  # `doctor` looks at all
        asks = {}
        if not preflight.required_labels and not preflight.min_resources:
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
        here = "{}.{}".format(*sys.version_info)
        if not look.python:
            yield CheckRow("Python", UNKNOWN, "The cluster does not tell its version of Python.")
        elif version_of(look.python) == version_of(here):
            yield CheckRow("Python", OK, f"The head and this client have Python {here}.")
        else:
            yield CheckRow(
                "Python",
                WARNING,
                f"The head has Python {look.python}, this client {here}; a run.Partial is made by "
                "one and run by the other.",
                "Use the same minor version on both sides, or name one: RayExecutor(python=…).",
            )
    if nodes is None:
        yield CheckRow(
            "nodes",
            BROKEN if preflight.strict else UNKNOWN,
            "The cluster does not tell: its state API is closed or did not answer in time. So "
            "labels, totals and room are not known either.",
            _OPEN_IT,
        )
        return
    total = Counter[str]()
    for node in nodes:
        total.update(node.resources)
    if nodes:
        message = f"{len(nodes)} node(s) live, with {amounts_text(total)} in all."
        yield CheckRow("nodes", OK, message)
    else:
        yield CheckRow("nodes", BROKEN, "No node lives.", "Look at the cluster's dashboard.")
    for label in preflight.required_labels:
        name = f"label {label.key}={label.value}"
        count = len(labelled({label.key: label.value}, nodes))
        step = "" if count else "Start a node with it: ray start --labels=…"
        message = f"{count} of {len(nodes)} node(s) have it."
        yield CheckRow(name, OK if count else BROKEN, message, step)
    for resource, least in sorted(preflight.min_resources.items()):
        has, wanted = amount_text(resource, total[resource]), amount_text(resource, least)
        message = f"The cluster has {has} in all; wanted are {wanted}."
        is_enough = fits({resource: least}, total)
        step = "" if is_enough else "Add nodes, or lower preflight.min_resources."
        yield CheckRow(f"total {resource}", OK if is_enough else BROKEN, message, step)
    for name, ask in asks.items():
        pool = file.pools.get(name.removeprefix("pool "))
        able = hosts(ask, nodes)
        now = sum(not scarce(ask, node) for node in able)
        message = f"One replica asks for {ask}; {len(able)} node(s) can take it, {now} of them now."
        if pool and pool.address and pool.address != file.cluster.address:
            message = f"Its nodes belong to {pool.address}, which was not looked at."
            yield CheckRow(name, UNKNOWN, message, f"nemo-run-ray doctor --address {pool.address}")
        elif not able:
            yield CheckRow(
                name,
                BROKEN,
                f"One replica asks for {ask}; no node can ever take it: {why_not(ask, nodes)}.",
                "Ask for what nodes of this cluster have, or add such a node. Where nodes are "
                "started on demand, launch with preflight=False.",
            )
        elif now:
            yield CheckRow(name, OK, message)
        elif any(node.free is None for node in nodes):
            yield CheckRow(name, UNKNOWN, f"{message} What is free is not told.", _OPEN_IT)
        else:
            step = "It will wait; `nemo-run-ray status` says who holds the room."
            yield CheckRow(name, WARNING, message, step)


def pool_asks(document: Document) -> dict[str, ResourceRequest]:
    """The request of one replica in each pool."""
    asks = {}
    for name in document.file.pools:
        executor = RayExecutor(**values_of(RayExecutor(pool=name), document))
        asks[f"pool {name}"] = ResourceRequest(amounts_of(executor), executor.label_selector)
    return asks


# ---------------------------------------------------------------------- a first file


_HEAD = """\
# Where and how to run tasks on Ray. The page "Cluster file" of the documentation has every key.
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
    by_labels = defaultdict[str, list[Node]](list)
    for node in nodes:  # a pool for every set of labels that their owner gave
        labels = sorted(node.labels.items())
        if own := {key: text for key, text in labels if not key.startswith("ray.io/")}:
            by_labels[json.dumps(own)].append(node)
    pools = dict[str, str]()
    for selector, members in sorted(by_labels.items()):
        texts = "-".join(json.loads(selector).values())
        pool = re.sub(r"[^A-Za-z0-9_.-]+", "-", texts).strip("-") or "pool"
        while pool in pools:
            pool += "-2"
        pools[pool] = (
            f"  # {len(members)} node(s), one with {amounts_text(members[0].resources)}\n"
            f"  {json.dumps(pool)}:\n    label_selector: {selector}\n"
        )
    text = "".join(["pools:\n", *pools.values()]) if pools else _NO_POOLS
    return _HEAD.format(name=json.dumps(name), cluster=cluster, pools=text)
