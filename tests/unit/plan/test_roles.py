"""From groups as NeMo-Run builds them to specs: roles, their resources, places and commands."""

import contextlib
import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import nemo_run as run
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nemo_run.core.execution.launcher import FaultTolerance, Torchrun
from torchx.specs import AppDef, Role

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import ConfigError, TooOld
from nemo_run_ray.experiment.submit import Batch
from nemo_run_ray.fields import CommandProbe, PortProbe
from nemo_run_ray.plan.job import JobPlan, plan
from nemo_run_ray.plan.roles import ROLE_MAX
from nemo_run_ray.remote.group.driver import variables
from nemo_run_ray.remote.spec import RENDEZVOUS, GroupSpec, JobSpec, RoleSpec

#: There is nothing: a question would raise.
ADDRESS = "http://10.0.0.1:8265"
HEAD = "$NEMO_RUN_HEAD_NODE_IP"
WORDS = [
    "",
    " ",
    "a b",
    "$HOME",
    "${HOME}",
    "*",
    "a\nb",
    "'",
    '"',
    "\\",
    "`id`",
    "é漢",
    "--x=$1",
    "%s",
]


@dataclasses.dataclass(kw_only=True)
class Sets(run.Plugin):
    """A plug-in that sets what it is given on the executor that NeMo-Run hands to it."""

    env: dict[str, str] = dataclasses.field(default_factory=dict)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: On the executor of this role of the group instead.
    role: int | None = None

    def setup(self, task: Any, executor: Any) -> None:
        if self.role is not None:
            executor = executor.resource_group[self.role]
        executor.env_vars.update(self.env)
        for name, value in self.fields.items():
            setattr(executor, name, value)


def _executor(**fields: Any) -> RayExecutor:
    return RayExecutor(**{"address": ADDRESS, **fields})


def _tasks(count: int) -> list[run.Script]:
    return [run.Script(inline="true") for _ in range(count)]


_numbers = itertools.count()


@pytest.fixture
def planned(unique) -> Callable[..., JobPlan]:
    """The plan of what NeMo-Run makes of tasks: added to an experiment, and dry-run."""

    def make(task: Any, executor: Any, plugins: Any = None, name: str = "g") -> JobPlan:
        # NeMo-Run before 0.11 names experiments by the second: each one needs a title of its own.
        with run.Experiment(f"{unique}{next(_numbers)}") as experiment:
            experiment.add(task, executor=executor, name=name, plugins=plugins)
            experiment.dryrun(log=False)
        (job,) = experiment.jobs
        infos = job._dryrun_infos if isinstance(task, list) else [job._dryrun_info]
        (info,) = infos
        return info.request.plan

    return make


@pytest.fixture
def roles(planned) -> Callable[..., tuple[RoleSpec, ...]]:
    """The roles of a group, one for each dict of an executor's fields."""

    def make(*fields: dict[str, Any], **options: Any) -> tuple[RoleSpec, ...]:
        executors = [_executor(**one) for one in fields]
        return planned(_tasks(len(fields)), executors, **options).spec.roles

    return make


@pytest.fixture
def single(planned) -> Callable[..., JobSpec | GroupSpec]:
    """The spec of one task."""

    def make(**fields: Any) -> JobSpec | GroupSpec:
        return planned(run.Script(inline="true"), _executor(**fields)).spec

    return make


def _app(*names: str) -> AppDef:
    return AppDef("g", [Role(name, image="", entrypoint="true") for name in names])


def _merged(*fields: dict[str, Any]) -> RayExecutor:
    return RayExecutor.merge([_executor(**one) for one in fields], len(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"role": "x y, named but alone"},
        {"gpus_per_node": 8},
        {"launcher": "torchrun", "ntasks_per_node": 8},
        {"launcher": "ft", "ntasks_per_node": 8},
        {"strategy": "SPREAD"},
    ],
    ids=str,
)
def test_single_tasks_stay_single(single, fields):
    spec = single(**fields)
    assert isinstance(spec, JobSpec)
    assert spec.env["NEMO_RUN_HEAD_NODE_IP"] == "127.0.0.1"


