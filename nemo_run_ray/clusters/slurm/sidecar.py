"""A command that runs beside Ray in an allocation."""

# No postponed annotations: NeMo-Run's command line parses values by the types themselves.

import re
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from nemo_run.config import ConfigurableMixin

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import Probe, strict_init

_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")


@strict_init
@dataclass
class Sidecar(ConfigurableMixin):
    """A command that runs beside Ray for the life of an allocation: a code sandbox, a cache.

    No job starts before every sidecar is ready, and the allocation ends when one of them does.

    Example:
        ``Sidecar("sandbox", "./start-sandbox.sh", ready=PortProbe(6000))``

    Raises:
        ConfigError: a value is not allowed.
    """

    #: For messages and the name of its log, ``logs/ray-<name>-<host>.log``.
    name: str
    #: A line for ``bash``.
    command: str
    _: KW_ONLY
    #: On every node, or on the head's alone.
    everywhere: bool = True
    #: What says that it is ready, with a port's number; ``None`` means at once.
    ready: Probe | None = None
    #: Added to the environment of the executor.
    env_vars: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"Sidecar.name is {self.name!r}; allowed are letters, digits, '_' and '-'."
            )
        if not isinstance(self.command, str) or not self.command.strip():
            raise ConfigError(f"Sidecar.command is {self.command!r}; expected is a line for bash.")
        port = getattr(self.ready, "port", None)
        if isinstance(port, str):
            raise ConfigError(
                f"Sidecar.ready of {self.name!r} names the port {port!r}; a sidecar has no named "
                "ports: give the number."
            )

    def row(self) -> dict[str, Any]:
        """The sidecar as the node program reads it."""
        probe = None if self.ready is None else self.ready.spec()._asdict()
        return {
            "name": self.name,
            "command": self.command,
            "everywhere": self.everywhere,
            "probe": probe,
            "env": dict(self.env_vars),
        }
