"""Fills the reference pages from the code when the site is built.

A line ``<!-- generated: NAME ARGUMENT … -->`` of a page becomes the table that the function of that
name returns, and ``{{module:NAME}}`` the value of that constant. No page can differ from the code.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import typer
from pydantic import BaseModel

_VALUE = re.compile(r"\{\{([\w.]+):(\w+)( bytes)?\}\}")
_GENERATED = re.compile(r"<!-- generated: (\w+) ?([\w.: ]*) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    markdown = _VALUE.sub(lambda match: value(*match.groups()), markdown)
    return _GENERATED.sub(lambda match: globals()[match[1]](*match[2].split()), markdown)


def value(module: str, name: str, unit: str) -> str:
    """A constant of the package as text."""
    number = getattr(importlib.import_module(f"nemo_run_ray.{module}"), name)
    if unit:
        return _size(number)
    return f"{number:,g}" if isinstance(number, float) else f"{number:,}"


def fields(path: str) -> str:
    """The fields of a dataclass: type, default, and the comment above each."""
    module, _, name = path.partition(":")
    loaded = importlib.import_module(module)
    lines = inspect.getsource(loaded).splitlines()
    (body,) = (
        node for node in ast.parse("\n".join(lines)).body if getattr(node, "name", "") == name
    )
    rows = []
    for node in body.body:
        is_field = isinstance(node, ast.AnnAssign) and not node.target.id.startswith("_")
        if is_field and not ast.unparse(node.annotation).startswith("ClassVar"):
            comment = _comment_above(lines, node.lineno - 2)
            if comment:
                rows.append(
                    (f"`{node.target.id}`", _type(node.annotation), _default(node), comment)
                )
    return _table(("field", "type", "default", "meaning"), rows)


def _comment_above(lines: list[str], index: int) -> str:
    texts: list[str] = []
    while lines[index].strip().startswith("#:"):
        texts.insert(0, lines[index].strip()[2:].strip())
        index -= 1
    return " ".join(texts).replace("``", "`")


def _type(node: ast.expr) -> str:
    text = ast.unparse(node).replace(" | None", "")
    text = re.sub(r"Optional\[(.*)\]$", r"\1", text)
    text = re.sub(r"Union\[(.*)\]$", lambda match: match[1].replace(", ", " or "), text)
    return f"`{text.replace(' | ', ' or ')}`"


def _default(node: ast.AnnAssign) -> str:
    if node.value is None:
        return "required"
    text = ast.unparse(node.value)
    made = {"list": "[]", "dict": "{}"}
    factory = re.match(r"field\(default_factory=(\w+)", text)
    if factory:
        return f"`{made.get(factory[1], factory[1])}`"
    shown = re.match(r"field\(default=(\w+)", text)
    if "**" in text:
        return _size(eval(text, {}))
    return f"`{shown[1] if shown else text}`"


def _size(number: int) -> str:
    big = next(power for power in (3, 2, 1) if number % 1024**power == 0)
    return f"{number // 1024**big} {('', 'KiB', 'MiB', 'GiB')[big]}"


def keys() -> str:
    """Every key of a cluster file."""
    from nemo_run_ray.cluster_files.schema import ClusterFile

    return _table(("key", "meaning"), list(_keys(ClusterFile, "")))


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield f"`{prefix}{name}`", str(field.description)
        for inner, mark in _models(field.annotation):
            yield from _keys(inner, f"{prefix}{name}{mark}.")


def _models(annotation: Any, mark: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, mark
    marks = {dict: ".NAME", list: "[]"}
    for argument in get_args(annotation):
        yield from _models(argument, marks.get(get_origin(annotation), mark))


def commands() -> str:
    """Every verb of the command line with its options."""
    from nemo_run_ray.cli.main import build

    group = typer.main.get_command(build())
    parts = []
    for name, command in group.commands.items():
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        usage = " ".join(
            [
                f"nemo-run-ray {name}",
                *(a.name.upper() if a.required else f"[{a.name.upper()}]" for a in arguments),
            ]
        )
        parts.append(f"## {name}\n\n`{usage}`\n\n{_escape(command.help)}\n")
        options = [
            (", ".join(f"`{opt}`" for opt in param.opts), param.help or "")
            for param in command.params
            if param.param_type_name == "option" and param.name != "help"
        ]
        if options:
            parts.append(_table(("option", "meaning"), options) + "\n")
    return "\n".join(parts)


def states() -> str:
    """The states of a job."""
    from nemo_run_ray.remote import status

    return _table(("state", "meaning"), _members(status, "JobState"))


#: The meaning of each reason; the build fails when one is missing.
_MEANINGS = {
    "EXIT_CODE": "The command ended with another exit code than 0.",
    "SIGNAL": "A signal ended the command, such as SIGKILL when memory was full.",
    "RUNTIME_ENV": "pip, uv, conda or podman failed on the node.",
    "START_TIMEOUT": "Ray gave up the start: there was no room, or the node was too slow.",
    "NOT_PLACED": "There was no room within `pending_timeout_s`.",
    "UNSCHEDULABLE": "No living node has the resources and labels, even when it is idle.",
    "NODE_DIED": "Ray lost the node, or its process there that supervises the job.",
    "ALLOCATION": "The Slurm job in which Ray ran is over.",
    "NOT_STARTED": "The node could not start the command; the message says why.",
    "NO_PROGRAM": "The command cannot start, since its node lacks a program, which the message "
    "names. If a shell in the task does not find one, the reason is exit code (127).",
    "NO_MODULE": "The command cannot start, since Python on its node lacks a module, which the "
    "message names. If an import in the running program fails, the reason is exit code (1).",
    "REFUSED": "Ray, or a proxy before it, refuses the request.",
    "UNRECORDED": "The command ended while Ray's head was away, and its end record is lost.",
    "NOT_READY": "The probe of a service did not succeed within its `timeout_s`.",
    "SERVICE_ENDED": "A service of the group ended while primaries still needed it.",
    "CANCELLED": "A user, or a program, stopped it.",
    "UPSTREAM": "A job that it depends on failed or was cancelled, so it never starts.",
    "WAITS": "Jobs that it depends on have not ended.",
    "TURN": "The dispatcher submits it next, or when `max_in_flight` allows it.",
    "RETRY": "An attempt failed, and the next one starts soon.",
    "UNDISPATCHED": "The Ray job that submits the jobs of the chain has ended too early.",
    "ROOM": "Nodes could take it, and are busy.",
    "BUILDING": "Ray prepares the packages or the image on a node.",
    "NOT_SUBMITTED": "The program ended, or was refused, before it had submitted the job.",
    "TAKEN": "Another run has submitted a job with the same id.",
    "CLUSTER_GONE": "The Ray that had the job was stopped or died, without a record of its end.",
    "UNREACHABLE": "The dashboard does not answer, or refuses the credentials.",
    "OTHER": "Ray reports an error that this package does not know.",
}


def reasons() -> str:
    """The reasons of a state, what they mean, and what to do."""
    from nemo_run_ray.remote.status import Reason

    names = {"job": "NAME", "experiment": "NAME"}
    rows = [
        (
            reason.value,
            _MEANINGS[reason.name],
            reason.next_step.format(**names) or "Nothing: it waits.",
        )
        for reason in Reason
        if reason.value
    ]
    return _table(("reason", "meaning", "next step"), rows)


def patches() -> str:
    """The patches of NeMo-Run and why they exist."""
    from nemo_run_ray.patches import MODULES

    rows = [
        (f"`{name}`", importlib.import_module(path).PATCH.why) for name, path in MODULES.items()
    ]
    return _table(("patch", "what it changes"), rows)


def _members(module: Any, name: str) -> list[tuple[str, str]]:
    lines = inspect.getsource(module).splitlines()
    (body,) = (
        node for node in ast.parse("\n".join(lines)).body if getattr(node, "name", "") == name
    )
    return [
        (node.targets[0].id, _comment_above(lines, node.lineno - 2))
        for node in body.body
        if isinstance(node, ast.Assign) and node.targets[0].id.isupper()
    ]


def _escape(text: str) -> str:
    """``<`` and ``>`` outside of code spans are no HTML."""
    return re.sub(
        r"(`+).*?\1|[<>]", lambda match: match[0] if match[1] else html.escape(match[0]), text
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        " | ".join(_escape(" ".join(cell.split())).replace("|", "\\|") for cell in row)
        for row in lines
    )
