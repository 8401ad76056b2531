"""NeMo-Skills' cluster files as ours: a test for every rule of its formats."""

import textwrap

import pytest

from nemo_run_ray.cluster_files.load import read as read_document
from nemo_run_ray.cluster_files.load import usual_places, value_of
from nemo_run_ray.cluster_files.resolve import labels_of
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.integrations.skills import reader

PYTORCH = "nvcr.io/nvidia/pytorch:25.02-py3"
HEAD = "http://ray-head:8265"
CLIENT = "ray://ray-head:10001"
BACKEND = f"backend: {{name: ray, dashboard_url: '{HEAD}'}}\n"


@pytest.fixture
def load(tmp_path):
    def make(text):
        path = tmp_path / "team.yaml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return read_document(path)

    return make


@pytest.fixture
def read(load):
    def make(text, **environ):
        reading = reader.read(load(text), None, environ)
        ClusterFile.model_validate(reading.values)
        return reading

    return make


@pytest.fixture
def refusal(load):
    def make(text, **environ):
        with pytest.raises(ConfigError) as caught:
            reader.read(load(text), None, environ)
        return str(caught.value).rpartition("/team.yaml")[2]

    return make


def _labels(reading, image):
    file = ClusterFile.model_validate(reading.values)
    return {**labels_of(image, file), **file.defaults.get("label_selector", {})}


def _ignored(reading):
    return {one.key: one.reason for one in reading.ignored}


# ---------------------------------------------------------------------- whose file it is


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("executor: ray\nray: {address: auto}\n", True),
        ("backend: ray\n", True),
        ("execution_backend: {name: kubernetes-ray}\n", True),
        ("with_ray: true\nray_endpoint: ray://h:1\n", True),
        ("executor: slurm\ncontainers: {a: b}\n", True),
        ("cluster: {address: 'http://h:8265'}\n", False),
        ("preflight: {enabled: true}\n", False),
        ("pools: {gpu: {}}\nexecutor: ray\n", False),
        ("", False),
    ],
)
def test_files_of_both_schemas_and_for_other_executors_are_told_from_ours(load, text, expected):
    assert reader.matches(load(text)) is expected


def test_an_env_toml_is_no_file_of_skills(tmp_path):
    path = tmp_path / "env.toml"
    path.write_text('[executor]\nexecutor = "ray"\n')

    assert not reader.matches(read_document(path))


@pytest.mark.parametrize("executor", ["slurm", "local", "none"])
def test_a_file_for_another_executor_is_refused_by_its_name(refusal, executor):
    text = refusal(f"account: a\nexecutor: {executor}\nbackend: default\n")

    assert text.startswith(f":2: executor: this file of NeMo-Skills is for '{executor}'")
    assert "backend: {name: ray, dashboard_url:" in text


def test_a_file_without_an_executor_is_refused(refusal):
    assert "names no executor" in refusal("containers: {a: b}\n")


# ---------------------------------------------------------------------- names of the back-end


@pytest.mark.parametrize("section", ["backend", "execution_backend"])
@pytest.mark.parametrize("name", ["ray", "' Ray '", "KUBERNETES-RAY"])
@pytest.mark.parametrize("form", ["{section}: {name}\n", "{section}: {{name: {name}}}\n"])
def test_the_name_is_a_text_or_in_a_table_trimmed_and_in_any_case(read, section, name, form):
    text = form.format(section=section, name=name) + f"ray_endpoint: {CLIENT}\n"

    assert read(text).values["cluster"] == {"address": HEAD}


@pytest.mark.parametrize("name", ["default", "none"])
def test_default_and_none_are_not_ray(refusal, name):
    assert "is for 'slurm', not for Ray" in refusal(f"executor: slurm\nbackend: {name}\n")


def test_another_name_is_refused_with_those_that_are_supported(refusal):
    text = refusal("executor: slurm\nbackend:\n  name: rya\n")

    assert text.startswith(":3: backend.name: 'rya' is no back-end; expected one of ray, kubern")


# ---------------------------------------------------------------------- where the cluster is


ENDPOINTS = {
    "backend.endpoint": "  endpoint: ray://a:1\n",
    "backend.ray_endpoint": "  ray_endpoint: ray://b:1\n",
    "backend.kubernetes.endpoint": "  kubernetes: {endpoint: 'ray://c:1'}\n",
    "ray_endpoint": "ray_endpoint: ray://d:1\n",
}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("ray", "abcd"),
        ("kubernetes-ray", "acbd"),
        ("ray_kubernetes", "acbd"),
    ],
)
def test_order_of_endpoints(read, name, order):
    by_host = {line.split("ray://")[1][0]: key for key, line in ENDPOINTS.items()}
    for number, host in enumerate(order):
        left = [ENDPOINTS[by_host[one]] for one in sorted(order[number:])]
        reading = read(f"backend:\n  name: {name}\n" + "".join(left))

        assert reading.values["cluster"]["address"] == f"http://{host}:8265"
        late = {by_host[one]: f"{by_host[host]} comes first." for one in order[number + 1 :]}
        late.pop("ray_endpoint", None)
        assert late.items() <= _ignored(reading).items()


