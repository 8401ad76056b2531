"""Why a runtime environment is not built: texts as Ray 2.60 writes them, shortened."""

import json
import time

import pytest

from nemo_run_ray.dashboard.why_building import EnvBuilds, failures
from nemo_run_ray.errors import Unanswered
from nemo_run_ray.remote.env_error import cause_of
from nemo_run_ray.remote.states import JobState, JobStatus, Reason, status_of_row

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
_OLD_UV = f"""{_TRACEBACK}\
      \N{MULTIPLICATION SIGN} No solution found when resolving dependencies:
      ╰─▶ Because nope was not found in the package registry and you require nope,
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
_CLONE = f"""{_TRACEBACK}\
    Usage: _clonevirtualenv.py [options] /path/to/existing/venv /path/to/cloned/venv

    _clonevirtualenv.py: error: dest dir '/tmp/v' exists
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
        (_UV, "No solution found when resolving dependencies Because nope was not found"),
        (_OLD_UV, "No solution found when resolving dependencies: Because nope was not found"),
        (_CONDA, "ValueError: Could not find Conda executable at conda."),
        (_PODMAN, "Error: initializing source: name unknown"),
        (_NO_PODMAN, "podman is not on the PATH of that node's Ray; an image needs it"),
        (_NSIGHT, "Unsupported nsight config: defaul. The supported config is 'default' or"),
        (_SLOW, "Failed to install runtime_env within the timeout of 60 seconds; raise `setup_t"),
        (f"[Node 10.0.0.1] {_SLOW}", "Failed to install runtime_env within the timeout of 60 s"),
        (_STILL_SLOW, "it took too long; raise `setup_timeout_seconds` in its `config`"),
        (_USAGE, "no such option: --nope"),
        (_CLONE, "_clonevirtualenv.py: error: dest dir '/tmp/v' exists"),
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


# ---------------------------------------------------------------------- while Ray tries

_MODULES = ["gcs://_ray_pkg_1.zip"]
#: As they are posted: of two jobs of one experiment, which share an archive, and of another one.
_OURS = {"pip": ["nope"], "py_modules": _MODULES}
_OTHERS = {"pip": ["fine"], "py_modules": _MODULES}
_STRANGERS = {"pip": ["nope"], "py_modules": ["gcs://_ray_pkg_2.zip"]}


def _entry(level: str, text: str) -> str:
    return f"2026-11-22 05:32:30,268\t{level} runtime_env_agent.py:543 -- {text}\n"


def _as_ray_writes_it(env: dict) -> dict:
    packages = {"packages": env["pip"], "pip_check": False}
    return {**env, "pip": packages, "env_vars": {"RAY_worker_niceness": "0"}}


def _begins(given: dict) -> str:
    env = json.dumps(_as_ray_writes_it(given))
    return _entry("INFO", f"Creating runtime env: {env} with timeout 600 seconds.")


def _fails(given: dict, text: str = _PIP) -> str:
    env = json.dumps(_as_ray_writes_it(given))
    return _entry("ERROR", f"Failed to create runtime env {env}.") + text


def _builds_it(given: dict) -> str:
    env = json.dumps(_as_ray_writes_it(given))
    return _entry("INFO", f"Successfully created runtime env: {env}, context: {{}}")


_OTHER_ENTRY = _entry("INFO", "Got request from 1 to increase reference")


@pytest.mark.parametrize(
    ("log", "count"),
    [
        ("", 0),
        (_begins(_OURS), 0),
        (_begins(_OURS) + _fails(_OURS), 1),
        (_begins(_OURS) + _fails(_OURS) + _fails(_OURS) + _OTHER_ENTRY, 2),
        (_fails(_OURS), 1),  # the beginning lies before the part that was read
        (_begins(_OTHERS) + _fails(_OTHERS), 0),
        (_begins(_STRANGERS) + _fails(_STRANGERS), 0),
        (_begins(_OURS) + _fails(_OTHERS, _CONDA) + _fails(_OURS), 1),
        (_begins(_OURS) + _fails(_OURS) + _begins(_OURS), 0),  # of an earlier job
        (_entry("ERROR", "Failed to create runtime env {not json}."), 0),
    ],
)
def test_failures_of_one_environment_are_counted(log, count):
    assert failures(log, _OURS) == ["No matching distribution found for nope"] * count


_ROW = {"status": "PENDING", "runtime_env": _OURS}
_PENDING = JobStatus(JobState.PENDING)


def _builds(log: str, success: bool | None = None) -> tuple[EnvBuilds, list[str]]:
    asked: list[str] = []
    listed = {
        "runtime_env": _as_ray_writes_it(_OURS),
        "success": success,
        "node_id": "a" * 56,
    }

    def environments():
        asked.append("environments")
        others = [_as_ray_writes_it(one) for one in (_OTHERS, _STRANGERS)]
        return [*({**listed, "runtime_env": one, "node_id": "b"} for one in others), listed]

    def agent_log(node):
        asked.append(node)
        return log

    return EnvBuilds(environments, agent_log, lambda: ["a" * 56]), asked


def test_a_build_that_goes_on():
    builds, _ = _builds(_begins(_OURS))
    status = builds.explain(_ROW, _PENDING)
    assert (status.state, status.reason) == (JobState.PENDING, Reason.BUILDING)
    assert not status.reason.is_trouble


