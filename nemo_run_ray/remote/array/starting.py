"""How an element's command is started."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from ..hosts.workspace import Workspace
from ..node.supervise import explain_start
from .element import RunningElement
from .elements import Applied
from .progress import Lease

#: Of a node that has no room for another process, or for what it needs to be started.
_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class NoRoomOnNode(Exception):
    """The node has no room for another process now; the message says so with the reason."""


class Order(NamedTuple):
    """An element that the driver wants to run here.

    Attributes:
        lease: which attempt of which element.
        values: one for each target.
    """

    lease: Lease
    values: List[Any]


def message_of(place: Workspace, element: int, own: Applied) -> Dict[str, Any]:
    """What ``warm.py`` is told of an element."""
    return {
        "fields": own.fields,
        "env": place.variables(own.env),
        "template": own.template,
        "result": result_path(place, element),
    }


def result_path(place: Workspace, element: int) -> str:
    """Where an element leaves its result for the host."""
    return os.path.join(place.root, f"result-{element}")


def start_words(
    place: Workspace, lease: Lease, argv: Sequence[str], slot: int, variables: Dict[str, str]
) -> RunningElement:
    """Start a command for an element, in the place of the task's."""
    words, env, cwd = place.words(argv, variables)
    read_end, write_end = os.pipe()  # ours: what comes after the start of a process must not fail
    try:
        # Without a function between fork and exec, Python uses vfork, which is quicker.
        process = subprocess.Popen(
            words,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        os.close(read_end)
        code, why = explain_failure(words, env, cwd, error)
        return RunningElement(lease, slot, 0, None, code, why)
    finally:
        os.close(write_end)
    process.returncode = 0  # the loop collects it; the object must not
    return RunningElement(lease, slot, process.pid, read_end)


def explain_failure(
    words: Sequence[str], env: Dict[str, str], cwd: str, error: Exception
) -> Tuple[int, str]:
    """The exit code of an element whose command could not be started, and why, in words.

    Raises:
        NoRoomOnNode: it is the node's failure, and not the element's.
    """
    if isinstance(error, OSError):
        blame_node(error)
    return explain_start(words, env, cwd, error)


def blame_node(error: OSError) -> None:
    """Raise ``NoRoomOnNode`` when an error says that the node has no room."""
    if error.errno in _NO_ROOM:
        words = f"node {socket.gethostname()} has no room for another process: {error.strerror}"
        raise NoRoomOnNode(words) from error
