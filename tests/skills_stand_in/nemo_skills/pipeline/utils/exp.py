import copy

import nemo_run as run
from nemo_run.core.execution.slurm import get_packaging_job_key
from torchx.specs.api import AppState

from nemo_skills.pipeline.utils.cluster import (
    get_env_variables,
    get_tunnel,
    temporary_env_update,
    tunnel_hash,
)
from nemo_skills.pipeline.utils.mounts import get_mounts_from_config, is_mounted_filepath
from nemo_skills.pipeline.utils.packager import get_packager
from nemo_skills.pipeline.utils.server import get_server_command

REUSE_CODE_EXP = {}
_NOT_OVER = (AppState.RUNNING, AppState.PENDING, AppState.SUBMITTED, AppState.UNKNOWN)


def get_exp_handles(expname):
    with run.Experiment.from_title(expname) as exp:
        found = exp.status(return_dict=True).values()
    return [one["handle"] for one in found if one["status"] in _NOT_OVER]


def get_sandbox_command(cluster_config):
    return "cd /nemo_run/code && python3 nemo_skills/serve.py --port $LISTEN_PORT"


def get_executor(
    cluster_config,
    container,
    num_nodes,
    tasks_per_node,
    gpus_per_node,
    job_name,
    log_dir,
    log_prefix: str = "main",
    mounts=None,
    partition=None,
    qos=None,
    time_min=None,
    dependencies=None,
    extra_package_dirs: tuple[str] | None = None,
    heterogeneous=False,
    het_group=None,
    total_het_groups=None,
    slurm_kwargs: dict | None = None,
    overlap: bool = False,
    with_ray: bool = False,
):
    env_vars = get_env_variables(cluster_config)
    packager = get_packager(extra_package_dirs=extra_package_dirs)
    if cluster_config["executor"] == "none":
        return run.LocalExecutor()
    return run.SlurmExecutor(
        account=cluster_config["account"],
        partition=partition or cluster_config.get("partition"),
        nodes=num_nodes,
        ntasks_per_node=tasks_per_node,
        gpus_per_node=gpus_per_node,
        container_image=container,
        container_mounts=get_mounts_from_config(cluster_config) if mounts is None else mounts,
        tunnel=get_tunnel(cluster_config),
        packager=packager,
        env_vars=env_vars,
        dependencies=dependencies or [],
    )


