"""What dies, and what the job says of it: it ends within a minute, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.slurm.conftest import BIN, RayOnSlurm, Slurm, Start

_FOREVER = "sleep 600"


def _on(slurm: Slurm, host: str, text: str) -> list[int]:
    """The processes of a host that have a text among their words."""
    pid = slurm.bed("exec", host, "--", "sh", "-c", "readlink /proc/1/ns/pid").strip()
    return [one for one in slurm.processes(text) if _namespace(one) == pid]


def _is_srun(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        return any(os.path.basename(word) == "srun" for word in words[:3])
    return False


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _kill(slurm: Slurm, host: str, text: str) -> None:
    pids = _on(slurm, host, text)
    assert pids, f"{text} does not run on {host}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _failed(job: RayOnSlurm, *words: str) -> None:
    """The job has ended with the cluster's exit code, says why, and has left nothing."""
    began = time.monotonic()
    assert job.wait(within_s=75) == ("FAILED", "70:0")
    assert time.monotonic() - began < 60
    for word in words:
        assert word in job.why
        assert word in job.told
    job.wait_gone()


@contextlib.contextmanager
def _without(what: str, slurm: Slurm, host: str) -> Iterator[None]:
    """A host without its power or its cable."""
    slurm.bed("crash" if what == "power" else "cut", host)
    try:
        yield
    finally:
        if what == "power":
            slurm.bed("up", "4")
            slurm.bed("slurmd", host)
            slurm.wait_idle()
        else:
            slurm.bed("heal", host)


@contextlib.contextmanager
def _instead_of_ray(slurm: Slurm, host: str, text: str | None) -> Iterator[None]:
    """Another program, or none, in the place of ``ray`` on one host."""
    other = slurm.folder / "other-bin"
    other.mkdir(exist_ok=True)
    (other / "ray").unlink(missing_ok=True)
    if text is not None:
        (other / "ray").write_text(text)
        (other / "ray").chmod(0o755)
    slurm.bed("exec", host, "--", "mount", "--bind", str(other), str(BIN))
    try:
        yield
    finally:
        slurm.bed("exec", host, "--", "umount", str(BIN))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("does", "limit_s", "code", "words"),
    [
        ("exit 9", "5", None, "no head was there within 5 s"),
        (
            "exec sleep 600",
            "3",
            "70:0",
            "The program has not begun on node n1 (the head) within 63 s",
        ),
    ],
    ids=["it ends at once", "it hangs"],
)
def test_the_program_never_begins_on_the_head(slurm, start, does, limit_s, code, words):
    """Without a python3, or as the task waits for an image or a mount: nobody there can say so.

    Where it hangs srun waits too.
    """
    python = slurm.folder / f"python-but-on-n1-{limit_s}"
    python.write_text(f'#!/bin/sh\n[ "$(hostname)" != n1 ] || {does}\nexec python3 "$@"\n')
    python.chmod(0o755)
    variables = {"NEMO_RUN_RAY_PYTHON": str(python), "RAY_HEAD_START_TIMEOUT": limit_s}
    job = start("true", env=variables)
    ended = job.wait(within_s=150) if code else job.wait()
    assert ended == ("FAILED", code or ended[1])
    assert words in job.told
    job.wait_gone()


@pytest.mark.soak
def test_the_time_limit_ends_the_job_with_a_word(slurm, start):
    job = start(_FOREVER, time="00:01:00", nodes=2)
    job.wait_ready()
    assert job.wait(within_s=180)[0] == "TIMEOUT"
    assert "Slurm's time limit has ended the job" in job.told
    job.wait_gone()


@pytest.mark.parametrize("host", ["n1", "n3"])
def test_ray_is_killed(slurm, start, host):
    job = start(_FOREVER)
    job.wait_ready()
    _kill(slurm, host, str(BIN / "ray"))
    log = "ray-head.log" if host == "n1" else "ray-worker-2.log"
    _failed(job, f"node {host}", "killed by SIGKILL", log, "| Ray runtime started.")


