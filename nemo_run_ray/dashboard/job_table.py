"""One look at a cluster's jobs, shared by all who ask within a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nemo_run_ray.errors import ClusterError
from nemo_run_ray.remote.rows import JobRows

#: Seconds that one look at the job table serves all callers in this process. NeMo-Run looks at each
#: job every 2 s, at moments of their own; this makes it at most two requests in that time.
TABLE_AGE_S = 1.5


class JobTable:
    """The last look at the job table, shared by all threads; also a failed look is shared."""

    def __init__(self, read: Callable[[], JobRows]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._seen_at = -1e9
        self._rows: JobRows = {}
        self._error: ClusterError | None = None

    def read(self, fresh: bool) -> JobRows:
        asked_at = time.monotonic()
        with self._lock:
            # A thread that waited for the lock while another one looked takes what that one saw.
            if self._seen_at < (asked_at if fresh else asked_at - TABLE_AGE_S):
                began_at = time.monotonic()
                try:
                    self._rows, self._error = self._read(), None
                except ClusterError as error:
                    self._error = error
                self._seen_at = began_at if self._error is None else time.monotonic()
            if self._error is not None:
                raise self._error
            return self._rows

    def forget(self) -> None:
        self._seen_at = -1e9
