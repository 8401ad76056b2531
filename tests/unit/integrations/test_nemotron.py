"""Profiles of Nemotron's env.toml as ours: a test for every rule of the format."""

from pathlib import Path

import pytest

from nemo_run_ray.cluster_files.load import read as read_document
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.integrations import nemotron


@pytest.fixture
def load(tmp_path):
    def make(text):
        path = tmp_path / "env.toml"
        path.write_text(text, encoding="utf-8")
        return read_document(path)

    return make


@pytest.fixture
def read(load):
    def make(text, profile="team", **environ):
        reading = nemotron.read(load(text), profile, environ)
        ClusterFile.model_validate(reading.values)
        return reading

    return make


@pytest.fixture
def refusal(load):
    def make(text, profile="team", **environ):
        with pytest.raises(ConfigError) as caught:
            nemotron.read(load(text), profile, environ)
        return str(caught.value).rpartition("/env.toml")[2]

    return make


def _team(*lines):
    return "\n".join(["[team]", 'executor = "ray"', *lines, ""])


def _ignored(reading):
    return {one.key: one.reason for one in reading.ignored}


# ---------------------------------------------------------------------- where it is


def test_the_variable_names_the_file(tmp_path):
    assert nemotron.find(tmp_path, {"NEMOTRON_ENV_FILE": "/a/b.toml"}) == Path("/a/b.toml")
    assert nemotron.find(tmp_path, {"NEMOTRON_ENV_FILE": "b.toml"}) == tmp_path / "b.toml"
    home = nemotron.find(tmp_path, {"NEMOTRON_ENV_FILE": "~/b.toml"})
    assert home == Path("~/b.toml").expanduser()


def test_it_is_looked_for_upwards(tmp_path):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "env.toml").touch()

    assert nemotron.find(below, {}) == tmp_path / "env.toml"
    (below / "env.toml").touch()
    assert nemotron.find(below, {"NEMOTRON_ENV_FILE": ""}) == below / "env.toml"


def test_the_folder_of_a_pyproject_toml_is_the_last_one(tmp_path):
    project = tmp_path / "project" / "src"
    project.mkdir(parents=True)
    (tmp_path / "env.toml").touch()
    (tmp_path / "project" / "pyproject.toml").touch()

    assert nemotron.find(project, {}) is None


# ---------------------------------------------------------------------- profiles


def test_tables_are_profiles_but_the_reserved_ones(load):
    text = (
        "title = 1\n[wandb]\n[team]\n[cli]\n[cache]\n[artifacts.manifest]\n[kid]\n[kid.env_vars]\n"
    )

    assert nemotron.profiles(load(text)) == ["team", "kid"]


def test_an_unknown_profile_is_refused_with_the_nearest_one(refusal):
    assert refusal(_team(), profile="tema").endswith(" 'tema'; the nearest one is 'team'.")
    assert refusal("", profile="tema").endswith(" 'tema'; the file has no profile.")


def test_a_profile_extends_another_and_wins_deeply(read):
    text = """\
[base]
executor = "ray"
nodes = 1
startup_commands = ["a", "b"]
[base.env_vars]
A = "1"
B = "1"
[team]
extends = "middle"
nodes = 4
[middle]
extends = "base"
nodes = 2
gpus_per_node = 8
startup_commands = ["c"]
[middle.env_vars]
B = "2"
"""
    reading = read(text)

    assert reading.values["defaults"] == {
        "nodes": 4,
        "gpus_per_node": 8,
        "startup_commands": ["c"],
    }
    assert reading.values["env"]["set"] == {"A": "1", "B": "2"}
    assert reading.sources["defaults", "nodes"].endswith("env.toml:10 (team.nodes)")
    assert reading.sources["env", "set", "A"].endswith("env.toml:6 (base.env_vars.A)")
    assert reading.sources["env", "set", "B"].endswith("env.toml:17 (middle.env_vars.B)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[team]\nextends = "b"\n[b]\nextends = "c"\n[c]\nextends = "b"\n',
            ":6: c.extends: the profiles extend each other in a circle: team -> b -> c -> b.",
        ),
        (
            '[team]\nextends = "team"\n',
            ":2: team.extends: the profiles extend each other in a circle: team -> team.",
        ),
        (
            '[team]\nextends = "base"\n[base]\nextends = "bsae2"\n[base2]\n',
            ":4: base.extends: there is no profile 'bsae2' (team -> base -> bsae2); "
            "the nearest one is 'base2'.",
        ),
        ("[team]\nextends = 3\n", ":2: team.extends: it is no text; expected the name of a pro"),
    ],
)
def test_a_circle_or_an_unknown_parent_is_refused_with_the_chain(refusal, text, expected):
    assert refusal(text).startswith(expected)


