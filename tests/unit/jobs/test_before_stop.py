"""Which records of jobs are of the cluster that is stopped."""

from __future__ import annotations

import json

import nemo_run as run

from nemo_run_ray import ExistingCluster, LocalCluster, SlurmCluster
from nemo_run_ray.clusters import Cluster
from nemo_run_ray.jobs.before_stop import _is_on


def _recorded(cluster: Cluster) -> dict:
    return json.loads(json.dumps(cluster.record()))


def _on_slurm(job_dir: str = "/shared", host: str = "", **fields) -> SlurmCluster:
    tunnel = run.LocalTunnel(job_dir=job_dir)
    if host:
        tunnel = run.SSHTunnel(host=host, user="me", job_dir=job_dir, identity="/me/key")
    return SlurmCluster(executor=run.SlurmExecutor(account="a", tunnel=tunnel), **fields)


def test_an_embedded_ray_by_its_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "state")
    own = LocalCluster(state_dir=str(tmp_path / "state"))
    assert _is_on(_recorded(LocalCluster(state_dir=str(tmp_path / "link"))), own)
    assert not _is_on(_recorded(LocalCluster(state_dir=str(tmp_path / "other"))), own)


def test_one_on_slurm_by_its_name_and_its_way():
    for host in ("", "login"):
        own = _on_slurm(host=host, name="team")
        assert _is_on(_recorded(own), own)
        assert _is_on(_recorded(_on_slurm(host=host, name="team", renew=True)), own)
        assert not _is_on(_recorded(_on_slurm(host=host, name="other")), own)
        assert not _is_on(_recorded(_on_slurm("/elsewhere", host, name="team")), own)
    assert not _is_on(_recorded(_on_slurm(host="login")), _on_slurm(host="other"))


def test_those_of_other_kinds_are_not(tmp_path):
    own = [_on_slurm(), LocalCluster(state_dir=str(tmp_path))]
    others = [*own, ExistingCluster(url="http://head:8265")]
    for cluster in own:
        found = [other for other in others if _is_on(_recorded(other), cluster)]
        assert found == [cluster]
