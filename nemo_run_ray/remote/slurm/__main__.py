"""Entry of the node program: ``srun … python3 node.pyz``, once on every node."""

from __future__ import annotations

import os
import sys
from os import environ

from ..node.output import say
from ..node.supervise import Runner, supervise
from .folder import NodeReport, RunFolder
from .node import Worker, failure
from .settings import CannotContinue, Settings


def main() -> int:
    """Take part in the cluster until it is over; the exit code of this node's task."""
    try:
        settings = Settings(environ)
    except CannotContinue as error:
        say(str(error))
        return 2
    tag = f"{settings.job}/{settings.rank}/{os.urandom(8).hex()}"
    folder = RunFolder(settings.run, settings.rank)

    def take_part(runner: Runner) -> int:
        if settings.rank:
            return Worker(settings, folder, tag, environ).run(runner)
        from .head import Head  # workers do without it: there are many of them

        return Head(settings, folder, tag, environ).run(runner)

    end = supervise(tag, take_part)
    if end.left_on is not None:
        return end.code
    # All its processes are ended, and it could not report that itself.
    failed = failure(settings, end.text)
    if settings.rank == 0:
        return folder.publish_end(failed).code
    name = f"nodes/{settings.rank}.json"
    report = folder.read(name, NodeReport) or NodeReport(host=settings.host)
    folder.write(name, report._replace(failed=report.failed or failed.why, left=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
