import fiddle as fdl
import nemo_run as run
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from nemo_run.cli.cli_parser import parse_cli_args
from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun
from nemo_run.core.packaging.git import GitArchivePackager
from nemo_run.core.serialization.yaml import YamlSerializer
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo_run_ray import ExistingCluster, LocalCluster, RayExecutor
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import parse_memory
from nemo_run_ray.fields import (
    RESOURCE_MAX,
    CommandProbe,
    HttpProbe,
    PortProbe,
    check_runtime_env,
    credentials_in,
)
from nemo_run_ray.ids import LEDGER

_NAN, _INF = float("nan"), float("inf")

_GOOD = {
    "cluster": [None, "team-a", LocalCluster(), ExistingCluster(url="http://h:1")],
    "pool": [None, "gpu"],
    "image": [None, "vllm", "nvcr.io/nvidia/nemo:25.04"],
    "preflight": [None, True, False],
    "address": [None, "http://host:8265", "https://host/prefix"],
    "nodes": [1, 16],
    "ntasks_per_node": [1, 8],
    "cpus_per_node": [None, 0, 0.5, 4, 1.5],
    "gpus_per_node": [0, 0.25, 1, 8, 2.0],
    "memory_per_node": [None, 0, 1, "64GiB", "500 MB", "1.5TiB", ".5GiB", "12", " 7 B "],
    "resources_per_node": [{}, {"TPU": 4}, {"node:a b": 0.001}],
    "label_selector": [
        {},
        {"ray.io/accelerator-type": "in(A100,H100)"},
        {"zone": "!a", "pool": "!in(a, b)", "node": ""},
    ],
    "strategy": ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
    "runtime_env": [{}, {"pip": ["torch"], "env_vars": {"A": "1"}}],
    "secrets": [[], ["TOKEN", "_x1"]],
    "env_vars": [{}, {"A": "", "B": "x\n'\"$é"}],
    "role": ["", "trainer"],
    "service": [True, False],
    "ready": [None, PortProbe(80), HttpProbe("http"), CommandProbe(["true"])],
    "ports": [{}, {"http": 0, "rpc": 65535}, {"a b": 1}],
    "wait_for_nodes": [True, False],
    "retries": [0, 3],
    "max_in_flight": [None, 1],
    "pending_timeout_s": [None, 0, 600.5],
    "time_s": [None, 0, 3600.5],
    "grace_s": [0, 10, 0.5, np.float64(2)],
    "dependencies": [[], ["ray_jobs://nemo_run/a.b"], ["my-prep", "a.b_1"]],
    "permanent_exit_codes": [[], [2, 64]],
    "keep_run_dir": [True, False],
    "python": [None, "/opt/py/bin/python3", "python3.11"],
    "entrypoint_shell": [None, "login"],
    "startup_commands": [[], ["source env.sh", "a\nb", "cd /caf\udce9"]],
    "keep_logs_max_bytes": [None, 0, 1024],
    "launcher": [None, "torchrun", "ft", Launcher(), Torchrun(), FaultTolerance()],
}


def _cases(values: dict) -> list:
    cases = [(name, value) for name, several in values.items() for value in several]
    return [pytest.param(*case, id=f"{case[0]}={case[1]!r}"[:60]) for case in cases]


