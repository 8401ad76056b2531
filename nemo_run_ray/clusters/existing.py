"""A cluster that this package does not run: KubeRay, Slurm, bare machines."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from nemo_run_ray.clusters import TOKEN_PLACES, Cluster, Dashboard
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import is_credential_name, strict_init
from nemo_run_ray.remote.spec import Json

#: Ray's default port of the dashboard.
DASHBOARD_PORT = 8265
_HOST_AND_PORT = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):\d+")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
#: Tokens given in code, by fingerprint: NeMo-Run saves executors, and a token must not be in a
#: file.
_TOKENS: dict[str, str] = {}


@strict_init
@dataclass
class ExistingCluster(Cluster):
    """A Ray cluster reached through its dashboard. This package never starts or stops it.

    Example:
        ``ExistingCluster("https://ray.example.org/team-a", verify="/etc/ssl/our-ca.pem")``

    Raises:
        ConfigError: the address is not one, or a header names a variable that is not set.
    """

    kind: ClassVar[str] = "existing"

    #: ``http(s)://host[:port][/prefix]``. ``host:PORT`` is ``http://host:PORT``; ``ray://…``,
    #: ``host:6379`` and ``host:10001`` are read as ``http://host:8265``. ``"auto"`` is the address
    #: in RAY_API_SERVER_ADDRESS or RAY_ADDRESS, and without one ``http://127.0.0.1:8265``.
    url: str
    _: KW_ONLY
    #: Ray's token. Kept in this process only: what is saved is its fingerprint, and in another
    #: process the token of that fingerprint alone is sent. Without it the token is taken from
    #: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, as Ray does.
    token: str | None = field(default=None, repr=False)
    #: Extra headers, for a proxy before the dashboard. They are saved with the experiment as given;
    #: ``${NAME}`` in a value stands for a variable of the environment, which credentials need.
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    #: Check the certificate, or the path of a file with the CA to trust.
    verify: bool | str = True

    def __post_init__(self) -> None:
        self.url = _dashboard_url(self.url)
        if not isinstance(self.headers, dict) or not all(
            isinstance(word, str) for pair in self.headers.items() for word in pair
        ):
            raise ConfigError("ExistingCluster.headers is no dict of texts by text.")
        for name, value in self.headers.items():
            _check_header(name, value)
            is_scheme = value.lower().startswith(("bearer ", "basic "))
            is_secret = is_credential_name(name) or is_scheme
            if is_secret and not _VARIABLE.search(value):
                raise ConfigError(
                    f"ExistingCluster.headers[{name!r}] is given in clear, and headers are saved "
                    "with the experiment. Put the value into a variable of the environment and "
                    f"give {{{name!r}: '${{NAME_OF_IT}}'}}, or use token= for Ray's own token."
                )
        if self.token is not None:
            token = _checked(self.token, "ExistingCluster.token")
            if not token.startswith("sha256:"):
                self.token = _fingerprint(token)
                _TOKENS[self.token] = token
        if isinstance(self.verify, str) and not Path(self.verify).is_file():
            raise ConfigError(
                f"ExistingCluster.verify: there is no file {self.verify!r}; expected True, False "
                "or the path of a PEM file with the CA to trust."
            )

    @property
    def title(self) -> str:
        return self.url

    def connect(self) -> Dashboard:
        token_at = TOKEN_PLACES if self.token is None else "the token= of your program"
        token = self._token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for name, value in self.headers.items():
            variables = _VARIABLE.findall(value)
            for variable in variables:
                if variable not in os.environ:
                    raise ConfigError(
                        f"ExistingCluster.headers[{name!r}] needs the environment variable "
                        f"{variable}, which is not set; set it and run again."
                    )
            if name.lower() == "authorization":
                headers.pop("Authorization", None)
                token_at = f"the variable {', '.join(variables)}"
            headers[name] = _VARIABLE.sub(lambda match: os.environ[match[1]], value)
            _check_header(name, headers[name])
        dashboard = Dashboard(self.url, headers, self.verify, token_at=token_at)
        sent = [name for name in headers if is_credential_name(name)]
        if sent and self.url.startswith("http://") and not dashboard.is_loopback:
            warnings.warn(
                f"{', '.join(sent)} goes to {self.url} without encryption, and whoever is on the "
                "way can read it. Use https, or an SSH forward and http://127.0.0.1:<port>.",
                stacklevel=1,
            )
        return dashboard

    def find(self) -> Dashboard | None:
        return self.connect()

    def record(self) -> Json:
        return {"kind": self.kind, **vars(self)}

    def _token(self) -> str:
        """Ray's token for this cluster; without one of its own, from where Ray looks for one."""
        if self.token in _TOKENS:
            return _TOKENS[self.token]
        # Naming a cluster needs no client of its dashboard.
        from nemo_run_ray.remote.dashboard import ray_token

        try:
            token = ray_token()
        except OSError as error:
            raise ConfigError(
                f"Ray's token file {error.filename} cannot be read ({error.strerror}). Correct the "
                "file or the variable RAY_AUTH_TOKEN_PATH."
            ) from error
        if not token:
            return ""
        token = _checked(token, f"Ray's token of this user ({TOKEN_PLACES})")
        # That of another cluster is not for this one.
        return token if self.token in (None, _fingerprint(token)) else ""


