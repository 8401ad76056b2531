"""What the processes on a node need: the package as an actor has it, and a look at what is left."""

import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nemo_run_ray
from tests.relays import holding


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with the remote half, without the rest of the package."""
    folder = tmp_path_factory.mktemp("remote")
    source = Path(nemo_run_ray.__file__).parent / "remote"
    shutil.copytree(
        source, folder / "nemo_run_ray_remote", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


@pytest.fixture(scope="module")
def relays(package) -> Iterator[ModuleType]:
    """The relay's module, as an actor imports it."""
    sys.path.append(str(package))
    yield importlib.import_module("nemo_run_ray_remote.hosts.relay")
    sys.path.remove(str(package))
    for name in [one for one in sys.modules if one.startswith("nemo_run_ray_remote")]:
        del sys.modules[name]


@pytest.fixture
def tag() -> Iterator[str]:
    """In the environment or the command line of all that a test starts; it leaves none of them."""
    text = f"t{uuid.uuid4().hex}"
    yield text
    deadline = time.monotonic() + 5  # a replica's guard ends a moment after it
    while (left := holding(text)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left are {left}"


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The node's folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder
