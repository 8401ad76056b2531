"""What an executor gets of its cluster file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run as run
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo_run_ray import ExistingCluster, LocalCluster, RayExecutor
from nemo_run_ray.cluster_files.load import value_of
from nemo_run_ray.errors import ConfigError

FILE = """\
    cluster: {address: "http://head:8265"}
    defaults:
      retries: 1
      packager: git
      env_vars: {WHO: defaults, D: defaults}
    env:
      set: {WHO: file, E: file}
    images: {vllm: "vllm/vllm-openai:v0.8"}
    images_as: image_uri
    pools:
      gpu:
        label_selector: {pool: gpu}
        gpus_per_node: 8
        resources_per_node: {worker: 1}
        env_vars: {WHO: pool, P: pool}
      other: {address: "http://other:8265"}
"""


def team(**fields: Any) -> RayExecutor:
    return RayExecutor(cluster="team-a", **fields).resolved()


def test_fields_that_are_assigned_win_too(write):
    write(FILE)
    executor = RayExecutor(cluster="team-a", pool="gpu")
    executor.gpus_per_node = 2
    assert executor.resolved().gpus_per_node == 2
    executor.gpus_per_node = 0
    executor.retries = 0
    assert (executor.resolved().gpus_per_node, executor.resolved().retries) == (0, 0)
    assert executor.clone().resolved().gpus_per_node == 0


def test_it_survives_clone_copies_and_saving(write):
    write(FILE)
    executor = RayExecutor(cluster="team-a", pool="gpu", gpus_per_node=0)
    saved = ZlibJSONSerializer().serialize(executor.to_config())
    loaded = fdl.build(ZlibJSONSerializer().deserialize(saved))
    for one in (executor.clone(), executor.clone().clone(), loaded):
        assert (one.cluster, one.pool) == ("team-a", "gpu"), "names are saved, and not values"
        assert (one.resolved().gpus_per_node, one.resolved().retries) == (0, 1)


def test_the_environment_names_the_cluster_of_those_that_name_none(write, monkeypatch):
    write(FILE)
    assert RayExecutor().resolve_cluster() == LocalCluster()
    monkeypatch.setenv("NEMO_RUN_RAY_CLUSTER", "team-a")
    assert RayExecutor().resolve_cluster() == ExistingCluster("http://head:8265")
    assert RayExecutor(cluster=LocalCluster()).resolve_cluster() == LocalCluster()
    assert RayExecutor(address="http://x").resolve_cluster() == ExistingCluster("http://x")


def test_a_token_is_taken_from_its_variable_at_every_connection(write, monkeypatch):
    write("cluster: {address: 'https://head:8265', token_variable: TEAM_A}\n")
    monkeypatch.setenv("TEAM_A", "s3cret")
    cluster = team().cluster
    assert cluster.connect().headers == {"Authorization": "Bearer s3cret"}
    assert "s3cret" not in json.dumps(cluster.record())
    monkeypatch.delenv("TEAM_A")
    with pytest.raises(ConfigError, match="TEAM_A"):
        cluster.connect()


def test_variables_of_the_caller(write, monkeypatch):
    write("env: {forward: [WANDB_*, NOT_SET], required: [DATA]}\nsecrets: [MINE]\n")
    values = {"WANDB_API_KEY": "k", "WANDB_PROJECT": "p", "DATA": "/d", "MINE": "m"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    found = team()
    assert found.env_vars == {"DATA": "/d", "WANDB_PROJECT": "p"}
    assert found.secrets == ["MINE", "WANDB_API_KEY"]
    found = team(secrets=["DATA"], env_vars={"MINE": "public"})
    assert found.env_vars == {"MINE": "public", "WANDB_PROJECT": "p"}
    assert found.secrets == ["DATA", "WANDB_API_KEY"]


def test_what_is_required_and_not_set_is_named(write, monkeypatch):
    path = write("env: {required: [DATA_ROOT, B]}\nsecrets: [A_TOKEN]\n")
    monkeypatch.delenv("A_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"are not set .*: DATA_ROOT, B, A_TOKEN\.") as e:
        team()
    assert str(path) in str(e.value)


def test_an_image_as_ray_s_image_uri(write):
    write(FILE)
    assert team(image="vllm").runtime_env == {"image_uri": "vllm/vllm-openai:v0.8"}
    assert team(image="other/image:1").runtime_env == {"image_uri": "other/image:1"}
    own = {"image_uri": "mine"}
    assert team(image="vllm", runtime_env=own).runtime_env == own


BAD = {
    "defaults: {retires: 1}": ("defaults.retires", "did you mean 'retries'"),
    "defaults: {retries: -1}": ("defaults.retries", "greater than or equal to 0"),
    "defaults: {address: 'http://x'}": ("defaults.address", "another section of this file, gives"),
    "defaults: {role: a}": ("defaults.role", "a task, or another section"),
    "defaults: {packager: zip}": ("defaults.packager", "allowed are none, git and"),
    "cluster: {address: 'ftp://x'}": ("cluster", "expected http"),
    "cluster: {address: 'http://x', headers: {Cookie: abc}}": ("cluster", "given in clear"),
    "cluster: {address: 'http://h', token_variable: T, headers: {authorization: '${A}'}}": (
        "cluster.token_variable",
        "there is a header Authorization too",
    ),
    **{
        f"cluster: {{slurm: {{account: a, job_dir: /j, {login}}}}}": (
            "cluster",
            "a login needs `host` and `user`",
        )
        for login in ("host: h", "user: u", "port: 22", "identity: key")
    },
    "pools: {gpu: {memory_per_node: 3 elephants}}": ("pools.gpu.memory_per_node", "64GiB"),
}


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_value_is_told_where_it_is_written(write, text):
    key, problem = BAD[text]
    path = write(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        team(pool="gpu" if "pools" in text else None)
    assert str(caught.value).startswith(f"{path}:1: {key}: ")


def test_a_pool_that_is_not_there(write):
    path = write(FILE)
    with pytest.raises(ConfigError, match="did you mean 'gpu'") as caught:
        team(pool="gpus")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("field", ["pool", "image"])
def test_a_pool_or_an_image_without_a_file(configs, field):
    with pytest.raises(ConfigError, match=rf"RayExecutor\.{field} is 'gpu', and no cluster file"):
        RayExecutor(**{field: "gpu"}).resolved()
    with pytest.raises(ConfigError, match="no cluster file is named"):
        RayExecutor(address="http://x", **{field: "gpu"}).resolved()


def test_a_group_gets_the_file_s_defaults(write):
    write(FILE)
    roles = [RayExecutor(cluster="team-a", pool="gpu"), RayExecutor(cluster="team-a")]
    merged = RayExecutor.merge(roles, 2)
    assert merged.retries == 1
    with pytest.raises(ConfigError, match="roles '0' and '1' of a group have different clusters"):
        RayExecutor.merge([roles[0], RayExecutor(cluster="team-a", pool="other")], 2)
    assert merged.resolve_cluster() == ExistingCluster("http://head:8265")
    assert [role.label_selector for role in merged.resolved().resource_group] == [
        {"pool": "gpu"},
        {},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("properties")


#: For each of these fields, the values that a layer may give it.
_VALUES = {
    "retries": st.integers(0, 3),
    "gpus_per_node": st.sampled_from([0, 1, 2]),
    "grace_s": st.sampled_from([1, 10, 20]),
}
_LAYER = st.fixed_dictionaries({}, optional=_VALUES)
_ENV = st.dictionaries(st.sampled_from(["A_V", "B_V", "C_V"]), st.sampled_from("12"))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=st.tuples(_LAYER, _LAYER, _LAYER), env=st.tuples(_ENV, _ENV, _ENV, _ENV))
def test_code_wins_over_pool_over_defaults_over_environment(folder, layers, env):
    """The first layer that has a value gives it, for fields and for every variable alike."""
    code, pool, defaults = layers
    in_pool = {name: value for name, value in pool.items() if name == "gpus_per_node"}
    text = {
        "cluster": {"local": {}},
        "defaults": {**defaults, "env_vars": env[2]},
        "pools": {"p": {**in_pool, "env_vars": env[1]}},
        "env": {"forward": ["A_V", "B_V", "C_V"]},
    }
    path = folder / "x.yaml"
    path.write_text(json.dumps(text))
    executor = RayExecutor(cluster=str(path), pool="p", env_vars=env[0], **code)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env[3].items():
            patch.setenv(name, value)
        found = executor.resolved()
    for name in _VALUES:
        own = RayExecutor()
        expected = [layer[name] for layer in (code, in_pool, defaults) if name in layer]
        assert getattr(found, name) == [*expected, getattr(own, name)][0], name
    assert found.env_vars == {**env[3], **env[2], **env[1], **env[0]}


def test_the_dry_run_names_the_file_and_shows_what_it_says(write, capsys, unique):
    write(FILE)
    Path("code.py").touch()
    code = run.PatternPackager(include_pattern="*", relative_path=".")
    executor = RayExecutor(cluster="team-a", pool="gpu", packager=code)
    run.run(run.Script(inline="true"), executor=executor, name=unique, dryrun=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert "by the cluster file team-a" in shown
    assert "http://head:8265" in shown
    assert "WHO=pool" in shown
    assert "num_gpus 8" in shown


SKILLS = """\
    executor: none
    backend: {name: ray, dashboard_url: "http://skills:8265"}
    containers: {vllm: "vllm/vllm-openai:v0.8"}
    mounts: [/a:/b]
    env_vars: [WHO=skills]