def test_order_of_dashboards_which_come_before_endpoints(read):
    lines = [
        "  dashboard_url: http://a:1\n",
        "  jobs_api_url: http://b:1\n",
        "  kubernetes: {dashboard_url: 'http://c:1'}\n",
        "  endpoint: ray://d:1\n",
    ]
    for number, address in enumerate(["http://a:1", "http://b:1", "http://c:1", "http://d:8265"]):
        text = "backend:\n  name: ray\n" + "".join(lines[number:])
        assert read(text).values["cluster"]["address"] == address


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("ray://ray-head.ns.svc:10001", "http://ray-head.ns.svc:8265"),
        ("ray://ray-head", "http://ray-head:8265"),
        ("ray://[fd00::1]:10001", "http://[fd00::1]:8265"),
        ("http://ray-head:80/a", "http://ray-head:80/a"),
        ("https://ray-head", "https://ray-head"),
        ("' auto '", "auto"),
        ("ray-head:6379", "ray-head:6379"),
    ],
)
def test_the_dashboard_is_derived_from_an_endpoint(read, endpoint, address):
    reading = read(f"backend: {{name: ray, endpoint: '{endpoint.strip(chr(39))}'}}\n")

    assert reading.values["cluster"]["address"] == address


@pytest.mark.parametrize("endpoint", ["ray-head", "grpc://ray-head:1", "ray://", "http://[::1"])
def test_what_is_no_address_is_refused(refusal, endpoint):
    text = refusal(f"backend:\n  name: ray\n  endpoint: '{endpoint}'\n")

    assert text.startswith(f":3: backend.endpoint: it is {endpoint!r}; expected the address")


def test_an_address_with_a_password_is_refused_and_not_shown(refusal):
    text = refusal("backend:\n  name: ray\n  dashboard_url: https://me:hunter2@ray-head\n")

    assert text.startswith(":3: backend.dashboard_url: it holds a user or a password")
    assert "hunter2" not in text


@pytest.mark.parametrize("more", ["", ", precreated_cluster: true", ", control_plane: kubernetes"])
def test_executor_none_without_an_address_is_refused_by_dashboard_url(refusal, more):
    text = refusal(f"executor: none\nbackend: {{name: ray{more}}}\n")

    assert text.startswith(":2: backend.name: it says Ray, but no address of a cluster is given")
    assert "`backend.dashboard_url: http://<head>:8265`" in text


def test_a_backend_on_slurm_without_an_address_is_ray_inside_an_allocation(refusal):
    assert "Ray inside a Slurm allocation" in refusal("executor: slurm\nbackend: ray\n")


@pytest.mark.parametrize("start", ["executor: none\nwith_ray: true\n", "executor: local\n", ""])
def test_ray_endpoint_means_ray_where_the_file_is_named(load, read, start):
    text = f"{start}ray_endpoint: {CLIENT}\n"
    reading = read(text)

    assert reader.names_ray(load(text))
    assert reading.values["cluster"] == {"address": HEAD}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"executor: slurm\nwith_ray: true\nray_endpoint: {CLIENT}\n",
            ":2: with_ray: with `executor: slurm` it means Ray inside a Slurm allocation",
        ),
        ("executor: none\nwith_ray: true\n", ":2: with_ray: no cluster is named"),
        (
            f"executor: slurm\nray_endpoint: {CLIENT}\n",
            ":2: ray_endpoint: it counts with `with_ray: true` only",
        ),
        ("executor: none\nwith_ray: 'yes'\n", ":2: with_ray: it is 'yes'; expected true or false"),
    ],
)
def test_with_ray_otherwise_is_refused(refusal, text, expected):
    assert refusal(text).startswith(expected)


