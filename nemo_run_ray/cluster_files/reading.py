"""What a reader makes of a file: values in the form of ``schema.ClusterFile``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_run_ray.cluster_files.document import KeyPath


@dataclass(frozen=True)
class Ignored:
    """A key of a foreign file that means nothing on Ray.

    Attributes:
        key: as the file writes it, with dots.
        reason: why, as a sentence.
        where: file and line.
    """

    key: str
    reason: str
    where: str


@dataclass(frozen=True)
class Reading:
    """A file in our form.

    Attributes:
        format: whose format the file has, in words.
        values: sections and keys of ``schema.ClusterFile``, not checked yet.
        sources: where a value comes from, ``file:line`` and, in a foreign file, its key there; by
            the path of the value in ``values``.
        ignored: keys that were left out.
    """

    format: str
    values: dict[str, Any]
    sources: dict[KeyPath, str] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
