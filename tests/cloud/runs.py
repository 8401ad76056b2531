"""What a user does on a platform, and what comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import nemo_run as run

from nemo_run_ray.cloud import ShipSource
from tests.cloud.conftest import Platform
from tests.conftest import wait_for


def launch(platform: Platform, task, project, name: str, ship=None, detach=False, **fields) -> None:
    """A user's call as it is."""
    run.run(
        task,
        executor=platform.make(**fields),
        plugins=[ship or ShipSource(project.root)],
        name=name,
        detach=detach,
        tail_logs=False,
    )


def found(results: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}


def logs(platform: Platform) -> str:
    return "\n".join(one.log() for one in platform.cluster.submitted)


def finished(platform: Platform) -> bool:
    """Whether all pods of the last job have ended."""
    return None not in platform.jobs()[-1].codes()


def must_succeed(platform: Platform) -> None:
    wait_for(lambda: finished(platform))
    assert set(platform.jobs()[-1].codes()) == {0}, logs(platform)
