"""What a client wants of a running array, left in Ray's store of archives until the driver has it.

A client has no way to the driver but the dashboard, which takes archives. The driver removes one
when it has done what it says and the head's disk knows of it: so the client sees that it was heard.
``ray`` is passed in.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Iterable, Iterator, List, Tuple

from ..attempts import first_id

#: First and last index of elements in a row.
Range = Tuple[int, int]
_SCHEME = "gcs://"


def wish_name(submission_id: str, nonce: str) -> str:
    """Name of the archive that holds a wish.

    Args:
        submission_id: of any attempt of the array.
        nonce: tells it from other wishes.
    """
    return f"{_prefix(submission_id)}{nonce}.zip"


def wish_to_cancel(ranges: Iterable[Range]) -> bytes:
    """The wish that elements end, or never begin."""
    return json.dumps({"cancel": list(ranges)}).encode()


class Wishes:
    """The wishes for one array.

    Args:
        ray: the module, connected.
        submission_id: of the job.
    """

    def __init__(self, ray: Any, submission_id: str) -> None:
        self._store = ray.experimental.internal_kv
        self._prefix = (_SCHEME + _prefix(submission_id)).encode()

    def find(self, count: int) -> Iterator[Tuple[bytes, List[int]]]:
        """The wishes that are there, each with the elements that are to be cancelled.

        Args:
            count: of the array's elements.
        """
        for key in self._store._internal_kv_list(self._prefix):
            found: List[int] = []
            with suppress(ValueError, TypeError, KeyError):  # it is none of ours
                for first, last in json.loads(self._store._internal_kv_get(key))["cancel"]:
                    found += range(max(0, first), min(last, count - 1) + 1)
            yield key, found

    def remove(self, key: bytes) -> None:
        """Say that a wish was heard."""
        self._store._internal_kv_del(key)


def _prefix(submission_id: str) -> str:
    return f"nemo_run_ray_wish_{first_id(submission_id)}_"
