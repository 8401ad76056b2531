"""A folder for cluster files, where names are looked for."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def configs(tmp_path, monkeypatch) -> Path:
    """The only folder with cluster files; the tests run in another one."""
    folder = tmp_path / "configs"
    folder.mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("NEMO_RUN_RAY_CONFIG_DIR", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    for name in ("NEMO_SKILLS_CONFIG_DIR", "NEMO_RUN_RAY_CLUSTER", "NEMO_SKILLS_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def write(configs) -> Callable[..., Path]:
    """Write a cluster file; without a name it is team-a.yaml, and one that names no cluster gets
    the embedded Ray in its last line."""

    def put(text: str, name: str = "team-a.yaml", is_whole: bool = False) -> Path:
        path = configs / name
        text = textwrap.dedent(text)
        has_cluster = re.search(r"^(\[?cluster|backend|executor)", text, re.M)
        if not is_whole and not has_cluster and path.suffix != ".toml":
            text = f"{text}\ncluster: {{local: {{}}}}\n"
        path.write_text(text, encoding="utf-8")
        return path

    return put
