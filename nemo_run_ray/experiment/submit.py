"""The jobs of one experiment on one cluster, and how they get there."""

from __future__ import annotations

import hashlib
import secrets
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nemo_run.core.frontend.console.api import CONSOLE
from nemo_run.core.packaging.base import Packager

from nemo_run_ray.clusters import Cluster, from_record
from nemo_run_ray.dashboard.jobs import JobsApi, inspect
from nemo_run_ray.errors import (
    ConfigError,
    DoesNotFit,
    JobError,
    NemoRunRayError,
    SubmissionError,
    as_markup,
)
from nemo_run_ray.experiment.archives import (
    Archive,
    code_archive,
    job_archive,
    package_archive,
    script_problem,
    secrets_archive,
    upload,
)
from nemo_run_ray.experiment.dispatch import Dispatch, start_dispatcher, submit_once
from nemo_run_ray.experiment.store import (
    INTENT,
    Event,
    JobRecord,
    did_you_mean,
    find_experiment,
    find_record,
    records_of,
    store_of,
    titles,
    writable,
)
from nemo_run_ray.ids import HANDLE, dispatcher_id
from nemo_run_ray.plan.job import JobPlan, joined_places
from nemo_run_ray.remote.end_record import lock_of, proof_of
from nemo_run_ray.remote.fit import ResourceRequest, request_of
from nemo_run_ray.remote.spec import (
    LOCK_KEY,
    ArraySpec,
    DispatchSpec,
    GroupSpec,
    Json,
    OutsideSpec,
    nonce_of,
)
from nemo_run_ray.remote.status import DISPATCHER_KEY

#: The client submits at most this many jobs; more wait on the cluster, where a dispatcher limits
#: them to what the head's memory suffices for (110 MB each).
DIRECT_MAX = 16