@pytest.mark.parametrize("host", ["n1", pytest.param("n3", marks=pytest.mark.soak)])
def test_the_node_program_is_killed(slurm, start, host):
    job = start(_FOREVER)
    job.wait_ready()
    watchdog = min(_on(slurm, host, f"{job.run}/node.pyz"))
    os.kill(watchdog, signal.SIGKILL)
    state, code = job.wait(within_s=75)
    assert (state, code) == ("FAILED", "70:0")
    assert f"node {host}" in job.why
    assert "was killed" in job.why
    job.wait_gone()


def test_the_driver_is_killed(slurm, start):
    job = start("sleep 601.25")
    job.wait_ready()
    wait_for(lambda: _on(slurm, "n1", "601.25"), 20)
    _kill(slurm, "n1", "601.25")
    assert job.wait() == ("FAILED", "137:0")
    assert "the driver: killed by SIGKILL" in job.why
    job.wait_gone()


@pytest.mark.soak  # Slurm itself needs most of its 50 s
def test_a_worker_loses_power(slurm, start):
    job = start(_FOREVER)
    job.wait_ready()
    with _without("power", slurm, "n4"):
        wait_for(lambda: (job.run / "end.json").exists(), 60)
        assert "node n4 (rank 3)" in job.why
        wait_for(lambda: not slurm.processes(str(job.folder)), 60)
    job.wait_gone()


@pytest.mark.soak  # as above
def test_the_head_loses_power(slurm, start):
    """With it the job's own script dies, so the others end by themselves."""
    job = start(_FOREVER, additional_parameters={"no_requeue": True})
    job.wait_ready()
    with _without("power", slurm, "n1"):
        wait_for(lambda: not slurm.processes(str(job.run)), 60)
        assert job.wait(within_s=120)[0] == "NODE_FAIL"
    job.wait_gone()


@pytest.mark.soak
@pytest.mark.parametrize(("host", "process"), [("n1", "gcs_server"), ("n2", "raylet")])
def test_a_process_of_a_real_ray_is_killed(slurm, start, tmp_path, host, process):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").symlink_to(BIN / "srun")
    # The only folder that each of these hosts has for itself, as their raylets need one.
    env = {"PATH": f"{tools}:{Path(sys.executable).parent}:$PATH", "RAY_TEMP_DIR": "/tmp/ray"}
    job = start(_FOREVER, nodes=2, env=env)
    job.wait_ready()
    wait_for(lambda: (job.logs / "ray-job.log").exists(), 30)
    # Others have the path of the raylet's socket among their words.
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in _on(slurm, host, f"/{process}")}
    (pid,) = (pid for pid, name in names.items() if name.strip() == process)
    os.kill(pid, signal.SIGKILL)
    _failed(job, f"node {host}")


def test_a_host_is_cut_off(slurm, start):
    """Its file system goes on here, so only Ray's own list tells."""
    job = start(_FOREVER)
    job.wait_ready()
    with _without("cable", slurm, "n4"):
        wait_for(lambda: (job.run / "end.json").exists(), 60)
        assert "node n4 (rank 3)" in job.why
    job.wait(within_s=90)
    job.wait_gone()


def test_without_fail_fast_the_cluster_goes_on(slurm, start):
    job = start("sleep 6; exit 4", env={"NEMO_RUN_RAY_FAIL_FAST": "0"})
    job.wait_ready()
    _kill(slurm, "n3", str(BIN / "ray"))
    assert job.wait() == ("FAILED", "4:0")
    assert "node n3" not in job.why
    assert "node n3 (rank 2): Ray has ended" in job.told


@pytest.mark.soak  # Slurm notices the loss after 30 s
def test_without_fail_fast_a_node_may_lose_its_power(slurm, start):
    env, further = {"NEMO_RUN_RAY_FAIL_FAST": "0"}, {"no_kill": True}
    job = start("sleep 60; exit 4", env=env, additional_parameters=further)
    job.wait_ready()
    with _without("power", slurm, "n4"):
        assert job.wait(within_s=150) == ("FAILED", "4:0"), job.told
    assert "the driver: exit code 4" in job.why
    job.wait_gone()


