"""Whether a path that was found by its name may be trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_run_ray.remote import trust
from nemo_run_ray.remote.trust import open_own, own_folder, why_untrusted

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can make others' files")

STRANGER, USER, GROUP = 23456, 12345, 54321


def _mode(path: Path, mode: int) -> None:
    path.chmod(mode)


def _linked(path: Path, owner: int) -> None:
    """Move the folder of a path elsewhere, and put a link of that owner in its place."""
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.symlink_to(path.parent.with_name("elsewhere"))
    os.chown(path.parent, owner, owner, follow_symlinks=False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: None, ""),
        (lambda path: path.unlink(), ""),
        (lambda path: _mode(path.parent, 0o1777), ""),
        (lambda path: os.chown(path, -1, GROUP), ""),
        (lambda path: _linked(path, 0), ""),
        (lambda path: os.chown(path, STRANGER, -1), "a/b/file belongs to 23456 (mode 644)"),
        (lambda path: os.chown(path.parent, STRANGER, -1), "a/b belongs to 23456"),
        (lambda path: _linked(path, STRANGER), "a/b belongs to 23456"),
        (lambda path: _mode(path, 0o666), "may write to {}/a/b/file (mode 666)"),
        (lambda path: _mode(path.parent.parent, 0o777), "may write to {}/a (mode 777)"),
        (
            lambda path: (os.chown(path.parent, -1, GROUP), _mode(path.parent, 0o775)),
            "or run: chmod go-w {}/a/b",
        ),
    ],
)
def test_a_path_is_trusted_if_nobody_else_can_replace_it(
    tmp_path: Path, change: Callable[[Path], object], expected: str
):
    path = tmp_path / "a" / "b" / "file"
    path.parent.mkdir(parents=True)
    path.touch(0o644)
    change(path)
    found = why_untrusted(str(path))
    assert expected.format(tmp_path) in found
    assert bool(found) == bool(expected)
    program = [sys.executable, "-I", trust.__file__, str(path)]
    assert subprocess.check_output(program, text=True).strip() == found


def test_a_sticky_folder_itself_is_not_trusted(tmp_path):
    tmp_path.chmod(0o1777)
    assert "chmod go-w" in why_untrusted(str(tmp_path))


@pytest.mark.parametrize("taken_by", ["symlink", "hard link", "stranger", "group", "fifo"])
def test_a_file_that_others_have_put_there_is_not_opened(tmp_path, taken_by):
    path, victim = tmp_path / "journal", tmp_path / "victim"
    victim.write_text("precious")
    if taken_by == "symlink":
        path.symlink_to(victim)
    elif taken_by == "hard link":
        path.hardlink_to(victim)
    elif taken_by == "fifo":
        os.mkfifo(path)
    else:
        path.touch()
        os.chown(path, STRANGER if taken_by == "stranger" else -1, GROUP)
        path.chmod(0o660 if taken_by == "group" else 0o600)
    with pytest.raises(PermissionError, match=r"a link|nobody else may write"):
        open_own(str(path), os.O_RDWR | os.O_CREAT)
    assert victim.read_text() == "precious"


def test_a_name_that_another_user_has_taken_is_replaced_by_another(tmp_path):
    path = tmp_path / "nemo_run_0"
    assert own_folder(str(path)) == str(path)
    path.mkdir()
    assert own_folder(str(path)) == str(path), "it is this user's"
    os.chown(path, STRANGER, STRANGER)
    (tmp_path / "nemo_run_0~1").symlink_to("/")
    assert own_folder(str(path)) == f"{path}~2"