def _fingerprint(token: str) -> str:
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()[:16]}"


def _checked(token: object, what: str) -> str:
    """A token without the blanks around it."""
    if isinstance(token, str) and token.isascii() and token.split() == [token.strip()]:
        return token.strip()
    raise ConfigError(
        f"{what} holds a blank, a line's end or another character that a token cannot have, or is "
        "no text (it is not shown here); give the token alone."
    )


def _check_header(name: str, value: str) -> None:
    is_name = re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII)
    if not is_name or not re.fullmatch(r"[\t -~]*", value):
        raise ConfigError(
            f"ExistingCluster.headers[{name!r}] holds a character that HTTP does not allow in its "
            "name or value (the value is not shown here); expected ASCII without line ends."
        )


def _dashboard_url(url: str) -> str:
    allowed = "expected http(s)://host[:port][/prefix] of Ray's dashboard"
    text = url.strip() if isinstance(url, str) else ""
    if text == "auto":
        # The address that Ray's own tools would use, or that of a Ray on this machine.
        for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
            address = os.environ.get(name, "").strip()
            if address not in ("", "auto", "local"):
                is_of_gcs = name == "RAY_ADDRESS" and _HOST_AND_PORT.fullmatch(address)
                return _dashboard_url(f"ray://{address}" if is_of_gcs else address)
        return f"http://127.0.0.1:{DASHBOARD_PORT}"
    if _HOST_AND_PORT.fullmatch(text):
        # The ports of the GCS and of Ray's client server.
        text = f"{'ray' if text.endswith((':6379', ':10001')) else 'http'}://{text}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"The cluster's address is {url!r} ({error}); {allowed}.") from error
    if parts.username is not None:
        raise ConfigError(
            f"The cluster's address names a user of {parts.hostname}, and addresses are saved with "
            "the experiment. Give ExistingCluster(url, headers={'Authorization': 'Basic "
            "${MY_BASIC_AUTH}'}) and set that variable."
        )
    if parts.scheme == "ray" and parts.hostname:
        found = f"http://{parts.netloc.removesuffix(f':{port}')}:{DASHBOARD_PORT}"
        warnings.warn(
            f"{url} is an address of another part of Ray. Jobs are sent to the dashboard, which is "
            f"expected at {found}. Give the dashboard's address to silence this.",
            stacklevel=1,
        )
        return found
    # urlsplit leaves some characters out.
    is_clean = text.isprintable() and " " not in text
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not is_clean:
        hint = (
            f" Did you mean http://{text}:{DASHBOARD_PORT}?" if text and "://" not in text else ""
        )
        raise ConfigError(f"The cluster's address is {url!r}; {allowed}.{hint}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
