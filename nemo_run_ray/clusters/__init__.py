"""The protocol of a cluster, the address of a dashboard, and the kinds of clusters.

A cluster exists, or is an embedded Ray on this machine, or is in an allocation of Slurm. A new kind
is a new file here with a subclass of ``Cluster``, named in ``_KINDS``; CONTRIBUTING.md lists what
else it needs.
"""

from __future__ import annotations

import abc
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from nemo_run.config import ConfigurableMixin

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.remote.spec import JobRows, Json

#: The class of each kind, which is imported when it is used: what starts something is large.
_KINDS = {
    "existing": "existing.ExistingCluster",
    "local": "local.LocalCluster",
    "slurm": "slurm.SlurmCluster",
}
#: The places in which Ray, and so this package, looks for a user's token.
TOKEN_PLACES = "RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
#: Set by Ctrl-C, which only the main thread sees: a thread that waits for a cluster to come up
#: gives up. Whoever waits anew clears it.
interrupted = threading.Event()


def text_of(path: Path) -> Iterator[str]:
    """A log's text, piece by piece, as Ray itself would give it."""
    with open(path, encoding="utf-8", errors="replace") as file:
        while text := file.read(65536):
            yield text


@dataclass(frozen=True)
class ClusterArchive:
    """The job table, the logs and the end of a Ray that is gone."""

    #: The reason of its end, as the end of a sentence.
    reason: str = ""
    #: Its job table at the end; empty if that was not kept.
    rows: JobRows = field(default_factory=dict)
    #: The log of a job on this machine, by submission id; ``None`` without one.
    log: Callable[[str], Path | None] = lambda _: None
    #: Its dispatches continue in the next Ray, which may not be up yet.
    continues: bool = False

    @property
    def sentence(self) -> str:
        """The reason as a sentence of its own."""
        return f"{self.reason[:1].upper()}{self.reason[1:]}"


@dataclass(frozen=True)
class Dashboard:
    """The way to one Ray dashboard. It holds credentials and is never written anywhere."""

    #: Base of all requests, without a slash at its end; may have a path prefix.
    url: str
    #: Sent with every request, the token among them.
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    #: Check the server's certificate, or the path of a file with the CA to trust.
    verify: bool | str = True
    #: Says in sentences why it can never answer again; empty while it may. The process that started
    #: Ray knows when it has ended, and no client need wait for it.
    why_dead: Callable[[], str] = field(default=str, repr=False, compare=False)
    #: Jobs of allocations before this Ray, which continue in it.
    earlier: ClusterArchive = field(default=ClusterArchive(), repr=False, compare=False)
    #: The place in which a user finds, and corrects, the token that is sent.
    token_at: str = field(default=TOKEN_PLACES, compare=False)

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine, so that no proxy of the environment may be asked."""
        host = urlsplit(self.url).hostname or ""
        return host == "localhost" or host == "::1" or host.startswith("127.")

    def job_page(self, submission_id: str) -> str:
        """The job's page in Ray's dashboard."""
        return f"{self.url}/#/jobs/{submission_id}"


class Cluster(ConfigurableMixin, abc.ABC):
    """A place where jobs run. Kinds are dataclasses, so that NeMo-Run can save them."""

    #: Name of the kind in a ledger.
    kind: ClassVar[str]
    #: The interpreter that jobs get when the executor names none; ``None`` is the node's.
    python: ClassVar[str | None] = None
    #: Whether jobs see the caller's files, so that code need not be sent.
    runs_here: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """Its name in a table."""

    @abc.abstractmethod
    def connect(self) -> Dashboard:
        """The dashboard to submit to; brings the cluster up if that is this kind's business.

        Raises:
            ClusterError: it cannot be brought up.
        """

    @abc.abstractmethod
    def find(self) -> Dashboard | None:
        """The dashboard of a cluster that was used before, or ``None`` when it is gone for good."""

    def archive(self, session: str = "") -> ClusterArchive | None:
        """The archive of a Ray, which may be gone; ``None`` if there is none.

        An empty session is the last one, unless it was stopped.

        Raises:
            ClusterError: the host that has it cannot be asked.
        """
        return None

    def keep_dispatch(
        self,
        dispatcher: str,
        ids: Sequence[str],
        body: Json,
        archives: Callable[[], Mapping[str, bytes]],
    ) -> None:
        """Keep what a dispatch needs to continue in the next allocation, if there may be one.

        ``body`` starts its first dispatcher; ``archives`` gives those of the request and the jobs.

        Raises:
            ClusterError: it cannot be kept.
        """
        return None

    @abc.abstractmethod
    def record(self) -> Json:
        """Plain values from which a later process can make this object. No credentials."""

    @classmethod
    def of_record(cls, values: Json) -> Cluster:
        """The object that ``record`` was called on, of its values without the kind."""
        return cls(**values)

    def detach(self) -> None:
        """Let the jobs continue without this program, which submits no more."""
        return None


def from_record(record: Json) -> Cluster:
    """Inverse of ``Cluster.record``.

    Raises:
        ConfigError: the record names a kind that this version does not know.
    """
    values = dict(record)
    kind = values.pop("kind", None)
    if kind not in _KINDS:
        raise ConfigError(
            f"The ledger names a cluster of kind {kind!r}; this version of nemo_run_ray knows "
            f"{', '.join(_KINDS)}. Install the version that submitted the job."
        )
    module, _, name = _KINDS[kind].partition(".")
    cls: type[Cluster] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return cls.of_record(values)
