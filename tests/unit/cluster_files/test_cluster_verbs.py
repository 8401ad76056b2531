"""``nemo-run-ray clusters``: which files there are, and what one says."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from nemo_run_ray import LocalCluster
from nemo_run_ray.cli.main import build, cluster_of_ours


@pytest.fixture
def clusters(configs):
    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(build(), ["clusters", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_files_are_listed_with_what_is_wrong(clusters, write):
    path = write("cluster: {address: 'http://head:8265'}\npools: {gpu: {}, cpu: {}}\n")
    write("cluster: {local: {num_cpus: 2}}\n", "here.toml.yaml")
    write("clutser: {}\n", "bad.yaml")
    write("cluster: {local: {}}\ndefaults: {runtime_env: {pipp: [six]}}\n", "worse.yaml")
    rows = {row["name"]: row for row in json.loads(clusters("--json"))}
    assert rows["team-a"] == {
        "name": "team-a",
        "kind": "cluster file",
        "where": "http://head:8265",
        "pools": ["gpu", "cpu"],
        "path": str(path),
        "error": "",
    }
    assert "did you mean 'cluster'" in rows["bad"]["error"]
    assert "did you mean 'pip'" in rows["worse"]["error"]
    table = clusters()
    assert table.splitlines()[0].split() == ["name", "kind", "where", "pools", "path"]
    assert "http://head:8265" in table


def test_a_file_for_another_executor_is_no_wrong_one(clusters, write):
    path = write("executor: slurm\npartition: gpu\n", "slurm.yaml")
    assert json.loads(clusters("--json")) == [
        {
            "name": "slurm",
            "kind": "NeMo-Skills",
            "where": "not for Ray",
            "pools": [],
            "path": str(path),
            "error": "",
        }
    ]


def test_profiles_for_other_executors_are_no_wrong_ones(clusters, tmp_path, monkeypatch):
    path = tmp_path / "env.toml"
    path.write_text(
        '[slurm]\nexecutor = "slurm"\n[base]\nexecutor = "ray"\n'
        'ray_address = "http://h:1"\n[gpu]\nextends = "base"\n[lost]\nextends = "no"\n'
    )
    monkeypatch.setenv("NEMOTRON_ENV_FILE", str(path))
    rows = {row["name"]: row for row in json.loads(clusters("--json"))}
    kinds = {name: (row["kind"], row["where"]) for name, row in rows.items() if name != "lost"}
    assert kinds == {
        "slurm": ("Nemotron env.toml", "not for Ray"),
        "base": ("Nemotron env.toml", "http://h:1"),
        "gpu": ("Nemotron env.toml", "http://h:1"),
    }
    assert rows["lost"]["kind"] == "wrong"
    assert "there is no profile 'no'" in rows["lost"]["error"]


def test_a_broken_env_toml_leaves_the_other_files(clusters, write, monkeypatch):
    write("cluster: {local: {}}\n", "good.yaml")
    monkeypatch.setenv("NEMOTRON_ENV_FILE", "/nonexistent")
    good, wrong = json.loads(clusters("--json"))
    assert good["kind"] == "cluster file"
    assert wrong["error"] == "The variable NEMOTRON_ENV_FILE names /nonexistent, which is no file."


def test_every_value_with_its_line_and_secrets_masked(clusters, write, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("PROXY", "pr0xy")
    path = write(
        """\
        cluster:
          address: http://head:8265
          headers: {X-Proxy: "${PROXY}", X-Literal: l1teral}
        env:
          forward: [HF_TOKEN, DATA]
        """
    )
    shown = clusters("team-a", "--json")
    found = {row["key"]: (row["value"], row["source"]) for row in json.loads(shown)["values"]}
    assert found["cluster.address"] == ("http://head:8265", f"{path}:2")
    assert found["cluster.headers.X-Proxy"] == ("${PROXY}", f"{path}:3")
    assert found["env.forward"] == (["HF_TOKEN", "DATA"], f"{path}:5")
    for text in (shown, clusters("team-a")):
        for secret in ("hf_abc", "pr0xy", "l1teral"):
            assert secret not in text
    assert "team-a.yaml:2" in clusters("team-a")


def test_up_and_down_are_for_the_embedded_ray_of_a_file(write):
    write("cluster: {local: {num_cpus: 2}}\n", "laptop.yaml")
    write("cluster: {address: 'http://head:8265'}\n", "far.yaml")
    assert cluster_of_ours("laptop") == LocalCluster(num_cpus=2)
    for verb in ("up", "down"):
        result = CliRunner().invoke(build(), [verb, "--cluster", "far"])
        assert result.exit_code == 1
        assert "http://head:8265, which is not for this command" in result.output


def test_doctor_takes_one_file(write):
    write("cluster: {address: 'http://127.0.0.1:1'}\n", "a.yaml")
    result = CliRunner().invoke(build(), ["doctor", "b", "--cluster", "a"])
    assert result.exit_code == 1
    assert "Give one of a cluster file's name, --cluster and --address." in result.output
    result = CliRunner().invoke(build(), ["doctor", "--cluster", "a"])
    assert "dashboard" in result.output


def test_a_pool_whose_image_no_node_has_is_a_wrong_one(clusters, write):
    """Every launch with it would be refused."""
    text = "cluster: {address: 'http://h:1'}\nimages: {vllm: 'a:1'}\npools: {a: {image: vllm}}\n"
    path = write(text, "noimg.yaml")
    (row,) = json.loads(clusters("--json"))
    assert row["kind"] == "wrong"
    assert row["error"].startswith(f"{path}:3: pools.a.image: The image 'vllm' has no labels in")
