"""The two platforms, over HTTP: the endpoints that NeMo-Run's executors call, and the limits.

They refuse what they do not know, and run what they get (``pods.py``).
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from tests.cloud.pods import Cluster, Workload
from tests.http_server import Handler, serving

#: A value of run:ai's API: a variable's, the command, its arguments.
RUNAI_CHARS = 10_000
#: An object in etcd.
OBJECT_BYTES = 1_572_864


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """An HTTP server on a free port, with the requests that it answered."""

    prefix = ""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.requests: list[tuple[str, str, int]] = []
        self.routes: list[tuple[str, re.Pattern[str], Callable[..., Any]]] = []
        self._serving = ExitStack()
        self.url = self._serving.enter_context(serving(_Handler, platform=self)) + self.prefix

    def close(self) -> None:
        self._serving.close()
        self.cluster.close()

    def route(self, method: str, path: str, answer: Callable[..., Any]) -> None:
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
        self.routes.append((method, re.compile(self.prefix + pattern), answer))

    def reply(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, Any]:
        """Status and content: bytes as they are, or what JSON can say."""
        try:
            for known, pattern, answer in self.routes:
                found = pattern.fullmatch(path)
                if known == method and found:
                    sent = json.loads(body) if body and method != "GET" else None
                    status, answered = 200, answer(headers, sent, **found.groupdict())
                    break
            else:
                raise Refused(404, f"no endpoint {method} {path}")
        except Refused as error:
            status, answered = error.status, {"code": error.status, "message": str(error)}
        self.requests.append((method, path, status))
        return status, answered

    def _find(self, number: str, *kinds: str) -> Workload:
        found = self.cluster.workloads.get(number)
        if found is None or (kinds and found.kind not in kinds):
            raise Refused(404, f"no workload {number}")
        return found


class _Handler(Handler):
    platform: Server

    def answer(self) -> None:
        path = urlsplit(self.path).path
        status, found = self.platform.reply(self.command, path, dict(self.headers), self.body())
        content = found if isinstance(found, bytes) else json.dumps(found)
        self.send(status, content, Content_Type="application/json")


def known_fields(sent: Any, names: set[str], where: str) -> None:
    if not isinstance(sent, dict) or not set(sent) <= names:
        raise Refused(400, f"unknown fields in {where}: {sorted(set(sent) - names)}")


class RunAI(Server):
    """run:ai's REST API, version 1."""

    prefix = "/api/v1"
    client = ("id", "secret")

    def __init__(self, cluster: Cluster) -> None:
        self._token = secrets.token_hex(16)
        super().__init__(cluster)
        self.route("POST", "/token", self._token_of)
        self.route("GET", "/org-unit/projects", self._projects)
        for kind in ("workspaces", "trainings", "distributed"):
            self.route("POST", f"/workloads/{kind}", self._creating(kind))
            self.route("GET", f"/workloads/{kind}/{{number}}", self._looking(kind))
            self.route("DELETE", f"/workloads/{kind}/{{number}}", self._deleting(kind))

    def _token_of(self, headers: dict[str, str], sent: Any) -> Any:
        names = {
            "client_credentials": ("clientId", "clientSecret"),
            "app_token": ("appId", "appSecret"),
        }.get(sent.get("grantType"))
        if names is None or set(sent) != {"grantType", *names}:
            raise Refused(400, f"unknown grant: {sorted(sent)}")
        if (sent[names[0]], sent[names[1]]) != self.client:
            raise Refused(401, "the client's credentials are invalid or were revoked")
        return {"accessToken": self._token, "expiresIn": 3600, "tokenType": "Bearer"}

    def _check(self, headers: dict[str, str]) -> None:
        if headers.get("Authorization") != f"Bearer {self._token}":
            raise Refused(401, "unauthorized")

    def _projects(self, headers: dict[str, str], sent: Any) -> Any:
        self._check(headers)
        return {"projects": [{"id": "1", "name": "project", "clusterId": "c-1"}]}

    def _creating(self, kind: str) -> Callable[..., Any]:
        common = {"command", "args", "image", "compute", "storage", "environmentVariables"}
        extra = {"distributedFramework", "minReplicas", "maxReplicas", "numWorkers"}

        def create(headers: dict[str, str], sent: Any) -> Any:
            self._check(headers)
            known_fields(
                sent,
                {"name", "useGivenNameAsPrefix", "projectId", "clusterId", "spec"},
                "the workload",
            )
            spec = sent["spec"]
            known_fields(spec, common | (extra if kind == "distributed" else set()), "spec")
            self._check_sizes(kind, spec)
            variables = [
                (one["name"], one["value"]) for one in spec.get("environmentVariables", ())
            ]
            argv = shlex.split(spec["command"]) + shlex.split(spec.get("args", ""))
            mounts = {one["path"]: str(self.cluster.shared) for one in spec["storage"]["pvc"]}
            count = spec.get("numWorkers", 1)
            made = self.cluster.add(kind, sent["name"], argv, variables, mounts, count)
            return {"workloadId": made.id, "actualPhase": "Creating", "name": made.name}

        return create

    def _check_sizes(self, kind: str, spec: Any) -> None:
        for name in ("command", "args"):
            if len(spec.get(name, "")) > RUNAI_CHARS:
                raise Refused(400, f"spec.{name} must be at most {RUNAI_CHARS} characters")
        for one in spec.get("environmentVariables", ()):
            known_fields(one, {"name", "value"}, "an environment variable")
            if not re.fullmatch(r"[A-Za-z_][\w.-]*", one["name"], re.ASCII):
                raise Refused(400, f"the variable's name {one['name']!r} is invalid")
            if len(one["value"]) > RUNAI_CHARS:
                raise Refused(
                    400, f"environmentVariables.value must be at most {RUNAI_CHARS} characters"
                )
        templates = 2 if kind == "distributed" else 1  # master and workers
        size = templates * len(json.dumps(spec))
        if size > OBJECT_BYTES:
            raise Refused(413, f"etcdserver: request is too large ({size} bytes)")

    def _looking(self, kind: str) -> Callable[..., Any]:
        def look(headers: dict[str, str], sent: Any, number: str) -> Any:
            self._check(headers)
            found = self._find(number)
            return {"workloadId": number, "actualPhase": _phase(found)}

        return look

    def _deleting(self, kind: str) -> Callable[..., Any]:
        def delete(headers: dict[str, str], sent: Any, number: str) -> Any:
            self._check(headers)
            self._find(number, kind).kill()
            del self.cluster.workloads[number]
            return {}

        return delete


