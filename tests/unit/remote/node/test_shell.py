"""Commands that a real bash starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_run_ray.remote.node import command
from nemo_run_ray.remote.node.command import in_shell
from nemo_run_ray.remote.node.rundir import RunDir
from nemo_run_ray.remote.spec import JobSpec

SHOW = [sys.executable, "-c", "import sys; sys.stdout.write('\\0'.join(sys.argv[1:]))"]


def bash(words: list[str], **env: str) -> subprocess.CompletedProcess:
    env = {"PATH": os.defpath, "HOME": "/nonexistent", **env}
    done = subprocess.run(words, env=env, capture_output=True, timeout=30)
    # By hand: subprocess would read a carriage return as a line's end.
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done


@pytest.fixture
def profile(weird_tmp_path) -> str:
    """A home whose profile puts a folder with a tool on the path."""
    tool = weird_tmp_path / "bin" / "from-profile"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho tool of the profile\n")
    tool.chmod(0o755)
    (weird_tmp_path / ".bash_profile").write_text('export PATH="$HOME/bin:$PATH" MARK=set\n')
    return str(weird_tmp_path)


@settings(max_examples=15)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
        max_size=4,
    )
)
def test_every_word_stays_as_it_is(words):
    done = bash(in_shell([*SHOW, *words], False, ["set -- other words", "x='a b'"], None))
    assert (done.returncode, done.stdout) == (0, "\0".join(words)), done.stderr


def test_a_login_shell_reads_the_profile(profile):
    done = bash(in_shell(["from-profile"], True, [], None), HOME=profile)
    assert done.stdout == "tool of the profile\n"
    done = bash(in_shell(["from-profile"], False, [], None), HOME=profile)
    assert done.returncode == 127
    assert "from-profile" in done.stderr


def test_a_task_that_is_cancelled_in_a_startup_command_has_not_failed_in_it():
    words = in_shell(["true"], False, ["echo begins; kill -TERM $$; sleep 5"], None)
    done = bash(words)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "begins\n")


def test_startup_commands_share_the_shell_of_the_task(profile, tmp_path):
    (tmp_path / "env.sh").write_text("export B=$A-b\n")
    startup = ["export A=1\nexport A=2", f"cd {tmp_path}", ". ./env.sh", "set -euo pipefail"]
    done = bash(in_shell(["sh", "-c", "echo $MARK $B; pwd"], True, startup, None), HOME=profile)
    assert done.stdout == f"set 2-b\n{tmp_path}\n"


@pytest.mark.parametrize(
    ("failing", "code", "shown"),
    [
        ("(exit 3)", 3, 3),
        ("no-such-tool-1 'a b'", 127, 127),
        ("exit 5", 5, 5),
        ("exit 0", 1, 0),
        ("set -e; false; true", 1, 1),
    ],
)
def test_a_startup_command_that_fails_is_the_tasks_failure(failing, code, shown):
    done = bash(in_shell(["echo", "the task"], False, ["true", failing, "echo next"], None))
    assert done.returncode == code
    assert "the task\n" not in done.stdout
    assert "next" not in done.stdout
    line = f"nemo_run_ray| the startup command {failing!r} ended with exit code {shown}, and"
    assert done.stdout.startswith(line)


def test_what_python_means(profile):
    asked = in_shell(["python", "-c", "import sys; print(sys.executable)"], True, [], None)
    # Nothing on this path is called python: it is the one that runs us.
    assert bash(asked, HOME=profile, PATH="/nonexistent:/usr/bin:/bin").stdout.strip()
    of_profile = Path(profile) / "bin" / "python"
    of_profile.write_text("#!/bin/sh\necho python of the profile\n")
    of_profile.chmod(0o755)
    assert bash(asked, HOME=profile).stdout == "python of the profile\n"
    given = in_shell(["sh", "-c", "echo $PATH"], True, [], "/opt/a b/python")
    assert bash(given, HOME=profile).stdout.startswith("/opt/a b:")
    assert in_shell(["python"], True, [], "/opt/py")[-1] == "/opt/py"


def test_a_job_gets_them_with_the_paths_of_its_folder(tmp_path):
    run_dir = RunDir("e.job", str(tmp_path))
    spec = JobSpec(("cat", "/nemo_run/code/a"), startup=(". /nemo_run/code/env.sh",))
    words = command.argv_of(spec, run_dir, {})
    assert words[-2:] == ["cat", f"{run_dir.code}/a"]
    assert f". {run_dir.code}/env.sh" in words[2]
    assert words[:2] == ["bash", "-c"]
    spec = JobSpec(("cat",), login_shell=True)
    assert command.argv_of(spec, run_dir, {})[:2] == ["bash", "-lc"]
    assert command.argv_of(JobSpec(("cat",)), run_dir, {}) == ["cat"]
