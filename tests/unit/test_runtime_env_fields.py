"""The fields of ``runtime_env``, held against Ray's own class."""

import itertools
import json
import os

import nemo_run as run
import pytest
from nemo_run.core.packaging.base import Packager
from ray.runtime_env import RuntimeEnv
from torchx.specs import AppDef, Role

from nemo_run_ray import LocalCluster, RayExecutor
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import check_runtime_env, resolve_runtime_env
from nemo_run_ray.plan.job import describe, plan
from nemo_run_ray.remote.spec import GroupSpec

#: One value for each field that users set.
_GIVEN = {
    "pip": ["einops"],
    "uv": {"packages": ["einops"], "uv_pip_install_options": ["--no-cache"]},
    "conda": {"dependencies": ["pip", {"pip": ["einops"]}]},
    "env_vars": {"A": "b"},
    "image_uri": "registry.example.org/vllm:1",
    "container": {"image": "registry.example.org/vllm:1", "run_options": ["--cap-drop=ALL"]},
    "py_executable": "python -X dev",
    "worker_process_setup_hook": "module.function",
    "nsight": "default",
    "rocprof_sys": "default",
    "java_jars": ["gcs://a.jar"],
    "config": {"setup_timeout_seconds": 60},
}
#: Fields that packagers stand for, and those that Ray sets itself.
_REFUSED = {"working_dir", "py_modules", "excludes"}
_RAYS_OWN = {"_ray_release", "_ray_commit", "_inject_current_ray", "_nsight", "_rocprof_sys"}


def _app() -> AppDef:
    return AppDef("job", [Role("job", image="", entrypoint="true")])


def _sent(runtime_env: dict, packager: Packager | None = None) -> dict:
    """What Ray gets for a task of this runtime environment: with the job, or with its actor."""
    executor = RayExecutor(
        address="http://h:1", runtime_env=runtime_env, packager=packager or Packager()
    )
    planned = plan(_app(), executor, "exp.job", "job")
    code = {"job": "gcs://code.zip"} if planned.packagers else {}
    body = planned.body(code, ["gcs://job.zip"], "0123456789abcdef")
    if isinstance(planned.spec, GroupSpec):
        RuntimeEnv(**body["runtime_env"])  # that of the driver
        return dict(planned.spec.roles[0].runtime_env)
    return dict(body["runtime_env"])


def test_every_field_of_rays_is_known_here():
    """A new Ray with a new field fails here: it is to be added, or named as refused."""
    fields = set(RuntimeEnv.known_fields) - _REFUSED - _RAYS_OWN
    assert fields <= set(_GIVEN)
    for name, value in _GIVEN.items():
        check_runtime_env({name: value})
    for name in _REFUSED:
        with pytest.raises(ConfigError, match="packager says which code is sent"):
            check_runtime_env({name: "x"})


@pytest.mark.parametrize(
    "packager", [None, run.PatternPackager(include_pattern="*", relative_path=".")]
)
@pytest.mark.parametrize("name", sorted(_GIVEN))
def test_ray_takes_what_is_sent_for_each_field(name, packager):
    sent = _sent({name: _GIVEN[name]}, packager)
    assert name in sent
    RuntimeEnv(**sent)


@pytest.mark.parametrize(("one", "two"), itertools.combinations(sorted(_GIVEN), 2))
def test_two_fields_that_ray_does_not_combine_are_refused_before_anything_is_sent(one, two):
    both = {one: _GIVEN[one], two: _GIVEN[two]}
    try:
        RuntimeEnv(**both)
    except ValueError:
        with pytest.raises(ConfigError, match=one):
            RayExecutor(runtime_env=both)
    else:
        RuntimeEnv(**_sent(both))


def test_none_is_not_given():
    """As in Ray's own class."""
    runtime_env = {"pip": None, "uv": ["x"], "conda": None, "env_vars": None, "config": None}
    RayExecutor(runtime_env=runtime_env)
    assert resolve_runtime_env(runtime_env) == {"uv": ["x"]}
    RayExecutor(runtime_env={"pip": ["x"], "working_dir": None, "_inject_current_ray": True})


def test_values_that_may_be_credentials_are_not_shown():
    with pytest.raises(ConfigError) as caught:
        RayExecutor(runtime_env={"env_vars": {"KEY": "s3cret", "N": 1}})
    assert "s3cret" not in str(caught.value)
    given = {"pip": ["--extra-index-url https://me:s3cret@example.org/simple", "x"]}
    planned = plan(_app(), RayExecutor(address="http://h:1", runtime_env=given), "exp.job", "job")
    assert "s3cret" not in describe(planned, "c", [])
    assert "https://***@example.org" in describe(planned, "c", [])


def test_unknown_fields_pass_when_they_are_allowed():
    executor = RayExecutor(
        address="http://h:1", runtime_env={"mpi": {"args": []}}, allow_unknown_runtime_env=True
    )
    body = plan(_app(), executor, "exp.job", "job").body({}, [], "0123456789abcdef")
    assert body["runtime_env"]["mpi"] == {"args": []}
    with pytest.raises(ConfigError, match="is 3: allowed"):  # what is known is checked all the same
        RayExecutor(runtime_env={"pip": 3}, allow_unknown_runtime_env=True)


