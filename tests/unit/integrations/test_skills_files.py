"""NeMo-Skills' cluster files as ours: a test for every rule of its formats."""

import textwrap

import pytest

from nemo_run_ray.cluster_files.load import load as load_file
from nemo_run_ray.cluster_files.load import places_of
from nemo_run_ray.cluster_files.load import read as read_document
from nemo_run_ray.cluster_files.resolve import check_fields_of, labels_of
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.integrations.skills import reader

PYTORCH = "nvcr.io/nvidia/pytorch:25.02-py3"
HEAD = "http://ray-head:8265"
CLIENT = "ray://ray-head:10001"
BACKEND = f"backend: {{name: ray, dashboard_url: '{HEAD}'}}\n"
STAGED = "executor: ray\nray: {address: auto}\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "team.yaml"


@pytest.fixture
def read(path):
    def make(text, **environ):
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        reading = reader.read(read_document(path), "", environ)
        ClusterFile.model_validate(reading.values)
        return reading

    return make


@pytest.fixture
def refusal(path):
    def make(text):
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            check_fields_of(load_file(str(path)))
        return str(caught.value).rpartition("/team.yaml")[2]

    return make


def _labels(reading, image):
    file = ClusterFile.model_validate(reading.values)
    return {**labels_of(image, file), **file.defaults.get("label_selector", {})}


def _ignored(reading):
    return {one.key: one.reason for one in reading.ignored}


@pytest.mark.parametrize(
    ("text", "is_skills", "is_for_ray"),
    [
        ("executor: ray\nray: {address: auto}\n", True, True),
        ("backend: ray\n", True, True),
        ("execution_backend: {name: kubernetes-ray}\n", True, True),
        ("with_ray: true\nray_endpoint: ray://h:1\n", True, True),
        ("executor: local\nray_endpoint: ray://h:1\n", True, True),
        ("executor: slurm\nwith_ray: true\nray_endpoint: ray://h:1\n", True, False),
        ("executor: slurm\nbackend: default\ncontainers: {a: b}\n", True, False),
        ("executor: local\nbackend: {name: default}\nray_endpoint: ray://h:1\n", True, False),
        ("cluster: {address: 'http://h:8265'}\n", False, None),
        ("preflight: {enabled: true}\n", False, None),
        ("pools: {gpu: {}}\nexecutor: ray\n", False, None),
    ],
)
def test_whose_a_file_is_and_whether_it_is_for_ray(path, text, is_skills, is_for_ray):
    path.write_text(text)
    assert reader.matches(read_document(path)) is is_skills
    if is_skills:
        assert reader.names_ray(read_document(path)) is is_for_ray


def test_an_env_toml_is_no_file_of_skills(tmp_path):
    path = tmp_path / "env.toml"
    path.write_text('[executor]\nexecutor = "ray"\n')
    assert not reader.matches(read_document(path))


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (
            "account: a\nexecutor: slurm\nbackend: default\n",
            ":2: executor: this file of NeMo-Skills is for 'slurm', not for Ray",
        ),
        (
            f"executor: slurm\nwith_ray: true\nray_endpoint: {CLIENT}\n",
            ":1: executor: this file of NeMo-Skills is for 'slurm', not for Ray",
        ),
        ("containers: {a: b}\n", ": executor: this file of NeMo-Skills is for 'no executor'"),
        ("backend:\n  name: rya\n", ":2: backend.name: 'rya' is no back-end; expected one of ray"),
        ("executor: slurm\nbackend: ray\n", ":2: backend.name: it says Ray, but no address"),
        ("executor: none\nwith_ray: true\n", ": backend.name: it says Ray, but no address"),
        *(
            (f"{BACKEND[:-2]}, {lines}\n", f":1{expected}")
            for lines, expected in (
                (
                    "entrypoint_label_selector: {a: true}}",
                    " (backend.entrypoint_label_selector): defaults.label_selector: ",
                ),
                ("image_label_selectors: {x: y}}", ": backend.image_label_selectors.x: expected k"),
                ("image_label_key: 3}", " (backend.image_label_key): image_label_key: "),
            )
        ),
        *(
            (f"{BACKEND}{lines}\n", f":2{expected}")
            for lines, expected in (
                ("preflight: {enabled: 1}", " (preflight.enabled): preflight.enabled: "),
                (
                    "preflight: {required_node_labels: [{key: a}]}",
                    " (preflight.required_node_labels): preflight.required_labels[0]",
                ),
                ("env_vars: {HF_TOKEN: pw}", ": env_vars: expected a list; found a dict."),
                ("env_vars: [HF_TOKEN: pw]", ": env_vars[0]: it is no variable (not shown"),
                ("required_env_vars: ['=pw']", ": required_env_vars[0]: it is no variable"),
                (
                    "env_vars: [HF_TOKEN=pw]",
                    " (env_vars[0]): env.set.HF_TOKEN: this looks like a credential",
                ),
                ("required_env_vars: [A=pw$MY_KEY]", ": required_env_vars[0]: MY_KEY is the name"),
                ("env_vars: [B=$ROOT/hf]", ": env_vars[0]: its value asks for the variable ROOT"),
                ("containers: {a: 3}", " (containers.a): images.a: "),
            )
        ),
    ],
)
def test_what_is_wrong_is_refused_by_file_line_and_key(refusal, text, start):
    told = refusal(text)
    assert told.startswith(start)
    assert "pw" not in told


