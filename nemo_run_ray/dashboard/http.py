"""Requests to one dashboard, each with a time limit, and the translation of their failures."""

from __future__ import annotations

import logging
import math
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from nemo_run_ray.clusters import Dashboard, interrupted
from nemo_run_ray.errors import (
    ClusterError,
    ConfigError,
    NemoRunRayError,
    Unanswered,
    Unauthorised,
    Unreachable,
)
from nemo_run_ray.remote.dashboard import ANSWER_MAX_BYTES, is_passing, last_line

#: Seconds until a connection stands, until an answer has come, and the same of a request that Ray
#: works on before it answers.
CONNECT_S, READ_S, SLOW_S = 4.0, 10.0, 60.0
#: Size limit of a request to Ray's dashboard (DASHBOARD_CLIENT_MAX_SIZE); one byte more
#: is answered with 413. Measured on Ray 2.60: 99 MiB pass, 101 MiB do not.
UPLOAD_MAX_BYTES = 100 * 1024**2
#: Errors of reading an answer that has another form than Ray's.
MALFORMED = (ValueError, KeyError, TypeError, ArithmeticError, RecursionError)
#: Seconds until a wait notices Ctrl-C, and until a line says what is waited for.
_NOTICE_S, SAY_S = 0.2, 10.0
_T = TypeVar("_T")
log = logging.getLogger(__name__)


class Cached(Generic[_T]):
    """The last answer to a question, which serves all callers of a process for ``age_s`` seconds.

    A failure is an answer too.
    """

    def __init__(self, ask: Callable[[], _T], age_s: float):
        self._ask = ask
        self._age_s = age_s
        self._lock = threading.Lock()
        self._asked_at = -math.inf
        self._answer: Future[_T] = Future()

    def get(self, fresh: bool = False) -> _T:
        """The answer; a fresh one was asked for after this call. Threads share a request."""
        oldest = monotonic() - (0.0 if fresh else self._age_s)
        with self._lock:
            if self._asked_at < oldest:
                self._asked_at = monotonic()
                self._answer = Future()
                try:
                    self._answer.set_result(self._ask())
                except NemoRunRayError as error:
                    self._answer.set_exception(error)
                    self._asked_at = monotonic()  # it may have taken long to fail
                except BaseException:  # Ctrl-C is no answer for the next caller
                    self.forget()
                    raise
            return self._answer.result()

    def forget(self) -> None:
        self._asked_at = -math.inf


