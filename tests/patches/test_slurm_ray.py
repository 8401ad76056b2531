"""NeMo-Run's script of a Ray cluster on Slurm and ours, from the same input."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import nemo_run as run
import pytest
from nemo_run.core.execution.slurm import SlurmJobDetails
from nemo_run.run.ray.slurm import SlurmRayCluster, SlurmRayRequest

from nemo_run_ray import patches
from tests.conftest import patched

Both = Callable[..., tuple[str, str]]
#: Fields of an executor that NeMo-Run sets after it was made.
_NO_ARGUMENTS = ("stderr_to_stdout", "run_as_group", "resource_group")
_PATCH = patches.patch("slurm_ray")


@pytest.fixture
def both(tmp_path) -> Iterator[Both]:
    """(NeMo-Run's script, ours) of a request's fields and an executor's."""

    def make(executor: dict[str, Any] | None = None, **fields: Any) -> tuple[str, str]:
        def request() -> SlurmRayRequest:
            tunnel = run.LocalTunnel(job_dir=str(tmp_path))
            given = {"account": "acc", "partition": "gpu", "nodes": 2, "tunnel": tunnel}
            given |= executor or {}
            later = {name: given.pop(name) for name in _NO_ARGUMENTS if name in given}
            slurm = run.SlurmExecutor(**given)
            for name, value in later.items():
                setattr(slurm, name, value)
            return SlurmRayRequest(
                name="c",
                cluster_dir=str(tmp_path / "c"),
                executor=slurm,
                launch_cmd=["sbatch"],
                **{"template_name": "ray.sub.j2", **fields},
            )

        theirs = request().materialize()
        with patched("slurm_ray"):
            return theirs, request().materialize()

    yield make
    assert _PATCH.status() == "off"


def _lines(script: str, pattern: str) -> list[str]:
    return [line for line in script.splitlines() if re.search(pattern, line)]


def _step(script: str) -> str:
    """The line that starts Ray: ours on all nodes, NeMo-Run's on the head."""
    return _lines(script, r"^srun .*(node\.pyz|head\.log)")[0]


_EXECUTORS = {
    "plain": {},
    "containers": {
        "container_image": "nvcr.io/x:1",
        "container_mounts": ["/a:/b", "/nemo_run:/d"],
        "gpus_per_node": 8,
    },
    "gres": {"gres": "gpu:4", "qos": "high", "mem": "0", "exclusive": True},
    "variables": {"env_vars": {"wandb_api_key": "$KEY", "A": "'a b'"}},
    "setup": {"setup_lines": "module load cuda\nexport SETUP=1"},
    "parameters": {"additional_parameters": {"switches": 1}, "stderr_to_stdout": False},
}


@pytest.mark.parametrize("name", _EXECUTORS)
def test_flags_variables_and_srun_arguments_are_nemo_runs(both, name):
    theirs, ours = both(_EXECUTORS[name], nemo_run_dir="/shared/run")
    assert _lines(ours, "^#SBATCH") == _lines(theirs, "^#SBATCH")
    env = _EXECUTORS[name].get("env_vars", {})
    for variable, value in env.items():
        assert f"export {variable.upper()}={value}" in ours.splitlines()
    assert _EXECUTORS[name].get("setup_lines", "") in ours
    arguments = _step(theirs).partition(" --container-name=")[0]
    arguments = arguments.removeprefix("srun ")
    if "container_image" in _EXECUTORS[name]:
        assert f"step_args=({arguments} --container-name=ray-head)" in ours.splitlines()
    else:
        assert f"set -- {arguments}" in ours.splitlines()
    assert _step(ours).startswith('srun "${step_args[@]}" ')


def test_no_variable_is_written_into_a_log(both):
    """NeMo-Run's traces its script, and prints the environment of every node."""
    theirs, ours = both({"env_vars": {"HF_TOKEN": "s3cr3t"}})
    assert _lines(theirs, "^(env|set -eoux pipefail)$")
    assert not _lines(ours, r"^\s*env\s*$|set -\w*x|bash -x")


def test_one_step_whatever_the_number_of_nodes(both):
    for nodes in (1, 64):
        _, ours = both({"nodes": nodes}, command="true")
        assert len(_lines(ours, r"^\s*srun (?!.*\\\$node)")) == 1  # the attach script has others
        # At the end, of an allocation that is renewed, when sbatch gave no answer.
        before = ours.partition("submit_next() {")[0]
        asks = _lines(before, r"\b(squeue|sacct|sinfo)\b|scontrol show job")
        # Once, of an allocation that a client finds by its name, where Slurm does not tell its end.
        assert [line.partition(" -h ")[0] for line in asks] == ['  ends_after "$(timeout 20 squeue']


@pytest.mark.parametrize("image", [None, "x:1"])
def test_the_driver_has_its_own_step_when_it_has_arguments_of_srun(both, image):
    fields = {"srun_args": ["--comment=a b"], "container_image": image}
    theirs, ours = both(fields, command="python x.py", workdir="/code")
    (upstream,) = _lines(theirs, r"^\s*srun .*job\.log")
    (own,) = _lines(ours, r"^\s*srun .*job\.log")
    assert "--overlap '--comment=a b'" in upstream
    assert "--overlap '--comment=a b'" in own
    container = "--container-name=ray-head --container-workdir=$COMMAND_WORKDIR"
    assert container in upstream
    assert (container in own) == (image is not None)
    runs = 'bash -c "$COMMAND"'
    assert runs in upstream
    assert (runs in own) == (image is not None)
    assert ("""bash -c 'cd "$0" && bash -c "$1"' "$COMMAND_WORKDIR" "$COMMAND\"""" in own) == (
        image is None
    )
    assert "COMMAND_WORKDIR=/code" in theirs
    assert "COMMAND_WORKDIR=/code" in ours


def _folders(script: str) -> dict[str, str]:
    """The folders and the prefix that the logs of a script have, as bash sees them."""
    found = dict(re.findall(r"^export (LOG_DIR|CLUSTER_DIR)=(.*)$", script, re.MULTILINE))
    return {name: value.strip("\"'") for name, value in found.items()}


def test_logs_are_where_nemo_run_has_them(both):
    """srun replaces %j in a log's name; a name in the script is replaced by the script."""
    theirs, ours = both({"job_details": SlurmJobDetails(ray_log_prefix="run-%j-")}, command="true")
    assert _folders(ours) == _folders(theirs)
    assert _lines(theirs, r"-o \$LOG_DIR/run-%j-head\.log")
    assert 'export NEMO_RUN_RAY_LOG_PREFIX="run-%j-"' in ours.splitlines()
    text = "\n".join(
        [
            *_lines(ours, r"^export (LOG_DIR|NEMO_RUN_RAY_LOG_PREFIX)="),
            *_lines(ours, r"^(LOG_DIR|NEMO_RUN_RAY_LOG_PREFIX)=.*%j"),
            'echo "$LOG_DIR/${NEMO_RUN_RAY_LOG_PREFIX}head.log"',
        ]
    )
    env = {"SLURM_JOB_ID": "871", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-eu"], input=text, env=env, text=True, capture_output=True)
    assert done.stdout.strip().endswith("/run-871-head.log"), done.stderr
    assert "%j" not in done.stdout


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("1-02:30:15", 95415),
        ("2-12:30", 217800),
        ("1-08", 115200),
        ("02:30:09", 9009),
        ("30:08", 1808),
        ("090", 5400),
        ("0", None),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_the_time_limit_is_read_as_slurm_reads_it(both, limit, seconds):
    _, ours = both()
    function = "ends_after() {" + ours.partition("ends_after() {")[2].partition("\n}\n")[0] + "\n}"
    begin, end = "set -eu\nSLURM_JOB_ID=7\n", 'echo "${NEMO_RUN_RAY_END_TIME:-}"'
    text = f'{begin}{function}\nends_after "{limit}"\n{end}'
    before = time.time()
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, check=True)
    assert done.stderr == ""
    assert (seconds is None) == (done.stdout.strip() == "")
    if seconds is not None:
        assert -1 <= int(done.stdout) - before - seconds <= 20


@pytest.mark.parametrize("template", ["ray.sub.j2", "ray_enroot.sub.j2"])
def test_commands_may_use_the_names_of_nemo_runs_script(both, template):
    """Its ports with its defaults, its counts and addresses, also in lines before Ray."""
    theirs, ours = both(template_name=template, command="true")
    defaults = dict(re.findall(r"^([A-Z_]+_PORT|PORT)=\$\{\w+:-(\d+)\}", theirs, re.MULTILINE))
    assert len(defaults) == 11
    before = ours.partition("# Ray cluster setup")[0]
    for name, port in defaults.items():
        assert f'"${{{name}:={port}}}"' in before
    for name in ("head_node_ip", "ip_head", "gpus_per_node", "NUM_ACTORS", "num_retries"):
        assert _lines(theirs, rf"^{name}=")
        assert _lines(before, rf"^{name}=")


def test_a_template_of_the_users_own_stays(both, tmp_path):
    (tmp_path / "ray.sub.j2").write_text("mine {{ log_dir }}")
    theirs, ours = both(template_dir=str(tmp_path))
    assert theirs == ours
    assert ours.startswith("mine ")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_dry_run_makes_no_folder(tmp_path, capsys, monkeypatch, wrapped):
    create = SlurmRayCluster.create
    if wrapped:
        monkeypatch.setattr(SlurmRayCluster, "create", lambda *args, **kw: create(*args, **kw))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    tunnel = run.LocalTunnel(job_dir=str(tmp_path / "jobs"))
    executor = run.SlurmExecutor(account="a", partition="p", tunnel=tunnel)
    with patched("slurm_ray"):
        SlurmRayCluster(name="c", executor=executor).create(dryrun=True)
    assert "node.pyz" in capsys.readouterr().out
    assert not (tmp_path / "jobs").exists()
    assert list((tmp_path / "tmp").iterdir()) == [], "a client that is killed later leaves nothing"


def test_a_task_of_an_experiment_that_asks_for_a_ray_cluster_gets_this_script(tmp_path, unique):
    """The other caller in NeMo-Run: a task with ``use_with_ray_cluster``."""

    def script() -> str:
        tunnel = run.LocalTunnel(job_dir=str(tmp_path / "jobs"))
        executor = run.SlurmExecutor(
            account="a",
            partition="p",
            tunnel=tunnel,
            container_image="x:1",
            packager=run.Packager(),
        )
        task = run.Script(inline="train", metadata={"use_with_ray_cluster": True})
        with run.Experiment(unique, executor=executor, id=f"{unique}_1") as experiment:
            experiment.add(task, name="job")
            experiment.dryrun(log=False, exist_ok=True)
        return str(experiment.jobs[0]._dryrun_info.request.materialize())

    theirs = script()
    with patched("slurm_ray"):
        ours = script()
    assert "node.pyz" not in theirs
    assert "node.pyz" in ours
    assert _lines(ours, "^#SBATCH") == _lines(theirs, "^#SBATCH")
    assert _lines(ours, "^COMMAND(_WORKDIR)?=") == _lines(theirs, "^COMMAND(_WORKDIR)?=")
