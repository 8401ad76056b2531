"""Every Python snippet of the README and the site runs.

A snippet that starts tasks is a dry run, which checks what is checked before a submission.
Snippets that look at jobs, and those of ``work``, run on the embedded Ray.
"""

import functools
import re
import subprocess
from pathlib import Path

import nemo_run as run
import pytest
from nemo_run.run.ray.job import RayJob

import nemo_run_ray
from nemo_run_ray import RayExecutor, patches
from tests.conftest import ROOT, python

_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.S | re.M)
_BLOCKS = [
    (f"{page.relative_to(ROOT)}:{number}", language, text)
    for page in _PAGES
    for number, (language, text) in enumerate(_FENCED.findall(page.read_text(encoding="utf-8")))
]
_PYTHON = {
    name: text
    for name, language, text in _BLOCKS
    if language == "python" and "upstream" not in name
}
#: The functions that snippets call, and the programs that they name.
_STEPS = "def train(seed=0, lr=0.1, size=''):\n    return {'loss': lr}\n"
_FILES = ("train.py", "src/train.py", "src/project/train.py", "check.sh", "our-ca.pem")
#: What a snippet leaves to its reader.
_SET_UP = """
import nemo_run as run
import nemo_run_ray
from nemo_run_ray import *
from nemo_run_ray import array, work
import steps
from steps import train

task = prepare = evaluate = server = sandbox = client = training = run.Script(inline="true")
slurm = run.SlurmExecutor(account="acc", tunnel=run.LocalTunnel(job_dir=JOB_DIR))
lepton = run.LeptonExecutor(
    container_image="image", nemo_run_dir="/nemo", mounts=[{"path": "/", "mount_path": "/nemo"}]
)
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with the files that snippets name."""
    for name in _FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "src/project/__init__.py").touch()
    (tmp_path / "steps.py").write_text(_STEPS)
    for _, language, text in _BLOCKS:
        named = re.match(r"# (cluster_configs/\S+)", text)
        if language == "yaml" and named:
            (tmp_path / "cluster_configs").mkdir(exist_ok=True)
            (tmp_path / named[1]).write_text(text)
        if language == "toml":
            (tmp_path / "env.toml").write_text(text)
    for name in ("PROXY_TOKEN", "TEAM_A_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "a-value")
    commit = ["-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-qm", "x"]
    for words in (["init", "-q"], ["add", "."], commit):
        subprocess.run(["git", *words], check=True, cwd=tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _is_looking(text: str) -> bool:
    return "find(" in text


def _is_work(text: str) -> bool:
    return "work.connect()" in text or "pool." in text


_DRY = sorted(
    name for name, text in _PYTHON.items() if not _is_looking(text) and not _is_work(text)
)


@pytest.mark.parametrize("name", _DRY)
def test_a_snippet_that_starts_something(name, project, monkeypatch, unique):
    monkeypatch.setattr(run, "run", functools.partial(run.run, dryrun=True))
    monkeypatch.setattr(run.Experiment, "run", lambda self, **options: self.dryrun())
    monkeypatch.setattr(RayJob, "start", lambda self, **options: None)
    monkeypatch.setattr(RayJob, "logs", lambda self, **options: None)
    text = _PYTHON[name].replace("/etc/ssl", str(project)).replace("/shared", str(project))
    text = text.replace("run.LeptonExecutor(...)", "lepton")
    before = {patch for patch, state in patches.status().items() if state == "applied"}
    try:
        exec(_SET_UP + text, {"__name__": "snippet", "JOB_DIR": str(project)})
    finally:
        states = patches.status()
        for patch in states.keys() - before:
            if states[patch] == "applied":
                patches.undo(patch)


@pytest.mark.parametrize("name", [name for name in sorted(_PYTHON) if _is_work(_PYTHON[name])])
def test_a_snippet_of_cpu_work(name, local_cluster, project):
    text = _PYTHON[name].replace("def verify(answer: str) -> bool: ...", "")
    if "await " in text:
        text = "async def main(pool):\n    " + text.replace("\n", "\n    ")
        text += "\nimport asyncio\nwith work.connect() as pool:\n    asyncio.run(main(pool))\n"
    given = "from nemo_run_ray import work\nanswers = ['1', '2']\nanswer = '3'\n"
    (project / "snippet.py").write_text(f"{given}verify = str.isdigit\n{text}")
    done = python("snippet.py", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in sorted(_PYTHON) if _is_looking(_PYTHON[name])])
def test_a_snippet_that_looks(name, local_cluster, project):
    text = _PYTHON[name]
    (title,) = re.findall(r'find\("(\S+)"\)', text)
    script = run.Script(inline="echo hello")
    looked = (
        nemo_run_ray.array(script, over={"env.X": ["1", "2"]}) if "elements" in text else script
    )
    if title not in text.partition("find(")[0]:
        with run.Experiment(title, executor=RayExecutor()) as experiment:
            experiment.add(looked, name="job")
            experiment.run(detach=True)
        nemo_run_ray.find(title)[0].wait(timeout_s=120)
    exec(_SET_UP + text, {"__name__": "snippet", "JOB_DIR": str(project)})
