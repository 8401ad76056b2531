"""Entry of the node program: ``srun … python3 node.pyz``, once on every node."""

from __future__ import annotations

import os
import sys
from typing import Dict

from ..node.output import say
from ..node.supervise import Runner, adopt_orphans, guard
from .commands import Commands
from .node import NodeProgram
from .run_folder import CLUSTER_FAILED, NodeReport, RunEnd, RunFolder
from .settings import COMPANION, Settings, WrongSetting, job_of, read
from .temp_dir import temp_dir_of


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
        folder = RunFolder(settings.run, settings.rank)
        if env.get(COMPANION):
            from . import companion

            return companion.run(runner, settings, folder, Commands(tag), env)
        return _node(settings, folder, Commands(tag), env).run(runner)

    end = guard(tag, take_part)
    words = end.text
    if end.left_on is not None:
        return end.code
    # It could not say so itself, and everything of it is ended.
    folder = RunFolder(settings.run, settings.rank)
    if env.get(COMPANION):
        folder.report(NodeReport(host=settings.host, failed=words))
    elif settings.is_head:
        run_end = RunEnd(CLUSTER_FAILED, f"node {settings.host} (the head): {words}")
        return folder.publish_end(run_end).code
    else:
        report = folder.report_of(settings.rank) or NodeReport(host=settings.host)
        folder.report(report._replace(failed=report.failed or words, left=True))
    return 0


def _node(
    settings: Settings, folder: RunFolder, commands: Commands, env: Dict[str, str]
) -> NodeProgram:
    """This node's part. A worker does without the libraries of the head: there are many of them."""
    if settings.is_head:
        from .head import Head

        return Head(settings, folder, commands, env)
    from .worker import Worker

    return Worker(settings, folder, commands, env)


if __name__ == "__main__":
    sys.exit(main())
