"""Runs elements of a configuration by the interpreter of the task, forked or in its own process::

    serve <elements> <socket>     imports everything, then forks a process for each order
    once <elements> <order>       imports everything, and runs one element

An order is JSON: the element's ``fields`` and ``env``, its own ``template`` if it has one, and the
path for its ``result``. From a socket it comes as one packet, with its ``key`` and the
descriptor of the output.

The interpreter runs this file, which imports itself, so that ``__main__`` is empty: there
NeMo-Run puts what the user's script has defined, and a process that an element starts by ``spawn``
or ``forkserver`` runs the file of ``__main__`` again.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

#: The name of this package here. No folder of it is put on the task's path.
_NAME = "nemo_run_ray_remote"
#: Bytes of one packet.
PACKET_MAX = 2**17
#: Characters of a result that is kept.
RESULT_MAX = 2**16
_PR_SET_CHILD_SUBREAPER = 36
#: Seconds after which no more of the tasks' configurations are imported before the first element.
_IMPORT_S = 10.0
#: Seconds in which a fork must succeed when no element runs, and between two tries.
_ROOM_S, _ROUND_S = 10.0, 0.1


def main(argv: list[str]) -> None:
    _, how, elements, last = argv
    path = Path(elements)
    with path.open("rb") as file:
        header = json.loads(next(line for line in file if line.startswith(b"{")))
    template = _template(header.get("template"), path.parent.parent.parent)
    if how == "once":
        _run(template, json.loads(last))
    channel = socket.socket(fileno=int(last))
    os.set_inheritable(channel.fileno(), False)
    if template is None:
        _import_tasks(path)
    _serve(channel, template)


def _template(text: str | None, root: Path) -> Any:
    """The configuration of all elements, if they have one, with everything imported that it names.

    It is in Fiddle's own classes; what the user's ``__main__`` defines comes first.
    """
    from fiddle.experimental import serialization

    if (root / "__main__.py").exists():
        _load_main(root)
    return None if text is None else serialization.load_json(text)


def _load_main(root: Path) -> None:
    """Run the user's ``__main__`` if it was sent, as NeMo-Run's own runner does."""
    from nemo_run.run.experiment import maybe_load_external_main

    try:
        maybe_load_external_main(root)
    except SystemExit as error:
        print(f"The launching script ended with {error} when it ran here.", file=sys.stderr)
    except Exception as error:  # the task may do without it
        if type(error).__module__.partition(".")[0] == "nemo_run_ray":
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()


def _import_tasks(path: Path) -> None:
    """Import what the configurations of tasks name that differ, as far as there is time for it."""
    from fiddle.experimental import serialization

    until = time.monotonic() + _IMPORT_S
    with path.open("rb") as file:
        for line in file:
            if time.monotonic() >= until:
                return
            task = json.loads(line)[1] if line.startswith(b"[") else None
            if isinstance(task, str):
                with suppress(BaseException):  # the element itself fails with it, and says why
                    serialization.load_json(task)


def _serve(channel: socket.socket, template: Any) -> None:
    """Fork a process for each order until the host has closed the socket."""
    obstacles = _obstacles()
    sys.stdout.flush()  # else each child would write it again
    sys.stderr.flush()
    gc.collect()
    gc.freeze()  # so that the children share these objects' memory
    _send(channel, at="ready", obstacles=obstacles)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ahead: socket.socket | None = None  # where the imports forbid a fork, no order comes
    while True:
        ready, _, _ = select.select([channel.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _collect(channel)
        if channel.fileno() in ready:
            data, fds, _, _ = socket.recv_fds(channel, PACKET_MAX, 1)
            if not data:
                return
            if ahead is None:
                ahead = _fork_soon(channel, template, fds[0], woken, wake)
            with suppress(OSError):  # it was killed: the output ends, and the host asks again
                socket.send_fds(ahead, [data], fds)
            os.close(fds[0])
            ahead.close()
            ahead = _fork(channel, template, woken, wake)


def _fork(channel: socket.socket, template: Any, *not_needed: int) -> socket.socket | None:
    """Fork a process that waits for its order, which comes by the socket that is returned.

    An element so begins at once when a slot is free. There is none where the node has no room.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        try:
            child = os.fork()
        except OSError:
            here.close()
            return None
        if child != 0:
            return here
        here.close()
        _leave_parent(*not_needed)
        data, fds, _, _ = socket.recv_fds(there, PACKET_MAX, 1)
    if not data:
        os._exit(0)  # there is no other element, or the parent was killed
    order = json.loads(data)
    _become_element(channel, order, fds[0])
    _run(template, order)


