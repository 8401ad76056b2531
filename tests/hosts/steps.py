"""Chains for tests: every job checks by itself that it is alone and that its turn has come."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import nemo_run as run

from nemo_run_ray import RayExecutor
from nemo_run_ray.clusters import Cluster

#: Takes the job's lock, looks for what its upstreams leave behind, and complains in a file. The
#: kernel frees the lock when the last process of the job has ended, however it ended.
PROGRAM = """
cd {folder}
exec 9>lock-{name}
flock -n 9 || echo "{name}: two attempts at once" >> complaints
for upstream in {after}; do
    test -e done-$upstream || echo "{name}: started before $upstream" >> complaints
done
test -e done-{name} && echo "{name}: started after its success" >> complaints
echo "{name} $NEMO_RUN_ATTEMPT" >> journal
echo "{name} runs"
sleep {seconds}
{end}
touch done-{name}
"""


@dataclass
class Step:
    """A job of a chain.

    Attributes:
        name: of the job, and of its files.
        after: names of the jobs that it depends on.
        seconds: that it takes.
        end: what it does last, in shell; by default it succeeds.
        fields: of its executor.
    """

    name: str
    after: tuple[str, ...] = ()
    seconds: float = 0.5
    end: str = ":"
    fields: dict = field(default_factory=dict)

    def program(self, folder: Path) -> str:
        return PROGRAM.format(
            folder=folder,
            name=self.name,
            after=" ".join(self.after),
            seconds=self.seconds,
            end=self.end,
        )


#: Fails in the first two attempts.
FLAKY = "test $NEMO_RUN_ATTEMPT -ge 3 || exit 5"


def submit(title: str, cluster: Cluster, folder: Path, *steps: Step, **common) -> str:
    """Hand a chain over and leave; the experiment's id.

    Args:
        title: of the experiment.
        cluster: that gets it.
        folder: for the files of the jobs, seen by all hosts.
        steps: each after those that it depends on.
        common: fields of every executor.
    """
    common = {"cluster": cluster, "python": sys.executable, **common}
    ids: dict[str, str] = {}
    with run.Experiment(title) as experiment:
        for step in steps:
            ids[step.name] = experiment.add(
                run.Script(inline=step.program(folder)),
                executor=RayExecutor(**{**common, **step.fields}),
                name=step.name,
                dependencies=[ids[name] for name in step.after],
            )
        experiment.run(detach=True)
    return str(experiment._id)


def complaints(folder: Path) -> str:
    """What the jobs found wrong; empty if nothing was."""
    path = folder / "complaints"
    return path.read_text() if path.exists() else ""


def starts(folder: Path) -> list[str]:
    """``job attempt`` of everything that started, in its order."""
    path = folder / "journal"
    return path.read_text().splitlines() if path.exists() else []
