"""Entry on the cluster: ``run <job> <submission id> <nonce>`` runs one job of the archive."""

from __future__ import annotations

import os
import secrets
import sys

from . import command
from .missing import explain
from .output import say
from .process import Runner, keep
from .rundir import RunDir, take_secrets
from .spec import GroupSpec, JobSpec, from_json

_HERE = os.path.dirname(os.path.abspath(__file__))


def main(argv: list[str]) -> int:
    if len(argv) != 4 or argv[0] != "run":
        say(f"usage: run <job> <submission id> <nonce>, not {argv}")
        return 2
    _, job, submission_id, nonce = argv
    command.restore_tmpdir()
    tag = f"{submission_id}/{secrets.token_hex(8)}"
    return keep(tag, nonce, lambda runner: _run(runner, job, submission_id))


def _run(runner: Runner, job: str, submission_id: str) -> int:
    with open(os.path.join(_HERE, "jobs", f"{job}.json"), encoding="utf-8") as file:
        spec = from_json(file.read())
    if isinstance(spec, GroupSpec):
        from .group import run

        return run(runner, spec, job, submission_id)
    if not isinstance(spec, JobSpec):
        raise ValueError(f"the spec of the job {job} is that of a role")
    return _run_task(runner, spec, job, submission_id)


def _run_task(runner: Runner, spec: JobSpec, job: str, submission_id: str) -> int:
    run_dir = RunDir(submission_id)
    run_dir.create(os.path.join(_HERE, "payload"), job, os.getcwd() if spec.has_code else None)
    try:
        env = command.environment(spec, run_dir, os.environ, take_secrets(spec.secrets))
        cwd = spec.cwd or run_dir.code
        code = runner.run(command.words(spec, run_dir, env), env, cwd, spec.grace_s)
        if code != 0 and spec.config is not None and not runner.cancelled:
            hint = explain(os.path.join(run_dir.root, spec.config), env, cwd)
            if hint is not None:
                say(hint)
        return code
    finally:
        if spec.keep_run_dir:
            say(f"the run directory is kept: {run_dir.root}")
        else:
            run_dir.remove()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
