"""Profiles of Nemotron's env.toml as ours: a test for every rule of the format."""

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
def read(load, monkeypatch):
    def make(text, profile="team", **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        reading = nemotron.read(load(text), profile, environ)
        ClusterFile.model_validate(reading.values)
        return reading

    return make


@pytest.fixture
def refusal(load, monkeypatch):
    def make(text, profile="team", **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as caught:
            nemotron.read(load(text), profile, environ)
        return str(caught.value).rpartition("/env.toml")[2]

    return make


def _team(*lines):
    return "\n".join(["[team]", 'executor = "ray"', *lines, ""])


def _ignored(reading):
    return {one.key: one.reason for one in reading.ignored}


def test_it_is_looked_for_upwards(tmp_path):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "env.toml").touch()
    (tmp_path / "a" / "pyproject.toml").touch()
    assert nemotron.find(below, {}) is None, "the folder of a pyproject.toml is the last one"
    (tmp_path / "a" / "pyproject.toml").unlink()
    assert nemotron.find(below, {"NEMOTRON_ENV_FILE": "b.toml"}) == below / "b.toml"

    assert nemotron.find(below, {}) == tmp_path / "env.toml"
    (below / "env.toml").touch()
    assert nemotron.find(below, {"NEMOTRON_ENV_FILE": ""}) == below / "env.toml"


def test_tables_are_profiles_but_the_reserved_ones(load):
    text = (
        "title = 1\n[wandb]\n[team]\n[cli]\n[cache]\n[artifacts.manifest]\n[kid]\n[kid.env_vars]\n"
    )

    assert nemotron.profiles(load(text)) == ["team", "kid"]


def test_an_unknown_profile_is_refused_with_the_known_ones(refusal):
    assert refusal(_team(), profile="tema").endswith(" 'tema' (tema); there are ['team'].")
    assert refusal("[a]\n", profile="wandb").endswith(" 'wandb' (wandb); there are ['a'].")


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

    assert reading.values["defaults"] == {"nodes": 4, "gpus_per_node": 8, "startup_commands": ["c"]}
    assert reading.values["env"]["set"] == {"A": "1", "B": "2"}
    assert reading.sources["defaults", "nodes"].endswith("env.toml (nodes)")
    assert reading.sources["env", "set", "A"].endswith("env.toml (env_vars.A)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[team]\nextends = "b"\n[b]\nextends = "c"\n[c]\nextends = "b"\n',
            ": c.extends: the profiles extend each other in a circle: team -> b -> c -> b.",
        ),
        (
            '[team]\nextends = "team"\n',
            ": team.extends: the profiles extend each other in a circle: team -> team.",
        ),
        (
            '[team]\nextends = "base"\n[base]\nextends = "bsae2"\n[base2]\n',
            ": base.extends: there is no profile 'bsae2' (team -> base -> bsae2); there are",
        ),
        ("[team]\nextends = 3\n", ": team.extends: there is no profile 3 (team -> 3)"),
    ],
)
def test_a_circle_or_an_unknown_parent_is_refused_with_the_chain(refusal, text, expected):
    assert refusal(text).startswith(expected)


def test_keys_with_what_they_ask_for(read):
    lines = (
        'workspace = "${oc.env:WS,/w}"',
        'container_image = "${workspace}/a:${oc.env:TAG}"',
        'ray_address = "${oc.env:HEAD,http://head:8265}"',
        'startup_commands = ["cd ${oc.env:WS,${oc.env:ROOT,/w}}/x", "echo ${oc.env:NO,\'\'}"]',
        'nodes = "${oc.env:NODES,2}"',
        "ntasks_per_node = 4",
        "gpu_per_node = 1",
        'existing_ray_cluster = "of-lepton"',
        'pip_extras = ["rich"]',
        'account = "${oc.env:NOT_ASKED_FOR}"',
    )
    reading = read(
        '[slurm]\nexecutor = "slurm"\n' + _team('extends = "slurm"', *lines), TAG="1", ROOT="/r"
    )
    assert reading.values == {
        "cluster": {"address": "http://head:8265"},
        "defaults": {
            "image": "/w/a:1",
            "nodes": 2,
            "ntasks_per_node": 4,
            "startup_commands": ["cd /r/x", "echo "],
        },
    }
    assert "Lepton" in _ignored(reading)["existing_ray_cluster"]
    assert "runtime_env" in _ignored(reading)["pip_extras"]
    meant = "The key is not known; did you mean 'gpus_per_node'?"
    assert _ignored(reading)["gpu_per_node"] == meant


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('container_image = "a:${oc.env:TAG}"', "it cannot be resolved: KeyError raised while"),
        ('container_image = "${nosuch}"', "it cannot be resolved: Interpolation key 'nosuch'"),
        ('container_image = "${other:1}"', "it cannot be resolved: Unsupported interpolation type"),
        ('executor = "slurm"', "the profile is for 'slurm', not for Ray; expected executor ="),
    ],
)
def test_what_cannot_be_used_is_refused_by_file_and_key(refusal, line, expected):
    text = refusal(f'[base]\nexecutor = "ray"\n[team]\nextends = "base"\n{line}\n')
    assert text.startswith(f": {line.partition(' ')[0]}: {expected}")
    assert "TAG" not in line or "'TAG' not found" in text


def test_nemotrons_other_names_of_keys_give_the_same_fields(read):
    lines = ("gpus_per_node = 8", "nprocs_per_node = 8", 'container = "i"', 'nodes = "${n}"')
    reading = read(_team(*lines, "n = 4"))
    fields = {"ntasks_per_node": 8, "gpus_per_node": 8, "image": "i", "nodes": 4}
    assert reading.values["defaults"] == fields
    assert _ignored(reading).keys() == {"n"}


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
    assert reading.sources["env", "set", "NEMO_RUN_DIR"].endswith(" (remote_job_dir)")


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

    assert text.startswith(": env_vars.HF_TOKEN: it is a text, and HF_TOKEN is the name of")
    assert text.endswith("expected ${oc.env:HF_TOKEN} and nothing else.")
    assert "hunter2" not in text


@pytest.mark.parametrize("value", ["Bearer ${oc.env:MY_TOKEN}", "${.other}"])
def test_a_credential_inside_another_text_is_refused(refusal, value):
    lines = ("[team.env_vars]", f'HEADER = "{value}"', 'other = "x${oc.env:MY_TOKEN}"')
    text = refusal(_team(*lines), MY_TOKEN="hunter2")

    assert text.startswith(": env_vars.HEADER: it is a text, and MY_TOKEN is the name of")
    assert "hunter2" not in text


@pytest.mark.parametrize("line", ['HF_TOKEN = ""', 'A = "${oc.env:A,null}"'])
def test_a_variable_without_a_value_is_left_out(read, line):
    reading = read(_team("[team.env_vars]", line))

    assert "env" not in reading.values
    assert list(_ignored(reading).values()) == ["It has no value."]


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

    assert sorted(one.key for one in reading.ignored) == sorted(names)
    assert not any("not known" in one.reason for one in reading.ignored)
    assert reading.values == {}
