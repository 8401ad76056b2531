"""What the exit code of a command and the end of its log say of what the user forgot."""

from __future__ import annotations

import re
import signal

_SHIPS = "the executor's `packager` ships files to it"
#: What a shell means by these exit codes, and most programs too.
_SHELL_SAYS = {
    126: ", with which a shell says that a command could not be run",
    127: f", with which a shell says that a command was not found on that node; {_SHIPS}, and "
    "`python` must name one that is there",
}
_KILLED = (
    ", perhaps by the kernel since the node's memory was full: see its metrics in Ray's dashboard"
)
#: Python's words, and bash's, of a program that is not in the code's folder on the node.
_NO_PROGRAM = re.compile(
    r"(?:can't open file '|^\S+: (?:line \d+: )?|cannot open )/\S*/nemo_run/code/([^':]+)'?: .*"
    r"No such file"
)
#: What Python and shells end with when they do not find the program that they are to run.
_NO_PROGRAM_CODES = {2, 126, 127}
#: Ray's error in a task that starts a Ray of its own: the job's archives are on the outer cluster.
OUTER_ARCHIVES = re.compile(r"Failed to download runtime_env file package gcs://")
OWN_RAY = (
    "a Ray that the task starts itself has no archives of this job's cluster; unset "
    "RAY_JOB_CONFIG_JSON_ENV_VAR, and RAY_ADDRESS, in the task before it starts one"
)
#: A line of this package says what it was.
_OURS = re.compile(r"^nemo_run_ray\| ", re.MULTILINE)


def meaning(exit_code: int, tail: str) -> str:
    """What to add to an exit code in a message; empty where nothing is known.

    Args:
        exit_code: of the command.
        tail: the last lines of its log, without those that frame every log.
    """
    if _OURS.search(tail):
        return ""
    if signal_name(exit_code) == "SIGKILL":
        return _KILLED
    if OUTER_ARCHIVES.search(tail):
        return f": {OWN_RAY}"
    last = tail.rstrip().rpartition("\n")[2]
    missing = _NO_PROGRAM.search(last) if exit_code in _NO_PROGRAM_CODES else None
    if missing:
        return f": {missing[1]} is not on that node; {_SHIPS}"
    return _SHELL_SAYS.get(exit_code, "")


def signal_name(exit_code: int) -> str | None:
    """The signal behind an exit code: Python's negative ones and the shell's 128 + n."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    try:
        return signal.Signals(number).name if number > 0 else None
    except ValueError:
        return None
