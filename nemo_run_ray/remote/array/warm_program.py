"""Entry of a process that runs elements of a configuration: ``warm_program.py serve|once …``

The task's interpreter runs this file, so that ``warm.py`` is a module and ``__main__`` is empty:
there NeMo-Run puts what the user's script has defined, and a process that an element starts by
``spawn`` or ``forkserver`` runs the file of ``__main__`` again.
"""

from __future__ import annotations

import os
import sys
import types
from importlib import import_module

#: The name of this package here. No folder of it is put on the task's path.
_NAME = "nemo_run_ray_remote"


def main() -> None:
    package = types.ModuleType(_NAME)
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules[_NAME] = package
    sys.modules["__main__"] = types.ModuleType("__main__")
    warm = import_module(f"{_NAME}.array.warm")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # as ``python -m`` has it, and not the folder of this file
    warm.main(sys.argv)


if __name__ == "__main__":
    main()
