"""Headless Chromium for tests: pages are loaded, measured, clicked and photographed.

It is driven through the DevTools protocol over a pipe (`--remote-debugging-pipe`), which needs no
package: requests and answers are JSON, each ended by a zero byte.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")
_SECONDS = 60  # for one answer, on a busy machine


class Browser:
    """One tab of a headless Chromium.

    Attributes:
      requests: addresses that the page asked for since it was opened.
      errors: what the page's scripts complained about.
    """

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process, self._write, self._read = process, write, read
        self._rest, self._number, self._session = b"", 0, None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one request and return its result; events on the way are kept."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while True:
            message = self._next(until)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._keep(message)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._read, 1 << 16)
            assert part, "Chromium has ended"
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def _keep(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(str(params["entry"]))

    def open(self, url: str, *, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size and wait until it is complete."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests, self.errors = [], []
        self._call("Page.navigate", url=url)
        self.wait("location.href != 'about:blank' && document.readyState == 'complete'")

    def resize(self, width: int, height: int = 900) -> None:
        """Make the window as large as a phone's, for example."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def run(self, script: str) -> Any:
        """Return what an expression in JavaScript is; promises are awaited."""
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.05)

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return self.run(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )

    def screenshot(self, file: Path) -> None:
        """Write a picture of the whole page."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(found["data"]))

    def pdf(self, file: Path) -> None:
        """Print the page."""
        found = self._call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def text(self, selector: str) -> list[str]:
        """Return the text that the elements of a selector show."""
        return self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)"
        )


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium and end it."""
    assert PROGRAM is not None
    to_it, write = os.pipe()
    read, from_it = os.pipe()
    folder = tempfile.mkdtemp(prefix="chromium-")
    # Chromium reads from file 3 and writes to 4: a shell puts them there.
    words = f'exec 3<&{to_it} 4>&{from_it}; exec "$0" "$@"'
    options = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
               "--disable-background-networking --disable-dev-shm-usage --hide-scrollbars "
               "--remote-debugging-pipe")  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-c", words, PROGRAM, *options.split(), f"--user-data-dir={folder}"],
        pass_fds=(to_it, from_it),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_it)
    os.close(from_it)
    try:
        tab = Browser(process, write, read)
        yield tab
    finally:
        os.close(write)
        os.close(read)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
