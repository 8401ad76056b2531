"""As in many containers: a user id without a name, and a home that is not the user's own."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_for

UID = 12345
#: It may read everything, since this environment's Python may lie in the home of root; it may
#: write where any such user may.
_AS_ANOTHER = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
_AS_ANOTHER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
_PROGRAM = """
import nemo_run as run
from nemo_run_ray import RayExecutor

if __name__ == "__main__":
    task = run.Script(inline="id -u; echo home $HOME")
    run.run(task, executor=RayExecutor(), name="other", tail_logs=True)
"""


@pytest.fixture
def folder(tmp_path):
    """The user's, in a place that he can reach."""
    folder = Path(f"/tmp/nrr-user-{tmp_path.name}-{os.getpid()}")
    folder.mkdir()
    (folder / "program.py").write_text(_PROGRAM)
    for path in (folder, folder / "program.py"):
        os.chown(path, UID, UID)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.soak
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_embedded_ray_of_another_user(folder, local_cluster):
    """Beside root's own, and beside a Ray whose client server has the default port."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"HOME": "/usr", "NEMORUN_HOME": str(folder / "nemo"), "TMPDIR": "/tmp"}
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 10001))
            taken.listen()
        except OSError:
            pass  # another Ray has it, which is what is wanted
        done = subprocess.run(
            [*_AS_ANOTHER, sys.executable, "program.py"],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    tail = [line.split("/0 ")[-1] for line in done.stdout.splitlines() if "other/0" in line]
    assert [line.removeprefix("\x1b[0m") for line in tail] == [str(UID), "home /usr"]
    assert "HTTP Request" not in done.stdout + done.stderr, "of a whole life of an embedded Ray"
    assert not list(folder.glob("nemo/ray_local/*/state.json")), "the last user stops it"
    folders = Path("/tmp").glob
    wait_for(lambda: not [one for one in folders("nray-*") if one.stat().st_uid == UID])
