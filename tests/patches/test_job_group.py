"""The patch ``job_group`` on the NeMo-Run that is installed."""

import inspect
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run as run
import pytest
from nemo_run.core.execution.base import Executor
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer
from nemo_run.run.job import JobGroup
from torchx.specs import AppState

from nemo_run_ray import RayExecutor, patches
from nemo_run_ray import nemo as plugin
from nemo_run_ray.fields import CommandProbe, HttpProbe, PortProbe
from nemo_run_ray.patches import Patch

ADDRESS = "http://10.0.0.1:8265"
OPT_IN = "supports_job_group"


@dataclass(kw_only=True)
class Unlisted(Executor):
    """Somebody's executor that knows nothing of groups."""

    size: int = 1

    def assign(self, exp_id: str, exp_dir: str, task_id: str, task_dir: str) -> None:
        self.experiment_id = exp_id
        self.job_dir = os.path.join(exp_dir, task_dir)


@dataclass(kw_only=True)
class Supporting(Unlisted):
    """One that runs a group task by task."""

    @classmethod
    def supports_job_group(cls) -> bool:
        return True


@dataclass(kw_only=True)
class Merging(Supporting):
    """One that makes one job of a group."""

    parts: list[int] = field(default_factory=list)

    @classmethod
    def merge(cls, executors: list[Any], num_tasks: int) -> "Merging":
        if executors[0].parts:
            return executors[0]
        several = executors * num_tasks if len(executors) == 1 else executors
        return cls(parts=[one.size for one in several], job_dir=executors[0].job_dir)


@dataclass(kw_only=True)
class Refusing(Supporting):
    """One whose parent supports groups, and that does not."""

    @classmethod
    def supports_job_group(cls) -> bool:
        return False


@dataclass(kw_only=True)
class OwnLocal(run.LocalExecutor):
    """A child of one that NeMo-Run lists; NeMo-Run compares exact classes."""


@pytest.fixture
def patch() -> Iterator[Patch]:
    """The patch as importing us applied it, applied again afterwards."""
    one = patches.patch("job_group")
    assert one.status() == "applied"
    yield one
    one.apply()
    assert one.status() == "applied"


@pytest.fixture
def unpatched(patch) -> Patch:
    assert patch.undo()
    return patch


@pytest.fixture(params=["never applied", "applied", "undone"])
def whenever(unpatched, request) -> str:
    """The states that NeMo-Run's own executors may not notice."""
    if request.param != "never applied":
        undo = unpatched.apply()
        if request.param != "applied":
            undo()
    return request.param


def _tasks(count: int = 2) -> list[run.Script]:
    return [run.Script(inline=f"echo {number}") for number in range(count)]


def _group(executors: Any, count: int = 2) -> JobGroup:
    return JobGroup(id="g", tasks=_tasks(count), executors=executors)


def _reloaded(group: JobGroup) -> JobGroup:
    """The group as a later process has it."""
    config, _ = group.serialize()
    return fdl.build(ZlibJSONSerializer().deserialize(config))


def _held() -> list[dict[str, object]]:
    return [dict(vars(JobGroup)), dict(vars(Executor))]


def _differences(before: list[dict[str, object]], after: list[dict[str, object]]) -> list[str]:
    return sorted(
        name
        for was, now in zip(before, after, strict=True)
        for name in was.keys() | now.keys()
        if name not in was or name not in now or was[name] is not now[name]
    )


def test_a_local_group_is_launched_task_by_task(whenever, unique):
    with run.Experiment(unique) as experiment:
        experiment.add(_tasks(), executor=run.LocalExecutor(), name="g")
        experiment.run()
    (group,) = experiment.jobs
    assert not group._merge
    assert len(set(group.handles)) == 2
    assert all(handle.startswith("local_persistent://") for handle in group.handles)
    assert group.states == [AppState.SUCCEEDED] * 2


def test_a_slurm_group_is_merged(whenever):
    group = _group(
        [run.SlurmExecutor(account="a", nodes=1), run.SlurmExecutor(account="a", nodes=3)]
    )
    assert group._merge is True
    assert type(group.executors) is run.SlurmExecutor
    assert group.executors.run_as_group
    assert [one.nodes for one in group.executors.resource_group] == [1, 3]


