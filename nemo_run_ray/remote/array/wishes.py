"""What a client wants of a running array, left in Ray's store of archives until the driver has it.

A client has no way to the driver but the dashboard, which takes archives. The driver removes one
when it has done what it says and the head's disk knows of it: so the client sees that it was heard.
``ray`` is passed in. Ray has no public way to that store for programs; ``internal_kv`` was tried
with Ray 2.54 and 2.60.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from ..attempts import first_id

#: First and last index of elements in a row.
Range = Tuple[int, int]
_SCHEME = "gcs://"


class Wish(NamedTuple):
    """That elements end, or never begin.

    Attributes:
        key: where it lies.
        ranges: of the elements.
        only_waiting: leave those alone that have begun by now.
    """

    key: bytes
    ranges: List[Range]
    only_waiting: bool


def wish_name(submission_id: str, nonce: str) -> str:
    """Name of the archive that holds a wish.

    Args:
        submission_id: of any attempt of the array.
        nonce: tells it from other wishes.
    """
    return f"{_prefix(submission_id)}{nonce}.zip"


def wish_to_cancel(ranges: Iterable[Range], only_waiting: bool) -> bytes:
    """The archive of a wish, as ``Wish`` describes it."""
    return json.dumps({"cancel": list(ranges), "only_waiting": only_waiting}).encode()


class Wishes:
    """The wishes for one array.

    Args:
        ray: the module, connected.
        submission_id: of the job.
    """

    def __init__(self, ray: Any, submission_id: str) -> None:
        self._store = ray.experimental.internal_kv
        self._unanswered = ray.exceptions.RayError
        self._prefix = (_SCHEME + _prefix(submission_id)).encode()

    def find(self, count: int) -> Iterator[Wish]:
        """The wishes that are there.

        Args:
            count: of the array's elements.
        """
        for key in self._keys():
            with suppress(self._unanswered):  # the next look finds it
                wish = _read(key, self._store._internal_kv_get(key), count)
                if wish is None:  # it is none of this package's
                    self.remove(key)
                else:
                    yield wish

    def remove(self, key: bytes) -> None:
        """Say that a wish was heard."""
        with suppress(self._unanswered):  # it is found, and done, once more
            self._store._internal_kv_del(key)

    def remove_all(self) -> None:
        """Remove those that come too late."""
        for key in self._keys():
            self.remove(key)

    def _keys(self) -> List[bytes]:
        with suppress(self._unanswered):  # the head's store is away for a moment
            return list(self._store._internal_kv_list(self._prefix))
        return []


def _read(key: bytes, data: Any, count: int) -> Optional[Wish]:
    with suppress(ValueError, TypeError, KeyError):
        found = json.loads(data)
        ranges = [(max(0, first), min(last, count - 1)) for first, last in found["cancel"]]
        return Wish(key, ranges, bool(found["only_waiting"]))
    return None


def _prefix(submission_id: str) -> str:
    # No id has a tilde: one array's prefix begins no other one's.
    return f"nemo_run_ray_wish_{first_id(submission_id)}~"
