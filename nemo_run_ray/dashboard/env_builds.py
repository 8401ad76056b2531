"""How far Ray is with a runtime environment that it builds, for a job that has not started yet.

Ray calls such a job PENDING for minutes, also while it fails to build and tries again. Its state
API and the log of the agent that builds say more. They explain; nothing is decided by them.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.remote.env_error import cause_of
from nemo_run_ray.remote.rows import JobRow
from nemo_run_ray.remote.states import JobState, JobStatus, Reason
from nemo_run_ray.runtime_env import brings_python

#: File of the agent on each node that builds runtime environments, and how much of it is read.
AGENT_LOG, AGENT_LOG_LINES = "runtime_env_agent.log", 600
#: Seconds that one answer serves every caller in this process: while Ray builds, while it does not
#: (the state API asks every node), and after a failure.
_AGE_S, _IDLE_AGE_S, _FAILED_AGE_S = 3.0, 15.0, 30.0
_BEGINS = re.compile(
    r"runtime_env_agent\.py:\d+ -- Creating runtime env: (?P<env>\{.*\}) with timeout "
)
_FAILED = re.compile(
    r"runtime_env_agent\.py:\d+ -- Failed to create runtime env (?P<env>\{.*\})\.$"
)
#: How a line of the agent's log begins; what does not belongs to the one before.
_DATED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s")


class EnvBuilds:
    """The builds of one cluster.

    Args:
        environments: asks Ray's state API for the runtime environments of all nodes.
        agent_log: gives the end of a node's ``AGENT_LOG``.
    """

    def __init__(
        self,
        environments: Callable[[], Sequence[Mapping[str, Any]]],
        agent_log: Callable[[str], str],
    ) -> None:
        self._environments = _Recent(lambda _: [env for env in environments() if _is_built(env)])
        self._agent_log = _Recent(agent_log)

    def explain(self, row: JobRow, status: JobStatus) -> JobStatus:
        """The status of a pending job with what its runtime environment waits for.

        Args:
            row: the job in Ray's table.
            status: what the row says.
        """
        runtime_env = row.get("runtime_env") or {}
        if status.state is not JobState.PENDING or not brings_python(runtime_env):
            return status
        try:
            for found in self._environments.get(""):
                if _key(found["runtime_env"]) == _key(runtime_env):
                    node = str(found["node_id"])
                    return _told(failures(self._agent_log.get(node), runtime_env), node)
        except NemoRunRayError:
            return status  # this only explains
        return status


def failures(agent_log: str, runtime_env: Mapping[str, Any]) -> list[str]:
    """Why the build of an environment has failed so far, one line for each time.

    Args:
        agent_log: the end of the agent's log.
        runtime_env: the environment.
    """
    key = _key(runtime_env)
    found: list[str] = []
    text: list[str] | None = None  # of the failure that is being read
    for line in agent_log.splitlines():
        if text is not None and not _DATED.match(line):
            text.append(line)
            continue
        if text is not None:
            found.append(cause_of("\n".join(text)))
        failed, begins = _FAILED.search(line), _BEGINS.search(line)
        text = [] if failed and _is_of(failed["env"], key) else None
        if begins and _is_of(begins["env"], key):
            found = []
    return found if text is None else [*found, cause_of("\n".join(text))]


def _is_built(row: Mapping[str, Any]) -> bool:
    """Whether Ray is building it: it has neither succeeded nor failed."""
    return row.get("success") is None and bool(row.get("runtime_env"))


def _key(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """What tells an environment from all others, also from those of the same experiment.

    Ray writes a list of packages as a dict, with fields that the user did not give.
    """
    key = {}
    for name in ("py_modules", "pip", "uv", "conda", "image_uri", "container"):
        value = runtime_env.get(name)
        key[name] = value.get("packages", value) if isinstance(value, dict) else value
    return key


def _is_of(environment: str, key: Mapping[str, Any]) -> bool:
    try:
        return _key(json.loads(environment)) == key
    except (ValueError, AttributeError):
        return False  # a Ray that writes it otherwise


def _told(failed: Sequence[str], node: str) -> JobStatus:
    where = f"on node {node[:12]}"
    if not failed:
        detail = f"Ray builds its runtime environment {where}"
        return JobStatus(JobState.PENDING, Reason.BUILDING, detail)
    times = "once" if len(failed) == 1 else f"{len(failed)} times"
    detail = f"Ray failed {times} to build its runtime environment {where}: {failed[-1]}"
    return JobStatus(JobState.PENDING, Reason.REBUILDING, detail)


class _Recent:
    """Answers that serve all callers for a while, and failures too, which take long to come."""

    def __init__(self, ask: Callable[[str], Any]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answers: dict[str, _Answer] = {}

    def get(self, name: str) -> Any:
        with self._lock:
            answer = self._answers.setdefault(name, _Answer())
        with answer.lock:
            if time.monotonic() >= answer.ask_at:
                try:
                    answer.value, answer.error = self._ask(name), None
                    age_s = _AGE_S if answer.value else _IDLE_AGE_S
                except NemoRunRayError as failure:
                    answer.error, age_s = failure, _FAILED_AGE_S
                answer.ask_at = time.monotonic() + age_s
            if answer.error is not None:
                raise answer.error
            return answer.value


@dataclass
class _Answer:
    """The last answer to one question, and when it is to be asked again."""

    value: Any = None
    error: NemoRunRayError | None = None
    ask_at: float = -1e9
    lock: threading.Lock = field(default_factory=threading.Lock)