# ---------------------------------------------------------------------- labels and images


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
"""


def test_kubernetes_ray_selector_with_image_label_translation(read):
    text = textwrap.dedent(KUBERNETES) + (
        "    entrypoint_label_selector: {type: worker}\n    image_label_key: nemo/image\n"
    )
    reading = read(text)

    assert _labels(reading, PYTORCH) == {
        "type": "worker",
        "nemo/image": "nvcr.io-nvidia-pytorch-25.02-py3",
    }
    assert reading.values["cluster"] == {"address": HEAD}


def test_image_translation_does_not_override_an_explicit_selector(read):
    reading = read(
        f"backend: {{name: ray, endpoint: '{CLIENT}', image_label_key: nemo/image, "
        "entrypoint_label_selector: {type: worker, nemo/image: preset}}\n"
    )

    assert _labels(reading, PYTORCH) == {"type": "worker", "nemo/image": "preset"}


def test_image_label_selectors_add_pairs_of_key_and_value_and_labels(read):
    text = textwrap.dedent(KUBERNETES) + (
        "    entrypoint_label_selector: {type: worker}\n"
        "    image_label_selectors:\n"
        "      nemo-skills: {key: nemo/workload, value: skills}\n"
        "      nemo-rl: {nemo/workload: rl, more: 1}\n"
    )
    reading = read(text)

    assert reading.values["images"]["nemo-rl"] == "/containers/nemo-rl.sqsh"
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
    reason = _ignored(reading)["backend.kubernetes.image_label_selectors"]
    assert reason == "backend.image_label_selectors comes first."


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("entrypoint_label_selector: [a]", "entrypoint_label_selector: it is a list; expected key"),
        ("entrypoint_label_selector: {a: true}", "entrypoint_label_selector.a: it is True; expect"),
        ("image_label_selectors: {x: y}", "image_label_selectors.x: it is a text; expected keys"),
        ("image_label_key: 3", "image_label_key: it is 3; expected a text"),
    ],
)
def test_wrong_selectors_are_refused(refusal, line, expected):
    text = refusal(f"backend:\n  name: ray\n  endpoint: {CLIENT}\n  {line}\n")

    assert text.startswith(f":4: backend.{expected}")


def test_containers_are_images_by_their_names(read):
    reading = read(BACKEND + "containers:\n  vllm: vllm/vllm-openai:v1\n")

    assert reading.values["images"] == {"vllm": "vllm/vllm-openai:v1"}
    assert reading.sources["images", "vllm"].endswith("team.yaml:3 (containers.vllm)")


@pytest.mark.parametrize("name", ["ray", "kubernetes-ray"])
def test_working_dir_is_the_code(read, name):
    reading = read(
        f"backend: {{name: {name}, dashboard_url: '{HEAD}', working_dir: ' /opt/code.zip '}}\n"
    )

    assert reading.values["defaults"]["packager"] == {"folder": "/opt/code.zip"}


# ---------------------------------------------------------------------- preflight


@pytest.mark.parametrize(
    "start",
    [BACKEND, f"backend: {{name: ray, endpoint: '{CLIENT}'}}\n", "executor: ray\nray: {a: b}\n"],
)
def test_without_a_preflight_nothing_is_checked_and_all_wait_for_nodes(read, start):
    values = read(start).values

    assert "preflight" not in values
    assert values["defaults"]["wait_for_nodes"] is True


def test_a_preflight_checks_only_what_it_requires(read):
    lines = "preflight: {required_node_labels: [{key: pool, value: gpu}]}\n"
    reading = read(f"backend: {{name: ray, endpoint: '{CLIENT}'}}\n" + lines)

    given = {"only_required": True, "required_labels": [{"key": "pool", "value": "gpu"}]}
    defaults = {"enabled": True, "require_address": True, "strict": True}
    assert reading.values["preflight"] == {**given, **defaults}
    assert "NeMo-Skills' default" in reading.sources["preflight", "enabled"]


def test_preflight_that_requires_an_endpoint_requires_an_address(read):
    endpoint = f"backend: {{name: ray, endpoint: '{CLIENT}'}}\n"
    reading = read(endpoint + "preflight: {require_ray_endpoint: true}\n")

    assert reading.values["preflight"]["require_address"] is True


def test_a_required_endpoint_means_nothing_where_jobs_go_through_the_dashboard(read):
    reading = read(BACKEND + "preflight: {require_ray_endpoint: true}\n")

    assert "require_address" not in reading.values["preflight"]
    assert "preflight.require_ray_endpoint" in _ignored(reading)


def test_what_begins_as_nemo_skills_is_a_secret_but_for_what_stays_here(read):
    environ = {"NEMO_SKILLS_AUTH": "s3", "NEMO_SKILLS_SSH_KEY_PATH": "/k", "NEMO_SKILLS_X": "1"}
    reading = read(BACKEND, NEMO_SKILLS_CONFIG="c", **environ)

    assert reading.values["secrets"] == ["NEMO_SKILLS_AUTH", "NEMO_SKILLS_X"]


def test_preflight_as_the_file_says(read):
    reading = read(
        BACKEND
        + """preflight:
  enabled: false
  strict_label_check: false
  required_node_labels:
    - {key: ' pool ', value: gpu}
  min_cluster_resources: {GPUs: 8, gpu: 9, cpus: 2.5, CPU: 3, mem: 1, memory: 2, TPU: 4}