class Http:
    """One dashboard. Thread-safe."""

    def __init__(self, dashboard: Dashboard):
        self.dashboard = dashboard
        #: The proxy of every request and every WebSocket.
        self.proxy = None if dashboard.is_loopback else proxy_of(dashboard.url)
        self.tls = tls(dashboard.verify)

    def request(
        self, method: str, path: str, limit_s: float = READ_S, **content: Any
    ) -> httpx.Response:
        """The answer to one request, whatever it is, as for ``answer``.

        Raises:
            Unanswered: no answer came.
            Unreachable: no answer can ever come.
            ClusterError: Ctrl-C has ended the wait.
        """
        try:
            with self.answer(method, path, limit_s, **content) as response:
                return response
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error

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

    @contextmanager
    def answer(
        self, method: str, path: str, limit_s: float, is_stream: bool = False, **content: Any
    ) -> Iterator[httpx.Response]:
        """The answer, by a thread that can be left, as long as its connection stands.

        The time limits of sockets begin anew with every byte, and no signal reaches a thread. Each
        request has a connection of its own, so that it can be given up. The transport follows no
        redirect, and logs nothing: NeMo-Run would show each request. It raises what httpx raises.

        Args:
            method: of HTTP.
            path: behind the dashboard's address.
            limit_s: seconds from the beginning of the request to the end of the answer; of a
                stream until it begins, and from one piece to the next.
            is_stream: the answer is read piece by piece.
            content: what httpx sends: ``json``, ``content`` or ``params``.
        """
        request = httpx.Request(
            method,
            f"{self.dashboard.url}{path}",
            # Decoding could make gigabytes of kilobytes; Ray does not compress.
            headers={**self.dashboard.headers, "Accept-Encoding": "identity"},
            extensions={"timeout": httpx.Timeout(limit_s, connect=CONNECT_S).as_dict()},
            **content,
        )
        transport = httpx.HTTPTransport(verify=self.tls, proxy=self.proxy, trust_env=False)
        answer: Future[httpx.Response] = Future()
        is_left = threading.Event()

        def work() -> None:
            try:
                response = transport.handle_request(request)
                if is_left.is_set():  # the connection may have come after the close
                    response.close()
                    return
                response.request = request
                encoding = response.headers.get("content-encoding", "identity")
                if encoding.lower() != "identity":
                    cause = f"the answer is encoded ({encoding}), which was not asked for"
                    raise httpx.DecodingError(cause)
                if not is_stream:
                    body = bytearray()
                    for piece in response.iter_raw():
                        body += piece
                        if len(body) > ANSWER_MAX_BYTES:
                            limit = f"{ANSWER_MAX_BYTES / 1024**2:.0f} MiB"
                            raise httpx.DecodingError(f"the answer has more than {limit}")
                    response = httpx.Response(
                        response.status_code,
                        headers=response.headers,
                        content=bytes(body),
                        request=request,
                    )
                answer.set_result(response)
            except BaseException as error:
                answer.set_exception(error)

        try:
            threading.Thread(target=work, name=f"{method} {path}", daemon=True).start()
        except RuntimeError:  # from Python 3.12 on there is none when the program ends
            work()
        deadline = monotonic() + limit_s
        try:
            while not answer.done():
                pause(0, f"the answer of {self.dashboard.url} to {method} {path}")
                wait([answer], _NOTICE_S)
                if monotonic() > deadline and not answer.done():
                    raise httpx.ReadTimeout(f"timed out after {limit_s:g} s")
            yield answer.result()
        finally:
            is_left.set()
            transport.close()  # ends the thread at the next byte, or at its socket's time limit

    def read(self, response: httpx.Response, parse: Callable[[Any], _T]) -> _T:
        """The parsed JSON of an answer; an error when it has not the form of Ray's."""
        try:
            return parse(response.json())
        except MALFORMED as error:
            raise self.not_ray(response) from error

    # ------------------------------------------------------------------ translation of failures

    def unreachable(self, error: httpx.HTTPError) -> ClusterError:
        """The error of this package for one of httpx."""
        if why_dead := self.dashboard.why_dead():  # there is no need to ask again
            return Unreachable(why_dead)
        cause = str(error).rstrip(".") or type(error).__name__
        # Asking again does not change these.
        of_tls = "CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER|record layer failure"
        is_lasting = isinstance(error, httpx.DecodingError) or re.search(of_tls, cause, re.I)
        kind = Unreachable if is_lasting else Unanswered
        return kind(
            f"Ray's dashboard at {self.dashboard.url} cannot be reached: {cause}. Check the "
            "address, whether it is https:// or http://, and that the cluster and any tunnel to it "
            "are up. If a CA of your own signs its certificate, give "
            "ExistingCluster(url, verify='ca.pem')."
        )

    def unanswered(self, response: httpx.Response, what: str) -> Unanswered:
        """The error for an answer that is none of Ray's, or says that Ray cannot answer now."""
        return Unanswered(
            f"{self.dashboard.url} answered {response.status_code} to {what}: "
            f"{last_line(response.content)}. Look at the dashboard's log, or try again later."
        )

    def not_ray(self, response: httpx.Response) -> Unreachable:
        return Unreachable(
            f"{self.dashboard.url} is not a Ray dashboard: {response.request.url} answered "
            f"{response.status_code} ({response.headers.get('content-type', 'no content type')}), "
            "expected Ray's JSON. Give the address of the dashboard, usually port 8265 of the "
            "head, with the path prefix if a proxy adds one."
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
        has_token = "authorization" in map(str.lower, self.dashboard.headers)
        found = "The token that was sent is not its token" if has_token else "No token was sent"
        raise Unauthorised(
            f"Ray's dashboard at {self.dashboard.url} answered {response.status_code}: "
            f"{last_line(response.content)}. {found}. It is taken from "
            f"{self.dashboard.token_at}: correct it there, or give ExistingCluster(url, token=…)."
        )


def repeat(ask: Callable[[], _T], patience_s: float, what: str = "") -> _T:
    """Ask again for some seconds while there is no answer.

    The pauses grow and differ, so that many clients do not ask at the same moments. When it takes
    long, one line says what is waited for, and the last trouble.
    """
    deadline, most_s, trouble = monotonic() + patience_s, 0.2, ""

    def say() -> None:
        log.warning("%s", f"Waiting for {what} since {SAY_S:.0f} s. {trouble}".rstrip())

    timer = threading.Timer(SAY_S, say)
    timer.daemon = True
    if what and patience_s > SAY_S:
        with suppress(RuntimeError):  # from Python 3.12 on there is none when the program ends
            timer.start()
    try:
        while True:
            try:
                return ask()
            except Unanswered as error:
                trouble = str(error)
                pause_s = random.uniform(0, most_s)
                if monotonic() + pause_s >= deadline:
                    raise
            pause(pause_s)
            most_s = min(2 * most_s, 3.0)
    finally:
        timer.cancel()


def pause(seconds: float, what: str = "the cluster's next answer") -> None:
    """Sleep while waiting for something, until Ctrl-C at most, which only the main thread sees.

    Raises:
        ClusterError: Ctrl-C was pressed, and this is another thread.
    """
    if threading.current_thread() is threading.main_thread():
        time.sleep(seconds)
    elif interrupted.wait(seconds):
        raise ClusterError(f"Interrupted while waiting for {what}.")


def proxy_of(url: str) -> str | None:
    """The address of the proxy before a dashboard, as the variables of the environment name it."""
    front, proxies = urlsplit(url), getproxies()
    name = next((name for name in (front.scheme, "all") if name in proxies), None)
    if name is None or proxy_bypass(front.netloc) or proxy_bypass(front.hostname or ""):
        return None
    address = proxies[name] if "://" in proxies[name] else f"http://{proxies[name]}"
    parts = r"https?://([^@/]*:[^@/]*@)?([\w.-]+|\[[\w.:]+\])(:\d{0,4}|:[1-6]\d{4})?/?"
    if re.fullmatch(parts, address, re.ASCII):
        return address
    raise ConfigError(
        f"The variable {name}_proxy names a proxy that cannot be used for {url}; expected "
        "http:// or https://, with [user:password@]host:port. Correct it, or name the dashboard's "
        "host in NO_PROXY if it needs no proxy."
    )


def tls(verify: bool | str) -> ssl.SSLContext:
    """The certificates that a connection trusts."""
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
