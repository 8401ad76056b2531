"""A user's program: submits a chain of twelve jobs and dies at once.

``detached_client.py URL TITLE FOLDER``; the token is in RAY_AUTH_TOKEN, NeMo-Run's home in
NEMORUN_HOME. The first job ends when the folder has a file ``go``.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import nemo_run as run

from nemo_run_ray import ExistingCluster, PortProbe, RayExecutor
from tests.hosts.steps import Step

SERVER = f"""
trap 'exit 0' TERM
{sys.executable} -m http.server $NEMO_RUN_SERVER_PORT_HTTP >/dev/null 2>&1 &
wait
"""
#: Fails when it starts for the first and the second time.
FLAKY = 'test "$(grep -c "^flaky " journal)" -ge 3 || exit 5'
GPU = {"label_selector": {"pool": "gpu"}}
CPU = {"label_selector": {"pool": "cpu"}}
STEPS = (
    Step("prepare", end="until test -e go; do sleep 0.2; done", fields=CPU),
    Step("train-a", ("prepare",), fields=GPU),
    Step("train-b", ("prepare",), fields=CPU),
    Step("train-c", ("prepare",)),
    Step("merge", ("train-a", "train-b", "train-c"), fields=CPU),
    Step("flaky", ("prepare",), end=FLAKY, fields={**GPU, "retries": 2}),
    Step("serve", ("merge",)),  # the group
    Step("broken", ("prepare",), end="exit 7"),
    Step("after-broken", ("broken",)),
    Step("after-both", ("after-broken", "merge")),
    Step("alone", seconds=1),
    Step("report", ("serve", "flaky", "alone"), fields=CPU),
)


def main(url: str, title: str, folder: Path) -> None:
    common = {"cluster": ExistingCluster(url=url), "python": sys.executable}
    ids: dict[str, str] = {}
    with run.Experiment(title) as experiment:
        for step in STEPS:
            script = run.Script(inline=step.program(folder))
            executor = RayExecutor(**common, **step.fields)
            after = [ids[name] for name in step.after]
            if step.name == "serve":
                server = run.Script(inline=SERVER)
                ready = {"ports": {"http": 0}, "ready": PortProbe("http", interval_s=0.2)}
                service = RayExecutor(**common, **GPU, **ready, role="server", service=True)
                client = RayExecutor(**common, **CPU, role="client")
                ids["serve"] = experiment.add(
                    [server, script], executor=[service, client], name="serve", dependencies=after
                )
            else:
                ids[step.name] = experiment.add(
                    script, executor=executor, name=step.name, dependencies=after
                )
        experiment.run(detach=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
