"""Runs elements of a configuration by the interpreter of the task, forked or in its own process::

    serve <elements> <socket>     imports everything, then forks a process for each order
    once <elements> <order>       imports everything, and runs one element

An order is JSON: the element's line of the file, and the path for its ``result``. From a socket it
comes as one packet, with its ``key``, the variables as ``env`` and the descriptor of the output.

``_start`` imports this file as a module and leaves an empty ``__main__``. NeMo-Run puts there what
the user's script has defined, and a process that an element starts by ``spawn`` or ``forkserver``
would run the file of ``__main__`` again.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
import types
from contextlib import suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

#: The name of this package here. No folder of it is put on the task's path.
_NAME = "nemo_run_ray_remote"
#: Bytes of one packet.
PACKET_MAX = 2**17
#: Characters of a result that is kept.
RESULT_MAX = 2**16
_PR_SET_CHILD_SUBREAPER = 36
#: Milliseconds between two looks for elements that have ended, if no signal comes.
_LOOK_MS = 500
#: Python's own: gevent has one that collects its children by itself.
_FORK = os.fork
#: Linux' numbers to allow huge pages and to make them now, and the file that says who may.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
#: Tasks that are imported before the first element begins.
_IMPORTED_MAX = 100


def main(argv: list[str]) -> None:
    _, how, elements, last = argv
    path = Path(elements)
    with path.open("rb") as file:
        header = json.loads(next(line for line in file if line.startswith(b"{")))
        root = path.parent.parent.parent
        main_ended = _load_main(root) if (root / "__main__.py").exists() else ""
        template = header.get("template") and _load(header["template"], main_ended)
        if how == "once":
            _run(template, json.loads(last), main_ended)
        channel = socket.socket(fileno=int(last))
        os.set_inheritable(channel.fileno(), False)
        if template is None:  # each task has its own; one that is broken fails with its element
            for line in islice(file, _IMPORTED_MAX):
                with suppress(BaseException):
                    _load(json.loads(line)["template"], "")
    _serve(channel, template, main_ended)


def _load_main(root: Path) -> str:
    """Run the user's ``__main__`` as NeMo-Run's own runner does; the error that ended it."""
    from nemo_run.run.experiment import maybe_load_external_main

    try:
        maybe_load_external_main(root)
    except BaseException as error:  # the task may do without it
        package = type(error).__module__.partition(".")[0]
        if not isinstance(error, SystemExit) and package != "nemo_run_ray":
            traceback.print_exc()
        ended = f"The launching script ended with {type(error).__name__}: {error} when it ran here."
        print(ended, file=sys.stderr)
        return ended
    return ""


def _load(text: str, main_ended: str) -> Any:
    """A configuration in Fiddle's own classes; what the user's ``__main__`` defines comes first."""
    from fiddle.experimental.serialization import load_json

    try:
        return load_json(text)
    except Exception as error:
        if not main_ended:
            raise
        what = str(error).partition("\n")[0]  # Fiddle adds a line
        raise ImportError(f"{what}. {main_ended}") from error


def _serve(channel: socket.socket, template: Any, main_ended: str) -> None:
    """Fork a process for each order until the host has closed the socket."""
    names = [thread.name for thread in threading.enumerate() if thread.name != "MainThread"]
    obstacles = [f"have started the thread {name!r}" for name in names]
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        obstacles.append("have used CUDA")
    if os.fork is not _FORK:
        obstacles.append("have replaced os.fork")
    sys.stdout.flush()  # else each child would write it again
    sys.stderr.flush()
    gc.collect()
    gc.freeze()  # so that the children share these objects' memory
    _use_huge_pages()
    _send(channel, at="ready", obstacles=obstacles)
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    for fd in (woken, channel.fileno()):
        poll.register(fd, select.POLLIN)
    running: dict[int, int] = {}  # keys of orders, by their processes
    while True:
        ready = dict(poll.poll(_LOOK_MS))  # the imports may have blocked the signal
        with suppress(BlockingIOError):
            os.read(woken, 4096)
        _report_ends(channel, running)
        if channel.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(channel, PACKET_MAX, 1)
        if not data:
            return
        order = json.loads(data)
        try:
            if not fds:  # the kernel has dropped the descriptor
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            child = os.fork()
        except OSError as error:
            _send(channel, at="full", key=order["key"], reason=error.strerror)
        else:
            if child == 0:
                _become_element(channel, order, fds[0], woken, wake)
                _run(template, order, main_ended)
            running[child] = order["key"]
        for fd in fds:
            os.close(fd)


def _use_huge_pages() -> None:
    """Put this process's memory into huge pages, of which a fork copies far fewer entries.

    A fork of a process with NeMo-Run then takes a quarter less time (Linux 6.18). Kernels before
    6.1 make them later, or not at all.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with suppress(OSError, ValueError):
        if "[never]" in Path(_THP).read_text():
            return  # the administrator has forbidden them
        for line in Path("/proc/self/maps").read_bytes().split(b"\n"):
            place, rights, _, _, inode = line.split()[:5]
            if inode == b"0" and rights == b"rw-p":  # private memory, without a file
                first, last = (int(end, 16) for end in place.split(b"-"))
                for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                    madvise(first, last - first, advice)


