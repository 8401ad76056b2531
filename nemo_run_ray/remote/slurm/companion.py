"""Sidecars in a container of their own, in a step beside the one with Ray."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Mapping

from ..node.output import say
from ..node.process import Runner
from .commands import Commands
from .node import GRACE_S, LOOK_S, TURN_S, await_shared
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
    """Run the sidecars of this node until the run is over; the exit code of this step's task.

    The head learns by files whether they are ready, and that one has died.
    """
    report = NodeReport(host=settings.host)
    try:
        if not await_shared(settings, folder):
            say(f"{settings.host}: the folder {settings.run} is not shared with the sidecars' step")
            return 0  # the head gives up what is never ready
        sidecars = Sidecars(settings, commands, env)
        sidecars.start()
        looked_at = float("-inf")
        while runner.order() is None:
            why = sidecars.step(commands.reap()) or ""
            now = NodeReport(host=settings.host, ready=sidecars.ready, failed=why)
            if now != report:
                report = now
                folder.report(report, is_beside=True)
            if why:
                return 0
            if time.monotonic() - looked_at >= LOOK_S:
                looked_at = time.monotonic()
                if folder.end() is not None:
                    break
            time.sleep(TURN_S)
    except OSError as error:
        say(f"{settings.host}: the sidecars' step has failed: {error}")
        with suppress(OSError):
            folder.report(NodeReport(host=settings.host, failed=str(error)), is_beside=True)
    finally:
        commands.stop(GRACE_S)
    return 0
