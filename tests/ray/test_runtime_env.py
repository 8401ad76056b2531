"""Which Python and which packages a task gets, and what is said when they cannot be had."""

import json
import os
import shutil
import sys
import threading
import time
import zipfile
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.experiment.job import find_job
from nemo_run_ray.remote.status import JobState, Reason
from tests.conftest import BIN, CONDA, TRUE, tool
from tests.groups import client, finish, submit_one
from tests.http_server import Handler, serving
from tests.stand_ins import CONDA_ENVIRONMENT, IMAGE, conda, podman

#: Where ``python`` of a command is, and what it can import.
_SHOW = "import sys, {module}; print('ran', {module}.__name__, sys.executable, sys.prefix)"


_NOWHERE = "nrr-no-such-package"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A package that no environment has; it needs no index and no build."""
    folder = tmp_path_factory.mktemp("wheel")
    path = folder / "nrr_probe-1.0-py3-none-any.whl"
    info = "nrr_probe-1.0.dist-info"
    files = {
        "nrr_probe.py": "import sys\n\n\ndef where():\n    print('ran', __name__, sys.prefix)\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: nrr-probe\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(record, "".join(f"{name},,\n" for name in [*files, record]))
    return path


@pytest.fixture(params=["embedded", pytest.param("existing", marks=pytest.mark.soak)])
def where(request, local_cluster, existing) -> dict:
    """Fields of an executor: both ways to the same Ray."""
    return {} if request.param == "embedded" else {"cluster": existing}


def ran(task: object, executor: RayExecutor, name: str) -> str:
    """What a task has printed."""
    job = submit_one(name, executor, task)
    text = "".join(job.output(follow=True))
    status = job.status
    assert status.state is JobState.SUCCEEDED, f"{status.message}\n{text}"
    return text


def pip(wheel: Path) -> dict:
    options = ["--no-index", "--disable-pip-version-check"]
    return {"pip": {"packages": [str(wheel)], "pip_install_options": options}}


def uv(wheel: Path) -> dict:
    return {"uv": {"packages": [str(wheel)], "uv_pip_install_options": ["--no-index", "--offline"]}}


@pytest.mark.soak
def test_the_packages_of_a_script(where, unique, wheel):
    script = run.Script(inline=f'python -c "{_SHOW.format(module="nrr_probe")}"')
    text = ran(script, RayExecutor(runtime_env=pip(wheel), **where), unique)
    assert text.startswith("ran nrr_probe "), "it begins with the task's own output"
    assert "/runtime_resources/pip/" in text
    assert text.count("\n") == 1


@pytest.mark.soak
def test_the_packages_of_uv(local_cluster, unique, wheel):
    script = run.Script(inline=f'python -c "{_SHOW.format(module="nrr_probe")}"')
    text = ran(script, RayExecutor(runtime_env=uv(wheel)), unique)
    assert text.startswith("ran nrr_probe ")
    assert "/runtime_resources/uv/" in text


@pytest.mark.soak
def test_the_packages_of_a_role(local_cluster, unique, wheel):
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        roles = [
            client(f'python -c "{_SHOW.format(module="nrr_probe")}"', runtime_env=pip(wheel)),
            client("python -c 'import nrr_probe' || echo has none", role="other"),
        ]
        experiment.add(
            [run.Script(inline=role.program) for role in roles],
            executor=[RayExecutor(**role.fields) for role in roles],
            name="job",
        )
        experiment.run(detach=True)
    state, _, log = finish(find_job(f"{experiment._id}.job"))
    assert state == "SUCCEEDED", log
    assert "client/0| ran nrr_probe" in log
    assert "/runtime_resources/pip/" in log
    assert "other/0| has none" in log


def test_a_conda_environment(where, unique):
    conda(CONDA)
    program = 'echo "in $CONDA_PREFIX"; command -v python; python -c "import ray; print(1)"'
    executor = RayExecutor(runtime_env={"conda": CONDA_ENVIRONMENT}, **where)
    prefix = CONDA / "envs" / CONDA_ENVIRONMENT
    assert ran(run.Script(inline=program), executor, unique).splitlines() == [
        f"in {prefix}",
        f"{prefix}/bin/python",
        "1",
    ]


def test_the_python_that_is_asked_for_wins(local_cluster, unique, tmp_path):
    """Over the runtime environment's, and over the caller's on the embedded Ray."""
    conda(CONDA)
    asked = tmp_path / "bin" / "python"
    asked.parent.mkdir()
    asked.write_text(f'#!/bin/sh\nASKED=yes exec {sys.executable} "$@"\n')
    asked.chmod(0o755)
    script = run.Script("-c", entrypoint="python", args=["import os; print(os.environ['ASKED'])"])
    for runtime_env in ({}, {"conda": CONDA_ENVIRONMENT}):
        executor = RayExecutor(python=str(asked), runtime_env=runtime_env)
        assert ran(script, executor, f"{unique}{len(runtime_env)}") == "yes\n"


def test_without_an_environment_the_embedded_ray_has_the_callers_python(
    local_cluster, unique, tmp_path, monkeypatch
):
    """Whatever environment is activated, here another one."""
    other = tmp_path / "activated" / "bin"
    other.mkdir(parents=True)
    for name in ("python", "python3"):
        (other / name).write_text("#!/bin/sh\necho the wrong one\n")
        (other / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("VIRTUAL_ENV", str(other.parent))
    script = run.Script(inline="python -c 'import sys; print(sys.executable)'")
    for name, fields in (("a", {}), ("b", {"env_vars": {"PATH": os.environ["PATH"]}})):
        found = ran(script, RayExecutor(**fields), f"{name}{unique}")
        assert found == f"{sys.executable}\n"


@pytest.mark.parametrize(
    "image",
    [{"image_uri": IMAGE}, pytest.param({"container": {"image": IMAGE}}, marks=pytest.mark.soak)],
)
def test_a_task_in_a_container(local_cluster, unique, tmp_path, monkeypatch, image):
    """Ray takes an image alone: the code and the specs travel to it by the object store."""
    podman(BIN)
    (tmp_path / "mine.txt").write_text("shipped")
    monkeypatch.chdir(tmp_path)
    program = 'echo "in $container, PROBE=$PROBE, HOME=$HOME"; cat mine.txt; echo; exit 0'
    executor = RayExecutor(
        runtime_env={**image, "env_vars": {"PROBE": "given"}},
        packager=run.PatternPackager(include_pattern="mine.txt", relative_path=str(tmp_path)),
    )
    text = ran(run.Script(inline=program), executor, unique)
    assert "job/0| in podman, PROBE=given, HOME=\n" in text
    assert "job/0| shipped\n" in text


def test_an_image_that_is_not_there(local_cluster, unique):
    podman(BIN)
    executor = RayExecutor(runtime_env={"image_uri": "registry.example.org/no:1"})
    job = submit_one(unique, executor, TRUE)
    log = "".join(job.log(follow=True))
    status = job.status
    assert (status.state, status.reason) == (JobState.FAILED, Reason.RUNTIME_ENV), status
    first = status.message.splitlines()[0]
    assert "Error: initializing source: name unknown" in first
    assert "Traceback" not in status.message
    assert "Traceback" in log


class Index(Handler):
    """An index without packages, which answers pip's question when a permit is given."""

    permits: threading.Semaphore

    def answer(self) -> None:
        if _NOWHERE in self.path:
            self.permits.acquire(timeout=240)
        self.send(404, "")