@pytest.mark.parametrize("section", ["backend", "execution_backend"])
@pytest.mark.parametrize("name", ["ray", "' Ray '", "KUBERNETES-RAY"])
@pytest.mark.parametrize("form", ["{section}: {name}\n", "{section}: {{name: {name}}}\n"])
def test_the_name_is_a_text_or_in_a_table_trimmed_and_in_any_case(read, section, name, form):
    text = form.format(section=section, name=name) + f"ray_endpoint: {CLIENT}\n"
    assert read(text).values["cluster"] == {"address": CLIENT}


@pytest.mark.parametrize("first", range(5))
def test_the_order_of_addresses(read, first):
    keys = ["dashboard_url", "jobs_api_url", "endpoint", "ray_endpoint"]
    rows = [f"backend.{key}" for key in keys] + ["ray_endpoint"]
    given = [f"{key}: 'http://{key[0]}:1'" for key in keys[first:]]
    backend = ", ".join(["name: ray", *given])
    reading = read(f"backend: {{{backend}}}\nray_endpoint: http://top:1\n")
    expected = keys[first][0] if first < 4 else "top"
    assert reading.values["cluster"] == {"address": f"http://{expected}:1"}
    assert set(rows[first + 1 :]) <= set(_ignored(reading))


KUBERNETES = f"""
    executor: slurm
    containers:
      nemo-skills: /containers/nemo-skills.sqsh
      nemo-rl: /containers/nemo-rl.sqsh
    backend:
      name: ray
      control_plane: kubernetes
      endpoint: {CLIENT}
      kubernetes:
        mode: offline
        entrypoint_label_selector: {{type: worker}}
"""


def test_an_image_gives_a_label_that_an_explicit_one_comes_before(read):
    reading = read(textwrap.dedent(KUBERNETES) + "    image_label_key: nemo/image\n")
    image = {"nemo/image": "nvcr.io-nvidia-pytorch-25.02-py3"}
    assert _labels(reading, PYTORCH) == {"type": "worker", **image}
    reading = read(
        f"backend: {{name: ray, endpoint: '{CLIENT}', image_label_key: nemo/image, "
        "entrypoint_label_selector: {type: worker, nemo/image: preset}}\n"
    )
    assert _labels(reading, PYTORCH) == {"type": "worker", "nemo/image": "preset"}


def test_image_label_selectors_add_pairs_of_key_and_value_and_labels(read):
    reading = read(
        textwrap.dedent(KUBERNETES) + "    image_label_selectors:\n"
        "      nemo-skills: {key: nemo/workload, value: skills}\n"
        "      nemo-rl: {nemo/workload: rl, more: 1}\n"
    )
    assert reading.values["images"]["nemo-rl"] == "/containers/nemo-rl.sqsh"
    assert reading.sources["images", "nemo-rl"].endswith("team.yaml:5 (containers.nemo-rl)")
    for image in ("nemo-skills", "/containers/nemo-skills.sqsh"):
        assert _labels(reading, image) == {"type": "worker", "nemo/workload": "skills"}
    expected = {"type": "worker", "nemo/workload": "rl", "more": "1"}
    assert _labels(reading, "/containers/nemo-rl.sqsh") == expected


