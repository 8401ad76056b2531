import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nemo_run as run
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nemo_run.run.torchx_backend.packaging import package
from torchx.specs import AppDef, Role

from nemo_run_ray import RayExecutor
from nemo_run_ray.fields import HttpProbe
from nemo_run_ray.ids import job_id, safe_id
from nemo_run_ray.plan.job import JobPlan, describe, entrypoint, plan
from nemo_run_ray.remote import start
from tests.unit.plan.test_roles import WORDS


def _app(*argv: str, **env: str) -> AppDef:
    return AppDef("job", [Role("job", image="", entrypoint=argv[0], args=list(argv[1:]), env=env)])


def _planned(app: AppDef, **fields: object) -> JobPlan:
    fields = {"address": "http://h:1", **fields}
    return plan(app, RayExecutor(**fields), "exp.job", "job")


def _group_plan() -> JobPlan:
    """A group of a service and two replicas of a primary."""
    service = RayExecutor(
        address="http://h:1",
        role="store",
        service=True,
        ports={"http": 0, "rpc": 7000},
        ready=HttpProbe("http", path="/up", timeout_s=90),
        env_vars={"MODE": "a b"},
        memory_per_node="1KiB",
        label_selector={"zone": "in(a,b)"},
    )
    primary = RayExecutor(
        address="http://h:1",
        role="train",
        nodes=2,
        ntasks_per_node=4,
        gpus_per_node=4,
        secrets=["TOKEN"],
        runtime_env={"pip": ["x"]},
        grace_s=60,
    )
    merged = RayExecutor.merge([service, primary], 2)
    app = AppDef(
        "job",
        [
            Role("job-0", image="", entrypoint="serve", args=["a b", "$HOME"]),
            Role("job-1", image="", entrypoint="python", args=["x.py"]),
        ],
    )
    return plan(app, merged, "exp.job", "job")


@pytest.fixture
def packed(tmp_path):
    """NeMo-Run's own application of a task."""

    def pack(task: object, **fields: object) -> tuple[AppDef, RayExecutor]:
        executor = RayExecutor(address="http://h:1", **fields)
        executor.assign("exp", str(tmp_path), "job", "job")
        return package("job", task, executor, serialize_to_file=True), executor

    return pack


def test_a_scripts_words_stay_as_they_are(packed):
    app, executor = packed(run.Script(path="a b.sh", args=WORDS))
    assert plan(app, executor, "exp.job", "job").spec.argv == ("bash", "a b.sh", *WORDS)


def test_reservations():
    fields = {"cpus_per_node": 0, "gpus_per_node": 0.5, "memory_per_node": "1KiB"}
    fields |= {"resources_per_node": {"x": 1}, "label_selector": {"a": "b"}}
    assert _planned(_app("true"), **fields).reservation == {
        "entrypoint_num_cpus": 0,
        "entrypoint_num_gpus": 0.5,
        "entrypoint_memory": 1024,
        "entrypoint_resources": {"x": 1},
        "entrypoint_label_selector": {"a": "b"},
    }
    assert _planned(_app("true")).reservation == {}


def test_the_body():
    planned = _planned(
        _app("true", SECRET_LOOKING="x"),
        runtime_env={"pip": ["y"], "env_vars": {"A": "1"}},
        secrets=["TOKEN"],
        grace_s=60,
    )
    body = planned.body({"job": "gcs://code.zip"}, ["gcs://job.zip"], "nonce")
    assert body["submission_id"] == "exp.job"
    assert "nonce" in body["metadata"].values()
    assert body["runtime_env"]["working_dir"] == "gcs://code.zip"
    assert body["runtime_env"]["py_modules"] == ["gcs://job.zip"]
    assert body["runtime_env"]["pip"] == ["y"]
    variables = body["runtime_env"]["env_vars"]
    assert variables["A"] == "1"
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > 60
    assert "NEMO_RUN_RAY_CODE" not in variables
    assert "working_dir" not in planned.body({}, [], "nonce")["runtime_env"]
    assert planned.runtime_env == {"pip": ["y"], "env_vars": {"A": "1"}}
    json.dumps(body)