def test_fewer_workers_may_do(slurm, start):
    with _instead_of_ray(slurm, "n3", "#!/bin/sh\nexec sleep 600\n"):
        job = start("echo there", env={"NEMO_RUN_RAY_MIN_WORKERS": "2"})
        assert job.wait() == ("COMPLETED", "0:0")
    assert "Ray is ready: 3 nodes" in job.told


def test_slurms_controller_is_started_again(slurm, start):
    job = start("sleep 5; exit 6")
    job.wait_ready()
    slurm.bed("slurmctld")
    wait_for(lambda: (job.run / "exit_code").exists(), 60)
    slurm.wait_idle()
    assert job.wait(within_s=90)[1] == "6:0"
    job.wait_gone()


def test_a_requeue_begins_with_an_empty_folder(slurm, start):
    sandbox = f'echo "sandbox ${{SLURM_RESTART_COUNT:-0}}"; exec {_SERVER}'
    command = 'echo "start ${SLURM_RESTART_COUNT:-0}"; sleep 3'
    job = start(command, env={"SANDBOX_COMMAND": f"'{sandbox}'"})
    job.wait_ready()
    own = job.logs / "ray-job.log"
    wait_for(lambda: own.exists() and "start 0" in own.read_text(), 30)
    slurm.ask("scontrol", "requeue", job.job)
    again = job.folder / "run" / f"{job.job}.1"
    wait_for(lambda: slurm.state(job.job)[0] == "PENDING", 60)
    slurm.ask("scontrol", "update", f"JobId={job.job}", "StartTime=now")  # else in two minutes
    wait_for(again.exists, 60)
    assert job.wait(within_s=90) == ("COMPLETED", "0:0")
    assert job.log("restart-0/sandbox-1.log").startswith("sandbox 0\n")
    assert job.log("sandbox/sandbox-1.log").startswith("sandbox 1\n")
    assert job.log("ray-job.log") == "start 1\n"
    assert job.log("restart-0/ray-job.log") == "start 0\n"
    assert "Ray runtime started." in job.log("restart-0/ray-head.log")
    job.wait_gone()


@pytest.mark.parametrize("command", [_FOREVER, pytest.param(None, marks=pytest.mark.soak)])
def test_a_signal_that_is_asked_for_ends_the_job_with_a_word(slurm, start, command):
    """With a driver, and where a cluster stays up. ``--signal=B:USR1@60`` sends the same."""
    job = start(command, nodes=2)
    job.wait_ready()
    slurm.ask("scancel", "--batch", "--signal=USR1", job.job)
    _failed(job, "Slurm has sent it SIGUSR1")


def test_ray_is_missing_on_one_node(slurm, start):
    with _instead_of_ray(slurm, "n3", None):
        job = start(_FOREVER)
        _failed(job, "node n3", "there is no program 'ray'", "ray: not found")


def test_a_ray_that_does_not_start_is_tried_again_and_named(slurm, start):
    text = "#!/bin/sh\necho RuntimeError: Version mismatch: the cluster has Ray 2.60.0; exit 1\n"
    with _instead_of_ray(slurm, "n2", text):
        job = start(_FOREVER, env={"RAY_HEAD_START_TIMEOUT": "20"})
        words = ("not ready within 20 s", "n2, where Ray itself has given up", "exit code 1")
        _failed(job, *words, "Version mismatch", "ray-worker-1.log")
    assert job.told.count("It is started again") >= 2


def test_a_head_whose_ray_starts_twice_has_all_its_workers(slurm, start):
    """The first one ends when its GCS listens, and workers have joined it or are about to."""
    once, ray = slurm.folder / "once", slurm.folder / "ray.py"
    shutil.copy(BIN / "ray.py", ray)
    text = f'#!/bin/sh\nmkdir {once} || exec python3 {ray} "$@"\n'
    with _instead_of_ray(slurm, "n1", f'{text}timeout 3 python3 {ray} "$@"; exit 1\n'):
        assert start("true").wait() == ("COMPLETED", "0:0")
    assert once.exists()


