#!/usr/bin/env python3
"""A ``ray`` that starts no Ray: as far as a cluster on Slurm can tell it from one.

A worker writes to the head every half second, and is alive as long as the head hears it. Like Ray's
own, a worker ends when it has lost the head, and all of it ends at SIGTERM.
"""

import json
import os
import signal
import socket
import sys
import threading
import time

#: Seconds of silence after which one end takes the other for dead.
_SILENCE_S = 5.0
_PAUSE_S = 0.5


def main(words: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if words[0] == "status":
        _show_status(words[-1])
        return
    options = {name: value for name, _, value in (word[2:].partition("=") for word in words[1:])}
    if "--address" in words:  # in two words
        options["address"] = words[words.index("--address") + 1]
    token = _token()
    if "head" in options:
        _Head(options, token).serve()
    else:
        _work(options, token)


def _token() -> str:
    try:
        with open(os.environ["RAY_AUTH_TOKEN_PATH"], encoding="ascii") as file:
            return file.read()
    except KeyError:
        return ""


def _show_status(address: str) -> None:
    """As far as NeMo-Run's own script reads it: eight units a node."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), _SILENCE_S) as connection:
        connection.sendall(f"{_token()} status\n".encode())
        count = int(connection.makefile().readline())
    print(f" 0.0/{8 * count}.0 worker_units", flush=True)


class _Head:
    def __init__(self, options: dict[str, str], token: str) -> None:
        self._options = options
        self._token = token
        self._posted: list[dict[str, object]] = []
        self._heard = {options["node-ip-address"].strip(): float("inf")}

    def serve(self) -> None:
        address = (self._options["node-ip-address"], int(self._options["port"]))
        gcs = socket.create_server(address, backlog=512)
        threading.Thread(target=self._accept, args=(gcs,), daemon=True).start()
        head = self
        import http.server  # a worker does without it

        class Dashboard(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.headers.get("Authorization") != f"Bearer {head._token}":
                    self.send_error(401)
                    return
                data = json.dumps(head._answer(self.path)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/api/jobs/":
                    head._posted.append({**json.loads(data), "status": "RUNNING"})
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_PUT = do_POST  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        print("Ray runtime started.", flush=True)
        port = int(self._options["dashboard-port"])
        http.server.ThreadingHTTPServer(("", port), Dashboard).serve_forever()

    def _accept(self, gcs: socket.socket) -> None:
        while True:
            connection, _ = gcs.accept()
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        with connection, connection.makefile() as lines:
            token, _, address = lines.readline().rstrip("\n").partition(" ")
            if token != self._token:
                return
            if address == "status":
                alive = [row for row in self._rows() if row["state"] == "ALIVE"]
                connection.sendall(f"{len(alive)}\n".encode())
                return
            self._heard[address] = time.monotonic()
            for _ in lines:
                self._heard[address] = time.monotonic()
                connection.sendall(b"\n")
            self._heard[address] = 0.0

    def _answer(self, path: str) -> object:
        if path == "/api/version":
            return {"session_name": f"session_{os.getpid()}", "ray_version": "2.60.0"}
        if path == "/api/jobs/":  # those that a test has written down
            try:
                with open(os.environ["LIGHT_RAY_JOBS"], encoding="utf-8") as file:
                    return [*json.load(file), *self._posted]
            except (KeyError, OSError):
                return self._posted
        return {"data": {"result": {"result": self._rows()}}}

    def _rows(self) -> list[dict[str, str]]:
        now = time.monotonic()
        return [
            {
                "node_id": address,
                "node_ip": address,
                "state": "ALIVE" if now - at < _SILENCE_S else "DEAD",
            }
            for address, at in self._heard.items()
        ]


def _work(options: dict[str, str], token: str) -> None:
    host, _, port = options["address"].rpartition(":")
    with socket.create_connection((host, int(port)), _SILENCE_S) as connection:
        own = options.get("node-ip-address") or connection.getsockname()[0]
        connection.sendall(f"{token} {own}\n".encode())
        print("Ray runtime started.", flush=True)
        try:
            while True:
                connection.sendall(b"\n")
                if not connection.recv(1):
                    break
                time.sleep(_PAUSE_S)
        except OSError:
            pass
    print("The GCS is gone.", flush=True)
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
