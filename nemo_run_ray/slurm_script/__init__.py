"""The script of a Slurm job that starts Ray, and the program that it carries along.

NeMo-Run fills the templates, by their folder and with its own variables. A template cannot read a
file of another folder, so one folder is made with all of them.
"""

from __future__ import annotations

import base64
import io
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from nemo_run_ray import remote

#: Names of the templates, which are NeMo-Run's.
TEMPLATES = ("ray.sub.j2", "ray_enroot.sub.j2")
_PARTS = ("ray.sub.j2", "ray_enroot.sub.j2", "renew.sh.j2", "attach.sh.j2")
_HERE = Path(__file__).parent
#: What the node program needs of ``remote``.
_FOLDERS = ("slurm", "node")
#: Zip knows no earlier day; a fixed one keeps equal programs equal.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_PACKAGE = "nemo_run_ray_remote"
_LINE_CHARACTERS = 100
_MAIN = f"""\
import sys
if sys.version_info < (3, 9):
    sys.exit("nemo_run_ray| Python %d.%d runs the node program; it needs 3.9 or newer: set "
             "NEMO_RUN_RAY_PYTHON" % sys.version_info[:2])
from {_PACKAGE}.slurm.__main__ import main
sys.exit(main())
"""


@contextmanager
def template_folder() -> Iterator[str]:
    """A folder with the templates and the program, while NeMo-Run fills them."""
    with tempfile.TemporaryDirectory(prefix="nemo-run-ray-") as folder:
        for name in _PARTS:
            shutil.copy(_HERE / name, folder)
        text = base64.b64encode(node_program()).decode()
        lines = range(0, len(text), _LINE_CHARACTERS)
        encoded = "\n".join(text[start : start + _LINE_CHARACTERS] for start in lines)
        Path(folder, "node.pyz.b64").write_text(encoded, encoding="ascii")
        yield folder


@cache
def node_program() -> bytes:
    """The program for every node, as a zip that Python runs."""
    root = Path(remote.__file__).parent
    files = [*sorted(root.glob("*.py"))]
    for folder in _FOLDERS:
        files += sorted((root / folder).glob("*.py"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        for file in files:
            _add(archive, f"{_PACKAGE}/{file.relative_to(root).as_posix()}", file.read_bytes())
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)
