"""What a process imports that runs elements of a configuration, and what they find there."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray import array
from nemo_run_ray.remote.array import fork_server
from tests import array_tasks

#: A task of a module that needs its script or does not; modules lie in ``modules``.
_TASKS = """
import {before}
import sys

def says(text):
    print(text, "nemo_run" in sys.modules)
"""


def own(text: str) -> str:
    return text


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Callable[..., tuple[int, str]]:
    """Runs one element as a node does; gives its exit code and what it prints."""
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.syspath_prepend(str(modules))

    def once(function, text: str = "x", main: str | None = None, **env: str) -> tuple[int, str]:
        made = array(run.Partial(function, text=""), over={"text": [text]})
        folder = tmp_path / "jobs" / "job" / "scripts"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "elements").write_text(made.inline)
        if main is not None:
            (tmp_path / "jobs" / "__main__.py").write_text(main)
        order = {"values": {"text": text}, "result": str(tmp_path / "result")}
        words = [fork_server.__file__, "once", str(folder / "elements"), json.dumps(order)]
        path = f"{modules}:{Path(__file__).parents[4]}"
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    return once


@pytest.fixture
def says(tmp_path, runs):
    """Gives a task of a module that imports another one before."""

    def make(before: str = "os"):
        (tmp_path / "modules" / "tasks.py").write_text(_TASKS.format(before=before))
        sys.modules.pop("tasks", None)
        from tasks import says

        return says

    yield make
    sys.modules.pop("tasks", None)


def test_without_a_script_nothing_imports_nemo_run(runs, says):
    assert runs(says()) == (0, "x False\n")


def test_the_script_runs_before_that_makes_a_module_known(runs, says, tmp_path, monkeypatch):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "known_to_main.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "hidden"))
    main = f"import sys\nsys.path.append({str(tmp_path / 'hidden')!r})"
    assert runs(says("known_to_main"), main=main) == (0, "x True\n")


def test_the_script_runs_that_has_the_function_and_names_of_any_kind(runs, monkeypatch):
    monkeypatch.setattr(own, "__module__", "__main__")
    monkeypatch.setattr("__main__.own", own, raising=False)
    monkeypatch.setattr("__main__.__file__", __file__, raising=False)  # NeMo-Run looks at it
    text = "from time import time\ndef _run(): ...\ndef own(text): print(text)"
    assert runs(own, main=text) == (0, "x\n")


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_an_element_starts_processes_of_its_own(runs, how):
    assert runs(array_tasks.starts_a_process, how) == (0, "started\n")


def test_a_script_that_reads_its_arguments_does_not_end_the_task(runs, says):
    main = "import argparse\nargparse.ArgumentParser().parse_args()"
    code, printed = runs(says(), main=main)
    assert code == 0
    assert "The launching script ended with SystemExit: 2 when it ran here." in printed
    assert printed.startswith("x True\n")


def test_a_script_that_ends_before_its_function_is_known_is_named(runs, monkeypatch):
    monkeypatch.setattr(own, "__module__", "__main__")
    monkeypatch.setattr("__main__.own", own, raising=False)
    monkeypatch.setattr("__main__.__file__", __file__, raising=False)  # NeMo-Run looks at it
    code, printed = runs(own, main="import helper\ndef own(text): print(text)")
    assert code == 1
    assert '__main__.py", line 1, in <module>' in printed
    ended = "The launching script ended with ModuleNotFoundError: No module named 'helper'"
    last = f"ImportError: module '__main__' has no attribute 'own'. {ended} when it ran here.\n"
    assert printed.endswith(last)


def test_an_element_whose_result_cannot_be_written_says_so(runs, tmp_path):
    (tmp_path / "result").mkdir()
    code, printed = runs(textwrap.dedent)
    assert code == 1
    assert "IsADirectoryError: " in printed