def _fork_soon(channel: socket.socket, template: Any, *not_needed: int) -> socket.socket:
    """``_fork``, again until there is room, which an element makes that ends."""
    until = time.monotonic() + _ROOM_S
    while (ahead := _fork(channel, template, *not_needed)) is None:
        until = time.monotonic() + _ROOM_S if _collect(channel) else until
        if time.monotonic() >= until:
            sys.exit("The node has no room for another process, so that none can be forked.")
        time.sleep(_ROUND_S)
    return ahead


def _obstacles() -> list[str]:
    """The threads and devices of the imports that a fork does not have, in words."""
    names = [thread.name for thread in threading.enumerate() if thread.name != "MainThread"]
    found = [f"have started the thread {name!r}" for name in names]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found.append("have used CUDA")
    return found


def _leave_parent(*not_needed: int) -> None:
    """Undo in a child what belongs to its parent."""
    os.setsid()
    _adopt_orphans()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in not_needed:
        os.close(fd)
    atexit._clear()
    _take_new_seeds()


def _become_element(channel: socket.socket, order: dict[str, Any], output: int) -> None:
    """Tell the host that an element begins in this process."""
    _write_to(output)
    try:
        _send(channel, at="begun", key=order["key"], pid=os.getpid())
    except OSError:
        os._exit(1)  # the host listens no more: it asks another process for the element
    channel.close()
    os.environ.update(order["env"])


def _adopt_orphans() -> None:
    """Let what elements have started and left stay below this process while it runs.

    The environment that such a process shows does not say which element it is of.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _write_to(output: int) -> None:
    """Write to a descriptor from now on, which is closed."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _take_new_seeds() -> None:
    """Give the child random numbers of its own; Python's own module does that by itself."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.seed()


def _run(template: Any, order: dict[str, Any]) -> NoReturn:
    """Run an element and leave."""
    code = _code_of(template, order)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _code_of(template: Any, order: dict[str, Any]) -> int:
    """Run an element; its exit code."""
    try:
        import fiddle as fdl

        if order["template"]:
            from fiddle.experimental import serialization

            template = serialization.load_json(order["template"])
        _set(template, order["fields"])
        _keep_result(order["result"], fdl.build(template)())
    except SystemExit as error:
        return _exit_code(error)
    except BaseException:  # an element's own, of any kind
        traceback.print_exc()
        return 1
    return 0


def _set(template: Any, fields: dict[str, Any]) -> None:
    from fiddle.history import suspend_tracking

    with suspend_tracking():  # which walks the stack for each value that is set
        for path, value in fields.items():
            *parents, last = path.split(".")
            target = template
            for name in parents:
                target = target[int(name)] if isinstance(target, list) else getattr(target, name)
            if isinstance(target, list):
                target[int(last)] = value
            else:
                setattr(target, last, value)


def _keep_result(path: str, value: Any) -> None:
    """Leave a result that is JSON for the host; others are for the element alone."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return
    if value is not None and len(text) <= RESULT_MAX:
        Path(path).write_text(text, encoding="utf-8")


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _collect(channel: socket.socket) -> bool:
    """Tell the host of all that have ended; whether a child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        code = os.waitstatus_to_exitcode(status)
        _send(channel, at="ended", pid=pid, code=code if code >= 0 else 128 - code)


def _send(channel: socket.socket, **values: Any) -> None:
    channel.send(json.dumps(values).encode())


def _start() -> None:
    """Become a module of this package, and run it."""
    package = types.ModuleType(_NAME)
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules[_NAME] = package
    sys.modules["__main__"] = types.ModuleType("__main__")
    module = import_module(f"{_NAME}.array.fork_server")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # as ``python -m`` has it, and not the folder of this file
    module.main(sys.argv)


if __name__ == "__main__":
    _start()
