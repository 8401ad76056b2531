"""Tasks of an experiment that run as the elements of one job: ``RayExecutor(as_array=True)``.

Tasks share a job when all is equal but their commands, variables and configurations, and when they
come after the same jobs and the same jobs come after them: a job that depends on one of them waits
for the whole array.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemo_run.config import SCRIPTS_DIR
from torchx.specs import AppDef

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.ids import job_id
from nemo_run_ray.plan.array import ARRAY_MAX_BYTES, check_elements, element_settings
from nemo_run_ray.plan.array_elements import ELEMENT_MAX_BYTES
from nemo_run_ray.plan.roles import array_role, single_replica_environment, task_spec
from nemo_run_ray.remote.array.elements import CONFIG, ENVS, NAME, WORDS
from nemo_run_ray.remote.spec import ArraySpec

if TYPE_CHECKING:
    from nemo_run_ray.plan.job_plan import JobPlan

#: Where the file of the elements is in the job's folder.
ELEMENTS_FILE = f"{SCRIPTS_DIR}/elements.jsonl"
#: What the values of an element are. What forks reads configurations, what starts commands words.
_COMMANDS = ((NAME, "task", 0), (WORDS, "command", 0), (ENVS, "env", 0))
_CONFIGS = ((NAME, "task", 0), (CONFIG, "config", 0), (ENVS, "env", 0))


@dataclass(frozen=True)
class TaskElement:
    """What is a task's own beside others of its array.

    Attributes:
        argv: its command.
        env: its variables.
        config: path of its configuration below the run directory; ``None`` for a ``run.Script``.
        of_client: fields of its executor that the client goes by for a whole job.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    config: str | None
    of_client: tuple[int | bool | None, ...] = ()


@dataclass(frozen=True)
class TaskArray:
    """One job of several tasks.

    Attributes:
        plan: of the job.
        tasks: the plans of its elements, in their order.
        text: of the file of the elements.
    """

    plan: JobPlan
    tasks: tuple[JobPlan, ...]
    text: str


def element_of(app: AppDef, executor: RayExecutor) -> tuple[ArraySpec, TaskElement]:
    """A task as the only element of an array, without what is its own, and that beside it.

    Raises:
        ConfigError: it is a group, or the executor asks for what an array has not.
    """
    if executor.resource_group or len(app.roles) > 1:
        raise ConfigError(
            f"RayExecutor.as_array is True, and {app.name!r} is a group, which is a job of its "
            "own. Give the group an executor without it."
        )
    (role,) = app.roles
    check_elements(executor)
    task = task_spec(role, executor)
    of_client = executor.keep_logs_max_bytes, executor.preflight
    own = TaskElement(task.argv, task.env, task.config, of_client)
    host = array_role(role, executor)
    bare = host.task._replace(argv=(), env=single_replica_environment(executor))
    spec = ArraySpec(
        host=host._replace(name=executor.role or "task", task=bare),
        elements=ELEMENTS_FILE,
        targets=_COMMANDS if task.config is None else _CONFIGS,
        runs="command" if task.config is None else "auto",
        **element_settings(executor),
    )
    return spec, own


def arrays_of(
    plans: Sequence[JobPlan], experiment_id: str, taken: Collection[str] = ()
) -> list[TaskArray]:
    """The jobs that the tasks among these become that are elements.

    Args:
        plans: all jobs of an experiment on one cluster.
        experiment_id: of the experiment.
        taken: names of its jobs elsewhere.

    Raises:
        ConfigError: what is a task's own is too large to be sent.
    """
    after: dict[str, set[str]] = {}
    for planned in plans:
        for name in planned.after:
            after.setdefault(name, set()).add(planned.job)
    # Plans cannot be hashed, so those with the same neighbours are compared one by one.
    near: dict[Hashable, list[tuple[Any, list[JobPlan]]]] = {}
    alike: list[list[JobPlan]] = []
    for planned in plans:
        if planned.element is not None:
            neighbours = frozenset(planned.after), frozenset(after.get(planned.job, ()))
            known, shape = near.setdefault(neighbours, []), _shape(planned)
            found = next((tasks for other, tasks in known if other == shape), None)
            if found is None:
                found = []
                known.append((shape, found))
                alike.append(found)
            found.append(planned)
    names = {*taken, *(planned.job for planned in plans)}
    return [_array(tasks, _name(tasks[0].job, names), experiment_id) for tasks in alike]


def after_arrays(plans: Iterable[JobPlan], array_of: Mapping[str, str]) -> list[JobPlan]:
    """The plans with arrays in the place of the tasks that they come after.

    Args:
        plans: of any jobs.
        array_of: the array of each task that is in one, by their names.
    """
    return [
        replace(
            planned, after=tuple(dict.fromkeys(array_of.get(name, name) for name in planned.after))
        )
        for planned in plans
    ]


def _shape(planned: JobPlan) -> tuple[Any, ...]:
    """What is equal in the plans of tasks that share a job, but the jobs before and after them."""
    packagers = {str(place): own for place, own in enumerate(planned.packagers.values())}
    bare = replace(planned, job="", submission_id="", after=(), element=None)
    return replace(bare, packagers=packagers), _element(planned).of_client


def _name(first: str, taken: Collection[str]) -> str:
    """The name of an array by that of its first task."""
    name = f"{first}-array"
    while name in taken:
        name += "-array"
    return name


def _array(tasks: Sequence[JobPlan], name: str, experiment_id: str) -> TaskArray:
    first = tasks[0]
    spec, elements = _spec(first), [_element(task) for task in tasks]
    common = dict(set(elements[0].env.items()).intersection(*(own.env.items() for own in elements)))
    header = {"fields": ["task"], "config_at": 1}
    lines = [json.dumps(header)]
    for task, own in zip(tasks, elements, strict=True):
        env = {key: value for key, value in own.env.items() if key not in common}
        lines.append(json.dumps([task.job, own.config or own.argv, env]))
        if len(lines[-1]) > ELEMENT_MAX_BYTES:
            raise ConfigError(
                f"The command and the variables of the task {task.job!r} have {len(lines[-1])} "
                f"bytes, and {ELEMENT_MAX_BYTES} are sent at most of the element of an array. Put "
                "them into a file that the nodes can read, or leave RayExecutor.as_array out."
            )
    text = "\n".join(lines) + "\n"
    if len(text) > ARRAY_MAX_BYTES:
        raise ConfigError(
            f"The commands and variables of the {len(tasks)} tasks that share the job {name!r} "
            f"have {len(text) / 1024**2:.0f} MiB, and {ARRAY_MAX_BYTES / 1024**2:.0f} are sent at "
            "most. Put what they have in common into their executor's env_vars, or make several "
            "experiments of them."
        )
    bare = spec.host.task
    host = spec.host._replace(task=bare._replace(env={**bare.env, **common}))
    plan = replace(
        first,
        job=name,
        submission_id=job_id(experiment_id, name),
        spec=spec._replace(host=host),
        element=None,
    )
    return TaskArray(plan, tuple(tasks), text)


def _spec(planned: JobPlan) -> ArraySpec:
    if not isinstance(planned.spec, ArraySpec):
        raise ValueError(f"the task {planned.job} is the element of no array")
    return planned.spec


def _element(planned: JobPlan) -> TaskElement:
    if planned.element is None:
        raise ValueError(f"the task {planned.job} is no element")
    return planned.element