def _report_ends(channel: socket.socket, running: dict[int, int]) -> None:
    """Report each element that has ended, then collect it.

    If this process is killed in between, the host collects it.
    """
    for pid, key in list(running.items()):
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end:
            code = end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status
            _send(channel, at="ended", key=key, code=code)
            os.waitpid(pid, 0)
            del running[pid]


def _become_element(channel: socket.socket, order: dict[str, Any], output: int, *fds: int) -> None:
    """Undo in a forked process what belongs to the server, and report that the element begins."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        # What the element leaves stays below it while it runs: the environment that a fork
        # shows does not say which element it is of.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        atexit._clear()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(order["env"])
        # This fails where the host listens no more: it asks another process for the element.
        _send(channel, at="begun", key=order["key"], pid=os.getpid())
        for fd in (*fds, output, channel.detach()):
            os.close(fd)
        # Python's own module takes new seeds by itself.
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy:
            numpy.random.seed()
        if torch:
            torch.seed()
    except BaseException:  # NumPy or PyTorch take no seed, or the host listens no more
        try:
            traceback.print_exc()
        finally:
            os._exit(1)


def _run(template: Any, order: dict[str, Any], main_ended: str) -> NoReturn:
    """Run an element and leave."""
    code = 0
    try:
        import fiddle as fdl
        from fiddle.history import suspend_tracking

        if "template" in order:
            template = _load(order["template"], main_ended)
        with suspend_tracking():  # which walks the stack for each value that is set
            for field, value in order.get("values", {}).items():
                set_field(template, field, value)
        value = fdl.build(template)()
        with suppress(TypeError, ValueError, RecursionError):  # else it is for the element alone
            text = json.dumps(value)
            if value is not None and len(text) <= RESULT_MAX:
                Path(order["result"]).write_text(text, encoding="utf-8")
    except SystemExit as error:
        if not isinstance(error.code, (int, type(None))):
            print(error.code, file=sys.stderr)
            code = 1
        else:
            code = (error.code or 0) & 0xFF
    except BaseException:  # an element's own, of any kind
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def set_field(target: Any, field: str, value: Any) -> None:
    """Set a field of a configuration by its path."""
    *parents, last = field.split(".")
    for name in parents:
        target = target[int(name)] if isinstance(target, list) else getattr(target, name)
    if isinstance(target, list):
        target[int(last)] = value
    elif not hasattr(target, "__fn_or_cls__"):  # a class would take it, and the task would not
        raise TypeError(f"a {type(target).__name__} has no fields")
    else:
        setattr(target, last, value)


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
