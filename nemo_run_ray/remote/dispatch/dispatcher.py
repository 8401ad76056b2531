"""The dispatcher: one small job on the head that hands the other jobs of an experiment over.

It keeps nothing that matters: killed at any line and started again, also twice at the same time,
it continues from the cluster's job table. Ray gives every submission id away once, so what two of
them do at the same moment is done once.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import zipfile
from typing import Any, Callable, Dict, Mapping, Optional

from .. import carried_over
from ..dashboard import (
    EMBEDDED,
    DashboardClient,
    RequestRefused,
    Unanswered,
    candidates,
    own_dashboard,
)
from ..end_record import LostEnds, lock_of, proof_of
from ..node.output import say
from ..node.rundir import KEY, SECRETS, read_secrets, remove_secrets
from ..spec import LOCK_KEY, DispatchedJobSpec, DispatchSpec
from ..status import (
    STOP_AGAIN_S,
    STOP_TRUST_S,
    Attempt,
    JobExit,
    JobState,
    Reason,
    attempt_id,
    attempt_of_row,
    claim_body,
    first_id,
    node_dead_s,
    started_as,
)
from .decide import Action, Decision, Do, decide
from .policies import time_left

#: Seconds between two looks at the table: at first, and when nothing has happened for long.
PACE_S, PACE_MAX_S = 0.3, 5.0
#: A look may take this part of the time between two of them; seconds between two looks at most.
LOOK_PART, SLOW_MAX_S = 0.25, 20.0
#: Seconds that the table may lack the dispatcher itself before it believes it: a head that
#: recovers may answer before it knows its jobs.
ABSENT_MAX_S = 60.0
#: Seconds that Ray may answer an attempt with an error of its own before the job is given up.
REFUSED_AFTER_S = 180.0
#: Memory of the head for each job's supervisor (measured: 85 to 110 MB), and the part of the
#: head's memory that supervisors may take when the user sets no limit.
SUPERVISOR_BYTES, HEAD_PART = 110 * 10**6, 0.5
#: Seconds in which only other clusters' dashboards answer until the own one is taken to be gone.
FOREIGN_MAX_S = 120.0


class WrongCluster(Exception):
    """The cluster does not know this dispatcher, so its job table is not that of the dispatch; or
    it is gone for good."""


class Dispatcher:
    """Looks, decides, acts; see ``decide``."""

    def __init__(
        self,
        dispatch: DispatchSpec,
        own_id: str,
        api: DashboardClient,
        secrets: Mapping[str, str],
        limit: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._dispatch = dispatch
        self._own_id = own_id
        self._api = api
        self._secrets = secrets
        self._limit = limit
        self._clock = clock
        self._parent = os.getppid()
        self._jobs = {job.name: job for job in dispatch.jobs}
        self._ids = dispatch.ids
        self._node_dead_s = node_dead_s()
        self._reported: Dict[str, str] = {}
        self._stopped: Dict[str, float] = {}  # first request to stop an attempt that Ray took
        self._asked: Dict[str, float] = {}  # last one
        self._errors: Dict[str, float] = {}  # first unexplained error of an attempt
        self._troubles: Dict[str, str] = {}  # in the log already, by what they are about
        self._absent_since: Optional[float] = None
        self._changed_at = clock()
        self._look_s = 0.0
        self._earlier: Optional[Dict[str, Attempt]] = None  # not read yet
        self._ends = LostEnds(api.log_end)

    def run(self, sleep: Callable[[float], None] = time.sleep) -> int:
        """Continue until everything is decided, and return the exit code.

        Raises:
            WrongCluster: the cluster has no record of this dispatcher, or will not come back.
        """
        while True:
            code = self.round()
            if code is not None:
                return code
            sleep(self.pace_s())

    def round(self) -> Optional[int]:
        """Look once and act; the exit code when there is nothing left to do."""
        try:
            table = self._look()
        except (Unanswered, OSError) as error:  # or an earlier table cannot be read now
            self._complain("", str(error))
            self._absent_since = None
            self._errors.clear()
            # Another Ray comes up again and continues its jobs.
            if os.environ.get(EMBEDDED) and os.getppid() != self._parent:
                raise WrongCluster("the embedded Ray that ran this dispatcher has died") from error
            return None
        if table is None:
            return None
        now = self._clock()
        left = time_left(os.environ, now)
        decision = decide(self._dispatch, table, now, self._limit, self._node_dead_s, left)
        self._report(decision, table)
        is_waiting = False
        for action in decision.actions:
            try:
                is_waiting |= self._act(action, table)
            except (Unanswered, RequestRefused) as error:
                self._complain(action.submission_id, f"{action.submission_id}: {error}")
                is_waiting = True
        if decision.is_out_of_time:
            say("the other jobs need more time than this allocation has; the next one continues")
            return JobExit.OUT_OF_TIME
        if not decision.is_over or is_waiting:
            return None
        say(f"all is decided: {_count(decision)}")
        states = {status.state for status in decision.statuses.values()}
        return JobExit.SUCCEEDED if states <= {JobState.SUCCEEDED} else JobExit.SOME_FAILED

    def pace_s(self) -> float:
        """Seconds until the next look: short while things happen, and never a burden."""
        idle_s = self._clock() - self._changed_at
        pace_s = min(max(PACE_S, idle_s / 20), PACE_MAX_S)
        return max(pace_s, min(self._look_s / LOOK_PART, SLOW_MAX_S))

    def _look(self) -> Optional[Dict[str, Attempt]]:
        """The table, or ``None`` when it is not (yet) the one that has this dispatcher."""
        if self._earlier is None:
            rows_before = carried_over.rows_of_job(os.environ)
            self._earlier = {name: attempt_of_row(row) for name, row in rows_before.items()}
        began = time.monotonic()
        table = dict(self._earlier)
        for row in self._api.rows():
            name = str(row["submission_id"])
            if name in self._ids or first_id(name) in self._ids:
                table[name] = attempt_of_row(self._ends.restored(row))
        self._look_s = time.monotonic() - began
        self._troubles.pop("", None)
        own = table.get(self._own_id)
        if own is not None and own.nonce == self._dispatch.nonce:
            if own.status.state.is_terminal:
                raise WrongCluster(f"Ray says that this dispatcher is {own.status.state.value}")
            self._absent_since = None
            return table
        if self._absent_since is None:
            self._absent_since = self._clock()
        if self._clock() - self._absent_since > ABSENT_MAX_S:
            raise WrongCluster(f"the job table of {self._api.url} does not have this dispatcher")
        return None

    def _act(self, action: Action, table: Mapping[str, Attempt]) -> bool:
        """Carry one action out, and return whether the next round must look after it."""
        if action.do is Do.STOP:
            return self._stop(action, table)
        self._changed_at = self._clock()
        if action.do is Do.CLAIM:
            self._claim(action, action.why)
            return True
        job, name = self._jobs[action.job], action.submission_id
        number = int(name.partition("@")[2] or 1)
        before = attempt_id(job.id, number - 1)
        if before in table and table[before].status.reason is Reason.START_TIMEOUT:
            # Ray has given the start up, and some versions start it later all the same.
            self._api.stop(before)
        try:
            self._api.post(self._body(job, number))
        except RequestRefused as error:
            self._claim(action, str(error))
        except Unanswered as error:
            first = self._errors.setdefault(name, self._clock())
            if self._clock() - first < REFUSED_AFTER_S:
                raise
            self._claim(action, f"not taken: {error}")
        return True

    def _stop(self, action: Action, table: Mapping[str, Attempt]) -> bool:
        now, name = self._clock(), action.submission_id
        if now - self._asked.get(name, 0.0) >= STOP_AGAIN_S:
            if name not in self._asked:
                say(f"stopping {name}: {action.why}")
            self._asked[name] = now
            self._api.stop(name)
            self._stopped.setdefault(name, now)
        is_pending = table[name].status.state is JobState.PENDING
        return not is_pending or now - self._stopped.get(name, now) < STOP_TRUST_S

    def _claim(self, action: Action, why: str) -> None:
        self._api.post(claim_body(action.submission_id, self._jobs[action.job].nonce, why))

    def _body(self, job: DispatchedJobSpec, number: int) -> Dict[str, Any]:
        body = attempt_body(job, number)
        missing = [secret for secret in job.secrets if secret not in self._secrets]
        if missing:
            raise RequestRefused(f"the dispatcher was started without {', '.join(missing)}")
        key = os.urandom(16).hex()
        body["metadata"][LOCK_KEY] = lock_of(proof_of(key, 0))
        name, data = secrets_package(job, self._secrets, key)
        self._api.put_package(name, data)
        body["runtime_env"]["py_modules"].append(f"gcs://{name}")
        return body

    def _report(self, decision: Decision, table: Mapping[str, Attempt]) -> None:
        """Say one line for every job whose status has changed since the last look."""
        is_first = not self._reported
        for name, status in decision.statuses.items():
            now = f"{status.state.value} {status.attempt} {status.reason.value}"
            if self._reported.get(name) == now:
                continue
            self._reported[name] = now
            self._changed_at = self._clock()
            is_calm = status.state is JobState.WAITING and not status.reason.is_trouble
            if is_first and (is_calm or status.state.is_terminal):
                continue  # there may be thousands, and none happened now
            submission_id = attempt_id(self._jobs[name].id, max(1, status.attempt))
            node = status.node if status.state is JobState.RUNNING else ""
            words = status.detail or (f"on node {node[:12]}" if node else "")
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))
            say(f"{at} {status.state.value} {submission_id} {' '.join(words.split())}".rstrip())
        if is_first:
            say(f"{_count(decision)}; {len(table)} of their rows are in the job table")

    def _complain(self, about: str, text: str) -> None:
        if self._troubles.get(about) != text:
            say(f"{text}; asking again")
            self._troubles[about] = text


def attempt_body(job: DispatchedJobSpec, number: int) -> Dict[str, Any]:
    """The body of the request for a job's n-th attempt."""
    body: Dict[str, Any] = json.loads(json.dumps(job.body))
    name = attempt_id(job.id, number)
    body["submission_id"] = name
    body["entrypoint"] = started_as(body["entrypoint"], name)
    body["runtime_env"]["env_vars"]["NEMO_RUN_ATTEMPT"] = str(number)
    return body


