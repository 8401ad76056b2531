"""How far Ray is with a runtime environment that it builds, for a job that has not started yet.

Ray calls such a job PENDING for minutes, also while it fails to build and tries again. Its state
API and the log of the agent that builds say more. They explain; nothing is decided by them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_run_ray.dashboard.recent import Recent
from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.remote.env_error import cause_of
from nemo_run_ray.remote.rows import JobRow, fits
from nemo_run_ray.remote.states import JobState, JobStatus, Reason
from nemo_run_ray.runtime_env import brings_python

#: File of the agent on each node that builds runtime environments, and how much of it is read.
AGENT_LOG, AGENT_LOG_LINES = "runtime_env_agent.log", 2000
#: Seconds that one answer serves every caller in this process: while Ray builds, and while it does
#: not (the state API asks every node).
_AGE_S, _IDLE_AGE_S = 3.0, 15.0
#: Seconds that a build is told of as it was seen last. A node's agent does not answer for some of
#: them while it builds, and then Ray leaves the node's builds out of the list.
_TOLD_AGE_S = 60.0
#: Nodes whose agents' logs are read when Ray does not tell what is built, the head first.
_NODES_MAX = 3
_BEGINS = re.compile(
    r"runtime_env_agent\.py:\d+ -- Creating runtime env: (?P<env>\{.*\}) with timeout "
)
_FAILED = re.compile(
    r"runtime_env_agent\.py:\d+ -- Failed to create runtime env (?P<env>\{.*\})\.$"
)
_BUILT = re.compile(
    r"runtime_env_agent\.py:\d+ -- Successfully created runtime env: (?P<env>\{.*\}), context: "
)
#: How a line of the agent's log begins; what does not belongs to the one before.
_DATED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s")


class EnvBuilds:
    """The builds of one cluster.

    Args:
        environments: asks Ray's state API for the runtime environments of all nodes.
        agent_log: gives the end of a node's ``AGENT_LOG``.
        nodes: gives the living nodes, the head first.
        tries: how often Ray builds an environment there; ``None`` where that is not known.
    """

    def __init__(
        self,
        environments: Callable[[], Sequence[Mapping[str, Any]]],
        agent_log: Callable[[str], str],
        nodes: Callable[[], Sequence[str]],
        tries: int | None = None,
    ) -> None:
        self._tries = tries
        self._environments = Recent(
            lambda _: [env for env in environments() if _is_of_interest(env)],
            _AGE_S,
            _IDLE_AGE_S,
        )
        self._agent_log = Recent(agent_log, _AGE_S, _IDLE_AGE_S)
        self._nodes = Recent(lambda _: nodes(), _IDLE_AGE_S, _IDLE_AGE_S)
        #: What was told last of each environment, and when, by the monotonic clock.
        self._told: dict[str, tuple[JobStatus, float]] = {}

    def explain(self, row: JobRow, status: JobStatus) -> JobStatus:
        """The status of a pending job with what its runtime environment waits for.

        Args:
            row: the job in Ray's table.
            status: what the row says.
        """
        runtime_env = row.get("runtime_env") or {}
        if status.state is not JobState.PENDING or not brings_python(runtime_env):
            return status
        key = json.dumps(_key(runtime_env), sort_keys=True)
        try:
            listed = self._listed()
            found = self._as_listed(listed, runtime_env) if listed else self._as_logged(runtime_env)
            if found is not None:
                self._told[key] = found, time.monotonic()
        except NemoRunRayError:
            pass  # this only explains
        told, told_at = self._told.get(key, (status, 0.0))
        return told if time.monotonic() - told_at <= _TOLD_AGE_S else status

    def _listed(self) -> Sequence[Mapping[str, Any]]:
        """What Ray builds, or failed to. While a node's agent builds, it may not answer for a
        minute; then Ray leaves out what is there, or does not answer either.
        """
        try:
            return self._environments.get()
        except NemoRunRayError:
            return ()

    def _as_listed(
        self, listed: Sequence[Mapping[str, Any]], runtime_env: Mapping[str, Any]
    ) -> JobStatus | None:
        found = [env for env in listed if _key(env["runtime_env"]) == _key(runtime_env)]
        building = [str(env["node_id"]) for env in found if env.get("success") is None]
        if building:
            failed = failures(self._agent_log.get(building[0]), runtime_env)
            return self._status(failed, building[0])
        if found:  # it failed for good, which Ray's table of jobs has not got yet
            node = str(found[-1]["node_id"])
            failed = failures(self._agent_log.get(node), runtime_env)
            return self._status(failed, node, is_last=True) if failed else None
        return None

    def _as_logged(self, runtime_env: Mapping[str, Any]) -> JobStatus | None:
        """What the agents' logs say, which another process gives than the one that builds."""
        for node in self._nodes.get()[:_NODES_MAX]:
            text = self._agent_log.get(node)
            if _is_building(text, runtime_env):
                return self._status(failures(text, runtime_env), node)
        return None

    def _status(self, failed: Sequence[str], node: str, is_last: bool = False) -> JobStatus:
        where = f"on node {node[:12]}"
        if not failed:
            detail = f"Ray builds its runtime environment {where}"
            return JobStatus(JobState.PENDING, Reason.BUILDING, detail)
        times = "once" if len(failed) == 1 else f"{len(failed)} times"
        detail = f"Ray failed {times} to build its runtime environment {where}: {failed[-1]}"
        is_last = is_last or (self._tries is not None and len(failed) >= self._tries)
        reason = Reason.RUNTIME_ENV if is_last else Reason.REBUILDING
        return JobStatus(JobState.PENDING, reason, detail)


def _is_building(agent_log: str, runtime_env: Mapping[str, Any]) -> bool:
    """Whether a node has begun to build an environment, and it is not built."""
    key = _key(runtime_env)
    is_building = False
    for line in agent_log.splitlines():
        for pattern, says in ((_BEGINS, True), (_FAILED, True), (_BUILT, False)):
            match = pattern.search(line)
            if match and _is_of(match["env"], key):
                is_building = says
    return is_building


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


def _is_of_interest(row: Mapping[str, Any]) -> bool:
    """Whether Ray builds it, or failed to."""
    is_build = fits(row, {"runtime_env": dict, "node_id": str})
    return is_build and bool(row["runtime_env"]) and not row.get("success")


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
    except (ValueError, AttributeError, RecursionError):
        return False  # a Ray that writes it otherwise
