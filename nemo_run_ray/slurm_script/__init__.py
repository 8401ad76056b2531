"""The script of a Slurm job that starts Ray, and the program that it carries along.

NeMo-Run fills the templates, by their folder and with its own variables. A template cannot read a
file of another folder, so one folder is made with all of them.
"""

from __future__ import annotations

import base64
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_run_ray.slurm_script.program import node_program

#: Names of the templates, which are NeMo-Run's.
TEMPLATES = ("ray.sub.j2", "ray_enroot.sub.j2")
_PARTS = ("ray.sub.j2", "ray_enroot.sub.j2", "renew.sh.j2", "attach.sh.j2")
_HERE = Path(__file__).parent
_LINE_CHARACTERS = 100


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