def secrets_package(
    job: DispatchedJobSpec, secrets: Mapping[str, str], key: str
) -> tuple[str, bytes]:
    """Name and contents of the archive with the values of a job's secrets and the key of its end,
    for one attempt."""
    text = json.dumps({name: secrets[name] for name in job.secrets})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in ((SECRETS, text), (KEY, key)):
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o600 << 16
            archive.writestr(info, content)
    digest = hashlib.sha256(f"{job.nonce} {key}".encode()).hexdigest()
    return f"_ray_pkg_{digest[:32]}.zip", buffer.getvalue()


def run(dispatch: DispatchSpec, submission_id: str) -> int:
    """Run the dispatcher's job and return its exit code."""
    memory = memory_bytes()
    limit, chosen = default_limit(memory), "as the experiment asks"
    if dispatch.max_in_flight is None:
        size = f"{HEAD_PART:.0%} of this node's {memory / 2**30:.1f} GiB"
        chosen = f"{size}, at {SUPERVISOR_BYTES / 1e6:.0f} MB a job"
    most = limit if dispatch.max_in_flight is None else dispatch.max_in_flight
    say(f"{len(dispatch.jobs)} jobs, at most {most} at once: {chosen}")
    secrets = read_secrets()
    try:
        api = find_dashboard(dispatch)
        code = Dispatcher(dispatch, submission_id, api, secrets, limit).run()
    except WrongCluster as error:
        say(f"{error}; nothing more is started")
        code = JobExit.WRONG_CLUSTER
    remove_secrets()
    return code


