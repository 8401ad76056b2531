"""What a process imports that runs elements of a configuration."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray import array
from nemo_run_ray.remote.array import warm

#: Loads the configuration of all elements; says what it is of, and whether NeMo-Run is imported.
_LOADS = """
import sys
from pathlib import Path
import warm

template = warm._template(Path("template").read_text(), Path.cwd())
print(template.__fn_or_cls__.__name__, "nemo_run" in sys.modules)
"""


def own(text: str) -> str:
    return text


@pytest.fixture
def loaded(tmp_path):
    """Loads the configuration of a task in an interpreter of its own; gives what it says."""

    def load(function, main: str | None) -> list[str]:
        made = array(run.Partial(function, text=""), over={"text": ["x"]})
        (tmp_path / "template").write_text(json.loads(made.inline.splitlines()[0])["template"])
        if main is not None:
            (tmp_path / "__main__.py").write_text(main)
        env = {**os.environ, "PYTHONPATH": str(Path(warm.__file__).parent)}
        words = [sys.executable, "-c", _LOADS]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return load


@pytest.mark.parametrize("main", ["print('ran')", None])
def test_neither_the_script_nor_nemo_run_is_needed_for_a_modules_function(loaded, main):
    assert loaded(textwrap.dedent, main) == ["dedent", "False"]


def test_the_script_runs_that_has_the_function(loaded, monkeypatch):
    monkeypatch.setattr(own, "__module__", "__main__")
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "own", own, raising=False)
    monkeypatch.setattr(main, "__file__", __file__, raising=False)  # NeMo-Run looks at it
    assert loaded(own, "print('ran')\ndef own(text): ...") == ["ran", "own", "True"]


def test_the_script_runs_that_makes_the_functions_module_known(loaded, tmp_path, monkeypatch):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "known_to_main.py").write_text("def task(text): ...")
    monkeypatch.syspath_prepend(str(tmp_path / "hidden"))
    from known_to_main import task

    main = f"import sys\nsys.path.append({str(tmp_path / 'hidden')!r})"
    assert loaded(task, main) == ["task", "True"]
