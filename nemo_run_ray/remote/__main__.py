"""Entry on the cluster: ``run <job> <submission id> <nonce>`` runs one job of the archive."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys

from .missing import explain
from .process import Runner, keep, say
from .rundir import RunDir, take_secrets
from .spec import JobSpec

_HERE = os.path.dirname(os.path.abspath(__file__))


def main(argv: list[str]) -> int:
    if len(argv) != 4 or argv[0] != "run":
        say(f"usage: run <job> <submission id> <nonce>, not {argv}")
        return 2
    _, job, submission_id, nonce = argv
    _restore_tmpdir()
    tag = f"{submission_id}/{secrets.token_hex(8)}"
    return keep(tag, nonce, lambda runner: _run(runner, job, submission_id))


def _run(runner: Runner, job: str, submission_id: str) -> int:
    with open(os.path.join(_HERE, "jobs", f"{job}.json"), encoding="utf-8") as file:
        spec = JobSpec.from_json(file.read())
    run_dir = RunDir(submission_id)
    run_dir.create(os.path.join(_HERE, "payload"), job, os.getcwd() if spec.has_code else None)
    try:
        env = _environment(spec, run_dir)
        argv = [_expand(run_dir.map(word), env) for word in spec.argv]
        if argv[0] == "python":
            argv[0] = _python(spec, env)
        cwd = spec.cwd or run_dir.code
        code = runner.run(argv, env, cwd, spec.grace_s)
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


def _restore_tmpdir() -> None:
    """Give jobs of an embedded Ray the caller's TMPDIR: its own is removed when it stops."""
    given = os.environ.pop("NEMO_RUN_RAY_TMPDIR", None)
    if given is not None:
        os.environ.pop("TMPDIR", None)
        if given:
            os.environ["TMPDIR"] = given


def _python(spec: JobSpec, env: dict[str, str]) -> str:
    """What ``python`` means: the one asked for, the one on PATH, or the one that runs us."""
    if spec.python is not None:
        return spec.python
    return "python" if shutil.which("python", path=env.get("PATH")) else sys.executable


def _environment(spec: JobSpec, run_dir: RunDir) -> dict[str, str]:
    env = dict(os.environ)
    env.update({name: run_dir.map(value) for name, value in spec.env.items()})
    env.update(take_secrets(spec.secrets))
    if spec.python is not None and os.path.isabs(spec.python):
        env["PATH"] = os.pathsep.join([os.path.dirname(spec.python), env.get("PATH", os.defpath)])
    # A task may call ray.init(runtime_env=…) itself; without this Ray refuses to merge the two.
    env.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    return env


#: The variables behind NeMo-Run's macros; nothing else in a command is expanded.
_MACROS = re.compile(r"\$(NEMO_RUN_(?:HEAD_NODE_IP|NPROC_PER_NODE|NUM_NODES|NODE_RANK))\b")


def _expand(word: str, env: dict[str, str]) -> str:
    return _MACROS.sub(lambda match: env.get(match.group(1), ""), word)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
