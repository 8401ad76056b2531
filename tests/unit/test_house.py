"""Who may import whom."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nemo_run_ray

ROOT = Path(nemo_run_ray.__file__).parent
#: From low to high; a module imports from its own layer and those below.
_LAYERS = (
    {"remote"},
    {"errors", "plain_errors", "states", "probes", "checks"},
    {
        "executor",
        "runtime_env",
        "app_roles",
        "plan",
        "archives",
        "attempts",
        "env_builds",
        "jobs_api",
        "clusters",
        "ledger",
        "follow",
        "job_table",
        "log_text",
        "timeline",
        "lanes",
    },
    {"submission"},
    {"chain", "remote_job"},
    {"chained_job", "shipment"},
    {"before_stop"},
    {"plugin"},
    {"scheduler", "status_view"},
    {"cli", "nemo_cli"},
    {"__init__"},
)
#: They import only the errors and themselves; who knows NeMo-Run's registries imports them. The
#: transport applies the patches that it rests on.
_BESIDE = {"patches": {"errors"}, "transport": {"errors", "patches"}}
_MAY_IMPORT_RAY = {"remote/actors.py", "remote/group.py", "clusters/local.py"}
_MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def _imports(module: str) -> Iterator[tuple[str, bool]]:
    """Full names of imported modules, and whether at module level."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.walk(node)
    }
    package = ["nemo_run_ray", *Path(module).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in inside
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            if name == "nemo_run_ray" or (node.level and not node.module):
                for alias in node.names:
                    yield f"{name}.{alias.name}", node not in inside
            else:
                yield name, node not in inside


def _part(module: str) -> str:
    """The layer's name for a file: its folder, or itself."""
    return Path(module).parts[0].removesuffix(".py")


def _layer(part: str) -> int:
    return next(number for number, layer in enumerate(_LAYERS) if part in layer)


@pytest.mark.parametrize("module", _MODULES)
def test_every_module_has_its_place(module):
    assert _part(module) in set().union(*_LAYERS, _BESIDE)


@pytest.mark.parametrize("module", _MODULES)
def test_imports_go_one_way(module):
    for name, _ in _imports(module):
        if name == "nemo_run_ray":
            assert module == "archives.py", f"{module} imports the top"  # only for its path
        elif name.startswith("nemo_run_ray."):
            part, imported = _part(module), name.split(".")[1]
            if part in _BESIDE:
                assert imported in _BESIDE[part] | {part}, f"{module} imports {name}"
            elif imported in _BESIDE:
                assert _layer(part) >= _layer("plugin"), f"{module} imports {name}"
            else:
                assert _layer(imported) <= _layer(part), f"{module} imports {name}"


@pytest.mark.parametrize("module", [one for one in _MODULES if _part(one) == "remote"])
def test_the_remote_half_needs_only_the_standard_library(module):
    allowed = sys.stdlib_module_names | ({"ray"} if module in _MAY_IMPORT_RAY else set())
    for name, _ in _imports(module):
        if name.startswith("nemo_run_ray"):
            assert name.startswith("nemo_run_ray.remote"), f"{module} imports {name}"
        else:
            assert name.split(".")[0] in allowed, f"{module} imports {name}"
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    absolute = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and not one.level]
    assert not [one.module for one in absolute if one.module.startswith("nemo_run_ray")]


@pytest.mark.parametrize("module", _MODULES)
def test_ray_is_imported_late_and_in_two_places(module):
    for name, at_module_level in _imports(module):
        if name.split(".")[0] == "ray":
            assert module in _MAY_IMPORT_RAY
            assert not at_module_level


def test_public_names():
    assert nemo_run_ray.__all__ == [
        "CommandProbe",
        "ExistingCluster",
        "HttpProbe",
        "LocalCluster",
        "PortProbe",
        "RayExecutor",
    ]
    assert all(hasattr(nemo_run_ray, name) for name in nemo_run_ray.__all__)


_LOADED = """
import json, sys
import nemo_run
before = set(sys.modules)
import nemo_run_ray
print(json.dumps([sorted(before), sorted(sys.modules)]))
"""


def test_importing_loads_no_ray_and_no_network_client():
    words = [sys.executable, "-c", _LOADED]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    before, after = json.loads(done.stdout)
    tops = {name.split(".")[0] for name in after}
    assert "ray" not in tops
    assert not (tops - {name.split(".")[0] for name in before}) & {"httpx", "websockets"}


def test_the_import_needs_only_what_nemo_run_brings():
    """Users' scripts import us, and run again on nodes that have nemo-run and nothing of ours."""
    program = (
        "import nemo_run, sys\nbefore = set(sys.modules)\nimport nemo_run_ray\n"
        "print(*sorted(one for one in sys.modules if one.startswith('nemo_run_ray')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    allowed = {*sys.stdlib_module_names, "nemo_run", "nemo_run_ray", "torchx", "fiddle", "rich"}
    for name in done.stdout.split():
        if name.startswith("nemo_run_ray"):
            path = ROOT / "/".join(name.split(".")[1:])
            module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            found = {
                one.partition(".")[0]
                for one, at_module_level in _imports(module.relative_to(ROOT).as_posix())
                if at_module_level
            }
            assert found <= allowed, f"{module}: {found - allowed}"


def test_the_first_step_on_a_node_can_be_read_by_older_pythons():
    """It says which Python is too old, so it must get so far on one."""
    text = (ROOT / "remote" / "start.py").read_text()
    ast.parse(text, feature_version=(3, 6))
    assert {name for name, _ in _imports("remote/start.py")} == {"os", "sys"}


def test_what_runs_on_nodes_is_written_for_python_39():
    for path in sorted((ROOT / "remote").glob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            assert not isinstance(node, ast.Match), path
            if isinstance(node, ast.NamedExpr):  # 3.10 needs no parentheses between brackets
                assert lines[node.lineno - 1][node.col_offset - 1] == "(", (path, node.lineno)
