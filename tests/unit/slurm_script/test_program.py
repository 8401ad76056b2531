"""The node program as one file."""

import io
import marshal
import subprocess
import sys
import zipfile

import pytest

from nemo_run_ray.slurm_script.program import node_program

_PACKAGE = "nemo_run_ray_remote"
#: Imports modules of the zip, and prints the files of it that Python compiles for that.
_COMPILED = f"""
import importlib, sys
sys.path.insert(0, sys.argv[1])
def saw(event, words):
    if event == "compile" and str(words[1]).startswith(sys.argv[1]):
        print(str(words[1]).removeprefix(sys.argv[1] + "/{_PACKAGE}/"))
sys.addaudithook(saw)
for name in sys.argv[2:]:
    importlib.import_module("{_PACKAGE}." + name)
"""


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(node_program())) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def zipped(tmp_path) -> str:
    (tmp_path / "node.pyz").write_bytes(node_program())
    return str(tmp_path / "node.pyz")


def _compiled(zipped: str, *modules: str) -> list[str]:
    words = [sys.executable, "-I", "-S", "-c", _COMPILED, zipped, *modules]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_module_finds_what_it_imports(files, zipped):
    prefix = f"{_PACKAGE}/"
    sources = {one.removeprefix(prefix) for one in files if one.startswith(prefix)}
    modules = {one.removesuffix(".py") for one in sources if one.endswith(".py")}
    assert {"slurm/head", "slurm/worker", "slurm/companion", "slurm/decide", "spec"} <= modules
    names = (one.removesuffix("__init__").strip("/").replace("/", ".") for one in sorted(modules))
    assert "slurm/decide.py" in _compiled(zipped, *(one for one in names if one))


def test_what_no_node_runs_stays_here(files):
    assert not [one for one in files if "/array/" in one or "/group/" in one or "rundir" in one]


def test_a_worker_compiles_nothing(zipped):
    assert _compiled(zipped, "slurm.__main__", "slurm.worker") == []
    assert "slurm/head.py" in _compiled(zipped, "slurm.head"), "there is one of them"


def test_the_byte_code_is_that_of_the_source(files):
    found = [one for one in files if one.endswith(".pyc")]
    assert f"{_PACKAGE}/slurm/worker.pyc" in found
    for name in found:
        source = name.removesuffix("c")
        code = compile(files[source], source, "exec", dont_inherit=True)
        assert marshal.loads(files[name][16:]) == code, name


def test_another_version_of_python_reads_the_sources(files, tmp_path):
    """By byte code with the number that no version has."""
    other = tmp_path / "node.pyz"
    with zipfile.ZipFile(other, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, bytes(4) + data[4:] if name.endswith(".pyc") else data)
    assert "slurm/worker.py" in _compiled(str(other), "slurm.__main__", "slurm.worker")
    words = [sys.executable, "-I", "-S", str(other)]
    done = subprocess.run(words, capture_output=True, text=True, env={}, check=False)
    assert done.returncode == 2
    assert "this program is started by `srun`" in done.stdout
