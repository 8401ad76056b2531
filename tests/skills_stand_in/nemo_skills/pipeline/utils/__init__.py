from nemo_skills.pipeline.utils.cluster import (
    cluster_download_dir,
    cluster_upload,
    get_cluster_config,
    get_env_variables,
    get_tunnel,
    read_config,
    temporary_env_update,
)
from nemo_skills.pipeline.utils.exp import add_task, get_executor, get_exp, get_exp_handles, run_exp
from nemo_skills.pipeline.utils.server import should_get_random_port

__all__ = [
    "add_task",
    "cluster_download_dir",
    "cluster_upload",
    "get_cluster_config",
    "get_env_variables",
    "get_executor",
    "get_exp",
    "get_exp_handles",
    "get_tunnel",
    "read_config",
    "run_exp",
    "should_get_random_port",
    "temporary_env_update",
]
