"""What a program prints that ends with an error of this package. In processes of their own."""

import os
import subprocess
from pathlib import Path

import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import VARIABLE, ConfigError, paragraph
from tests import warm

_NOBODY = "http://127.0.0.1:9"  # the port of a service that no machine runs any more


def _run(tmp_path: Path, program: str, **variables: str) -> subprocess.CompletedProcess:
    path = tmp_path / "program.py"
    path.write_text(program)
    env = {**os.environ, "NEMORUN_HOME": str(tmp_path / "home"), **variables}
    return warm.python(str(path), env=env, cwd=tmp_path)


_WRONG_FIELD = """\
import nemo_run_ray


def mine():
    return nemo_run_ray.RayExecutor(node=2)


mine()
"""
_UNREACHABLE = f"""\
import nemo_run as run
from nemo_run_ray import RayExecutor

run.run(run.Script(inline="true"), executor=RayExecutor(address="{_NOBODY}"), name="x")
"""


def test_a_wrong_field_is_one_paragraph(tmp_path):
    done = _run(tmp_path, _WRONG_FIELD)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "nemo_run_ray.errors.ConfigError: RayExecutor: there is no field 'node'; "
        "did you mean 'nodes'?",
        f"({tmp_path / 'program.py'}, line 5; {VARIABLE}=1 shows the traceback)",
    ]


def test_who_asks_for_the_traceback_gets_it_with_the_causes(tmp_path):
    done = _run(tmp_path, _UNREACHABLE, **{VARIABLE: "1"})
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "httpx.ConnectError" in done.stderr


@pytest.mark.parametrize("before", ["", "sys.excepthook = lambda *_: print('mine')\n"])
def test_other_errors_are_printed_as_before(tmp_path, before):
    program = f"import sys\n{before}import nemo_run_ray\n"
    done = _run(tmp_path, f"{program}nemo_run_ray._register()\n1 / 0\n")
    assert done.returncode == 1
    if before:
        assert done.stdout.splitlines()[-1] == "mine"
        assert "Traceback" not in done.stderr
    else:
        assert done.stderr.startswith("Traceback (most recent call last)")
        assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_notebook_prints_the_paragraph(monkeypatch):
    with pytest.raises(ConfigError) as caught:
        RayExecutor(nodes=0)
    shown = caught.value._render_traceback_()
    assert "\n".join(shown) == paragraph(caught.value)
    assert shown[0].startswith("nemo_run_ray.errors.ConfigError: RayExecutor.nodes is 0")
    assert __file__ in shown[1]
    monkeypatch.setenv(VARIABLE, "1")
    assert caught.value._render_traceback_()[0] == "Traceback (most recent call last):"
