"""Whether a path that was found by its name may be trusted."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_run_ray.remote import files
from nemo_run_ray.remote.files import open_own, own_folder, why_untrusted

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can make others' files")

STRANGER, USER, GROUP = 23456, 12345, 54321
#: As on a login node, which gets the text of the module.
PROGRAM = Path(files.__file__).read_text() + "\nimport sys\nprint(why_untrusted(sys.argv[1]))"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that others can enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


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
        (lambda path: (_mode(path.parent.parent, 0o700), _mode(path.parent, 0o777)), ""),  # closed
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
    place: Path, change: Callable[[Path], object], expected: str
):
    path = place / "a" / "b" / "file"
    path.parent.mkdir(parents=True)
    path.touch(0o644)
    change(path)
    found = why_untrusted(str(path))
    assert expected.format(place) in found
    assert bool(found) == bool(expected)


def test_a_path_is_followed_as_the_kernel_does(place):
    """``..`` behind a link leaves the folder that the link leads to."""
    (place / "open" / "inner").mkdir(parents=True)
    (place / "open").chmod(0o777)
    (place / "link").symlink_to("open/inner")
    assert f"may write to {place}/open " in why_untrusted(f"{place}/link/../file")


def test_roots_files_are_trusted_in_a_user_namespace_that_does_not_know_root():
    """As in many containers, where they show the id of unknown users."""
    words = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    words += ["unshare", "--user", "--map-current-user", "cat", "/proc/self/uid_map"]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("this kernel makes no user namespaces for users")
    words[-2:] = ["stat", "-c", "%u", "/"]
    assert subprocess.check_output(words, text=True).strip() == "65534"
    words[-4:] = ["python3", "-Ic", PROGRAM, "/usr/bin"]
    assert subprocess.check_output(words, text=True).strip() == ""


def test_a_sticky_folder_itself_is_not_trusted(place):
    place.chmod(0o1777)
    assert "chmod go-w" in why_untrusted(str(place))


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
