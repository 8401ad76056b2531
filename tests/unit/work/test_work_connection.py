"""How a program comes to a Ray, and what it is told when it cannot."""

import os

import pytest

from nemo_run_ray.errors import ClusterError, ConfigError, Unreachable, VersionMismatch
from nemo_run_ray.work import address as address_of
from nemo_run_ray.work import connection

_MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.54.0
    Python: {python}
This process on node 10.0.0.1 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""


@pytest.mark.parametrize(
    ("python", "step"),
    [
        ("3.11.7", r"Install it here: pip install 'ray\[default\]==2.54.0'"),
        ("3.12.1", r"Make an environment with Python 3.12.1 here, and in it: pip install 'ray"),
    ],
)
def test_another_version_is_named_with_the_line_to_install_it(python, step):
    with (
        pytest.raises(VersionMismatch, match=step) as caught,
        connection._translated("10.0.0.1:6379"),
    ):
        raise RuntimeError(_MISMATCH.format(python=python))
    assert f"version 2.54.0 with Python {python}; this program has 2.60.0" in str(caught.value)


def test_a_sandbox_is_named():
    words = "[Errno 1] Operation not permitted (originated from sysctl())"
    with (
        pytest.raises(ClusterError, match="outside of the sandbox"),
        connection._translated("the embedded Ray"),
    ):
        raise PermissionError(words)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://ray-head:8265", "is the address of a dashboard"),
        ("ray-head", "expected is ip:port"),
        ("ray://ray-head", "expected is ip:port"),
        ("tcp://ray-head:6379", "expected is ip:port"),
    ],
)
def test_an_address_that_takes_no_calls_is_refused(address, words):
    with pytest.raises(ConfigError, match=words):
        connection.join(address, None, {})


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "ray://head:10001", "[::1]:6379", ""])
def test_addresses_that_are_taken(address):
    assert address_of.asked_for(address) == address


@pytest.mark.parametrize(
    ("given", "variable", "found"),
    [
        (None, "", ""),
        (None, "local", ""),
        (None, "auto", "auto"),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ("auto", "", "auto"),
        ("auto", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2:6379"),
    ],
)
def test_which_ray_is_asked_for(monkeypatch, given, variable, found):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert address_of.asked_for(given) == found


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "ray://127.0.0.1:1", "no-such-host.invalid:6379"]
)
def test_where_nothing_listens(address):
    """Ray itself would ask for two minutes, and then end the program."""
    with pytest.raises(Unreachable, match=f"No Ray can be reached at {address}: "):
        connection.join(address, None, {})
    assert "RAY_ADDRESS" not in os.environ


def test_a_ray_that_ray_gives_up():
    with (
        pytest.raises(Unreachable, match=r"at 10\.0\.0\.1:6379"),
        connection._translated("10.0.0.1:6379"),
    ):
        raise SystemExit(15)


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        ("import time; time.sleep(60)", Unreachable, "has not answered within 1 s"),
        ("raise ConnectionError('Could not find any running Ray')", Unreachable, "Could not find"),
        ("import os; os._exit(15)", Unreachable, "Ray has said nothing"),
        (
            f"raise RuntimeError({_MISMATCH.format(python='3.12.1')!r})",
            VersionMismatch,
            "2.54.0 with Python 3.12.1",
        ),
    ],
)
def test_a_search_that_finds_no_ray(monkeypatch, program, error, words):
    monkeypatch.setattr(address_of, "_SEARCH", program)
    monkeypatch.setattr(address_of, "_SEARCH_S", 1.0 if "sleep" in program else 60.0)
    with pytest.raises(error, match=words):
        connection.join("auto", None, {})