@pytest.mark.parametrize(
    "fields",
    [
        {"nodes": 2},
        {"ntasks_per_node": 2},
        {"nodes": 2, "launcher": "torchrun"},
        {"ports": {"http": 0}},
    ],
    ids=str,
)
def test_a_task_of_several_replicas_processes_or_ports_is_a_group_of_one_role(planned, fields):
    made = planned(run.Script(inline="true"), _executor(**fields), name="job")
    assert isinstance(made.spec, GroupSpec)
    (role,) = made.spec.roles
    assert role.name == "job"
    assert (role.replicas, role.service) == (fields.get("nodes", 1), False)
    assert made.reservation == {}
    assert made.runtime_env == {}


@given(st.text(max_size=60))
def test_any_text_is_a_role_with_proper_variables_or_refused(name):
    merged = _merged({"role": name}, {"role": "other", "service": True, "ports": {"a b": 0}})
    refusal = ""
    try:
        spec = plan(_app("g-0", "g-1"), merged, "exp.g", "g").spec
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        assert repr(name) in refusal
        return
    who = (name or "g-0", 0)
    hosts = {who: "10.0.0.1", ("other", 0): "10.0.0.2"}
    found = variables(spec, who, hosts, {who: {}, ("other", 0): {"a b": 1}})
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", one) for one in found)
    assert found["NEMO_RUN_OTHER_PORT_A_B"] == "1"


def test_a_tasks_variables_are_before_its_executors(planned):
    tasks = [run.Script(inline="true", env={"A": "task"}), *_tasks(1)]
    one, two = planned(tasks, _executor(env_vars={"A": "executor", "B": "executor"})).spec.roles
    assert one.task.env == {"A": "task", "B": "executor"}
    assert two.task.env == {"A": "executor", "B": "executor"}


def test_a_variable_that_is_no_text_is_named(planned):
    """NeMo-Run takes any value for a script's."""
    with pytest.raises(ConfigError, match="'A' with a value of type int"):
        planned(run.Script(inline="true", env={"A": 1}), _executor())
    with pytest.raises(ConfigError, match="has the name 1 with a value"):
        planned(run.Script(inline="true", env={1: "a"}), _executor())


_RESOURCES = [
    ({}, {"memory": 1}),
    ({"cpus_per_node": 0, "gpus_per_node": 0, "memory_per_node": 0}, {"memory": 1}),
    ({"resources_per_node": {"x": 0}}, {"memory": 1}),
    ({"cpus_per_node": 0.5}, {"CPU": 0.5}),
    ({"gpus_per_node": 8}, {"GPU": 8}),
    ({"memory_per_node": "1KiB"}, {"memory": 1024}),
    (
        {
            "cpus_per_node": 4,
            "gpus_per_node": 0.25,
            "memory_per_node": 7,
            "resources_per_node": {"a b": 2, "node:x": 0.001},
        },
        {"CPU": 4, "GPU": 0.25, "memory": 7, "a b": 2, "node:x": 0.001},
    ),
]


@pytest.mark.parametrize(("fields", "expected"), _RESOURCES, ids=lambda one: str(one)[:40])
def test_resources(roles, single, fields, expected):
    """Never nothing: Ray refuses an empty bundle."""
    found = roles(fields, {"gpus_per_node": 3})
    assert [role.resources for role in found] == [expected, {"GPU": 3}]
    (alone,) = single(nodes=2, **fields).roles
    assert alone.resources == expected