"""
    )

    preflight = reading.values["preflight"]
    assert (preflight["enabled"], preflight["strict"]) == (False, False)
    assert preflight["required_labels"] == [{"key": "pool", "value": "gpu"}]
    assert preflight["min_resources"] == {"GPU": 9, "CPU": 3, "memory": 2, "TPU": 4}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("enabled: 1", "preflight.enabled: it is 1; expected true or false"),
        (
            "required_node_labels: {a: b}",
            "preflight.required_node_labels: it is a table of keys; expected",
        ),
        ("required_node_labels: [{key: ''}]", "preflight.required_node_labels[0]: it is no label"),
        ("min_cluster_resources: {gpu: lots}", "preflight.min_cluster_resources.gpu: it is 'lots'"),
        ("min_cluster_resources: {gpu: true}", "preflight.min_cluster_resources.gpu: it is True"),
    ],
)
def test_a_wrong_preflight_is_refused(refusal, line, expected):
    assert refusal(BACKEND + f"preflight:\n  {line}\n").startswith(f":3: {expected}")


# ---------------------------------------------------------------------- the staged executor


def test_staged_executor_with_its_defaults(read):
    reading = read(f"executor: ray\nray:\n  address: {CLIENT}\n")

    assert reading.values["cluster"] == {"address": HEAD}
    assert reading.values["defaults"] == {"cpus_per_node": 8, "wait_for_nodes": True}
    assert "NeMo-Skills' default" in reading.sources["defaults", "cpus_per_node"]


def test_staged_executor_as_the_file_says(read):
    reading = read(
        """\
        executor: ray
        ray: {address: auto, namespace: team, default_num_cpus: 0}
        jobs: {log_dir: /logs}
        containers: {vllm: 'vllm:1'}
        mounts: ['/a:/b']
        env_vars: [A=1]
        """
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


# ---------------------------------------------------------------------- variables


def test_variables_of_the_environment_and_with_values(read):
    reading = read(
        BACKEND
        + """\
env_vars: [HF_HOME=/models/hf, MY_URL]
required_env_vars:
  - TEAM
  - MY_JUDGE_NAME = secret-123
