import argparse

from nemo_skills.pipeline.utils import add_task, get_cluster_config, get_exp, run_exp


def app():
    """``ns run_cmd``, with the options that the tests use."""
    parser = argparse.ArgumentParser(prog="ns")
    parser.add_argument("verb", choices=["run_cmd"])
    parser.add_argument("--cluster")
    parser.add_argument("--expname", default="script")
    parser.add_argument("--command", required=True)
    parser.add_argument("--run_after", action="append")
    given = parser.parse_args()
    cluster_config = get_cluster_config(given.cluster)
    with get_exp(given.expname, cluster_config) as exp:
        add_task(
            exp,
            cmd=given.command,
            task_name=given.expname,
            cluster_config=cluster_config,
            container=cluster_config["containers"].get("nemo-skills", "nemo-skills"),
            run_after=given.run_after,
        )
        run_exp(exp, cluster_config)
