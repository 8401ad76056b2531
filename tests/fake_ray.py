"""A server that answers as Ray's Jobs API does, over simulated jobs whose lives the test tells.

It keeps Ray's rules: an id is given away once, a body is checked by Ray's own code, a stop ends
what lives. ``trouble`` loses requests and answers.
"""

from __future__ import annotations

import contextlib
import json
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from ray._private.label_utils import validate_label_selector
from ray.dashboard.modules.job.common import JobSubmitRequest, validate_request_type

from nemo_run_ray.fields import version_of
from nemo_run_ray.remote.dashboard import LOG_FILE, DashboardClient
from nemo_run_ray.remote.dispatcher import Dispatcher
from nemo_run_ray.remote.spec import NONCE_KEY, DispatchSpec
from nemo_run_ray.remote.status import CANCELLED, CLAIM_KEY, claim_body, first_id
from tests.http_server import Handler, serving

NOW = 1_800_000_000.0
NODE = "f" * 56
OWN, SESSION = "e.dispatcher", "session_2027-01-15_08-00-00_000000_1"


SUCCEEDS = {"status": "SUCCEEDED", "driver_exit_code": 0, "message": "Job finished successfully."}
FAILS = {
    "status": "FAILED",
    "driver_exit_code": 1,
    "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR",
    "message": "Job entrypoint command failed with exit code 1",
}
NODE_DIES = {
    "status": "FAILED",
    "error_type": "JOB_SUPERVISOR_ACTOR_DIED",
    "message": "Job supervisor actor died",
}
#: Another monitor of Ray writes this over an exit code, see ``end_record.py``.
EXIT_CODE_IS_LOST = {
    "status": "FAILED",
    "error_type": "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "message": "Unexpected error occurred: failed to get job supervisor.",
}
START_TIMES_OUT = {
    "status": "FAILED",
    "error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT",
    "message": "Job supervisor actor failed to start within 900.0 seconds.",
}
STOPPED = {"status": "STOPPED", "message": "Job was intentionally stopped."}
GOES_ON = {"status": "RUNNING"}
FINDS_NO_ROOM = {"status": "PENDING"}


@dataclass(frozen=True)
class Trouble:
    """What becomes of a request: an answer of the server's own, or none at all."""

    status: int = 0
    text: str = ""
    is_carried_out: bool = False
    headers: dict[str, str] = field(default_factory=dict)


