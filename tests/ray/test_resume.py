"""What a user does after his script was killed between launches; and running again."""

import os
import signal

import nemo_run as run
import pytest

from nemo_run_ray import LocalCluster, RayExecutor
from nemo_run_ray.experiment.store import Ledger
from tests import warm
from tests.conftest import tool, wait_for

KILLED = """
import os, signal, sys
import nemo_run as run
from nemo_run_ray import RayExecutor
from nemo_run_ray.experiment.store import Ledger

title, folder, order, moment = sys.argv[1:5]
write_all = Ledger.write_all

def write_and_die(self, events):
    write_all(self, events)
    if events[0][0] == moment:
        os.kill(os.getpid(), signal.SIGKILL)

Ledger.write_all = write_and_die
if __name__ == "__main__":
    with run.Experiment(title, executor=RayExecutor(), threadpool_workers=1) as experiment:
        wait = f"for i in $(seq 1200); do [ -e {folder}/go ] && break; sleep 0.1; done"
        first = run.Script(inline=f"echo first >> {folder}/ran; {wait}")
        experiment.add(first, name="first")
        second = run.Script(inline=f"echo second >> {folder}/ran")
        after = ["first"] if order != "mixed" else None
        experiment.add(second, name="second", dependencies=after)
        script = run.Script(inline=f"echo local >> {folder}/ran")
        if order != "chain":
            experiment.add(script, executor=run.LocalExecutor(), name="here")
        experiment.run()
"""


@pytest.fixture
def killed(tmp_path, unique, local_cluster):
    def killed(order: str, moment: str) -> str:
        (tmp_path / "train.py").write_text(KILLED)
        words = ("train.py", unique, str(tmp_path), order, moment)
        done = warm.python(*words, env=os.environ, cwd=str(tmp_path))
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        return unique

    return killed


def resume(name: str) -> str:
    done = tool("nemo-run-ray", "resume", name)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def all_succeeded(name: str) -> bool:
    states = run.Experiment.from_title(name).status(return_dict=True).values()
    return all(str(one["status"]) == "SUCCEEDED" for one in states)


def ran(folder) -> list[str]:
    return sorted((folder / "ran").read_text().split()) if (folder / "ran").exists() else []


def test_a_chain_is_submitted_once_and_together(killed, tmp_path):
    name = killed("chain", "intent")

    shown = resume(name)
    assert "dispatcher: started again as" in shown
    assert "second: waits on the cluster, left to its dispatcher" in shown

    (tmp_path / "go").touch()
    wait_for(lambda: all_succeeded(name))
    assert (tmp_path / "ran").read_text().split() == ["first", "second"]


def test_an_experiment_that_is_reset_runs_again_under_its_new_id(existing, unique, tmp_path):
    executor = RayExecutor(cluster=existing)
    script = run.Script(inline=f"echo again >> {tmp_path}/ran")
    with run.Experiment(unique, executor=executor) as experiment:
        experiment.add(script, name="job")
        experiment.run()
    first = experiment._exp_dir
    experiment = experiment.reset()
    with experiment:
        experiment.run()

    assert experiment._exp_dir != first
    for folder in (first, experiment._exp_dir):
        (record,) = Ledger(type(tmp_path)(folder)).jobs().values()
        assert record.submission_id.startswith(f"{os.path.basename(folder)}.")
    assert ran(tmp_path) == ["again", "again"]
    assert all_succeeded(unique)


def test_the_embedded_clusters_size_is_not_changed_in_silence(local_cluster, capsys):
    LocalCluster(num_cpus=3).connect()
    assert "nemo-run-ray down" in " ".join(capsys.readouterr().out.split())
