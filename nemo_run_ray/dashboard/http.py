"""Requests to one dashboard, each with a time limit, and the translation of their failures."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_before_delay,
    wait_random_exponential,
)

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.clusters.base import interrupted
from nemo_run_ray.errors import (
    ClusterError,
    ConfigError,
    NemoRunRayError,
    Unanswered,
    Unauthorised,
    Unreachable,
)
from nemo_run_ray.remote.dashboard import is_passing, retry_after_s

#: Seconds until a connection stands, until an answer has come, and the same of a request that Ray
#: works on before it answers.
CONNECT_S, READ_S, SLOW_S = 4.0, 10.0, 60.0
#: What Ray's dashboard takes as the body of one request (DASHBOARD_CLIENT_MAX_SIZE); one byte more
#: is answered with 413. Measured on Ray 2.60: 99 MiB pass, 101 MiB do not.
UPLOAD_MAX_BYTES = 100 * 1024**2
#: Size limit of an answer. The largest one is the job table, with 20,000 characters of the log of
#: each job that failed.
ANSWER_MAX_BYTES = 256 * 1024**2
#: What reading an answer raises if it has another form than Ray's.
MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    ArithmeticError,
    RecursionError,
)
#: Seconds for which a request is repeated whose answers say when to ask again.
LATER_S = 120.0
#: Seconds until a wait notices Ctrl-C, and until a line says what is waited for.
_NOTICE_S, SAY_S = 0.2, 10.0
#: A proxy's address.
_PROXY = re.compile(r"https?://([^@/]*:[^@/]*@)?([\w.-]+|\[[\w.:]+\])(:\d*)?/?", re.ASCII)
_T = TypeVar("_T")
log = logging.getLogger(__name__)


class Cached(Generic[_T]):
    """The last answer to a question, for all callers of a process; a failure is an answer too.

    Args:
        ask: asks once.
        age_s: seconds that an answer serves.
        idle_age_s: the same of an empty answer, and of a failure.
    """

    def __init__(self, ask: Callable[[], _T], age_s: float, idle_age_s: float) -> None:
        self._ask = ask
        self._age_s, self._idle_age_s = age_s, idle_age_s
        self._lock = threading.Lock()
        self._asked_at = self._ask_again_at = -math.inf
        self._answer: tuple[_T, ...] = ()
        self._error: NemoRunRayError | None = None

    def get(self, fresh: bool = False) -> _T:
        """The answer; a fresh one was asked for after this call. Threads share a request.

        Raises:
            NemoRunRayError: what asking raised.
        """
        called_at = time.monotonic()
        with self._lock:
            if called_at >= self._ask_again_at or (fresh and self._asked_at < called_at):
                self._asked_at = time.monotonic()
                try:
                    self._answer, self._error = (self._ask(),), None
                except NemoRunRayError as error:
                    self._error = error
                if self._error is None and self._answer[0]:
                    self._ask_again_at = self._asked_at + self._age_s
                else:  # which may have taken long to come
                    self._asked_at = time.monotonic()
                    self._ask_again_at = self._asked_at + self._idle_age_s
            if self._error is not None:
                raise self._error
            return self._answer[0]

    def forget(self) -> None:
        self._asked_at = self._ask_again_at = -math.inf


class Http:
    """One dashboard. Thread-safe."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        #: The proxy of every request and every WebSocket.
        self.proxy = None if dashboard.is_loopback else proxy_of(dashboard.url)
        self._tls = tls(dashboard.verify)
        #: Clients without a request. Each has one connection, so that one request can be given up.
        self._idle: list[httpx.Client] = []
        # NeMo-Run shows every logger's INFO, and httpx logs each request: a line every two seconds.
        logging.getLogger("httpx").addFilter(self._is_not_ours)

    def request(
        self,
        method: str,
        path: str,
        limit_s: float = READ_S,
        **content: Any,
    ) -> httpx.Response:
        """The answer to one request, whatever it is.

        Args:
            method: of HTTP.
            path: behind the dashboard's address.
            limit_s: seconds from the beginning of the request to the end of the answer.
            content: what httpx sends: ``json``, ``content`` or ``params``.

        Raises:
            Unanswered: no answer came.
            Unreachable: no answer can ever come.
            ClusterError: Ctrl-C has ended the wait.
        """
        client = self._client()
        try:
            response = self._send(client, method, path, limit_s, _read, **content)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        self._idle.append(client)
        return response

    def get(
        self, path: str, may_be_absent: bool = False, limit_s: float = READ_S
    ) -> httpx.Response:
        """Ray's answer to a question.

        Raises:
            Unanswered: there is none, or one of the 5xx.
            Unreachable: something else than Ray answers.
            Unauthorised: other credentials are wanted.
        """
        response = self.request("GET", path, limit_s)
        self.check_front(response)
        if is_passing(response.status_code):
            raise self.unanswered(response, f"GET {path}")
        if response.status_code != 200 and not (may_be_absent and response.status_code == 404):
            raise self.not_ray(response)
        return response

    @contextlib.contextmanager
    def stream(
        self, path: str, limit_s: float, params: dict[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        """The answer to a question, to be read piece by piece. Raises what httpx raises.

        Args:
            path: behind the dashboard's address.
            limit_s: seconds until the answer begins, and from one piece to the next.
            params: of the request.
        """
        with contextlib.closing(self._client()) as client:
            yield self._send(client, "GET", path, limit_s, _as_it_is, params=params)

    def _client(self) -> httpx.Client:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return httpx.Client(
            # Decoding could make gigabytes of kilobytes; Ray does not compress.
            headers={**self.dashboard.headers, "Accept-Encoding": "identity"},
            verify=self._tls,
            proxy=self.proxy,
            trust_env=False,
            follow_redirects=False,  # a redirected POST would become a GET, and be answered
        )

    def _send(
        self,
        client: httpx.Client,
        method: str,
        path: str,
        limit_s: float,
        read: Callable[[httpx.Response], httpx.Response],
        **content: Any,
    ) -> httpx.Response:
        """The answer, by a thread that can be left.

        The time limits of sockets begin anew with every byte, and no signal reaches a thread.
        """
        request = client.build_request(
            method,
            self.url(path),
            timeout=httpx.Timeout(limit_s, connect=CONNECT_S),
            **content,
        )
        answer: Future[httpx.Response] = Future()

        def work() -> None:
            try:
                answer.set_result(read(client.send(request, stream=True)))
            except BaseException as error:
                answer.set_exception(error)

        try:
            threading.Thread(target=work, name=f"{method} {path}", daemon=True).start()
        except RuntimeError:  # from Python 3.12 on there is none when the program ends
            work()
        deadline = time.monotonic() + limit_s
        try:
            while not answer.done():
                check_interrupted(f"the answer of {self.dashboard.url} to {method} {path}")
                wait([answer], _NOTICE_S)
                if time.monotonic() > deadline and not answer.done():
                    raise httpx.ReadTimeout(f"timed out after {limit_s:g} s")
            return answer.result()
        except BaseException:
            client.close()  # ends the thread at the next byte, or at its socket's time limit
            raise

    def _is_not_ours(self, record: logging.LogRecord) -> bool:
        # httpx writes an address without a default port, and in small letters.
        url = str(httpx.URL(self.dashboard.url)).rstrip("/")
        return record.levelno >= logging.WARNING or url not in record.getMessage()

    def url(self, path: str) -> str:
        return f"{self.dashboard.url}{path}"

    def read(self, response: httpx.Response, parse: Callable[[Any], _T]) -> _T:
        """What is read of an answer's JSON.

        Raises:
            Unreachable: it has not the form of Ray's.
        """
        try:
            return parse(response.json())
        except MALFORMED as error:
            raise self.not_ray(response) from error

    def close(self) -> None:
        for client in self._idle:
            client.close()
        self._idle.clear()
        logging.getLogger("httpx").removeFilter(self._is_not_ours)

    # ------------------------------------------------------------------ translation of failures

    def unreachable(self, error: httpx.HTTPError) -> ClusterError:
        """The error of this package for one of httpx."""
        if isinstance(error, httpx.LocalProtocolError):
            return Unreachable(
                f"The request to {self.dashboard.url} cannot be formed: a header or the token "
                "holds a character that HTTP does not allow (it is not shown here). Correct it."
            )
        why_dead = self.dashboard.why_dead()
        if why_dead:  # there is no need to ask again
            return Unreachable(why_dead)
        cause = str(error).rstrip(".") or type(error).__name__
        kind: type[ClusterError] = Unanswered
        if "CERTIFICATE_VERIFY_FAILED" in cause:
            kind = Unreachable  # the same request once more would be refused too
            step = "Renew the certificate, or give its CA: ExistingCluster(url, verify='ca.pem')."
        elif re.search("WRONG_VERSION_NUMBER|record layer failure", cause, re.IGNORECASE):
            kind = Unreachable
            step = "No TLS is spoken there: try http:// in the address."
        elif isinstance(error, httpx.DecodingError):
            kind = Unreachable
            step = "Ray does not answer so: is it a Ray dashboard, does a proxy before it compress?"
        elif isinstance(error, httpx.ConnectError):
            step = "Is the address right, the cluster up, a tunnel open?"
        else:
            step = "It may be overloaded, or not be a Ray dashboard."
        return kind(f"Ray's dashboard at {self.dashboard.url} cannot be reached: {cause}. {step}")

    def unanswered(self, response: httpx.Response, what: str) -> Unanswered:
        """The error for an answer that is none of Ray's, or says that Ray cannot answer now."""
        after_s = retry_after_s(response.headers.get("retry-after"))
        later = f"in {after_s:.0f} s" if after_s else "later"
        return Unanswered(
            f"{self.dashboard.url} answered {response.status_code} to {what}: "
            f"{last_line(response.text)}. Look at the dashboard's log, or try again {later}.",
            after_s,
        )

    def not_ray(self, response: httpx.Response) -> Unreachable:
        kind = response.headers.get("content-type", "no content type")
        return Unreachable(
            f"{self.dashboard.url} is not a Ray dashboard: {response.request.url} answered "
            f"{response.status_code} ({kind}), expected Ray's JSON. Give the address of the "
            "dashboard, usually port 8265 of the head, with the path prefix if a proxy adds one."
        )

    def check_front(self, response: httpx.Response) -> None:
        """Refuse what is no answer of Ray's jobs: a redirect, or the wish for other credentials."""
        if response.is_redirect:
            raise Unreachable(
                f"{self.dashboard.url} sends requests on to {response.headers.get('location')}; "
                "jobs are not sent through redirects. Give the address that it names."
            )
        if response.status_code not in (401, 403):
            return
        sent = any(name.lower() == "authorization" for name in self.dashboard.headers)
        found = "The token that was sent is not its token" if sent else "No token was sent"
        step = self.dashboard.credentials_step or (
            "Set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, write ~/.ray/auth_token, or give "
            "ExistingCluster(url, token=…)."
        )
        raise Unauthorised(
            f"Ray's dashboard at {self.dashboard.url} answered {response.status_code}: "
            f"{last_line(response.text)}. {found}. {step}"
        )


def repeat(ask: Callable[[], _T], patience_s: float, what: str = "") -> _T:
    """What ``ask`` gives, asked again for so many seconds when there is no answer.

    The pauses grow and differ, so that many clients do not ask at the same moments. An answer that
    says when to ask again has more time.

    Args:
        ask: asks once.
        patience_s: seconds.
        what: the object of the wait, for a line that says it; empty where somebody else does.
    """
    if patience_s <= 0:
        return ask()
    backoff = wait_random_exponential(multiplier=0.2, max=3)

    def is_over(state: RetryCallState) -> bool:
        limit_s = max(patience_s, LATER_S) if _after_s(state) else patience_s
        return stop_before_delay(limit_s)(state)

    attempts = Retrying(
        sleep=pause,
        retry=retry_if_exception_type(Unanswered),
        stop=is_over,
        wait=lambda state: max(backoff(state), _after_s(state)),
        reraise=True,
    )
    trouble: list[str] = []

    def asked() -> _T:
        try:
            return ask()
        except Unanswered as error:
            trouble[:] = [str(error)]
            raise

    if not what:
        return attempts(ask)
    with waiting_for(what, lambda: "".join(trouble)):
        return attempts(asked)


@contextlib.contextmanager
def waiting_for(what: str, why: Callable[[], str] = str) -> Iterator[None]:
    """Say once what is waited for, when the block takes long.

    Args:
        what: the object of the wait.
        why: gives the last trouble, in a sentence.
    """

    def say() -> None:
        log.warning("%s", f"Waiting for {what} since {SAY_S:.0f} s. {why()}".rstrip())

    timer = threading.Timer(SAY_S, say)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # none can be started when the program ends
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _after_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return error.after_s if isinstance(error, Unanswered) else 0.0


def check_interrupted(what: str) -> None:
    """End a wait after Ctrl-C, which only the main thread sees.

    Args:
        what: the object of the wait, for the error.

    Raises:
        ClusterError: Ctrl-C was pressed, and this is another thread.
    """
    if interrupted.is_set() and threading.current_thread() is not threading.main_thread():
        raise ClusterError(f"Interrupted while waiting for {what}.")


def pause(seconds: float) -> None:
    """Sleep, until Ctrl-C at most."""
    if threading.current_thread() is threading.main_thread():
        time.sleep(seconds)
    elif interrupted.wait(seconds):
        check_interrupted("the cluster's next answer")


def _as_it_is(response: httpx.Response) -> httpx.Response:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        response.close()
        raise httpx.DecodingError(f"the answer is encoded ({encoding}), which was not asked for")
    return response


def _read(response: httpx.Response) -> httpx.Response:
    """An answer with its content, if it is not too large."""
    pieces, size = [], 0
    with contextlib.closing(_as_it_is(response)):
        for piece in response.iter_raw():
            pieces.append(piece)
            size += len(piece)
            if size > ANSWER_MAX_BYTES:
                raise httpx.DecodingError(
                    f"the answer has more than {ANSWER_MAX_BYTES / 1024**2:.0f} MiB"
                )
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        content=b"".join(pieces),
        request=response.request,
    )


def proxy_of(url: str) -> str | None:
    """The address of the proxy before a dashboard, as the variables of the environment name it.

    Raises:
        ConfigError: the proxy cannot be used.
    """
    front = urlsplit(url)
    if proxy_bypass(front.netloc) or proxy_bypass(front.hostname or ""):
        return None
    proxies = getproxies()
    name = next((name for name in (front.scheme, "all") if name in proxies), None)
    if name is None:
        return None
    given = proxies[name]
    address = given if "://" in given else f"http://{given}"
    with contextlib.suppress(ValueError):  # of a port that is too large
        if _PROXY.fullmatch(address) and urlsplit(address).port != 0:
            return address
    variable, scheme = f"{name}_proxy", address.partition("://")[0]
    raise ConfigError(
        f"The variable {variable if variable in os.environ else variable.upper()} names a proxy "
        f"that cannot be used for {url} (it begins with {scheme}://); expected "
        "http:// or https://, with [user:password@]host:port. Correct it, or name the dashboard's "
        "host in NO_PROXY if it needs no proxy."
    )


def last_line(text: str) -> str:
    """The last line of an answer that says something: of a traceback, the error."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip(" .")]
    return (lines[-1] if lines else "no text")[:300].rstrip(".")


def tls(verify: bool | str) -> ssl.SSLContext:
    """What a connection trusts.

    Raises:
        ConfigError: the file holds no certificates.
    """
    try:
        context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"ExistingCluster.verify names {verify!r}, which holds no certificates ({error}); "
            "expected a PEM file with the CA to trust."
        ) from error
    if verify is False:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
