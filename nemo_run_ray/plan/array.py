"""Many runs of one task as one job: ``nemo_run_ray.array`` and the plan of it.

An array is a ``run.Script`` for NeMo-Run. Its text is the file of the elements: a header that says
what the task is and what each value of an element changes, and one line for every element.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import fiddle as fdl
import nemo_run as run
from fiddle import daglish
from fiddle.experimental import serialization
from nemo_run.config import SCRIPTS_DIR, get_type_namespace
from torchx.specs import Role

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor, check_guard
from nemo_run_ray.fields import is_whole
from nemo_run_ray.plan.array_elements import Over, lines_of, rows_of
from nemo_run_ray.plan.commands import has_torchrun
from nemo_run_ray.plan.roles import array_role
from nemo_run_ray.remote.array.elements import ENV, FIELD, WORD, WORDS
from nemo_run_ray.remote.node.command import modules_in
from nemo_run_ray.remote.spec import ArraySpec

#: In the place of a program: what runs the file is the job's driver.
ENTRYPOINT = "nemo_run_ray.array"
#: Bytes of all elements.
ARRAY_MAX_BYTES = 64 * 1024**2


@dataclass
class Array(run.Script):
    """Many elements of one task; ``nemo_run_ray.array`` makes it."""

    def get_name(self) -> str:
        return str(_header(self.inline)["name"])

    def to_command(
        self, with_entrypoint: bool = False, filename: str | None = None, **options: Any
    ) -> list[str]:
        """NeMo-Run's, for a RayExecutor.

        Raises:
            ConfigError: it is for the caller's own process, or for Slurm.
        """
        # NeMo-Run says no more of the executor; the last one is for Slurm without containers.
        is_elsewhere = options.get("is_local") or options.get("substitute_rundir_path")
        if filename is None or is_elsewhere:
            raise ConfigError(
                "An array is one job of a Ray, and there is no Ray in its place. Give it to "
                "run.run(..., executor=RayExecutor(...)); RayExecutor() alone starts a Ray here."
            )
        words: list[str] = super().to_command(with_entrypoint, filename, **options)
        return words


def array(
    task: run.Partial[Any] | run.Script,
    over: Over,
    *,
    combine: Literal["product", "zip"] = "product",
    isolation: Literal["auto", "fork", "process", "none"] = "auto",
    max_failures: int | None = None,
) -> Array:
    """Many runs of one task, its elements, as one job: ``run.run(array(…), executor=…)``.

    Args:
        task: what each element runs.
        over: what differs. A mapping gives the values of each field, and ``combine`` says how they
            go together; a list has a mapping for every element, and so has each line of a JSONL
            file, whose path may be given. A field is a path into a ``run.Partial``, such as
            ``optim.lr``; of a ``run.Script`` it is ``env.NAME``, ``args`` or ``args.N``. Values
            are plain: texts, numbers, ``None``, lists and mappings of them.
        combine: ``product`` is every combination, the last field changing fastest; ``zip`` takes
            the fields' first values together, then their second ones.
        isolation: of a ``run.Partial``: ``fork`` imports everything once on each node and forks a
            process for each element; ``process`` starts one that imports it; ``none`` starts one
            for each element that runs at a time, which runs the next ones too, so that they find
            what was loaded; ``auto`` forks unless the imports have started threads or have used
            CUDA, which a fork does not have.
        max_failures: the array ends early when more elements than this have failed.

    Raises:
        ConfigError: an argument is wrong, a field is not there, or a value cannot be sent.
    """
    _check_arguments(task, isolation, max_failures)
    fields, rows = rows_of(over, combine)
    if isinstance(task, run.Script):
        header, env = _of_script(task, fields), dict(task.env)
    else:
        header, env = {**_of_partial(task, fields), "runs": isolation}, {}
    header.update(name=_name(task), fields=fields, max_failures=max_failures)
    text = _text_of(header, lines_of(fields, rows, isinstance(task, run.Script)))
    return Array(inline=text, env=env, entrypoint=ENTRYPOINT)


def _check_arguments(task: object, isolation: object, max_failures: object) -> None:
    if not isinstance(task, (run.Partial, run.Script)) or isinstance(task, Array):
        raise ConfigError(
            f"The task of an array is a {type(task).__name__}; expected is a run.Partial or a "
            "run.Script."
        )
    if isolation not in ("auto", "fork", "process", "none"):
        raise ConfigError(
            f"isolation is {isolation!r}; expected is 'auto', 'fork', 'process' or 'none'."
        )
    if max_failures is not None and not is_whole(max_failures, 0):
        raise ConfigError(f"max_failures is {max_failures!r}; expected is a whole number from 0.")


def _text_of(header: Mapping[str, Any], elements: Iterable[str]) -> str:
    lines = [json.dumps(header)]
    size_bytes = len(lines[0]) + 1
    for line in elements:
        size_bytes += len(line) + 1
        if size_bytes > ARRAY_MAX_BYTES:
            raise ConfigError(
                f"The first {len(lines)} elements of the array have more than the "
                f"{ARRAY_MAX_BYTES / 1024**2:.0f} MiB that are sent at most. Let the values be "
                "names or numbers of what the nodes can read."
            )
        lines.append(line)
    if len(lines) == 1:
        raise ConfigError("The array has no elements: `over` gives no values.")
    return "\n".join(lines) + "\n"


def is_array(roles: Sequence[Role]) -> bool:
    """Whether the roles of a job are what NeMo-Run makes of an ``Array``.

    Raises:
        ConfigError: one of several is.
    """
    found = any(role.entrypoint == ENTRYPOINT for role in roles)
    if found and len(roles) > 1:
        raise ConfigError(
            "An array is a job of its own and cannot be a task of a group. Add it to the "
            "experiment by itself: experiment.add(array(...), executor=...)."
        )
    return found


def array_spec(role: Role, executor: RayExecutor) -> ArraySpec:
    """What the driver of an array is told.

    Raises:
        ConfigError: the executor asks for what an array has not.
    """
    check_elements(executor)
    name = os.path.basename(role.args[0])
    with open(os.path.join(executor.job_dir, SCRIPTS_DIR, name), encoding="utf-8") as file:
        header = json.loads(next(line for line in file if line.startswith("{")))
    modules: set[str] = set()
    with contextlib.suppress(ValueError):  # an element says what is wrong with its template
        modules = modules_in(header.get("template", "null"))
    if "__main__" in modules:
        check_guard()
    words = ["python"] if "template" in header else _words(header["script"], executor, name)
    host = array_role(dataclasses.replace(role, entrypoint=words[0], args=words[1:]), executor)
    return ArraySpec(
        host=host,
        elements=f"{SCRIPTS_DIR}/{name}",
        targets=tuple(_target(field, words, header) for field in header["fields"]),
        runs=header["runs"],
        max_failures=header["max_failures"],
        **element_settings(executor),
    )


def element_settings(executor: RayExecutor) -> dict[str, Any]:
    """The values of an ``ArraySpec`` that fields of the executor give as they are."""
    return {
        "max_in_flight": executor.max_in_flight,
        "retries": executor.retries,
        "permanent_exit_codes": tuple(executor.permanent_exit_codes),
        "python": executor.python or executor.resolve_cluster().python,
    }


def check_elements(executor: RayExecutor) -> None:
    """Check that the executor asks for nothing that an array has not.

    Raises:
        ConfigError: the first field that does.
    """
    for field, neutral in (
        ("nodes", 1),
        ("ntasks_per_node", 1),
        ("service", False),
        ("ready", None),
        ("strategy", "PACK"),
    ):
        if getattr(executor, field) != neutral:
            raise ConfigError(
                f"RayExecutor.{field} is {getattr(executor, field)!r}, and each element of an "
                "array is one process. Leave it out, or run the task as a job of its own."
            )
    for field in ("ports", "pending_timeout_s", "time_s"):
        if getattr(executor, field):
            raise ConfigError(f"RayExecutor.{field} is set, and an array has none. Leave it out.")
    if has_torchrun(executor):
        raise ConfigError("RayExecutor.launcher is torchrun, and an array's elements have none.")
    if executor.retries > 200:
        raise ConfigError(f"RayExecutor.retries is {executor.retries}; an element has 200 at most.")


def _words(script: Mapping[str, Any], executor: RayExecutor, name: str) -> list[str]:
    """The command of an element; what is written inline becomes a file beside the elements."""
    filename = os.path.join(executor.job_dir, SCRIPTS_DIR, f"element-{name}")
    words: list[str] = run.Script(**script).to_command(with_entrypoint=True, filename=filename)
    return words


def _target(field: str, words: Sequence[str], header: Mapping[str, Any]) -> tuple[Any, ...]:
    if "template" in header:
        return (FIELD, field)
    kind, _, name = field.partition(".")
    if kind == "env":
        return (ENV, name)
    first = len(words) - len(header["script"]["args"])
    return (WORD, "", first + int(name)) if name else (WORDS, "", first)


def _name(task: run.Partial[Any] | run.Script) -> str:
    if isinstance(task, run.Script):
        return str(task.get_name())
    return str(get_type_namespace(task.__fn_or_cls__))


def _header(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.partition("\n")[0])
    return found


# ---------------------------------------------------------------------- the task


def _of_script(task: run.Script, fields: Sequence[str]) -> dict[str, Any]:
    for field in fields:
        kind, _, name = field.partition(".")
        is_arg = kind == "args" and not task.inline
        is_known = (kind == "env" and name) or (is_arg and not name)
        if is_arg and name.isdecimal() and int(name) < len(task.args):
            is_known = True
        if not is_known:
            own = "env.NAME" if task.inline else "env.NAME or args"
            if task.args and not task.inline:
                own = f"env.NAME, args or args.0 to {len(task.args) - 1}"
            raise ConfigError(
                f"The run.Script has no field {field!r} that an array can change; expected is "
                f"{own}."
            )
    if "args" in fields and any(field.startswith("args.") for field in fields):
        raise ConfigError(
            "over has 'args' and one of 'args.0' …: the first are all words. Leave one of them out."
        )
    kept = ("path", "inline", "args", "entrypoint", "m")
    return {"script": {name: getattr(task, name) for name in kept}, "runs": "command"}


def _of_partial(task: run.Partial[Any], fields: Sequence[str]) -> dict[str, Any]:
    for field in fields:
        _must_have(task, field)
    try:
        return {"template": serialization.dump_json(_in_fiddles_classes(task))}
    except Exception as error:  # Fiddle raises many kinds
        raise ConfigError(
            f"The run.Partial of {_name(task)} cannot be sent: {error}. NeMo-Run sends functions "
            "and classes by their names, so that a lambda, or a function inside of another, cannot "
            "be one. Define it at the top of a module."
        ) from error


def _in_fiddles_classes(task: run.Partial[Any]) -> fdl.Buildable[Any]:
    """The same configuration, to be read without NeMo-Run, whose classes add what is for people."""
    classes = {run.Config: fdl.Config, run.Partial: fdl.Partial}

    def convert(value: Any, state: daglish.State) -> Any:
        to = classes.get(type(value))
        if to is not None:
            value = to.__unflatten__(*value.__flatten__())
        return state.map_children(value) if state.is_traversable(value) else value

    return daglish.MemoizedTraversal.run(convert, task)


def _must_have(task: run.Partial[Any], field: str) -> None:
    """Check that a path leads to a field of the configuration."""
    target: Any = task
    *parents, last = field.split(".")
    for at, name in enumerate([*parents, last]):
        known: list[str]
        if isinstance(target, fdl.Buildable):
            known = list(target.__signature_info__.parameters)
            is_there = name in known or target.__signature_info__.has_var_keyword
        elif isinstance(target, list):
            known, is_there = (
                [f"0 to {len(target) - 1}"],
                name.isdecimal() and int(name) < len(target),
            )
        else:
            known, is_there = [], False
        if not is_there:
            where = ".".join(field.split(".")[:at]) or _name(task)
            has = f"it has {', '.join(known)}" if known else f"it is a {type(target).__name__}"
            raise ConfigError(f"There is no field {field!r}: {where} has no {name!r}; {has}.")
        if at < len(parents):
            target = target[int(name)] if isinstance(target, list) else getattr(target, name, None)
