"""Names and paths that break what is not quoted."""

from pathlib import Path

import pytest

#: A file's name that holds all that a shell, a format string or a codec may trip over.
HOSTILE = "a b'c\"d$HOME*\n;#é漢\\%s"


@pytest.fixture
def hostile() -> str:
    return HOSTILE


@pytest.fixture
def weird_tmp_path(tmp_path) -> Path:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    return folder
