"""Commands on a login node, and which host keys are accepted, by a real SSH server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import nemo_run as run
import pytest
from nemo_run.run.ray.slurm import SlurmRayCluster

from nemo_run_ray import patches
from nemo_run_ray.clusters.slurm import login as login_module
from nemo_run_ray.clusters.slurm.login import Login
from nemo_run_ray.errors import ClusterError, Unanswered
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
    monkeypatch.setenv("HOME", str(server.config.parent.parent))  # NeMo-Run reads it there
    server.configure("")
    server.know()
    return server


def _run(sshd: Sshd, host: str = "127.0.0.1") -> str:
    """What a command on the server prints."""
    port = sshd.port if host == "127.0.0.1" else None
    tunnel = run.SSHTunnel(
        host=host, user="root", port=port, identity=str(sshd.key), job_dir="/nowhere"
    )
    login = Login(tunnel)
    try:
        return login.run("echo here")
    finally:
        if login.session is not None:
            login.session.client.close()


#: Lines of ``known_hosts`` that OpenSSH accepts, of the server and its port.
_KNOWN = {
    "with its port": "[127.0.0.1]:{port} {ed25519}",
    "without its port": "127.0.0.1 {ed25519}",
    "a pattern": "*.example.org,[127.0.*]:{port} {ed25519}",
    "a key that is not the server's first one": "[127.0.0.1]:{port} {rsa}",
    "one of several keys": "[127.0.0.1]:{port} {other}\n[127.0.0.1]:{port} {ed25519}",
}
_REFUSED = {
    "unknown": (
        "[127.0.0.2]:{port} {ed25519}",
        r"is not known in .*with `ssh -o \S+ -p {port} root@",
    ),
    "an authority's": ("@cert-authority * {ed25519}", "is not known in"),
    "changed": (
        "[127.0.0.1]:{port} {other}",
        r"not the known one in .*`ssh-keygen -R '\[127\.0\.0",
    ),
    "revoked": ("[127.0.0.1]:{port} {ed25519}\n@revoked * {ed25519}", "is revoked in"),
}


def _lines(sshd: Sshd, text: str, tmp_path) -> str:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True
    )
    keys = {kind: sshd.host_key(kind) for kind in ("ed25519", "rsa")}
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    return text.format(port=sshd.port, other=other, **keys)


@pytest.mark.parametrize("is_hashed", [False, True])
@pytest.mark.parametrize("name", _KNOWN)
def test_a_host_key_that_openssh_accepts(sshd, tmp_path, name, is_hashed):
    sshd.know(_lines(sshd, _KNOWN[name], tmp_path))
    if is_hashed:
        subprocess.run(["ssh-keygen", "-H", "-f", str(sshd.known_hosts)], capture_output=True)
    assert _run(sshd) == "here\n"


@pytest.mark.parametrize("name", _REFUSED)
def test_a_host_key_that_is_refused(sshd, tmp_path, name):
    line, message = _REFUSED[name]
    sshd.know(_lines(sshd, line, tmp_path))
    with pytest.raises(ClusterError, match=message.format(port=sshd.port)):
        _run(sshd)


def test_nemo_runs_own_ray_cluster_sends_nothing_to_a_host_whose_key_is_unknown(sshd, tmp_path):
    tunnel = run.SSHTunnel(
        host="127.0.0.1", user="root", port=sshd.port, identity=str(sshd.key), job_dir=str(tmp_path)
    )
    executor = run.SlurmExecutor(account="a", partition="p", tunnel=tunnel)
    sshd.know(_lines(sshd, _REFUSED["unknown"][0], tmp_path))
    before = sorted(tmp_path.iterdir())
    patches.apply("slurm_ray")
    try:
        with pytest.raises(ClusterError, match="is not known"):
            SlurmRayCluster(name="c", executor=executor).create()
    finally:
        patches.undo("slurm_ray")
    assert sorted(tmp_path.iterdir()) == before


def test_the_users_configuration_of_ssh_counts(sshd, tmp_path):
    sshd.configure("Host 127.0.0.1\nHostKeyAlias team")
    sshd.know(f"team {sshd.host_key('ed25519')}")
    assert _run(sshd) == "here\n"
    sshd.configure("Host 127.0.0.1\nStrictHostKeyChecking no")
    assert _run(sshd) == "here\n", "a user who wants no check has none"
    sshd.know(_lines(sshd, _REFUSED["changed"][0], tmp_path))
    with pytest.raises(ClusterError, match="is not the known one"):
        _run(sshd)


def test_each_host_of_a_proxy_jump_is_checked(sshd):
    own = f"HostName 127.0.0.1\nPort {sshd.port}\nUser root\nIdentityFile {sshd.key}\n"
    jump = f"Host jump\n{own}HostKeyAlias jump\n"
    sshd.configure(f"{jump}Host behind\n{own}HostKeyAlias behind\nProxyJump jump\n")
    keys = [f"{name} {sshd.host_key('ed25519')}" for name in ("jump", "behind")]
    sshd.know(*keys)
    assert _run(sshd, "behind") == "here\n"
    for name, known in (("jump", keys[1]), ("behind", keys[0])):
        sshd.know(known)
        with pytest.raises(ClusterError, match=rf"The SSH host key of {name} \(.*is not known"):
            _run(sshd, "behind")


def test_without_openssh_no_host_is_trusted(sshd, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match=r"No such file.*'ssh' Install OpenSSH's client"):
        _run(sshd)


def test_a_password_is_asked_for_on_the_connection_that_was_checked(sshd, monkeypatch):
    sshd.know(f"[127.0.0.1]:{sshd.port} {sshd.host_key('ed25519')}")
    handed = iter(["first", "second"])
    tunnel = run.SSHTunnel(host="127.0.0.1", user="root", port=sshd.port, job_dir="/nowhere")
    tunnel.fallback_auth_handler = lambda: next(handed)
    tunnel.connect = lambda: pytest.fail("NeMo-Run's own connection takes any key")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(ClusterError, match="Nobody could log in"):
        Login(tunnel).run("echo here")
    assert not list(handed)


def test_a_login_prints_what_it_likes(tmp_path, monkeypatch):
    """The start file of a shell; and no command reads the script."""
    monkeypatch.setenv("ENV", str(tmp_path / "profile"))
    login = Login(run.LocalTunnel(job_dir=str(tmp_path)))
    assert login.run("cat; echo 'it''s'; echo \"$(printf 'a\\tb')\"") == "its\na\tb\n"
    login.put(b"text with 'quotes'\nand lines\n", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "text with 'quotes'\nand lines\n"
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 1000)
    login.get(str(tmp_path / "bytes"), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == bytes(range(256)) * 1000
    with pytest.raises(ClusterError, match="No such file"):
        login.get(str(tmp_path / "none"), tmp_path / "other")
    with pytest.raises(ClusterError, match="nowhere"):
        login.put(b"text", str(tmp_path / "nowhere" / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "copy", "file"]


def test_a_command_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(login_module, "_COMMAND_S", 0.5)
    login = Login(run.LocalTunnel(job_dir=str(tmp_path)))
    with pytest.raises(Unanswered, match=r"gave no answer within 0\.5 s"):
        login.run(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


_AT_EXIT = """
import atexit, sys, nemo_run as run
from nemo_run_ray.clusters.slurm.login import Login
login = Login(run.LocalTunnel(job_dir="/"))
atexit.register(lambda: login.run(f"echo left > {sys.argv[1]}"))
"""


def test_a_program_leaves_while_python_ends(tmp_path):
    """When no thread can be started any more."""
    done = subprocess.run(
        [sys.executable, "-c", _AT_EXIT, str(tmp_path / "out")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "left\n"
