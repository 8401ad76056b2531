"""SSH connections, to hosts alone whose keys OpenSSH would accept."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import Any

import fabric
import paramiko
from paramiko.hostkeys import HostKeyEntry

from nemo_run_ray.errors import ClusterError, Unanswered

#: Seconds for a new connection.
CONNECT_S = 20


def connect(tunnel: Any) -> fabric.Connection:
    """Connect a NeMo-Run SSH tunnel, which by itself accepts any host key."""
    keys = {"key_filename": [str(tunnel.identity)]} if tunnel.identity else {}
    session = fabric.Connection(
        tunnel.host,
        user=tunnel.user,
        port=tunnel.port,
        connect_kwargs=keys,
        connect_timeout=CONNECT_S,
        forward_agent=False,
        config=fabric.Config(overrides={"run": {"in_stream": False}}),
    )
    hop = session
    while isinstance(hop, fabric.Connection):  # OpenSSH itself checks behind a ProxyCommand
        policy = _KnownHosts(hop)
        hop.client.set_missing_host_key_policy(policy)
        hop.connect_kwargs["transport_factory"] = policy.transport
        hop = hop.gateway
    try:
        try:
            session.open()
        except paramiko.SSHException as error:
            if tunnel.identity or not _is_refusal(error) or not sys.stdin.isatty():
                raise
            _ask_password(session, tunnel)
    except BaseException as error:
        session.client.close()
        if isinstance(error, paramiko.SSHException) and _is_refusal(error):
            raise ClusterError(
                f"Nobody could log in as {tunnel.key} ({error}). Try `ssh {tunnel.key}` in a "
                "shell, and give the tunnel the right user, host, port and identity."
            ) from error
        if isinstance(error, (paramiko.SSHException, OSError, EOFError)):
            raise Unanswered(unreachable(tunnel, error)) from error
        raise
    tunnel.session = session
    return session


def unreachable(tunnel: Any, error: BaseException) -> str:
    """Say that a host cannot be reached, and why."""
    why = str(error).strip().rstrip(".") or type(error).__name__
    return f"{tunnel.key} cannot be reached now: {why}."


def _ask_password(session: Any, tunnel: Any) -> None:
    """Ask twice, as NeMo-Run does, but on the connection whose host key was checked."""
    transport = session.client.get_transport()
    for is_last in (False, True):
        try:
            try:
                transport.auth_interactive_dumb(session.user, tunnel.auth_handler)
            except paramiko.BadAuthenticationType:
                transport.auth_password(session.user, tunnel.fallback_auth_handler())
            session.transport = transport
            return
        except paramiko.AuthenticationException:
            if is_last:
                raise


class _KnownHosts(paramiko.MissingHostKeyPolicy):
    """Accepts the key of one host as OpenSSH does.

    paramiko's own policies read neither patterns and revoked keys nor the configuration of SSH.
    """

    def __init__(self, hop: fabric.Connection) -> None:
        words = ["ssh", "-G", "-p", str(hop.port), "-l", hop.user, "--", hop.original_host]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise ClusterError(
                f"The SSH host key of {hop.original_host} cannot be checked by "
                f"`{shlex.join(words)}`: {getattr(error, 'stderr', '') or error} Install OpenSSH's "
                "client, or correct its configuration."
            ) from error
        rows = (line.partition(" ") for line in done.stdout.splitlines())
        config = {name: value for name, _, value in rows}
        self._host = hop.original_host
        self._login = ["-p", str(hop.port), f"{hop.user}@{hop.original_host}"]
        self._is_strict = config["stricthostkeychecking"] not in ("false", "no", "off")
        files = f"{config['userknownhostsfile']} {config['globalknownhostsfile']}".split()
        self._files = [os.path.expanduser(file) for file in files]  # older ones print the ``~``
        self._names = [hop.host.lower()]
        if hop.port != paramiko.config.SSH_PORT:
            self._names.insert(0, f"[{self._names[0]}]:{hop.port}")
        if "hostkeyalias" in config:
            self._names = [config["hostkeyalias"]]
        # OpenSSH looks without the port where no key is known for the host and its port.
        self._entries = next(filter(None, map(self._known, self._names)), [])

    def _known(self, name: str) -> list[tuple[str, HostKeyEntry]]:
        """The lines for a name that hold a key, each with its mark (``@revoked``) or none."""
        found = []
        for file in filter(os.path.exists, self._files):
            words = ["ssh-keygen", "-F", name, "-f", file]
            for line in subprocess.run(words, capture_output=True, text=True).stdout.splitlines():
                mark, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
                entry = None if line.startswith("#") else HostKeyEntry.from_line(rest)
                if entry is not None and mark in ("", "@revoked"):  # not an authority
                    found.append((mark, entry))
        return found

    def transport(self, *args: Any, **fields: Any) -> paramiko.Transport:
        """A transport that prefers keys of the types that are known for the host."""
        found = paramiko.Transport(*args, **fields)
        options = found.get_security_options()
        names = {entry.key.get_name().replace("ssh-rsa", "rsa") for _, entry in self._entries}
        known = [one for one in options.key_types if one.startswith(tuple(names))]
        options.key_types = (*known, *(one for one in options.key_types if one not in known))
        return found

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        """Accept the key, or raise the error that names the command which adds it."""
        marks = {mark for mark, entry in self._entries if entry.key == key}
        is_changed = any(entry.key.get_name() == key.get_name() for _, entry in self._entries)
        if marks == {""} or not (marks or is_changed or self._is_strict):
            return
        files = " and ".join(self._files)
        add = shlex.join(["ssh", "-o", "StrictHostKeyChecking=ask", *self._login, "true"])
        if marks:
            state, step = "is revoked", "Ask the administrators of the host."
        elif is_changed:
            remove = shlex.join(["ssh-keygen", "-R", self._names[0], "-f", self._files[0]])
            state = "is not the known one"
            step = (
                "Somebody may intercept the connection. Only if the administrators of the host "
                f"confirm the new key, remove the old one with `{remove}` and add it with `{add}`."
            )
        else:
            state = "is not known"
            step = f"Compare it with what the administrators say, and add it with `{add}`."
        raise ClusterError(
            f"The SSH host key of {self._host} ({key.get_name()} {key.fingerprint}) {state} in "
            f"{files}: no connection is made. {step}"
        )


def _is_refusal(error: paramiko.SSHException) -> bool:
    """Whether the host let nobody in, as opposed to a connection that broke off."""
    # Paramiko calls it so when the connection breaks off meanwhile.
    is_one = isinstance(error, paramiko.AuthenticationException) and "saw EOF" not in str(error)
    return is_one or "No authentication methods" in str(error)