class FakeRay:
    """Ray's Jobs API over jobs whose lives the test tells.

    Attributes:
        now: seconds since the epoch.
        rows: the job table, by submission id.
        fates: how attempts end, by submission id; what is not here succeeds.
        refuses: status and text that an attempt is answered with, by submission id.
        trouble: what goes wrong with a request, asked with its method and path.
        takes_writes: otherwise everything but a GET fails.
        before_table: called before the job table is read.
        requests: method and path of every one.
        bodies: of the accepted jobs, claims among them.
        taken: ids that were asked for once more.
        overlaps: ids that were started while an older attempt lived or an upstream had not
            succeeded.
        logs: by submission id.
        alive: ids of the nodes that live.
        version: of Ray; before 2.54 it knows no label selectors of jobs.
        tables: rows of the state API, by table; one that is not there is closed.
    """

    def __init__(
        self, plan: DispatchSpec | None = None, session: str = SESSION, now: float = NOW
    ) -> None:
        self.now = now
        self.session = session
        self.rows: dict[str, dict] = {}
        self.fates: dict[str, dict] = {}
        self.refuses: dict[str, tuple[int, str]] = {}
        self.trouble: Callable[[str, str], Trouble | None] = lambda method, path: None
        self.takes_writes = True
        self.before_table: Callable[[], object] = lambda: None
        self.requests: list[tuple[str, str]] = []
        self.bodies: list[dict] = []
        self.sent: list[bytes] = []
        self.packages: dict[str, bytes] = {}
        #: Other files in Ray's folder of logs, by name.
        self.files: dict[str, str] = {}
        self.taken: list[str] = []
        self.logs: dict[str, str] = {}
        self.alive = [NODE]
        self.version = "2.60.0"
        self.tables: dict[str, list[dict]] = {}
        self.overlaps: list[str] = []
        self.lock = threading.RLock()
        self.url = ""
        self._jobs = {job.id: job for job in plan.jobs} if plan else {}
        self._dispatchers = {plan.id} if plan else set()
        if plan:
            self.add(plan.id, {NONCE_KEY: plan.nonce}, status="RUNNING")

    # -------------------------------------------------------------- what tests ask and do

    def api(self) -> DashboardClient:
        return DashboardClient(self.url, timeout_s=10)

    @property
    def started(self) -> list[str]:
        return [one["submission_id"] for one in self.bodies if not is_claim(one)]

    @property
    def claims(self) -> dict[str, str]:
        found = [one for one in self.bodies if is_claim(one)]
        return {one["submission_id"]: one["metadata"][CLAIM_KEY] for one in found}

    @property
    def stops(self) -> list[str]:
        """Ids that were asked to stop."""
        return [path.split("/")[3] for _, path in self.requests if path.endswith("/stop")]

    @property
    def writes(self) -> list[tuple[str, str]]:
        """The requests that may have changed something."""
        return [one for one in self.requests if one[0] != "GET"]

    def posts(self) -> int:
        return self.requests.count(("POST", "/api/jobs/"))

    def status(self, submission_id: str) -> str:
        return self.rows[submission_id]["status"]

    def cancel(self, plan: DispatchSpec) -> None:
        self.post(claim_body(plan.cancel_id, plan.nonce, CANCELLED))

    def pass_time(self, seconds: float) -> None:
        """Every live job takes one step."""
        with self.lock:
            self.now += seconds
            for name, row in self.rows.items():
                if first_id(name) in self._dispatchers and not is_claim(row):
                    continue
                if row["status"] not in ("PENDING", "RUNNING"):
                    continue
                fate = self.fates.get(name, SUCCEEDS)
                starts = row["status"] == "PENDING" and fate is not START_TIMES_OUT
                if starts and fate["status"] != "PENDING":
                    row.update(status="RUNNING", driver_node_id=NODE)
                else:
                    row.update(fate)
                if row["status"] not in ("PENDING", "RUNNING"):
                    row["end_time"] = int(self.now * 1000)

    def dispatch(self, plan: DispatchSpec, rounds: int = 1) -> int | None:
        """Let the dispatcher of a plan that was submitted work; its exit code if it is over.

        Its job runs as long as this is called, and in the test's process.
        """
        own_id = max(name for name in self.rows if first_id(name) == plan.id)
        self._dispatchers.add(plan.id)
        self.rows[own_id].update(status="RUNNING", driver_node_id=NODE)
        one = Dispatcher(plan, own_id, self.api(), {}, lambda: self.now)
        for _ in range(rounds):
            code = one.round()
            if code is not None:
                self.rows[own_id].update(
                    status="SUCCEEDED" if code == 0 else "FAILED",
                    driver_exit_code=code,
                    end_time=int(self.now * 1000),
                )
                return code
            self.pass_time(1.0)
        return None

    # -------------------------------------------------------------- Ray's side

    def add(self, name: str, metadata: dict[str, str], **fields) -> None:
        self.rows[name] = {
            "type": "SUBMISSION",
            "job_id": None,
            "submission_id": name,
            "driver_info": None,
            "status": "PENDING",
            "entrypoint": "true",
            "message": None,
            "error_type": None,
            "start_time": int(self.now * 1000),
            "end_time": None,
            "metadata": metadata,
            "runtime_env": {},
            "driver_agent_http_address": None,
            "driver_node_id": None,
            "driver_exit_code": None,
            **fields,
        }

    def answer(self, method: str, path: str, data: bytes) -> tuple[int, str]:
        path, _, query = path.partition("?")
        parts = [unquote(one) for one in path.split("/")[2:]]
        if (method, path) == ("GET", "/api/version"):
            version = {"version": "4", "ray_version": self.version, "session_name": self.session}
            return 200, json.dumps({**version, "ray_commit": "0"})
        if (method, path) == ("GET", "/api/jobs/"):
            driver = {"type": "DRIVER", "job_id": "01000000", "submission_id": None}
            rows = [driver, *reversed(self.rows.values())]
            return 200, json.dumps([{**row, "status": row.get("status")} for row in rows])
        if (method, path) == ("POST", "/api/jobs/"):
            return self.post(json.loads(data))
        if method == "POST" and parts[:1] == ["jobs"] and parts[2:] == ["stop"]:
            return self._stop(parts[1])
        if method == "GET" and parts[:1] == ["jobs"] and parts[2:] in ([], ["logs"]):
            return self._told(parts[1], "logs" in parts)
        if (method, path) == ("GET", LOG_FILE):
            return self._log_file(dict(parse_qsl(query)))
        tables = {"nodes": self._nodes(), **self.tables}
        if parts[:1] == ["v0"] and parts[-1] in tables:
            return 200, json.dumps({"data": {"result": {"result": tables[parts[-1]]}}})
        if parts[:2] == ["packages", "gcs"] and len(parts) == 3:
            if method == "PUT":
                self.packages[parts[2]] = data
                return 200, ""
            return (200, "") if parts[2] in self.packages else (404, "Package does not exist")
        return 404, "404: Not Found"

    def post(self, body: dict) -> tuple[int, str]:
        try:
            validate_request_type(body, JobSubmitRequest)
        except Exception:
            return 400, traceback.format_exc()
        if "entrypoint_label_selector" in body and version_of(self.version) < (2, 54):
            unexpected = "got an unexpected keyword argument 'entrypoint_label_selector'"
            return 400, f"Traceback …\nTypeError: JobSubmitRequest.__init__() {unexpected}"
        name = body["submission_id"]
        error = validate_label_selector(body.get("entrypoint_label_selector") or {})
        if error:
            return 500, of_the_agent(error)
        if name in self.rows:
            self.taken.append(name)
            return 500, of_the_agent(
                f"Job with submission_id {name} already exists. "
                "Please use a different submission_id."
            )
        if not is_claim(body):
            if name in self.refuses:
                return self.refuses[name]
            self._check(name)
        self.bodies.append(body)
        fields = {"entrypoint": body["entrypoint"], "runtime_env": body.get("runtime_env") or {}}
        self.add(name, body.get("metadata") or {}, **fields)
        return 200, json.dumps({"job_id": name, "submission_id": name})

    def _nodes(self) -> list[dict]:
        row = {"state": "ALIVE", "node_ip": "127.0.0.1", "labels": {}, "resources_total": {}}
        return [{"node_id": one, "node_name": one, **row} for one in self.alive]

    def _told(self, name: str, is_log: bool) -> tuple[int, str]:
        if name not in self.rows:
            return 404, f"Job {name} does not exist"
        return 200, json.dumps({"logs": self.logs.get(name, "")} if is_log else self.rows[name])

    def _log_file(self, query: dict[str, str]) -> tuple[int, str]:
        """As Ray's state API, which says what it lacks with the status 500."""
        if query["node_id"] not in self.alive:
            return 500, f"Agent for node id: {query['node_id']} doesn't exist."
        if query["filename"] in self.files:
            return 200, self.files[query["filename"]]
        name = query["filename"].removeprefix("job-driver-").removesuffix(".log")
        if self.rows.get(name, {}).get("driver_node_id") != query["node_id"]:
            return 500, f"A file is not found at: /tmp/ray/session/logs/{query['filename']}"
        lines, count = self.logs.get(name, "").splitlines(keepends=True), int(query["lines"])
        return 200, "".join(lines if count < 0 else lines[-count:])

    def _check(self, name: str) -> None:
        job = self._jobs.get(first_id(name))
        if job is None:  # nobody has told of its order
            return
        needs = [one.id for one in self._jobs.values() if one.name in job.after]
        attempts = {one: row for one, row in self.rows.items() if first_id(one) == job.id}
        lives = any(row["status"] in ("PENDING", "RUNNING") for row in attempts.values())
        proven = {first_id(one) for one, row in self.rows.items() if row["status"] == "SUCCEEDED"}
        if lives or job.id in proven or not proven.issuperset(needs):
            self.overlaps.append(name)

    def _stop(self, name: str) -> tuple[int, str]:
        if name not in self.rows:
            return 404, f"Job {name} does not exist"
        alive = self.rows[name]["status"] in ("PENDING", "RUNNING")
        if alive and self.fates.get(name, SUCCEEDS) is not FINDS_NO_ROOM:
            self.fates[name] = STOPPED
        return 200, json.dumps({"stopped": alive})


