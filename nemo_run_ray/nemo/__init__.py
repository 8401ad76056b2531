"""NeMo-Run's registries and saved state: the only module that touches them.

Registering adds entries and changes none, so other executors behave as before.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

from nemo_run.cli.api import factory
from nemo_run.config import Config
from nemo_run.core.execution.base import Executor
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer
from nemo_run.run.experiment import Experiment
from nemo_run.run.job import JobGroup
from nemo_run.run.torchx_backend.schedulers.api import EXECUTOR_MAPPING, REVERSE_EXECUTOR_MAPPING
from torchx.specs import AppState, make_app_handle

from nemo_run_ray import errors, patches
from nemo_run_ray.clusters import Cluster
from nemo_run_ray.errors import ConfigError, JobError, UnsupportedNemoRun
from nemo_run_ray.executor import ON_SUBCLASS, RayExecutor
from nemo_run_ray.ids import SCHEDULER, SESSION
from nemo_run_ray.remote.files import write_file

log = logging.getLogger(__name__)
#: NeMo-Run's lists of executors whose jobs run side by side, and go on without their client.
_SUPPORTED = ("_PARALLEL_SUPPORTED_EXECUTORS", "_DETACH_SUPPORTED_EXECUTORS")


def register() -> None:
    """Tell NeMo-Run about ``RayExecutor``; a second call changes nothing."""
    dependency = vars(Experiment)["_DEPENDENCY_SUPPORTED_EXECUTORS"]
    _register_class(RayExecutor)
    if _register_class not in ON_SUBCLASS:
        ON_SUBCLASS.append(_register_class)
    REVERSE_EXECUTOR_MAPPING[SCHEDULER] = RayExecutor
    if not isinstance(dependency, _OwnOrder):
        Experiment._DEPENDENCY_SUPPORTED_EXECUTORS = _OwnOrder(dependency)
    factory(ray, target=Executor)
    errors.install()
    try:
        patches.apply("job_group")
    except UnsupportedNemoRun as error:  # single tasks run all the same
        log.warning("Groups cannot be used: %s", error)
    # It is above this module, and needs more of this package than patches may import.
    patches.MODULES["skills_executor"] = "nemo_run_ray.integrations.skills.patch"
    patches.apply_from_environment()


def _register_class(kind: type) -> None:
    """Enter one class: NeMo-Run looks the very class of an executor up, not its bases."""
    # All are read before the first is set: on an unknown structure none is changed.
    known = {name: tuple(getattr(Experiment, name)) for name in _SUPPORTED}
    # Other modules of NeMo-Run hold this very dictionary: it is extended, never replaced.
    EXECUTOR_MAPPING[kind] = SCHEDULER
    for name, classes in known.items():
        if kind not in classes:
            setattr(Experiment, name, (*classes, kind))


class _OwnOrder:
    """The executors whose jobs NeMo-Run launches all at once, with their dependencies.

    For an experiment that has Ray jobs and others, or Ray jobs on several clusters, RayExecutor is
    not among them: no dispatcher sees all of the jobs, so NeMo-Run keeps their order itself.
    """

    def __init__(self, known: tuple[type[Executor], ...]):
        self._known = known

    def __get__(self, experiment: Any, owner: type) -> tuple[type[Executor], ...]:
        if experiment and not _is_on_one_cluster(experiment):
            return self._known
        ours = (kind for kind, name in EXECUTOR_MAPPING.items() if name == SCHEDULER)
        return (*self._known, *ours)


def is_ordered_by_us(experiment: Experiment) -> bool:
    """Whether the order of an experiment's jobs is kept on the cluster, or need not be kept."""
    return _is_on_one_cluster(experiment) or not any(job.dependencies for job in experiment.jobs)


def _is_on_one_cluster(experiment: Experiment) -> bool:
    executors = [job.executor for job in experiment.jobs]  # those of a group are of one kind
    if not all(isinstance(executor, RayExecutor) for executor in executors):
        return False
    # An experiment may have thousands of jobs, and is asked for each: one of a kind is resolved.
    kinds = {}
    for one in executors:
        cluster = one.cluster.record() if isinstance(one.cluster, Cluster) else one.cluster
        kinds[repr(cluster), one.address, one.pool] = one
    return len({repr(one.resolve_cluster().record()) for one in kinds.values()}) <= 1


