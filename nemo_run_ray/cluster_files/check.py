"""Whether a cluster fits what is to run on it, known before anything is sent; a first cluster file.

``look`` asks the cluster and ``check`` says what the answers mean. Looking changes nothing. What
the cluster does not tell is "unknown", never "ok".
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from nemo_run_ray.cluster_files.resolve import labels_of
from nemo_run_ray.cluster_files.schema import ClusterFile, PoolPart
from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.state import Inspection, inspect
from nemo_run_ray.fields import parse_memory, version_of
from nemo_run_ray.plan.roles import SELECTORS_SINCE
from nemo_run_ray.remote.fit import (
    Node,
    ResourceRequest,
    amount_text,
    amounts_text,
    best,
    fits,
    free_text,
    has_room,
    hosts,
    labelled,
    why_not,
)

_CLOSED = "The cluster does not tell: its state API is closed or did not answer in time."
_NOT_TOLD = "It is not known: see the line about nodes."
_FIT = (
    "Ask for what nodes of this cluster have, or add such a node. Where nodes are started on "
    "demand, launch with preflight=False."
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


@dataclass(frozen=True)
class CheckRow:
    """One check: its name, its result, the result in a sentence, and the next step, if any."""

    check: str
    state: CheckState
    message: str
    next_step: str = ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "state": self.state.value}


def look(
    dashboard: Dashboard,
    file: ClusterFile | None = None,
    asks: Mapping[str, ResourceRequest] | None = None,
) -> list[CheckRow]:
    """Look at a cluster, within 10 s, and say of each thing whether it fits.

    Args:
        dashboard: of the cluster.
        file: its cluster file, if it has one.
        asks: before a start, what one replica of each task asks for, by a name for people.
    """
    return check(inspect(dashboard), file, asks)


def check(
    look: Inspection,
    file: ClusterFile | None = None,
    asks: Mapping[str, ResourceRequest] | None = None,
) -> list[CheckRow]:
    """The rows about one look; a pure function. See ``look``."""
    return list(_rows(look, file or ClusterFile(), asks))


def _ok(what: str, message: str) -> CheckRow:
    return CheckRow(what, CheckState.OK, message)


def _unknown(what: str, message: str, step: str = "") -> CheckRow:
    return CheckRow(what, CheckState.UNKNOWN, message, step)


def _broken(what: str, message: str, step: str = "") -> CheckRow:
    return CheckRow(what, CheckState.BROKEN, message, step)


def _warning(what: str, message: str, step: str) -> CheckRow:
    return CheckRow(what, CheckState.WARNING, message, step)


def _rows(
    look: Inspection, file: ClusterFile, of_tasks: Mapping[str, ResourceRequest] | None
) -> Iterator[CheckRow]:
    preflight = file.preflight
    if preflight.require_address and file.cluster.address is None:
        message = "The cluster file names no address, and preflight.require_address is set."
        yield _broken("address", message, "Give cluster.address in the file.")
    elif preflight.require_address:
        yield _ok("address", f"The cluster file names {file.cluster.address}.")
    if look.unreachable:
        yield _broken("dashboard", look.unreachable)
        return
    yield _ok("dashboard", f"{look.url} answers.")
    if look.unauthorised:
        yield _broken("credentials", look.unauthorised)
        return
    if look.jobs is None:
        message = "The job table did not answer in time, which would show that it takes them."
        yield _unknown("credentials", message, "Try again later; the table may be long.")
    else:
        known = "it knows {} job(s), {} of them pending or running".format(*look.jobs)
        yield _ok("credentials", f"It takes them, and {known}.")
    only_required = preflight.only_required and of_tasks is not None  # `doctor` looks at all
    asks = {**pool_asks(file), **(of_tasks or {})}
    if not only_required:
        yield _ray(look.version, any(ask.selector for ask in asks.values()))
        yield _python(look.python)
    required = preflight.required_labels or preflight.min_resources
    if required or not only_required:
        yield from _nodes(look, file)
    if only_required:
        return
    for name, ask in asks.items():
        pool = file.pools.get(name)
        what = f"pool {name}" if pool else name
        if pool and pool.address and pool.address != file.cluster.address:
            message = f"Its nodes belong to {pool.address}, which was not looked at."
            yield _unknown(what, message, f"nemo-run-ray doctor --address {pool.address}")
        elif look.nodes is None:
            yield _not_told(what, preflight.strict)
        else:
            yield _room(what, ask, look.nodes)


def _ray(version: str, has_selectors: bool) -> CheckRow:
    since = ".".join(str(part) for part in SELECTORS_SINCE)
    if not version:
        return _unknown("Ray", "The cluster does not tell its version of Ray.")
    runs = f"The cluster runs Ray {version}"
    if version_of(version) >= SELECTORS_SINCE:
        return _ok("Ray", f"{runs}.")
    if has_selectors:
        return _broken(
            "Ray",
            f"{runs}; the label selectors in use need {since} or newer.",
            "Upgrade it, or reserve a custom resource of the nodes (resources_per_node).",
        )
    return _warning(
        "Ray",
        f"{runs}; label selectors need {since} or newer.",
        "Upgrade it before tasks choose their nodes by labels.",
    )


def _python(there: str) -> CheckRow:
    """Python on the head against the client's, by which Partials are made."""
    if not there:
        return _unknown("Python", "The cluster does not tell its version of Python.")
    head, here = ".".join(there.split(".")[:2]), "{}.{}".format(*sys.version_info)
    if head == here:
        return _ok("Python", f"The head and this client have Python {head}.")
    return _warning(
        "Python",
        f"The head has Python {head}, this client {here}; a run.Partial is made by one and run by "
        "the other.",
        "Use the same minor version on both sides, or name one: RayExecutor(python=…).",
    )


