"""Asks whether a service is ready, without blocking the caller's loop.

A process of its own asks: in the caller's loop a slow server would delay everything else, and a
thread might hold a lock when the loop forks.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from contextlib import suppress
from time import monotonic
from typing import Mapping

from ..spec import Env, ProbeSpec
from .supervise import prepare_child

#: Seconds for one try of a port or a GET, and between two reports of a service that is not ready.
_TRY_S, _REPORT_S = 10, 30.0
_LOCAL = "127.0.0.1"
#: The answer of a service that is ready.
_READY = "ready"
#: Bytes of an answer, few enough to be written at once.
_ANSWER_MAX = 2048


class Probing:
    """The tries of one probe, one after the other, until one succeeds or the time is up.

    The address is that by which other roles know the node: a server that listens on 127.0.0.1 alone
    is not ready for them.
    """

    def __init__(
        self,
        spec: ProbeSpec,
        address: str,
        ports: Mapping[str, int],
        env: Env,
        cwd: str | None = None,
    ):
        import http.client  # 2 MiB, which a process without a probe does not need

        self._http = http.client
        self._spec, self._address, self._env, self._cwd = spec, address, env, cwd
        self._port = ports[spec.port] if isinstance(spec.port, str) else spec.port
        where = f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}"
        self._question = {
            "port": f"port {where}",
            "http": f"GET http://{where}{spec.path}",
            "command": f"{list(spec.command)}",
        }[spec.kind]
        self._began_at = monotonic()
        self._report_at = self._began_at + _REPORT_S
        self._next_at = 0.0
        self._pipe: int | None = None  # from the process that asks; None between two tries
        self._why = f"{self._question} does not answer"  # by the last try

    def step(self) -> str | None:
        """Continue: ``None`` is undecided, ``""`` ready, another text the reason for giving up."""
        now = monotonic()
        if self._pipe is not None and select.select([self._pipe], [], [], 0)[0]:
            answer = os.read(self._pipe, _ANSWER_MAX).decode(errors="replace")
            self.close()
            if answer == _READY:
                return ""
            self._why = answer or f"{self._question} does not answer"
            self._next_at = now + self._spec.interval_s
        if now >= self._began_at + self._spec.timeout_s:
            self.close()
            return f"not ready within {self._spec.timeout_s:g} s: {self._why}"
        if self._pipe is None and now >= self._next_at:
            self._pipe, writing = os.pipe()
            if os.fork() == 0:
                try:
                    prepare_child()
                    answer = self._ask() or _READY
                    os.write(writing, answer.encode(errors="replace")[:_ANSWER_MAX])
                finally:
                    os._exit(0)
            os.close(writing)
        return None

    def waiting(self) -> str | None:
        """Report the last try once in 30 s; ``None`` in between."""
        now = monotonic()
        if now < self._report_at:
            return None
        self._report_at = now + _REPORT_S
        return f"not ready for {now - self._began_at:.0f} s: {self._why}"

    def close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _ask(self) -> str:
        """The reason why it is not ready; empty when it is."""
        spec, question = self._spec, self._question
        try:
            if spec.kind == "command":
                code = subprocess.call(
                    spec.command,
                    env=self._env,
                    cwd=self._cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    preexec_fn=prepare_child,
                    start_new_session=True,  # it may end its own group
                )
                return f"{question} ended with exit code {code}" if code else ""
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_TRY_S)
            connection = self._http.HTTPConnection(self._address, self._port)
            connection.connect()
            if spec.kind == "port":
                return ""
            connection.request("GET", spec.path)
            status = connection.getresponse().status
        except (OSError, self._http.HTTPException) as error:
            if spec.kind == "command":
                return f"{question} cannot be started: {error}"
            hint = ""
            if isinstance(error, ConnectionRefusedError) and self._address != _LOCAL:
                with suppress(OSError):
                    socket.create_connection((_LOCAL, self._port)).close()
                    hint = (
                        f". It does listen on {_LOCAL}:{self._port}, where no other node can reach "
                        "it; let it listen on 0.0.0.0"
                    )
            why = getattr(error, "strerror", None) or str(error).strip()
            return f"{question} failed: {why[:80]}{hint}"
        if status != spec.status:
            return f"{question} is answered with {status}, not {spec.status}"
        return ""