def _phase(workload: Workload) -> str:
    codes = workload.codes()
    if None in codes:
        return "Running"
    return "Failed" if any(codes) else "Completed"


_JOB = {"metadata", "spec"}
_METADATA = {"id", "name", "visibility"}
_SPEC = {
    *("resource_shape", "affinity", "container", "shared_memory_size", "completions"),
    *("parallelism", "envs", "mounts", "image_pull_secrets", "ttl_seconds_after_finished"),
    *("intra_job_communication", "queue_config", "reservation_config", "stopped"),
    *("max_failure_retry", "max_job_failure_retry", "privileged"),
}


class Lepton(Server):
    """A Lepton workspace's API, version 2."""

    prefix = "/api/v2/workspaces/test"
    token = "lepton-token"
    _GROUP = "group-1"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._jobs: dict[str, Workload] = {}
        self.route("GET", "/dedicated-node-groups", self._groups)
        self.route("GET", "/dedicated-node-groups/{number}/nodes", self._nodes)
        self.route("POST", "/jobs", self._create)
        self.route("GET", "/jobs/{number}", self._look)
        self.route("DELETE", "/jobs/{number}", self._delete)
        self.route("GET", "/jobs/{number}/replicas", self._replicas)
        self.route("GET", "/jobs/{number}/replicas/{replica}/log", self._log)

    def _check(self, headers: dict[str, str]) -> None:
        if headers.get("Authorization") != f"Bearer {self.token}":
            raise Refused(401, "the workspace does not know this token")

    def _groups(self, headers: dict[str, str], sent: Any) -> Any:
        self._check(headers)
        return [{"metadata": {"id": self._GROUP, "name": "group"}, "spec": {}, "status": {}}]

    def _nodes(self, headers: dict[str, str], sent: Any, number: str) -> Any:
        self._check(headers)
        if number != self._GROUP:
            raise Refused(404, f"no node group {number}")
        return [{"metadata": {"id": "node-1"}, "spec": {"unschedulable": False}, "status": {}}]

    def _create(self, headers: dict[str, str], sent: Any) -> Any:
        self._check(headers)
        known_fields(sent, _JOB, "the job")
        known_fields(sent["metadata"], _METADATA, "metadata")
        spec = sent["spec"]
        known_fields(spec, _SPEC, "spec")
        number = sent["metadata"]["id"]
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,34}[a-z0-9])?", number):
            raise Refused(400, f"the name {number!r} is not a valid name")
        if number in self._jobs:
            raise Refused(409, f"there is a job {number!r}")
        size = len(json.dumps(sent))
        if size > OBJECT_BYTES:
            raise Refused(413, f"etcdserver: request is too large ({size} bytes)")
        for one in spec.get("envs", ()):
            known_fields(one, {"name", "value"}, "a variable")
        variables = [(one["name"], one["value"]) for one in spec.get("envs", ())]
        mounts = {one["mount_path"]: str(self.cluster.shared) for one in spec["mounts"]}
        kind = "mover" if number.startswith("data-mover") else "job"
        made = self.cluster.add(
            kind, number, spec["container"]["command"], variables, mounts, spec["parallelism"]
        )
        self._jobs[number] = made
        return self._shown(number, made)

    def _shown(self, number: str, job: Workload) -> Any:
        codes = job.codes()
        state = {"Running": "Running", "Failed": "Failed", "Completed": "Completed"}[_phase(job)]
        active = codes.count(None)
        status = {"job_name": number, "state": state, "ready": active, "active": active}
        return {"metadata": {"id": number, "name": number}, "spec": {}, "status": status}

    def _job(self, number: str) -> Workload:
        if number not in self._jobs:
            raise Refused(404, f"no job {number}")
        return self._jobs[number]

    def _look(self, headers: dict[str, str], sent: Any, number: str) -> Any:
        self._check(headers)
        return self._shown(number, self._job(number))

    def _delete(self, headers: dict[str, str], sent: Any, number: str) -> Any:
        self._check(headers)
        self._job(number).kill()
        del self._jobs[number]
        return {}

    def _replicas(self, headers: dict[str, str], sent: Any, number: str) -> Any:
        self._check(headers)
        names = [f"{number}-{rank}-x" for rank in range(len(self._job(number).pods))]
        return [{"metadata": {"id": one}, "id": one} for one in names]

    def _log(self, headers: dict[str, str], sent: Any, number: str, replica: str) -> Any:
        self._check(headers)
        rank = int(replica.removeprefix(f"{number}-").partition("-")[0])
        return self._job(number).pods[rank].log().encode()
