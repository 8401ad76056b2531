"""A task that is itself a Ray program, on two hosts with addresses and processes of their own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray import ExistingCluster, RayExecutor
from nemo_run_ray.jobs_api import JobsApi
from nemo_run_ray.remote_job import RemoteJob
from tests.conftest import wait_for

TESTBED = Path(__file__).with_name("testbed.py")
TOKEN = "a5" * 32
PROGRAM = """
import json, os, socket
import ray
import shipped

ray.init({arguments})

@ray.remote(num_cpus=1, resources={{"worker": 1}})
class Actor:
    def look(self):
        import shipped
        return socket.gethostname(), shipped.double(21), os.environ.get("EXTRA", "")

there = ray.get(Actor.remote().look.remote())
print("RESULT", json.dumps([socket.gethostname(), list(there), shipped.double(1)]))
"""


def bed(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(TESTBED), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Ray's head on n1 and a worker on n2."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the program ip (Debian: iproute2)")
    logs = tmp_path_factory.mktemp("hosts")
    token = logs / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    bed("up", "2")
    ray = f"{sys.executable} -m ray.scripts.scripts start --block --disable-usage-stats"
    path = f"PATH={Path(sys.executable).parent}:$PATH"
    env = f"env TMPDIR={logs} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token} {path}"
    head = f"{ray} --head --node-ip-address=10.77.0.1 --port=6379 --num-cpus=1"
    head += " --dashboard-host=10.77.0.1"
    worker = f"{ray} --address=10.77.0.1:6379 --node-ip-address=10.77.0.2 --num-cpus=2"
    try:
        bed("spawn", "n1", str(logs / "n1.log"), "--", "sh", "-c", f"exec {env} {head}")
        cluster = ExistingCluster(url="http://10.77.0.1:8265", token=TOKEN)
        api = JobsApi.of(cluster.connect())
        wait_for(lambda: answers(api), within_s=120)
        resources = "--resources='{\"worker\": 2}'"
        bed(
            "spawn",
            "n2",
            str(logs / "n2.log"),
            "--",
            "sh",
            "-c",
            f"exec {env} {worker} {resources}",
        )
        yield cluster
    finally:
        bed("down")


def answers(api: JobsApi) -> bool:
    from nemo_run_ray.errors import ClusterError

    try:
        return bool(api.version(patience_s=0))
    except ClusterError:
        return False


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [("", ""), ('runtime_env={"env_vars": {"EXTRA": "given"}}', "given")],
    ids=["plain", "runtime_env of its own"],
)
def test_actors_on_the_other_host_import_the_code_that_travelled(
    hosts, tmp_path, unique, arguments, extra
):
    (tmp_path / "shipped.py").write_text("def double(number):\n    return 2 * number\n")
    (tmp_path / "program.py").write_text(PROGRAM.format(arguments=arguments))
    executor = RayExecutor(
        cluster=hosts,
        python=sys.executable,
        packager=run.PatternPackager(include_pattern=str(tmp_path), relative_path=str(tmp_path)),
    )
    script = run.Script("program.py", entrypoint="python")
    with run.Experiment(unique, executor=executor) as experiment:
        experiment.add(script, name="job")
        experiment.run(detach=True)
    job = RemoteJob.find(f"{experiment._id}.job")

    log = "".join(job.log(should_tail=True))

    assert job.verdict().state.value == "SUCCEEDED", log
    (line,) = [line for line in log.splitlines() if line.startswith("RESULT")]
    assert json.loads(line.removeprefix("RESULT ")) == ["n1", ["n2", 42, extra], 2]
