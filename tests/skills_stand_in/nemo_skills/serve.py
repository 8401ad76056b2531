"""A model server and a sandbox for tests: it answers every request with its host's name."""

import argparse
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(socket.gethostname().encode())

    def log_message(self, *_):
        pass


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
ThreadingHTTPServer(("0.0.0.0", parser.parse_known_args()[0].port), Handler).serve_forever()
