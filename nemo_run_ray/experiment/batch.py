"""The jobs of one experiment on one cluster, and how they get there."""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path

from nemo_run.core.packaging.base import Packager

from nemo_run_ray.clusters import Cluster
from nemo_run_ray.dashboard.http import pause
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ConfigError, DoesNotFit, JobRefused, NemoRunRayError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.experiment import archives, ledger
from nemo_run_ray.experiment.before_start import asks_of, misfit
from nemo_run_ray.experiment.dispatch import Dispatch
from nemo_run_ray.experiment.ledger import Ledger
from nemo_run_ray.experiment.other_experiments import outside_spec
from nemo_run_ray.experiment.packed import Packed
from nemo_run_ray.experiment.start_dispatcher import start_dispatcher
from nemo_run_ray.experiment.submit_once import submit_once
from nemo_run_ray.fields import version_of
from nemo_run_ray.ids import dispatcher_id
from nemo_run_ray.plan.job_plan import JobPlan, joined_places
from nemo_run_ray.remote.attempts import LOCK_KEY
from nemo_run_ray.remote.node.output import lock_of, proof_of
from nemo_run_ray.remote.spec import ArraySpec, DispatchedJobSpec, DispatchSpec, GroupSpec
from nemo_run_ray.remote.states import JobState, JobStatus, Reason

#: So many jobs are handed over by the client at once; more wait on the cluster, where a dispatcher
#: limits them to what the head's memory suffices for (110 MB each).
DIRECT_MAX = 16