def _not_told(what: str, is_strict: bool) -> CheckRow:
    state = CheckState.BROKEN if is_strict else CheckState.UNKNOWN
    message, step = (_CLOSED, _OPEN_IT) if what == "nodes" else (_NOT_TOLD, "")
    return CheckRow(what, state, message, step)


def _nodes(look: Inspection, file: ClusterFile) -> Iterator[CheckRow]:
    """The living nodes, and the labels and amounts that the file requires."""
    preflight, nodes = file.preflight, look.nodes
    total: dict[str, float] = {}
    for node in nodes or ():
        for name, amount in node.resources.items():
            total[name] = total.get(name, 0.0) + amount
    if nodes is None:
        yield _not_told("nodes", preflight.strict)
    elif not nodes:
        yield _broken("nodes", "No node lives.", "Look at the cluster's nodes in its dashboard.")
    else:
        yield _ok("nodes", f"{len(nodes)} node(s) live, with {amounts_text(total)} in all.")
    for label in preflight.required_labels:
        what = f"label {label.key}={label.value}"
        if nodes is None:
            yield _not_told(what, preflight.strict)
        elif count := len(labelled({label.key: label.value}, nodes)):
            yield _ok(what, f"{count} of {len(nodes)} node(s) have it.")
        else:
            never = why_not(ResourceRequest(selector={label.key: label.value}), nodes)
            step = f"Start a node with it: ray start --labels={label.key}={label.value} …"
            is_plain = re.fullmatch(r"[\w.-]+", label.value)
            yield _broken(what, f"{never[0].upper()}{never[1:]}.", step if is_plain else "")
    for name, least in sorted(preflight.min_resources.items()):
        what = f"total {name}"
        if nodes is None:
            yield _not_told(what, preflight.strict)
            continue
        has = sum(node.resources.get(name, 0.0) for node in nodes)
        message = (
            f"The cluster has {amount_text(name, has)} in all; wanted are "
            f"{amount_text(name, least)}."
        )
        if fits({name: least}, {name: has}):
            yield _ok(what, message)
        else:
            yield _broken(what, message, "Add nodes, or lower preflight.min_resources.")


def _room(what: str, ask: ResourceRequest, nodes: Sequence[Node]) -> CheckRow:
    """Whether one replica can ever be placed, and whether it can now."""
    asks = f"One replica asks for {ask}"
    never = why_not(ask, nodes)
    if never:
        return _broken(what, f"{asks}; no node can ever take it: {never}.", _FIT)
    can = hosts(ask, nodes)
    now = [node for node in can if has_room(ask, node)]
    node = best(ask, nodes)
    if now or node is None:
        return _ok(what, f"{asks}; {len(can)} node(s) can take it, {len(now)} of them now.")
    if any(one.free is None for one in nodes):
        message = f"{asks}; {len(can)} node(s) can take it, and what is free is not told."
        return _unknown(what, message, _OPEN_IT)
    return _warning(
        what,
        f"{asks}; {len(can)} node(s) can take it, and none has room now: the best, {node.host}, "
        f"has {free_text(ask, node)}.",
        "It will wait; `nemo-run-ray status` says who holds the room.",
    )


def pool_asks(file: ClusterFile) -> dict[str, ResourceRequest]:
    """What one replica asks for in each pool, as ``resolve.py`` gives it to an executor.

    The pool's fields lie over the file's defaults, and those over the labels of its image.
    """
    return {name: _pool_ask(pool, file) for name, pool in file.pools.items()}


def _pool_ask(pool: PoolPart, file: ClusterFile) -> ResourceRequest:
    defaults = file.defaults

    def value(name: str) -> Any:
        own = getattr(pool, name)
        return defaults.get(name) if own is None else own

    memory = value("memory_per_node")
    resources = {
        "CPU": float(value("cpus_per_node") or 0),
        "GPU": float(value("gpus_per_node") or 0),
        "memory": float(0 if memory is None else parse_memory(memory)),
        **(defaults.get("resources_per_node") or {}),
        **pool.resources_per_node,
    }
    image = value("image")
    by_label = image is not None and file.images_as == "label"
    selector = {
        **(labels_of(str(image), file) if by_label else {}),
        **(defaults.get("label_selector") or {}),
        **pool.label_selector,
    }
    return ResourceRequest({name: amount for name, amount in resources.items() if amount}, selector)


# ---------------------------------------------------------------------- a first file


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
    text = "pools:\n" + "\n".join(pools) + "\n" if pools else _unlabelled(nodes) + _NO_POOLS
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


def _unlabelled(nodes: Sequence[Node]) -> str:
    if not nodes:
        return ""
    return f"# {len(nodes)} node(s) without labels, each with up to {_totals(nodes)}.\n"


def _totals(nodes: Sequence[Node]) -> str:
    most: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.resources.items():
            most[name] = max(amount, most.get(name, 0))
    return amounts_text(most)