@dataclass
class Batch:
    """The jobs of one experiment on one cluster: what they share is built and uploaded once."""

    exp_dir: Path
    cluster: Cluster
    #: All jobs by submission id, those that are not submitted yet among them.
    plans: dict[str, JobPlan] = field(default_factory=dict)
    dispatcher_id: str = ""
    #: The jobs' order is kept on the cluster, by that dispatcher. Otherwise NeMo-Run keeps it, and
    #: each job is submitted by itself.
    is_ordered: bool = True
    #: Called before anything is sent, and raises to forbid it.
    before_post: Callable[[], None] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _dispatched: dict[str, NemoRunRayError | None] = field(default_factory=dict)
    _code: dict[str, Archive] = field(default_factory=dict)
    #: The jobs' archive, by the number of jobs in it: jobs are only added.
    _jobs: dict[int, Archive] = field(default_factory=dict)

    def add(self, planned: JobPlan, is_dry: bool) -> None:
        """Take a job, or another plan of it; refuse one that could not be submitted.

        A dry run leaves no file of an archive.
        """
        # It refuses a secret that is not set.
        secrets_archive(planned.spec.secrets, "", planned.secret_places)
        if planned.submission_id == next(iter(self.plans), planned.submission_id):
            # The first job: the files may have changed since the last dry run.
            self._code = {}
        code = {role: self._code_archive(own, is_dry) for role, own in planned.packagers.items()}
        for role, task in planned.tasks().items():
            problem = script_problem(task, code.get(role))
            if problem:
                raise ConfigError(f"The job {planned.job!r} cannot run: {problem}")
        self.plans[planned.submission_id] = planned

    def _code_archive(self, packager: Packager, is_dry: bool = False) -> Archive:
        # Not its repr, which a class that is no dataclass has from its base.
        kind, values = type(packager), sorted(vars(packager).items())
        content = repr((kind.__module__, kind.__qualname__, values))
        name = hashlib.sha256(content.encode()).hexdigest()[:12]
        if name not in self._code:
            # Another cluster's batch writes the same file.
            with store_of(self.exp_dir).packing, tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) if is_dry else self.exp_dir
                self._code[name] = code_archive(packager, folder, f"ray_code_{name}")
        return self._code[name]

    def submit(self, planned: JobPlan) -> None:
        """Submit a job, with the first one of a dispatch all of it."""
        together = list(self.plans.values()) if self.is_ordered else [planned]
        if any(plan.needs_dispatcher for plan in together) or len(together) > DIRECT_MAX:
            name = self.dispatcher_id if self.is_ordered else dispatcher_id(planned.submission_id)
            with self._lock:  # submitted with the first of its jobs; all share the outcome
                if name not in self._dispatched:
                    try:
                        self._dispatch(name, together)
                        self._dispatched[name] = None
                    except NemoRunRayError as error:
                        self._dispatched[name] = error
            error_of_first = self._dispatched[name]
            if error_of_first:
                raise error_of_first
        else:
            self._submit_alone(planned)

    def _submit_alone(self, planned: JobPlan) -> None:
        nonce, key = secrets.token_hex(8), secrets.token_hex(16)
        hidden = secrets_archive(planned.spec.secrets, nonce, planned.secret_places, key)
        with self._lock:
            self._check_fit()
            self.before_post()
            shared = self._shared()
            code, body = self._request(planned, [*shared, hidden], nonce)
            for archive in (*code, *shared):
                upload(self.api, archive)
        self.api.put_package(hidden.name, hidden.pack())
        body["metadata"][LOCK_KEY] = lock_of(proof_of(key, 0))
        submit_once(self.exp_dir, self._intent(planned, nonce), self.api, body)

    def _dispatch(self, name: str, jobs: Sequence[JobPlan]) -> None:
        """Write the plan of a dispatch down and start its dispatcher."""
        places = joined_places(planned.secret_places for planned in jobs)
        self._check_fit()
        shared = self._shared()
        uploads = {archive.uri: archive for archive in shared}
        dispatched, intents = [], []
        for planned in jobs:  # NeMo-Run adds a job after those that it depends on
            nonce = secrets.token_hex(8)
            code, body = self._request(planned, shared, nonce)
            uploads |= {archive.uri: archive for archive in code}
            outside = [outside_spec(handle, self.api, self._session) for handle in planned.outside]
            dispatched.append(planned.dispatched(body, outside, name))
            intents.append(self._intent(planned, nonce, name))
        spec = DispatchSpec(
            id=name,
            nonce=secrets.token_hex(8),
            jobs=tuple(dispatched),
            session=self._session,
            dashboards=(self.api.dashboard.url,),
            max_in_flight=min(
                filter(None, (plan.executor.max_in_flight for plan in jobs)), default=None
            ),
        )
        pythons = filter(None, [self.cluster.python, *(plan.spec.python for plan in jobs)])
        dispatch = Dispatch.of(self.exp_dir, name)
        with writable(dispatch.folder):
            dispatch.save(spec, uploads.values(), list(dict.fromkeys(pythons)), places)
        self.before_post()
        store_of(self.exp_dir).ledger.write_all(intents)
        start_dispatcher(dispatch, self.api, self.cluster.record())

    def _request(
        self, planned: JobPlan, archives: Sequence[Archive], nonce: str
    ) -> tuple[list[Archive], Json]:
        """The code of a job, and its request, which names that and the other archives."""
        code = {role: self._code_archive(packager) for role, packager in planned.packagers.items()}
        uris = {role: archive.uri for role, archive in code.items()}
        return [*code.values()], planned.body(uris, [archive.uri for archive in archives], nonce)

    def _intent(self, planned: JobPlan, nonce: str, dispatcher: str = "") -> Event:
        values = {
            "job": planned.job,
            "cluster": self.cluster.record(),
            "session": self._session,
            "nonce": nonce,
            "has_roles": isinstance(planned.spec, GroupSpec),
            "is_array": isinstance(planned.spec, ArraySpec),
            "place": planned.place,
            "grace_s": planned.spec.grace_s,
            "keep_logs_max_bytes": planned.executor.keep_logs_max_bytes,
            "log_copy": planned.executor.log_copy,
            "dispatcher": dispatcher,
            "reservation": planned.reservation,
        }
        return INTENT, planned.submission_id, values

    @cached_property
    def api(self) -> JobsApi:
        """The dashboard of its cluster, which is brought up if it has to be."""
        return JobsApi.of(self.cluster.connect())

    @cached_property
    def _version(self) -> dict[str, str]:
        return self.api.version()

    @property
    def _session(self) -> str:
        return self._version["session_name"]

    def _check_fit(self) -> None:
        """Refuse jobs that the cluster cannot run; one look is enough for all of the batch."""
        for planned in self.plans.values():
            planned.check_version(self._version["ray_version"])
        if self._misfits:
            raise DoesNotFit(
                f"The cluster {self.api.dashboard.url} does not fit, so nothing was sent to "
                f"it:\n{self._misfits}"
            )

    @cached_property
    def _misfits(self) -> str:
        """The message about a cluster that cannot run the jobs, if a preflight is asked for."""
        executors = [
            role
            for plan in self.plans.values()
            for role in plan.executor.resource_group or [plan.executor]
        ]
        if not any(executor.preflight for executor in executors):
            return ""
        # Imported when they are needed, for their libraries.
        from nemo_run_ray.cluster_files.check import CheckState, check
        from nemo_run_ray.cluster_files.load import load

        asks = {k: v for plan in self.plans.values() for k, v in requests_of(plan).items()}
        lines = {}
        for name in dict.fromkeys(executor.resolved_from for executor in executors):
            for row in check(inspect(self.api.dashboard), load(name) if name else None, asks):
                lines[f"{row.check}: {row.message} {row.next_step}".rstrip()] = row.state
        for line, state in lines.items():
            if state in (CheckState.WARNING, CheckState.UNKNOWN):
                CONSOLE.log(as_markup(f"Preflight: {line}"))
        return "\n".join(f"- {line}" for line in lines if lines[line] is CheckState.BROKEN)

    def _shared(self) -> list[Archive]:
        """The archives of every job; this package is first, as the driver of a group expects it."""
        plans = list(self.plans.values())
        if len(plans) not in self._jobs:
            self._jobs[len(plans)] = job_archive(plans, self.exp_dir / "__main__.py")
        return [package_archive(), self._jobs[len(plans)]]


