"""Ray on three hosts of one machine, each with addresses, processes and a cable of its own."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from nemo_run_ray import ExistingCluster
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ClusterError
from tests import groups
from tests.conftest import processes_where, wait_for
from tests.hosts.head import ADDRESS as HEAD
from tests.hosts.head import FIRST, REDIS, REDIS_HOST, Head, address_of, bed, namespace_of, share

TOKEN = "a5" * 32
#: n1 to n3 are Ray's, n4 has the Redis, and n5 is a user's own machine.
COUNT = 5
#: Every host is a pool of its own by its label, and has these things to give.
POOLS = {"n1": ("client", 2, {}), "n2": ("gpu", 2, {"worker": 2}), "n3": ("cpu", 2, {})}


def _setting(name: str, seconds: int) -> str:
    """One of Ray's settings, which a run of these tests can choose for itself."""
    return f"{name}={os.environ.get(name, seconds)}"


class Hosts:
    """The hosts n1 (Ray's head), n2 and n3, and what can happen to them."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.cluster = ExistingCluster(url=f"http://{HEAD}:8265", token=TOKEN)
        token = logs / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        path = f"PATH={Path(sys.executable).parent}:$PATH"
        # /tmp/ray is a folder of each host's own; the rest of the file system is one for all.
        auth = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}"
        # A raylet whose head is away ends after this time, and a busy machine's head needs long.
        # Where no head is away, Ray's own 60 s make a lost host's end known sooner.
        patient = _setting("RAY_gcs_rpc_server_reconnect_timeout_s", 150)
        self._env = f"env TMPDIR={logs} RAY_TMPDIR=/tmp {patient} {auth} {path}"
        # A job that was about to start when the head died is given up after this time. Ray's own
        # 900 s are for tests that start many jobs at once and leave the head alone.
        head = f"{self._env} {_setting('RAY_JOB_START_TIMEOUT_SECONDS', 20)}"
        self.head = Head(logs, head, self._options("n1"), lambda: answers(self.api))

    @property
    def api(self) -> JobsApi:
        return JobsApi.of(self.cluster.connect())

    def start_worker(self, name: str) -> None:
        ray = f"{sys.executable} -m ray.scripts.scripts start --block --disable-usage-stats"
        command = (
            f"{FIRST} {self._env} {ray} --address={HEAD}:6379 --node-ip-address={address_of(name)} "
            f"{self._options(name)}"
        )
        bed("spawn", name, str(self.logs / f"{name}.log"), "--", "sh", "-c", command)

    def start_anew(self, keeps_its_table: bool) -> None:
        """A head that knows nothing of the last one, and its workers."""
        for name in ("n2", "n3"):
            bed("crash", name)
        bed("exec", REDIS_HOST, "--", "redis-cli", "-h", REDIS, "flushall")
        self.head.start(keeps_its_table)
        bed("up", str(COUNT))
        self.start_worker("n2")
        self.start_worker("n3")
        self.wait_for_nodes("n1", "n2", "n3")

    def wait_for_nodes(self, *names: str) -> None:
        """Until Ray counts exactly these hosts as alive."""
        wanted = {address_of(name) for name in names}
        wait_for(lambda: {row["node_ip"] for row in self.state("nodes", "ALIVE")} == wanted, 120)
        for name in names:
            share(name)

    def state(self, kind: str, state: str) -> list[dict]:
        """What Ray's state API has of ``nodes``, ``actors`` or ``placement_groups``."""
        answer = self.get(f"/api/v0/{kind}?detail=true&limit=5000")
        return [row for row in answer["data"]["result"]["result"] if row["state"] == state]

    def leftovers(self) -> list[str]:
        """What groups hold on the cluster: actors, placement groups, resources."""
        found = [f"actor {one['class_name']}" for one in self.state("actors", "ALIVE")]
        found += [f"placement group {row}" for row in self.state("placement_groups", "CREATED")]
        found += [f"placement group {row}" for row in self.state("placement_groups", "PENDING")]
        usage = self.get("/api/cluster_status")["data"]["clusterStatus"]["loadMetricsReport"][
            "usage"
        ]
        found += [
            f"{key} {used}" for key, (used, _) in usage.items() if key in ("CPU", "worker") and used
        ]
        return found

    def processes(self, wanted: Callable[[int, list[str]], bool]) -> list[int]:
        """The processes of these hosts, and of nobody else."""
        spaces = {namespace_of(name) for name in POOLS}

        def is_here(pid: int, words: list[str]) -> bool:
            return os.readlink(f"/proc/{pid}/ns/pid") in spaces and wanted(pid, words)

        return processes_where(is_here)

    def server(self, *program: str, **fields: object) -> groups.Role:
        return server(*program, **fields)

    def client(self, *program: str, **fields: object) -> groups.Role:
        return client(*program, **fields)

    def get(self, path: str) -> dict:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.get(f"{self.cluster.url}{path}", headers=headers, timeout=20).json()

    def revive(self, name: str) -> None:
        """Bring a host that was crashed, or whose Ray has given up, back into the cluster."""
        bed("crash", name)
        bed("up", str(COUNT))
        self.start_worker(name)

    def _options(self, name: str) -> str:
        pool, cpus, resources = POOLS[name]
        # Nobody reads here what the monitor would send, and it reads all logs all the time.
        options = f"--include-log-monitor=false --num-cpus={cpus} --labels=pool={pool}"
        return f"{options} --resources='{json.dumps(resources)}'"


def server(*program: str, **fields) -> groups.Role:
    """A service in the pool of n2, unless the fields say otherwise."""
    return groups.server(*program, **{"label_selector": {"pool": "gpu"}, **fields})


def client(*program: str, **fields) -> groups.Role:
    """A primary in the pool of n1, unless the fields say otherwise."""
    return groups.client(*program, **{"label_selector": {"pool": "client"}, **fields})


def answers(api: JobsApi) -> bool:
    try:
        return bool(api.version(patience_s=0))
    except ClusterError:
        return False


@pytest.fixture(scope="package")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the program ip (Debian: iproute2)")
    if shutil.which("redis-server") is None:
        pytest.skip("Ray's tables outlive its head in a redis-server (Debian: redis-server)")
    found = Hosts(tmp_path_factory.mktemp("hosts"))
    bed("down")  # of a test process that was killed
    bed("up", str(COUNT))
    try:
        found.head.start_redis()
        found.head.start()
        found.start_worker("n2")
        found.start_worker("n3")
        found.wait_for_nodes("n1", "n2", "n3")
        yield found
    finally:
        bed("down")


@pytest.fixture(autouse=True)
def whole(hosts: Hosts) -> None:
    """A test that fails may leave the cluster broken; the next one shall not fail for that."""
    if not answers(hosts.api) or len(hosts.state("nodes", "ALIVE")) < len(POOLS):
        hosts.head.kill()
        hosts.start_anew(keeps_its_table=True)
