"""Why a runtime environment is not built: texts as Ray 2.60 writes them, shortened."""

import pytest

from nemo_run_ray.remote.status import Reason, cause_of, status_of_row

_TRACEBACK = """\
Traceback (most recent call last):
  File "/v/ray/_private/runtime_env/pip.py", line 276, in _run
    await self._install_pip_packages(
ray._private.runtime_env.utils.SubprocessCalledProcessError: Run cmd[13] failed with the following \
details.
Command '['/tmp/v/bin/python', '-m', 'pip']' returned non-zero exit status 1.
Last 50 lines of stdout:
"""
_PIP = f"""{_TRACEBACK}\
    Looking in indexes: https://example.org/simple
    WARNING: Location '/none' is ignored
    ERROR: Could not find a version that satisfies the requirement nope (from versions: none)
    ERROR: No matching distribution found for nope
"""
_UV = f"""{_TRACEBACK}\
    Using Python 3.11.7 environment at: /tmp/v
    error: No solution found when resolving dependencies
      cause: Because nope was not found in the package registry and you require nope, we can \
conclude that your requirements are unsatisfiable.
"""
_CONDA = """\
[Node 10.0.0.1] Traceback (most recent call last):
  File "/v/ray/_private/runtime_env/conda.py", line 340, in _create
    conda_info = get_conda_info_json()
ValueError: Could not find Conda executable at conda.
"""
_PODMAN = """\
Traceback (most recent call last):
RuntimeError: Podman command failed: cmd=['podman'], returncode=125, stdout=, stderr=Error: \
initializing source: name unknown
"""
_NO_PODMAN = """\
Traceback (most recent call last):
  File "/v/ray/_private/runtime_env/image_uri.py", line 38, in _create_impl
    process = await asyncio.create_subprocess_exec(
FileNotFoundError: [Errno 2] No such file or directory: 'podman'
"""
_NSIGHT = """\
[Node 10.0.0.1] Traceback (most recent call last):
  File "/v/ray/_private/runtime_env/nsight.py", line 120, in create
    raise RuntimeEnvSetupError(
ray.exceptions.RuntimeEnvSetupError: Failed to set up runtime environment.
Unsupported nsight config: defaul. The supported config is 'default' or Dictionary of nsight options
"""
_USAGE = f"""{_TRACEBACK}\
    Usage:
      /tmp/v/bin/python -m pip install [options] <archive url/path> ...

    no such option: --nope
"""
_STILL_SLOW = (
    'Traceback (most recent call last):\n  File "/p/asyncio/tasks.py", line 502, in wait_for\n'
    "    raise exceptions.TimeoutError() from exc\nTimeoutError\n"
)
_SLOW = (
    "Failed to install runtime_env within the timeout of 60 seconds. Consider increasing the "
    "timeout in the runtime_env config. For example:\n"
    '    runtime_env={"config": {"setup_timeout_seconds": 1800}, ...}\n'
    "Traceback (most recent call last):\nTimeoutError\n"
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (_PIP, "No matching distribution found for nope"),
        (_UV, "No solution found when resolving dependencies / cause: Because nope was not"),
        (_CONDA, "ValueError: Could not find Conda executable at conda."),
        (_PODMAN, "Error: initializing source: name unknown"),
        (_NO_PODMAN, "podman is not on the PATH of that node's Ray; an image needs it"),
        (_NSIGHT, "Unsupported nsight config: defaul. The supported config is 'default' or"),
        (_SLOW, "Failed to install runtime_env within the timeout of 60 seconds; raise `setup_t"),
        (f"[Node 10.0.0.1] {_SLOW}", "Failed to install runtime_env within the timeout of 60 s"),
        (_STILL_SLOW, "TimeoutError; raise `setup_timeout_seconds` in its `config`"),
        (_USAGE, "no such option: --nope"),
        (f"{_TRACEBACK}    a strange tool\n    gave up\n", "a strange tool / gave up"),
        (
            f"{_TRACEBACK}    /v/bin/python: No module named pip\n",
            "/v/bin/python: No module named pip",
        ),
        ("", ""),
    ],
)
def test_the_cause_comes_in_the_words_of_who_failed(text, cause):
    found = cause_of(text)
    assert cause in found
    assert "Traceback" not in found
    assert "RuntimeEnvSetupError" not in found
    assert "returned non-zero exit status" not in found
    assert "\n" not in found


def test_a_failed_job_says_the_cause_first():
    row = {"status": "FAILED", "error_type": "RUNTIME_ENV_SETUP_FAILURE", "message": _PIP}
    status = status_of_row(row)
    assert status.reason is Reason.RUNTIME_ENV
    assert status.detail == (
        "the runtime environment could not be built: No matching distribution found for nope"
    )
