"""Source code as text, and back on a pod."""

import ast
import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_run_ray.cloud import encode, pod
from nemo_run_ray.cloud.encode import File, Link
from nemo_run_ray.errors import SourceTooLarge
from tests.cloud.pods import expand

TREE = {
    "src/a/__init__.py": File(b""),
    "src/a/run.sh": File(b"#!/bin/sh\n", is_executable=True),
    "src/a/\u00e4 b'\".bin": File(bytes(range(256))),
    "src/link": Link("a"),
}
NOISE = random.Random(1).randbytes(200_000)


def variables(tree, folder: Path, size_chars: int = 9_000) -> dict[str, str]:
    packed = encode.pack(tree)
    pieces = encode.chunks(encode.encode(packed), size_chars)
    digest = encode.digest(packed)
    spec = {
        "digest": digest,
        "count": len(pieces),
        "tree": str(folder / f"src-{digest}"),
        "code": str(folder / "code"),
        "roots": ["src"],
    }
    found = {f"{pod.PREFIX}{number}": piece for number, piece in enumerate(pieces)}
    return {**found, f"{pod.PREFIX}SPEC": json.dumps(spec)}


def boot(folder: Path, given_variables, *command: str, **options) -> subprocess.CompletedProcess:
    program = Path(pod.__file__).read_text(encoding="utf-8")
    words = command or (sys.executable, "-c", "import os; print(dict(os.environ))")
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **given_variables}
    return subprocess.run(
        [sys.executable, "-I", "-c", program, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


@given(st.binary(max_size=2000))
def test_no_character_that_somebody_changes(content):
    text = encode.encode(encode.pack({"a": File(content)}))
    assert set(text).isdisjoint("$<>&\"\\' \n\t")
    assert expand(text, {"a": "b"}) == text
    assert json.dumps(text) == f'"{text}"'


def test_the_same_tree_gives_the_same_bytes_in_any_order():
    turned = dict(reversed(TREE.items()))
    assert encode.pack(TREE) == encode.pack(turned)
    assert encode.encode(encode.pack(TREE)) == encode.encode(encode.pack(turned))
    changed = {**TREE, "src/a/__init__.py": File(b"", is_executable=True)}
    assert encode.digest(encode.pack(TREE)) != encode.digest(encode.pack(changed))


@given(st.binary(max_size=200) | st.text("a \n\0\1\2", max_size=200).map(str.encode))
@example(bytes(range(256)) + b"\n    a")  # no byte is left for an indentation
@example(bytes(range(3, 256)) + b"\n                    a\n        b")  # three are
@example(b"\n" + b" " * 23 + b"\n" + b" " * 4)
def test_indentations_come_back(content):
    packed = encode.pack({"a": File(content)})
    spec = {"count": 1, "digest": encode.digest(packed)}
    assert pod.received({f"{pod.PREFIX}0": encode.encode(packed)}, spec) == packed


def test_an_empty_tree_comes_back():
    packed = encode.pack({})
    spec = {"count": 1, "digest": encode.digest(packed)}
    assert pod.received({f"{pod.PREFIX}0": encode.encode(packed)}, spec) == packed


def test_large_trees_are_compressed_in_parts_and_come_back(tmp_path):
    content = b"".join(b"line %d of many\n" % number for number in range(500_000))
    assert len(content) > encode._PART_BYTES
    packed = encode.pack({"big.txt": File(content)})
    text = encode.encode(packed)
    spec = {"count": 1, "digest": encode.digest(packed)}
    assert pod.received({f"{pod.PREFIX}0": text}, spec) == packed


def test_the_tree_arrives_and_the_command_has_none_of_the_variables(tmp_path):
    done = boot(tmp_path, variables({**TREE, "noise": File(NOISE)}, tmp_path))
    assert done.returncode == 0, done.stderr
    (tree,) = tmp_path.glob("src-*")
    assert (tree / "noise").read_bytes() == NOISE
    assert (tree / "src/a/\u00e4 b'\".bin").read_bytes() == bytes(range(256))
    assert os.access(tree / "src/a/run.sh", os.X_OK)
    assert os.readlink(tree / "src/link") == "a"
    seen = ast.literal_eval(done.stdout)
    assert not [name for name in seen if name.startswith(pod.PREFIX)]
    assert seen["PYTHONPATH"] == str(tree / "src")
    assert seen["NEMO_RUN_RAY_SRC"] == str(tree)
    shown = {one.resolve() for one in (tmp_path / "code").iterdir()}
    assert shown == {tree / "noise", tree / "src"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["code", tree.name]


def test_the_exit_code_is_the_commands(tmp_path):
    assert boot(tmp_path, variables(TREE, tmp_path), "sh", "-c", "exit 7").returncode == 7


def test_what_is_in_the_code_folder_is_the_jobs_own(tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "mine").touch()
    assert boot(tmp_path, variables(TREE, tmp_path)).returncode == 0
    (tree,) = tmp_path.glob("src-*")
    assert sorted(one.name for one in code.iterdir()) == ["mine", "src"]
    (code / "output").touch()
    assert sorted(one.name for one in tree.iterdir()) == ["src"]


def test_a_code_folder_shows_the_newest_tree(tmp_path):
    older = {**TREE, "gone.py": File(b"")}
    assert boot(tmp_path, variables(older, tmp_path)).returncode == 0
    assert boot(tmp_path, variables(TREE, tmp_path)).returncode == 0
    (link,) = (tmp_path / "code").iterdir()
    assert link.name == "src"
    assert not (link.resolve().parent / "gone.py").exists()


def test_the_command_gets_the_signals_that_python_ignores(tmp_path):
    command = ("bash", "-c", "set -o pipefail; yes | head -1")
    done = boot(tmp_path, variables(TREE, tmp_path), *command)
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_nothing_is_written_outside_of_the_tree(tmp_path, name):
    done = boot(tmp_path, variables({name: File(b"")}, tmp_path))
    assert done.returncode == 1
    assert "would be outside of the tree" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [None, "{"])
def test_a_description_that_did_not_arrive(tmp_path, text):
    sent = variables(TREE, tmp_path)
    del sent[f"{pod.PREFIX}SPEC"]
    if text is not None:
        sent[f"{pod.PREFIX}SPEC"] = text
    done = boot(tmp_path, sent)
    assert done.returncode == 1
    assert done.stderr.endswith("its description has not arrived\n")


@pytest.mark.parametrize("damage", ["flipped", "shortened", "missing", "not base 85"])
def test_what_changed_on_its_way_stops_it_with_one_line(tmp_path, damage):
    sent = variables({**TREE, "noise": File(NOISE)}, tmp_path)
    name = f"{pod.PREFIX}3"
    if damage == "missing":
        del sent[name]
    else:
        old = sent[name]
        sent[name] = {
            "flipped": ("1" if old[50] == "0" else "0").join([old[:50], old[51:]]),
            "shortened": old[:-5],
            "not base 85": "\u00e4" + old[1:],
        }[damage]
    done = boot(tmp_path, sent)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("nemo-run-ray: the source code was not usable: ")
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path, monkeypatch):
    """The first write fails as on a full disk; nothing is left, and the next pod succeeds."""
    packed = encode.pack(TREE)
    tree = tmp_path / "src-x"
    written = pod.write
    calls = []

    def full(path, content, more):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        written(path, content, more)

    monkeypatch.setattr(pod, "write", full)
    with pytest.raises(OSError, match="No space left"):
        pod.ensure(packed, str(tree))
    assert list(tmp_path.iterdir()) == []
    pod.ensure(packed, str(tree))
    assert (tree / "src/a/run.sh").is_file()


def test_a_disk_that_is_really_full(tmp_path):
    if os.getuid():
        pytest.skip("mounting a small disk needs root")
    (tmp_path / "disk").mkdir()
    sent = variables({**TREE, "noise": File(NOISE)}, tmp_path / "disk")
    program = Path(pod.__file__).read_text(encoding="utf-8")
    script = (
        'mount -t tmpfs -o size=100k none "$0" && "$1" -I -c "$2" true; '
        'code=$?; find "$0" -mindepth 1; exit $code'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(tmp_path / "disk"), sys.executable, program],
        env={"PATH": os.environ["PATH"], **sent},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "cannot be unpacked" in done.stderr
    assert "No space left on device" in done.stderr
    assert done.stdout == ""


def test_folders_of_pods_that_died_go_after_a_day(tmp_path):
    packed = encode.pack(TREE)
    tree = tmp_path / "src-x"
    old, fresh = tmp_path / ".src-x.old", tmp_path / ".src-x.fresh"
    for one in (old, fresh):
        one.mkdir()
        (one / "half").touch()
    os.utime(old, (1, 1))
    pod.ensure(packed, str(tree))
    assert not old.exists()
    assert fresh.exists()


def test_the_program_fits_into_one_variable():
    text = Path(pod.__file__).read_text(encoding="utf-8")
    assert len(text) < encode.dgxcloud(1).value_chars
    assert text.isascii()
    assert expand(text, {}) == text  # Kubernetes changes nothing of it


@pytest.mark.parametrize("name", ["3.6", "3.8"])
def test_the_program_is_older_pythons_too(name):
    tree = ast.parse(
        Path(pod.__file__).read_text(), feature_version=tuple(map(int, name.split(".")))
    )
    modules = {
        one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names
    }
    assert modules <= set(sys.stdlib_module_names)


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("known", "size", "what"),
    [
        (encode.LEPTON, 1_500_000, "the workload's description"),
        (encode.dgxcloud(1), 1_500_000, "the workload's description"),
        (encode.dgxcloud(2), 750_000, "which repeats the variables 2 times"),
        (encode.Limits("p", 10, object_bytes=10**9), 2_000_000, "a process's variables"),
    ],
)
def test_what_is_above_a_limit_is_refused(known, size, what):
    pieces = encode.chunks("x" * size, known.value_chars)
    if known.platform == "p":
        pieces = ["x" * 10] * (size // 20)
    sent = {f"n{number}": piece for number, piece in enumerate(pieces)}
    with pytest.raises(SourceTooLarge, match=what) as caught:
        encode.check_limits(known, sent, {}, [("a.py", 12345)])
    assert "12,345 a.py" in str(caught.value)
    few = dict(list(sent.items())[: len(sent) // 3])
    encode.check_limits(known, few, {}, [])


def test_one_value_that_is_too_long_is_refused():
    with pytest.raises(SourceTooLarge, match="the variable n would have 9,501 bytes"):
        encode.check_limits(encode.dgxcloud(1), {"n": "x" * 9501}, {}, [])


def test_the_jobs_other_variables_count():
    sent = {f"n{number}": "x" * 100_000 for number in range(13)}
    encode.check_limits(encode.LEPTON, sent, {}, [])
    with pytest.raises(SourceTooLarge):
        encode.check_limits(encode.LEPTON, sent, {"more": "x" * 200_000}, [])
