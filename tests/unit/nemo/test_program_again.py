"""A program that launches at its top level, which NeMo-Run runs again to find its functions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from nemo_run.config import get_nemorun_home
from nemo_run.run.experiment import maybe_load_external_main

from nemo_run_ray.errors import ConfigError

_PROGRAM = """
import nemo_run as run
from nemo_run_ray import RayExecutor

def launch():
    task, executor = run.Script(inline="true"), RayExecutor(address="{url}")
    run.run(task, executor=executor, name="{name}", detach=True)

{last}
"""


def _again(folder: Path, **values: str) -> None:
    (folder / "__main__.py").write_text(_PROGRAM.format(**values))
    maybe_load_external_main(str(folder))


def test_what_it_launched_is_not_launched_again(ray, unique, tmp_path):
    with pytest.raises(ConfigError, match=r"__main__.py, line 9, launches what .* __name__ == "):
        _again(tmp_path, url=ray.url, name=unique, last="launch()")
    assert ray.started == []
    assert not (Path(get_nemorun_home()) / "experiments" / unique).exists(), (
        "a title means the first"
    )


def test_a_program_whose_launch_is_guarded_is_loaded(ray, unique, tmp_path):
    import __main__

    _again(tmp_path, url=ray.url, name=unique, last="if __name__ == '__main__':\n    launch()")
    assert ray.started == []
    __main__.launch()  # a task may launch others
    assert len(ray.started) == 1


_OWN_FUNCTION = """
import nemo_run as run
import nemo_run_ray

def train(seed: int = 0):
    print(seed)

executor = nemo_run_ray.RayExecutor(address="{url}")
{first}
run.run({task}, executor=executor, name="{name}", detach=True)
"""
_PARTIAL = "run.Partial(train)"
_FIRST_A_SCRIPT = (
    'run.run(run.Script(inline="true"), executor=executor, name="{name}-first", detach=True)'
)


@pytest.mark.parametrize(
    ("first", "task", "started"),
    [
        ("", _PARTIAL, 0),
        ("", 'nemo_run_ray.array(run.Partial(train), over={"seed": [1, 2]})', 0),
        (_FIRST_A_SCRIPT, _PARTIAL, 1),
        ("import logging; logging.getLogger(__name__)", _PARTIAL, 0),
        ("if __name__ == '__main__':", f" {_PARTIAL}", 1),
    ],
    ids=["partial", "array", "after a script", "a logger", "guarded"],
)
def test_a_function_of_a_program_that_launches_at_its_top(
    ray, unique, tmp_path, monkeypatch, first, task, started
):
    text = _OWN_FUNCTION.format(url=ray.url, name=unique, first=first, task=task)
    text = text.replace("{name}", unique)
    if first.endswith(":"):
        text = text.replace("\nrun.run", "\n    run.run")
    program = tmp_path / "program.py"
    program.write_text(text)
    spec = importlib.util.spec_from_file_location("__main__", program)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "__main__", module)
    if first.endswith(":"):
        spec.loader.exec_module(module)
    else:
        with pytest.raises(ConfigError, match=r"program.py, line 10, launches a .* __name__ == "):
            spec.loader.exec_module(module)
    assert len(ray.started) == started
