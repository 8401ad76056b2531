"""What NeMo-Skills' functions give for a cluster file that is for Ray, and for the others."""

import importlib
import logging
import re
import subprocess
import sys
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray import FolderPackager, RayExecutor, patches
from nemo_run_ray.errors import ConfigError, UnsupportedNemoRun
from nemo_run_ray.experiment.job import find
from tests import skills

_FILE = """\
executor: ray
ray: {address: "http://ray-head:8265", default_num_cpus: 2}
mounts: ["/lustre:/data"]
containers: {nemo-skills: client-image, vllm: server-image, sandbox: sandbox-image}
env_vars: [HF_HOME=/hf, PYTHONPATH=/opt]
"""
_SLURM = "executor: slurm\njob_dir: /jobs\naccount: mine\ncontainers: {vllm: v}\n"
_SERVER = {
    "model_path": "/m",
    "server_type": "vllm",
    "num_gpus": 8,
    "num_nodes": 2,
    "server_port": 5000,
    "server_entrypoint": "serve",
}


@pytest.fixture(params=skills.VERSIONS)
def of_skills(request, tmp_path, monkeypatch):
    """NeMo-Skills with the patch, in a folder with cluster files."""
    skills.write(tmp_path / "site", request.param)
    configs = tmp_path / "cluster_configs"
    configs.mkdir()
    (configs / "my-ray.yaml").write_text(_FILE)
    (configs / "my-slurm.yaml").write_text(_SLURM)
    monkeypatch.chdir(tmp_path)
    with skills.imported(tmp_path / "site") as modules:
        yield modules


def config_of(of_skills, name="my-ray"):
    return of_skills.cluster.get_cluster_config(name)


def executor(of_skills, config=None, **asked):
    """What ``get_executor`` gives for one task."""
    given = {
        "cluster_config": config if config is not None else config_of(of_skills),
        "container": "client-image",
        "num_nodes": 1,
        "tasks_per_node": 1,
        "gpus_per_node": None,
        "job_name": "job",
        "log_dir": None,
    }
    return of_skills.exp.get_executor(**{**given, **asked})


def task(of_skills, name="t", config=None, **asked):
    """The jobs of an experiment to which ``add_task`` has added one task."""
    config = config if config is not None else config_of(of_skills)
    given = {
        "cmd": "curl localhost:5000",
        "task_name": "t",
        "cluster_config": config,
        "container": "client-image",
        "sandbox_port": 6000,
    }
    with of_skills.exp.get_exp(name, config) as exp:
        of_skills.exp.add_task(exp, **{**given, **asked})
        return exp.jobs


def roles(job):
    return {role.role: role for role in job.executors.resource_group}


def test_a_task_gets_a_ray_executor_of_the_file(of_skills, tmp_path):
    handles, extra = ["ray_jobs://nemo_run/a_1.nemo-run"], str(tmp_path / "extra")
    found = executor(
        of_skills,
        num_nodes=2,
        tasks_per_node=4,
        gpus_per_node=8,
        log_prefix="main",
        dependencies=handles,
        extra_package_dirs=[extra],
    )
    assert found.dependencies == handles
    assert f"{extra}/*" in found.packager.include_pattern
    assert isinstance(found, RayExecutor)
    assert (found.nodes, found.ntasks_per_node, found.gpus_per_node) == (2, 4, 8)
    assert (found.role, found.service, found.image) == ("main", False, "client-image")
    assert found.cluster == str(tmp_path / "cluster_configs" / "my-ray.yaml")
    resolved = found.resolved()
    assert resolved.resolve_cluster().url == "http://ray-head:8265"
    assert resolved.cpus_per_node == 2
    assert resolved.env_vars == {"HF_HOME": "/hf", "PYTHONPATH": "/opt"}


def test_the_log_of_an_ended_task_is_in_its_log_dir_too(of_skills, tmp_path, ray, unique):
    file = tmp_path / "cluster_configs" / "my-ray.yaml"
    file.write_text(_FILE.replace("http://ray-head:8265", ray.url))
    config, logs = config_of(of_skills), tmp_path / "generation-logs"
    with of_skills.exp.get_exp(unique, config) as exp:
        for served in ({}, {"server_config": _SERVER}):
            of_skills.exp.add_task(
                exp, "true", "gen-rs0", config, "nemo-skills", log_dir=str(logs), **served
            )
        of_skills.exp.run_exp(exp, config)
    for name in ray.rows:
        ray.rows[name].update(status="SUCCEEDED", driver_exit_code=0)
        ray.logs[name] = f"words of {name}\n"
    for job in find(exp._id):
        job.wait(60)
    written = {path.name: path.read_text() for path in logs.iterdir()}
    assert written == {f"main_gen-rs0_{name}_srun.log": ray.logs[name] for name in ray.rows}


