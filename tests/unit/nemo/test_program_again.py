"""A program that launches at its top level, which NeMo-Run runs again to find its functions."""

from __future__ import annotations

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
