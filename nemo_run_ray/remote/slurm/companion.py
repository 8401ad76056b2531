"""Sidecars in a container of their own, in a step beside the one with Ray."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Mapping

from ..node.output import say
from ..node.supervise import Runner
from .commands import Commands
from .node import GRACE_S, TURN_S, await_shared
from .run_folder import NodeReport, RunFolder
from .settings import Settings
from .sidecars import Sidecars


def run(
    runner: Runner,
    settings: Settings,
    folder: RunFolder,
    commands: Commands,
    env: Mapping[str, str],
) -> int:
    """Run the sidecars of this node until the step is ended; the exit code of its task.

    The head learns by files whether they are ready, and that one has died. This step sees no other
    files of the run: code that is not trusted may run in its container.
    """
    report = NodeReport(host=settings.host)
    try:
        if not await_shared(settings, folder):
            say(f"{settings.host}: the folder {settings.run} is not shared with the sidecars' step")
            return 0  # the head gives up what is never ready
        sidecars = Sidecars(settings, commands, env)
        sidecars.start()
        while runner.order() is None:
            commands.reap()
            why = sidecars.step() or ""
            now = NodeReport(host=settings.host, ready=sidecars.ready, failed=why)
            if now != report:
                report = now
                folder.report(report)
            if why:
                return 0
            time.sleep(TURN_S)
        report = NodeReport(host=settings.host, failed="the step with the sidecars was told to end")
        folder.report(report)
    except OSError as error:
        say(f"{settings.host}: the sidecars' step has failed: {error}")
        with suppress(OSError):
            folder.report(NodeReport(host=settings.host, failed=str(error)))
    finally:
        commands.stop(GRACE_S)
    return 0