def add_task(
    exp,
    cmd: str | list[str],
    task_name,
    cluster_config,
    container: str | list[str],
    num_tasks: int | list[int] = 1,
    num_gpus=None,
    num_nodes=1,
    log_dir=None,
    partition=None,
    with_sandbox=False,
    sandbox_port: int | None = None,
    server_config=None,
    reuse_code_exp: str | run.Experiment | None = None,
    reuse_code: bool = True,
    task_dependencies: list[str] | None = None,
    run_after: str | list[str] | None = None,
    get_server_command=get_server_command,
    extra_package_dirs: list[str] | None = None,
    heterogeneous: bool = False,
    with_ray: bool = False,
    skip_hf_home_check: bool | None = None,
):
    is_slurm = cluster_config["executor"] == "slurm"
    dependencies = None
    if run_after is not None and is_slurm:
        names = [run_after] if isinstance(run_after, str) else run_after
        dependencies = [handle for name in names for handle in get_exp_handles(name)] or None
    if server_config is None and num_gpus is None and not cluster_config.get("cpu_partition"):
        num_gpus = 1
    env_vars = get_env_variables(cluster_config)
    is_checked = not (skip_hf_home_check or cluster_config.get("skip_hf_home_check", False))
    if is_checked and not is_mounted_filepath(cluster_config, env_vars.get("HF_HOME", "")):
        raise RuntimeError("HF_HOME is not a mounted path.")
    common = {
        "cluster_config": cluster_config,
        "job_name": task_name,
        "log_dir": log_dir,
        "partition": partition,
        "dependencies": dependencies,
        "extra_package_dirs": extra_package_dirs,
        "heterogeneous": heterogeneous,
        "total_het_groups": (server_config is not None) + bool(cmd) + with_sandbox,
        "with_ray": with_ray,
    }
    het_group = 0
    commands, executors, indices = [], [], []

    def put(command, **asked):
        commands.append(command)
        executors.append(get_executor(**common, het_group=het_group, **asked))
        indices.append(het_group)

    if server_config is not None and int(server_config["num_gpus"]) > 0:
        server = copy.copy(server_config)
        image = server.pop("container", None) or cluster_config["containers"][server["server_type"]]
        command, tasks = get_server_command(**server, cluster_config=cluster_config)
        put(
            command,
            container=image,
            num_nodes=server["num_nodes"],
            tasks_per_node=tasks,
            gpus_per_node=server["num_gpus"],
            log_prefix="server",
        )
        het_group += 1
    if cmd:
        cmds = [cmd] if isinstance(cmd, str) else cmd
        images = [container] if isinstance(container, str) else container
        for number, (command, image) in enumerate(zip(cmds, images, strict=True)):
            with temporary_env_update(cluster_config, {"NEMO_SKILLS_SANDBOX_PORT": sandbox_port}):
                put(
                    command,
                    container=image,
                    num_nodes=num_nodes,
                    tasks_per_node=num_tasks,
                    gpus_per_node=num_gpus if server_config is None else 0,
                    log_prefix="main" if len(cmds) == 1 else f"main_{number}",
                )
        het_group += 1
    if with_sandbox:
        updates = {"LISTEN_PORT": sandbox_port, "NGINX_PORT": sandbox_port}
        with temporary_env_update(cluster_config, updates):
            put(
                get_sandbox_command(cluster_config),
                container=cluster_config["containers"]["sandbox"],
                num_nodes=executors[0].nodes if is_slurm else 1,
                tasks_per_node=1,
                gpus_per_node=0,
                mounts=[],
                log_prefix="sandbox",
                overlap=True,
            )
    if cluster_config["executor"] != "none":
        _reuse_code(executors, get_tunnel(cluster_config), reuse_code, reuse_code_exp)
    metadata = {"use_with_ray_cluster": True} if with_ray and is_slurm else None
    tasks = [
        run.Script(inline=command, metadata=metadata if number == 0 else None)
        for number, command in enumerate(commands)
    ]
    if len(tasks) == 1:
        tasks, executors = tasks[0], executors[0]
    elif heterogeneous:
        executors[0].het_group_indices = indices
    return exp.add(
        tasks, executor=executors, name="nemo-run", dependencies=task_dependencies or None
    )


def _reuse_code(executors, tunnel, reuse_code, reuse_code_exp):
    if not reuse_code:
        REUSE_CODE_EXP.pop(tunnel_hash(tunnel), None)
        return
    other = reuse_code_exp or REUSE_CODE_EXP.get(tunnel_hash(tunnel))
    if other is not None:
        jobs = other.tunnels[tunnel.key].packaging_jobs
        for executor in executors:
            place = jobs[get_packaging_job_key(other._id, "nemo-run")].dst_path
            executor.packager.symlink_from_remote_dir = place


def run_exp(exp, cluster_config, sequential=False, dry_run=False):
    if dry_run:
        return
    if cluster_config["executor"] != "slurm":
        exp.run(detach=False, tail_logs=True, sequential=sequential)
        return
    try:
        exp.run(detach=True, sequential=sequential)
    except RuntimeError as error:
        if "Your repo has uncommitted changes." not in str(error):
            raise
        raise RuntimeError("Commit the changes, or cd away from a git repo.") from error
    REUSE_CODE_EXP.setdefault(tunnel_hash(get_tunnel(cluster_config)), exp)


def get_exp(expname, cluster_config):
    if cluster_config["executor"] == "slurm":
        return run.Experiment(
            expname, skip_status_at_exit=True, serialize_metadata_for_scripts=False
        )
    return run.Experiment(expname, clean_mode=True)
