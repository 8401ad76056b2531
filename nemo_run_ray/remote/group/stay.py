"""A process of this package that outlives its actor's call, and ends what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from contextlib import suppress
from typing import Callable, NoReturn, Protocol, Sequence

from ..node import command
from ..node.tree import ENDING, GUARD, ROUND_S, Tree, adopt_orphans, name_process

#: The last line to the actor: all orders are carried out, and nothing is left.
OVER = b'{"at": "over"}\n'
#: Seconds for the actor to take it.
_SAY_S = 5.0


class Staying(Protocol):
    """What such a process does."""

    def serve(self) -> None:
        """Serve until the actor is gone."""

    def fail(self, words: str) -> None:
        """Report that this process cannot go on."""

    def abandon(self) -> None:
        """Kill what runs, now, and remove the folders."""


def stay(argv: Sequence[str], kind: Callable[[socket.socket, str], Staying]) -> NoReturn:
    """Become a process that is no relative of the actor's worker, and serve.

    Args:
        argv: the package's folder, and the number of the socket to the actor.
        kind: makes the object that serves from the socket and the folder.
    """
    folder, number = argv
    if os.fork():
        os._exit(0)
    os.setsid()
    for signum in ENDING:  # a stop of the worker closes the socket as well
        signal.signal(signum, signal.SIG_IGN)
    command.restore_tmpdir()
    channel = socket.socket(fileno=int(number))
    adopt_orphans()
    child = os.fork()
    if child:
        channel.close()
        _guard(child)
    process = kind(channel, folder)
    try:
        process.serve()
    except Exception as error:  # the last frame of this process: only its actor can be told
        traceback.print_exc()  # into the worker's log
        process.fail(f"our process failed: {type(error).__name__}: {error}")
    finally:
        process.abandon()
        channel.settimeout(_SAY_S)
        with suppress(OSError):  # the actor is gone
            channel.sendall(OVER)
        os._exit(0)


def _guard(child: int) -> NoReturn:
    """Outlive that process and end what it can leave behind only by being killed."""
    name_process(GUARD)
    while os.wait()[0] != child:
        pass  # an orphan of a process that is dead by now
    tree = Tree(child, adopts=True)
    while tree.alive():
        tree.signal(signal.SIGKILL)
        tree.reap()
        time.sleep(ROUND_S)
    os._exit(0)
