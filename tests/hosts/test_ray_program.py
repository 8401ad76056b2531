"""A task that is itself a Ray program, its actors on another host."""

import json
import sys

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.experiment.job import find_job

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


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        pytest.param("", "", id="plain", marks=pytest.mark.soak),
        pytest.param(
            'runtime_env={"env_vars": {"EXTRA": "given"}}', "given", id="runtime_env of its own"
        ),
    ],
)
def test_actors_on_the_other_host_import_the_code_that_travelled(
    hosts, tmp_path, unique, arguments, extra
):
    (tmp_path / "shipped.py").write_text("def double(number):\n    return 2 * number\n")
    (tmp_path / "program.py").write_text(PROGRAM.format(arguments=arguments))
    executor = RayExecutor(
        cluster=hosts.cluster,
        python=sys.executable,
        packager=run.PatternPackager(include_pattern=str(tmp_path), relative_path=str(tmp_path)),
    )
    script = run.Script("program.py", entrypoint="python")
    with run.Experiment(unique, executor=executor) as experiment:
        experiment.add(script, name="job")
        experiment.run(detach=True)
    job = find_job(f"{experiment._id}.job")

    log = "".join(job.log(follow=True))

    assert job.status.state.value == "SUCCEEDED", log
    (line,) = [line for line in log.splitlines() if line.startswith("RESULT")]
    assert json.loads(line.removeprefix("RESULT ")) == ["n1", ["n2", 42, extra], 2]
