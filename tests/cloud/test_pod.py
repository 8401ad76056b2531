"""Source code as text, and back on a pod."""

import ast
import hashlib
import json
import lzma
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_run_ray import cloud
from nemo_run_ray.cloud import DGXCLOUD_CHARS, encode, pod
from nemo_run_ray.cloud.source import File, Link
from tests.cloud.pods import expand

TREE = {
    "src/a/__init__.py": File(b""),
    "src/a/run.sh": File(b"#!/bin/sh\n", is_executable=True),
    "src/a/\u00e4 b'\".bin": File(bytes(range(256))),
    "src/link": Link("a"),
}
NOISE = random.Random(1).randbytes(200_000)
PROGRAM = Path(pod.__file__).read_text(encoding="utf-8")


def variables(tree, folder: Path) -> dict[str, str]:
    digest, text = encode(tree)
    pieces = [text[start : start + 9_000] for start in range(0, len(text), 9_000)]
    path = str(folder / f"src-{digest}")
    spec = {
        "digest": digest,
        "count": len(pieces),
        "tree": path,
        "code": str(folder / "code"),
        "root": f"{path}/src",
        "path": "$PYTHONPATH",
    }
    found = {f"{pod.PREFIX}{number}": piece for number, piece in enumerate(pieces)}
    return {**found, f"{pod.PREFIX}SPEC": json.dumps(spec)}


def boot(given_variables, *command: str) -> subprocess.CompletedProcess:
    words = command or (sys.executable, "-c", "import os; print(dict(os.environ))")
    return subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, *words],
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **given_variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


@given(st.binary(max_size=2000) | st.text("\n  x", max_size=500).map(str.encode))
def test_no_character_that_somebody_changes_and_all_comes_back(content):
    tree = {"a": File(content), "b": Link("a"), "\udcff": File(b"", is_executable=True)}
    digest, text = encode(tree)
    assert set(text).isdisjoint("$<>&\"\\' \n\t")
    assert expand(text, {"a": "b"}) == text
    assert json.dumps(text) == f'"{text}"'
    back = pod.received({f"{pod.PREFIX}0": text}, {"count": 1, "digest": digest})
    assert hashlib.sha256(back).hexdigest() == digest
    found = ("a", content, 0o644), ("b", b"", "a"), ("\udcff", b"", 0o755)
    assert tuple(pod.entries(back)) == found


def test_large_trees_are_sent_in_parts_and_indentation_as_single_bytes(tmp_path, monkeypatch):
    tree = {"a": File(b"def f():\n        return 1\n" * 1000)}
    monkeypatch.setattr(cloud, "_PART_BYTES", 5000)
    parts, compress = [], lzma.compress
    monkeypatch.setattr(lzma, "compress", lambda *a, **k: parts.append(a[0]) or compress(*a, **k))
    sent = variables(tree, tmp_path)
    assert len(parts) > 2
    assert not any(b"    " in part for part in parts)
    assert pod.received(sent, json.loads(sent[f"{pod.PREFIX}SPEC"])).endswith(tree["a"].content)


def test_the_same_tree_gives_the_same_text_in_any_order():
    assert encode(TREE) == encode(dict(reversed(TREE.items())))
    changed = {**TREE, "src/a/__init__.py": File(b"", is_executable=True)}
    assert encode(TREE)[0] != encode(changed)[0]


def test_the_tree_arrives_and_the_command_has_none_of_the_variables(tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "mine").touch()
    done = boot(variables({**TREE, "noise": File(NOISE)}, tmp_path))
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
    assert {one.resolve() for one in code.iterdir()} == {
        tree / "noise",
        tree / "src",
        code / "mine",
    }
    assert sorted(one.name for one in tmp_path.iterdir()) == ["code", tree.name]