def ray() -> Config[RayExecutor]:
    """The executor of ``run.executor=ray run.executor.address=http://…``."""
    return Config(RayExecutor)


def handle(submission_id: str) -> str:
    """NeMo-Run's handle of a job."""
    return str(make_app_handle(SCHEDULER, SESSION, submission_id))


def experiment_dir(experiment: Experiment) -> Path:
    return Path(experiment._exp_dir)


def job_names(exp_dir: Path) -> set[str]:
    """The names of all jobs of a saved experiment, of any executor."""
    try:
        saved = json.loads((exp_dir / Experiment._TASK_FILE).read_text(encoding="utf-8"))
        return {str(ZlibJSONSerializer().deserialize(job).id) for job, _ in saved}
    except Exception as error:  # it may need modules that are not here
        raise ConfigError(
            f"The jobs of the experiment {exp_dir.name} cannot be read here ({error}), so nobody "
            "can tell whether all of them were submitted. Name those that you mean by their "
            "handles. Nothing was sent."
        ) from error


def load_experiment(name: str) -> Experiment:
    """The experiment of an id or a title."""
    from nemo_run_ray.experiment import store  # nodes may not have its libraries

    folder = store.find_experiment(name)
    if not folder or not (folder / Experiment._CONFIG_FILE).is_file():
        raise JobError(
            f"There is no experiment {name!r} in NeMo-Run's home."
            f"{store.did_you_mean(name, store.titles())} `nemo-run-ray list --all` lists those "
            "that reached a cluster; NEMORUN_HOME names another home."
        )
    return Experiment._from_config(str(folder))


def is_running() -> bool:
    """Whether the caller is ``Experiment.run``, which dry-runs all jobs before it launches them.

    Only the caller tells it from a dry run alone.
    """
    stack = traceback.walk_stack(sys._getframe())
    return any(frame.f_code is Experiment.run.__code__ for frame, _ in stack)


def is_detached(experiment: Experiment | None) -> bool:
    return bool(getattr(experiment, "detach", False))


def save_handles(experiment: Experiment, submission_ids: dict[str, str]) -> None:
    """Write the handles of jobs into the experiment's saved state before they are submitted.

    NeMo-Run writes them after all jobs were launched; a client that dies before that would leave an
    experiment that knows nothing of its running jobs. The live job objects are not touched:
    NeMo-Run sets their handles itself.
    """
    saved = []
    for job in experiment.jobs:
        if job.id in submission_ids:
            job = copy.copy(job)
            _set_handle(job, handle(submission_ids[job.id]))
        saved.append(job.serialize())
    path = experiment_dir(experiment) / Experiment._TASK_FILE
    write_file(path, json.dumps(saved))


def prepare_again(experiment: Experiment, job: Any) -> None:
    """Make a job of a saved experiment ready to be launched again."""
    _ = experiment.tasks  # builds the tasks from what was saved
    job.executor.experiment_dir = experiment._exp_dir
    _set_handle(job, "")
    job.prepare()


def _set_handle(job: Any, name: str) -> None:
    """Give a job or a group the handle of its Ray job; none takes it back."""
    job.launched = bool(name)
    if isinstance(job, JobGroup):
        job.handles, job.states = ([name], [AppState.UNKNOWN]) if name else ([], [])
    else:
        job.handle = name


def launch(experiment: Experiment, jobs: list[Any]) -> None:
    """Launch jobs of a saved experiment as ``run(detach=True)`` does: nobody stays for them.

    All are dry-run before the first is submitted.
    """
    experiment.detach = True
    for job in jobs:
        prepare_again(experiment, job)
        job.launch(wait=False, runner=experiment._runner, dryrun=True)
    for job in jobs:
        job.launch(wait=False, runner=experiment._runner)


def status_of(experiment: Experiment, job: Any) -> str:
    """The state of a job of any executor, in NeMo-Run's words."""
    return str(job.status(experiment._runner).name)