def test_several_codes_travel_side_by_side():
    """Ray unpacks one as the working directory, once; the others lie beside the job archive."""
    code = {"a": "gcs://1.zip", "b": "gcs://2.zip", "c": "gcs://1.zip", "d": "gcs://3.zip"}
    planned = _group_plan()
    body = planned.body(code, ["gcs://job.zip", "gcs://secrets.zip"], "nonce")
    runtime_env = body["runtime_env"]
    assert runtime_env["working_dir"] == "gcs://1.zip"
    modules = ["gcs://job.zip", "gcs://secrets.zip", "gcs://2.zip", "gcs://3.zip"]
    assert runtime_env["py_modules"] == modules
    assert json.loads(runtime_env["env_vars"]["NEMO_RUN_RAY_CODE"]) == {
        "a": "1.zip",
        "b": "2.zip",
        "c": "1.zip",
        "d": "3.zip",
    }


_names = st.text(max_size=300)
_alike = st.text("a.-_ é", max_size=6)


@given(_names, _names)
@example(".", "..")
@example("x" * 500, "é" * 500)
def test_an_id_is_safe_in_a_files_name_and_a_url(experiment, job):
    found = job_id(experiment, job)
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", found)
    assert len(f"job-driver-{found}.log") < 255
    assert found not in (".", "..")
    assert found == job_id(experiment, job)


@given(_alike, _alike)
def test_different_names_have_different_ids(one, two):
    assert (safe_id(one) == safe_id(two)) == (one == two)


_FAKE = """
import json, sys
def main(argv):
    print(json.dumps([argv, sys.executable, json.__file__]))
    return 5
"""


@pytest.fixture
def node(tmp_path):
    """Runs a line as Ray does, in a folder whose files would shadow the standard library."""
    archive = tmp_path / "archive"
    (archive / "nemo_run_ray_remote").mkdir(parents=True)
    (archive / "nemo_run_ray_remote" / "__init__.py").touch()
    (archive / "nemo_run_ray_remote" / "__main__.py").write_text(_FAKE)
    shutil.copy(start.__file__, archive / "nemo_run_ray_remote")
    work = tmp_path / "work dir"
    work.mkdir()
    # Where a file is called os.py or re.py, Ray's own workers do not start.
    for name in ("json", "select", "socket", "subprocess", "tempfile", "dataclasses"):
        (work / f"{name}.py").write_text("raise SystemExit('the wrong module')")

    def execute(line: str, path: str) -> subprocess.CompletedProcess:
        env = {"PATH": path, "PYTHONPATH": f"{work}:{archive}", "LC_ALL": "C.UTF-8"}
        words = ["/bin/sh", "-c", line]
        return subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, timeout=60)

    return execute


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _python(path: Path) -> None:
    _program(path, f'#!/bin/sh\nexec {sys.executable} "$@"\n')


def _lacking_python(path: Path, serves: str, pretends: str = "") -> None:
    """A Python that runs ``start``, and ``serves`` when it is asked whether it does."""
    program = (
        f"import runpy, sys; {pretends}sys.executable = sys.argv[1]; sys.argv = sys.argv[4:]; "
        'runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)'
    )
    begin = f'exec {sys.executable} -c {shlex.quote(program)} "$0" "$@"'
    runs = f'[ "$1 $2" = "-S -c" ] && exec {sys.executable} "$@"'
    _program(path, f'#!/bin/sh\n[ "$1 $2" = "-S -m" ] && {begin}\n{runs}\n{serves}\n')


def _python_without_ray(path: Path) -> None:
    _lacking_python(path, f'exec {sys.executable} -S "$@"')


def _old_python(path: Path) -> None:
    _lacking_python(path, "exit 1", "sys.version_info = (3, 6, 9); ")


_LINE = entrypoint(None, ["task", "job", "exp.job", "nonce"])
_GROUPS_LINE = entrypoint(None, ["group", "job", "exp.job", "nonce"])


@pytest.mark.parametrize("python", [None, sys.executable])
def test_the_users_files_do_not_shadow_ours(node, tmp_path, python):
    _python(tmp_path / "bin" / "python3")
    line = entrypoint(python, ["task", "it's $HOME", 'a"b`c'])
    done = node(line, str(tmp_path / "bin"))
    assert done.returncode == 5, done.stderr
    argv, _, module = json.loads(done.stdout)
    assert argv == ["task", "it's $HOME", 'a"b`c']
    assert module == json.__file__


