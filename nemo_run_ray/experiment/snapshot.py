"""One look at the job tables of clusters, from which all statuses of one answer come."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.remote.spec import JobRows

#: Seconds in which a head that recovers may answer before it knows its jobs.
_RECOVERS_S = 2.0
#: The reason where nobody knows a better one.
GONE = "the cluster that had it is gone"
_T = TypeVar("_T")


class Snapshot:
    """The answers of clusters at one moment. Each is asked once, and an error is an answer too.

    Args:
        is_fresh: the tables are asked for now; otherwise they may be a moment old.
    """

    def __init__(self, is_fresh: bool = False) -> None:
        self._is_fresh = is_fresh
        self._answers: dict[tuple[Hashable, str], Any] = {}

    def rows(self, api: JobsApi) -> JobRows:
        """The job table.

        Raises:
            ClusterError: the cluster cannot be asked.
        """
        return self.once(api, "rows", lambda: api.table(self._is_fresh))

    def programs(self, api: JobsApi) -> Mapping[str, str]:
        """Submission ids of the Ray programs of the job table, by Ray's number of the program.

        Raises:
            ClusterError: the cluster cannot be asked.
        """

        def named() -> dict[str, str]:
            rows = self.rows(api).items()
            return {str(row["job_id"]): name for name, row in rows if row.get("job_id")}

        return self.once(api, "programs", named)

    def why_lost(
        self, api: JobsApi, session: str, was_there: bool, is_in: Callable[[JobRows], bool]
    ) -> str:
        """The reason for which a cluster lost a dispatch that its table lacks; or empty.

        Args:
            api: of the cluster.
            session: Ray's name of the cluster's life that got it.
            was_there: it has arrived there; otherwise its lack proves nothing.
            is_in: whether a table has it.

        Raises:
            ClusterError: the cluster cannot be asked.
        """
        found = self.once(api, "session", lambda: api.version(0.0)["session_name"])
        url = api.dashboard.url
        if found != session:
            return f"the Ray at {url} is not the one that had it (then {session}, now {found})"
        if not was_there or is_in(self.rows_again(api)):
            return ""
        return f"the Ray at {url} has no record of it any more"

    def rows_again(self, api: JobsApi) -> JobRows:
        """The table after a head that recovers has had time to fill it.

        Raises:
            ClusterError: the cluster cannot be asked.
        """

        def wait_and_ask() -> JobRows:
            time.sleep(_RECOVERS_S)
            return api.table(fresh=True)

        return self.once(api, "again", wait_and_ask)

    def once(self, about: Hashable, what: str, ask: Callable[[], _T]) -> _T:
        """The result of ``ask``, or the error that it raises, remembered for this snapshot.

        Args:
            about: the object that is asked.
            what: the question.
            ask: gives the answer the first time.
        """
        key = (about, what)
        if key not in self._answers:
            try:
                self._answers[key] = ask()
            except NemoRunRayError as error:
                self._answers[key] = error
        found = self._answers[key]
        if isinstance(found, NemoRunRayError):
            raise found
        answer: _T = found
        return answer
