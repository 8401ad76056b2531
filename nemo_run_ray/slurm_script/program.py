"""The program for every node, as one file that Python runs: the modules that it needs, in a zip."""

from __future__ import annotations

import ast
import io
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nemo_run_ray import remote

_ROOT = Path(remote.__file__).parent
#: What the zip's own entry imports.
_ENTRIES = ("slurm/__main__.py", "slurm/byte_code.py")
#: Zip knows no earlier day; a fixed one keeps equal programs equal.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_PACKAGE = "nemo_run_ray_remote"
# Python's own zipimporter compiles a module to learn the name of its file, and again to run it,
# which is a quarter of what the start of a node's program costs a processor.
_MAIN = f"""\
import gc
import sys
import zipimport

gc.disable()  # no garbage comes of imports, and to look for it takes a tenth of their time

if sys.version_info < (3, 9):
    sys.exit("nemo_run_ray| Python %d.%d runs the node program; it needs 3.9 or newer: set "
             "NEMO_RUN_RAY_PYTHON" % sys.version_info[:2])


class Importer(zipimport.zipimporter):
    def get_filename(self, name):
        end = "/__init__.py" if self.is_package(name) else ".py"
        return self.archive + "/" + self.prefix + name.rpartition(".")[2] + end


sys.path_hooks.insert(0, Importer)
sys.path_importer_cache.clear()

if sys.argv[1:] == ["--compile"]:
    from {_PACKAGE}.slurm.byte_code import add_byte_code

    sys.exit(add_byte_code(sys.argv[0]))

from {_PACKAGE}.slurm.__main__ import main

gc.freeze()
gc.enable()
sys.exit(main())
"""


@cache
def node_program() -> bytes:
    """The zip, with the program's entry and all modules of ``remote`` that it may import."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        for name in _needed(*_ENTRIES):
            _add(archive, f"{_PACKAGE}/{name}", (_ROOT / name).read_bytes())
    return buffer.getvalue()


def _needed(*entries: str) -> list[str]:
    """The files of some modules and of all that they import, also inside of functions."""
    found: set[str] = set()
    wanted = [*entries]
    while wanted:
        name = wanted.pop()
        if name not in found and (_ROOT / name).is_file():
            found.add(name)
            wanted += _imports(name)
    return sorted(found)


def _imports(name: str) -> Iterator[str]:
    """The files that this one's imports may mean, of which not all exist."""
    for statement in ast.walk(ast.parse((_ROOT / name).read_bytes())):
        if isinstance(statement, ast.ImportFrom) and statement.level:
            folder = Path(name).parents[statement.level - 1]
            module = folder.joinpath(*(statement.module or "").split("."))
            for path in (module, *(module / alias.name for alias in statement.names)):
                yield f"{path.as_posix()}.py"
            for package in (module, *module.parents):
                yield (package / "__init__.py").as_posix()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)
