"""``nemo_run_ray.array``: many runs of one task, or many tasks, as one job, and its plan.

For NeMo-Run an array is a ``run.Script``. Its text is the file of the elements: a header, and one
JSON object a line for each element (``remote/array/elements.py``).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import fiddle as fdl
import nemo_run as run
from fiddle import daglish
from fiddle.experimental import serialization
from nemo_run.config import SCRIPTS_DIR, get_type_namespace
from pydantic import NonNegativeInt
from torchx.specs import Role

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor, check_guard
from nemo_run_ray.fields import Allowed, refuse_credentials
from nemo_run_ray.plan.roles import (
    ARRAY,
    OF_MAIN,
    has_torchrun,
    one_process,
    refuse_fields,
    replace_macros,
    variable,
)
from nemo_run_ray.remote.array.fork_server import set_field
from nemo_run_ray.remote.spec import ArraySpec, Json

#: Limits of all elements' values together, and of one element's.
ARRAY_MAX_BYTES, ELEMENT_MAX_BYTES = 64 * 1024**2, 32 * 1024
#: Values of each field, a mapping for each element, or a file of such mappings.
Over = Mapping[str, Iterable[Any]] | Iterable[Json] | str | os.PathLike[str]
#: The fields of a run.Script that say what is run; ``env`` is apart.
_SCRIPT_FIELDS = ("path", "inline", "args", "entrypoint", "m")
#: Fields of a RayExecutor that an array's elements do not have.
_OF_ONE_PROCESS = (
    *("nodes", "ntasks_per_node", "service", "ready", "strategy", "ports"),
    *("pending_timeout_s", "time_s"),
)


class _Options(Allowed):
    combine: Literal["product", "zip"]
    isolation: Literal["auto", "fork", "process"]
    max_failures: NonNegativeInt | None


@dataclass
class Array(run.Script):
    """Many elements of one task; ``nemo_run_ray.array`` makes it."""

    def get_name(self) -> str:
        return str(_header(self.inline)["array"])

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
        return super().to_command(  # type: ignore[no-any-return]
            with_entrypoint, filename, **options
        )


def array(
    task: run.Partial[Any] | run.Script | Sequence[run.Partial[Any] | run.Script],
    over: Over | None = None,
    *,
    names: Sequence[str] | None = None,
    combine: Literal["product", "zip"] = "product",
    isolation: Literal["auto", "fork", "process"] = "auto",
    max_failures: int | None = None,
) -> Array:
    """Many runs of one task, or many tasks, as one job: ``run.run(array(…), executor=…)``.

    Args:
        task: what each element runs; or a list with the task of every element.
        over: what differs between the runs of one task. A mapping gives the values of each field,
            and ``combine`` says how they go together; a list has a mapping for every element, and
            so has each line of a JSONL file, whose path may be given. A field is a path into a
            ``run.Partial``, such as ``optim.lr``; of a ``run.Script`` it is ``env.NAME``, ``args``
            or ``args.N``. Values are plain: texts, numbers, ``None``, lists and mappings of them.
        names: of the tasks of a list; without them each has the name that NeMo-Run gives it.
        combine: ``product`` is every combination, the last field changing fastest; ``zip`` takes
            the fields' first values together, then their second ones.
        isolation: of a ``run.Partial``: ``fork`` imports everything once on each node and forks a
            process for each element; ``process`` starts one for each element that imports it;
            ``auto`` forks unless the imports have started threads or have used CUDA, which a fork
            does not have.
        max_failures: the array ends early when more elements than this have failed.

    Raises:
        ConfigError: an argument is wrong, a field does not exist, or a value cannot be sent.
    """
    _Options.check(
        "array", {"combine": combine, "isolation": isolation, "max_failures": max_failures}
    )
    tasks = task if isinstance(task, (list, tuple)) else [task]
    for each in tasks:
        if not isinstance(each, (run.Partial, run.Script)) or isinstance(each, Array):
            raise ConfigError(
                f"The task of an array is a {type(each).__name__}; expected is a run.Partial, a "
                "run.Script, or a list of them."
            )
    runs = "command" if all(isinstance(each, run.Script) for each in tasks) else isolation
    header: Json = {"array": "", "max_failures": max_failures, "runs": runs}
    env: dict[str, str] = {}
    elements: Iterable[Json]
    if isinstance(task, (list, tuple)):
        if over is not None:
            raise ConfigError("An array of several tasks has no `over`, which is for one task.")
        elements = _of_tasks(task, names)
        if task:
            header["array"] = f"{_name(task[0])}-array"
    else:
        if names is not None:
            raise ConfigError("names are for an array of several tasks: array([task, …], names=…).")
        rows = _rows(over, combine)
        fields = next(rows, {})
        rows = itertools.chain([fields] if fields else [], rows)
        header["array"] = _name(task)
        if isinstance(task, run.Script):
            words = [] if task.inline else ["args", *(f"args.{at}" for at in range(len(task.args)))]
            for field in fields:
                is_twice = field in words[1:] and "args" in fields
                if is_twice or (field not in words and not re.fullmatch(r"env\..+", field)):
                    raise ConfigError(
                        f"The run.Script has no field {field!r} that an array can change"
                        f"{' beside args' if is_twice else ''}; expected is one of "
                        f"{', '.join(['env.NAME', *words])}."
                    )
            header["script"] = {name: getattr(task, name) for name in _SCRIPT_FIELDS}
            env = dict(task.env)
            rows = (
                {field: _as_text(field, value, at) for field, value in row.items()}
                for at, row in enumerate(rows)
            )
        else:
            header["template"] = _template(task)  # this says what cannot be copied
            changed = copy.deepcopy(task)
            for field, value in fields.items():
                try:
                    set_field(changed, field, value)
                except (AttributeError, IndexError, TypeError, ValueError) as error:
                    raise ConfigError(
                        f"There is no field {field!r} in {_name(task)}: {error}"
                    ) from error
        elements = ({"values": row} for row in rows)
    return Array(inline=_text_of(header, elements), env=env, entrypoint=ARRAY)


def _of_tasks(
    tasks: Sequence[run.Partial[Any] | run.Script], names: Sequence[str] | None
) -> Iterator[Json]:
    """The element of each task."""
    if names is None:
        names = [_name(task) for task in tasks]
        counts = Counter(names)
        names = [f"{name}_{at}" if counts[name] > 1 else name for at, name in enumerate(names)]
    unique = {name for name in names if isinstance(name, str)}
    if not len(unique) == len(names) == len(tasks):
        raise ConfigError(
            f"names is {list(names)!r}; expected is a name of its own for each of the "
            f"{len(tasks)} tasks."
        )
    for name, task in zip(names, tasks, strict=True):
        if isinstance(task, run.Script):
            refuse_credentials(f"The env of the task {name!r}", task.env)
            yield {
                "name": name,
                "script": {field: getattr(task, field) for field in _SCRIPT_FIELDS},
                "env": {key: variable(key, value) for key, value in task.env.items()},
            }
        else:
            yield {"name": name, "template": _template(task)}


def _text_of(header: Json, elements: Iterable[Json]) -> str:
    """The header, and the line of each element.

    Raises:
        ConfigError: a value cannot be sent, there is none, or there are too many.
    """
    lines = [json.dumps(header)]
    size_bytes = len(lines[0]) + 1
    for number, element in enumerate(elements):
        try:
            line = json.dumps(element, default=_plain)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"The element {number} of the array cannot be sent: {error}. Values are texts, "
                "numbers, None, lists and mappings of them."
            ) from error
        if len(line) > ELEMENT_MAX_BYTES:
            raise ConfigError(
                f"The element {number} of the array has {len(line)} bytes, and {ELEMENT_MAX_BYTES} "
                "are sent at most. Put its values into a file that the nodes can read, and give "
                "its name; tasks that share a configuration are smaller as `over` of one task."
            )
        size_bytes += len(line) + 1
        if size_bytes > ARRAY_MAX_BYTES:
            raise ConfigError(
                f"The first {len(lines)} elements of the array have more than the "
                f"{ARRAY_MAX_BYTES / 1024**2:.0f} MiB that are sent at most. Let the values be "
                "names or numbers of what the nodes can read."
            )
        lines.append(line)
    if len(lines) == 1:
        raise ConfigError("The array has no elements: `over`, or the list of tasks, is empty.")
    return "\n".join(lines) + "\n"


def array_spec(roles: Sequence[Role], executor: RayExecutor) -> ArraySpec:
    """The spec of an array, for its driver.

    Raises:
        ConfigError: the executor asks for what an array has not, or the array is in a group.
    """
    if len(roles) > 1:
        raise ConfigError(
            "An array is a job of its own and cannot be a task of a group. Add it to the "
            "experiment by itself: experiment.add(array(...), executor=...)."
        )
    (role,) = roles
    refuse_fields(
        executor,
        _OF_ONE_PROCESS,
        "and each element of an array is one process. Leave it out, or run the task as a job of "
        "its own.",
    )
    if has_torchrun(executor):
        raise ConfigError("RayExecutor.launcher is torchrun, and an array's elements have none.")
    if executor.retries > 200:
        raise ConfigError(f"RayExecutor.retries is {executor.retries}; an element has 200 at most.")
    name = os.path.basename(role.args[0])
    path = Path(executor.job_dir, SCRIPTS_DIR, name)
    text = path.read_text(encoding="utf-8")
    header = _header(text)
    words, args_at, templates = ["python"], 0, []
    if "template" in header:
        templates = [header["template"]]
    elif "script" in header:
        words = _command(header["script"], path.with_name(f"element-{name}"))
        args_at = len(words) - len(header["script"]["args"])
    else:  # tasks that differ: each script gets its command
        lines = text.splitlines()
        for at, line in enumerate(lines):
            element = json.loads(line) if line.startswith('{"name"') else {}
            if "template" in element:
                templates.append(element["template"])
            elif "script" in element:
                argv = _command(element.pop("script"), path.with_name(f"element-{at}-{name}"))
                element["argv"] = [replace_macros(word, executor) for word in argv]
                lines[at] = json.dumps(element)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if any(map(OF_MAIN.search, templates)):
        check_guard()
    host = one_process(dataclasses.replace(role, entrypoint=words[0], args=words[1:]), executor)
    if executor.cpus_per_node is None:
        host = host._replace(resources={"CPU": 1.0, **host.resources})
    return ArraySpec(
        host=host,
        elements=f"{SCRIPTS_DIR}/{name}",
        args_at=args_at,
        runs=header["runs"],
        max_failures=header["max_failures"],
        max_in_flight=executor.max_in_flight,
        retries=executor.retries,
        permanent_exit_codes=tuple(executor.permanent_exit_codes),
        python=executor.python or executor.resolve_cluster().python,
    )


def _command(script: Json, file: Path) -> list[str]:
    """The command of a script; what is written inline becomes a file."""
    return list(run.Script(**script).to_command(with_entrypoint=True, filename=str(file)))


def _name(task: run.Partial[Any] | run.Script) -> str:
    if isinstance(task, run.Script):
        return str(task.get_name())
    return str(get_type_namespace(task.__fn_or_cls__))


def _header(text: str) -> Json:
    return dict(json.loads(next(line for line in text.split("\n") if line[:1] == "{")))


# ---------------------------------------------------------------------- the task


def _template(task: run.Partial[Any]) -> str:
    """The configuration of a function, in Fiddle's JSON.

    It is read without NeMo-Run, whose classes add what is for people.
    """
    classes = {run.Config: fdl.Config, run.Partial: fdl.Partial}

    def convert(value: Any, state: daglish.State) -> Any:
        if to := classes.get(type(value)):
            value = to.__unflatten__(*value.__flatten__())
        return state.map_children(value) if state.is_traversable(value) else value

    try:
        return str(serialization.dump_json(daglish.MemoizedTraversal.run(convert, task)))
    except Exception as error:  # Fiddle raises many kinds
        raise ConfigError(
            f"The run.Partial of {_name(task)} cannot be sent: {error}. NeMo-Run sends functions "
            "and classes by their names, so that a lambda, or a function inside of another, cannot "
            "be one. Define it at the top of a module."
        ) from error


# ---------------------------------------------------------------------- the values


def _rows(over: Over | None, combine: str) -> Iterator[Json]:
    """A mapping with the values of each element; all have the same fields."""
    first: Json | None = None
    for number, row in enumerate(_given(over, combine)):
        is_mapping = isinstance(row, Mapping) and row and all(isinstance(key, str) for key in row)
        if not is_mapping or (first is not None and row.keys() != first.keys()):
            fields = f"the same fields as in the first one, {list(first)}" if first else "fields"
            raise ConfigError(
                f"The element {number} of the array is {row!r:.200}; expected is a mapping from "
                f"names to values, with {fields}."
            )
        first = first or row
        yield row


def _given(over: Over | None, combine: str) -> Iterator[Any]:
    if isinstance(over, (str, os.PathLike)):
        number = 0
        try:
            with open(over, encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):  # noqa: B007 the message has it
                    if line.strip():
                        yield json.loads(line)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The elements cannot be read from {os.fspath(over)}, line {number}: {error}. "
                "Expected is a JSONL file in UTF-8, with a mapping in each line."
            ) from error
        return
    if not isinstance(over, Iterable):
        raise ConfigError(
            f"`over` is {over!r}; expected is a mapping with the values of each field, a list with "
            "a mapping for each element, or the path of a JSONL file."
        )
    if not isinstance(over, Mapping):
        yield from over
        return
    columns = []
    for name, values in over.items():
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise ConfigError(
                f"The values of the field {name!r} are {values!r}; expected is a list, with "
                "a value for each element."
            )
        columns.append(list(values))
    lengths = dict(zip(over, map(len, columns), strict=True))
    if combine == "zip" and len(set(lengths.values())) > 1:
        raise ConfigError(f"combine='zip' needs as many values of each field; found {lengths}.")
    rows = zip(*columns, strict=True) if combine == "zip" else itertools.product(*columns)
    for row in rows:
        yield dict(zip(over, row, strict=True))


def _plain(value: Any) -> Any:
    """The number, or list of numbers, in a value of NumPy or PyTorch."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"an object of type {type(value).__name__} is no plain value")
    return value.tolist()


def _as_text(field: str, value: Any, number: int) -> str | list[str]:
    """A value as a word of a command, or as a variable."""
    if field == "args" and isinstance(value, (list, tuple)):
        return [str(word) for word in value]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if field == "args" or not isinstance(value, (str, int, float)):
        expected = "a list of words" if field == "args" else "a text or a number"
        raise ConfigError(
            f"The field {field} of the element {number} is {value!r}; expected is {expected}."
        )
    return str(value)
