"""One home and one Ray for all tests of a process; unique names keep them apart."""

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import NodeManager

# Read by NeMo-Run when it is imported. A Ray worker that imports a test's function has its home.
_MARK = f"nrr-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-"
_HOME = os.environ.get("NEMORUN_HOME", "")
if _MARK not in _HOME:
    _HOME = tempfile.mkdtemp(prefix=_MARK)
    # Registered before anything that leaves the embedded Ray at the end, and so done after it.
    atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["NEMORUN_HOME"] = _HOME
#: Folders for programs of single tests: an embedded Ray has the environment of its start.
BIN, CONDA = Path(_HOME, "bin"), Path(_HOME, "conda")
os.environ["PATH"] = os.pathsep.join([str(BIN), os.environ["PATH"]])
os.environ["RAY_CONDA_HOME"] = str(CONDA)
# Once is our own choice for an embedded Ray. Another Ray tries three times, and each takes 20 s.
os.environ["RUNTIME_ENV_RETRY_TIMES"] = "2"
# What Ray tells of its processes' memory is not looked at so closely here, and costs time: 5000.
os.environ["REPORTER_UPDATE_INTERVAL_MS"] = "15000"
# Ray starts a worker for each CPU beside the first job, and no job of these tests takes one, as it
# has a runtime environment of its own. They are a fifth of what a start costs (2 of 10 s of a CPU).
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 Ray spells it so
for _name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
    os.environ.pop(_name, None)

import nemo_run as run  # noqa: E402
from nemo_run.run import experiment  # noqa: E402

from nemo_run_ray import RayExecutor, patches  # noqa: E402
from nemo_run_ray.errors import NemoRunRayError  # noqa: E402
from nemo_run_ray.remote.node.supervise import TAG  # noqa: E402
from tests import warm  # noqa: E402

# The machines differ, and a limit on an example's time would fail at their whim.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# A process that ends its Ray and removes its home may need more than 10 s for it beside others, and
# pytest-xdist would kill it then. It has no option for this.
assert NodeManager.EXIT_TIMEOUT, "pytest-xdist has another name for it"
NodeManager.EXIT_TIMEOUT = 120
ROOT = Path(__file__).resolve().parent.parent
_T = TypeVar("_T")
#: Folders whose tests share what takes long to start: hosts with a Ray, a Slurm, an embedded Ray.
_ONCE = {"hosts", "slurm", "examples"}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI a skipped test is a test that is missing."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"


def pytest_collection_modifyitems(config, items) -> None:
    """Soak tests run when they are asked for."""
    if not config.getoption("-m"):
        items[:] = [item for item in items if item.get_closest_marker("soak") is None]


class ByCluster(LoadScopeScheduling):
    """A file is run by one process, and so are all that need what there is once.

    Every process has a home of its own, and in it an embedded Ray. This is not done by
    pytest-xdist's own groups, whose names pytest 9.2 does not let it add to the tests'.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folder = path.split("/")[1]
        return folder if folder in _ONCE else path


def pytest_xdist_make_scheduler(config, log) -> ByCluster:
    return ByCluster(config, log)


@pytest.fixture(scope="session")
def home() -> Path:
    return Path(_HOME)


@pytest.fixture(scope="session", autouse=True)
def handlers_that_stay() -> Iterator[None]:
    """An ``Experiment`` that is collected takes the first handler of the root logger.

    That is pytest's, and the test that runs just then finds nothing in ``caplog``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "deconfigure_logging", lambda: None)
        yield


@pytest.fixture(autouse=True)
def no_input(monkeypatch) -> Iterator[None]:
    """As in CI. NeMo-Run's packagers read it, and pytest's stand-in refuses that."""
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


@pytest.fixture
def unique() -> str:
    """A name that no other test has."""
    return f"t{uuid.uuid4().hex[:10]}"


@contextlib.contextmanager
def patched(name: str) -> Iterator[None]:
    """With a patch of NeMo-Run, which is undone at the end."""
    undo = patches.apply(name)
    try:
        yield
    finally:
        assert undo()


def wait_for(question: Callable[[], _T], within_s: float = 60) -> _T:
    began = time.monotonic()
    deadline = began + within_s
    while True:
        answer = question()
        if answer:
            return answer
        if time.monotonic() > deadline:
            pytest.fail(f"not true within {within_s} s; the last answer was {answer!r}")
        # What takes long is not asked so often: an answer costs processor time of Ray's too.
        time.sleep(0.1 if time.monotonic() < began + 2 else 0.5)


def python(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run this environment's Python and capture what it prints."""
    options = {"capture_output": True, "text": True, "timeout": 180, **options}
    return subprocess.run([sys.executable, *arguments], **options)


def tool(name: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    """Run a command of this environment, such as ``nemo``."""
    options = {"env": os.environ, "cwd": os.getcwd(), "timeout": 180, **options}
    is_plain = options.keys() == {"env", "cwd", "timeout"}
    if name in ("nemo", "nemo-run-ray") and is_plain and warm.suffices(options["env"]):
        return warm.run(name, *arguments, **options)
    options = {"capture_output": True, "text": True, **options}
    return subprocess.run([str(Path(sys.executable).parent / name), *arguments], **options)


TRUE = run.Script(inline="true")


def refused(
    kind: type[NemoRunRayError], executor: RayExecutor, name: str, script: run.Script = TRUE
) -> str:
    """The error of a run: one paragraph, within seconds."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        run.run(script, executor=executor, name=name)
    assert time.monotonic() - began < 45
    message = str(caught.value)
    assert "\n\n" not in message
    assert "Traceback" not in message
    return message


def processes_where(wanted: Callable[[int, list[str]], bool]) -> list[int]:
    """The processes on this machine for which this holds of their id and their words."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            text = (folder / "cmdline").read_text() if folder.name.isdigit() else ""
            if text and wanted(int(folder.name), text.split("\0")):
                found.append(int(folder.name))
        except (OSError, UnicodeDecodeError):
            continue  # it ended while we looked, or is another user's
    return found


def processes_of_home(wanted: Callable[[int, list[str]], bool]) -> list[int]:
    """Those that the embedded Ray of this test process has started.

    They have its environment, which names the home of this test process. Other test processes have
    a Ray of their own on this machine at the same time.
    """
    mark = f"NEMORUN_HOME={_HOME}\0".encode()

    def is_ours(pid: int, words: list[str]) -> bool:
        return mark in Path(f"/proc/{pid}/environ").read_bytes() and wanted(pid, words)

    return processes_where(is_ours)


def processes_with(mark: str) -> list[int]:
    """The processes on this machine that have a text in their environment."""
    text = mark.encode()
    return processes_where(lambda pid, _: text in Path(f"/proc/{pid}/environ").read_bytes())


def processes_of(submission_id: str) -> list[int]:
    """Those that belong to a job's command."""
    return processes_with(f"{TAG}={submission_id}/")


def files_with(value: str, folder: Path) -> list[str]:
    """The files below a folder that hold a text."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if value.encode() in path.read_bytes()]