def test_what_a_job_changed_in_the_shared_tree_is_restored_in_it_alone(tmp_path):
    sent = variables(TREE, tmp_path)
    assert boot(sent).stderr == ""
    (tree,) = tmp_path.glob("src-*")
    package = tree / "src/a"
    script, link, own = package / "run.sh", tree / "src/link", package / "result"
    script.write_text("exit 1")
    link.unlink()
    link.write_text("a")
    (package / "__init__.py").write_text("import gone")
    (package / "\u00e4 b'\".bin").unlink()
    own.touch()
    done = boot(sent)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert [line.split()[1] for line in lines] == [
        str(path) for path in (package / "__init__.py", script, link)
    ]
    assert all(line.endswith("is not as sent; restored") for line in lines)
    assert script.read_text() == "#!/bin/sh\n"
    assert (package / "\u00e4 b'\".bin").exists()
    assert os.access(script, os.X_OK)
    assert os.readlink(link) == "a"
    assert own.exists()
    assert boot(sent).stderr == ""
    package.rename(tmp_path / "elsewhere")
    package.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/run.sh").write_text("mine")
    done = boot(sent)
    assert done.returncode == 1
    assert "is behind a link that was not sent; remove" in done.stderr
    assert (tmp_path / "elsewhere/run.sh").read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["code", "elsewhere", tree.name]


def test_the_command_has_its_exit_code_and_the_signals_that_python_ignores(tmp_path):
    assert boot(variables(TREE, tmp_path), "sh", "-c", "exit 7").returncode == 7
    done = boot(variables(TREE, tmp_path), "bash", "-c", "set -o pipefail; yes | head -1")
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("damage", ["flipped", "shortened", "missing", "not base 85", "spec"])
def test_what_changed_on_its_way_stops_it_with_one_line(tmp_path, damage):
    sent = variables({**TREE, "noise": File(NOISE)}, tmp_path)
    name = f"{pod.PREFIX}{'SPEC' if damage == 'spec' else 3}"
    old = sent.pop(name)
    if damage not in ("missing", "spec"):
        sent[name] = {
            "flipped": ("1" if old[50] == "0" else "0").join([old[:50], old[51:]]),
            "shortened": old[:-5],
            "not base 85": "\u00e4" + old[1:],
        }[damage]
    done = boot(sent)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("nemo-run-ray: the source code was not usable: ")
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_tree_that_is_whole_needs_no_room(tmp_path, monkeypatch):
    sent = variables(TREE, tmp_path)
    spec = json.loads(sent[f"{pod.PREFIX}SPEC"])
    packed = pod.received(sent, spec)
    pod.restore(packed, spec["tree"])
    monkeypatch.setattr(pod.tempfile, "mkdtemp", lambda *_: pytest.fail("a folder is made"))
    pod.restore(packed, spec["tree"])


def test_what_another_pod_writes_meanwhile_is_no_restoration(tmp_path, monkeypatch, capsys):
    def other_is_first(path, content, mode):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).touch()
        return False

    monkeypatch.setattr(pod, "is_as_sent", other_is_first)
    sent = variables(TREE, tmp_path)
    spec = json.loads(sent[f"{pod.PREFIX}SPEC"])
    pod.restore(pod.received(sent, spec), spec["tree"])
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(tmp_path):
    sent = variables({**TREE, "noise": File(NOISE)}, tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    script = (
        'mount -t tmpfs -o size=100k none "$0" && "$1" -I -c "$2" true; '
        'code=$?; find "$0" -mindepth 1; exit $code'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(tmp_path / "disk"), sys.executable, PROGRAM],
        env={"PATH": os.environ["PATH"], **sent},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "No space left on device" in done.stderr
    assert done.stdout == ""


def test_the_program_fits_into_one_variable_and_is_for_older_pythons_too():
    assert len(PROGRAM) < DGXCLOUD_CHARS
    assert PROGRAM.isascii()
    assert expand(PROGRAM, {}) == PROGRAM  # Kubernetes changes nothing of it
    tree = ast.parse(PROGRAM, feature_version=(3, 6))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    assert {one.name for node in imports for one in node.names} <= set(sys.stdlib_module_names)
