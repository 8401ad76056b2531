"""Who may import whom."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nemo_run_ray
from tests import sizes

ROOT = Path(nemo_run_ray.__file__).parent
TESTS = Path(__file__).parents[1]
#: From high to low, as CONTRIBUTING.md draws it; a part imports from its own line and those below.
_LINES = (
    {"__init__"},
    {"cli"},
    {"nemo", "integrations"},
    {"experiment", "work"},
    {"cluster_files"},
    {"plan"},
    {"executor", "dashboard", "cloud"},
    {"patches"},
    {"clusters"},
    {"fields"},
    {"remote", "ids", "errors", "ssh"},
)
#: The same inside ``remote``: programs above what they share.
_REMOTE_LINES = (
    {"__main__", "start"},
    {"array"},
    {"group", "dispatcher", "slurm"},
    {"hosts"},
    {"node"},
    {"carried_over"},
    {
        "dashboard",
        "decide",
        "end_record",
        "status",
        "spec",
        "files",
        "fit",
        "local_watch",
        "__init__",
    },
)
#: Programs on one line of it: none needs another.
_PROGRAMS = {"group", "dispatcher", "slurm"}
_MAY_IMPORT_RAY = {
    "remote/array/driver.py",
    "remote/group/driver.py",
    "remote/hosts/actors.py",
    "work/connection.py",
    "work/tasks.py",
}


def _modules(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))


_MODULES = _modules(ROOT)


@functools.cache
def _tree(module: str, root: Path = ROOT) -> ast.Module:
    return ast.parse((root / module).read_text(encoding="utf-8"))


@functools.cache
def _imports(module: str, root: Path = ROOT) -> tuple[tuple[str, bool], ...]:
    """Full names of imported modules, and whether they are imported with the module itself."""
    return tuple(_found_imports(module, root))


def _found_imports(module: str, root: Path) -> Iterator[tuple[str, bool]]:
    tree = _tree(module, root)
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
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
    """The folder of a file, or its own name when it lies at the top."""
    return Path(module).parts[0].removesuffix(".py")


def _line(lines: tuple[set[str], ...], part: str) -> int:
    found = [number for number, line in enumerate(lines) if part in line]
    assert found, f"{part} has no place in the house"
    return found[0]


#: The one import that goes up, inside the function ``RayExecutor.resolved``.
_UPWARD = {("executor.py", "nemo_run_ray.cluster_files.resolve")}


def _wrong_imports(module: str, names: list[str]) -> list[str]:
    """Those of the imported names that lie above the module."""
    part = _part(module)
    wrong = []
    for name in names:
        if name == "nemo_run_ray":
            wrong.append(name)
        elif name.startswith("nemo_run_ray.") and (module, name) not in _UPWARD:
            words = name.split(".")[1:]
            if _line(_LINES, words[0]) < _line(_LINES, part):
                wrong.append(name)
            if part == words[0] == "remote" and len(words) > 1:
                inside = Path(module).parts[1].removesuffix(".py")
                inner = words[1] if words[1] in set().union(*_REMOTE_LINES) else "__init__"
                here, there = _line(_REMOTE_LINES, inside), _line(_REMOTE_LINES, inner)
                is_neighbour = there == here and inner != inside and inside in _PROGRAMS
                if there < here or is_neighbour:
                    wrong.append(name)
    return wrong


def test_every_module_has_its_place():
    for module in _MODULES:
        _line(_LINES, _part(module))
        if _part(module) == "remote":
            _line(_REMOTE_LINES, Path(module).parts[1].removesuffix(".py"))


def _going_up(root: Path) -> dict[str, list[str]]:
    """The imports of each module below a folder that go up."""
    found = {
        module: _wrong_imports(module, [name for name, _ in _imports(module, root)])
        for module in _modules(root)
    }
    return {module: wrong for module, wrong in found.items() if wrong}


def test_imports_go_one_way():
    assert _going_up(ROOT) == {}


def test_an_import_that_goes_up_is_found_in_every_folder(tmp_path):
    planted = {
        "experiment/late.py": "def late():\n    from nemo_run_ray.cli import main\n",
        "dashboard/planted.py": "from ..experiment.store import store_of\n",
        "plan/planted.py": "import nemo_run_ray\n",
        "clusters/slurm/planted.py": "import nemo_run_ray.experiment.store\n",
        "remote/node/planted.py": "from ..dispatcher import run\n",
        "remote/group/planted.py": "from ..slurm import node\nfrom ..node import probe\n",
        "remote/files.py": "from .status import JobState\n",
    }
    for module, text in planted.items():
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text(text)
    assert _going_up(tmp_path) == {
        "dashboard/planted.py": ["nemo_run_ray.experiment.store"],
        "experiment/late.py": ["nemo_run_ray.cli"],
        "plan/planted.py": ["nemo_run_ray"],
        "clusters/slurm/planted.py": ["nemo_run_ray.experiment.store"],
        "remote/node/planted.py": ["nemo_run_ray.remote.dispatcher"],
        "remote/group/planted.py": ["nemo_run_ray.remote.slurm"],
    }


def test_the_remote_half_needs_only_the_standard_library():
    for module in (one for one in _MODULES if _part(one) == "remote"):
        allowed = sys.stdlib_module_names | ({"ray"} if module in _MAY_IMPORT_RAY else set())
        if (
            module == "remote/array/fork_server.py"
        ):  # the task's interpreter runs it, as NeMo-Run's runner
            allowed |= {"nemo_run", "fiddle"}
        for name, _ in _imports(module):
            if name.startswith("nemo_run_ray"):
                assert name.startswith("nemo_run_ray.remote"), f"{module} imports {name}"
            else:
                assert name.split(".")[0] in allowed, f"{module} imports {name}"
        nodes = [one for one in ast.walk(_tree(module)) if isinstance(one, ast.ImportFrom)]
        absolute = [str(one.module) for one in nodes if not one.level]
        assert not [name for name in absolute if name.startswith("nemo_run_ray")], module


def test_no_two_modules_import_each_other():
    """Also by way of others, inside a function, or for types alone."""
    names = {f"nemo_run_ray.{one.removesuffix('.py').replace('/', '.')}": one for one in _MODULES}
    needs = {
        module: {
            names[name]
            for name, _ in _imports(module)
            if name in names and (module, name) not in _UPWARD
        }
        for module in _MODULES
    }
    while True:
        leaves = {module for module, others in needs.items() if not others}
        if not leaves:
            break
        needs = {one: others - leaves for one, others in needs.items() if one not in leaves}
    assert needs == {}


def test_ray_is_imported_late_and_in_two_places():
    for module in _MODULES:
        for name, at_module_level in _imports(module):
            if name.split(".")[0] == "ray":
                assert module in _MAY_IMPORT_RAY
                assert not at_module_level, module


def test_no_class_has_the_name_of_another_one():
    """One name is one thing; the halves on both sides of a request have the same word for one."""
    names = Counter(
        node.name
        for module in _MODULES
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == {"Unanswered"}


def test_the_dashboards_folder_is_the_only_one_with_httpx():
    """Which logs every request at INFO, and is kept quiet there."""
    others = [module for module in _MODULES if _part(module) != "dashboard"]
    names = {module: {name.split(".")[0] for name, _ in _imports(module)} for module in others}
    assert [module for module in others if "httpx" in names[module]] == []


def test_every_test_module_has_a_name_of_its_own():
    """Else pytest takes one for the other."""
    names = [path.name for path in Path(__file__).parent.parent.rglob("test_*.py")]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_every_file_that_the_guide_names_is_there():
    guide = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`", guide)
    there = [path.as_posix() for folder in (ROOT, TESTS) for path in folder.rglob("*.py")]
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []
    assert "remote/decide.py" in named


def test_public_names():
    assert nemo_run_ray.__all__ == [
        "CommandProbe",
        "ExistingCluster",
        "FolderPackager",
        "HttpProbe",
        "LocalCluster",
        "PortProbe",
        "RayExecutor",
        "Sidecar",
        "SlurmCluster",
        "array",
        "find",
    ]
    assert all(hasattr(nemo_run_ray, name) for name in nemo_run_ray.__all__)
    assert {*nemo_run_ray.__all__} <= {*dir(nemo_run_ray)}


_LOADED = """
import json, sys
import nemo_run
before = set(sys.modules)
import nemo_run_ray
from nemo_run_ray import clusters
from tests import sizes
at_first = sorted(one for one in sys.modules if one.startswith("nemo_run_ray."))
from nemo_run_ray import *
print(json.dumps([sorted(before), sorted(sys.modules), at_first]))
"""


def test_importing_loads_no_ray_and_no_network_client():
    words = [sys.executable, "-c", _LOADED]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    before, after, at_first = json.loads(done.stdout)
    tops = {name.split(".")[0] for name in after}
    assert "ray" not in tops
    assert not (tops - {name.split(".")[0] for name in before}) & {"httpx", "websockets"}
    assert len(at_first) + 1 <= 15, "every program that imports us pays for them"
    # What takes long and most programs do not use.
    assert not {f"nemo_run_ray.{one}" for one in ("clusters.local", "plan")} & set(at_first)
    assert {f"nemo_run_ray.{one}" for one in ("clusters.local", "plan")} <= set(after)


def test_the_import_needs_only_what_nemo_run_brings():
    """Users' scripts import us, and run again on nodes that have nemo-run and not this package."""
    program = (
        "import nemo_run, sys\nfrom nemo_run_ray import *\n"
        "print(*sorted(one for one in sys.modules if one.startswith('nemo_run_ray')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    allowed = {*sys.stdlib_module_names, "nemo_run", "nemo_run_ray", "torchx", "fiddle", "rich"}
    allowed |= {"fabric", "invoke", "paramiko"}  # of NeMo-Run's tunnels
    allowed |= {"pydantic", "yaml"}  # of its leptonai and torchx
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
    found = {name for name, is_first in _imports("remote/start.py") if is_first}
    assert found == {"os", "sys"}


def test_what_runs_on_nodes_is_written_for_python_39():
    for path in sorted((ROOT / "remote").rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            assert not isinstance(node, ast.Match), path
            if isinstance(node, ast.NamedExpr):  # 3.10 needs no parentheses between brackets
                assert lines[node.lineno - 1][node.col_offset - 1] == "(", (path, node.lineno)


def test_no_folder_has_grown():
    """A folder may become smaller; ``python -m tests.sizes --write`` then notes its new size."""
    limits = sizes.noted()
    grown = {
        name: (limits.get(name), now)
        for name, now in sizes.sizes().items()
        if any(new > old for new, old in zip(now, limits.get(name, (0, 0, 0)), strict=True))
    }
    assert grown == {}, "a commit that makes a folder larger says why, and notes its size"


def test_ray_is_used_by_its_public_interfaces_alone():
    pattern = re.compile(r"\bray\._private|\._private\.|_internal_kv")
    used = {
        (module, line.strip())
        for module in _MODULES
        for line in (ROOT / module).read_text(encoding="utf-8").splitlines()
        if pattern.search(line) and not line.strip().startswith("#")
    }
    assert not used
