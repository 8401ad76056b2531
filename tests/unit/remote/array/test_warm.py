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
from nemo_run_ray.remote.array import script, warm_program
from tests import array_tasks

#: A task of a module that needs its script or does not; modules lie in ``modules``.
_TASKS = """
import {before}
import sys
import textwrap

def says(text):
    print(text, "nemo_run" in sys.modules)
"""
_LAUNCHES = """
'''What a script says of itself.'''
from __future__ import annotations
import argparse, os
from typing import TYPE_CHECKING
import nemo_run as run
from nemo_run_ray import RayExecutor, array
from tasks import says
if TYPE_CHECKING:
    import nowhere
SEEDS = list(range(3))
NAMES: dict[str, int] = {"a": -1, "b": len(SEEDS)}
class Options:
    width = 3
async def wait(seconds=1): ...
def main(argv=None, *, again=(1, 2)):
    run.run(array(run.Partial(says, text=""), over={"text": ["x"]}), executor=RayExecutor())
if __name__ == "__main__":
    main()
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
        order = {"fields": {"text": text}, "template": "", "result": str(tmp_path / "result")}
        words = [warm_program.__file__, "once", str(folder / "elements"), json.dumps(order)]
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


@pytest.mark.parametrize("main", [None, "", _LAUNCHES])
def test_a_script_that_only_launches_does_not_run(runs, says, main):
    assert runs(says(), main=main) == (0, "x False\n")


def test_the_script_runs_before_that_sets_something(runs, says):
    main = "import tasks\ntasks.sys.modules['nemo_run_was_set'] = None\nprint('ran')"
    assert runs(says(), main=main) == (0, "ran\nx True\n")


def test_the_script_runs_before_that_makes_a_module_known(runs, says, tmp_path, monkeypatch):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "known_to_main.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "hidden"))
    main = f"import sys\nsys.path.append({str(tmp_path / 'hidden')!r})"
    assert runs(says("known_to_main"), main=main) == (0, "x True\n")


def test_the_script_runs_that_has_the_function_and_names_of_any_kind(runs, monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(own, "__module__", "__main__")
    monkeypatch.setattr(main, "own", own, raising=False)
    monkeypatch.setattr(main, "__file__", __file__, raising=False)  # NeMo-Run looks at it
    text = "from time import time\ndef _code_of(): ...\ndef own(text): print(text)"
    assert runs(own, main=text) == (0, "x\n")


def test_a_module_that_fails_is_imported_once_and_named(runs, says, tmp_path):
    broken = tmp_path / "modules" / "broken.py"
    broken.touch()
    task = says("broken")
    broken.write_text("print('imported')\nimport gone_module")
    code, printed = runs(task, main="")
    assert code == 1
    assert printed.count("imported\n") == 1
    assert "ModuleNotFoundError: No module named 'gone_module'" in printed


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_an_element_starts_processes_of_its_own(runs, how):
    assert runs(array_tasks.starts_a_process, how) == (0, "started\n")


def test_a_safe_path_stays_one(runs, says):
    """The task's module lies in the path's first folder."""
    assert runs(says(), PYTHONSAFEPATH="1") == (0, "x False\n")


def test_a_file_of_the_users_hides_none_of_pythons_modules_from_ours(runs, tmp_path):
    (tmp_path / "select.py").write_text("raise OSError")
    assert runs(textwrap.dedent) == (0, "")


def test_what_a_script_defines_is_there_for_who_asks_for_it(runs, says):
    """A function that was pickled by the script, say."""
    text = "import pickle\nprint(pickle.loads(b'c__main__\\nclean\\n.')('x'))"
    main = "def clean(text):\n    return text * 2\n"
    assert runs(array_tasks.executes, text, main=main) == (0, "xx\n")
    code, printed = runs(array_tasks.executes, text.replace("clean", "gone"), main=main)
    assert code == 1
    assert "'gone' on <module '__main__'>" in printed


def test_a_script_that_reads_its_arguments_does_not_end_the_task(runs, says):
    main = "import argparse\nargparse.ArgumentParser().parse_args()"
    code, printed = runs(says(), main=main)
    assert code == 0
    assert "The launching script ended with 2 when it ran here." in printed
    assert printed.startswith("x True\n")


_FIT = {"type": "pyref", "module": "tests.array_tasks", "name": "train"}


@pytest.mark.parametrize(
    "statement",
    [
        "import tests.array_tasks",
        "import tests",
        "from tests import array_tasks",
        "from tests.array_tasks import train, waits",
        "def f(x: int = 3) -> None: ...",
        "x = run.Partial",
        "x, y = Path('a'), os.environ['A']",
        "x = f'{a}-{b!r}' if a < b else [*c][1:]",
        "log = logging.getLogger(__name__)",
        "@dataclass(frozen=True)\nclass Options:\n    width: int = 3",
        "class Color(Enum):\n    RED = 1",
        "from . import models\nmodels.register()",
    ],
)
def test_what_does_nothing_for_a_task(statement):
    assert not script.has_to_run(statement, {"a": [_FIT]})


@pytest.mark.parametrize(
    "statement",
    [
        "import numpy",
        "import tests.fake_ray",
        "from tests import fake_ray",
        "from tests.fake_ray import more",
        "from tests import *",
        "import os; os.environ['A'] = '1'",
        "array_tasks.WIDTH = 3",
        "print()",
        "x = print()",
        "x = [print()]",
        "x = f'{print()}'",
        "x: print() = 1",
        "def f(x=print()): ...",
        "def f(x: print()): ...",
        "def f() -> print(): ...",
        "@register\ndef f(): ...",
        "@register()\nclass Net: ...",
        "class Net(Registered): ...",
        "class Net:\n    x = print()",
        "class Net(metaclass=Meta): ...",
        "if True:\n    print()",
        "if __name__ == '__main__':\n    pass\nelse:\n    print()",
        "for x in y: ...",
        "try:\n    import os\nexcept ImportError: ...",
        "x = (y := 3)",
        "list = print",
        "def sorted(x): ...",
        "del x",
        "no Python",
        f"x = {'1 + ' * 5000}1",
    ],
)
def test_what_may_do_something_for_a_task(statement):
    assert script.has_to_run(statement, {"a": [_FIT]})


def test_a_file_with_a_name_of_pythons_library_is_the_users(tmp_path, monkeypatch):
    assert not script.has_to_run("import profile", {})
    (tmp_path / "profile.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert script.has_to_run("import profile", {})


def test_a_task_of_the_script_needs_it():
    assert script.has_to_run("", [{"module": "__main__", "name": "fit"}])
