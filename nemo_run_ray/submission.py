"""Handing jobs over, once."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_run.core.packaging.base import Packager

from nemo_run_ray import archives, ledger
from nemo_run_ray.clusters import Cluster
from nemo_run_ray.errors import (
    ClusterError,
    Conflict,
    Gone,
    NemoRunRayError,
    SubmissionError,
    Taken,
)
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.jobs_api import JobsApi
from nemo_run_ray.ledger import Ledger
from nemo_run_ray.plan import JobPlan, nonce_of

#: Seconds to find out what became of a request whose answer was lost; a dashboard's restart is
#: less.
OUTCOME_S = 180.0
#: Experiments on two clusters pack the same code into the same file, one after the other.
_packing = threading.Lock()


@dataclass
class Shipment:
    """The jobs of one experiment on one cluster: what they share is built and uploaded once.

    Attributes:
        exp_dir: NeMo-Run's folder of the experiment.
        cluster: where all of them go.
        plans: all jobs, those that are not submitted yet among them.
        executors: by the job's name.
    """

    exp_dir: Path
    cluster: Cluster
    plans: dict[str, JobPlan] = field(default_factory=dict)
    executors: dict[str, RayExecutor] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _session: str = ""
    _api: JobsApi | None = None
    _code: dict[str, archives.Archive] = field(default_factory=dict)
    _job_archive: tuple[tuple[str, ...], archives.Archive] | None = None

    def submit(self, name: str) -> str:
        """Hand one job over; its submission id.

        Raises:
            ClusterError: the cluster cannot take it.
            SubmissionError: the job cannot be sent, or nobody can tell whether it arrived.
            ConfigError: a secret is not set.
        """
        planned = self.plans[name]
        nonce = secrets.token_hex(8)
        hidden = archives.secrets_archive(planned.spec.secrets, nonce)
        with self._lock:
            api = self._connect()
            code = {role: self._upload_code(one) for role, one in planned.packagers.items()}
            carried = [self._upload_job_archive()]
        if planned.spec.secrets:
            carried.append(self._upload(hidden))
        book = Ledger(self.exp_dir)
        book.write(
            ledger.INTENT,
            planned.submission_id,
            job=planned.job,
            role=planned.job,
            cluster=self.cluster.record(),
            session=self._session,
            nonce=nonce,
        )
        body = planned.body(code, carried, nonce)
        try:
            submit_once(api, body, book, time.monotonic, time.sleep)
        except NemoRunRayError as error:
            book.write(ledger.UNSETTLED, planned.submission_id, why=str(error))
            raise
        book.write(ledger.SUBMITTED, planned.submission_id)
        return planned.submission_id

    @property
    def page(self) -> Callable[[str], str]:
        """Gives the page of a job in Ray's dashboard."""
        return self._connect().dashboard.job_page

    def _connect(self) -> JobsApi:
        if self._api is None:
            api = JobsApi.of(self.cluster.connect())
            version = api.version()
            for planned in self.plans.values():
                api.require(version["ray_version"], planned.selector_since)
            self._session, self._api = version["session_name"], api
        return self._api

    def _upload(self, archive: archives.Archive) -> str:
        """The archive's URI. Asked for every job: Ray forgets what nobody used for some minutes."""
        api = self._connect()
        if not api.has_package(archive.name):
            api.put_package(archive.name, archive.pack())
        return archive.uri

    def _upload_code(self, packager: Packager) -> str:
        key = archives.packager_key(packager)
        if key not in self._code:
            with _packing:
                name = f"ray_code_{key}"
                self._code[key] = archives.code_archive(packager, self.exp_dir, name)
        return self._upload(self._code[key])

    def _upload_job_archive(self) -> str:
        names = tuple(sorted(self.plans))
        if self._job_archive is None or self._job_archive[0] != names:
            job_dirs = {name: Path(one.job_dir) for name, one in self.executors.items()}
            main = self.exp_dir / "__main__.py"
            made = archives.job_archive(list(self.plans.values()), job_dirs, main)
            self._job_archive = names, made
        return self._upload(self._job_archive[1])


def submit_once(
    api: JobsApi,
    body: dict[str, Any],
    book: Ledger,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Post a job so that exactly one comes of it, also when answers are lost.

    After an error the job table is asked before anything else is done. A repeated request cannot
    start a second job: Ray gives a submission id away once.

    Args:
        api: where.
        body: of the request; its intent is in the ledger.
        book: the experiment's ledger. A job that another process of the experiment submitted at the
            same time is taken for what it is, ours.
        clock: seconds that only grow.
        sleep: waits so many of them.

    Raises:
        SubmissionError: Ray refuses the request, or ``OUTCOME_S`` passed without an outcome.
        Conflict: the id belongs to a job that is not ours.
    """
    submission_id = str(body["submission_id"])
    deadline = clock() + OUTCOME_S
    while True:
        try:
            api.post(body)
            return
        except Taken:
            lost: ClusterError | None = None
        except Gone as error:
            lost = error
        try:
            row = api.job(submission_id, patience_s=max(0.0, deadline - clock()))
        except Gone as error:
            raise SubmissionError(
                f"Nobody can tell whether the job {submission_id} has started: {error} It is "
                "noted; `nemo-run-ray status` finds it when the cluster answers, and `nemo-run-ray "
                "resume` hands it over if it never arrived."
            ) from error
        if row is not None:
            _must_be_ours(api, row, book)
            return
        if clock() >= deadline:
            raise SubmissionError(
                f"{api.dashboard.url} has not taken the job {submission_id} in {OUTCOME_S:.0f} s: "
                f"{lost}. It has not started; `nemo-run-ray resume` hands it over later."
            )
        sleep(0.5)


def _must_be_ours(api: JobsApi, row: dict[str, Any], book: Ledger) -> None:
    if nonce_of(row) in book.jobs()[str(row["submission_id"])].nonces:
        return
    raise Conflict(
        f"The id {row.get('submission_id')} is taken at {api.dashboard.url} by a job that another "
        f"run submitted (its entrypoint: {str(row.get('entrypoint'))[:80]!r}). Nothing was "
        "started. Give the experiment another id or title."
    )
