"""Reach the servers of a task at ``localhost``, where NeMo-Skills expects them.

On Slurm the server, the sandbox and the client of a task run on the same nodes, and NeMo-Skills
writes ``localhost:5000`` and ``++server.host=127.0.0.1`` into the client's command. The roles of a
group on Ray may be on different nodes, as their images ask for. So beside a client runs this
program: it takes the ports that the client's script names, waits until a server of the group
answers on one, and then passes connections to that port of this machine on to it. It refuses them
first, because the client takes the first connection that is not refused for a server that is up.
"""

# This file is sent as text and run by the node's Python: the standard library only, Python 3.9.

import asyncio
import itertools
import os
import re
import resource
import socket
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic

_PORTS = re.compile(r"(?<![\w.-])(?:localhost:|127\.0\.0\.1:|\+*server\.port=)(\d{2,5})\b")
_HERE = "127.0.0.1"
_AGAIN_S = 1.0
#: Connections that were on a port a moment ago keep it for a minute.
_CLOSING_S = 70.0
_CHUNK_BYTES = 1 << 16
#: Connections that may wait to be taken; NeMo-Skills asks a server 512 things at once.
_BACKLOG = 4096


def ports_in(script: str) -> list[int]:
    """The ports of this machine that a script names."""
    return sorted({int(port) for port in _PORTS.findall(script) if int(port) < 1 << 16})


def answers(host: str, port: int) -> bool:
    """Whether a server listens there."""
    with suppress(OSError):
        socket.create_connection((host, port), 2).close()
        return True
    return False


def take(port: int) -> socket.socket:
    """A port of this machine, whose connections are refused as long as nobody listens.

    Raises:
        OSError: another program has it.
    """
    taken = socket.socket()
    deadline = monotonic() + _CLOSING_S
    while True:
        try:
            taken.bind((_HERE, port))
            return taken
        except OSError:
            if answers(_HERE, port) or monotonic() > deadline:
                raise
        time.sleep(_AGAIN_S)


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass on what comes, and then its end."""
    while data := await source.read(_CHUNK_BYTES):
        target.write(data)
        await target.drain()
    target.write_eof()


async def forward(taken: socket.socket, hosts: tuple[str, ...]) -> None:
    """Serve one port, once a host answers on it."""
    port = taken.getsockname()[1]
    for host in itertools.cycle(hosts):
        if await asyncio.to_thread(answers, host, port):
            break
        await asyncio.sleep(_AGAIN_S)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError), closing(writer):
            there, back = await asyncio.open_connection(host, port)
            with closing(back):  # when one side breaks off, so does the other
                await asyncio.gather(copy(reader, back), copy(there, writer))

    print(f"nemo_run_ray| localhost:{port} is passed on to {host}", file=sys.stderr, flush=True)
    async with await asyncio.start_server(connect, sock=taken, backlog=_BACKLOG) as server:
        await server.serve_forever()


def main(path: str, own: str, *hosts: str) -> None:
    """Serve the ports that a script names, in a process of its own.

    Args:
        path: of the script.
        own: address of this node in the group.
        hosts: addresses of the nodes on which the servers are.
    """
    if own in hosts:
        return  # then localhost is the server's
    taken = []
    for port in ports_in(Path(path).read_text("utf-8", "replace")):
        try:
            taken.append(take(port))
        except OSError as error:
            raise SystemExit(
                f"nemo_run_ray| the client reaches its server at localhost:{port}, and another "
                f"program of this node has that port ({error.strerror}): give the server another "
                "one, for example by --get_random_port"
            ) from error
    if taken and os.fork() == 0:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

        async def forward_all() -> None:
            await asyncio.gather(*(forward(port, hosts) for port in taken))

        asyncio.run(forward_all())


if __name__ == "__main__":
    main(*sys.argv[1:])
