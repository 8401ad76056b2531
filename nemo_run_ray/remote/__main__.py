"""Runs a job, a dispatcher or a cancel request on the cluster, in the Python that was found.

``task|group|array <job> <submission id> <nonce>`` runs one job of the archive, ``dispatch
<submission id> <nonce>`` hands the jobs of a dispatch over, ``cancel-elements <submission id>
<request>`` passes a client's request on to the driver of an array. ``start.py`` calls it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from .end_record import EndRecord, proof_of
from .node import command
from .node.output import say, write
from .node.rundir import DISPATCH, SPEC, RunDir, archived, jobs_folder, take_key, take_secrets
from .node.supervise import Runner, supervise
from .spec import ArraySpec, GroupSpec, from_json


def main(argv: list[str]) -> int:
    kind, *words = argv
    if kind == "cancel-elements":
        from .array.cancel_request import run as cancel_elements

        return cancel_elements(*words)
    if kind == "dispatch":
        from . import dispatcher

        submission_id, nonce = words
        began_at = time.time()
        code = dispatcher.run(_read(archived(DISPATCH) or DISPATCH), submission_id)
        write(EndRecord(code, "NONE", f"exit code {code}", began_at, time.time()).line(nonce))
        return code
    job, submission_id, nonce = words
    key, tag = take_key(), f"{submission_id}/{os.urandom(8).hex()}"
    end = supervise(tag, lambda runner: _run(runner, job, submission_id))
    write(end._replace(proof=proof_of(key, end.code) if key else "").line(nonce))
    return end.code


def _run(runner: Runner, job: str, submission_id: str) -> int:
    spec = _read(f"{jobs_folder()}/{job}/{SPEC}")
    if isinstance(spec, GroupSpec):
        from .group.driver import GroupDriver

        return GroupDriver(runner, spec, job, submission_id).run()
    if isinstance(spec, ArraySpec):
        from .array.driver import run as run_array

        return run_array(runner, spec, job, submission_id)
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


def _read(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        return from_json(file.read())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
