"""One cluster file for three hosts: a group across its pools in a chain over them, by names only.

The hosts' labels stand for the container images that their nodes run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.experiment.job import find_job
from nemo_run_ray.remote.status import JobState
from tests import skills
from tests.conftest import wait_for
from tests.groups import assert_nothing_left
from tests.hosts.conftest import TOKEN
from tests.hosts.head import ADDRESS, address_of

URL = f"http://{ADDRESS}:8265"
OWN = f"""\
cluster: {{address: "{URL}", token_variable: HOSTS_TOKEN}}
env:
  set: {{GREETING: hello}}
images: {{vllm: "vllm/vllm-openai:v0.8.5", sandbox: "org/sandbox:1"}}
image_labels:
  vllm: {{pool: gpu}}
  "org/*": {{pool: cpu}}
image_label_key: pool
pools:
  model: {{image: vllm}}
  sandbox: {{image: sandbox}}
  client: {{image: client}}
"""
OF_SKILLS = f"""\
executor: none
backend:
  name: kubernetes-ray
  dashboard_url: "{URL}"
  image_label_key: pool
  image_label_selectors:
    vllm: {{key: pool, value: gpu}}
    "org/*": {{pool: cpu}}
containers:
  vllm: vllm/vllm-openai:v0.8.5
  sandbox: org/sandbox:1
  nemo-skills: client
mounts: ["/data:/data"]
env_vars: [GREETING=hello, HF_HOME=/data/hf]
preflight:
  enabled: true
  required_node_labels: [{{key: pool, value: gpu}}]
  min_cluster_resources: {{cpu: 3}}
"""
STAGED = f"""\
executor: ray
ray: {{address: "ray://{ADDRESS}:10001", namespace: nemo, default_num_cpus: 1}}
jobs: {{log_dir: /logs}}
containers: {{vllm: "vllm/vllm-openai:v0.8.5"}}
env_vars: [GREETING=hello]
"""
ENV_TOML = f"""\
[base]
executor = "ray"
ray_address = "{URL}"
env_vars = {{GREETING = "hello"}}
[hosts]
extends = "base"
nodes = 1
partition = "gpu"
[wandb]
project = "x"
"""
POOLS = {"client": "client", "model": "gpu", "sandbox": "cpu"}
IMAGES = {"client": "nemo-skills", "model": "vllm", "sandbox": "sandbox"}


@dataclass
class Form:
    """A file of one format, and how a task of it names the nodes that it wants."""

    file: str
    text: str
    place: Callable[[str], dict[str, Any]]


def by_label(pool: str) -> dict[str, Any]:
    return {"label_selector": {"pool": POOLS[pool]}}


FORMS = {
    "ours": Form("cluster_configs/hosts.yaml", OWN, lambda pool: {"pool": pool}),
    "NeMo-Skills on the Jobs API": Form(
        "cluster_configs/hosts.yaml", OF_SKILLS, lambda pool: {"image": IMAGES[pool]}
    ),
    "NeMo-Skills staged": Form("cluster_configs/hosts.yaml", STAGED, by_label),
    "env.toml": Form("env.toml", ENV_TOML, by_label),
}
PROGRAM = run.Script(inline='echo "$GREETING from $(hostname)"')


@pytest.mark.filterwarnings("ignore:ray.*is an address of another part of Ray")
@pytest.mark.parametrize(
    "form",
    [
        "ours",
        pytest.param("NeMo-Skills staged", marks=pytest.mark.soak),
        pytest.param("NeMo-Skills on the Jobs API", marks=pytest.mark.soak),
        pytest.param("env.toml", marks=pytest.mark.soak),
    ],
)
def test_a_group_in_a_chain_by_names_only(hosts, unique, tmp_path, monkeypatch, form):
    file, place = tmp_path / FORMS[form].file, FORMS[form].place
    Path(file).parent.mkdir(exist_ok=True)
    file.write_text(FORMS[form].text)
    monkeypatch.chdir(tmp_path)
    for variable in ("HOSTS_TOKEN", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(variable, TOKEN)

    def executor(pool: str, **fields: Any) -> RayExecutor:
        return RayExecutor(cluster="hosts", **place(pool), **fields)

    with run.Experiment(unique) as experiment:
        first = experiment.add(PROGRAM, executor=executor("sandbox"), name="first")
        group = experiment.add(
            [PROGRAM] * 3,
            executor=[executor(pool, role=pool) for pool in POOLS],
            name="group",
            dependencies=[first],
        )
        experiment.add(PROGRAM, executor=executor("model"), name="last", dependencies=[group])
        experiment.run(detach=True)
    jobs = {name: find_job(f"{experiment._id}.{name}") for name in ("first", "group", "last")}
    wait_for(lambda: all(job.status.state.is_terminal for job in jobs.values()), 120)

    told = {
        name: sorted(line.strip() for line in job.output() if "hello" in line)
        for name, job in jobs.items()
    }
    assert {job.status.state for job in jobs.values()} == {JobState.SUCCEEDED}, told
    assert told == {
        "first": ["hello from n3"],
        "group": ["client/0| hello from n1", "model/0| hello from n2", "sandbox/0| hello from n3"],
        "last": ["hello from n2"],
    }
    assert_nothing_left(hosts, jobs["group"])


def test_a_task_of_nemo_skills_across_the_pools(hosts, unique, tmp_path, monkeypatch):
    """Its client finds the server at localhost and the sandbox, each on the host of its image."""
    port = 15_000
    skills.write(tmp_path / "site")
    (tmp_path / "cluster_configs").mkdir()
    text = f"{OF_SKILLS}\nrequired_env_vars: [HOSTS_TOKEN]\n"
    (tmp_path / "cluster_configs" / "hosts.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    for variable in ("HOSTS_TOKEN", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(variable, TOKEN)
    ports = (port, port + 1)
    exp = skills.submit_served_task(tmp_path / "site", "hosts", unique, "client", ports)
    job = find_job(f"{exp._id}.t")
    wait_for(lambda: job.status.state.is_terminal, 120)
    told = [line.strip() for line in job.output()]
    assert job.status.state is JobState.SUCCEEDED, told
    assert [line for line in told if line.startswith("main/0|")] == [
        f"main/0| nemo_run_ray| localhost:{port} is passed on to {address_of('n2')}",
        "main/0| server on n2",
        "main/0| sandbox on n3",
    ]
    assert_nothing_left(hosts, job)
