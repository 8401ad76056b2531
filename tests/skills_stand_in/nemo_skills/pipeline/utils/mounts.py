def get_mounts_from_config(cluster_config):
    return list(cluster_config.get("mounts") or [])


def is_mounted_filepath(cluster_config, path):
    mounts = [*get_mounts_from_config(cluster_config), "/nemo_run/code:/nemo_run/code"]
    return any(path.startswith(mount.split(":")[1]) for mount in mounts)
