import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nemo_run_ray
from nemo_run_ray.remote.spec import (
    ArraySpec,
    DispatchedJobSpec,
    DispatchSpec,
    GroupSpec,
    JobSpec,
    OutsideSpec,
    ProbeSpec,
    RoleSpec,
    from_json,
    to_json,
)

_TASK = JobSpec(
    ("sh", "-c", "é $HOME"), {"A": "1"}, "/x", "py", 5, True, True, ("KEY",), True, ("module load",)
)
_ROLE = RoleSpec(
    "a",
    _TASK,
    replicas=2,
    processes=4,
    ranked=True,
    service=True,
    restarts=1,
    ports={"http": 0},
    ready=ProbeSpec("command", "http", "/h", 204, ("true",), 0.5, 9),
    resources={"CPU": 1.5, "GPU": 1},
    label_selector={"zone": "!eu"},
    runtime_env={"pip": ["x"], "config": {"n": None}},
    spread="SPREAD",
)
_DISPATCHED = DispatchedJobSpec(
    "a",
    "e.a",
    "nonce",
    {"entrypoint": "x"},
    after=("b",),
    outside=(OutsideSpec("o.x", ("n",), "o.dispatcher"),),
    permanent_exit_codes=(2,),
    pending_timeout_s=9.5,
    secrets=("KEY",),
)
_EACH = {
    "task": _TASK,
    "role": _ROLE,
    "group": GroupSpec((_ROLE, RoleSpec("b", JobSpec(("true",)))), "SPREAD", True, 3, "py"),
    "array": ArraySpec(_ROLE, "elements.jsonl", 2, "fork", 3, 2, (3,), 1, "py"),
    "dispatch": DispatchSpec("e.dispatcher", "nonce", (_DISPATCHED,), "s", ("http://h",), 4),
}


@pytest.mark.parametrize("kind", _EACH)
def test_json_and_back(kind):
    text = to_json(_EACH[kind])
    again = from_json(text)
    assert again == _EACH[kind]
    assert type(again) is type(_EACH[kind])
    assert to_json(again) == text


def test_equal_specs_make_equal_texts():
    one, other = {"A": "1", "B": "2"}, {"B": "2", "A": "1"}
    assert to_json(JobSpec(("x",), env=one)) == to_json(JobSpec(("x",), env=other))


def _changed(which: str, **change: Any) -> str:
    return json.dumps({**json.loads(to_json(_EACH[which])), **change})


def test_defaults_may_be_left_out():
    role = {"name": "a", "task": {"argv": ["true"]}}
    group = json.dumps({"kind": "GroupSpec", "roles": [role]})
    assert from_json(group) == GroupSpec((RoleSpec("a", JobSpec(("true",))),))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nobody": 1}, "unexpected keyword argument 'nobody'"),
        ({"task": {"argv": "true"}}, "expected is"),
        ({"task": {}}, "argv"),
        ({"replicas": 1.5}, "expected is int"),
        ({"resources": {"CPU": "much"}}, "expected is float"),
    ],
)
def test_a_spec_of_another_form_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        from_json(_changed("role", **change))


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