def test_selectors_of_the_backend_come_before_those_of_kubernetes(read):
    shared = "entrypoint_label_selector: {{a: {0}}}, image_label_key: k{0}, " + (
        "image_label_selectors: {{x: {{b: {0}}}}}"
    )
    one, two = shared.format("'1'"), shared.format("'2'")
    reading = read(f"backend: {{name: ray, endpoint: '{CLIENT}', {one}, kubernetes: {{{two}}}}}\n")
    assert reading.values["defaults"]["label_selector"] == {"a": "1"}
    assert reading.values["image_label_key"] == "k'1'"
    assert reading.values["image_labels"] == {"x": {"b": "1"}}


def test_working_dir_is_the_code(read):
    reading = read(
        f"backend: {{name: ray, dashboard_url: '{HEAD}', working_dir: ' /opt/a.zip '}}\n"
    )
    assert reading.values["defaults"]["packager"] == {"folder": "/opt/a.zip"}


@pytest.mark.parametrize("start", [BACKEND, STAGED])
def test_without_a_preflight_nothing_is_checked_and_all_wait_for_nodes(read, start):
    values = read(start).values
    assert "preflight" not in values
    assert values["defaults"]["wait_for_nodes"] is True


def test_a_preflight_checks_only_what_it_requires(read):
    reading = read(BACKEND + "preflight: {required_node_labels: [{key: pool, value: gpu}]}\n")
    assert reading.values["preflight"] == {
        "only_required": True,
        "required_labels": [{"key": "pool", "value": "gpu"}],
        "enabled": True,
        "strict": True,
    }
    reading = read(
        BACKEND + "preflight: {enabled: false, strict_label_check: false, require_ray_endpoint: "
        "true, min_cluster_resources: {GPUs: 8, gpu: 9, cpus: 2.5, CPU: 3, mem: 1, TPU: 4, 1: 2}}\n"
    )
    preflight = reading.values["preflight"]
    assert (preflight["enabled"], preflight["strict"]) == (False, False)
    assert preflight["min_resources"] == {"GPU": 9, "CPU": 3, "memory": 1, "TPU": 4, "1": 2}
    assert "the dashboard" in _ignored(reading)["preflight.require_ray_endpoint"]


def test_the_staged_executor(read):
    reading = read(f"executor: ray\nray:\n  address: {CLIENT}\n")
    assert reading.values["cluster"] == {"address": CLIENT}
    assert reading.values["defaults"] == {"cpus_per_node": 8, "wait_for_nodes": True}
    reading = read(
        "executor: ray\nray: {namespace: team, default_num_cpus: 0}\njobs: {log_dir: /logs}\n"
        "containers: {vllm: 'vllm:1'}\nmounts: ['/a:/b']\nenv_vars: [A=1]\n"
    )
    assert reading.values["cluster"] == {"address": "auto"}
    assert reading.values["defaults"]["cpus_per_node"] == 0
    assert reading.values["images"] == {"vllm": "vllm:1"}
    assert reading.values["env"]["set"] == {"A": "1"}
    assert set(_ignored(reading)) == {"ray.namespace", "jobs", "mounts"}


def test_a_backend_for_ray_comes_before_the_executor(read):
    reading = read(BACKEND + "executor: ray\nray: {address: auto}\n")
    assert reading.values["cluster"] == {"address": HEAD}
    assert {"executor", "ray"} <= set(_ignored(reading))