def test_files_are_read_where_the_caller_is(weird_tmp_path, monkeypatch):
    """Ray's server would look for them on the head."""
    monkeypatch.chdir(weird_tmp_path)
    (weird_tmp_path / "req.txt").write_text("# ours\neinops==0.8\n\nx>1 ; python_version>'3'\n")
    (weird_tmp_path / "env.yml").write_text("dependencies: [python=3.11]\n")
    lines = ["# ours", "einops==0.8", "", "x>1 ; python_version>'3'"]
    assert resolve_runtime_env({"pip": "req.txt"}) == {"pip": lines}
    assert resolve_runtime_env({"uv": {"packages": "req.txt"}}) == {"uv": {"packages": lines}}
    assert resolve_runtime_env({"conda": "env.yml"}) == {"conda": {"dependencies": ["python=3.11"]}}
    assert resolve_runtime_env({"conda": "an-environment"}) == {"conda": "an-environment"}
    assert RuntimeEnv(pip="req.txt")["pip"]["packages"] == list(dict.fromkeys(lines))
    json.dumps(_sent({"pip": "req.txt"}))


def test_files_that_requirements_include_are_read_too(weird_tmp_path, monkeypatch):
    monkeypatch.chdir(weird_tmp_path)
    (weird_tmp_path / "sub").mkdir()
    (weird_tmp_path / "req.txt").write_text("einops\n-r sub/more.txt\nlast\n")
    (weird_tmp_path / "sub" / "more.txt").write_text("--requirement=other.txt  # there\nmore\n")
    (weird_tmp_path / "sub" / "other.txt").write_text("other")
    expected = ["einops", "other", "more", "last"]
    assert resolve_runtime_env({"pip": "req.txt"}) == {"pip": expected}
    assert resolve_runtime_env({"uv": {"packages": ["-r req.txt"]}}) == {
        "uv": {"packages": expected}
    }
    assert resolve_runtime_env({"pip": ["-rreq.txt", "ray-x"]}) == {"pip": [*expected, "ray-x"]}
    (weird_tmp_path / "sub" / "other.txt").write_text("-c constraints.txt")
    with pytest.raises(ConfigError, match="whose file is not on the node"):
        resolve_runtime_env({"pip": "req.txt"})


@pytest.mark.parametrize(
    ("runtime_env", "text"),
    [
        ({"pip": "einops"}, None),
        ({"pip": "none.txt"}, None),
        ({"conda": "e.yml"}, "a: ["),
        ({"conda": "e.yml"}, "- a"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, runtime_env, text):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "e.yml").write_text(text)
    (name,) = runtime_env.values()
    with pytest.raises(ConfigError, match=f"'{name}' in {tmp_path}, which cannot be read as a"):
        _sent(runtime_env)


@pytest.mark.parametrize(
    ("runtime_env", "python", "expected"),
    [
        ({}, None, "embedded"),
        ({"env_vars": {"A": "b"}}, None, "embedded"),
        ({"py_executable": "python -X dev"}, None, "embedded"),  # of Ray's workers alone
        ({"pip": ["x"]}, None, None),
        ({"uv": ["x"]}, None, None),
        ({"conda": "an-environment"}, None, None),
        ({"image_uri": "image"}, None, None),
        ({}, "/opt/python", "/opt/python"),
        ({"pip": ["x"]}, "/opt/python", "/opt/python"),
        ({"image_uri": "image"}, "/opt/python", "/opt/python"),
    ],
)
@pytest.mark.parametrize("embedded", [True, False])
def test_which_python_a_task_gets(runtime_env, python, expected, embedded):
    """``python=``, then the runtime environment's, then the cluster's."""
    cluster = LocalCluster() if embedded else None
    where = {"cluster": cluster} if embedded else {"address": "http://h:1"}
    executor = RayExecutor(runtime_env=runtime_env, python=python, **where)
    spec = plan(_app(), executor, "exp.job", "job").spec
    task = spec.roles[0].task if isinstance(spec, GroupSpec) else spec
    of_cluster = cluster.python if cluster is not None else None
    assert task.python == (of_cluster if expected == "embedded" else expected)


def test_a_groups_driver_is_not_run_by_the_python_of_an_image():
    executor = RayExecutor(
        address="http://h:1", runtime_env={"image_uri": "i"}, python="/in/image/python"
    )
    planned = plan(_app(), executor, "exp.job", "job")
    assert planned.spec.python is None
    assert planned.spec.roles[0].task.python == "/in/image/python"


def test_a_container_does_not_run_in_the_callers_folder():
    apart = plan(_app(), RayExecutor(runtime_env={"image_uri": "i"}), "exp.job", "job")
    assert apart.spec.roles[0].task.cwd is None
    here = plan(_app(), RayExecutor(ports={"http": 0}), "exp.job", "job")
    assert here.spec.roles[0].task.cwd == os.getcwd()
