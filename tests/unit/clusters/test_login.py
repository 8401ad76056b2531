"""Commands on a login node, and which host keys are accepted, by a real SSH server."""

from __future__ import annotations

import contextlib
import http.client
import os
import pty
import select
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nemo_run as run
import pytest
from nemo_run.run.ray.slurm import SlurmRayCluster

from nemo_run_ray import ssh
from nemo_run_ray.clusters.slurm import login as login_module
from nemo_run_ray.clusters.slurm.login import Login
from nemo_run_ray.errors import ClusterError, Unanswered
from tests.conftest import patched, processes_where, wait_for
from tests.http_server import Handler, serving
from tests.slurm.sshd import Sshd, running


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Sshd]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("sshd", "ssh"))):
        pytest.skip("a server needs root, sshd and ssh (Debian: openssh-server, openssh-client)")
    with running(tmp_path_factory.mktemp("sshd"), {}) as server:
        yield server


@pytest.fixture
def sshd(server, monkeypatch) -> Sshd:
    monkeypatch.setenv("PATH", f"{server.bin}:{os.environ['PATH']}")
    server.configure("")
    server.know(f"[127.0.0.1]:{server.port} {server.host_key('ed25519')}")
    return server


def _tunnel(sshd: Sshd, **fields) -> run.SSHTunnel:
    given = {"identity": str(sshd.key), "job_dir": "/nowhere", **fields}
    return run.SSHTunnel(host="127.0.0.1", user="root", port=sshd.port, **given)


def _run(sshd: Sshd) -> bytes:
    """What a command on the server prints."""
    login = Login(_tunnel(sshd))
    try:
        return login.run("echo here")
    finally:
        login.ssh.close()


#: Lines of ``known_hosts`` by which OpenSSH refuses the server, and what it says.
_REFUSED = {
    "unknown": ("[127.0.0.2]:{port} {key}", ""),
    "changed": ("[127.0.0.1]:{port} {other}", "has changed"),
    "revoked": ("[127.0.0.1]:{port} {key}\n@revoked * {key}", "revoked"),
}


def _know(sshd: Sshd, name: str, folder) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "other")]
    subprocess.run(words, check=True)
    other = " ".join((folder / "other.pub").read_text().split()[:2])
    key = sshd.host_key("ed25519")
    sshd.know(_REFUSED[name][0].format(port=sshd.port, key=key, other=other))


@pytest.mark.parametrize("name", _REFUSED)
def test_a_host_key_that_is_refused(sshd, tmp_path, name):
    assert _run(sshd) == b"here\n"
    _know(sshd, name, tmp_path)
    next_step = rf"{_REFUSED[name][1]}.*Host key verification failed.*; `ssh -p {sshd.port} "
    with pytest.raises(ClusterError, match=next_step):
        _run(sshd)


def test_nemo_runs_own_ray_cluster_sends_nothing_to_a_host_whose_key_is_unknown(sshd, tmp_path):
    tunnel = _tunnel(sshd, job_dir=str(tmp_path / "jobs"))
    cluster = SlurmRayCluster(
        name="c", executor=run.SlurmExecutor(account="a", partition="p", tunnel=tunnel)
    )
    _know(sshd, "unknown", tmp_path)
    refused = pytest.raises(ClusterError, match="Host key verification failed")
    with patched("slurm_ray"), refused:
        cluster.create()
    assert not (tmp_path / "jobs").exists()


def test_a_session_of_nemo_runs_tunnel(sshd, tmp_path):
    tunnel = _tunnel(sshd)
    tunnel.session = ssh.Session(tunnel)
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    tunnel.put(str(tmp_path / "bytes"), str(tmp_path / "it's there"))
    assert (tmp_path / "it's there").read_bytes() == bytes(range(256))
    assert tunnel.run("echo 'a  b'; exit 3", warn=True).stdout == "a  b\n"


class _Hello(Handler):
    def answer(self) -> None:
        self.send(200, "hello")


def test_a_forward_leads_through_ssh_also_after_that_has_broken_off(sshd):
    def asked() -> bytes:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return urllib.request.urlopen(url, timeout=10).read()
        return b""

    login = Login(_tunnel(sshd))
    with serving(_Hello) as there:
        url = login.forward("127.0.0.1", int(there.rpartition(":")[2]))
        assert url != there
        assert asked() == b"hello"
        assert sshd.drop()
        wait_for(lambda: asked() == b"hello", 20)
        child = os.fork()
        if child == 0:
            login.ssh.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert asked() == b"hello"
    assert asked() == b"", "nobody listens there"
    login.ssh.close()


def test_the_users_configuration_of_ssh_counts(sshd):
    sshd.configure("Host 127.0.0.1\nHostKeyAlias team")
    sshd.know(f"team {sshd.host_key('ed25519')}")
    assert _run(sshd) == b"here\n"


