"""The shell lines that Ray runs for a job, and shows: they start the half on the cluster."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

#: Name under which the half on the cluster is sent.
REMOTE_PACKAGE = "nemo_run_ray_remote"
#: How often one dispatcher's job starts it, when it is killed again and again.
_DISPATCHER_STARTS = 100
#: How often one array's job starts its driver.
_ARRAY_STARTS = 20
#: What ``_find`` has found, in shell.
_FOUND = '"$p"'


def entrypoint(python: str | None, arguments: Sequence[str]) -> str:
    """The shell line that Ray runs and shows: the remote half with these arguments.

    Args:
        python: the interpreter; ``None`` is python3 or python, and ``remote/start.py`` looks for
            another one if that does not serve.
        arguments: the kind of the job, and what ``remote/__main__.py`` gets behind it.
    """
    if python is not None:
        return f"exec {_start(shlex.quote(python), arguments)}"
    return f"{_find(['python3', 'python'])}exec {_start(_FOUND, arguments)}"


def array_entrypoint(python: str | None, arguments: Sequence[str]) -> str:
    """The shell line of an array's driver: killed, it is started again, and reads its journal.

    Args:
        python: the interpreter; ``None`` is python3 or python.
        arguments: as of ``entrypoint``.
    """
    find = "" if python is not None else _find(["python3", "python"])
    line = _start(_FOUND if python is None else shlex.quote(python), arguments)
    return (
        # A stop is for the driver; the shell waits for it.
        f"trap '' TERM; {find}for start in $(seq {_ARRAY_STARTS}); do {line}; code=$?; "
        "[ $code -eq 137 ] || break; sleep 1; done; exit $code"
    )


def dispatcher_entrypoint(pythons: Sequence[str], submission_id: str, nonce: str) -> str:
    """The shell line of a dispatcher: killed by a signal, it is started again.

    Args:
        pythons: interpreters that the jobs name, tried first; they may not be on the head.
        submission_id: of the dispatcher.
        nonce: of the dispatch.
    """
    line = _start(_FOUND, ["dispatch", submission_id, nonce])
    return (
        f"{_find([*pythons, 'python3', 'python'])}"
        f"for start in $(seq {_DISPATCHER_STARTS}); do {line}; code=$?; "
        "[ $code -gt 128 ] || break; "
        'echo "nemo_run_ray| the dispatcher was killed (exit code $code) and is started again"; '
        "sleep 1; done; "
        "exit $code"
    )


def _find(pythons: Sequence[str]) -> str:
    """Shell text that finds the first of these that runs; one may be the shim of a version manager
    that has no version."""
    names = " ".join(shlex.quote(python) for python in pythons)
    return f'for p in {names}; do {_FOUND} -S -c "" 2>/dev/null && break; done; '


def _start(python: str, arguments: Sequence[str]) -> str:
    return f"{python} -S -m {REMOTE_PACKAGE}.start {shlex.join(arguments)}"