def requests_of(plan: JobPlan) -> dict[str, ResourceRequest]:
    """The request of one replica of each role, by a name for people.

    A group that waits for nodes to join asks for nothing that must be there.
    """
    if isinstance(plan.spec, ArraySpec):
        parts = {f"element of {plan.job}": plan.spec.host}
    elif isinstance(plan.spec, GroupSpec):
        roles = () if plan.spec.wait_for_nodes else plan.spec.roles
        parts = {f"role {role.name} of {plan.job}": role for role in roles}
    else:
        return {f"task {plan.job}": request_of(plan.reservation)}
    return {
        name: ResourceRequest(dict(part.resources), dict(part.label_selector))
        for name, part in parts.items()
    }


def handles_of(
    dependencies: Iterable[str], exp_dir: Path, jobs_of: Callable[[Path], Collection[str]]
) -> list[str]:
    """The handles that dependencies mean: each experiment that is named becomes all of its jobs."""
    handles = []
    for name in dependencies:
        if "://" in name:
            handles.append(name)
            continue
        folder = find_experiment(name, but=exp_dir)
        if not folder:
            meant = did_you_mean(name, titles() - {exp_dir.parent.name})
            raise ConfigError(
                f"RayExecutor.dependencies names {name!r}, and NeMo-Run's home has no experiment "
                f"of that title or id.{meant} Nothing was sent. `nemo-run-ray list --all` lists "
                "those that reached a cluster."
            )
        records = [job for job in records_of(folder) if not job.is_dispatcher]
        missing = sorted(set(jobs_of(folder)) - {record.job for record in records})
        if missing or not records:
            raise ConfigError(
                f"RayExecutor.dependencies names {name!r}, but the experiment {folder.name} has "
                f"not submitted to Ray: {', '.join(missing) or 'anything'}. Wait until it has, "
                "or name the jobs that you mean by their handles. Nothing was sent."
            )
        handles += sorted(f"{HANDLE}{record.submission_id}" for record in records)
    return list(dict.fromkeys(handles))


def outside_spec(handle: str, api: JobsApi, session: str) -> OutsideSpec:
    """A job of another experiment, for a dispatcher that waits for it."""
    name = handle.rpartition("/")[2]
    record: JobRecord | None = None
    with suppress(JobError):
        record = find_record(name)
    if record and record.session != session and not _continues(record, api):
        raise SubmissionError(
            f"RayExecutor.dependencies names {name}, which another cluster has, or the same one "
            f"had before it was started again: {from_record(record.cluster)!r}, session "
            f"{record.session}, but Ray at {api.dashboard.url} has the session {session}. Wait for "
            "the job in the program, or run both on one cluster. Nothing was started."
        )
    if record and record.dispatcher:
        return OutsideSpec(name, tuple(record.nonces), record.dispatcher)
    row = api.job(name)
    if not row:
        raise SubmissionError(
            f"RayExecutor.dependencies names {name}, which Ray at {api.dashboard.url} does not "
            "have, nor has an experiment of this NeMo-Run home. Is the handle right? Nothing was "
            "started."
        )
    nonces = tuple(record.nonces) if record else (nonce_of(row),)
    return OutsideSpec(name, nonces, str((row.get("metadata") or {}).get(DISPATCHER_KEY, "")))


def _continues(record: JobRecord, api: JobsApi) -> bool:
    """Whether a job's dispatch continues in the Ray that is up, in a later allocation."""
    if not api.dashboard.earlier.rows or not record.dispatcher:
        return False
    dispatcher = find_record(record.dispatcher)
    row = api.job(dispatcher.submission_id)
    return row is not None and nonce_of(row) in dispatcher.nonces
