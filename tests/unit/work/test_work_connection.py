"""How a program comes to a Ray, and what it is told when it cannot."""

import os
import subprocess
import sys

import pytest

from nemo_run_ray.errors import ClusterError, ConfigError, Unreachable, VersionMismatch
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
    assert connection._checked(address) == address


_DEAD = """
from nemo_run_ray import work
try:
    work.connect("127.0.0.1:1")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.soak
def test_where_no_ray_answers(home):
    """Ray itself asks for half a minute."""
    env = {**os.environ, "NEMORUN_HOME": str(home)}
    words = [sys.executable, "-c", _DEAD]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    last = done.stdout.splitlines()[-1]
    assert last.startswith(Unreachable.__name__), done.stdout + done.stderr
    assert "127.0.0.1:1" in last