def test_a_node_that_never_joins(slurm, start):
    with _instead_of_ray(slurm, "n3", "#!/bin/sh\nexec sleep 600\n"):
        job = start(_FOREVER, env={"RAY_HEAD_START_TIMEOUT": "6"})
        _failed(job, "not ready within 6 s", "n3", "ray-worker-2.log")


def test_a_folder_that_is_not_shared(slurm, start):
    hidden = slurm.folder / "jobs"
    hidden.mkdir(exist_ok=True)
    slurm.bed("exec", "n3", "--", "mount", "-t", "tmpfs", "none", str(hidden))
    try:
        job = start("true", env={"NEMO_RUN_RAY_SHARE_TIMEOUT": "5"})
        assert job.wait()[0] == "FAILED"
    finally:
        slurm.bed("exec", "n3", "--", "umount", str(hidden))
    assert "n3 has not written into" in job.why
    assert "which node n1 sees" in job.why


@pytest.mark.parametrize(
    ("host", "name"),
    [("n2", "NODE_MANAGER_PORT"), pytest.param("n1", "PORT", marks=pytest.mark.soak)],
)
def test_a_port_that_is_set_and_taken(slurm, start, tmp_path, host, name):
    log = tmp_path / "taken.log"
    program = "import socket, time; s = socket.create_server(('', 53001)); time.sleep(60)"
    slurm.bed("spawn", host, str(log), "--", "python3", "-c", program)
    wait_for(lambda: _on(slurm, host, "53001"), 10)
    job = start("true", env={name: "53001"})
    _failed(job, f"node {host}", f"{name}=53001 is taken on node {host}")
    _kill(slurm, host, "53001")


def test_a_head_with_two_addresses(slurm, start):
    """The first one is that of a network which only the head has."""
    slurm.bed("exec", "n1", "--", "ip", "link", "add", "a0", "type", "bridge")
    slurm.bed("exec", "n1", "--", "ip", "addr", "add", "10.99.0.1/24", "dev", "a0")
    slurm.bed("exec", "n1", "--", "ip", "link", "set", "a0", "up")
    try:
        job = start("true")
        assert job.wait() == ("COMPLETED", "0:0")
    finally:
        slurm.bed("exec", "n1", "--", "ip", "link", "del", "a0")


def test_a_folder_that_cannot_be_made_is_named(slurm, start):
    job = start("true", env={"RAY_TEMP_DIR": "/proc/none"})
    assert job.wait()[0] == "FAILED"
    assert "/proc/none" in job.told


#: Shows Ray and this package's program on two of the hosts a wrong time, in seconds. Munge refuses
#: the requests of a host whose own clock is wrong, so Slurm's programs keep the right one.
_WRONG_CLOCK = """#!/bin/sh
case $(hostname) in n2) wrong=+600 ;; n3) wrong=-600 ;; *) exec python3 "$@" ;; esac
export LD_PRELOAD={library} FAKETIME=$wrong NO_FAKE_STAT=1
date +%s > {folder}/$(hostname)
exec python3 "$@"
"""


@pytest.mark.soak
def test_clocks_that_differ_by_ten_minutes(slurm, start, tmp_path):
    """For longer than it takes until a node that shows no life is given up."""
    libraries = list(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not libraries:
        pytest.skip("the library libfaketime is not there (Debian: faketime)")
    python = tmp_path / "python"
    python.write_text(_WRONG_CLOCK.format(library=libraries[0], folder=tmp_path))
    python.chmod(0o755)
    job = start("sleep 45", env={"NEMO_RUN_RAY_PYTHON": str(python)})
    assert job.wait(within_s=100) == ("COMPLETED", "0:0")
    ahead, behind = (int((tmp_path / host).read_text()) for host in ("n2", "n3"))
    assert 1190 < ahead - behind < 1210
    job.wait_gone()


@pytest.mark.soak
def test_a_disk_that_is_full_for_a_while(slurm, start):
    """Longer than it takes until a node that shows no life is given up."""
    job = start(
        f"touch {slurm.folder}/begun; sleep 50; touch {slurm.folder}/after", jobs_in="small"
    )
    # The job's script hands the command over in a file, once the cluster is ready.
    wait_for((slurm.folder / "begun").exists, 60)
    filler = slurm.small / "filler"
    full = subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], capture_output=True)
    assert b"No space left" in full.stderr
    time.sleep(40)
    assert job.slurm.state(job.job)[0] == "RUNNING"
    filler.unlink()
    assert job.wait() == ("COMPLETED", "0:0")
    assert (slurm.folder / "after").exists()
    job.wait_gone()


