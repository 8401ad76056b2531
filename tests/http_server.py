"""Web servers for tests: real ones, on a free port of this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """One answer for every method: a subclass says which, with ``send``."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def answer(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_GET  # noqa: N815

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status: int, content: str | bytes, **headers: str) -> None:
        """The answer, whose length is that of the content unless a header says otherwise."""
        data = content if isinstance(content, bytes) else content.encode()
        self.send_response(status)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing: tests look at what they keep."""


@contextmanager
def serving(handler: type[Handler], **state: object) -> Iterator[str]:
    """Serve until the end of the block.

    Args:
        handler: makes the answers.
        state: attributes of the handler.

    Returns:
        The address, as ``http://127.0.0.1:<port>``.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), type(handler.__name__, (handler,), state))
    server.daemon_threads = True  # a client may keep its connection
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
