"""What went wrong while Ray built a runtime environment, found in the traceback that Ray gives."""

from __future__ import annotations

import re
from typing import Any, List, Mapping, Optional

#: pip's own lines, and those of build tools that it runs.
_PIP = re.compile(r"^ERROR: (?P<words>.+)$")
#: uv begins its explanation with one of these, and goes on with lines that are drawn as a tree.
_UV = re.compile(r"^(?:error:|\N{MULTIPLICATION SIGN}) (?P<words>.+)$")
_UV_MORE = re.compile(r"^(?:╰─▶|├─▶|│|cause:|hint:|Caused by:)\s*(?P<words>.*)$")
#: Podman's output, for a container.
_PODMAN = re.compile(r"stderr=(?P<words>.*)$")
#: Ray's line where a node has no podman.
_NO_PODMAN = re.compile(r"^FileNotFoundError: .*No such file or directory: 'podman'$")
#: The last line of a traceback.
_RAISED = re.compile(r"^(?:[\w.]+\.)?(?P<kind>\w*(?:Error|Exception|Timeout))\b:? ?(?P<words>.*)$")
#: What Ray says of a job for which no worker came up.
NO_WORKER = "worker startup repeatedly failed"
_NEVER_THE_CAUSE = ("SubprocessCalledProcessError", "RuntimeEnvSetupError", "ActorDiedError")
#: How Ray begins what it raises itself; the reason is in the lines below.
_SETUP_FAILED = re.compile(r"\bRuntimeEnvSetupError: Failed to set up runtime environment\.$")
_TIMEOUT = re.compile(r"(?P<words>Failed to install runtime_env within the timeout of .+ seconds)")
_RAISE_TIMEOUT = "; raise `setup_timeout_seconds` in its `config`"
#: The last line of a program that does not know its arguments, behind how it is used.
_USAGE = re.compile(r"^(?P<words>no such option: .+|[\w.-]+: error: .+)$")
#: What stands before the output of a program that failed, and how much of its end is told when
#: nothing in it is known.
_OUTPUT = re.compile(r"^Last \d+ lines of stdout:$")
_END_LINES = 3


def why_no_worker(row: Mapping[str, Any], message: str) -> str:
    """Why a job has no worker: its environment was not built, or has no interpreter that starts.

    Args:
        row: the job in Ray's table.
        message: Ray's.
    """
    if NO_WORKER not in message:
        return cause_of(message)
    executable = (row.get("runtime_env") or {}).get("py_executable")
    return f"py_executable={executable!r} starts no worker: {message}" if executable else message


def cause_of(text: str) -> str:
    """The reason in the words of the program that failed: pip, uv, conda, podman or Ray itself.

    Args:
        text: Ray's message or log, tracebacks of the failure in it.

    Returns:
        One line; the end of the text when no line of it is known.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    too_long = _last(lines, _TIMEOUT)
    if too_long:
        return too_long + _RAISE_TIMEOUT
    found = _last(lines, _PIP) or _of_uv(lines) or _last(lines, _PODMAN) or _last(lines, _USAGE)
    if not found and _last(lines, _NO_PODMAN):
        return "podman is not on the PATH of that node's Ray; an image needs it"
    return found or _raised(lines) or " / ".join(_printed(lines)[-_END_LINES:])


def _last(lines: List[str], pattern: re.Pattern[str]) -> Optional[str]:
    for line in reversed(lines):
        match = pattern.search(line)
        if match:
            return match.groupdict().get("words") or match.group()
    return None


def _of_uv(lines: List[str]) -> Optional[str]:
    for number in range(len(lines) - 1, -1, -1):
        first = _UV.match(lines[number])
        if first:
            words = [first["words"]]
            for line in lines[number + 1 :]:
                more = _UV_MORE.match(line)
                if more is None:
                    break
                words.append(more["words"])
            return " ".join(word for word in words if word)
    return None


def _printed(lines: List[str]) -> List[str]:
    """What the program printed that failed, or Ray said; all lines when that cannot be told."""
    begins = [
        number
        for number, line in enumerate(lines, start=1)
        if _OUTPUT.match(line) or _SETUP_FAILED.search(line)
    ]
    return (lines[begins[-1] :] if begins else []) or lines


def _raised(lines: List[str]) -> Optional[str]:
    for line in reversed(lines):
        match = _RAISED.match(line)
        if match and match["kind"] not in _NEVER_THE_CAUSE:
            is_too_long = match["kind"] == "TimeoutError" and not match["words"]
            return f"it took too long{_RAISE_TIMEOUT}" if is_too_long else line
    return None