@pytest.mark.parametrize(
    ("strategies", "nodes", "common", "spreads"),
    [
        (("PACK", "PACK"), (1, 1), "PACK", ("", "")),
        (("PACK", "PACK"), (2, 3), "PACK", ("", "")),
        (("STRICT_PACK", "STRICT_PACK"), (1, 2), "STRICT_PACK", ("", "")),
        (("SPREAD", "PACK"), (2, 2), "PACK", ("SPREAD", "")),
        (("PACK", "STRICT_SPREAD"), (1, 2), "PACK", ("", "STRICT_SPREAD")),
        (("STRICT_SPREAD", "SPREAD"), (2, 2), "PACK", ("STRICT_SPREAD", "SPREAD")),
        # Spreading is about the replicas of one role.
        (("SPREAD", "SPREAD"), (2, 2), "PACK", ("SPREAD", "SPREAD")),
        (("STRICT_SPREAD", "STRICT_SPREAD"), (2, 1), "PACK", ("STRICT_SPREAD", "")),
        (("SPREAD", "PACK"), (1, 2), "PACK", ("", "")),
    ],
)
def test_the_strategy_of_a_group(planned, strategies, nodes, common, spreads):
    pairs = zip(strategies, nodes, strict=True)
    executors = [_executor(strategy=one, nodes=count) for one, count in pairs]
    spec = planned(_tasks(len(nodes)), executors).spec
    assert spec.strategy == common
    assert tuple(role.spread for role in spec.roles) == spreads


@pytest.mark.parametrize(
    ("fields", "has_labels"),
    [
        ([{}], False),
        ([{"nodes": 2, "strategy": "SPREAD"}], False),
        ([{"label_selector": {"a": "b"}}], True),
        ([{}, {"label_selector": {"a": "b"}}], True),
        ([{"strategy": "SPREAD", "nodes": 2}, {}], True),
    ],
)
def test_labels_need_a_newer_ray(planned, fields, has_labels):
    made = planned(_tasks(len(fields)), [_executor(**one) for one in fields])
    made.check_version("2.54.0")
    refused = pytest.raises(TooOld, match=r"Ray 2\.54 or newer.*runs 2\.9\.0\.")
    with refused if has_labels else contextlib.nullcontext():
        made.check_version("2.9.0")


def _option(role: RoleSpec, name: str) -> str:
    return role.task.argv[role.task.argv.index(name) + 1]


def test_torchrun_on_one_role(planned):
    tasks = [run.Script(path="a b.py", entrypoint="python", args=WORDS), *_tasks(1)]
    executors = [_executor(launcher="torchrun", nodes=2, ntasks_per_node=4), _executor()]
    launched, plain = planned(tasks, executors).spec.roles
    assert launched.task.argv[0] == "torchrun"
    assert _option(launched, "--nnodes") == "2"
    assert _option(launched, "--nproc-per-node") == "4"
    assert _option(launched, "--node-rank") == "$NEMO_RUN_NODE_RANK"
    assert _option(launched, "--rdzv-endpoint") == f"{HEAD}:$NEMO_RUN_RDZV_PORT"
    assert launched.task.argv[-len(WORDS) - 3 :] == ("--no-python", "python", "a b.py", *WORDS)
    # torchrun starts the processes, and ranks them.
    assert (launched.replicas, launched.processes, launched.ranked) == (2, 1, False)
    assert launched.ports == {RENDEZVOUS: 0}
    assert plain.task.argv[0] == "bash"
    assert (plain.replicas, plain.processes, plain.ranked) == (1, 1, False)
    assert plain.ports == {}


@pytest.mark.parametrize("kind", [Torchrun, FaultTolerance])
def test_the_rendezvous_port(single, roles, kind):
    """NeMo-Run's default is one for all, and two jobs on a node would meet there."""

    def endpoints(launcher: Torchrun | FaultTolerance) -> list[str]:
        fields = {"launcher": launcher, "nodes": 2}
        (alone,) = single(**fields).roles
        one, _ = roles(fields, {})
        if launcher == kind():
            assert alone.ports == one.ports == {RENDEZVOUS: 0}
        return [_option(role, "--rdzv-endpoint") for role in (alone, one)]

    assert endpoints(kind()) == [f"{HEAD}:$NEMO_RUN_RDZV_PORT"] * 2
    assert endpoints(kind(rdzv_port=12345)) == [f"{HEAD}:12345"] * 2


