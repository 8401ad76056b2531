"""How a program comes to a Ray, and what it is told when it cannot."""

import os
import socket
import sys
from types import SimpleNamespace

import pytest

from nemo_run_ray.errors import ConfigError, Unreachable, VersionMismatch
from nemo_run_ray.work import connection

_MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.54.0
    Python: 3.12.1
This process on node 10.0.0.1 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""


def test_another_version_is_named_with_the_line_to_install_it():
    step = r"Python 3.12.1: pip install 'ray\[default\]==2.54.0'"
    with (
        pytest.raises(VersionMismatch, match=step) as caught,
        connection._translated("10.0.0.1:6379", {}),
    ):
        raise RuntimeError(_MISMATCH)
    assert "version 2.54.0 with Python 3.12.1; this program has 2.60.0" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://ray-head:8265", "is a dashboard's"),
        ("ray-head:8265", "is a dashboard's"),
        ("ray-head", "expected is ip:port"),
        ("ray://ray-head", "expected is ip:port"),
        ("tcp://ray-head:6379", "expected is ip:port"),
        (None, "address of a Ray is 'auto'"),
    ],
)
def test_an_address_that_takes_no_calls_is_refused(monkeypatch, address, words):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match=words):
        connection.join(address, None, {})


@pytest.mark.parametrize(
    ("given", "variable", "found"),
    [
        (None, "", ""),
        (None, "local", ""),
        ("", "10.0.0.1:6379", "10.0.0.1:6379"),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ("auto", "", ""),
        ("auto", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("10.0.0.2:6379", "auto", "10.0.0.2:6379"),
        ("ray://head:10001", "", "ray://head:10001"),
        ("[::1]:6379", "", "[::1]:6379"),
    ],
)
def test_which_ray_is_asked_for(monkeypatch, given, variable, found):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert connection._asked_for(given) == found


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.0.0.1:65536", "ray://127.0.0.1:1", "no-such-host.invalid:6379"]
)
def test_an_address_where_nothing_listens_is_refused(monkeypatch, address):
    """Ray itself would ask for two minutes, and then end the program."""
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray is asked"))
    with pytest.raises(Unreachable, match=f"No Ray can be reached at {address}: "):
        connection.join(address, None, {})
    assert "RAY_ADDRESS" not in os.environ


@pytest.mark.parametrize(
    ("code", "given_up_s", "expected"),
    [(15, 0.0, Unreachable), (15, 30.0, SystemExit), (1, 0.0, SystemExit)],
)
def test_a_program_that_ray_ends_gets_an_error(monkeypatch, code, given_up_s, expected):
    """What listens is no GCS; a program that others end is ended."""
    monkeypatch.setattr(connection, "_GIVEN_UP_S", given_up_s)

    def init(*_, **__):
        raise SystemExit(code)

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(expected) as caught:
        connection.join(f"127.0.0.1:{server.getsockname()[1]}", None, {})
    if expected is Unreachable:
        assert "what listens there has not answered as the GCS" in str(caught.value)
    assert "RAY_ADDRESS" not in os.environ


class Initialised:
    """A ray module whose program has called ``ray.init()`` itself."""

    gcs_address = "10.0.0.1:6379"

    def __init__(self, by_client=False):
        client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: by_client))
        self.util = SimpleNamespace(client=client)

    def is_initialized(self):
        return True

    def get_runtime_context(self):
        return self


@pytest.mark.parametrize(
    ("variable", "submitted"),
    [
        ("10.0.0.2:6379", "10.0.0.1:6379"),
        ("auto", "10.0.0.1:6379"),
        ("ray://10.0.0.1:10001", "ray://10.0.0.1:10001"),
    ],
)
def test_a_program_keeps_the_ray_that_it_has_connected_to(monkeypatch, variable, submitted):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setitem(sys.modules, "ray", Initialised())
    with pytest.raises(ConfigError, match=r"give it to ray\.init\(\)"):
        connection.join(None, None, {"pip": ["x"]})
    joined = connection.join(None, None, {})
    try:
        assert joined.address == "10.0.0.1:6379"
        assert os.environ["RAY_ADDRESS"] == submitted
        with pytest.raises(ConfigError, match=r"time; 10\.0\.0\.9:6379 was asked for"):
            connection.join("10.0.0.9:6379", None, {"env_vars": {"KEY": "secret"}})
        with pytest.raises(
            ConfigError, match=r"another runtime_env \(of env_vars, pip\) was asked"
        ):
            connection.join(None, None, {"env_vars": {"KEY": "secret"}, "pip": ["x"]})
    finally:
        connection.leave(joined)
    assert os.environ["RAY_ADDRESS"] == variable


def test_a_program_that_is_connected_by_ray_client_may_name_its_server(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", Initialised(by_client=True))
    connection.leave(connection.join("ray://10.0.0.1:10001", None, {}))
