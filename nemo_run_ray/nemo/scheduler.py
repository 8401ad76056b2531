"""The scheduler that torchx calls for ``RayExecutor``: it plans, submits and reports jobs."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

from nemo_run.core.frontend.console.api import CONSOLE
from nemo_run.run.torchx_backend.schedulers.api import SchedulerMixin
from torchx.schedulers.api import (
    DescribeAppResponse,
    ListAppResponse,
    Scheduler,
    Stream,
    filter_regex,
)
from torchx.specs import AppDef, AppDryRunInfo, AppState, ReplicaStatus, Role, RoleStatus

from nemo_run_ray import nemo
from nemo_run_ray.clusters import interrupted
from nemo_run_ray.dashboard.http import pause
from nemo_run_ray.errors import (
    ConfigError,
    JobError,
    NemoRunRayError,
    as_markup,
    shown,
)
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.experiment.archives import described
from nemo_run_ray.experiment.dispatch import Snapshot, dispatches_of, resume, tend, tend_until
from nemo_run_ray.experiment.job import (
    RemoteJob,
    cancel_one,
    find_job,
    jobs_of,
    not_ready,
    record,
)
from nemo_run_ray.experiment.logs import lines, only
from nemo_run_ray.experiment.store import remember, store_of
from nemo_run_ray.experiment.submit import Batch, handles_of
from nemo_run_ray.ids import SCHEDULER, dispatcher_id, job_id
from nemo_run_ray.plan.job import JobPlan, describe, plan
from nemo_run_ray.remote.status import JobState, JobStatus, Reason

#: Told by the main thread: those that wait may end with the program before they tell anything.
_HELP = (
    "Interrupted. Submitted jobs continue:\n"
    "  look at them  nemo-run-ray status {name}\n"
    "  follow them   nemo-run-ray logs --follow {name}\n"
    "  cancel them   nemo-run-ray cancel {name}"
)


class Interrupt:
    """Ctrl-C ends the wait, not the job.

    NeMo-Run waits in threads that do not see a KeyboardInterrupt, and joins them: without this the
    first Ctrl-C would wait for the job's end.
    """

    def __init__(self) -> None:
        self._experiment = ""
        self._has_sent = False

    def watch(self, experiment: str) -> None:
        """Notice Ctrl-C from now on, unless the program handles it. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._has_sent = self._has_sent and self._experiment == experiment
        self._experiment = experiment
        interrupted.clear()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)

    def unwatch(self) -> None:
        interrupted.clear()
        if signal.getsignal(signal.SIGINT) == self._note:
            with suppress(ValueError):  # of a thread that is not the main one
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def forbid(self) -> None:
        """Raise after Ctrl-C, before jobs are submitted: the cluster took long to come up."""
        if interrupted.is_set():
            raise NemoRunRayError("Interrupted. Jobs that were not submitted before are not sent.")
        self._has_sent = True

    def _note(self, number: int, frame: Any) -> None:
        interrupted.set()
        text = _HELP if self._has_sent else "Interrupted. Nothing of {name} was submitted."
        error = KeyboardInterrupt(text.format(name=shlex.quote(self._experiment)))
        error._is_explained = True  # type: ignore[attr-defined]
        raise error


#: The process's handler: there is one Ctrl-C.
interrupt = Interrupt()


@dataclass
class Request:
    """A planned job with its batch: a dry run shows it, and ``schedule`` submits it."""

    plan: JobPlan
    batch: Batch

    def __str__(self) -> str:
        uploads = [f"configs, scripts and specs of {len(self.batch.plans)} job(s)"]
        for code in dict.fromkeys(described(packager) for packager in self.plan.packagers.values()):
            uploads.insert(0, f"code, {code}")
        if self.plan.spec.secrets:
            uploads.append(
                f"secrets {', '.join(self.plan.spec.secrets)}, in an archive of their own"
            )
        file = self.plan.executor.resolved_from
        named = f", by the cluster file {file}" if file else ""
        return describe(self.plan, f"{self.batch.cluster!r}{named}", uploads)


