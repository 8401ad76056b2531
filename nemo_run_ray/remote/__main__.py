"""Entry on the cluster.

``task|group|array <job> <submission id> <nonce>`` runs one job of the archive, ``dispatch
<submission id> <nonce>`` hands the jobs of a dispatch over, ``cancel-elements <submission id>
<request>`` passes a client's request on to the driver of an array. ``start.py`` calls it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from .end_record import EndRecord
from .node import command
from .node.output import say, write
from .node.rundir import DISPATCH, SPEC, RunDir, archived, jobs_folder, take_key, take_secrets
from .node.supervise import Runner, run_supervised
from .spec import ArraySpec, GroupSpec, JobSpec, from_json


def main(argv: list[str]) -> int:
    command.restore_tmpdir()
    if len(argv) == 3 and argv[0] == "dispatch":
        return _dispatch(*argv[1:])
    if len(argv) == 3 and argv[0] == "cancel-elements":
        from .array.cancel_request import run

        return run(*argv[1:])
    if len(argv) != 4 or argv[0] not in ("task", "group", "array"):
        say(f"usage: task|group|array <job> <submission id> <nonce>, not {argv}")
        return 2
    _, job, submission_id, nonce = argv
    tag = f"{submission_id}/{os.urandom(8).hex()}"
    return run_supervised(tag, nonce, take_key(), lambda runner: _run(runner, job, submission_id))


def _dispatch(submission_id: str, nonce: str) -> int:
    from .dispatch import dispatcher

    with open(archived(DISPATCH) or DISPATCH, encoding="utf-8") as file:
        dispatch: Any = from_json(file.read())
    began_at = time.time()
    code = dispatcher.run(dispatch, submission_id)
    write(EndRecord(code, "NONE", f"exit code {code}", began_at, time.time()).line(nonce))
    return code


def _run(runner: Runner, job: str, submission_id: str) -> int:
    with open(os.path.join(jobs_folder(), job, SPEC), encoding="utf-8") as file:
        spec: Any = from_json(file.read())
    if isinstance(spec, GroupSpec):
        from .group.driver import run

        return run(runner, spec, job, submission_id)
    if isinstance(spec, ArraySpec):
        from .array.driver import run as run_array

        return run_array(runner, spec, job, submission_id)
    return _run_task(runner, spec, job, submission_id)


def _run_task(runner: Runner, spec: JobSpec, job: str, submission_id: str) -> int:
    run_dir = RunDir(submission_id)
    run_dir.create(jobs_folder(), job, os.getcwd() if spec.has_code else None)
    try:
        env = command.environment(spec, run_dir, os.environ, take_secrets(spec.secrets))
        cwd = spec.cwd or run_dir.code
        return runner.run(command.argv_of(spec, run_dir, env), env, cwd, spec.grace_s)
    finally:
        if spec.keep_run_dir:
            say(f"the run directory is kept: {run_dir.root}")
        else:
            run_dir.remove()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