def _dry_run(executor: Executor, folder: Path) -> list[str]:
    """What NeMo-Run would send."""
    with run.Experiment("same", id="same_1", base_dir=str(folder)) as experiment:
        experiment.add(_tasks(), executor=executor, name="g")
        experiment.dryrun(log=False)
    (group,) = experiment.jobs
    texts = [str(info.request) for info in group._dryrun_infos]
    return [re.sub(r"\bid: g-\w+", "id: g-CHANCE", text) for text in texts]


@pytest.mark.parametrize("kind", ["docker", "slurm"])
def test_their_requests_are_the_same_with_and_without(unpatched, tmp_path, kind):
    def executor() -> Executor:
        if kind == "docker":
            return run.DockerExecutor(container_image="image", packager=run.Packager())
        tunnel = run.LocalTunnel(job_dir=str(tmp_path / "remote"))
        return run.SlurmExecutor(account="a", tunnel=tunnel, packager=run.Packager())

    without = _dry_run(executor(), tmp_path)
    assert len(without) == 1
    assert "g-0" in without[0]
    assert "g-1" in without[0]
    unpatched.apply()
    assert _dry_run(executor(), tmp_path) == without
    unpatched.undo()
    assert _dry_run(executor(), tmp_path) == without


@pytest.mark.parametrize("kind", [Unlisted, Refusing, OwnLocal, Executor])
def test_what_is_not_listed_stays_refused(whenever, kind):
    with pytest.raises(AssertionError, match=r"^Unsupported executor type\."):
        _group(kind())


@pytest.mark.parametrize("when", ["before us", "after us"])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_list_that_somebody_else_changes_lets_his_in_and_ours(unpatched, when, replaced):
    """Appending to the list, or setting another one, has been the only way in."""
    listed = JobGroup.SUPPORTED_EXECUTORS
    others = (*listed, Unlisted, RayExecutor) if replaced else [*listed, Unlisted]
    with pytest.MonkeyPatch.context() as other:
        if when == "after us":
            unpatched.apply()
        other.setattr(JobGroup, "SUPPORTED_EXECUTORS", others)
        unpatched.apply()
        assert unpatched.status() == "applied"
        theirs = _group(Unlisted())
        assert (theirs._merge, len(theirs.executors)) == (False, 2)
        assert _group([RayExecutor(role="a"), RayExecutor(role="b")])._merge
        assert _group(Merging(size=1)).executors.parts == [1, 1]
        unpatched.undo()
        assert JobGroup.SUPPORTED_EXECUTORS is others


def test_one_without_merge_is_let_in_task_by_task(patch):
    given = Supporting(size=3)
    group = _group(given)
    assert group._merge is False
    assert group.executors == [given, given]
    several = [Supporting(size=1), Supporting(size=2)]
    assert _group(several).executors is several


def test_one_with_merge_is_merged(patch):
    group = _group([Merging(size=1), Merging(size=2)])
    assert _reloaded(group).executors == group.executors
    assert group._merge is True
    assert type(group.executors) is Merging
    assert group.executors.parts == [1, 2]
    assert group.executor is group.executors


@pytest.fixture
def newer(unpatched) -> Iterator[Callable[..., None]]:
    """Makes a NeMo-Run with ``supports_job_group`` and other lines in ``JobGroup``."""
    with pytest.MonkeyPatch.context() as patching:

        def change(*changes: tuple[str, str]) -> None:
            source = textwrap.dedent(inspect.getsource(vars(JobGroup)["__post_init__"]))
            for old, new in changes:
                assert source.count(old) == 1
                source = source.replace(old, new)
            names: dict[str, Any] = {}
            exec(source, vars(sys.modules[JobGroup.__module__]), names)
            no, yes = (lambda cls: False), (lambda cls: True)
            no.__module__ = yes.__module__ = "nemo_run.core.execution.base"
            patching.setattr(Executor, OPT_IN, classmethod(no), raising=False)
            patching.setattr(run.SlurmExecutor, OPT_IN, classmethod(yes), False)
            patching.setattr(JobGroup, "__post_init__", names["__post_init__"])

        yield change
        assert unpatched.undo()


