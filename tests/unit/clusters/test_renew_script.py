"""What the script of an allocation does for its end, with a Slurm that a test plays."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from nemo_run_ray.clusters.slurm import cluster, script
from tests.unit.clusters.test_bring_up import World, world

__all__ = ["world"]


def template(name: str) -> str:
    return Path(script.__file__).with_name(name).read_text()


def renew(world: World, **variables: str) -> str:
    """Run the functions of the script as at the end of the first allocation; what it says."""
    functions = template("renew.sh.j2").replace("sleep 5", "sleep 0.1")
    job = f"""
first_environment=$(export -p)
export SLURM_JOB_ID=101 SLURM_JOB_NAME=one RAY_ADDRESS=dead SANDBOX_PORTS_DIR=/old
export NEMO_RUN_RAY_LIFE={world.life()} allocation_number=1
{functions}
renew
"""
    env = {**os.environ, "SLURM_CONF": "/etc/slurm.conf", **variables}
    done = subprocess.run(["bash", "-eu"], input=job, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def over(world) -> World:
    """A cluster whose first allocation is about to end."""
    life = world.life()
    (life / "users").mkdir(parents=True)
    (life / "users" / "me").touch()
    (life / "keep").touch()
    (life / "ray.sub").write_text(f"#!/bin/sh\n# {life} {life}/logs {life}7\n")
    return world


def commands(world: World, **texts: str) -> None:
    """Give a command lines that it begins with."""
    for name, text in texts.items():
        path = world.slurm.parent / "bin" / name
        path.write_text(path.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{text}\n"))


def test_it_is_submitted_from_a_folder_of_its_own(over):
    assert "Slurm job 101" in renew(over)
    life = over.life(2)
    assert (life / "job").read_text() == "101\n"
    names = {"job", "keep", "logs", "ray.sub", "renewed", "sbatch", "users"}
    assert set(os.listdir(life)) == names
    assert os.listdir(life / "users") == ["me"]
    first = over.life()
    assert (life / "ray.sub").read_text() == f"#!/bin/sh\n# {life} {life}/logs {first}7\n"
    assert over.lives() == ["1", "2"]


def test_it_has_the_environment_of_the_first_submission(over):
    commands(over, sbatch='export -p > "$SLURM/env"')
    renew(over, MINE="a b\nc'd", NEMO_RUN_RAY_INTERFACE="eth7", SLURM_JOB_PARTITION="x")
    env = (over.slurm / "env").read_text()
    assert "eth7" in env
    assert "a b\nc" in env
    assert "SLURM_CONF" in env
    for name in ("SLURM_JOB", "RAY_ADDRESS", "SANDBOX_PORTS_DIR", "NEMO_RUN_RAY_LIFE"):
        assert name not in env


def test_a_job_that_slurm_has_without_an_answer_is_not_submitted_twice(over):
    commands(
        over,
        sbatch='n=$(cat "$SLURM/n" 2>/dev/null || echo 0); echo $((n + 1)) > "$SLURM/n"\n'
        'echo "107|$PWD" > "$SLURM/has"; echo "Socket timed out" >&2; exit 1',
        squeue='echo "106 /another"; sed "s/|/ /" "$SLURM/has"; exit 0',
    )
    renew(over)
    assert (over.life(2) / "job").read_text() == "107\n"
    assert (over.slurm / "n").read_text() == "1\n"


@pytest.mark.parametrize(
    ("words", "tries"), [("Invalid account", 1), ("Unable to contact slurm controller", 4)]
)
def test_what_slurm_does_not_take_is_told(over, words, tries):
    commands(over, sbatch=f'echo x >> "$SLURM/n"; echo "{words}" >&2; exit 1', squeue="exit 0")
    assert words in renew(over)
    assert words in (over.life(2) / "refused").read_text()
    assert not (over.life(2) / "job").exists()
    assert (over.slurm / "n").read_text().count("x") == tries


def test_client_and_script_know_by_the_same_words_that_the_controller_is_away():
    (words,) = re.findall(r"grep -qE '(.*)' sbatch/err", template("renew.sh.j2"))
    assert words.split("|") == list(cluster._AWAY)


@pytest.mark.parametrize("name", ["1/stop", "2/stop"])
def test_a_cluster_that_is_ended_meanwhile_leaves_no_job(over, name):
    commands(over, sbatch=f'touch "{over.life().parent}/{name}"')
    renew(over)
    assert (over.slurm / "cancelled").read_text() == "101\n"
    assert (over.life(2) / "stop").exists()


def begin(world: World, job: str) -> subprocess.CompletedProcess:
    """Run the first lines of the script as a job of Slurm."""
    text = template("ray.sub.j2")
    begin, end = (
        text.index('if [[ -n "${NEMO_RUN_RAY_LIFE:-}" ]]'),
        text.index('if [[ -z "$NEMO_RUN_RAY_END_TIME" && -n'),
    )
    env = {**os.environ, "NEMO_RUN_RAY_LIFE": str(world.life()), "SLURM_JOB_ID": job}
    words = ["bash", "-eu", "-o", "pipefail"]
    script = f"{text[begin:end]}\necho it begins"
    return subprocess.run(words, input=script, env=env, capture_output=True, text=True)


def test_of_two_jobs_that_slurm_has_for_one_allocation_one_begins(over):
    assert begin(over, "101").stdout == "it begins\n"
    second = begin(over, "102")
    assert second.returncode == 0
    assert "submitted twice; Slurm job 101 is" in second.stdout
    assert "it begins" not in second.stdout
    assert (over.life() / "job").read_text() == "101\n"
    assert begin(over, "101").stdout == "it begins\n", "a requeue"


def ends_in(world: World, **variables: str) -> str:
    """Seconds until the end by the node's clock, as the script tells the nodes."""
    text = template("ray.sub.j2")
    begin, end = text.index("ends_after() {"), text.index("# Ray would make an env")
    job = f"""{text[begin:end]}
echo "${{NEMO_RUN_RAY_END_TIME:+$((NEMO_RUN_RAY_END_TIME - $(date +%s)))}}"
"""
    env = {name: value for name, value in os.environ.items() if "SLURM_JOB_" not in name}
    env |= {"SLURM_JOB_ID": "101", "NEMO_RUN_RAY_LIFE": str(world.life()), **variables}
    words = ["bash", "-eu", "-o", "pipefail"]
    done = subprocess.run(words, input=job, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("left", "seconds"),
    [("1-02:03:04", 93784), ("10:09", 609), ("8:09:08", 29348), ("UNLIMITED", None), ("", None)],
)
def test_an_older_slurm_is_asked_when_the_job_ends(over, left, seconds):
    commands(over, squeue=f"echo {left}; exit 0")
    found = ends_in(over)
    assert found == "" if seconds is None else abs(int(found) - seconds) <= 3


@pytest.mark.parametrize(
    ("ahead_s", "waited_s", "seconds"),
    [(0, 0, 3600), (600, 0, 3600), (-600, 0, 3000), (0, 90, 3510)],
)
def test_the_end_never_seems_later_than_it_is(over, ahead_s, waited_s, seconds):
    """The controller's clock may be ahead, and a prolog may have taken time before the script."""
    start = int(time.time()) + ahead_s - waited_s
    times = {"SLURM_JOB_START_TIME": str(start), "SLURM_JOB_END_TIME": str(start + 3600)}
    assert abs(int(ends_in(over, **times)) - seconds) <= 3