@pytest.mark.parametrize(("name", "value"), _cases(_GOOD))
def test_good_values(name, value):
    assert getattr(RayExecutor(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [("nodes", 0), ("memory_per_node", "1 QiB"), ("runtime_env", {"working_dir": 1})],
)
def test_an_assigned_value_is_checked_again(name, value):
    executor = RayExecutor()
    setattr(executor, name, value)
    with pytest.raises(ConfigError, match=name):
        executor.check()


@pytest.fixture
def full():
    """Every field away from its default, with texts that are hard to save."""
    return RayExecutor(
        cluster=ExistingCluster(url="https://h/x", token="t", headers={"A": "${B}"}, verify=False),
        cpus_per_node=0.5,
        gpus_per_node=2,
        memory_per_node="64GiB",
        resources_per_node={"a b": 0.5},
        label_selector={"zone": "!in(a,b)"},
        strategy="SPREAD",
        runtime_env={"pip": ["x==1"], "env_vars": {"Q": "'\"\n$é"}, "later": 1},
        allow_unknown_runtime_env=True,
        nodes=2,
        ntasks_per_node=8,
        role="a-b",
        service=True,
        ready=HttpProbe("http", path="/up", status=204, interval_s=0.5, timeout_s=9),
        wait_for_nodes=True,
        secrets=["TOKEN"],
        env_vars={"A": "'\"\n$é", "EMPTY": ""},
        ports={"http": 0},
        max_in_flight=3,
        pending_timeout_s=0.5,
        grace_s=0,
        dependencies=["ray_jobs://nemo_run/a.b", "my-prep"],
        keep_run_dir=True,
        keep_logs_max_bytes=0,
        python="/opt/a b/python",
        entrypoint_shell="login",
        startup_commands=["source 'a b'"],
        launcher=Torchrun(rdzv_port=1),
        packager=GitArchivePackager(subpath="a b"),
        retries=2,
    )


def test_it_survives_cloning(full):
    assert full.clone() == full
    assert RayExecutor().clone() == RayExecutor()


def test_it_survives_fiddle_and_json(full):
    config = ZlibJSONSerializer().deserialize(ZlibJSONSerializer().serialize(full.to_config()))
    assert fdl.build(config) == full


def test_it_survives_yaml(full):
    import yaml

    saved = yaml.safe_load(YamlSerializer().serialize(full.to_config()))
    assert saved["_target_"] == "nemo_run_ray.executor.RayExecutor"
    assert saved["env_vars"] == full.env_vars
    assert saved["cluster"]["url"] == "https://h/x"
    assert saved["grace_s"] == 0


def test_the_role_is_named_when_it_is_known():
    executor = RayExecutor()
    executor.nodes = 0
    with pytest.raises(ConfigError, match=r"^RayExecutor\.nodes is 0"):
        executor.check()
    with pytest.raises(ConfigError, match=r"^The role 'a b': RayExecutor\.nodes is 0"):
        executor.check("a b")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("address=http://127.0.0.1:9", "http://127.0.0.1:9"),
        ("cluster=team-a", "team-a"),
        ("pool=gpu", "gpu"),
        ("gpus_per_node=0", 0),
        ("cpus_per_node=0.5", 0.5),
        ("memory_per_node=64GiB", "64GiB"),
        ("memory_per_node=1024", 1024),
        ("max_in_flight=4", 4),
        ("pending_timeout_s=60", 60),
        ("python=/opt/python", "/opt/python"),
        ("grace_s=3", 3),
        ("retries=2", 2),
        ("wait_for_nodes=True", True),
        ("secrets=['HF_TOKEN']", ["HF_TOKEN"]),
        ("entrypoint_shell=login", "login"),
        ("startup_commands=['ls']", ["ls"]),
        ("keep_logs_max_bytes=0", 0),
        ("label_selector={'pool': 'gpu'}", {"pool": "gpu"}),
        ("runtime_env={'pip': ['x']}", {"pip": ["x"]}),
    ],
)
def test_nemo_runs_command_line_parses_the_fields(argument, value):
    name = argument.partition("=")[0]
    config = parse_cli_args(RayExecutor, [argument], run.Config)
    assert getattr(fdl.build(config), name) == value


def test_an_experiment_that_ran_is_refused(tmp_path):
    (tmp_path / LEDGER).touch()
    executor = RayExecutor()
    with pytest.raises(ConfigError, match="exp_1 has run already"):
        executor.assign("exp_1", str(tmp_path), "task", "task")
    assert executor.experiment_id is None


_UNITS = {"": 1, "B": 1, "KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9}
_UNITS |= {"GiB": 2**30, "TB": 10**12, "TiB": 2**40, "PB": 10**15, "PiB": 2**50}


@given(st.integers(0, 9000), st.sampled_from(sorted(_UNITS)), st.text(" \t", max_size=3))
def test_memory_in_every_unit(number, unit, space):
    assume(number * _UNITS[unit] <= RESOURCE_MAX)
    assert parse_memory(f"{space}{number}{space}{unit}{space}") == number * _UNITS[unit]


_CREDENTIALS = """POSTGRES_DSN=postgresql://h/db?user=u&password=pw REDIS_DSN=redis://h?password=pw
    DB_CONNECTION_STRING=postgresql:///db?password=pw DATABASE_URL=postgres://h/db?password=pw
    DATABASE_URL=mysql://me:pw@host/db SLACK_WEBHOOK_URL=https://hooks/x HF_API_KEY=abc A_KEY=aB1
    SENTRY_DSN=https://k@h/1"""
_NO_CREDENTIALS = """CHOSEN_KEY=chosen QUESTION_KEY=question ID_KEY=id RESULT_KEY=generation
    DATABASE_URL=mysql://host/db DATABASE_URL=postgresql+psycopg://host/db POSTGRES_DSN=postgres://h/db
    DATABASE_URL=postgres://me@host/db MONGO_URL=mongodb://host:27017/x BROKER_URL=amqp://host
    REDIS_URL=rediss://host:6379 PAD_TOKEN=x OPENAI_API_KEY=EMPTY"""


@pytest.mark.parametrize(("texts", "are"), [(_CREDENTIALS, True), (_NO_CREDENTIALS, False)])
def test_which_variables_hold_credentials(texts, are):
    for text in texts.split():
        name, _, value = text.partition("=")
        assert credentials_in({name: value}) == [name] * are, text


def test_a_variable_that_is_no_utf_8():
    check_runtime_env({"env_vars": {"A": "caf\udce9"}})