class RayJobsScheduler(SchedulerMixin, Scheduler[Any]):
    """Submits NeMo-Run's jobs to Ray and answers for them, also in a later process."""

    def __init__(self, session_name: str, experiment: Any = None):
        super().__init__(SCHEDULER, session_name)
        self._experiment = experiment
        self._batches: dict[str, Batch] = {}
        self._jobs: dict[str, RemoteJob] = {}
        self._is_announced = False
        self._ask_at: dict[str, float] = {}  # for the services of a group that are not ready
        #: Set when this process does not wait for the jobs any more.
        self._is_left = threading.Event()
        #: The place of each of the experiment's jobs, from 0, and the names of those before it.
        self._order: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._is_ordered = True
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ submission

    def _submit_dryrun(self, app: AppDef, cfg: RayExecutor) -> AppDryRunInfo[Request]:
        if not isinstance(cfg, RayExecutor):
            raise ConfigError(f"The scheduler {self.backend} takes a RayExecutor, not {cfg!r}.")
        experiment_id = cfg.experiment_id or "experiment"
        is_running = nemo.is_running()
        if is_running:
            interrupt.watch(experiment_id)
        planned = plan(app, cfg, job_id(experiment_id, app.name), app.name)
        batch = self._batch(cfg)
        # Read anew with the first job, and with a new one: there may be thousands.
        is_first = planned.submission_id == next(iter(batch.plans), planned.submission_id)
        if self._experiment and (is_first or planned.job not in self._order):
            self._is_ordered = nemo.is_ordered_by_us(self._experiment)
            self._order = {
                job.id: (place, tuple(dict.fromkeys(job.dependencies)))
                for place, job in enumerate(self._experiment.jobs)
            }
        batch.is_ordered = self._is_ordered
        if planned.executor.max_in_flight and not batch.is_ordered:
            raise ConfigError(
                f"RayExecutor.max_in_flight of {planned.job!r} is {planned.executor.max_in_flight}"
                ", but the experiment has dependencies and jobs elsewhere too, so NeMo-Run hands "
                "its jobs over one by one; leave it out, or put all jobs on one Ray cluster."
            )
        before = batch.plans.get(planned.submission_id)
        # NeMo-Run overwrites the field with the handles of the experiment's own jobs at the launch.
        named = handles_of(planned.outside, batch.exp_dir, nemo.job_names)
        outside = tuple(
            handle
            for handle in dict.fromkeys([*(before.outside if before else ()), *named])
            if handle.rpartition("/")[2] not in batch.plans
        )
        place, after = self._order.get(planned.job, (0, ()))
        after = after if batch.is_ordered else ()
        planned = replace(planned, after=after, outside=outside, place=place)
        submission_id = planned.submission_id
        is_dispatcher = submission_id == batch.dispatcher_id
        if is_dispatcher or batch.plans.get(submission_id, planned).job != planned.job:
            raise ConfigError(
                f"The job {planned.job!r} would get the id {submission_id} on the cluster, which "
                "another job of the experiment or its dispatcher has; give it another name."
            )
        batch.add(planned, is_dry=not is_running)
        return AppDryRunInfo(Request(planned, batch), str)

    def schedule(self, dryrun_info: AppDryRunInfo[Request]) -> str:
        request = dryrun_info.request
        batch = request.batch
        # Let later processes find the experiment's jobs: once, before the first request.
        with self._lock:
            if self._experiment and not self._is_announced:
                ids = {
                    plan.job: plan.submission_id
                    for batch in self._batches.values()
                    for plan in batch.plans.values()
                }
                remember(nemo.experiment_dir(self._experiment))
                nemo.save_handles(self._experiment, ids)
                self._is_announced = True
        submission_id: str = request.plan.submission_id
        batch.submit(request.plan)
        try:
            if nemo.is_detached(self._experiment):
                batch.cluster.detach()
            name, exp_dir = request.plan.job, batch.exp_dir
            if store_of(exp_dir).ledger.jobs()[submission_id].dispatcher:  # it has no page yet
                _say_once(
                    exp_dir,
                    (exp_dir.name, JobState.WAITING, Reason.WAITS),
                    f"{name} waits on the cluster; look at it: "
                    f"nemo-run-ray status {shlex.quote(exp_dir.name)}",
                )
            else:
                CONSOLE.log(
                    as_markup(f"{name} on Ray: {batch.api.dashboard.job_page(submission_id)}")
                )
        except NemoRunRayError as error:  # the job runs: its launch has not failed
            CONSOLE.log(as_markup(str(error)))
        with self._lock:  # this process looks after the jobs for as long as it stays for them
            waiters = store_of(batch.exp_dir).waiters
            if self not in waiters and not nemo.is_detached(self._experiment):
                waiters.add(self)
                args = (batch.exp_dir, self._is_left)
                threading.Thread(target=tend_until, args=args, name="tend", daemon=True).start()
        return submission_id

    def _batch(self, executor: RayExecutor) -> Batch:
        cluster = executor.resolve_cluster()
        key, folder = repr(cluster.record()), Path(executor.experiment_dir)
        if any(batch.exp_dir != folder for batch in self._batches.values()):
            # The experiment was reset: it has another id and folder, and this scheduler still.
            self._batches, self._is_announced = {}, False
        if key not in self._batches:
            name = dispatcher_id(executor.experiment_id or "experiment")
            if self._batches:  # on another cluster, and a ledger has one job of an id
                name = f"{name}-{len(self._batches) + 1}"
            batch = Batch(folder, cluster, dispatcher_id=name, before_post=interrupt.forbid)
            self._batches[key] = batch
        return self._batches[key]

    # ------------------------------------------------------------------ questions

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        try:
            job = self._job(app_id)
        except JobError:
            return None
        snapshot = Snapshot()
        status = job.status_in(snapshot)
        # Threads that wait ask by schedulers of their own; without a waiter it is a look, which
        # changes nothing.
        if store_of(job.record.exp_dir).waiters:
            record([(job, status)], snapshot)
        _report(job, status)
        now = monotonic()
        if job.record.has_roles and now >= self._ask_at.setdefault(app_id, now + _SERVICES_S):
            self._ask_at[app_id] = now + _SERVICES_S
            group = job.roles(status)
            if group and (services := not_ready(group)):
                text = f"{job.id} waits for its services: {'; '.join(services)}"
                _say_once(job.record.exp_dir, (job.id, status.state, Reason.NOT_READY), text)
        if not status.state.is_terminal:
            pause(0, f"{app_id}, which continues")
        state = torchx_state(status)
        name = job.name
        replica = ReplicaStatus(id=0, state=state, role=name, hostname=status.node)
        return DescribeAppResponse(
            app_id=app_id,
            state=state,
            msg=shown(status.message),
            roles=[Role(name=name, image="", num_replicas=1)],
            roles_statuses=[RoleStatus(role=name, replicas=[replica])],
        )

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        job = self._job(app_id)
        found = _readable(lines(job.output(follow=should_tail)), job)
        if role_name != job.name:  # of a group
            found = only(f"{role_name}/{k}", found)
        return filter_regex(regex, found) if regex else found

    def list(self) -> list[ListAppResponse]:
        """None: torchx calls it for its own command line, which knows no experiment."""
        return []

    # ------------------------------------------------------------------ endings

    def _cancel_existing(self, app_id: str) -> None:
        CONSOLE.log(as_markup(f"{cancel_one(self._job(app_id))}."))

    def close(self) -> None:
        interrupt.unwatch()
        self._is_left.set()
        self._is_left = threading.Event()
        for batch in self._batches.values():
            store_of(batch.exp_dir).waiters.discard(self)

    def _job(self, app_id: str) -> RemoteJob:
        if app_id not in self._jobs:
            self._jobs[app_id] = find_job(app_id)
        return self._jobs[app_id]

    def _validate(self, app: AppDef, scheduler: str) -> None:
        """Check nothing: resources are fields of the executor, not torchx's, and checked there."""


