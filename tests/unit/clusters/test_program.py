"""The node program as one file."""

import ast
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nemo_run_ray.clusters.slurm.script import node_program

_PACKAGE = "nemo_run_ray_remote"
#: Runs the zip, which ends at once, then imports of its modules. Each module that Python compiles
#: is a line of the output.
_RUN = """
import runpy, sys
def saw(event, words):
    if event == "compile" and str(words[1]).startswith(sys.argv[1]):
        print("compiled", str(words[1])[len(sys.argv[1]):])
sys.addaudithook(saw)
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
except SystemExit as end:
    assert end.code == 2, end
sys.path.insert(0, sys.argv[1])
for words in sys.argv[2:]:
    package, statement = words.split(":")
    exec(statement, {"__package__": package, "__name__": package + ".test"})
"""


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(node_program())) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture
def zipped(tmp_path) -> str:
    (tmp_path / "node.pyz").write_bytes(node_program())
    return str(tmp_path / "node.pyz")


def _run(zipped: str, *statements: str) -> list[str]:
    words = [sys.executable, "-I", "-S", "-c", _RUN, zipped, *statements]
    done = subprocess.run(words, capture_output=True, text=True, env={}, check=False)
    assert done.returncode == 0, done.stderr
    start = f"compiled /{_PACKAGE}/"
    lines = done.stdout.splitlines()
    return [one.removeprefix(start) for one in lines if one.startswith(start)]


def test_every_module_finds_what_it_imports_and_is_compiled_once(files, zipped):
    """Each import runs, also those inside of functions, and nothing is there for no import."""
    statements = []
    for name, text in files.items():
        package = ".".join(Path(name).parent.parts)
        statements += [
            f"{package}:{ast.unparse(one)}"
            for one in ast.walk(ast.parse(text))
            if isinstance(one, ast.ImportFrom) and one.level
        ]
    assert f"{_PACKAGE}.slurm:from .head import Head" in statements
    compiled = _run(zipped, *statements)
    assert sorted(compiled) == sorted(set(compiled)), "each once"
    assert {f"{_PACKAGE}/{one}" for one in compiled} | {"__main__.py"} == set(files)


def test_what_no_node_runs_stays_here(files):
    assert not [one for one in files if "/array/" in one or "/group/" in one or "rundir" in one]