def test_the_packagers_of_the_roles_that_ship_code(planned):
    git, pattern = (
        run.GitArchivePackager(),
        run.PatternPackager(include_pattern="*.toml", relative_path="."),
    )
    executors = [
        _executor(role="a", packager=git),
        _executor(packager=pattern),
        _executor(role="none"),
        _executor(role="d", packager=run.GitArchivePackager()),
    ]
    made = planned(_tasks(4), executors)
    assert made.packagers == {"a": git, "g-1": pattern, "d": git}
    assert [role.task.has_code for role in made.spec.roles] == [True, True, False, True]
    alone = planned(run.Script(inline="true"), _executor(nodes=2, packager=git), name="job")
    assert alone.packagers == {"job": git}
    assert alone.spec.roles[0].task.has_code


def test_a_secret_that_a_plugin_sets_in_clear_is_refused(roles, monkeypatch):
    """As for a task alone: a value of a secret may not appear in a spec."""
    with pytest.raises(ConfigError, match="TOKEN"):
        roles({"secrets": ["TOKEN"]}, {}, plugins=[Sets(env={"TOKEN": "clear"})])


def test_on_the_embedded_ray_roles_without_code_run_in_the_callers_folder(planned):
    executors = [RayExecutor(), RayExecutor(packager=run.GitArchivePackager())]
    spec = planned(_tasks(2), executors).spec
    assert spec.python == sys.executable
    assert [role.task.python for role in spec.roles] == [sys.executable] * 2
    assert [role.task.cwd for role in spec.roles] == [os.getcwd(), None]
    assert planned(_tasks(1), _executor()).spec.roles[0].task.cwd is None


def test_one_executor_for_all_tasks_is_copied_for_each():
    given = _executor(env_vars={"A": "1"}, ports={"http": 0}, runtime_env={"pip": ["x"]})
    merged = RayExecutor.merge([given], 3)
    copies = merged.resource_group
    assert copies == [given] * 3
    assert len({id(one) for one in copies}) == 3
    copies[0].env_vars["A"] = "2"
    copies[0].runtime_env["pip"].append("y")
    copies[0].ports["http"] = 80
    assert copies[1] == copies[2] == given
    assert given.env_vars == {"A": "1"}
    assert given.runtime_env == {"pip": ["x"]}


def test_what_the_dispatcher_sees_to_is_the_whole_groups():
    merged = _merged(
        {"role": "a", "retries": 1, "max_in_flight": 4, "permanent_exit_codes": [2]},
        {"role": "b", "retries": 3, "max_in_flight": 2, "dependencies": ["ray_jobs://x/y"]},
        {"role": "s", "service": True, "retries": 9, "permanent_exit_codes": [64]},
    )
    assert (merged.retries, merged.max_in_flight) == (3, 2)
    assert merged.permanent_exit_codes == [2, 64]
    assert merged.dependencies == ["ray_jobs://x/y"]


def test_a_merged_executor_is_not_merged_again():
    """NeMo-Run merges again when it loads a saved group."""
    merged = _merged({"role": "a"}, {"role": "b"})
    assert RayExecutor.merge([merged], 2) is merged
    clone = merged.clone()
    assert RayExecutor.merge([clone], 2) is clone


