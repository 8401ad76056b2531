"""The look before the first job: what does not fit is told, and nothing was sent."""

from __future__ import annotations

import io
import json
import zipfile

import nemo_run as run
import pytest
from torchx.specs import AppDef, Role

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import ConfigError, DoesNotFit
from nemo_run_ray.experiment.archives import secrets_archive
from nemo_run_ray.plan.job import joined_places, plan
from nemo_run_ray.remote.node.rundir import SECRETS
from tests import rooms
from tests.conftest import TRUE, refused
from tests.rooms import FakeNode

NODES = (
    FakeNode("head", {"CPU": 4.0, "memory": 1e11}),
    FakeNode("gpu0", {"CPU": 8.0, "GPU": 8.0}, {"GPU": 8.0}, labels={"pool": "gpu"}),
)


@pytest.fixture
def cluster(ray):
    ray.tables = rooms.tables(*NODES)
    return ray


def test_a_task_that_no_node_can_take_is_refused(cluster, unique):
    executor = RayExecutor(address=cluster.url, gpus_per_node=16, preflight=True)
    message = refused(DoesNotFit, executor, unique)
    assert "nothing was sent" in message
    assert f"task {unique}" in message
    assert "16" in message
    assert not cluster.rows


def test_a_role_that_no_node_can_take_is_named(cluster, unique):
    fits = RayExecutor(address=cluster.url, role="client", preflight=True)
    label = RayExecutor(address=cluster.url, role="server", label_selector={"pool": "tpu"})
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        experiment.add([TRUE, TRUE], executor=[fits, label], name="group")
        with pytest.raises(DoesNotFit, match="role server of group") as caught:
            experiment.run(detach=True)
    assert "role client" not in str(caught.value)
    assert not cluster.rows


def test_without_being_asked_nothing_is_looked_at(cluster, unique):
    executor = RayExecutor(address=cluster.url, gpus_per_node=16)
    run.run(TRUE, executor=executor, name=unique, detach=True)
    assert len(cluster.rows) == 1


def test_a_cluster_file_asks_for_it(cluster, unique, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(
        f"cluster: {{address: '{cluster.url}'}}\n"
        "pools: {elsewhere: {label_selector: {pool: tpu}}}\n"
        "preflight: {enabled: true, required_labels: [{key: pool, value: gpu}],"
        " min_resources: {GPU: 8}}\n"
    )
    run.run(TRUE, executor=RayExecutor(cluster=str(path)), name=unique, detach=True)
    assert len(cluster.rows) == 1, "a pool that nobody uses keeps nobody from running"
    path.write_text(path.read_text().replace("GPU: 8", "GPU: 64"))
    message = refused(DoesNotFit, RayExecutor(cluster=str(path)), f"{unique}b")
    assert "64" in message
    off = RayExecutor(cluster=str(path), preflight=False)
    run.run(TRUE, executor=off, name=f"{unique}c", detach=True)
    assert len(cluster.rows) == 2


def test_secrets_of_two_files_do_not_mix(cluster, tmp_path, unique, monkeypatch):
    for name in ("A", "B"):
        monkeypatch.setenv(f"{name}_TOK", name.lower())
        (tmp_path / f"{name}.yaml").write_text(
            f"cluster: {{address: '{cluster.url}'}}\n"
            f"env: {{forward: [X_TOKEN], value_from: {{X_TOKEN: [{name}_TOK]}}}}\n"
        )
    plans = [
        plan(
            AppDef("a", [Role("r", "", entrypoint="true")]),
            RayExecutor(cluster=tmp_path / f"{name}.yaml"),
            f"e.{name}",
            name,
        )
        for name in ("A", "B")
    ]
    values = []
    for one in plans:
        packed = secrets_archive(["X_TOKEN"], "n", one.secret_places).pack()
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            (name,) = (found for found in archive.namelist() if found.endswith(SECRETS))
            values.append(json.loads(archive.read(name)))
    assert values == [{"X_TOKEN": "a"}, {"X_TOKEN": "b"}]
    with pytest.raises(ConfigError, match="comes from A_TOK by one cluster file"):
        joined_places(one.secret_places for one in plans)
