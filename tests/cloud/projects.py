"""A project to send: a package of 40 modules with data files below ``src/``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

#: Runs on a pod: imports all there is, and writes down what it found and in which environment.
_MAIN = """
import hashlib, importlib, json, os, sys
from pathlib import Path
import shippable

def report(tag="script"):
    root = Path(shippable.__file__).parent
    seen = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.parent.name != "__pycache__":
            seen.update(path.relative_to(root).as_posix().encode() + b"\\0" + path.read_bytes())
    modules = [importlib.import_module(f"shippable.part{n}") for n in range(40)]
    assert [one.NUMBER for one in modules] == list(range(40))
    folder = Path("/shared/results")
    folder.mkdir(exist_ok=True)
    found = {
        "digest": seen.hexdigest(),
        "left": [name for name in os.environ if "_SRC_" in name],
        "argv": sys.argv[1:],
        "tag": tag,
        "cwd": os.getcwd(),
        "file": shippable.__file__,
        "path": os.environ.get("PYTHONPATH"),
    }
    new = folder / f".{os.environ['HOSTNAME']}.{os.getpid()}"
    new.write_text(json.dumps(found))
    new.rename(folder / f"{os.environ['HOSTNAME']}.json")

if __name__ == "__main__":
    report()
"""


class Project:
    """A folder with ``src/shippable``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "src" / "shippable"
        self.package.mkdir(parents=True)
        (self.package / "__init__.py").write_text("")
        (self.package / "main.py").write_text(_MAIN)
        (self.package / "run.sh").write_text("#!/bin/sh\nexec python src/shippable/main.py $1\n")
        for number in range(40):
            text = f"NUMBER = {number}\n" + f"# {number} and more of the same\n" * (number * 7 % 50)
            (self.package / f"part{number}.py").write_text(text)
        (self.package / "data").mkdir()
        (self.package / "data" / "labels.json").write_text(json.dumps({"a": "\u00e4"}))
        (self.package / "data" / "with space & more.txt").write_text("data\n")

    def digest(self) -> str:
        """What every pod must find."""
        seen = hashlib.sha256()
        for path in sorted(self.package.rglob("*")):
            if path.is_file() and path.parent.name != "__pycache__":
                name = path.relative_to(self.package).as_posix()
                seen.update(name.encode() + b"\0" + path.read_bytes())
        return seen.hexdigest()
