def should_get_random_port(server_gpus, exclusive):
    return server_gpus != 8 and not exclusive


def get_server_command(
    server_type,
    num_gpus,
    num_nodes,
    model_path,
    cluster_config,
    server_port,
    server_args="",
    server_entrypoint=None,
):
    command = (
        f"cd /nemo_run/code && {server_entrypoint} --model {model_path} --num_gpus {num_gpus} "
        f"--num_nodes {num_nodes} --port {server_port} {server_args}"
    )
    return command, 1
