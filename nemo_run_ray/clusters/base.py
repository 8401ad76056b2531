"""The protocol of a cluster, and the address of a dashboard."""

from __future__ import annotations

import abc
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from nemo_run.config import ConfigurableMixin

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.remote.rows import JobRows

#: Kinds whose modules are imported when they are used.
_IMPORTED_LATE = {"local": "nemo_run_ray.clusters.local", "slurm": "nemo_run_ray.clusters.slurm"}
#: Set by Ctrl-C, which only the main thread sees: a thread that waits for a cluster to come up
#: gives up. Whoever waits anew clears it.
interrupted = threading.Event()


class EarlierJobs(Protocol):
    """Jobs of a cluster from before the Ray that is up; they go on in it."""

    def rows(self) -> JobRows:
        """Their rows in the job tables of then."""

    def log(self, submission_id: str) -> Path | None:
        """The log of one of them, as it was left; ``None`` without one."""


@dataclass(frozen=True)
class Dashboard:
    """The way to one Ray dashboard. It holds credentials and is never written anywhere.

    Attributes:
        url: base of all requests, without a slash at its end; may have a path prefix.
        headers: sent with every request, the token among them.
        verify: check the server's certificate, or the path of a file with the CA to trust.
        credentials_step: what to do when the credentials are refused; empty where they come from
            where Ray itself looks for a token.
        why_dead: says in sentences why it can never answer again; empty while it may. The
            process that started Ray knows when it has ended, and no client need wait for it.
        earlier: jobs from before this Ray that belong to its job table; ``None`` without any.
        env_tries: how often Ray builds a runtime environment there; ``None`` when it is not known.
    """

    url: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    verify: bool | str = True
    credentials_step: str = field(default="", compare=False)
    why_dead: Callable[[], str] = field(default=str, repr=False, compare=False)
    earlier: EarlierJobs | None = field(default=None, repr=False, compare=False)
    env_tries: int | None = field(default=None, repr=False, compare=False)

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine, so that no proxy of the environment may be asked."""
        host = urlsplit(self.url).hostname or ""
        return host == "localhost" or host == "::1" or host.startswith("127.")

    def job_page(self, submission_id: str) -> str:
        """The job's page in Ray's dashboard."""
        return f"{self.url}/#/jobs/{submission_id}"


class Cluster(ConfigurableMixin, abc.ABC):
    """Where jobs run. Implementations are dataclasses, so that NeMo-Run can save them."""

    #: Name of the kind in a ledger.
    kind: ClassVar[str]
    _kinds: ClassVar[dict[str, type[Cluster]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Cluster._kinds[cls.kind] = cls

    @abc.abstractmethod
    def connect(self) -> Dashboard:
        """The dashboard to submit to; brings the cluster up if that is this kind's business.

        Raises:
            ClusterError: it cannot be brought up.
        """

    @abc.abstractmethod
    def find(self) -> Dashboard | None:
        """The dashboard of a cluster that was used before, or ``None`` when it is gone for good."""

    def why_gone(self, session: str) -> str:
        """Why a life of this cluster is over, as the end of a sentence; empty if nobody here knows.

        Args:
            session: Ray's name of that life.
        """
        return ""

    def why_down(self) -> str:
        """Why the life of this cluster that was here last is over; empty if nobody here knows."""
        return ""

    def why_away(self, session: str) -> str:
        """Why a life of this cluster is over whose jobs go on in the next one; empty otherwise.

        Args:
            session: Ray's name of that life.
        """
        return ""

    def keep_dispatch(
        self,
        dispatcher: str,
        ids: Sequence[str],
        body: dict[str, Any],
        archives: Callable[[], Mapping[str, bytes]],
    ) -> None:
        """Keep what a dispatch needs to go on in the cluster's next life, if there may be one.

        Args:
            dispatcher: id of its dispatcher.
            ids: of its jobs.
            body: of the request that starts the dispatcher, with the id of its first attempt.
            archives: gives those that the request and the jobs use, by name.

        Raises:
            ClusterError: it cannot be kept.
        """
        return None

    def left_log(self, session: str, submission_id: str) -> Path | None:
        """The log of a job that a cluster which has died has left on this machine, if it has.

        Args:
            session: Ray's name of the cluster's life that had the job.
            submission_id: of the job.
        """
        return None

    def left_rows(self, session: str) -> JobRows:
        """Ray's job table as a life of this cluster has left it at its end; empty if it has not.

        Args:
            session: Ray's name of that life.
        """
        return {}

    @abc.abstractmethod
    def record(self) -> dict[str, Any]:
        """Plain values from which a later process can make this object. No credentials."""

    @classmethod
    def of_record(cls, values: dict[str, Any]) -> Cluster:
        """The object that ``record`` was called on, of its values without the kind."""
        return cls(**values)

    @property
    def python(self) -> str | None:
        """The interpreter that jobs get when the executor names none; ``None`` is the node's."""
        return None

    @property
    def runs_here(self) -> bool:
        """Whether jobs see the caller's files, so that code need not be sent."""
        return False

    def release(self, detach: bool) -> None:
        """The caller has submitted all it will; ``detach`` says that jobs go on without it."""
        return None


def from_record(record: dict[str, Any]) -> Cluster:
    """Inverse of ``Cluster.record``.

    Raises:
        ConfigError: the record names a kind that this version does not know.
    """
    values = dict(record)
    kind = values.pop("kind", None)
    if kind not in Cluster._kinds and kind in _IMPORTED_LATE:
        importlib.import_module(_IMPORTED_LATE[kind])
    if kind not in Cluster._kinds:
        known = ", ".join(sorted({*Cluster._kinds, *_IMPORTED_LATE}))
        raise ConfigError(
            f"The ledger names a cluster of kind {kind!r}; this version of nemo_run_ray knows "
            f"{known}. Install the version that submitted the job."
        )
    return Cluster._kinds[kind].of_record(values)
