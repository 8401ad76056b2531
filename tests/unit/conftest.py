"""Names and paths that break what is not quoted, and a simulated Ray."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_ray import FakeRay, fake_ray

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


@pytest.fixture
def no_token(monkeypatch) -> None:
    """In the environment, which names no Ray either."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def user_home(no_token, monkeypatch, tmp_path) -> Path:
    """A home without a token."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def ray(no_token) -> Iterator[FakeRay]:
    with fake_ray(now=time.time()) as found:
        yield found