"""


def test_nemo_skills_default_counts_where_it_is_for_ray(write, monkeypatch):
    monkeypatch.setenv("NEMO_SKILLS_CONFIG", "old")
    write(SKILLS, "old.yaml")
    assert RayExecutor().resolve_cluster() == ExistingCluster("http://skills:8265")
    write("executor: slurm\npartition: gpu\n", "old.yaml")
    assert RayExecutor().resolve_cluster() == LocalCluster()
    with pytest.raises(ConfigError, match="'slurm', not for Ray"):
        RayExecutor(cluster="old").resolved()
    monkeypatch.setenv("NEMO_RUN_RAY_CLUSTER", "team-a")
    write(FILE)
    assert RayExecutor().resolve_cluster() == ExistingCluster("http://head:8265")


def test_a_secret_from_another_place(write, monkeypatch, tmp_path):
    write("env: {forward: [A_TOKEN, HF_TOKEN], value_from: {A_TOKEN: [OTHER]}}\n")
    monkeypatch.setenv("OTHER", "v1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert team().secrets == ["A_TOKEN"], "nobody has logged in to the hub"
    (tmp_path / "token").write_text("v2\n")
    assert team().secrets == ["A_TOKEN", "HF_TOKEN"]
    found = team()
    assert [value_of(found.secret_places[name]) for name in found.secrets] == ["v1", "v2"]
    own = RayExecutor(secrets=["HF_TOKEN"]).resolved()
    assert not own.secret_places, "only what a file asks for comes from other places"


def test_an_image_that_the_file_does_not_know(write):
    write("images: {vllm: v:1}\nimage_labels: {vllm: {pool: gpu}, tools: {}}\n")
    assert team(image="vllm").label_selector == {"pool": "gpu"}
    assert team(image="tools").label_selector == {}, "every node has it"
    with pytest.raises(ConfigError, match="would run on any node"):
        team(image="vlm")


def test_a_name_of_a_variable_that_is_not_found_names_the_variable(configs, monkeypatch):
    monkeypatch.setenv("NEMO_RUN_RAY_CLUSTER", "nope")
    with pytest.raises(ConfigError, match=r"'nope'.* in the variable NEMO_RUN_RAY_CLUSTER"):
        RayExecutor().resolved()