_SERVER = "python3 -m http.server $NGINX_PORT"


def test_the_driver_waits_for_the_sandbox_of_every_node(slurm, start):
    job = start('ls "$SANDBOX_PORTS_DIR"', env={"SANDBOX_COMMAND": f"'sleep 2; exec {_SERVER}'"})
    assert job.wait() == ("COMPLETED", "0:0")
    ready = [line for line in job.log("ray-job.log").splitlines() if "READY" in line]
    assert ready == [f"SANDBOX_READY_n{number}" for number in (1, 2, 3, 4)]
    job.wait_gone()


@pytest.mark.parametrize("image", [pytest.param("", marks=pytest.mark.soak), "sandbox:1"])
def test_a_sandbox_that_dies_ends_the_job(slurm, start, tmp_path, image):
    """Beside Ray, or in a container of its own."""
    variables = {"SANDBOX_COMMAND": f"'exec {_SERVER}'", "SANDBOX_CONTAINER": image}
    job = start(_FOREVER, env=variables)
    job.wait_ready()
    _kill(slurm, "n2", "http.server")
    sidecar = ("node n2", "the sidecar sandbox has ended", "killed by SIGKILL", "sandbox-1.log")
    step = ("the step with the sandbox has ended", "n2: task 1: Killed", str(job.logs / "sandbox"))
    _failed(job, *(step if image else sidecar))
    calls = (tmp_path / "pyxis").read_text()
    assert ("--container-image=sandbox:1" in calls) == bool(image)


def test_a_sandbox_that_dies_before_it_is_ready(slurm, start):
    job = start("true", env={"SANDBOX_COMMAND": "'echo no such image; exit 9'"})
    _failed(job, "the sidecar sandbox has ended: exit code 9", "no such image")


#: What the soak kills, by the words of its processes; ``watchdog`` and ``runner`` are the two
#: processes of the program on a node.
_VICTIMS = {
    "ray": str(BIN / "ray"),
    "watchdog": "node.pyz",
    "runner": "node.pyz",
    "driver": "8.602",
}
_STRIKES = (*_VICTIMS, "sidecar", "srun", "power", "cable", "controller", "scancel")


def _strike(slurm: Slurm, job: RayOnSlurm, what: str, host: str) -> Callable[[], None]:
    """Let something die, if it is there; what puts the hosts in order again."""
    if what in ("power", "cable"):
        lost = contextlib.ExitStack()
        lost.enter_context(_without(what, slurm, host))
        return lost.close
    if what == "controller":
        slurm.bed("slurmctld")
    elif what == "scancel":
        slurm.ask("scancel", job.job)
    else:
        text = _VICTIMS.get(what, "node.pyz" if what == "srun" else "http.server")
        pids = sorted(_on(slurm, "n1" if what in ("driver", "srun") else host, text))
        if text == "node.pyz":  # among the words of srun, too
            pids = [pid for pid in pids if _is_srun(pid) == (what == "srun")]
        if what in ("watchdog", "runner"):
            pids = pids[:1] if what == "watchdog" else pids[1:2]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return lambda: None