# ---------------------------------------------------------------------- interpolation


def test_variables_of_the_environment_and_defaults(read):
    lines = (
        'container_image = "a:${oc.env:TAG}"',
        'ray_address = "${oc.env:HEAD,http://head:8265}"',
        'startup_commands = ["cd ${oc.env:WS,${oc.env:ROOT,/w}}/x", "echo ${oc.env:NO,\'\'}"]',
    )
    values = read(_team(*lines), TAG="1", ROOT="/r").values

    assert values["defaults"]["image"] == "a:1"
    assert values["cluster"] == {"address": "http://head:8265"}
    assert values["defaults"]["startup_commands"] == ["cd /r/x", "echo "]


def test_a_key_may_name_another_one(read):
    lines = ('workspace = "${oc.env:WS,/w}"', 'container_image = "${workspace}/a.sqsh"')

    assert read(_team(*lines)).values["defaults"]["image"] == "/w/a.sqsh"


def test_a_variable_that_is_not_set_is_named_with_file_line_and_key(refusal):
    text = refusal('[base]\ncontainer_image = "${oc.env:TAG}"\n' + _team('extends = "base"'))

    assert text.startswith(":2: base.container_image: it asks for the variable TAG of your env")
    assert text.endswith("set it, or give a default: ${oc.env:TAG,default}.")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${nosuch}", "there is no key 'nosuch'"),
        ("${other:1}", "'other' is not known here"),
        ("${oc.env:A", "'${oc.env:A' lacks a closing brace"),
    ],
)
def test_what_cannot_be_resolved_is_refused(refusal, value, reason):
    text = refusal(_team("nodes = 1", f'container_image = "{value}"'))

    assert text.startswith(f":4: team.container_image: it cannot be resolved: {reason}")


def test_the_process_environment_is_not_read(read, monkeypatch):
    monkeypatch.setenv("TAG", "of the process")

    reading = read(_team('container_image = "${oc.env:TAG,default}"'))
    assert reading.values["defaults"]["image"] == "default"


# ---------------------------------------------------------------------- keys of a profile


@pytest.mark.parametrize("executor", ["slurm", "lepton", "dgxcloud", "docker", "local"])
def test_an_executor_that_is_not_ray_is_refused(refusal, executor):
    text = refusal(f'[team]\nnodes = 1\nexecutor = "{executor}"\n')

    assert text.startswith(f":3: team.executor: the profile is for '{executor}', not for Ray")


def test_another_profile_may_make_one_for_ray(read):
    text = '[slurm]\nexecutor = "slurm"\npartition = "p"\nnodes = 2\n' + _team('extends = "slurm"')

    assert read(text).values["defaults"] == {"nodes": 2}


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://head:8265", "http://head:8265"),
        ("ray://head:10001", "http://head:8265"),
        ("auto", "auto"),
    ],
)
def test_ray_address_is_the_address_of_the_dashboard(read, given, address):
    reading = read(_team(f'ray_address = "{given}"'))

    assert reading.values["cluster"] == {"address": address}
    assert reading.sources["cluster", "address"].endswith("env.toml:3 (team.ray_address)")


@pytest.mark.parametrize("value", ['"my-lepton-cluster"', '"http://head:8265"', "3"])
def test_existing_ray_cluster_is_the_name_of_one_on_lepton(read, value):
    lepton = f'[lepton]\nexecutor = "lepton"\nexisting_ray_cluster = {value}\n'
    variables = {"NEMOTRON_EXISTING_RAY_CLUSTER": "my-lepton-cluster"}
    reading = read(lepton + _team('extends = "lepton"', 'ray_address = "auto"'), **variables)

    assert reading.values == {"cluster": {"address": "auto"}}
    assert "Lepton" in _ignored(reading)["lepton.existing_ray_cluster"]


