"""The program for every node, as one file that Python runs.

It has the modules that the program imports, and no others of ``remote``. What each worker imports
is there as byte code too: a zip is no place where Python keeps what it has compiled, so every node
would compile it again, which is 40 % of what the program's start costs a processor. A Python of
another version than the client's does not know that byte code and reads the sources.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import marshal
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nemo_run_ray import remote

_ROOT = Path(remote.__file__).parent
_ENTRY, _WORKER = "slurm/__main__.py", "slurm/worker.py"
#: Zip knows no earlier day; a fixed one keeps equal programs equal.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_PACKAGE = "nemo_run_ray_remote"
_MAIN = f"""\
import sys
if sys.version_info < (3, 9):
    sys.exit("nemo_run_ray| Python %d.%d runs the node program; it needs 3.9 or newer: set "
             "NEMO_RUN_RAY_PYTHON" % sys.version_info[:2])
from {_PACKAGE}.slurm.__main__ import main
sys.exit(main())
"""
#: In the head of a file with byte code (PEP 552): it is not compared with the source.
_UNCHECKED = (1).to_bytes(4, "little")
#: Since version 3 what marshal writes depends on how often an object is referred to.
_MARSHAL = 2


@cache
def node_program() -> bytes:
    """The zip: the same bytes from the same sources and the same version of Python."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        for name in _needed([_ENTRY], everywhere=True):
            _add(archive, f"{_PACKAGE}/{name}", _source(name))
        for name in _needed([_ENTRY, _WORKER], everywhere=False):
            _add(archive, f"{_PACKAGE}/{name}c", _byte_code(name))
    return buffer.getvalue()


def _needed(names: list[str], *, everywhere: bool) -> list[str]:
    """These modules and all that they import: also inside of functions, or when they are loaded."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found and (_ROOT / name).is_file():
            found.add(name)
            names += _imports(name, everywhere)
    return sorted(found)


def _imports(name: str, everywhere: bool) -> Iterator[str]:
    """The files that this one's imports may mean, of which not all exist."""
    tree = ast.parse(_source(name))
    for statement in ast.walk(tree) if everywhere else tree.body:
        if not isinstance(statement, ast.ImportFrom) or not statement.level:
            continue
        folder = Path(name).parents[statement.level - 1]
        module = folder.joinpath(*(statement.module or "").split("."))
        for path in (module, *(module / alias.name for alias in statement.names)):
            yield f"{path.as_posix()}.py"
        yield from ((parent / "__init__.py").as_posix() for parent in (module, *module.parents))


def _source(name: str) -> bytes:
    return (_ROOT / name).read_bytes()


def _byte_code(name: str) -> bytes:
    """The module as a file with byte code, which names it by its place in the zip."""
    source = _source(name)
    code = compile(source, f"{_PACKAGE}/{name}", "exec", dont_inherit=True)
    head = importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source)
    return head + marshal.dumps(code, _MARSHAL)


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)
