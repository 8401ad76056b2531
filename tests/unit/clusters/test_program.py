"""The node program as one file."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

from nemo_run_ray.clusters.slurm.script import node_program

#: Imports from the zip.
_RUN = """
import sys
sys.path.insert(0, sys.argv[1])
for words in sys.argv[2:]:
    package, statement = words.split(":")
    exec(statement, {"__package__": package, "__name__": package + ".test"})
"""


def test_every_module_of_a_node_finds_what_it_imports(tmp_path):
    """Also inside of functions."""
    zipped, statements = tmp_path / "node.pyz", []
    zipped.write_bytes(node_program())
    with zipfile.ZipFile(zipped) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    for name, text in files.items():
        folder = Path(name).parent
        if folder.name in ("slurm", "node"):
            statements += [
                f"{'.'.join(folder.parts)}:{ast.unparse(one)}"
                for one in ast.walk(ast.parse(text))
                if isinstance(one, ast.ImportFrom) and one.level
            ]
    assert "nemo_run_ray_remote.slurm:from .head import Head" in statements
    words = [sys.executable, "-I", "-S", "-c", _RUN, str(zipped), *statements]
    done = subprocess.run(words, capture_output=True, text=True, env={}, check=False)
    assert done.returncode == 0, done.stderr
    words = [sys.executable, "-I", "-S", "-X", "importtime", str(zipped)]
    begun = subprocess.run(words, capture_output=True, text=True, env={}, check=False)
    assert begun.returncode == 2, begun.stderr
    assert " http.client" not in begun.stderr, "it takes a third of a worker's start"