def test_the_code_that_the_file_names_comes_first(of_skills, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "cluster_configs" / "my-ray.yaml").write_text(
        "backend: {name: ray, dashboard_url: 'http://ray-head:8265', "
        f"working_dir: {tmp_path / 'code'}}}\n"
    )
    found = executor(of_skills).packager
    assert isinstance(found, FolderPackager)
    assert Path(found.path) == tmp_path / "code"


@pytest.mark.parametrize("of_skills", ["newer"], indirect=True)
def test_a_template_for_slurm_is_refused(of_skills):
    with pytest.raises(ConfigError, match="ray_template is a script for Slurm"):
        executor(of_skills, ray_template="ray.sub.j2")


@pytest.mark.parametrize(("gpus", "exclusive"), [(1, True), (8, False), (8, True)])
def test_no_server_has_a_fixed_port_since_no_task_has_a_node_to_itself(of_skills, gpus, exclusive):
    asked = importlib.import_module("nemo_skills.pipeline.utils").should_get_random_port(
        gpus, exclusive
    )
    config_of(of_skills)  # NeMo-Skills reads the file after it has asked
    assert asked
    config_of(of_skills, "my-slurm")
    assert not asked


def test_a_file_without_containers_runs_all_in_the_clusters_own(of_skills, tmp_path):
    (tmp_path / "cluster_configs" / "my-ray.yaml").write_text(
        "executor: ray\nray: {address: 'http://ray-head:8265'}\n"
    )
    config = config_of(of_skills)
    image = config["containers"]["nemo-skills"]
    assert executor(of_skills, config, container=image).image is None


def test_two_containers_of_one_image_run_on_their_own_nodes(of_skills, tmp_path):
    (tmp_path / "cluster_configs" / "my-ray.yaml").write_text(
        "backend:\n  name: ray\n  dashboard_url: http://ray-head:8265\n"
        "  image_label_selectors: {vllm: {pool: gpu}, nemo-skills: {pool: cpu}}\n"
        "containers: {vllm: one-image, nemo-skills: one-image}\n"
    )
    config = config_of(of_skills)
    for name, pool in (("vllm", "gpu"), ("nemo-skills", "cpu")):
        found = executor(of_skills, config, container=config["containers"][name])
        assert found.resolved().label_selector == {"pool": pool}


def test_variables_of_one_task_are_its_own(of_skills, monkeypatch):
    monkeypatch.setenv("SEEN", "yes")
    monkeypatch.setenv("MY_API_KEY", "abc")
    config = config_of(of_skills)
    config["env_vars"] += ["SEEN", "NOT_SET", "MY_API_KEY"]
    with of_skills.cluster.temporary_env_update(config, {"PYTHONPATH": "/opt:/app", "A": 1}):
        found = executor(of_skills, config)
    assert found.env_vars == {"PYTHONPATH": "/opt:/app", "A": "1", "SEEN": "yes"}
    assert found.secrets == ["MY_API_KEY"]
    assert executor(of_skills).env_vars == {}
    config["required_env_vars"] = ["NOT_SET"]
    with pytest.raises(ConfigError, match="NOT_SET is required, and is not set"):
        executor(of_skills, config)


@pytest.mark.parametrize("added", ["MY_API_KEY=abc", "HEADER=Bearer $MY_API_KEY"])
def test_a_credential_that_is_not_the_environments_is_refused(of_skills, monkeypatch, added):
    monkeypatch.setenv("MY_API_KEY", "abc" if "HEADER" in added else "other")
    config = config_of(of_skills)
    config["env_vars"].append(added)
    with pytest.raises(ConfigError, match="Set it in your environment") as caught:
        executor(of_skills, config)
    assert "abc" not in str(caught.value)


