"""Groups on three hosts, each of them a pool by its label."""

import json
import re
import sys
import time

import pytest

from nemo_run_ray.remote.status import JobState
from tests.conftest import tool, wait_for
from tests.groups import assert_nothing_left, finish, submit
from tests.hosts.conftest import TOKEN, client, server
from tests.hosts.head import address_of

WHERE = 'echo "$(hostname) sees $NEMO_RUN_SERVER_HOST and $NEMO_RUN_SANDBOX_HOST"\n'
FETCH = "{python} -c \"import urllib.request as u; print(u.urlopen('http://{at}').status)\"\n"


def fetch(at: str) -> str:
    return FETCH.format(python=sys.executable, at=at)


def test_three_pools_on_three_hosts(hosts, unique):
    sandbox = server(role="sandbox", label_selector={"pool": "cpu"})
    sandbox.program = sandbox.program.replace("SERVER", "SANDBOX")
    both = "$NEMO_RUN_{0}_HOST:$NEMO_RUN_{0}_PORT_HTTP"
    score = client(WHERE + fetch(both.format("SERVER")) + fetch(both.format("SANDBOX")))
    job = submit(unique, hosts.cluster, server(), sandbox, score)

    state, _, log = finish(job)

    assert state == "SUCCEEDED", log
    lines = [line for line in log.splitlines() if line.startswith("client/0| ")]
    assert lines == [
        f"client/0| n1 sees {address_of('n2')} and {address_of('n3')}",
        "client/0| 200",
        "client/0| 200",
    ]
    assert "nemo_run_ray| server goes to n2" in log
    assert "server/0| server got SIGTERM" in log
    assert_nothing_left(hosts, job)


def test_two_groups_that_need_the_whole_cluster(hosts, unique, tmp_path):
    gate = tmp_path / "gate"  # no group ends before the other one has been seen to wait
    command = f"while [ ! -e {gate} ]; do sleep 0.1; done"
    whole = [
        client(command, role=f"r{number}", label_selector={"pool": pool}, cpus_per_node=2)
        for number, pool in enumerate(("client", "gpu", "cpu"))
    ]
    jobs = [submit(f"{unique}{number}", hosts.cluster, *whole) for number in range(2)]

    wait_for(lambda: any("waiting for room" in "".join(job.log(follow=False)) for job in jobs))
    gate.touch()

    for job in jobs:
        state, _, log = finish(job)
        assert state == "SUCCEEDED", log
    assert_nothing_left(hosts, jobs[0])


def test_a_group_that_can_never_fit_says_so_and_leaves_nothing(hosts, unique):
    huge = client("true", role="huge", cpus_per_node=3)
    job = submit(unique, hosts.cluster, client("true"), huge)
    wait_for(lambda: job.status.state is not JobState.PENDING)
    began_at = time.monotonic()

    state, reason, log = finish(job)

    took_s = time.monotonic() - began_at
    assert (state, reason) == ("FAILED", "no node can ever take it"), log
    assert "huge: the largest node with pool=" in log
    assert took_s < 20, "10 s from the driver's start"
    assert_nothing_left(hosts, job)


@pytest.mark.soak  # tests/unit/remote/group/test_placing.py has it
def test_replicas_of_one_role_spread_beside_another(hosts, unique):
    spread = client("hostname", role="wide", nodes=3, label_selector={}, strategy="STRICT_SPREAD")
    job = submit(unique, hosts.cluster, spread, client("hostname", role="other", label_selector={}))

    state, _, log = finish(job)

    assert state == "SUCCEEDED", log
    assert sorted(re.findall(r"^wide/\d\| (n\d)$", log, re.M)) == ["n1", "n2", "n3"]
    assert_nothing_left(hosts, job)


def test_status_and_logs_by_role(hosts, unique, monkeypatch):
    stays = client('echo "I am here"; sleep 600')
    job = submit(unique, hosts.cluster, server(), stays)
    wait_for(lambda: "I am here" in "".join(job.log(follow=False)), within_s=60)

    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    shown = tool("nemo-run-ray", "status", job.id).stdout
    rows = json.loads(tool("nemo-run-ray", "status", "--json", job.id).stdout)

    assert re.search(rf"server/0 \(service\) +ready +n2 +{address_of('n2')}", shown), shown
    roles = {one["role"]: (one["state"], one["host"]) for one in rows[0]["roles"]}
    assert roles == {"server": ("ready", "n2"), "client": ("ready", "n1")}
    one = tool("nemo-run-ray", "logs", "--role", "client/0", job.id).stdout
    assert one == "client/0| I am here\n"
    unknown = tool("nemo-run-ray", "logs", "--role", "nobody", job.id)
    assert "client/0, server/0" in unknown.stderr

    done = tool("nemo-run-ray", "cancel", job.id)
    assert "group is cancelled; no process of it is left on its node" in done.stdout
    assert_nothing_left(hosts, job)
