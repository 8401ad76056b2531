"""The wire format: what the client tells the half that runs on the cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Dict, Optional, Tuple

#: Raised when a field changes its meaning. Client and remote half travel together, so it only ever
#: differs when somebody mixes archives by hand.
VERSION = 1


@dataclass(frozen=True)
class JobSpec:
    """One task as the node runs it. It names no experiment, so equal tasks make equal archives.

    Attributes:
        argv: the command, word by word; never seen by a shell.
        env: variables for the command, over those that Ray gave the job.
        cwd: absolute folder to run in, or ``None`` for ``code/`` of the run directory.
        python: interpreter asked for; its folder comes first on ``PATH``, as after an activation.
        grace_s: seconds between SIGTERM and SIGKILL.
        keep_run_dir: leave the run directory on the node.
        has_code: Ray's working directory holds the user's code.
        secrets: names of the variables that arrive in an archive of their own.
        config: path below the run directory of NeMo-Run's serialised task, to explain failures.
    """

    argv: Tuple[str, ...]
    env: Dict[str, str] = field(default_factory=dict)
    cwd: Optional[str] = None
    python: Optional[str] = None
    grace_s: float = 10.0
    keep_run_dir: bool = False
    has_code: bool = False
    secrets: Tuple[str, ...] = ()
    config: Optional[str] = None

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """Inverse of ``to_json``.

        Raises:
            ValueError: the text is of another version or has unknown fields.
        """
        values = json.loads(text)
        version = values.pop("version", None)
        unknown = set(values) - {one.name for one in fields(cls)}
        if version != VERSION or unknown:
            raise ValueError(
                f"job spec of version {version!r} with unknown fields {sorted(unknown)}; "
                f"this code reads version {VERSION}"
            )
        values["argv"] = tuple(values["argv"])
        values["secrets"] = tuple(values.get("secrets", ()))
        return cls(**values)