def test_server_client_and_sandbox_are_the_roles_of_a_group(of_skills):
    (job,) = task(of_skills, server_config=_SERVER, with_sandbox=True)
    found = roles(job)
    assert list(found) == ["server", "main", "sandbox"]
    assert [role.service for role in found.values()] == [True, False, True]
    assert [role.image for role in found.values()] == ["vllm", "client-image", "sandbox"]
    assert (found["server"].nodes, found["server"].gpus_per_node) == (2, 8)
    assert (found["server"].strategy, found["sandbox"].nodes) == ("STRICT_SPREAD", 1)
    assert found["main"].env_vars == {"NEMO_SKILLS_SANDBOX_PORT": "6000"}
    assert found["sandbox"].env_vars == {"LISTEN_PORT": "6000", "NGINX_PORT": "6000"}
    client = "\n".join(found["main"].startup_commands)
    assert "$NEMO_RUN_SANDBOX_HOST" in client
    assert "$NEMO_RUN_SERVER_HOST" in client
    assert "NEMO_RUN_SANDBOX_HOST" not in "\n".join(found["server"].startup_commands)
    assert "scontrol" not in client, "a task of one Slurm group may ask Slurm itself"


def test_a_server_without_a_client_is_what_the_task_is_about(of_skills):
    (job,) = task(of_skills, "s", cmd="", server_config=_SERVER, with_sandbox=True)
    found = roles(job)
    assert {name: role.service for name, role in found.items()} == {
        "server": False,
        "sandbox": True,
    }
    (job,) = task(of_skills, "alone", cmd="", server_config=_SERVER)
    assert job.executor.service is False


def test_tasks_have_the_names_that_nemo_skills_gives_them(of_skills, monkeypatch):
    config, name = config_of(of_skills), "gen1-rs0-chunk1"
    (job,) = task(of_skills, config=config, task_name=name)
    (group,) = task(of_skills, config=config, task_name=name, server_config=_SERVER)
    slurm = {"config": config_of(of_skills, "my-slurm"), "skip_hf_home_check": True}
    (other,) = task(of_skills, task_name=name, **slurm)
    (of_pipeline,) = pipeline(of_skills, config, monkeypatch)
    assert (job.id, group.id, of_pipeline.id, other.id) == (name, name, "command", "nemo-run")
    with of_skills.exp.get_exp("e", config) as exp:
        ids = [of_skills.exp.add_task(exp, "true", "a/b", config, "client-image") for _ in range(2)]
        mine = exp.add(run.Script(inline="true"), executor=run.LocalExecutor(), name="nemo-run")
    assert [*ids, mine] == ["a-b", "a-b_1", "nemo-run"]


def test_a_dictionary_for_ray_that_the_patch_has_not_read_is_refused(of_skills):
    with pytest.raises(ConfigError, match="was not read by the patch skills_executor"):
        task(of_skills, config={"executor": "local", "backend": {"name": "ray"}})


def test_a_ray_program_reserves_nothing_itself(of_skills):
    (job,) = task(of_skills, with_ray=True, num_gpus=8, num_nodes=4, with_sandbox=True)
    found = roles(job)
    main = found["main"]
    assert (main.nodes, main.gpus_per_node, main.resolved().cpus_per_node) == (1, 0, None)
    assert main.env_vars["GPUS_PER_NODE"] == "8"
    assert found["sandbox"].service
    assert not job.tasks[0].metadata, "NeMo-Run would refuse a task that is marked for Slurm"


def pipeline(of_skills, config, monkeypatch, **asked):
    """The jobs of a pipeline of one command with 8 GPUs on 4 nodes."""
    monkeypatch.setattr(of_skills.declarative, "run_exp", lambda exp, config: None)
    command = of_skills.declarative.Command("a", gpus=8, nodes=4)
    return of_skills.declarative.Pipeline("p", config, [[command]], **asked).run().jobs


def test_with_ray_of_a_pipeline_means_what_that_of_a_task_does(of_skills, monkeypatch):
    config = config_of(of_skills)
    (job,) = pipeline(of_skills, config, monkeypatch, with_ray=True)
    assert (job.executor.nodes, job.executor.gpus_per_node) == (1, 0)
    assert job.executor.env_vars["GPUS_PER_NODE"] == "8"
    assert not job.task.metadata
    (job,) = pipeline(of_skills, config, monkeypatch)
    assert (job.executor.nodes, job.executor.gpus_per_node) == (4, 8)
    alone = executor(of_skills, num_nodes=4, gpus_per_node=8, with_ray=True)
    assert (alone.nodes, alone.gpus_per_node) == (1, 0)


