"""Going on with an experiment whose client died before all jobs were handed over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.experiment.dispatch import dispatches_of
from nemo_run_ray.experiment.find import jobs_of
from nemo_run_ray.experiment.job import RemoteJob
from nemo_run_ray.experiment.start_dispatcher import resume
from nemo_run_ray.experiment.tend import tend
from nemo_run_ray.nemo import registry
from nemo_run_ray.remote.states import JobState


def resume_experiment(experiment: Any) -> Iterator[str]:
    """Hand over what never reached the cluster, and start dispatchers that have ended too early.

    Args:
        experiment: a saved one of NeMo-Run's.

    Yields:
        What was done for each dispatch and each job, in words.

    Raises:
        ClusterError: a cluster cannot be asked, or cannot take a job.
        ConfigError: a secret of a job is not set.
        SubmissionError: Ray refuses a job.
    """
    folder = registry.experiment_dir(experiment)
    for dispatch in dispatches_of(folder):
        yield f"{dispatch.id}: {resume(dispatch)}"
    tend(folder)
    known = {found.name: found for found in jobs_of(folder)}
    states = {job.id: _state(experiment, job, known.get(job.id)) for job in experiment.jobs}
    ready = []
    for job in experiment.jobs:
        why_not = _why_not(experiment, job, known.get(job.id), states)
        if why_not:
            yield f"{job.id}: {why_not}"
        else:
            ready.append(job)
    for job in ready:
        registry.prepare_again(experiment, job)
    registry.launch(experiment, ready)
    for job in ready:
        yield f"{job.id}: handed over"


def _why_not(experiment: Any, job: Any, found: RemoteJob | None, states: dict[str, str]) -> str:
    """Why a job is not handed over now; empty if it is to be."""
    if states[job.id] != JobState.WAITING.value:
        return f"{states[job.id]}, left as it is"
    if found is not None and found.record.dispatcher:
        return "waits on the cluster, left to its dispatcher"
    if registry.is_ordered_by_us(experiment):
        return ""
    missing = [
        upstream for upstream in job.dependencies if states[upstream] != JobState.SUCCEEDED.value
    ]
    waits = ", ".join(f"{upstream} ({states[upstream]})" for upstream in missing)
    return f"not handed over, it depends on {waits}; resume again after that" if missing else ""


def _state(experiment: Any, job: Any, found: RemoteJob | None) -> str:
    """The state of a job; WAITING only if it is for Ray and Ray never got it."""
    if found is not None:
        return str(found.status.state.value)
    if isinstance(job.executor, RayExecutor):
        return JobState.WAITING.value
    return f"{registry.status_of(experiment, job)} on {type(job.executor).__name__}"
