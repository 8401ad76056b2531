"""The shell lines that Ray runs for a job, and the text of a dry run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_run_ray.remote.spec import ArraySpec, JobSpec, ProbeSpec

if TYPE_CHECKING:
    from nemo_run_ray.plan.job import JobPlan

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


#: A startup command of more lines has a program in it, of which the first lines are shown.
_LINES_MAX, _SHOWN_LINES = 40, 3
#: Credentials in the address of a package index.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")


def describe(planned: JobPlan, cluster: str, uploads: list[str]) -> str:
    """The request for people, as a dry run prints it. Secrets are named, never shown.

    Args:
        cluster: the cluster in words.
        uploads: what would be uploaded, in words.
    """
    spec = planned.spec
    lines = [f"Ray job   {planned.submission_id}", f"cluster   {cluster}"]
    lines += _describe_turn(planned)
    if isinstance(spec, JobSpec):
        lines += _describe_task(spec, _words(planned.reservation), planned.runtime_env)
        return "\n".join(lines + [f"sends     {upload}" for upload in uploads])
    if isinstance(spec, ArraySpec):
        lines += _describe_array(spec)
        return "\n".join(lines + [f"sends     {upload}" for upload in uploads])
    lines.append(f"strategy  {spec.strategy}, all {len(spec.roles)} role(s) at once or none")
    lines += [f"sends     {upload}" for upload in uploads]
    for role in spec.roles:
        kind = "service" if role.service else "primary"
        copies = f"{role.replicas} replica(s) of {role.processes} process(es)"
        lines += ["", f"role      {role.name}, {kind}, {copies}"]
        lines += _describe_task(role.task, _words(role.resources), role.runtime_env)
        if role.label_selector:
            lines.append(f"labels    {role.label_selector}")
        ports = {name: port or "free" for name, port in role.ports.items() if name[0] != "_"}
        if ports:
            lines.append(f"ports     {_words(ports)}")
        if role.ready is not None:
            lines.append(f"ready     {_describe_probe(role.ready)}")
    return "\n".join(lines)


def _describe_array(spec: ArraySpec) -> list[str]:
    at_once = "as many as there is room for" if spec.max_in_flight is None else spec.max_in_flight
    changed = ", ".join(" ".join(str(part) for part in target if part) for target in spec.targets)
    lines = [
        f"elements  of {spec.elements}; each changes {changed}",
        f"at once   {at_once}",
        f"retries   {spec.retries} of each element",
    ]
    if spec.max_failures is not None:
        lines.append(f"ends      when more than {spec.max_failures} elements have failed")
    host = spec.host
    lines += _describe_task(host.task, _words(host.resources), host.runtime_env)
    if host.label_selector:
        lines.append(f"labels    {host.label_selector}")
    return lines


def _describe_turn(planned: JobPlan) -> list[str]:
    """The lines about what the dispatcher will do."""
    lines = []
    if planned.after or planned.outside:
        lines.append(f"after     {', '.join([*planned.after, *planned.outside])}")
    if planned.retries and planned.needs_dispatcher:
        codes = ", ".join(str(code) for code in planned.permanent_exit_codes)
        unless = f", unless it ends with exit code {codes}" if codes else ""
        lines.append(f"retries   {planned.retries}{unless}")
    if planned.max_in_flight is not None:
        lines.append(f"at once   {planned.max_in_flight} of the experiment's jobs")
    if planned.pending_timeout_s is not None:
        lines.append(f"give up   when not placed within {planned.pending_timeout_s:g} s")
    if planned.time_s is not None:
        lines.append(f"starts    when its allocation lasts {planned.time_s:g} s more")
    return lines


def _describe_task(spec: JobSpec, reserves: str, runtime_env: Mapping[str, Any]) -> list[str]:
    lines = [
        f"command   {shlex.join(spec.argv)}",
        *_describe_shell(spec),
        f"reserves  {reserves or 'nothing'}",
        *([f"python    {spec.python}"] if spec.python else []),
        f"folder    {spec.cwd or 'a private run directory on the node'}",
    ]
    if runtime_env:
        lines.append(f"runtime   {_CREDENTIALS.sub('***@', str(dict(runtime_env)))}")
    lines += [f"env       {name}={value}" for name, value in sorted(spec.env.items())]
    lines += [f"secret    {name}=***" for name in spec.secrets]
    return lines


def _describe_shell(spec: JobSpec) -> list[str]:
    """The lines about the shell that starts the command, if one does."""
    lines = ["shell     bash -l: the node's profile sets PATH"] if spec.login_shell else []
    for command in spec.startup:
        shown = command.splitlines()
        if len(shown) > _LINES_MAX:
            left_out = len(shown) - _SHOWN_LINES
            shown[_SHOWN_LINES:] = [f"… ({left_out} more lines)"]
        lines.append("before    " + "\n          ".join(shown))
    return lines


def _describe_probe(probe: ProbeSpec) -> str:
    if probe.kind == "command":
        what = shlex.join(probe.command)
    else:
        what = f"port {probe.port}"
        what += f", GET {probe.path} gives {probe.status}" if probe.kind == "http" else ""
    return f"{what}; every {probe.interval_s:g} s, at most {probe.timeout_s:g} s"


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removeprefix('entrypoint_')}={value}" for name, value in values.items()
    )
