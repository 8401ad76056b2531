"""Label selectors of a single task on a simulated Ray that knows those of groups only."""

import io
import json
import zipfile

import nemo_run as run
import pytest
from torchx.specs import AppDef, Role

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import TooOld
from nemo_run_ray.plan.dry_run import describe
from nemo_run_ray.plan.job_plan import JobPlan, in_folder, plan
from nemo_run_ray.remote.attempts import JobExit
from nemo_run_ray.remote.node.rundir import JOBS, SPEC
from nemo_run_ray.remote.spec import GroupSpec, JobSpec, from_json
from tests.conftest import refused
from tests.fake_ray import FAILS, FakeRay
from tests.unit.experiment.conftest import Handed

LABELS = {"pool": "a"}


@pytest.fixture
def old(ray: FakeRay) -> FakeRay:
    ray.version = "2.50.1"
    return ray


def specs(ray: FakeRay) -> dict[str, JobSpec | GroupSpec]:
    """What the nodes are told, by the job's name, from the archives that were sent."""
    found = {}
    for data in ray.packages.values():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                if name.startswith(f"{JOBS}/") and name.endswith(f"/{SPEC}"):
                    found[name.split("/")[1]] = from_json(archive.read(name).decode())
    return found


def planned(name: str = "job", **fields) -> JobPlan:
    app = AppDef("job", [Role(name, image="", entrypoint="true")])
    executor = RayExecutor(address="http://h:1", label_selector=LABELS, **fields)
    return plan(app, executor, "exp.job", "job")


def test_a_task_goes_through_the_groups_driver(old, unique):
    Handed(old, unique, "job", "other", label_selector=LABELS, cpus_per_node=2)
    for body in old.bodies:
        assert not [key for key in body if key.startswith("entrypoint_")]
        assert ".start group " in body["entrypoint"]
    found = specs(old)["job"]
    assert isinstance(found, GroupSpec)
    (role,) = found.roles
    assert (role.label_selector, role.resources) == (LABELS, {"CPU": 2})


@pytest.mark.parametrize("version", ["2.54.0", "2.60.0", "3.0.0"])
def test_a_newer_ray_places_it_itself(ray, unique, version):
    ray.version = version
    Handed(ray, unique, "job", label_selector=LABELS)
    (body,) = ray.bodies
    assert body["entrypoint_label_selector"] == LABELS
    assert isinstance(specs(ray)["job"], JobSpec)


def test_only_tasks_with_labels_change_their_form(old, unique):
    executors = [
        RayExecutor(address=old.url, **fields) for fields in ({}, {"label_selector": LABELS})
    ]
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        for name, executor in zip(("plain", "labelled"), executors, strict=True):
            experiment.add(run.Script(inline="true"), executor=executor, name=name)
        experiment.run(detach=True)
    kinds = {name: type(spec) for name, spec in specs(old).items()}
    assert kinds == {"plain": JobSpec, "labelled": GroupSpec}


def test_a_still_older_one_is_refused_before_anything_is_sent(ray, unique):
    ray.version = "2.46.0"
    executor = RayExecutor(address=ray.url, label_selector=LABELS)
    message = refused(TooOld, executor, unique)
    assert "needs Ray 2.47 or newer" in message
    assert "runs 2.46.0" in message
    assert ray.writes == []


def test_retries_dependencies_and_the_wait_for_room_hold(old, unique):
    handed = Handed(
        old,
        unique,
        "first",
        "next after first",
        label_selector=LABELS,
        retries=1,
        pending_timeout_s=60,
    )
    spec = handed.dispatch.spec
    assert [(job.after, job.retries) for job in spec.jobs] == [((), 1), (("first",), 1)]
    old.fates[f"{handed.id}.first"] = FAILS
    assert old.dispatch(spec, rounds=30) == JobExit.SUCCEEDED
    started = [name.removeprefix(f"{handed.id}.") for name in old.started]
    assert started == ["dispatcher", "first", "first@2", "next"]
    data = json.loads((handed.dispatch.folder / "dispatcher.json").read_text())
    sent = [(handed.dispatch.folder / name).read_bytes() for name in data["archives"]]
    old.packages = {str(number): one for number, one in enumerate(sent)}
    assert {one.placing_timeout_s for one in specs(old).values()} == {60}
    # A dispatcher's own limit would count from the start of the driver, which reserves nothing.
    assert {job.pending_timeout_s for job in spec.jobs} == {None}


def test_a_limit_of_the_wait_alone_hands_all_jobs_over_together(old, unique):
    handed = Handed(old, unique, "a", "b", "c", label_selector=LABELS, pending_timeout_s=60)
    assert old.started == [handed.dispatch.id]
    assert handed.dispatch.spec.jobs[0].pending_timeout_s is None
    # The second job is handed over when all plans have their other form already.
    assert planned(pending_timeout_s=60).for_ray((2, 50)).needs_dispatcher


def test_dependencies_alone_and_secrets(old, unique, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "s3cr3t")
    first = Handed(old, f"{unique}a", "job", label_selector=LABELS, secrets=["A_TOKEN"])
    assert specs(old)["job"].secrets == ("A_TOKEN",)
    handle = f"ray_jobs://nemo_run/{first.id}.job"
    second = Handed(old, f"{unique}b", "job", label_selector=LABELS, dependencies=[handle])
    assert second.states() == {"job": "WAITING"}


def test_any_name_of_a_task_makes_a_role():
    for name in ("a b", "x" * 100, "é"):
        made = planned(name, role="a/b" if name == "a b" else "")
        (role,) = made.as_group.spec.roles
        assert isinstance(made.spec, JobSpec)
        assert len(role.name) <= 48


def test_it_waits_for_nodes_as_ray_does_for_a_task():
    assert planned().as_group.spec.wait_for_nodes
    assert planned(wait_for_nodes=True).spec == planned().spec, "a cluster file may say it too"


def test_the_code_is_that_of_the_role():
    made = planned(packager=run.GitArchivePackager()).for_ray((2, 50))
    assert list(made.packagers) == [role.name for role in made.spec.roles]


def test_here_both_forms_run_in_the_callers_folder():
    made = in_folder(planned(), "/here")
    assert (made.spec.cwd, made.for_ray((2, 50)).spec.roles[0].task.cwd) == ("/here", "/here")


def test_the_dry_run_says_it():
    line = "labels    before Ray 2.54 a group's driver places it by them"
    assert line in describe(planned(), "c", []).splitlines()
    assert "before Ray" not in describe(planned().for_ray((2, 50)), "c", [])