#: What is wrong: the executors' fields, and the words that the message must have.
_REFUSED: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "two roles of one name": ([{"role": "a"}, {"role": "a"}], ["'a'", "RayExecutor.role"]),
    "two that would share variables": (
        [{"role": "a-b"}, {"role": "c"}, {"role": "A_b"}],
        ["'a-b'", "'A_b'", "NEMO_RUN_A_B_HOST", "RayExecutor.role"],
    ),
    "two ports that would share a variable": (
        [{"role": "a", "ports": {"http": 0, "HTTP": 0}}, {}],
        ["'a'", "http, HTTP", "RayExecutor.ports"],
    ),
    "no primary": (
        [{"role": "a", "service": True}, {"role": "b", "service": True}],
        ["a, b", "RayExecutor.service"],
    ),
    "a probe on a port that the role lacks": (
        [{"role": "a", "service": True, "ready": PortProbe("web"), "ports": {"http": 0}}, {}],
        ["'a'", "'web'", "RayExecutor.ready", "http", "RayExecutor.ports"],
    ),
    "a probe on a primary": (
        [{"role": "a", "ready": CommandProbe(["true"])}, {}],
        ["'a'", "RayExecutor.ready", "service=True"],
    ),
    "a name with a space": ([{"role": "a b"}, {}], ["'a b'", "RayExecutor.role"]),
    "a name that is too long": (
        [{"role": "x" * (ROLE_MAX + 1)}, {}],
        ["x" * (ROLE_MAX + 1), str(ROLE_MAX), "RayExecutor.role"],
    ),
    "one strict pack": (
        [{"role": "a", "strategy": "STRICT_PACK"}, {}],
        ["'a'", "RayExecutor.strategy", "label_selector"],
    ),
}


@pytest.fixture
def submitted(monkeypatch) -> list[str]:
    """The jobs that were submitted."""
    jobs: list[str] = []

    def submit(self: Batch, planned: JobPlan) -> None:
        jobs.append(planned.job)
        raise AssertionError(f"{planned.job} was submitted")

    monkeypatch.setattr(Batch, "submit", submit)
    return jobs


def _run(title: str, executors: list[RayExecutor]) -> None:
    """An experiment of a good task and a group, in this order."""
    with run.Experiment(title) as experiment:
        experiment.add(run.Script(inline="true"), executor=_executor(), name="first")
        experiment.add(_tasks(len(executors)), executor=executors, name="g")
        experiment.run()


@pytest.mark.parametrize("what", _REFUSED)
def test_what_does_not_go_together_is_refused_before_anything_starts(submitted, unique, what):
    fields, words = _REFUSED[what]
    with pytest.raises(ConfigError) as caught:
        _run(unique, [_executor(**one) for one in fields])
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert submitted == []


@pytest.mark.parametrize(
    ("name", "value", "words"), [("gpus_per_node", 1.5, "1.5"), ("ready", "http", "'http'")]
)
def test_what_was_assigned_to_a_role_later_is_checked(roles, name, value, words):
    for number, role in enumerate(("named", "g-1")):
        with pytest.raises(ConfigError) as caught:
            roles({"role": "named"}, {}, plugins=[Sets(role=number, fields={name: value})])
        for word in (f"The role {role!r}", f"RayExecutor.{name}", words):
            assert word in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("nodes", 2), ("runtime_env", {"pip": ["x"]})])
def test_a_field_of_the_whole_group_that_would_do_nothing_is_refused(roles, name, value):
    """As a launcher is: a plug-in that sets it must hear that it belongs to the roles."""
    with pytest.raises(ConfigError, match=f"RayExecutor.{name}"):
        roles({}, {}, plugins=[Sets(fields={name: value})])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"service": True}, "service"),
        ({"service": True, "ports": {"http": 0}}, "service"),
        ({"ready": PortProbe(80)}, "ready"),
    ],
)
def test_what_is_for_groups_is_refused_for_a_task_alone(single, fields, name):
    with pytest.raises(ConfigError, match=rf"RayExecutor\.{name} "):
        single(**fields)


def test_the_executor_of_another_group_is_refused(planned):
    """A merged executor, as a loaded experiment has it, knows how many tasks it is for."""
    merged = _merged({"role": "a"}, {"role": "b"})
    assert len(planned(_tasks(2), merged).spec.roles) == 2
    for count in (1, 3):
        with pytest.raises(ConfigError, match=r"resource_group|roles|tasks"):
            planned(_tasks(count), merged)
