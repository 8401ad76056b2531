"""The text of a first cluster file, with what a cluster tells of its nodes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from nemo_run_ray.remote.fit import Node, amounts_text

_HEAD = """\
# Where and how to run tasks on Ray. docs/clusters.md of nemo_run_ray describes every key.
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
_ADDRESS = "  address: {address}"
_LOCAL = "  local: {}                         # the embedded Ray; or address: http://ray-head:8265"
_NO_POOLS = """\
# pools:
#   gpu: {label_selector: {pool: gpu}, gpus_per_node: 8}
"""
#: Labels that Ray itself gives every node.
_OF_RAY = "ray.io/"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


def sample(name: str, address: str | None, nodes: Sequence[Node]) -> str:
    """The text of a file.

    Args:
        name: of the file, without its suffix.
        address: of a dashboard; ``None`` is the embedded Ray.
        nodes: those that live there.
    """
    cluster = _LOCAL if address is None else _ADDRESS.format(address=json.dumps(address))
    pools = list(_pools(nodes))
    text = "pools:\n" + "\n".join(pools) + "\n" if pools else _nodes(nodes) + _NO_POOLS
    return _HEAD.format(name=json.dumps(name), cluster=cluster, pools=text)


def _pools(nodes: Sequence[Node]) -> Iterator[str]:
    """A pool for the nodes of every set of labels that their owner gave."""
    by_labels: dict[tuple[tuple[str, str], ...], list[Node]] = {}
    for node in nodes:
        own = {key: text for key, text in node.labels.items() if not key.startswith(_OF_RAY)}
        if own:
            by_labels.setdefault(tuple(sorted(own.items())), []).append(node)
    names: set[str] = set()
    for labels, members in sorted(by_labels.items()):
        name = _new_name(labels, names)
        yield f"  # {len(members)} node(s), each with up to {_totals(members)}"
        yield f"  {json.dumps(name)}:"
        yield f"    label_selector: {json.dumps(dict(labels))}"


def _new_name(labels: Sequence[tuple[str, str]], names: set[str]) -> str:
    """A name that none of ``names`` has, where it goes then."""
    words = [text for _, text in labels], [part for label in labels for part in label]
    several = [_NOT_IN_NAMES.sub("-", "-".join(them)).strip("-") or "pool" for them in words]
    numbered = (f"{several[-1]}-{number}" for number in itertools.count(2))
    name = next(word for word in itertools.chain(several, numbered) if word not in names)
    names.add(name)
    return name


def _nodes(nodes: Sequence[Node]) -> str:
    if not nodes:
        return ""
    return f"# {len(nodes)} node(s) without labels, each with up to {_totals(nodes)}.\n"


def _totals(nodes: Sequence[Node]) -> str:
    most: dict[str, float] = {}
    for node in nodes:
        for name, amount in _plain(node.resources).items():
            most[name] = max(amount, most.get(name, 0))
    return amounts_text(most)


def _plain(total: Mapping[str, float]) -> dict[str, float]:
    """The resources without those that Ray adds itself: one for the node, and its object store."""
    return {
        name: amount
        for name, amount in total.items()
        if not name.startswith("node:") and name != "object_store_memory"
    }
