"""Tasks of an experiment as the elements of one job, on one real Ray."""

from __future__ import annotations

import sys

import nemo_run as run

from nemo_run_ray import RayExecutor, find
from nemo_run_ray.experiment.element_job import ElementJob
from nemo_run_ray.experiment.find import find_job
from tests.array_tasks import Model, train
from tests.conftest import tool, wait_for

#: Ends well, fails, and goes on until it is cancelled.
PROGRAMS = {
    "good": 'echo "$WORD of $NEMO_RUN_NUM_NODES"',
    "bad": "echo broken; exit 5",
    "long": "echo begun; sleep 1000",
}


def test_a_chain_of_tasks_that_share_jobs(existing, unique):
    """Scripts and functions, each a task of NeMo-Run's, in two jobs, and a third one after them."""
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:

        def add(name, task, *after, as_array=True):
            executor = RayExecutor(cluster=existing, python=sys.executable, as_array=as_array)
            experiment.add(task, executor=executor, name=name, dependencies=list(after))

        for index in range(3):
            script = run.Script(inline=PROGRAMS["good"], env={"WORD": f"word {index}"})
            add(f"say-{index}", script)
        for index in range(2):
            add(f"train-{index}", run.Partial(train, seed=index, model=run.Config(Model, width=2)))
        names = [f"say-{index}" for index in range(3)] + [f"train-{index}" for index in range(2)]
        add("last", run.Script(inline="echo all are done"), *names, as_array=False)
        experiment.run(detach=True)

    jobs = find(experiment._id)
    assert [job.name for job in jobs] == ["say-0-array", "train-0-array", "last"]
    assert jobs[-1].wait(300).state.value == "SUCCEEDED"
    say, trained = find(experiment.jobs[1].handle)[0], find(experiment.jobs[4].handle)[0]
    assert list(say.log()) == ["word 1 of 1\n"]
    assert trained.results()[1]["fields"] == {"seed": 1, "width": 2}
    assert list(trained.log()) == ["trained 1 with 2\n"]
    shown = tool("nemo-run-ray", "status", experiment._id).stdout
    assert "train-0-array has 2 elements: 2 succeeded" in shown
    assert "SUCCEEDED" in tool("nemo", "experiment", "status", experiment._id).stdout


def test_a_task_fails_and_another_one_is_cancelled_alone(existing, unique):
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        executor = RayExecutor(
            cluster=existing, python=sys.executable, as_array=True, cpus_per_node=0.1
        )
        for name, program in PROGRAMS.items():
            task = run.Script(inline=program, env={"WORD": "w"})
            experiment.add(task, executor=executor, name=name)
        experiment.run(detach=True)
    good, bad, long = (find_job(f"{experiment._id}.{name}") for name in PROGRAMS)
    assert isinstance(long, ElementJob)

    wait_for(lambda: bad.status.state.is_terminal and good.status.state.is_terminal)
    wait_for(lambda: long.status.state.value == "RUNNING")
    assert (good.status.state.value, bad.status.state.value) == ("SUCCEEDED", "FAILED")
    assert "exit code 5: broken" in bad.status.message
    assert bad.wait(10).state.value == "FAILED"

    told = tool("nemo-run-ray", "cancel", experiment._id, "--job", "long").stdout

    assert told == "long is cancelled; no process of it is left on its node\n"
    assert list(long.log(follow=True)) == ["begun\n"]
    status = long.array.wait(60)
    assert "exit code 8" in status.detail, "one has failed; what was cancelled is no failure"
    shown = tool("nemo-run-ray", "status", experiment._id).stdout
    assert "element 1 (bad): exit code 5: broken" in shown
