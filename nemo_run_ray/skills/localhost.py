"""Reach the servers of a task at ``localhost``, where NeMo-Skills expects them.

On Slurm the server, the sandbox and the client of a task run on the same nodes, and NeMo-Skills
writes ``localhost:5000`` and ``++server.host=127.0.0.1`` into the client's command. The roles of a
group on Ray may be on different nodes, as their images ask for. So beside a client runs this
program: it waits until a server of the group answers on a port that the client's script names, and
then passes connections to that port of this machine on to it. It waits first, because the client
takes the first connection that is not refused for a server that is up.
"""

# This file is sent as text and run by the node's Python: the standard library only, Python 3.9.

import asyncio
import contextlib
import re
import socket
import sys

_PORTS = re.compile(r"(?<![\w.-])(?:localhost:|127\.0\.0\.1:|\+*server\.port=)(\d{2,5})\b")
_HERE = "127.0.0.1"
_AGAIN_S = 1.0
_CHUNK_BYTES = 1 << 16


def ports_in(script: str) -> list[int]:
    """The ports of this machine that a script names."""
    return sorted({int(port) for port in _PORTS.findall(script) if int(port) < 1 << 16})


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((host, port), 2).close()
    except OSError:
        return False
    return True


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass on what comes, and then its end."""
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK_BYTES):
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()


async def forward(port: int, hosts: list[str]) -> None:
    """Serve one port, once a host answers on it; nothing if it is this one."""
    host = None
    while host is None:
        if await asyncio.to_thread(answers, _HERE, port):
            return
        for candidate in hosts:
            if await asyncio.to_thread(answers, candidate, port):
                host = candidate
        await asyncio.sleep(_AGAIN_S)
    found = host

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            there, back = await asyncio.open_connection(found, port)
            with contextlib.closing(back):
                await asyncio.gather(copy(reader, back), copy(there, writer))

    with contextlib.suppress(OSError):  # another process of this node serves it already
        async with await asyncio.start_server(connect, _HERE, port) as server:
            await server.serve_forever()


async def main(path: str, *hosts: str) -> None:
    with open(path, encoding="utf-8", errors="replace") as file:
        ports = ports_in(file.read())
    await asyncio.gather(*(forward(port, list(hosts)) for port in ports))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