def test_variables_of_the_environment_and_with_values(read):
    reading = read(
        BACKEND + "env_vars: ['HF_HOME=$ROOT/hf', MY_URL, 'TWO=${ROOT}:$9', TEAM, A=1, A]\n"
        "required_env_vars:\n  - TEAM\n  - MY_JUDGE_NAME = secret-123\n  - HF_TOKEN\n",
        ROOT="/r",
    )
    env = reading.values["env"]
    given = {"HF_HOME": "/r/hf", "TWO": "/r:$9", "A": "1", "MY_JUDGE_NAME": "secret-123"}
    assert env["set"] == {**given, "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}
    assert env["required"] == ["TEAM", "HF_TOKEN"]
    assert env["forward"][0] == "MY_URL"
    assert not {"HF_TOKEN", "TEAM", "A"} & set(env["forward"])
    assert reading.sources["env", "set", "MY_JUDGE_NAME"].endswith(":5 (required_env_vars[1])")


@pytest.mark.parametrize("start", [BACKEND, STAGED])
def test_some_variables_are_always_forwarded(read, start):
    stay = {"NEMO_SKILLS_CONFIG": "c", "NEMO_SKILLS_SSH_KEY_PATH": "/k"}
    values = read(start, HOME="/home/me", NEMO_SKILLS_AUTH="s3", NEMO_SKILLS_X="1", **stay).values
    assert values["env"]["forward"] == [
        "WANDB_API_KEY",
        "NVIDIA_API_KEY",
        "AZURE_OPENAI_API_KEY",
        "OPENAI_API_KEY",
        "GEMINI_API_KEY",
        "HF_TOKEN",
        "NGC_API_KEY",
    ]
    assert values["secrets"] == ["NEMO_SKILLS_AUTH", "NEMO_SKILLS_X"]


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({}, "~/.cache/huggingface/token"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/token"),
        ({"HF_HOME": "", "XDG_CACHE_HOME": ""}, "~/.cache/huggingface/token"),
        ({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/c"}, "/hf/token"),
        ({"HF_TOKEN_PATH": "/t", "HF_HOME": "/hf"}, "/t"),
    ],
)
def test_hf_token_is_else_the_login_of_the_hub(monkeypatch, environ, path):
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert places_of("HF_TOKEN", {}) == ["HF_TOKEN", path]


@pytest.mark.parametrize(
    ("entry", "name"),
    [("HF_TOKEN=$MY_KEY", "HF_TOKEN"), ("B=${MY_KEY}", "B"), ("MY_KEY=$MY_KEY", "MY_KEY")],
)
def test_a_credential_may_come_from_another_variable(read, entry, name):
    values = read(BACKEND + f"env_vars: ['{entry}']\n", MY_KEY="hunter2").values
    assert values["secrets"] == [name]
    assert values["env"]["value_from"][name] == ["MY_KEY"]
    assert "hunter2" not in repr(values)


def test_an_empty_credential_leaves_that_of_the_environment(read):
    reading = read(BACKEND + "env_vars: [HF_TOKEN=]\n")
    assert "HF_TOKEN" not in reading.values["env"]["set"]
    assert "HF_TOKEN" in reading.values["env"]["forward"]
    assert _ignored(reading)["env_vars[0]"] == "The credential is empty."


def test_keys_that_mean_nothing_on_ray_are_told_once_with_the_reason(read):
    text = BACKEND + (
        "executor: slurm\naccount: a\npartition: p\ncpu_partition: c\nmounts: ['/a:/b']\n"
        "timeouts: {p: 1}\ndefault_timeout: '1'\nssh_tunnel: {host: h, job_dir: /j}\n"
        "job_dir: /j\njob_name_prefix: x\nmail_type: a\ncontainers:\n"
    )
    reading = read(text)
    keys = [one.key for one in reading.ignored]
    assert keys == [line.split(":")[0] for line in text.splitlines()[1:-1]]
    assert not any("not known" in one.reason for one in reading.ignored)
    mounts = next(one for one in reading.ignored if one.key == "mounts")
    assert mounts.source.endswith("team.yaml:6")
    assert "run already" in mounts.reason


@pytest.mark.parametrize(
    ("lines", "key", "like"),
    [
        ("env_var: [A]", "env_var", "env_vars"),
        (
            "backend: {name: ray, endpoint: auto, workingdir: a}",
            "backend.workingdir",
            "working_dir",
        ),
        ("preflight: {strict_labels: true}", "preflight.strict_labels", "strict_label_check"),
        ("qqq: 1", "qqq", ""),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_known_one(read, lines, key, like):
    start = "" if "backend: {" in lines else BACKEND
    meant = f"did you mean {like!r}?" if like else "known are "
    assert _ignored(read(f"{start}{lines}\n"))[key].startswith(f"The key is not known; {meant}")
