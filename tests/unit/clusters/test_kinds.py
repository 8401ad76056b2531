"""The promises that every kind of cluster keeps."""

import json
import subprocess
import sys

import nemo_run as run
import pytest

from nemo_run_ray import ExistingCluster, LocalCluster, RayExecutor, Sidecar, SlurmCluster
from nemo_run_ray.clusters import Cluster, from_record
from nemo_run_ray.errors import ConfigError
from tests.slurm_commands import put_commands

_READS = """
import sys
import nemo_run_ray
from nemo_run_ray.clusters import from_record
assert "nemo_run_ray.clusters.slurm" not in sys.modules
found = from_record({"kind": "slurm", "name": "team", "tunnel": {"job_dir": sys.argv[1]}})
print(type(found) is nemo_run_ray.SlurmCluster, found.name)
"""


def test_a_ledger_that_names_slurm_is_read_by_a_program_that_does_not(tmp_path):
    words = [sys.executable, "-c", _READS, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True team\n", done.stderr


def test_a_kind_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"'moon'.* knows existing, local, slurm"):
        from_record({"kind": "moon"})


@pytest.fixture(params=["existing", "local", "slurm"])
def cluster(request, tmp_path, monkeypatch) -> Cluster:
    """A cluster of each kind that nobody has used, with a token where it takes one."""
    put_commands(tmp_path, monkeypatch)
    if request.param == "existing":
        return ExistingCluster("http://127.0.0.1:1", token="s3cret")
    if request.param == "local":
        return LocalCluster(state_dir=str(tmp_path / "ray"))
    tunnel = run.LocalTunnel(job_dir=str(tmp_path / "jobs"))
    executor = run.SlurmExecutor(account="a", tunnel=tunnel, env_vars={"API_KEY": "s3cret"})
    return SlurmCluster(executor=executor, renew=True)


def test_a_record_makes_the_same_cluster_and_holds_no_credentials(cluster):
    text = json.dumps(cluster.record())
    again = from_record(json.loads(text))
    assert type(again) is type(cluster)
    assert json.dumps(again.record()) == text
    assert "s3cret" not in text + repr(again)


def test_looking_changes_nothing(cluster, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    is_existing = isinstance(cluster, ExistingCluster)
    assert (cluster.find() is not None) is is_existing, "whether it answers is asked later"
    assert cluster.archive("session_of_another") is None
    assert cluster.archive() is None
    assert sorted(tmp_path.rglob("*")) == before


def test_an_executor_keeps_its_cluster_in_a_clone(cluster):
    assert RayExecutor(cluster=cluster).clone().cluster.record() == cluster.record()


_SIDECARS = [Sidecar("cache", "one"), Sidecar("cache", "two")]


@pytest.mark.parametrize(
    ("folder", "fields", "words"),
    [
        *[(one, {}, "since the scripts of Slurm") for one in ("/a b", "/%j", "/$HOME", "/é", "a")],
        ("/shared", {"sidecars": _SIDECARS}, r"names \['cache', 'cache'\]"),
    ],
)
def test_what_a_cluster_on_slurm_refuses(folder, fields, words):
    executor = run.SlurmExecutor(account="a", tunnel=run.LocalTunnel(job_dir=folder))
    with pytest.raises(ConfigError, match=words):
        SlurmCluster(executor=executor, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        *[{"num_cpus": value} for value in (0, -1, True, "4", 1.5)],
        *[{"num_gpus": -1}, {"keep": "yes"}, {"keep": None}],
        *[{"idle_timeout_s": value} for value in (0, "600")],
    ],
)
def test_what_an_embedded_cluster_refuses(fields):
    (name,) = fields
    with pytest.raises(ConfigError, match=name):
        LocalCluster(**fields)
