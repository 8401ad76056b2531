"""How long a worker by an interpreter of a role's own may take to come up."""

import pytest

from nemo_run_ray.remote.group.driver import own_python_s


@pytest.mark.parametrize(
    ("runtime_env", "limit_s"),
    [
        ({"py_executable": "/opt/python"}, 90),
        ({"py_executable": "uv run --with torch"}, 360),
        ({"py_executable": "python -X dev", "pip": ["torch"]}, 960),
        (
            {
                "py_executable": "/opt/python",
                "uv": ["torch"],
                "config": {"setup_timeout_seconds": 1800},
            },
            1890,
        ),
        (
            {
                "py_executable": "/opt/python",
                "conda": "name",
                "config": {"setup_timeout_seconds": -1},
            },
            float("inf"),
        ),
    ],
)
def test_what_is_installed_first_has_its_time(runtime_env, limit_s):
    assert own_python_s(runtime_env) == limit_s
