"""Pods: real processes, each with a root folder of its own, on a folder that they share."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ENTER = Path(__file__).with_name("enter.py")
_NAME = re.compile(r"\$\$|\$\(([^)]*)\)")

#: In the place of the script that Lepton's images fetch: it sets what torchrun needs.
_WGET = """#!/bin/sh
while [ "$1" != -O ]; do shift; done
echo 'export NODE_RANK=${LEPTON_JOB_WORKER_INDEX:-0} MASTER_ADDR=127.0.0.1 MASTER_PORT=1' > "$2"
"""


def expanded(variables: Sequence[tuple[str, str]]) -> dict[str, str]:
    """As Kubernetes does: ``$(NAME)`` of variables before it, and ``$`` for ``$$``."""
    known: dict[str, str] = {}
    for name, value in variables:
        known[name] = expand(value, known)
    return known


def expand(text: str, known: Mapping[str, str]) -> str:
    def replace(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return known.get(found[1], found[0])

    return _NAME.sub(replace, text)


@dataclass
class Image:
    """What a container has beside the machine's programs.

    Attributes:
        folder: on the machine, seen at the same path in every pod; its ``bin`` comes first.
        path: other folders of programs.
        variables: of its own.
    """

    folder: Path
    path: tuple[str, ...] = (str(Path(sys.executable).parent), "/usr/bin", "/bin")
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir(parents=True, exist_ok=True)
        self.add("wget", _WGET)

    def add(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(script)
        path.chmod(0o755)

    def environment(self) -> dict[str, str]:
        path = ":".join([f"{self.folder}/bin", *self.path])
        return {**self.variables, "PATH": path, "HOME": "/root"}

    def mounts(self) -> dict[str, str]:
        places = [str(self.folder), sys.prefix, sys.base_prefix]
        return {one: one for one in places}


@dataclass
class Pod:
    """One container.

    Attributes:
        name: its host name.
        argv: of the first process.
        variables: as submitted, in order.
        mounts: folders of the pod, with those of the machine.
    """

    name: str
    argv: list[str]
    variables: list[tuple[str, str]]
    mounts: dict[str, str]
    image: Image
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        shutil.rmtree(self.folder / "root", ignore_errors=True)
        (self.folder / "root").mkdir(parents=True)
        env = expanded(
            [*self.image.environment().items(), ("HOSTNAME", self.name), *self.variables]
        )
        plan = {
            "root": str(self.folder / "root"),
            "mounts": {**self.image.mounts(), **self.mounts},
            "env": env,
            "argv": [expand(one, env) for one in self.argv],
        }
        (self.folder / "plan.json").write_text(json.dumps(plan))
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(_ENTER), str(self.folder / "plan.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={},
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        return self.process.poll() if self.process else None

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def kill(self) -> None:
        """As a node that dies: no process of it gets to do anything more."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Workload:
    """Pods that run together; over when all have ended."""

    id: str
    name: str
    kind: str
    pods: list[Pod]

    def start(self) -> None:
        for pod in self.pods:
            pod.start()

    def codes(self) -> list[int | None]:
        return [pod.exit_code() for pod in self.pods]

    def kill(self) -> None:
        for pod in self.pods:
            pod.kill()

    def log(self) -> str:
        return "".join(f"== {pod.name} ({pod.exit_code()})\n{pod.log()}" for pod in self.pods)


@dataclass
class Cluster:
    """Where workloads run.

    Attributes:
        shared: the folder of the machine that volumes are in.
        folder: for the pods' own files.
    """

    shared: Path
    folder: Path
    image: Image
    workloads: dict[str, Workload] = field(default_factory=dict)
    submitted: list[Workload] = field(default_factory=list)
    #: What a pod gets instead of what was submitted, when a test says so.
    tamper: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        kind: str,
        name: str,
        argv: list[str],
        variables: list[tuple[str, str]],
        mounts: dict[str, str],
        count: int,
    ) -> Workload:
        number = f"w{len(self.submitted)}-{random.randrange(16**6):06x}"
        pods = [
            Pod(
                f"{name}-worker-{rank}",
                argv,
                [
                    *((key, self.tamper.get(key, value)) for key, value in variables),
                    ("LEPTON_JOB_WORKER_INDEX", str(rank)),
                ],
                mounts,
                self.image,
                self.folder / number / str(rank),
            )
            for rank in range(count)
        ]
        workload = Workload(number, name, kind, pods)
        self.workloads[number] = workload
        self.submitted.append(workload)
        workload.start()
        return workload

    def close(self) -> None:
        for workload in self.submitted:
            workload.kill()

    def of(self, *kinds: str) -> list[Workload]:
        return [one for one in self.submitted if one.kind in kinds]