#: NeMo-Run's pull request 587: the gate, and nothing that merges.
_GATE = (
    "executor_type in self.SUPPORTED_EXECUTORS",
    "(executor_type.supports_job_group() or executor_type in self.SUPPORTED_EXECUTORS)",
)
_MERGE = (
    "elif executor_type == DockerExecutor:",
    "elif executor_type not in self.SUPPORTED_EXECUTORS and hasattr(executor_type, 'merge'):\n"
    "        self._merge = True\n"
    "        self.executors = executor_type.merge(executors, num_tasks=len(self.tasks))\n"
    "    elif executor_type == DockerExecutor:",
)


def test_a_nemo_run_that_only_lets_them_in_is_patched(unpatched, newer):
    """Without the patch a group of RayExecutors would start as single tasks, silently."""
    rays = [RayExecutor(role="a", service=True), RayExecutor(role="b")]
    newer(_GATE)
    assert _group(rays)._merge is False
    assert unpatched.status() == "off"
    unpatched.apply()
    group = _group(rays)
    assert group._merge is True
    assert [one.role for one in group.executors.resource_group] == ["a", "b"]
    assert _reloaded(group).executors == group.executors
    assert _group(Supporting())._merge is False
    assert _group(run.LocalExecutor())._merge is False
    assert _group(run.SlurmExecutor(account="a")).executors.run_as_group
    with pytest.raises(AssertionError, match="Unsupported executor type"):
        _group(Unlisted())


def test_a_nemo_run_that_merges_them_is_left_alone(unpatched, newer):
    newer(_GATE, _MERGE)
    before = _held()
    assert unpatched.status() == "not needed"
    undo = unpatched.apply()
    assert _group(Merging(size=7)).executors.parts == [7, 7]
    assert undo() is True
    assert _differences(before, _held()) == []


def test_with_an_unknown_nemo_run_single_tasks_still_work(unpatched, unique, caplog):
    """Registering does not fail; it says that groups cannot be used."""
    before = _held()
    with pytest.MonkeyPatch.context() as newer, caplog.at_level(logging.WARNING):
        newer.setattr(patches, "version", lambda name: "0.99.0")
        newer.setattr(JobGroup, "__post_init__", None)
        before = _held()
        # NeMo-Run takes the handlers of the root logger away when it sets its console up.
        newer.setattr(plugin.log, "handlers", [caplog.handler])
        plugin.register()
        assert re.search(r"Groups cannot be used.*__post_init__.*0\.99\.0", caplog.text)
        assert _differences(before, _held()) == []
        task = run.Script(inline="true")
        run.run(task, executor=RayExecutor(address=ADDRESS), name=unique, dryrun=True)


@pytest.fixture
def saved(patch, unique) -> run.Experiment:
    """An experiment with a group, saved as before a run."""
    ready = (
        HttpProbe("http", path="/up", status=204),
        CommandProbe(["test", "a b"]),
        PortProbe(80),
    )
    services = [
        RayExecutor(address=ADDRESS, role=role, service=True, ports={"http": 0}, ready=probe)
        for role, probe in zip(("store", "side", "rpc"), ready, strict=True)
    ]
    services[0].env_vars = {"Q": "'\"\n$é"}
    last = RayExecutor(address=ADDRESS, nodes=2, launcher="torchrun", secrets=["TOKEN"])
    with run.Experiment(unique) as experiment:
        tasks = [*_tasks(3), run.Partial(json.dumps, obj=1)]
        experiment.add(tasks, executor=[*services, last], name="g")
        experiment._prepare()
    return experiment


def test_a_loaded_group_plans_the_same(saved, monkeypatch):
    monkeypatch.setenv("TOKEN", "x")
    loaded = run.Experiment.from_id(saved._id)
    planned = []
    for experiment in (saved, loaded):
        (group,) = experiment.jobs
        plugin.prepare_again(experiment, group)
        group.launch(wait=False, runner=experiment._runner, dryrun=True)
        planned.append(group._dryrun_infos[-1].request.plan)
    assert planned[0] == planned[1]
    assert len(planned[1].spec.roles) == 4


_LOAD = """
import sys
import nemo_run as run
assert not [one for one in sys.modules if one.startswith("nemo_run_ray")]
(group,) = run.Experiment.from_id(sys.argv[1]).jobs
print(group._merge, [one.role for one in group.executors.resource_group])
"""


def test_a_process_that_has_not_imported_us_loads_it_too(saved):
    words = [sys.executable, "-c", _LOAD, saved._id]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True ['store', 'side', 'rpc', '']"