@pytest.mark.soak
def test_packages_that_cannot_be_had(existing, unique):
    """pip's own line, first; Ray's traceback in the log; and `status` tells while Ray builds."""
    permits = threading.Semaphore(0)
    told = {}
    with serving(Index, permits=permits) as index:
        options = ["--index-url", index, "--timeout", "240"]
        pip = {"packages": [_NOWHERE], "pip_install_options": options}
        executor = RayExecutor(cluster=existing, runtime_env={"pip": pip})
        job = submit_one(unique, executor, TRUE)
        deadline = time.monotonic() + 300
        while not (status := job.status).state.is_terminal and time.monotonic() < deadline:
            # A build fails when its status has been seen, however slow the machine is.
            if status.reason is Reason.BUILDING and status.reason not in told:
                permits.release(100)
            told.setdefault(status.reason, status.message)
            time.sleep(0.5)

    assert (status.state, status.reason) == (JobState.FAILED, Reason.RUNTIME_ENV)
    first = status.message.splitlines()[0]
    assert first.endswith(f"No matching distribution found for {_NOWHERE}")
    assert "Traceback" not in status.message
    assert Reason.BUILDING in told
    shown = tool("nemo-run-ray", "logs", unique).stdout
    assert "Traceback (most recent call last)" in shown, "a job without output has Ray's log"
    (row,) = json.loads(tool("nemo-run-ray", "status", "--json", unique).stdout)
    assert row["message"] == status.message


@pytest.fixture(scope="module", autouse=True)
def leave_no_stand_in():
    yield
    shutil.rmtree(CONDA, ignore_errors=True)
    (BIN / "podman").unlink(missing_ok=True)
