"""Evaluate a model and a set of programs by three roles that are placed and ended together.

A server answers for a model, a sandbox runs programs in a little time and memory, and a client
scores both. Server and sandbox are services: the client starts when they are ready, and they are
ended when it is done. The three programs are in ``evaluation/``.

``python examples/evaluate_with_server.py`` runs the group on an embedded Ray of this machine, and
with ``--address http://ray-head:8265`` on a cluster whose nodes have fastapi, uvicorn and
scikit-learn. There, ``--pools server=gpu,sandbox=cpu,client=cpu`` sends each role to the nodes
that have this value in their label ``pool``.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import nemo_run as run

from nemo_run_ray import HttpProbe, RayExecutor

PROGRAMS = Path(__file__).resolve().parent / "evaluation"


def main(address: str | None, python: str | None, labels: dict[str, dict[str, str]]) -> bool:
    """Run the group; whether it succeeded."""
    common: dict[str, Any] = {
        "address": address,
        "python": python,
        "packager": run.PatternPackager(include_pattern=str(PROGRAMS), relative_path=str(PROGRAMS)),
    }
    service: dict[str, Any] = {
        "service": True,
        # A free one; the roles find the server's as NEMO_RUN_SERVER_PORT_HTTP.
        "ports": {"http": 0},
        "ready": HttpProbe("http", path="/health"),
    }
    executors = [
        RayExecutor(role="server", label_selector=labels["server"], **service, **common),
        RayExecutor(role="sandbox", label_selector=labels["sandbox"], **service, **common),
        RayExecutor(role="client", label_selector=labels["client"], **common),
    ]
    programs = [
        run.Script("server.py", entrypoint="python"),
        run.Script("sandbox.py", entrypoint="python"),
        run.Script("client.py", entrypoint="python"),
    ]
    with run.Experiment("evaluate-with-server") as experiment:
        experiment.add(programs, executor=executors, name="evaluate", tail_logs=True)
        experiment.run()
    return experiment.status(return_dict=True)["evaluate"]["status"].name == "SUCCEEDED"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", help="dashboard of a cluster that exists")
    parser.add_argument("--python", help="the cluster's interpreter")
    parser.add_argument("--pools", help="where each role goes: role=pool,role=pool …")
    given = parser.parse_args()
    labels: dict[str, dict[str, str]] = {"server": {}, "sandbox": {}, "client": {}}
    for pair in given.pools.split(",") if given.pools else []:
        role, _, pool = pair.partition("=")
        if role not in labels:
            parser.error(f"--pools names the role {role!r}; there are {', '.join(labels)}")
        labels[role] = {"pool": pool}
    sys.exit(not main(given.address, given.python, labels))