def test_a_build_that_is_tried_again():
    builds, _ = _builds(_begins(_OURS) + _fails(_OURS) * 2)
    status = builds.explain(_ROW, _PENDING)
    assert (status.state, status.reason) == (JobState.PENDING, Reason.REBUILDING)
    assert status.detail == (
        "Ray failed 2 times to build its runtime environment on node aaaaaaaaaaaa: No matching "
        "distribution found for nope"
    )


def test_the_last_try_is_not_told_as_one_of_several():
    """The embedded Ray builds once; and what Ray lists as failed is not tried again anywhere."""
    log = _begins(_OURS) + _fails(_OURS)
    row = {"runtime_env": _as_ray_writes_it(_OURS), "success": None, "node_id": "a" * 56}
    once = EnvBuilds(lambda: [row], lambda _: log, list, tries=1)
    assert once.explain(_ROW, _PENDING).reason is Reason.RUNTIME_ENV
    failed = EnvBuilds(lambda: [row | {"success": False}], lambda _: log, list)
    status = failed.explain(_ROW, _PENDING)
    assert (status.state, status.reason) == (JobState.PENDING, Reason.RUNTIME_ENV)


def test_nothing_is_asked_for_a_job_that_builds_nothing():
    builds, asked = _builds("")
    running = JobStatus(JobState.RUNNING)
    plain = {"status": "PENDING", "runtime_env": {"py_modules": _MODULES}}
    assert builds.explain(_ROW, running) is running
    assert builds.explain(plain, _PENDING) is _PENDING
    assert builds.explain({"status": "PENDING"}, _PENDING) is _PENDING
    assert asked == []


def test_a_failure_of_another_job_of_the_experiment_is_not_its_own():
    builds, _ = _builds(_begins(_OURS) + _fails(_OURS))
    row = {"status": "PENDING", "runtime_env": _OTHERS}
    assert builds.explain(row, _PENDING).reason is Reason.BUILDING


def test_an_environment_that_is_built_explains_nothing():
    builds, _ = _builds("", success=True)
    assert builds.explain(_ROW, _PENDING) is _PENDING


def test_a_thousand_jobs_cost_two_requests():
    builds, asked = _builds(_begins(_OURS))
    for _ in range(1000):
        assert builds.explain(_ROW, _PENDING).reason is Reason.BUILDING
    assert asked == ["environments", "a" * 56]


def test_a_state_api_that_does_not_answer_changes_nothing():
    asked = []

    def environments():
        asked.append(1)
        raise Unanswered("no answer")

    builds = EnvBuilds(environments, lambda node: pytest.fail("asked"), list)
    for _ in range(3):
        assert builds.explain(_ROW, _PENDING) is _PENDING
    assert len(asked) == 1


def test_a_build_is_told_of_while_its_node_does_not_answer():
    """Ray leaves the builds of a node out whose agent does not answer (it copies its Python)."""
    log = _begins(_OURS) + _fails(_OURS)
    listed = [{"runtime_env": _as_ray_writes_it(_OURS), "success": None, "node_id": "a" * 56}]
    answers = [listed, [], Unanswered("no answer"), listed]

    def environments():
        answer = answers.pop(0)
        if isinstance(answer, Unanswered):
            raise answer
        return answer

    builds = EnvBuilds(environments, lambda _: log, list)
    told = set()
    while answers:
        told.add(builds.explain(_ROW, _PENDING).reason)
        builds._environments._answers[""].ask_at = 0.0
    assert told == {Reason.REBUILDING}


def test_a_build_that_is_not_listed_for_long_is_over(monkeypatch):
    builds, _ = _builds(_begins(_OURS))
    assert builds.explain(_ROW, _PENDING).reason is Reason.BUILDING
    now = time.monotonic()
    monkeypatch.setattr(builds._environments, "_ask", lambda _: [])
    monkeypatch.setattr(builds._agent_log, "_ask", lambda _: _begins(_OURS) + _builds_it(_OURS))
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert builds.explain(_ROW, _PENDING) is _PENDING


@pytest.mark.parametrize("silence", ["empty", "none"])
def test_a_fresh_process_reads_the_logs_while_ray_does_not_list_builds(silence):
    """Other nodes' logs do not tell of it; the head's comes first."""

    def environments():
        if silence == "none":
            raise Unanswered("504")
        return []

    logs = {"head": _begins(_OURS) + _fails(_OURS), "other": ""}
    builds = EnvBuilds(environments, logs.__getitem__, lambda: ["other", "head"])
    status = builds.explain(_ROW, _PENDING)
    assert (status.reason, status.state) == (Reason.REBUILDING, JobState.PENDING)
    assert status.detail.startswith("Ray failed once to build its runtime environment on node head")
    logs["head"] += _builds_it(_OURS)
    fresh = EnvBuilds(environments, logs.__getitem__, lambda: ["other", "head"])
    assert fresh.explain(_ROW, _PENDING) is _PENDING


def test_a_build_that_failed_for_good_is_told_of_until_the_job_has_failed():
    """Ray's table of jobs has it some seconds later."""
    builds, _ = _builds(_begins(_OURS) + _fails(_OURS) * 3, success=False)
    status = builds.explain(_ROW, _PENDING)
    assert status.reason is Reason.RUNTIME_ENV
    assert "failed 3 times" in status.detail