"""
    )

    env = reading.values["env"]
    assert env["set"]["HF_HOME"] == "/models/hf"
    assert env["set"]["MY_JUDGE_NAME"] == "secret-123"
    assert env["required"] == ["TEAM"]
    assert env["forward"][0] == "MY_URL"
    assert reading.sources["env", "set", "MY_JUDGE_NAME"].endswith(":5 (required_env_vars[1])")
    assert reading.sources["env", "forward", 0].endswith(":2 (env_vars[1])")


@pytest.mark.parametrize("start", [BACKEND, "executor: ray\nray: {address: auto}\n"])
def test_some_variables_are_always_forwarded(read, start):
    env = read(start, HOME="/home/me").values["env"]

    assert env["forward"] == [
        "WANDB_API_KEY",
        "NVIDIA_API_KEY",
        "AZURE_OPENAI_API_KEY",
        "OPENAI_API_KEY",
        "GEMINI_API_KEY",
        "HF_TOKEN",
        "NGC_API_KEY",
    ]


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({}, "~/.cache/huggingface/token"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/token"),
        ({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/c"}, "/hf/token"),
        ({"HF_TOKEN_PATH": "/t", "HF_HOME": "/hf"}, "/t"),
    ],
)
def test_hf_token_is_else_the_login_of_the_hub(read, environ, path):
    assert usual_places("HF_TOKEN", environ) == ["HF_TOKEN", path]


def test_what_is_required_or_set_is_not_forwarded_besides(read):
    lines = "required_env_vars: [HF_TOKEN, TEAM]\nenv_vars: [TEAM, A=1, A, NEMO_SKILLS_X=1]\n"
    env = read(BACKEND + lines).values["env"]

    assert env["required"] == ["HF_TOKEN", "TEAM"]
    assert not {"HF_TOKEN", "TEAM", "A"} & set(env["forward"])
    assert env["set"]["NEMO_SKILLS_X"] == "1"


def test_a_value_may_hold_variables_of_the_environment(read):
    lines = "env_vars: ['HF_HOME=$ROOT/hf', 'TWO=${ROOT}:$9', 'LATE=a=b']\n"
    env = read(BACKEND + lines, ROOT="/r").values["env"]

    assert env["set"]["HF_HOME"] == "/r/hf"
    assert env["set"]["TWO"] == "/r:$9"
    assert env["set"]["LATE"] == "a=b"


def test_a_variable_that_is_not_set_is_named(refusal):
    text = refusal(BACKEND + "env_vars:\n  - A=1\n  - HF_HOME=$ROOT/hf\n")

    assert text.startswith(":4: env_vars[1]: its value asks for the variable ROOT, which is not")


@pytest.mark.parametrize("key", ["env_vars", "required_env_vars"])
@pytest.mark.parametrize(
    ("entry", "name", "value"),
    [
        ("HF_TOKEN=hunter2", "HF_TOKEN", "hunter2"),
        ("MY_API_KEY = hunter2=", "MY_API_KEY", "hunter2="),
        ("A=hunter2-$MY_PASSWORD", "A", "hunter2-1"),
        ("hf_token=hunter2${X}", "hf_token", "hunter23"),
    ],
)
def test_a_credential_in_clear_is_a_secret_with_a_warning(read, key, entry, name, value):
    environ = {"X": "3", "MY_PASSWORD": "1"}
    with pytest.warns(UserWarning, match=rf"team\.yaml:3 \({key}\[0\]\): .* credential") as told:
        reading = read(BACKEND + f"{key}:\n  - {entry}\n", **environ)

    assert "hunter2" not in f"{reading}{told[0].message}"
    assert name in reading.values["secrets"]
    assert name not in reading.values["env"]["forward"]
    assert value_of(name, reading.values["env"]["value_from"][name], environ) == value


def test_a_variable_of_a_credential_in_clear_must_be_set(refusal):
    assert "the variable MY_PASSWORD, which is not" in refusal(
        BACKEND + "env_vars: ['A=hunter2-$MY_PASSWORD']\n"
    )


@pytest.mark.parametrize(
    ("entry", "name", "places"),
    [
        ("HF_TOKEN=$MY_HF", "HF_TOKEN", ["MY_HF"]),
        ("OPENAI_API_KEY=${TEAM_KEY}", "OPENAI_API_KEY", ["TEAM_KEY"]),
        ("JUDGE=$JUDGE_API_KEY", "JUDGE", ["JUDGE_API_KEY"]),
    ],
)
def test_a_credential_may_come_from_another_variable(read, entry, name, places):
    env = read(BACKEND + f"env_vars: ['{entry}']\n").values["env"]

    assert env["required"] == [name]
    assert env["value_from"][name] == places
    assert name not in env["set"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("env_vars: {HF_TOKEN: hunter2}", ":2: env_vars: it is a table of keys; expected a list"),
        ("env_vars: HF_TOKEN=hunter2", ":2: env_vars: it is a text; expected a list"),
        (
            "env_vars:\n  - HF_TOKEN: hunter2",
            ":3: env_vars[0]: it is a table of keys; expected a text",
        ),
        ("env_vars: ['my hunter2=1']", ":2: env_vars[0]: it is no variable (not shown here)"),
        ("required_env_vars: ['=hunter2']", ":2: required_env_vars[0]: it is no variable"),
    ],
)
def test_wrong_variables_are_refused_and_not_shown(refusal, lines, expected):
    text = refusal(f"{BACKEND}{lines}\n")

    assert text.startswith(expected)
    assert "hunter2" not in text


# ---------------------------------------------------------------------- what means nothing here


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
    assert mounts.where.endswith("team.yaml:6")
    assert "run already" in mounts.reason


@pytest.mark.parametrize(
    ("lines", "key", "like"),
    [
        ("pratition: a", "pratition", "partition"),
        ("env_var: [A]", "env_var", "env_vars"),
        (
            f"backend: {{name: ray, endpoint: '{CLIENT}', workingdir: a}}",
            "backend.workingdir",
            "working_dir",
        ),
        (
            f"backend: {{name: ray, endpoint: '{CLIENT}', kubernetes: {{mod: online}}}}",
            "backend.kubernetes.mod",
            "mode",
        ),
        ("preflight: {strict_labels: true}", "preflight.strict_labels", "strict_label_check"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_known_one(read, lines, key, like):
    start = "" if "backend: {" in lines else BACKEND
    reason = _ignored(read(f"{start}{lines}\n"))[key]

    assert reason == f"The key is not known; the nearest known one is {like}."


def test_an_unknown_key_that_is_like_no_other_is_told_too(read):
    assert _ignored(read(BACKEND + "qqq: 1\n")) == {"qqq": "The key is not known."}