def test_a_jump_host(sshd, tmp_path):
    """Its refusal is told; the connection outlives Ctrl-C and ends with a killed client."""
    own = f"HostName 127.0.0.1\nPort {sshd.port}\nUser root\nIdentityFile {sshd.key}\n"
    hosts = "".join(f"Host {name}\n{own}HostKeyAlias {name}\n" for name in ("jump", "behind"))
    sshd.configure(f"{hosts}ProxyJump jump\nRequestTTY force\nRemoteCommand tmux")
    key = sshd.host_key("ed25519")
    sshd.know(f"behind {key}")
    tunnel = 'run.SSHTunnel(host="behind", user="root", job_dir="/")'
    code = f"""
import os, signal, nemo_run as run
from nemo_run_ray.clusters.slurm.login import Login
signal.signal(signal.SIGINT, lambda *_: None)
login = Login({tunnel})
login.run(":")
socket = login.ssh._socket
os.killpg(0, signal.SIGINT)
login.run("sleep 1")
assert socket == login.ssh._socket
print(socket, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert "ClusterError: The key of root@behind, or of a jump host," in done.stderr
    sshd.know(f"behind {key}", f"jump {key}")
    with (tmp_path / "out").open("w") as out:
        subprocess.run(words, stdout=out, timeout=60, start_new_session=True)
    socket = (tmp_path / "out").read_text().strip()
    assert socket.endswith("/socket")
    wait_for(lambda: not processes_where(lambda _, words: socket in " ".join(words)), 10)
    shutil.rmtree(Path(socket).parent)


def test_without_openssh_no_host_is_trusted(sshd, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match=r"no program 'ssh'\. Install OpenSSH's client"):
        _run(sshd)


_LOGIN = """
import atexit, sys, nemo_run as run
from nemo_run_ray.clusters.slurm.login import Login
tunnel = run.LocalTunnel(job_dir="/")
if len(sys.argv) > 2:
    tunnel = run.SSHTunnel(host="127.0.0.1", user="root", port=int(sys.argv[2]),
                           identity=sys.argv[3] or None, job_dir="/")
login = Login(tunnel)
atexit.register(lambda: login.run(f"echo left > {sys.argv[1]}"))
login.run("echo here")
print(login.ssh and login.ssh._socket)
"""


def test_a_password_is_asked_for_in_a_terminal(sshd, tmp_path):
    sshd.configure("PubkeyAuthentication no")
    words = [sys.executable, "-c", _LOGIN, str(tmp_path / "out"), str(sshd.port), ""]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(words[0], words)
    shown = ""
    with contextlib.suppress(OSError):  # EIO: the program has ended
        while True:
            assert select.select([terminal], [], [], 60)[0], shown
            shown += os.read(terminal, 4096).decode()
            if "password: " in shown:  # an error message may follow the prompt
                os.write(terminal, b"wrong\n")
                shown = shown.replace("password: ", "password:\n")
    os.close(terminal)
    os.waitpid(pid, 0)
    assert shown.count("password:\n") >= 3
    assert "Nobody could log in as root@127.0.0.1" in shown


@pytest.mark.parametrize("is_here", [True, False])
def test_a_program_leaves_while_python_ends(sshd, tmp_path, is_here):
    """When no thread can be started any more; its connection ends with it."""
    words = [] if is_here else [str(sshd.port), str(sshd.key)]
    done = subprocess.run(
        [sys.executable, "-c", _LOGIN, str(tmp_path / "out"), *words],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "left\n"
    socket = done.stdout.strip()
    if not is_here:
        assert not Path(socket).parent.exists()
        wait_for(lambda: not processes_where(lambda _, words: socket in " ".join(words)), 10)


def test_a_login_prints_what_it_likes(tmp_path, monkeypatch):
    """The start file of a shell; and no command reads the script."""
    monkeypatch.setenv("ENV", str(tmp_path / "profile"))
    login = Login(run.LocalTunnel(job_dir=str(tmp_path)))
    assert login.run("cat; echo 'it''s'; echo \"$(printf 'a\\tb')\"") == b"its\na\tb\n"
    login.put(b"text with 'quotes'\nand lines\n", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "text with 'quotes'\nand lines\n"
    login.put(bytes(range(256)) * 1000, str(tmp_path / "bytes"))
    assert login.run(f"cat {tmp_path}/bytes") == bytes(range(256)) * 1000
    with pytest.raises(ClusterError, match="No such file"):
        login.run(f"cat {tmp_path}/none")
    with pytest.raises(ClusterError, match="nowhere"):
        login.put(b"text", str(tmp_path / "nowhere" / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "file"]


def test_a_command_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(login_module, "_COMMAND_S", 1)
    login = Login(run.LocalTunnel(job_dir=str(tmp_path)))
    with pytest.raises(Unanswered, match=r"gave no answer within 1 s"):
        login.run(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
