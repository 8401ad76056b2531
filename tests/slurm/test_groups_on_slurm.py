"""A group of several roles on Ray in an allocation of Slurm, one role on each node."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import groups
from tests.conftest import wait_for
from tests.slurm.test_slurm_cluster import Allocations, allocations

__all__ = ["allocations"]

_ASK = """
{python} - <<'END'
import os, urllib.request
for role in ("SERVER", "SANDBOX"):
    host, port = os.environ[f"NEMO_RUN_{role}_HOST"], os.environ[f"NEMO_RUN_{role}_PORT_HTTP"]
    status = urllib.request.urlopen(f"http://{host}:{port}/", timeout=10).status
    print(role, "answers", status, "from", host)
END
"""


@pytest.mark.soak
def test_server_sandbox_and_client_on_three_nodes(allocations: Allocations, unique: str):
    # The only folder that each of these hosts has for itself. Raylets of two hosts in one folder
    # take the same names for their sockets when they start at the same moment, and end.
    env_vars = {"PATH": f"{Path(sys.executable).parent}:$PATH", "RAY_TEMP_DIR": "/tmp/ray"}
    fields = {"nodes": 3, "cpus_per_task": 2, "env_vars": env_vars}
    cluster = allocations.cluster(fields, name="group")
    place = {"cpus_per_node": 2}
    sandbox = groups.SERVER.replace("_SERVER_", "_SANDBOX_")
    job = groups.submit(
        unique,
        cluster,
        groups.server(**place),
        groups.server(sandbox, role="sandbox", **place),
        groups.client(_ASK.replace("{python}", sys.executable), **place),
    )
    state, _, log = groups.finish(job)
    assert state == "SUCCEEDED", log
    answers = re.findall(r"client/0\| (\w+) answers 200 from (\S+)", log)
    assert [role for role, _ in answers] == ["SERVER", "SANDBOX"]
    nodes = dict(re.findall(r"nemo_run_ray\| (\w+) goes to (n\d)", log))
    assert sorted(nodes.values()) == ["n1", "n2", "n3"], log
    assert cluster.stop()  # a detached group leaves no user who would end it
    wait_for(lambda: not allocations.jobs(), 60)
