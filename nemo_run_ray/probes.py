"""What "ready" means for a service: plain values that a ``RayExecutor`` takes as ``ready``."""

# No postponed annotations: NeMo-Run's command line parses values by the types themselves.

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from nemo_run_ray.checks import is_amount, strict_init
from nemo_run_ray.errors import ConfigError

if TYPE_CHECKING:
    from nemo_run_ray.remote.spec import ProbeSpec


@dataclass
class Probe:
    """Base of the probes; use one of them. Fields that ``ProbeSpec`` has too are its values.

    Raises:
        ConfigError: a value is not allowed.
    """

    #: What the node is to try.
    kind: ClassVar[str]
    _: KW_ONLY
    #: Seconds from one try to the next.
    interval_s: float = 1
    #: Seconds from the service's start until the group is given up.
    timeout_s: float = 600

    def __post_init__(self) -> None:
        for name in ("interval_s", "timeout_s"):
            value = getattr(self, name)
            if not is_amount(value) or value == 0:
                self._refuse(name, value, "a number of seconds above 0")

    def spec(self) -> "ProbeSpec":
        """The probe as the node runs it."""
        if not hasattr(self, "kind"):
            raise NotImplementedError
        from nemo_run_ray.remote.spec import ProbeSpec  # not every program has a probe

        names = [name for name in ProbeSpec._fields if hasattr(self, name)]
        return ProbeSpec(**{name: getattr(self, name) for name in names})

    def _refuse(self, name: str, value: Any, allowed: str) -> NoReturn:
        raise ConfigError(f"{type(self).__name__}.{name} is {value!r}; allowed is {allowed}.")

    def _check_port(self, port: Any) -> None:
        if isinstance(port, bool) or not isinstance(port, (int, str)) or port == "":
            self._refuse("port", port, "a number or the name of one of the role's ports")
        if isinstance(port, int) and not 1 <= port <= 65535:
            self._refuse("port", port, "a number from 1 to 65535")


@strict_init
@dataclass
class PortProbe(Probe):
    """The service is ready when the port takes connections on the node's own address."""

    kind = "port"
    #: The port's number, or the name of one of the role's ``ports``.
    port: int | str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_port(self.port)


@strict_init
@dataclass
class HttpProbe(Probe):
    """The service is ready when ``GET http://<node>:<port><path>`` is answered with the status."""

    kind = "http"
    #: The port's number, or the name of one of the role's ``ports``.
    port: int | str
    path: str = "/"
    status: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_port(self.port)
        plain = isinstance(self.path, str) and self.path.isascii() and self.path.isprintable()
        if not plain or not self.path.startswith("/") or " " in self.path:
            self._refuse("path", self.path, "a path that begins with /, without spaces")
        if isinstance(self.status, bool) or not isinstance(self.status, int):
            self._refuse("status", self.status, "a number from 100 to 599")
        if not 100 <= self.status <= 599:
            self._refuse("status", self.status, "a number from 100 to 599")


@strict_init
@dataclass
class CommandProbe(Probe):
    """Exit code 0 of the command means ready; it runs on the node, in the role's environment."""

    kind = "command"
    #: The command, word by word; no shell sees it.
    command: list[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        words = self.command if isinstance(self.command, list) else []
        if not words or not all(isinstance(word, str) and "\0" not in word for word in words):
            self._refuse("command", self.command, "a list of texts, the program first")

    def spec(self) -> "ProbeSpec":
        return super().spec()._replace(command=tuple(self.command))
