"""A headless Chromium, through DevTools' protocol."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(_CHROMIUM is None, reason="needs Chromium")
_COMPLAINTS = {"Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"}


class Tab:
    """One page in Chromium, through DevTools' protocol; keeps what the browser complains of."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._last = 0
        self._session = ""
        self.complaints: list[str] = []
        self._target = self.send("Target.createTarget", url="about:blank")["targetId"]
        joined = self.send("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = joined["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.size(1400, 900)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        session = {"sessionId": self._session} if self._session else {}
        words = {"id": self._last, "method": method, "params": params, **session}
        self._socket.send(json.dumps(words))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("method") in _COMPLAINTS:
                self.complaints.append(json.dumps(answer["params"]))
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def size(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait_for("location.protocol !== 'about:' && document.readyState === 'complete'")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + 60
        while not self.ask(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def ask(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def close(self) -> None:
        self._session = ""
        self.send("Target.closeTarget", targetId=self._target)


@pytest.fixture(scope="module")
def browser() -> Iterator[ClientConnection]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = [
            *(str(_CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-dev-shm-usage", "--disable-crash-reporter", "--remote-debugging-port=0"),
            *(f"--user-data-dir={folder}", "about:blank"),
        ]
        process = subprocess.Popen(
            words,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": folder, "HOME": folder},
            start_new_session=True,
        )
        try:
            port, path = _devtools(Path(folder) / "DevToolsActivePort", process)
            address = f"ws://127.0.0.1:{port}{path}"
            with connect(address, proxy=None, max_size=None) as socket:
                yield socket
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _devtools(file: Path, process: "subprocess.Popen[bytes]") -> list[str]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return lines
        assert process.poll() is None, "Chromium ended"
        time.sleep(0.05)
    raise AssertionError("Chromium did not start")


@pytest.fixture
def tab(browser) -> Iterator[Tab]:
    made = Tab(browser)
    yield made
    made.close()
    assert made.complaints == []
