"""Looking after the jobs of an experiment while a client waits for them.

Looking changes nothing. What heals is here: a dispatcher that has died is started again, what a
cancelled job has left is stopped, and Ray's job manager is woken when a head has died. Only jobs of
that experiment are touched.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path
from typing import Any

from nemo_run_ray.clusters import from_record
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.experiment.dispatch import Dispatch, DispatchStatus, start_dispatcher
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.store import JobRecord, store_of
from nemo_run_ray.remote.dispatch.decide import Do
from nemo_run_ray.remote.spec import JobRows, nonce_of
from nemo_run_ray.remote.status import first_id, is_running

log = logging.getLogger(__name__)

#: Seconds between two starts of a dispatcher by one process that finds it dead, and how many.
_REVIVE_AGAIN_S, _REVIVALS_MAX = 20.0, 20
#: Seconds that the client that hands a dispatch over may need until its dispatcher is there.
_SENDING_S = 120.0
#: Seconds between two times that a waiting client tends.
_TEND_AGAIN_S = 2.0


def tend(exp_dir: Path) -> None:
    """Look after the jobs of an experiment that have not ended, where their cluster answers.

    Args:
        exp_dir: the experiment's folder; one that cannot be read or written to is left alone too.
    """
    by_cluster: dict[str, list[JobRecord]] = {}
    store = store_of(exp_dir)
    try:
        for record in store.ledger.jobs().values():
            if not record.terminal:
                by_cluster.setdefault(repr(sorted(record.cluster.items())), []).append(record)
        for records in by_cluster.values():
            with contextlib.suppress(NemoRunRayError):
                dashboard = from_record(records[0].cluster).find()
                if dashboard is not None:
                    _tend_on(JobsApi.of(dashboard), records)
    except OSError as error:
        if store.last_complaint != str(error):  # once, and not every two seconds
            log.warning("The jobs of %s are not looked after: %s", exp_dir, error)
        store.last_complaint = str(error)


def _tend_on(api: JobsApi, records: list[JobRecord]) -> None:
    snapshot = Snapshot()
    rows = _own(snapshot.rows(api), records)
    if api.wake_for(rows):
        return  # the next look sees what has become of them
    for record in records:
        if not record.dispatcher:
            # Ray forgets with its head the stop that it was told before the start.
            for action in Dispatch.of_job(record).decided(snapshot.rows(api)).decision.actions:
                if action.do is Do.STOP and is_running(rows[action.submission_id]):
                    api.stop(action.submission_id)
    dispatches = {record.dispatcher: record for record in records if record.dispatcher}
    for name, record in dispatches.items():
        dispatch = Dispatch.of(record.exp_dir, name)
        if dispatch.is_saved:
            found = dispatch.look(api, snapshot)
            # Its first dispatcher may be on its way: the client sends the archives before.
            is_young = time.time() - record.intended_at < _SENDING_S and not found.dispatcher
            if not found.lost and not is_young:
                _revive(dispatch, api, record.cluster, found)


def _own(rows: JobRows, records: list[JobRecord]) -> JobRows:
    """The rows of these jobs' attempts and of no others."""
    nonces = {first_id(record.submission_id): record.nonces for record in records}
    return {
        name: row for name, row in rows.items() if nonce_of(row) in nonces.get(first_id(name), ())
    }


def _revive(
    dispatch: Dispatch, api: JobsApi, cluster: dict[str, Any], found: DispatchStatus
) -> None:
    """Start a dispatcher again if it is dead and has something to do."""
    if found.is_dispatched or found.decision.is_over:
        return
    with store_of(dispatch.exp_dir).lock:
        now, last = time.monotonic(), (dispatch.revived_at or [-_REVIVE_AGAIN_S])[-1]
        if now - last < _REVIVE_AGAIN_S or len(dispatch.revived_at) >= _REVIVALS_MAX:
            return
        dispatch.revived_at.append(now)
    why = "never reached the cluster"
    if found.dispatcher:
        last_status = found.dispatcher[max(found.dispatcher)].status
        why = f"has ended before its jobs ({last_status.detail or last_status.state.value.lower()})"
    try:
        if dispatch.look(api, Snapshot(is_fresh=True)).is_dispatched:
            return  # another client was faster
        started = start_dispatcher(dispatch, api, cluster)
    except NemoRunRayError as error:
        log.warning("The dispatcher %s %s, and cannot be started: %s", dispatch.id, why, error)
        return
    log.warning("The dispatcher %s %s; it is started again as %s.", dispatch.id, why, started)


class Tending(threading.Thread):
    """Tends an experiment as long as the process waits for it."""

    def __init__(self, exp_dir: Path) -> None:
        super().__init__(name=f"tend-{exp_dir.name}", daemon=True)
        self._exp_dir = exp_dir
        self._is_over = threading.Event()
        store_of(exp_dir).waiters.add(self)

    def run(self) -> None:
        while not self._is_over.wait(_TEND_AGAIN_S):
            tend(self._exp_dir)

    def stop(self) -> None:
        self._is_over.set()
        store_of(self._exp_dir).waiters.discard(self)
