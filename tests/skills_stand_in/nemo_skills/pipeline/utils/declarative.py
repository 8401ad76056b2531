"""A group of commands, each of which asks ``get_executor`` for itself."""

import nemo_run as run

from nemo_skills.pipeline.utils import (
    get_executor,
    get_exp,
    get_tunnel,
    run_exp,
    temporary_env_update,
)


class Command:
    def __init__(self, command, gpus=0, nodes=1, name="command", metadata=None):
        self.command, self.gpus, self.nodes, self.name = command, gpus, nodes, name
        self.metadata = metadata or {}
        self.het_group_index = None

    def hostname_ref(self):
        if self.het_group_index is None:
            return "127.0.0.1"
        hosts = f"$SLURM_JOB_NODELIST_HET_GROUP_{self.het_group_index}"
        return f"$(scontrol show hostnames {hosts} | head -n1)"


class Pipeline:
    """One job of several groups of commands; more than one group is a heterogeneous job."""

    def __init__(self, name, cluster_config, groups, with_ray=False, reuse_code_exp=None):
        self.name, self.cluster_config, self.groups = name, cluster_config, groups
        self.with_ray, self.reuse_code_exp = with_ray, reuse_code_exp

    def run(self):
        heterogeneous = len(self.groups) > 1
        commands, executors = [], []
        with get_exp(self.name, self.cluster_config) as exp:
            for group_number, group in enumerate(self.groups):
                for command in group:
                    command.het_group_index = group_number if heterogeneous else None
            for group_number, group in enumerate(self.groups):
                for number, command in enumerate(group):
                    number = group_number if heterogeneous else number
                    executors.append(self._executor(command, heterogeneous, number))
                    text = command.command
                    commands.append(text() if callable(text) else text)
            for executor in executors[1:] if not heterogeneous else ():
                executor.packager = executors[0].packager
            if self.reuse_code_exp is not None:
                self.reuse_code_exp.tunnels[get_tunnel(self.cluster_config).key]
            is_in_slurm = self.with_ray and self.cluster_config["executor"] == "slurm"
            metadata = {"use_with_ray_cluster": True} if is_in_slurm else None
            tasks = [
                run.Script(inline=command, metadata=None if number else metadata)
                for number, command in enumerate(commands)
            ]
            if len(tasks) == 1:
                exp.add(tasks[0], executor=executors[0], name="nemo-run")
            else:
                exp.add(tasks, executor=executors, name="nemo-run")
            run_exp(exp, self.cluster_config)
        return exp

    def _executor(self, command, heterogeneous, number):
        environment = command.metadata.get("environment", {})
        with temporary_env_update(self.cluster_config, environment):
            return get_executor(
                cluster_config=self.cluster_config,
                container=command.metadata.get("container", ""),
                num_nodes=command.nodes,
                tasks_per_node=command.metadata.get("num_tasks", 1),
                gpus_per_node=command.gpus,
                job_name=command.name,
                log_dir=None,
                log_prefix=command.metadata.get("log_prefix", "main"),
                heterogeneous=heterogeneous,
                het_group=number,
                total_het_groups=len(self.groups),
                with_ray=self.with_ray,
            )