def is_claim(job: dict) -> bool:
    return CLAIM_KEY in (job.get("metadata") or {})


def of_the_agent(words: str) -> str:
    """How Ray 2.60 hands on what the agent of the head refuses with a ValueError.

    The agent answers 400 with its traceback; ``JobAgentSubmissionClient`` makes a RuntimeError of
    it, and the dashboard answers 500 with the traceback of that.
    """
    head = "Traceback (most recent call last):\n"
    inner = f'{head}  File "job_agent.py", line 54, in submit_job\nValueError: {words}\n'
    return (
        f'{head}  File "job_head.py", line 407, in submit_job\n'
        f"RuntimeError: Request failed with status code 400: {inner}.\n"
    )


class _Handler(Handler):
    ray: FakeRay

    def answer(self) -> None:
        ray = self.ray
        data = self.body()
        if self.path == "/api/jobs/":
            ray.before_table()
        with ray.lock:
            ray.requests.append((self.command, self.path))
            ray.sent.append(data)
            trouble = ray.trouble(self.command, self.path)
            if self.command != "GET" and not ray.takes_writes:
                trouble = Trouble(500, "Nothing may be written.")
            status, text = trouble.status if trouble else 0, trouble.text if trouble else ""
            if trouble is None or trouble.is_carried_out:
                given = ray.answer(self.command, self.path, data)
                status, text = given if trouble is None else (status, text)
        if status:
            self.send(status, text, **(trouble.headers if trouble else {}))
        else:
            self.close_connection = True


@contextlib.contextmanager
def fake_ray(
    plan: DispatchSpec | None = None, session: str = SESSION, now: float = NOW
) -> Iterator[FakeRay]:
    """Serve one until the end of the block."""
    ray = FakeRay(plan, session, now)
    with serving(_Handler, ray=ray) as ray.url:
        yield ray
