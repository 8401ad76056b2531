import os
from contextlib import contextmanager
from pathlib import Path

import nemo_run as run
import yaml


def read_config(config_file):
    with open(config_file, encoding="utf-8") as file:
        cluster_config = yaml.safe_load(file)
    is_here = cluster_config["executor"] == "slurm" and "ssh_tunnel" not in cluster_config
    if is_here and "job_dir" not in cluster_config:
        raise ValueError("job_dir must be provided")
    return cluster_config


def get_cluster_config(cluster=None, config_dir=None):
    if isinstance(cluster, dict):
        return cluster
    if cluster is None:
        return read_config(os.environ["NEMO_SKILLS_CONFIG"])
    folder = config_dir or os.environ.get("NEMO_SKILLS_CONFIG_DIR") or "cluster_configs"
    return read_config(Path(folder) / f"{cluster}.yaml")


def get_env_variables(cluster_config):
    found = {}
    for entry in cluster_config.get("required_env_vars", []):
        name, equals, value = entry.partition("=")
        if not equals and name not in os.environ:
            raise ValueError(f"Required environment variable {name} not found.")
        found[name] = value if equals else os.environ[name]
    for entry in cluster_config.get("env_vars", []):
        name, equals, value = entry.partition("=")
        if equals or name in os.environ:
            found[name] = value if equals else os.environ[name]
    return found


@contextmanager
def temporary_env_update(cluster_config, updates):
    before = cluster_config.get("env_vars", []).copy()
    cluster_config["env_vars"] = [*before, *(f"{name}={value}" for name, value in updates.items())]
    try:
        yield
    finally:
        cluster_config["env_vars"] = before


def tunnel_hash(tunnel):
    return "local" if isinstance(tunnel, run.LocalTunnel) else tunnel.host


def get_tunnel(cluster_config):
    if "ssh_tunnel" in cluster_config:
        return run.SSHTunnel(**cluster_config["ssh_tunnel"])
    return run.LocalTunnel(job_dir="")


def cluster_download_dir(cluster_config, remote_dir, local_dir, remote_tar_dir=None, verbose=True):
    sftp = get_tunnel(cluster_config).session.client.open_sftp()
    sftp.get(f"{remote_dir}.tar.gz", local_dir)


def cluster_upload(cluster_config, local_file, remote_dir, verbose=True):
    sftp = get_tunnel(cluster_config).session.client.open_sftp()
    sftp.put(str(local_file), str(remote_dir))