def test_without_an_address_no_cluster_is_named(read):
    assert read(_team()).values == {}


def test_nodes_tasks_and_gpus(read):
    reading = read(_team("nodes = 2", "ntasks_per_node = 4", "gpus_per_node = 8"))

    expected = {"nodes": 2, "ntasks_per_node": 4, "gpus_per_node": 8}
    assert reading.values["defaults"] == expected


def test_nprocs_per_node_comes_before_ntasks_per_node(read):
    reading = read(_team("ntasks_per_node = 4", "nprocs_per_node = 2"))

    assert reading.values["defaults"] == {"ntasks_per_node": 2}
    assert _ignored(reading) == {"team.ntasks_per_node": "nprocs_per_node comes first."}


def test_a_number_may_come_from_the_environment(read):
    lines = ('nodes = "${oc.env:NODES,2}"', 'gpus_per_node = "${oc.env:GPUS}"')

    assert read(_team(*lines), GPUS="0.5").values["defaults"] == {"nodes": 2, "gpus_per_node": 0.5}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nodes = 0", "nodes: it is 0; expected a whole number from 1"),
        ('nodes = "2"', "nodes: it is '2'; expected a whole number from 1"),
        ('nodes = "${oc.env:NODES,two}"', "nodes: it is 'two'; expected a whole number from 1"),
        ("ntasks_per_node = 1.5", "ntasks_per_node: it is 1.5; expected a whole number from 1"),
        ("gpus_per_node = -1", "gpus_per_node: it is -1; expected a number from 0"),
        ("gpus_per_node = true", "gpus_per_node: it is True; expected a number from 0"),
        ("container_image = 3", "container_image: it is 3; expected a text"),
        ('startup_commands = "a"', "startup_commands: it is a text; expected a list"),
        ("startup_commands = [1]", "startup_commands[0]: it is a number; expected a text"),
        ("env_vars = 1", "env_vars: it is a number; expected keys with values"),
    ],
)
def test_wrong_types_are_refused_with_file_line_key_and_what_is_expected(refusal, line, expected):
    assert refusal(_team(line)).startswith(f":3: team.{expected}")


def test_startup_commands_run_before_the_task(read):
    reading = read(_team('startup_commands = ["source /opt/env.sh", "true"]'))

    assert reading.values["defaults"] == {"startup_commands": ["source /opt/env.sh", "true"]}


def test_pip_extras_make_no_runtime_env(read):
    """A Ray program of the task could not set one of its own then."""
    reading = read(_team('pip_extras = ["rich", "typer==1"]'))

    assert reading.values == {}
    assert "runtime_env" in _ignored(reading)["team.pip_extras"]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("", {"NEMO_RUN_DIR": "/shared/me", "HF_HOME": "/shared/me/hf"}),
        ('HF_HOME = "/hub"', {"NEMO_RUN_DIR": "/shared/me", "HF_HOME": "/hub"}),
    ],
)
def test_remote_job_dir_is_where_outputs_lie(read, own, expected):
    lines = ('remote_job_dir = "/shared/${oc.env:USER}"', "[team.env_vars]", own)
    reading = read(_team(*lines), USER="me")

    assert reading.values == {"env": {"set": expected}}
    assert reading.sources["env", "set", "NEMO_RUN_DIR"].endswith(":3 (team.remote_job_dir)")


# ---------------------------------------------------------------------- variables