#: Processes that keep processors busy, beside every third strike of the long soak.
_BUSY = 8
#: Ends after a while by itself, and with the test.
_SPIN = """
import os, time
parent, end = os.getppid(), time.monotonic() + 400
while os.getppid() == parent and time.monotonic() < end:
    pass
"""


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _one_run(slurm: Slurm, start: Start, chance: random.Random, busy: int) -> str:
    """Strike a job at some moment of its life; in words what is wrong with its end, if anything."""
    what, host = chance.choice(_STRIKES), chance.choice(["n1", "n2", "n3", "n4"])
    if what in ("power", "cable") and host == "n1":
        host = "n2"  # the job's own script runs on n1: Slurm itself ends or requeues the job then
    wait_s = chance.uniform(0, 9)
    variables = {"SANDBOX_COMMAND": f"'exec {_SERVER}'", "RAY_HEAD_START_TIMEOUT": "120"}
    job = start("sleep 8.602; exit 5", env=variables)
    wait_for(lambda: slurm.state(job.job)[0] != "PENDING", 60)
    time.sleep(wait_s)
    restore = _strike(slurm, job, what, host)
    told = f"{what} on {host} after {wait_s:.1f} s, with {busy} busy processes"
    print(f"{job.job}: {told}", file=sys.stderr)
    # An srun that makes its step while the controller dies asks again after a minute (Slurm 22.05).
    limit_s = 75 + 75 * (what == "controller") + 75 * bool(busy)
    try:
        wait_for(lambda: (job.run / "exit_code").exists() or _is_over(slurm, job), limit_s)
    finally:
        restore()
    slurm.wait_idle()
    state, codes = slurm.state(job.job)
    code = codes.partition(":")[0]
    job.wait_gone()
    if state == "PENDING" and what in ("power", "cable") and "NODE FAILURE" in job.told:
        slurm.ask("scancel", job.job)  # Slurm has seen it before us, and would start the job again
        return ""
    # Slurm kills the whole step when a node is missing at its start.
    others = {"driver": {"137"}, "scancel": {"143", "0"}}
    allowed = {"5", "70"} | others.get(what, set())
    if code not in allowed:
        return f"{told}: exit code {code}\n{job.told}"
    if code == "70" and "Ray itself has given up" in job.why:
        return ""  # its own limits were too short for this machine, and the job says so
    if code == "70" and what not in ("controller", "power", "srun") and host not in job.why:
        return f"{told}: {job.why}"
    return ""


@pytest.mark.soak
def test_a_worker_that_slurm_cannot_reach_at_the_start_is_named(slurm, start):
    """Slurm kills the step on the other nodes."""
    with _without("cable", slurm, "n3"):
        job = start(_FOREVER)
        assert job.wait(within_s=75) == ("FAILED", "70:0")
    assert "has not begun on n3" in job.why
    job.wait_gone()
    slurm.wait_idle()


@pytest.mark.soak
def test_a_worker_that_loses_power_before_it_begins(slurm, start):
    """Slurm ends the step itself, or waits for a task of it that never says that it has ended."""
    job = start(_FOREVER, env={"NEMO_RUN_RAY_SHARE_TIMEOUT": "8"})
    wait_for(lambda: slurm.state(job.job)[0] != "PENDING", 30)
    with _without("power", slurm, "n3"):
        wait_for(lambda: (job.run / "exit_code").exists(), 75)
    assert job.wait(within_s=90)[0] == "FAILED"
    job.wait_gone()


def _is_over(slurm: Slurm, job: RayOnSlurm) -> bool:
    return slurm.state(job.job)[0] not in ("PENDING", "RUNNING", "COMPLETING")


def _soak(slurm: Slurm, start: Start, loads: list[int], seed: int) -> None:
    """Strike once for each number of busy processes."""
    print(f"seed {seed}", file=sys.stderr)
    chance = random.Random(seed)
    broken = []
    for busy in loads:
        with _busy(busy):
            wrong = _one_run(slurm, start, chance, busy)
        broken += [wrong] if wrong else []
    assert not broken, f"seed {seed}:\n" + "\n".join(broken)


def test_some_strikes_at_some_moments(slurm, start):
    _soak(slurm, start, [0, 0], seed=3)


@pytest.mark.soak
def test_sixty_strikes(slurm, start):
    """A third of them on a machine that has far too much to do; ``STRIKES`` makes it shorter."""
    loads = [0, 0, _BUSY] * (int(os.environ.get("STRIKES", "60")) // 3)
    _soak(slurm, start, loads, seed=int(os.environ.get("SEED", random.randrange(10**6))))