@dataclass
class Batch:
    """The jobs of one experiment on one cluster: what they share is built and uploaded once.

    Attributes:
        exp_dir: NeMo-Run's folder of the experiment.
        cluster: where all of them go.
        plans: all jobs, those that are not submitted yet among them.
        executors: by the job's name.
        dispatcher_id: id of the dispatcher, if there is one.
        is_ordered: the jobs' order is kept on the cluster, by that dispatcher. Otherwise NeMo-Run
            keeps it, and each job is handed over by itself.
        places: which job of the experiment each is, from 0, by the job's name.
        names: of the jobs, by their submission ids.
        before_post: called before anything is sent, and raises to forbid it.
    """

    exp_dir: Path
    cluster: Cluster
    plans: dict[str, JobPlan] = field(default_factory=dict)
    executors: dict[str, RayExecutor] = field(default_factory=dict)
    dispatcher_id: str = ""
    is_ordered: bool = True
    places: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    before_post: Callable[[], None] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _dispatch_lock: threading.Lock = field(default_factory=threading.Lock)
    _dispatched: dict[str, NemoRunRayError | None] = field(default_factory=dict)
    _session: str = ""
    _ray_version: str = ""
    _is_checked: bool = False
    _misfit: DoesNotFit | None = None
    _api: JobsApi | None = None
    _dry_code: dict[str, archives.Archive] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._packed = Packed(self.exp_dir)

    def add(self, planned: JobPlan, executor: RayExecutor, place: int) -> None:
        """Take a job, or another plan of it."""
        name = self.names[planned.submission_id] = planned.job
        self.plans[name], self.executors[name], self.places[name] = planned, executor, place

    def check(self, planned: JobPlan, is_dry: bool) -> None:
        """Refuse a job that could not be handed over, or whose script is not there.

        Args:
            planned: the job.
            is_dry: nothing of the experiment is handed over; what is packed is not kept.

        Raises:
            ConfigError: a secret is not set, or a script is not there.
            PackagingFailed: a packager delivers no archive.
        """
        archives.secrets_archive(planned.spec.secrets, "", planned.secret_places)
        if planned.job == next(iter(self.plans), planned.job):
            self._dry_code.clear()  # the files may have changed since the last dry run
        code = {role: self._code(own, is_dry) for role, own in planned.packagers.items()}
        for role, task in planned.tasks().items():
            problem = archives.script_problem(task, code.get(role))
            if problem and not (task.cwd and (planned.after or planned.outside)):
                raise ConfigError(f"The job {planned.job!r} cannot run: {problem}")

    def _code(self, packager: Packager, is_dry: bool) -> archives.Archive:
        if not is_dry:
            return self._packed.code(packager)
        key = archives.packager_key(packager)
        if key not in self._dry_code:
            with tempfile.TemporaryDirectory() as folder:
                self._dry_code[key] = archives.code_archive(packager, Path(folder), "code")
        return self._dry_code[key]

    def submit(self, name: str) -> str:
        """Hand a job over, with the first one its whole dispatch; its submission id.

        Raises:
            ClusterError: the cluster cannot take it.
            SubmissionError: the job cannot be sent, or it is not known whether it arrived.
            ConfigError: a secret is not set.
        """
        planned = self.plans[name]
        together = list(self.plans.values()) if self.is_ordered else [planned]
        if any(plan.needs_dispatcher for plan in together) or len(together) > DIRECT_MAX:
            name = self.dispatcher_id if self.is_ordered else dispatcher_id(planned.submission_id)
            self._dispatch_once(name, together)
            return planned.submission_id
        return self._submit_alone(planned)

    def _dispatch_once(self, name: str, jobs: Sequence[JobPlan]) -> None:
        """Hand a dispatch over with the first of its jobs; all of them share the outcome."""
        with self._dispatch_lock:
            if name not in self._dispatched:
                try:
                    self._dispatch(name, jobs)
                    self._dispatched[name] = None
                except NemoRunRayError as error:
                    self._dispatched[name] = error
        error_of_first = self._dispatched[name]
        if error_of_first is not None:
            raise error_of_first

    def _submit_alone(self, planned: JobPlan) -> str:
        nonce, key = secrets.token_hex(8), secrets.token_hex(16)
        hidden = archives.secrets_archive(planned.spec.secrets, nonce, planned.secret_places, key)
        with self._lock:
            (planned,) = self._fitted([planned])
            self.before_post()
            code = {
                role: self._upload(self._packed.code(packager))
                for role, packager in planned.packagers.items()
            }
            carried = [self._upload(archive) for archive in self._job_archives()]
        self._connect().put_package(hidden.name, hidden.pack())
        carried.append(hidden.uri)
        book = Ledger.of(self.exp_dir)
        book.write_all([self._intent(planned, nonce)])
        body = planned.body(code, carried, nonce)
        body["metadata"][LOCK_KEY] = lock_of(proof_of(key, 0))
        nonces = partial(book.nonces, planned.submission_id)
        try:
            submit_once(self._connect(), body, nonces, time.monotonic, pause)
        except JobRefused as error:
            refused = JobStatus(JobState.FAILED, Reason.REFUSED, str(error))
            book.note(ledger.TERMINAL, planned.submission_id, status=refused.to_json())
            raise
        except NemoRunRayError as error:
            book.note(ledger.UNSETTLED, planned.submission_id, why=str(error))
            raise
        book.note(ledger.SUBMITTED, planned.submission_id)
        return planned.submission_id

    def _dispatch(self, name: str, jobs: Sequence[JobPlan]) -> None:
        """Write the plan of a dispatch down and start its dispatcher."""
        with self._lock:
            places = joined_places(planned.secret_places for planned in jobs)
            for planned in jobs:
                archives.secrets_archive(planned.spec.secrets, "", places)  # they must be set
            jobs = self._fitted(jobs)
            api = self._connect()
            shared = self._job_archives()
            uploads = {archive.uri: archive for archive in shared}
            dispatched, intents = [], []
            for planned in _after_their_upstreams(jobs):
                nonce = secrets.token_hex(8)
                code = {role: self._packed.code(own) for role, own in planned.packagers.items()}
                uploads.update({archive.uri: archive for archive in code.values()})
                uris = {role: archive.uri for role, archive in code.items()}
                body = planned.body(uris, [archive.uri for archive in shared], nonce)
                outside = [outside_spec(handle, api, self._session) for handle in planned.outside]
                dispatched.append(planned.dispatched(body, outside, name))
                intents.append(self._intent(planned, nonce, name))
            spec = self._dispatch_spec(name, jobs, dispatched)
            dispatch = Dispatch.of(self.exp_dir, name)
            dispatch.save(spec, uploads, _pythons(self.cluster, jobs), places)
            self.before_post()
            Ledger.of(self.exp_dir).write_all(intents)
            start_dispatcher(dispatch, api, self.cluster.record())

    def _dispatch_spec(
        self, name: str, jobs: Sequence[JobPlan], dispatched: Sequence[DispatchedJobSpec]
    ) -> DispatchSpec:
        limits = [plan.max_in_flight for plan in jobs if plan.max_in_flight is not None]
        return DispatchSpec(
            id=name,
            nonce=secrets.token_hex(8),
            jobs=tuple(dispatched),
            session=self._session,
            dashboards=(self._connect().dashboard.url,),
            max_in_flight=min(limits) if limits else None,
        )

    def _intent(
        self, planned: JobPlan, nonce: str, dispatcher: str = ""
    ) -> tuple[str, str, dict[str, object]]:
        values: dict[str, object] = {
            "job": planned.job,
            "role": planned.job,
            "cluster": self.cluster.record(),
            "session": self._session,
            "nonce": nonce,
            "has_roles": isinstance(planned.spec, GroupSpec),
            "is_array": isinstance(planned.spec, ArraySpec),
            "place": self.places.get(planned.job, 0),
            "grace_s": planned.spec.grace_s,
            "keep_logs_max_bytes": self.executors[planned.job].resolved().keep_logs_max_bytes,
        }
        copy = self.executors[planned.job].log_copy
        if copy:
            values["log_copy"] = copy
        if dispatcher:
            values["dispatcher"] = dispatcher
        if planned.reservation:
            values["reservation"] = planned.reservation
        return ledger.INTENT, planned.submission_id, values

    def page(self, name: str) -> str:
        """The page of a job in Ray's dashboard."""
        return self._connect().dashboard.job_page(self.plans[name].submission_id)

    def _connect(self) -> JobsApi:
        if self._api is None:
            api = JobsApi.of(self.cluster.connect())
            version = api.version()
            self._ray_version, self._session = version["ray_version"], version["session_name"]
            self._api = api
        return self._api

    def _fitted(self, jobs: Sequence[JobPlan]) -> list[JobPlan]:
        """These jobs in the form that the cluster's Ray carries out; all plans get it at once.

        Raises:
            TooOld: it cannot carry out one of the experiment's jobs.
        """
        api = self._connect()
        version = version_of(self._ray_version)
        # Before a task becomes a group, which would wait for nodes.
        asks = dict(ask for planned in self.plans.values() for ask in asks_of(planned))
        for name, planned in list(self.plans.items()):
            self.plans[name] = planned.for_ray(version)
            api.require(self._ray_version, self.plans[name].selector_since)
        if not self._is_checked:
            # Every job of the batch asks for this, and one look is enough.
            self._misfit = misfit(api.dashboard, self.plans, asks, self.executors)
            self._is_checked = True
        if self._misfit is not None:
            raise self._misfit
        return [self.plans[planned.job] for planned in jobs]

    def _upload(self, archive: archives.Archive) -> str:
        """The archive's URI, asked for every job: Ray forgets archives unused for some minutes."""
        api = self._connect()
        if not api.has_package(archive.name):
            api.put_package(archive.name, archive.pack())
        return archive.uri

    def _job_archives(self) -> list[archives.Archive]:
        """What every job needs; this package comes first, as the driver of a group expects it."""
        folders = {name: Path(self.executors[name].job_dir) for name in self.plans}
        return [archives.package_archive(), self._packed.jobs(list(self.plans.values()), folders)]


def _after_their_upstreams(jobs: Sequence[JobPlan]) -> list[JobPlan]:
    """The jobs in an order in which each comes after those that it depends on."""
    by_name = {plan.job: plan for plan in jobs}
    order = TopologicalSorter({plan.job: plan.after for plan in jobs}).static_order()
    return [by_name[name] for name in order]


def _pythons(cluster: Cluster, jobs: Sequence[JobPlan]) -> list[str]:
    """The interpreters that are named, each once."""
    named = dict.fromkeys([cluster.python, *(plan.spec.python for plan in jobs)])
    return [python for python in named if python is not None]