def test_env_vars_are_texts(read):
    lines = ("[team.env_vars]", 'A = "x"', "B = 3", "C = true", 'D = "${oc.env:D,${oc.env:E,e}}"')

    assert read(_team(*lines)).values["env"] == {"set": {"A": "x", "B": "3", "C": "True", "D": "e"}}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('HF_TOKEN = "${oc.env:HF_TOKEN}"', {"required": ["HF_TOKEN"]}),
        ("HF_TOKEN = \"${oc.env:HF_TOKEN,''}\"", {"forward": ["HF_TOKEN"]}),
        ('HF_TOKEN = "${oc.env:HF_TOKEN,null}"', {"forward": ["HF_TOKEN"]}),
        (
            'HF_TOKEN = "${oc.env:MY_HF, ${oc.env:HF_TOKEN}}"',
            {"required": ["HF_TOKEN"], "value_from": {"HF_TOKEN": ["MY_HF", "HF_TOKEN"]}},
        ),
        (
            "JUDGE = \"${oc.env:OPENAI_API_KEY,''}\"",
            {"forward": ["JUDGE"], "value_from": {"JUDGE": ["OPENAI_API_KEY"]}},
        ),
    ],
)
@pytest.mark.parametrize("environ", [{}, {"HF_TOKEN": "hunter2", "OPENAI_API_KEY": "hunter2"}])
def test_a_credential_of_the_environment_is_named_and_its_value_is_nowhere(
    read, line, expected, environ
):
    reading = read(_team("[team.env_vars]", line), **environ)

    assert reading.values["env"] == expected
    assert "hunter2" not in repr(reading)


@pytest.mark.parametrize(
    "value",
    [
        "hunter2",
        "${oc.env:HF_TOKEN,hunter2}",
        "${oc.env:A,${oc.env:HF_TOKEN,hunter2}}",
        "hunter2-${oc.env:A,x}",
    ],
)
def test_a_credential_in_clear_is_refused_and_not_shown(refusal, value):
    text = refusal(_team("[team.env_vars]", f'HF_TOKEN = "{value}"'))

    assert text.startswith(":4: team.env_vars.HF_TOKEN: it is a text, and HF_TOKEN is the name of")
    assert text.endswith("expected ${oc.env:HF_TOKEN} and nothing else.")
    assert "hunter2" not in text


@pytest.mark.parametrize("value", ["Bearer ${oc.env:MY_TOKEN}", "${.other}"])
def test_a_credential_inside_another_text_is_refused(refusal, value):
    lines = ("[team.env_vars]", f'HEADER = "{value}"', 'other = "x${oc.env:MY_TOKEN}"')
    text = refusal(_team(*lines), MY_TOKEN="hunter2")

    assert text.startswith(":4: team.env_vars.HEADER: it is a text, and MY_TOKEN is the name of")
    assert "hunter2" not in text


@pytest.mark.parametrize("line", ['HF_TOKEN = ""', 'A = "${oc.env:A,null}"'])
def test_a_variable_without_a_value_is_left_out(read, line):
    reading = read(_team("[team.env_vars]", line))

    assert "env" not in reading.values
    assert list(_ignored(reading).values()) == ["It has no value."]


# ---------------------------------------------------------------------- what means nothing here


def test_keys_that_mean_nothing_on_ray_are_told_once_with_the_reason(read):
    known = (
        "account partition time mem exclusive tunnel host user identity mounts "
        "resource_shape node_group nemo_run_dir shared_memory_size base_url kube_apiserver_url "
        "client_id client_secret app_id app_secret project_name pvc_nemo_run_dir pvcs custom_spec "
        "repo_root ray_version run_command"
    )
    names = known.split()
    base = "[base]\n" + "".join(f'{name} = "x"\n' for name in names)
    reading = read(base + _team('extends = "base"', 'partition = "y"'))

    keys = ["team.partition" if name == "partition" else f"base.{name}" for name in names]
    assert sorted(one.key for one in reading.ignored) == sorted(keys)
    assert not any("not known" in one.reason for one in reading.ignored)
    mounts = next(one for one in reading.ignored if one.key == "base.mounts")
    assert mounts.where.endswith(f"env.toml:{2 + names.index('mounts')}")
    assert reading.values == {}


def test_an_unknown_key_is_told_with_the_nearest_known_one(read):
    reading = read(_team("gpu_per_node = 1", "qqq = 1"))

    assert _ignored(reading) == {
        "team.gpu_per_node": "The key is not known; the nearest known one is gpus_per_node.",
        "team.qqq": "The key is not known.",
    }
