"""Every example runs, and the README's commands are those of the Makefile and the command line."""

import os
import re
import sys

import nemo_run as run
import pytest

from nemo_run_ray.cli.main import VERBS
from tests.conftest import ROOT, python, tool


def test_quickstart_trains_on_the_embedded_ray(local_cluster, home):
    done = python(str(ROOT / "examples" / "quickstart.py"), cwd=home)

    assert done.returncode == 0, done.stdout + done.stderr
    (accuracy,) = re.findall(r"accuracy (0\.\d+) on 450 unseen digits", done.stdout)
    assert float(accuracy) > 0.9
    assert (home / "quickstart" / "digits.pkl").stat().st_size > 10_000


def test_quickstart_without_scikit_learn_fails_and_says_what_to_install(local_cluster, tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError(\"No module named 'sklearn'\")")
    done = python(str(ROOT / "examples" / "quickstart.py"), cwd=tmp_path)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "No module named 'sklearn'. This task needs scikit-learn" in done.stdout


def test_existing_cluster(dashboard, token, home):
    env = {**os.environ, "RAY_AUTH_TOKEN": token}
    example = str(ROOT / "examples" / "existing_cluster.py")
    done = python(example, dashboard.url, cwd=home, env=env)

    assert done.returncode == 0, done.stdout + done.stderr
    (handle,) = re.findall(r"^ray_jobs://\S+$", done.stdout, re.M)
    log = tool("nemo-run-ray", "logs", "--follow", handle, env=env)
    assert re.search(r"^hello from the node \S+$", log.stdout, re.M), log.stdout + log.stderr
    assert "quickstart.py" in log.stdout.split()
    assert python(example).returncode == 1, "without an address it says how to call it"


def test_verify_answers(local_cluster, home):
    done = python(str(ROOT / "examples" / "verify_answers.py"), cwd=home)

    assert done.returncode == 0, done.stdout + done.stderr
    found = {words: int(count) for count, words in re.findall(r"^ *(\d+) (.+)$", done.stdout, re.M)}
    assert found == {"not an answer": 6, "right": 163, "took too long": 4, "wrong": 27}


def test_sweep(local_cluster, home):
    done = python(str(ROOT / "examples" / "sweep.py"), cwd=home)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.996" in done.stdout, "the best of them"
    assert (home / "sweep.svg").read_text().startswith("<svg")


@pytest.mark.soak
def test_named_cluster(local_cluster, home):
    example = str(ROOT / "examples" / "named_cluster.py")
    done = python(example, cwd=home)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "hello from a pool of" in done.stdout
    wrong = python(example, "no-such-cluster", cwd=home)
    assert wrong.returncode == 1
    assert "There is no cluster file of the name 'no-such-cluster'" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_the_readmes_first_program(local_cluster, tmp_path):
    text = (ROOT / "README.md").read_text()
    program = re.findall(r"```python\n(import nemo_run.*?)```", text, re.S)[0]
    embedded = "\n".join(line for line in program.splitlines() if "address=" not in line)
    (tmp_path / "first.py").write_text(embedded)

    done = python("first.py", cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "hello from" in done.stdout


def test_the_readme_names_commands_that_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make (\w+)", text, re.M)) <= targets
    verbs = {*VERBS}
    assert set(re.findall(r"^nemo-run-ray (\w+)", text, re.M)) <= {*verbs, "ns"}
    for program, has in ((["nemo-run-ray"], {*verbs, "ns"}), (["nemo", "ray"], verbs)):
        shown = tool(*program, "--help").stdout
        for verb in has:
            assert re.search(rf"^\W*{verb}\b", shown, re.M), (program, verb, shown)


def test_nemo_runs_command_line_knows_the_executor(local_cluster, tmp_path, unique):
    (tmp_path / "task.py").write_text(
        "import nemo_run as run\n"
        "import nemo_run_ray\n"
        "@run.cli.entrypoint\n"
        "def greet(word: str = 'x'):\n"
        "    print('greeting', word)\n"
        "if __name__ == '__main__':\n"
        "    run.cli.main(greet)\n"
    )
    done = python(
        *("task.py", "--yes", "run.executor=ray", "run.executor.grace_s=3", "word=hello"),
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "greeting hello" in done.stdout
    grace = run.Experiment.from_title("greet").jobs[0].executor.grace_s
    assert grace == 3


def test_nothing_of_the_examples_names_this_machine():
    for path in (ROOT / "examples").glob("*.py"):
        assert sys.prefix not in path.read_text()
