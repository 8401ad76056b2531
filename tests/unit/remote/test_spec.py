import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nemo_run_ray
from nemo_run_ray.remote.spec import (
    VERSION,
    GroupSpec,
    JobSpec,
    ProbeSpec,
    RoleSpec,
    from_json,
)

_texts = st.text(max_size=30)
_names = st.text(max_size=8)
_numbers = st.floats(0, 1e6) | st.integers(0, 10**6)
_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=6,
)
_jobs = st.builds(
    JobSpec,
    argv=st.lists(_texts, min_size=1, max_size=5).map(tuple),
    env=st.dictionaries(_texts, _texts, max_size=4),
    cwd=st.none() | _texts,
    python=st.none() | _texts,
    grace_s=st.floats(0, 1e6),
    keep_run_dir=st.booleans(),
    has_code=st.booleans(),
    secrets=st.lists(_texts, max_size=3).map(tuple),
    login_shell=st.booleans(),
    startup=st.lists(_texts, max_size=2).map(tuple),
)
_probes = st.builds(
    ProbeSpec,
    kind=st.sampled_from(["port", "http", "command"]),
    port=st.integers(0, 65535) | _names,
    path=_texts,
    status=st.integers(100, 599),
    command=st.lists(_texts, max_size=3).map(tuple),
    interval_s=_numbers,
    timeout_s=_numbers,
)
_roles = st.builds(
    RoleSpec,
    name=_names,
    task=_jobs,
    replicas=st.integers(1, 1000),
    processes=st.integers(1, 16),
    ranked=st.booleans(),
    service=st.booleans(),
    restarts=st.integers(0, 9),
    ports=st.dictionaries(_names, st.integers(0, 65535), max_size=3),
    ready=st.none() | _probes,
    resources=st.dictionaries(_names, _numbers, max_size=3),
    label_selector=st.dictionaries(_names, _texts, max_size=3),
    runtime_env=st.dictionaries(_names, _plain, max_size=3),
    spread=st.sampled_from(["", "SPREAD", "STRICT_SPREAD"]),
)
_groups = st.builds(
    GroupSpec,
    roles=st.lists(_roles, min_size=1, max_size=3).map(tuple),
    strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
    wait_for_nodes=st.booleans(),
    placing_timeout_s=st.none() | _numbers,
    python=st.none() | _texts,
)

_TASK = JobSpec(argv=("true",))
_ROLE = RoleSpec(name="a", task=_TASK, ready=ProbeSpec(kind="port", port=80))
_EACH = {"task": _TASK, "role": _ROLE, "group": GroupSpec(roles=(_ROLE,))}


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(_jobs | _roles | _groups)
def test_json_and_back(spec):
    text = spec.to_json()
    again = from_json(text)
    assert again == spec
    assert type(again) is type(spec)
    assert again.to_json() == text
    assert text.isascii()


@given(st.dictionaries(_texts, _texts, min_size=2, max_size=4))
def test_equal_specs_make_equal_texts(env):
    turned = dict(reversed(env.items()))
    assert JobSpec(argv=("x",), env=env).to_json() == JobSpec(argv=("x",), env=turned).to_json()
    one, other = (
        RoleSpec(name="a", task=_TASK, label_selector=labels, runtime_env={"env_vars": labels})
        for labels in (env, turned)
    )
    assert one.to_json() == other.to_json()
    assert GroupSpec(roles=(one,)).to_json() == GroupSpec(roles=(other,)).to_json()


def _changed(which: str, **change: Any) -> str:
    return json.dumps({**json.loads(_EACH[which].to_json()), **change})


def test_defaults_may_be_left_out():
    head = {"version": VERSION, "kind": "task"}
    assert from_json(json.dumps({**head, "argv": ["true"]})) == _TASK
    role = {"name": "a", "task": {"argv": ["true"]}}
    short = RoleSpec(name="a", task=_TASK)
    assert from_json(json.dumps({"version": VERSION, "kind": "role", **role})) == short
    group = json.dumps({"version": VERSION, "kind": "group", "roles": [role]})
    assert from_json(group) == GroupSpec(roles=(short,))
    probe = {"kind": "http", "port": "web"}
    found = from_json(json.dumps({"version": VERSION, "kind": "role", **role, "ready": probe}))
    assert found.ready == ProbeSpec(kind="http", port="web")


@pytest.mark.parametrize("kind", _EACH)
@pytest.mark.parametrize("version", [1, 3, "2", None])
def test_another_version_is_refused(kind, version):
    with pytest.raises(ValueError, match=rf"version {version!r}; this code reads .* of version 2"):
        from_json(_changed(kind, version=version))


def test_a_task_starts_without_the_modules_of_dataclasses():
    """They took 8 ms of each job's start."""
    program = "import remote.__main__, sys; print(*sys.modules)"
    words = [sys.executable, "-S", "-c", program]
    package = Path(nemo_run_ray.__file__).parent
    done = subprocess.run(words, cwd=package, capture_output=True, text=True, check=True)
    assert {"dataclasses", "inspect"}.isdisjoint(done.stdout.split())


def test_a_worker_on_slurm_starts_without_them_and_without_what_is_the_heads():
    """Dozens of nodes load it at the same moment, from the file system that they share."""
    program = "import remote.slurm.__main__, remote.slurm.node, sys; print(*sys.modules)"
    words = [sys.executable, "-S", "-c", program]
    package = Path(nemo_run_ray.__file__).parent
    done = subprocess.run(words, cwd=package, capture_output=True, text=True, check=True)
    others = {"dataclasses", "remote.slurm.head", "remote.slurm.carry", "remote.node.probe"}
    assert others.isdisjoint(done.stdout.split())