#: Seconds between two looks at the services of a group.
_SERVICES_S = 30.0
#: Reasons of waits for minutes; only the first one of an experiment is reported.
_WAITS = {Reason.BUILDING, Reason.ROOM}


def _report(job: RemoteJob, status: JobStatus) -> None:
    """Say once why a job waits, did not end well, or cannot be asked: NeMo-Run shows the state."""
    about = job.record.dispatcher if status.reason is Reason.UNDISPATCHED else job.id
    if status.reason in _WAITS:
        about = job.record.exp_dir.name
    if status.reason.is_trouble or (status.reason in _WAITS and status.detail):
        said = about, status.state, status.reason
        text = f"{job.id} is {status.state.value}: {status.message}"
        _say_once(job.record.exp_dir, said, text)


def _say_once(exp_dir: Path, said: tuple[str, JobState, Reason], text: str) -> None:
    reported = store_of(exp_dir).reported
    if said not in reported:
        reported.add(said)
        CONSOLE.log(as_markup(text))


def _readable(log: Iterable[str], job: RemoteJob) -> Iterator[str]:
    """The log as far as it can be read: an error would end NeMo-Run's thread in a traceback.

    The end of the log says nothing about the job.
    """
    try:
        yield from log
    except NemoRunRayError as error:
        # That it is lost is said by this, once.
        about = job.id if job.status.state is JobState.LOST else str(error)
        _say_once(job.record.exp_dir, (about, JobState.LOST, Reason.CLUSTER_GONE), str(error))


