from types import SimpleNamespace

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import ConfigError, JobError, NemoRunRayError
from nemo_run_ray.ids import safe_id
from nemo_run_ray.nemo import scheduler
from nemo_run_ray.remote.status import JobState, JobStatus, Reason
from tests.conftest import TRUE
from tests.unit.experiment.conftest import Submitted


@pytest.fixture
def address():
    return "http://ray.example.org:8265"


def test_two_names_that_would_get_one_id_are_refused_before_anything_starts(address, unique):
    with run.Experiment(unique, executor=RayExecutor(address=address)) as experiment:
        experiment.add(TRUE, name="a b")
        experiment.add(TRUE, name=safe_id("a b"))
        with pytest.raises(ConfigError, match="give it another name"):
            experiment.dryrun(log=False)


NOTHING = run.PatternPackager(include_pattern="*.none", relative_path=".")
SCRIPTS = run.PatternPackager(include_pattern="*.sh", relative_path=".")


@pytest.mark.parametrize(
    ("task", "fields", "words"),
    [
        (TRUE, {"secrets": ["NO_SUCH_SECRET"]}, "NO_SUCH_SECRET, which is not"),
        (TRUE, {"packager": run.GitArchivePackager()}, "no git repository"),
        (TRUE, {"packager": NOTHING}, "it packed no file"),
        (run.Script("there.sh"), {}, "no code is sent, so that its script 'there.sh'"),
        (run.Script("gone.sh"), {"packager": SCRIPTS}, "'gone.sh' is not among the 1 file"),
        (run.Script("gone.sh"), {"address": None}, "there is no .*/gone.sh. Correct the script's"),
    ],
    ids=["secret", "packager", "pattern", "script not sent", "script not packed", "script here"],
)
def test_a_dry_run_refuses_what_the_run_would_and_neither_asks_a_cluster(
    address, unique, tmp_path, monkeypatch, task, fields, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.sh").touch()
    executor = RayExecutor(**{"address": address, **fields})
    for dryrun in (True, False):
        with pytest.raises(NemoRunRayError, match=words):
            # NeMo-Run 0.9 counts in seconds for an experiment's id.
            run.run(task, executor=executor, name=f"{unique}-{dryrun}", dryrun=dryrun)


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        (TRUE, {}),
        (run.Script("there.sh"), {"packager": SCRIPTS}),
        (run.Script("./there.sh"), {"address": None}),
        (run.Script("/on/the/nodes.sh"), {}),
        (run.Script("made.sh"), {"startup_commands": ["touch made.sh"]}),
        (run.Script("a.module", entrypoint="python", m=True), {}),
    ],
)
def test_a_dry_run_asks_no_cluster_and_takes_scripts_that_may_be_there(
    address, unique, tmp_path, monkeypatch, task, fields
):
    """There is no such host: a question would raise."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.sh").touch()
    executor = RayExecutor(**{"address": address, **fields})
    run.run(task, executor=executor, name=unique, dryrun=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there.sh"]


def test_a_dry_run_of_a_group_asks_no_cluster_and_says_what_is_sent(
    address, unique, tmp_path, monkeypatch
):
    (tmp_path / "code.py").touch()
    for name in "ABC":
        monkeypatch.setenv(name, "x")
    code = run.PatternPackager(include_pattern=str(tmp_path), relative_path=str(tmp_path))
    executors = [
        RayExecutor(address=address, role="a", packager=code, secrets=["B", "A"]),
        RayExecutor(address=address, nodes=2, packager=code, secrets=["C"]),
        RayExecutor(address=address, packager=run.GitArchivePackager()),
    ]
    with run.Experiment(unique) as experiment:
        experiment.add([TRUE] * 3, executor=executors, name="group")
        experiment.dryrun(log=False)
    (info,) = experiment.jobs[0]._dryrun_infos
    lines = str(info).splitlines()
    sends = [one.split(maxsplit=1)[1] for one in lines if one.startswith("sends")]
    assert sorted(sends) == [
        "code, packed by GitArchivePackager",
        "code, packed by PatternPackager",
        "configs, scripts and specs of 1 job(s)",
        "secrets A, B, C, in an archive of their own",
    ]
    roles = [one.split()[1] for one in lines if one.startswith("role ")]
    assert roles == ["a,", "group-1,", "group-2,"]


def test_the_end_of_a_cluster_is_told_once(unique, tmp_path, capsys):
    status = JobStatus(JobState.LOST, Reason.CLUSTER_GONE, "gone")
    record = SimpleNamespace(exp_dir=tmp_path / unique, dispatcher="")
    job = SimpleNamespace(id=f"{unique}.a", record=record, status=status)

    def log():
        yield "line"
        raise JobError("There is no log any more: it is gone")

    assert list(scheduler._readable(log(), job)) == ["line"]
    scheduler._report(job, status)
    assert capsys.readouterr().out.count("gone") == 1


def test_only_a_job_that_was_submitted_has_a_page(ray, unique, capsys):
    Submitted(ray, unique, "a")
    Submitted(ray, unique, "b", "c after b")
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("a on Ray: ") == shown.count(" on Ray: ") == 1
    assert shown.count("b waits on the cluster; ") == shown.count(" waits on the cluster; ") == 1


def test_a_waiting_program_says_once_what_its_experiments_jobs_wait_for(unique, tmp_path, capsys):
    def told(name: str, reason: Reason, detail: str) -> None:
        record = SimpleNamespace(exp_dir=tmp_path / unique, dispatcher="")
        job = SimpleNamespace(id=f"{unique}.{name}", record=record)
        scheduler._report(job, JobStatus(JobState.PENDING, reason, detail))

    told("a", Reason.NONE, "")
    told("a", Reason.BUILDING, "")  # nothing is known of it yet
    told("a", Reason.BUILDING, "Ray builds it")
    told("b", Reason.BUILDING, "Ray builds it")
    told("b", Reason.ROOM, "It asks for CPU 2")
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(f"{unique}.a is PENDING: Ray builds it") == 1
    assert shown.count("Ray builds it") == 1
    assert shown.count(f"{unique}.b is PENDING: It asks for CPU 2") == 1
