"""Entry of the node program: ``srun … python3 node.pyz``, once on every node."""

from __future__ import annotations

import os
import sys

from ..node.output import say
from ..node.supervise import Runner, adopt_orphans, supervise
from .folder import CLUSTER_FAILED, NodeReport, RunEnd, RunFolder
from .node import Worker, run_sidecar_step, temp_dir_of
from .processes import Commands
from .settings import SIDECAR_STEP, WrongSetting, job_of, read


def main() -> int:
    """Take part in the cluster until it is over; the exit code of this node's task."""
    env = dict(os.environ)
    try:
        settings = read(env, temp_dir_of(job_of(env)))
    except WrongSetting as error:
        say(str(error))
        return 2
    tag = f"{settings.job}/{settings.rank}/{os.urandom(8).hex()}"

    def take_part(runner: Runner) -> int:
        adopt_orphans()
        args = settings, RunFolder(settings.run, settings.rank), Commands(tag), env
        if env.get(SIDECAR_STEP):
            return run_sidecar_step(runner, *args)
        if not settings.is_head:
            return Worker(*args).run(runner)
        from .head import Head  # workers do without it: there are many of them

        return Head(*args).run(runner)

    end = supervise(tag, take_part)
    if end.left_on is not None:
        return end.code
    # All its processes are ended, and it could not report that itself.
    folder = RunFolder(settings.run, settings.rank)
    if env.get(SIDECAR_STEP):
        folder.publish_report(NodeReport(host=settings.host, failed=end.text))
    elif settings.is_head:
        run_end = RunEnd(CLUSTER_FAILED, f"node {settings.host} (the head): {end.text}")
        return folder.publish_end(run_end).code
    else:
        report = folder.report_of(settings.rank) or NodeReport(host=settings.host)
        folder.publish_report(report._replace(failed=report.failed or end.text, left=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