def create_scheduler(session_name: str, **kwargs: Any) -> RayJobsScheduler:
    """Make the scheduler; torchx calls this by the entry point ``ray_jobs``."""
    return RayJobsScheduler(session_name, experiment=kwargs.get("experiment"))


#: JobState -> torchx's word, which is what NeMo-Run shows. torchx has no word for LOST.
_TORCHX = {"WAITING": "UNSUBMITTED", "LOST": "FAILED"}
#: Reasons of waits of dispatched jobs.
_ON_THE_CLUSTER = {Reason.WAITS, Reason.TURN, Reason.RETRY, Reason.UNDISPATCHED}


def torchx_state(status: JobStatus) -> AppState:
    """The state that NeMo-Run shows: a job that waits on the cluster was submitted.

    torchx's UNSUBMITTED is 0, which NeMo-Run takes for no answer: it calls a group UNKNOWN then.
    """
    if status.state is JobState.WAITING and status.reason in _ON_THE_CLUSTER:
        return AppState.SUBMITTED
    return AppState[_TORCHX.get(status.state.value, status.state.value)]


def resume_experiment(experiment: Any) -> Iterator[str]:
    """Submit what never reached the cluster, and start dispatchers that have ended too early.

    Yields:
        What was done for each dispatch and each job, in words.
    """
    folder = nemo.experiment_dir(experiment)
    for dispatch in dispatches_of(folder):
        yield f"{dispatch.id}: {resume(dispatch)}"
    tend(folder)
    submitted = {job.name: job for job in jobs_of(folder)}
    states = {}
    for job in experiment.jobs:
        if job.id in submitted:
            states[job.id] = submitted[job.id].status.state.value
        elif isinstance(job.executor, RayExecutor):
            states[job.id] = JobState.WAITING.value
        else:
            state = nemo.status_of(experiment, job)
            states[job.id] = f"{state} on {type(job.executor).__name__}"
    ready, is_ordered = [], nemo.is_ordered_by_us(experiment)
    for job in experiment.jobs:
        upstream = () if is_ordered else job.dependencies
        missing = [name for name in upstream if states[name] != JobState.SUCCEEDED.value]
        if states[job.id] != JobState.WAITING.value:
            yield f"{job.id}: {states[job.id]}, left as it is"
        elif job.id in submitted and submitted[job.id].record.dispatcher:
            yield f"{job.id}: waits on the cluster, left to its dispatcher"
        elif missing:
            waits = ", ".join(f"{name} ({states[name]})" for name in missing)
            yield f"{job.id}: not submitted, it depends on {waits}; resume again after that"
        else:
            ready.append(job)
    nemo.launch(experiment, ready)
    for job in ready:
        yield f"{job.id}: submitted"