def find_dashboard(
    dispatch: DispatchSpec,
    within_s: float = FOREIGN_MAX_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> DashboardClient:
    """The dashboard that belongs to the dispatch's session, however long it is away.

    Raises:
        WrongCluster: only dashboards of other sessions have answered for ``within_s`` seconds.
    """
    foreign_since: Optional[float] = None
    while foreign_since is None or clock() - foreign_since < within_s:
        for url in candidates(dispatch.dashboards):
            try:
                session = DashboardClient(url, timeout_s=5.0).session()
            except Unanswered:
                continue
            # Where Ray has set the address it is this cluster's; and the dispatches of an
            # allocation continue in the next one, whose Ray has another name.
            if session == dispatch.session or url == own_dashboard():
                return DashboardClient(url)
            foreign_since = clock() if foreign_since is None else foreign_since
        sleep(1.0)
    raise WrongCluster(
        f"other sessions than {dispatch.session} answer here; tried {dispatch.dashboards}"
    )


def default_limit(memory_bytes: int) -> int:
    """The limit of jobs at once for a head of this size, when the user sets none."""
    return max(4, int(memory_bytes * HEAD_PART / SUPERVISOR_BYTES))


def memory_bytes() -> int:
    """This node's memory, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):
            continue  # no such file, or no limit in it
    return total


def _count(decision: Decision) -> str:
    """The count of every state, as in ``3 SUCCEEDED, 1 RUNNING``."""
    states = [status.state for status in decision.statuses.values()]
    return ", ".join(
        f"{states.count(state)} {state.value}" for state in JobState if state in states
    )
