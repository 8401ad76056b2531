"""A cluster file that is read and checked: every problem with file, line, key and expectation."""

import os
import re
import tempfile
from pathlib import Path

import pytest

from nemo_run_ray.cluster_files.load import load
from nemo_run_ray.cluster_files.resolve import check_fields_of
from nemo_run_ray.errors import ConfigError
from tests.conftest import ROOT

WHOLE = """\
    cluster:
      address: https://ray.example.org/team-a
      token_variable: TEAM_A
      headers: {X-Proxy: "${PROXY}"}
    defaults:
      retries: 1
    env:
      set: {NCCL_DEBUG: INFO}
      forward: [WANDB_*]
    secrets: [HF_TOKEN]
    images:
      vllm: vllm/vllm-openai:v0.8
    image_labels:
      vllm: {image: vllm}
    pools:
      gpu:
        label_selector: {pool: gpu}
        image: vllm
        gpus_per_node: 8
        memory_per_node: 64GiB
        notes: H100
    preflight:
      enabled: true
      required_labels: [{key: pool, value: gpu}]
      min_resources: {GPU: 8}
"""
IN_TOML = """\
    secrets = ["HF_TOKEN"]
    [cluster]
    address = "https://ray.example.org/team-a"
    token_variable = "TEAM_A"
    headers = {X-Proxy = "${PROXY}"}
    [defaults]
    retries = 1
    [env]
    set = {NCCL_DEBUG = "INFO"}
    forward = ["WANDB_*"]
    [images]
    vllm = "vllm/vllm-openai:v0.8"
    [image_labels]
    vllm = {image = "vllm"}
    [pools.gpu]
    label_selector = {pool = "gpu"}
    image = "vllm"
    gpus_per_node = 8.0
    memory_per_node = "64GiB"
    notes = "H100"
    [preflight]
    enabled = true
    required_labels = [{key = "pool", value = "gpu"}]
    min_resources = {GPU = 8.0}
"""


def test_yaml_and_toml_say_the_same(write):
    write(WHOLE)
    write(IN_TOML, "team-t.toml")
    loaded = load("team-a")
    assert loaded.file == load("team-t").file
    assert loaded.file.pools["gpu"].gpus_per_node == 8
    assert loaded.file.cluster.headers == {"X-Proxy": "${PROXY}"}, "filled when it connects"


def test_where_a_value_comes_from(write):
    yaml, toml = write(WHOLE), write(IN_TOML, "team-t.toml")
    assert load("team-a").where("pools", "gpu", "notes") == f"{yaml}:21"
    assert load("team-t").where("pools", "gpu", "notes") == str(toml)
    assert load("team-a").where("pools", "gpu", "cpus_per_node") == f"{yaml}:16"


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n", "- a\n"])
def test_a_file_that_is_empty_or_no_table_is_no_embedded_ray(write, text):
    """A file that is being written is empty for a moment."""
    path = write(text, is_whole=True)
    with pytest.raises(ConfigError, match="holds no keys with values; expected") as caught:
        load("team-a")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["env: {}", "cluster: {token_variable: T}", "cluster: {}"])
def test_a_file_without_a_cluster(write, text):
    write(text, is_whole=True)
    with pytest.raises(ConfigError, match="names no cluster; expected `address"):
        load("team-a")
    write("pools: {a: {address: 'http://a'}, b: {address: 'http://b'}}\n", is_whole=True)
    assert load("team-a").file.pools["b"].address == "http://b"


def test_keys_are_texts(write):
    """Also those that YAML would read as a number or as a boolean."""
    write("images: {2.54: x}\nenv: {set: {ON: x, NO: y}}\npools: {1: {address: 'http://a'}}\n")
    file = load("team-a").file
    assert (*file.images, *file.env.set, *file.pools) == ("2.54", "ON", "NO", "1")
    write("pools: {a: &a {address: 'http://a'}, b: {<<: *a}}\n", is_whole=True)
    assert load("team-a").file.pools["b"].address == "http://a"


