import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.ids import safe_id
from nemo_run_ray.nemo.scheduler import create_scheduler


@pytest.fixture
def address():
    return "http://ray.example.org:8265"


def test_two_names_that_would_get_one_id_are_refused_before_anything_starts(address, unique):
    with run.Experiment(unique, executor=RayExecutor(address=address)) as experiment:
        experiment.add(run.Script(inline="true"), name="a b")
        experiment.add(run.Script(inline="true"), name=safe_id("a b"))
        with pytest.raises(ConfigError, match="rename one of them"):
            experiment.dryrun(log=False)


def test_a_dry_run_asks_no_cluster(address, unique):
    """There is no such host: a question would raise."""
    task = run.Script(inline="true")
    run.run(task, executor=RayExecutor(address=address), name=unique, dryrun=True)


def test_a_dry_run_of_a_group_asks_no_cluster_and_says_what_is_sent(address, unique, tmp_path):
    code = run.PatternPackager(include_pattern="*.py", relative_path=str(tmp_path))
    executors = [
        RayExecutor(address=address, role="a", packager=code, secrets=["B", "A"]),
        RayExecutor(address=address, nodes=2, packager=code, secrets=["C"]),
        RayExecutor(address=address, packager=run.GitArchivePackager()),
    ]
    with run.Experiment(unique) as experiment:
        experiment.add([run.Script(inline="true")] * 3, executor=executors, name="group")
        experiment.dryrun(log=False)
    (info,) = experiment.jobs[0]._dryrun_infos
    lines = str(info).splitlines()
    sends = [one.removeprefix("sends     ") for one in lines if one.startswith("sends")]
    assert sorted(sends) == [
        "code, packed by GitArchivePackager",
        "code, packed by PatternPackager",
        "configs, scripts and specs of 1 job(s)",
        "secrets A, B, C, in an archive of their own",
    ]
    roles = [one.split()[1] for one in lines if one.startswith("role ")]
    assert roles == ["a,", "group-1,", "group-2,"]


def test_a_group_and_a_task_that_would_get_one_id_are_refused(address, unique):
    executor = RayExecutor(address=address)
    with run.Experiment(unique, executor=executor) as experiment:
        experiment.add([run.Script(inline="true")], name=safe_id("a b"), executor=executor)
        experiment.add(run.Script(inline="true"), name="a b")
        with pytest.raises(ConfigError, match="rename one of them"):
            experiment.dryrun(log=False)


def test_a_stream_alone_is_refused():
    from torchx.schedulers.api import Stream

    with pytest.raises(ValueError, match="one log"):
        create_scheduler("s").log_iter("x", "y", streams=Stream.STDERR)


def test_a_job_of_nobody_is_not_described():
    assert create_scheduler("s").describe("no.such") is None
