"""A client for tests: it waits for the server at localhost, and asks it and the sandbox."""

import argparse
import os
import time
from urllib.error import URLError
from urllib.request import urlopen


def answer(address):
    for _ in range(600):
        try:
            return urlopen(f"http://{address}", timeout=10).read().decode()
        except URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.2)
    raise SystemExit(f"{address} refuses")


parser = argparse.ArgumentParser()
parser.add_argument("server")
sandbox = f"{os.environ['NEMO_SKILLS_SANDBOX_HOST']}:{os.environ['NEMO_SKILLS_SANDBOX_PORT']}"
print("server on", answer(parser.parse_args().server))
print("sandbox on", answer(sandbox))
