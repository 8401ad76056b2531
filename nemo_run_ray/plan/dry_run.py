"""What a dry run prints of a job: the request that would be sent, for people."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from nemo_run_ray.plan.job_plan import JobPlan
from nemo_run_ray.remote.spec import ArraySpec, JobSpec, ProbeSpec

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
        if planned.as_group is not None and planned.selector_since is not None:
            first = ".".join(str(part) for part in planned.selector_since)
            lines.append(f"labels    before Ray {first} a group's driver places it by them")
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