def test_the_docs_example(write):
    page = (ROOT / "docs" / "guides" / "cluster_files.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    write(text)
    assert list(load("team-a").file.pools) == ["gpu", "cpu"]
    check_fields_of(load("team-a"))


def test_a_variable_of_the_environment_is_filled_in(write, monkeypatch):
    monkeypatch.setenv("RAY_HOST", "head7")
    write("cluster:\n  address: http://${RAY_HOST}:8265\nenv:\n  set: {A: 'costs $$3'}\n")
    file = load("team-a").file
    assert file.cluster.address == "http://head7:8265"
    assert file.env.set == {"A": "costs $3"}


BAD = {
    "cluster:\n  address: http://${NO_SUCH}\n": (2, "cluster.address", "NO_SUCH is not set"),
    "cluster:\n  address: http://$/x\n": (2, "cluster.address", r"\$\$ for a dollar"),
    "cluster:\n\taddress: x\n": (2, "", "cannot start any token"),
    "cluster:\n  address: a\n  address: b\n": (3, "cluster.address", "first in line 2"),
    "env: {set: {A: x, A: y}}\n": (1, "env.set.A", "given twice, first in line 1"),
    "on: x\n": (1, "on", "not known"),
    "clusters:\n  address: x\n": (1, "clusters", "did you mean 'cluster'"),
    "cluster:\n  adress: x\n": (2, "cluster.adress", "did you mean 'address'"),
    "pools:\n  gpu:\n    labels: {}\n": (3, "pools.gpu.labels", "did you mean 'label_selector'"),
    "pools:\n  gpu:\n    gpus_per_node: '8'\n": (3, "pools.gpu.gpus_per_node", "found a str"),
    "pools:\n  gpu:\n    zzz: 1\n": (3, "pools.gpu.zzz", "known are label_selector, image"),
    "env:\n  set: {A: 1}\n": (2, "env.set.A", "valid string; found a int"),
    "secrets: {HF_TOKEN: hf_abc}\n": (1, "secrets", "valid list."),
    "cluster: x\n": (1, "cluster", "expected keys with values; found a str"),
    "images_as: labels\n": (1, "images_as", "'label', 'image_uri' or 'none'"),
    "preflight:\n  required_labels:\n  - {key: a}\n": (
        3,
        "preflight.required_labels[0].value",
        "this key is missing",
    ),
    "preflight:\n  required_labels:\n  - {key: a, value: b, key: c}\n": (
        3,
        "preflight.required_labels[0].key",
        "given twice, first in line 3",
    ),
    "env:\n  set: {U: 'https://${MY_API_KEY}@h'}\n": (2, "env.set.U", "name of a credential"),
    "defaults:\n  runtime_env: {env_vars: {HF_TOKEN: hf_abc}}\n": (
        2,
        "defaults.runtime_env.env_vars.HF_TOKEN",
        "credential",
    ),
    "cluster:\n  token: hf_abc\n": (2, "cluster.token", "name its variable: token_variable"),
    "env:\n  forward: [A, '*']\n": (2, "env.forward[1]", "your whole environment"),
    "env:\n  forward: ['?*']\n": (2, "env.forward[0]", "your whole environment"),
    "env:\n  forward: ['[!0]*']\n": (2, "env.forward[0]", "your whole environment"),
    "cluster:\n  headers: [hf_abc]\n": (2, "cluster.headers", "found a list"),
    "env: HF_TOKEN=hf_abc\n": (1, "env", "found a str"),
    "cluster:\n  local: {}\n  token_variable: T\n": (3, "cluster.token_variable", "of its own"),
    "preflight:\n  min_resources: {GPU: -1}\n": (2, "preflight.min_resources.GPU", "than or equal"),
    "preflight:\n  min_resources: {GPU: .nan}\n": (2, "preflight.min_resources.GPU", "finite"),
    "env:\n  set: {HF_TOKEN: hf_abc}\n": (2, "env.set.HF_TOKEN", "only its name into the file"),
    "defaults:\n  env_vars: {A_PASSWORD: x}\n": (2, "defaults.env_vars.A_PASSWORD", "credential"),
    "pools:\n  p:\n    env_vars: {B_API_KEY: x}\n": (3, "pools.p.env_vars.B_API_KEY", "credential"),
    "cluster:\n  address: http://x\n  local: {}\n": (1, "cluster", "expected one of them"),
    "cluster: [1\n": (2, "", "expected ',' or ']'"),
    "a: !!python/object:os.system x\n": (1, "", "could not determine a constructor"),
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text.replace("\n", ";")[:40])
def test_a_wrong_file(write, text):
    line, key, problem = BAD[text]
    path = write(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        load("team-a")
    assert str(caught.value).startswith(f"{path}:{line}: {key}"), str(caught.value)
    assert "hf_abc" not in str(caught.value)


def test_all_problems_of_the_types_are_told_at_once(write):
    write("cluster:\n  verify: 3\nimages: {a: 1}\npoools: {}\n")
    with pytest.raises(ConfigError) as caught:
        load("team-a")
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == [
        "cluster.verify",
        "cluster.verify",
        "images.a",
        "poools",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # Python's reader, and tomli's of Python 3.10.
        ("a = 1\na = 2\n", "Can ?not overwrite"),
        ("a = [1", "Unclosed array"),
        ("a", "Expected ['\"]="),
    ],
)
def test_a_wrong_toml(write, text, problem):
    path = write(text, "team-t.toml")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}(:\d+)?: {problem}"):
        load("team-t")


def test_a_file_that_is_no_text(configs):
    (configs / "bin.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bin.yaml cannot be read: 'utf-8' codec"):
        load("bin")


def test_a_file_that_others_can_write_is_refused():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "team-a.yaml")
        path.write_text("cluster: {address: http://head:8265}\n")
        load(str(path))
        path.chmod(0o666)
        with pytest.raises(ConfigError, match=f"run: chmod go-w {path}"):
            load(str(path))