def test_a_python3_that_does_not_run_is_passed_over(node, tmp_path):
    """The shim of a version manager that has no version."""
    _program(tmp_path / "bin" / "python3", "#!/bin/sh\nexit 127\n")
    _python(tmp_path / "bin" / "python")
    assert node(_LINE, str(tmp_path / "bin")).returncode == 5
    line = entrypoint(
        None, ["dispatch", "id", "nonce"], [str(tmp_path / "bin" / "python3")], "-gt 128"
    )
    assert node(line, f"{tmp_path / 'bin'}:/usr/bin:/bin").returncode == 5


@pytest.mark.parametrize("shebang", ["#!{python}", "#! {python}"])
@pytest.mark.parametrize("kind", ["task", "group"])
def test_the_python_of_the_ray_command(node, tmp_path, shebang, kind):
    """A node may have Ray in an environment that is not activated."""
    lacking = _old_python if kind == "task" else _python_without_ray
    for name in ("python3", "python"):
        lacking(tmp_path / "bin" / name)
    line = entrypoint(None, [kind, "job", "exp.job", "nonce"])
    assert node(line, str(tmp_path / "bin")).returncode == 127
    _python(tmp_path / "hidden" / "pythonX")
    first = shebang.format(python=tmp_path / "hidden" / "pythonX")
    _program(tmp_path / "bin" / "ray", f"{first}\nimport ray\n")
    done = node(line, str(tmp_path / "bin"))
    assert done.returncode == 5, done.stderr


def test_no_python_that_is_recent_enough(node, tmp_path):
    _old_python(tmp_path / "bin" / "python3")
    done = node(_LINE, str(tmp_path / "bin"))
    assert done.returncode == 127
    assert done.stdout.startswith("nemo_run_ray| no Python of version 3.9 or newer on this node")
    assert "RayExecutor(python=" in done.stdout


def test_a_group_passes_over_a_python_without_ray(node, tmp_path):
    _python_without_ray(tmp_path / "bin" / "python3")
    _python(tmp_path / "bin" / "python")
    done = node(_GROUPS_LINE, str(tmp_path / "bin"))
    assert done.returncode == 5, done.stderr
    assert done.stdout.count("[") == 2  # it ran once
    assert node(_LINE, str(tmp_path / "bin")).returncode == 5


_GOLDEN = """\
Ray job               exp.job
cluster               a cluster
sends                 code
sends                 configs
command               python 'a b.py' '$HOME'
startup command       source a.sh
                      b
startup command       c
folder                a private run directory on the node
grace_s               10
runtime_env           pip=['x']
env                   A=1
env                   NEMO_RUN_HEAD_NODE_IP=127.0.0.1
env                   NEMO_RUN_NPROC_PER_NODE=1
env                   NEMO_RUN_NUM_NODES=1
env                   NEMO_RUN_NODE_RANK=0
secrets               TOKEN
num_cpus              2
num_gpus              1"""


def test_the_dry_run(monkeypatch):
    monkeypatch.setenv("TOKEN", "very-secret")
    planned = _planned(
        _app("python", "a b.py", "$HOME", A="1"),
        cpus_per_node=2,
        gpus_per_node=1,
        secrets=["TOKEN"],
        runtime_env={"pip": ["x"]},
        startup_commands=["source a.sh\nb", "c"],
    )
    assert describe(planned, "a cluster", ["code", "configs"]) == _GOLDEN


_GOLDEN_GROUP = """\
Ray job               exp.job
cluster               a cluster
sends                 code
sends                 configs
strategy              PACK, all 2 role(s) at once or none

role                  store, service, 1 replica(s) of 1 process(es)
command               serve 'a b' '$HOME'
folder                a private run directory on the node
grace_s               10
env                   MODE=a b
reserves              memory=1024
label_selector        zone=in(a,b)
ports                 http=free, rpc=7000
ready                 HttpProbe(interval_s=1, timeout_s=90, port='http', path='/up', status=200)

role                  train, primary, 2 replica(s) of 4 process(es)
command               python x.py
folder                a private run directory on the node
grace_s               60
runtime_env           pip=['x']
secrets               TOKEN
reserves              GPU=4"""


def test_the_dry_run_of_a_group(monkeypatch):
    monkeypatch.setenv("TOKEN", "very-secret")
    assert describe(_group_plan(), "a cluster", ["code", "configs"]) == _GOLDEN_GROUP