def test_an_experiment_on_ray_has_no_code_to_use_again(of_skills, monkeypatch):
    config = config_of(of_skills)
    of_skills.exp.REUSE_CODE_EXP["local"] = earlier = run.Experiment("earlier")
    (job,) = task(of_skills, config=config)
    assert job.executor.packager.symlink_from_remote_dir is None
    assert of_skills.exp.REUSE_CODE_EXP == {}
    with pytest.raises(ConfigError, match="reuse_code_exp is 'earlier', and an experiment on Ray"):
        task(of_skills, config=config, reuse_code_exp=earlier)
    with pytest.raises(ConfigError, match="reuse_code_exp is 'earlier', and an experiment on Ray"):
        pipeline(of_skills, config, monkeypatch, reuse_code_exp="earlier")


def test_results_are_copied_where_this_machine_sees_the_nodes_paths(of_skills, tmp_path):
    """As `ns summarize_results` does, whose own way is SFTP."""
    config, cluster = config_of(of_skills), of_skills.cluster
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "output.jsonl").write_text("{}")
    cluster.cluster_download_dir(config, f"{tmp_path}/results/", str(tmp_path / "here"), None, True)
    copied = tmp_path / "here" / "results" / "output.jsonl"
    assert copied.read_text() == "{}"
    cluster.cluster_upload(config, str(copied), tmp_path / "results" / "metrics.json")
    assert (tmp_path / "results" / "metrics.json").read_text() == "{}"
    with pytest.raises(ConfigError, match="/on/the/nodes of the nodes on this machine"):
        cluster.cluster_download_dir(config, "/on/the/nodes", str(tmp_path))


def test_a_file_for_slurm_is_left_to_nemo_skills(of_skills):
    config = config_of(of_skills, "my-slurm")
    assert config == {
        "executor": "slurm",
        "job_dir": "/jobs",
        "account": "mine",
        "containers": {"vllm": "v"},
    }
    assert isinstance(executor(of_skills, config), run.SlurmExecutor)


def test_undo_gives_everything_back(of_skills):
    exp, utils = of_skills.exp, importlib.import_module("nemo_skills.pipeline.utils")
    patched = exp.get_executor
    assert patched is utils.get_executor
    assert patches.undo("skills_executor")
    for module in (exp, utils, of_skills.declarative):
        for name, value in vars(module).items():
            assert not hasattr(value, "__wrapped__") or name == "temporary_env_update", name
    assert patches.status()["skills_executor"] == "off"
    assert patches.apply("skills_executor")
    assert exp.get_executor is not patched


def test_without_nemo_skills_it_is_not_needed():
    assert patches.status()["skills_executor"] == "not needed"


def test_another_nemo_skills_is_refused_and_left_out_of_all(tmp_path, monkeypatch, caplog):
    skills.write(tmp_path)
    path = tmp_path / "nemo_skills" / "pipeline" / "utils" / "exp.py"
    path.write_text(path.read_text().replace("    het_group=None,\n", ""))
    target = "get_executor has no het_group"
    with pytest.raises(UnsupportedNemoRun, match=target), skills.imported(tmp_path):
        pass
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING):
        undo = patches.apply()
    assert [record.message for record in caplog.records if target in record.message]
    assert patches.status()["dgxcloud_refusal"] == "applied"
    assert undo()
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_skills"]:
        del sys.modules[name]


def test_ns_needs_nemo_skills():
    from tests.conftest import tool

    done = tool("nemo-run-ray", "ns", "run_cmd", "--help", check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("nemo-run-ray: NeMo-Skills")
    assert "Traceback" not in done.stderr
    for words in ([], ["--help"]):
        explained = tool("nemo-run-ray", "ns", *words).stdout
        assert re.search(r"Usage: .* ns COMMAND.*Run a command of.*its source", explained, re.S)


def test_slurms_words_are_understood_by_bash(of_skills):
    server = executor(of_skills, log_prefix="server", heterogeneous=True, het_group=0)
    client = executor(of_skills, log_prefix="main", heterogeneous=True, het_group=1)
    merged = type(server).merge([server, client], 2)
    found = {role.role: role for role in merged.resource_group}
    words = found["server-0"].startup_commands
    command = of_skills.declarative.Command("x")
    command.het_group_index = 0
    script = f"echo $SLURM_PROCID $SLURM_MASTER_NODE {command.hostname_ref()}"
    done = subprocess.run(
        ["bash", "-c", "\n".join([*words, f"exec bash -c {script!r}"])],
        env={
            "PATH": "/usr/bin:/bin",
            "RANK": "3",
            "NEMO_RUN_SERVER_0_HOST": "a",
            "NEMO_RUN_SERVER_0_HOSTS": "a,b",
            "NEMO_RUN_MAIN_1_HOST": "c",
            "NEMO_RUN_MAIN_1_HOSTS": "c",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "3 127.0.0.1 a\n"
