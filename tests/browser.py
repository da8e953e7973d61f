"""Chromium by its DevTools protocol over two pipes: what a page logs, how it looks, how fast it draws. Nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def executable() -> str | None:
    """Where Chromium is; None without it."""
    return shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """One page. `faults` has each exception, console error and failed load since it was opened."""

    def __init__(self, out: int, back: int) -> None:
        self._out, self._back, self._buffer, self._last = out, back, b"", 0
        self.faults: list[str] = []
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Performance"):
            self.call(f"{domain}.enable")

    _session = ""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command of the protocol."""
        self._last += 1
        words: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            words["sessionId"] = self._session
        os.write(self._out, json.dumps(words).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._last:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return told["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._back, 1 << 20)
            if not read:
                raise RuntimeError("Chromium has ended")
            self._buffer += read
        text, self._buffer = self._buffer.split(b"\0", 1)
        told = json.loads(text)
        self._note(told)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        method, given = told.get("method", ""), told.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.faults.append(
                given["exceptionDetails"].get("text", "") + str(given["exceptionDetails"].get("exception"))
            )
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.faults.append(str([one.get("value", one.get("description")) for one in given["args"]]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.faults.append(given["entry"]["text"])
        elif method:
            self._events.append(told)

    def open(
        self, address: str, *, width: int = 1400, height: int = 900, dark: bool = False, mobile: bool = False
    ) -> None:
        """Load a page at this size, in a light or dark scheme, and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next()

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited where it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", "a fault in the page"))
        return found["result"].get("value")

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        more = {"clip": clip, "captureBeyondViewport": True} if whole else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"]))

    def printed(self, path: Path) -> None:
        """The page on paper, as PDF."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))


@contextmanager
def page(chromium: str) -> Iterator[Page]:
    """A page in a browser of its own, which ends with it."""
    to_it, out = os.pipe()
    back, from_it = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # its helpers end a moment later
        words = [chromium, "--headless=new", "--no-sandbox", "--hide-scrollbars", "--remote-debugging-pipe"]
        words += [f"--user-data-dir={folder}", "--no-first-run", "--disable-extensions", "about:blank"]

        def place() -> None:  # the protocol's pipes are the file descriptors 3 and 4
            for fd in (to_it, from_it):
                os.set_inheritable(fd, True)
            a, b = os.dup(to_it), os.dup(from_it)
            os.dup2(a, 3)
            os.dup2(b, 4)

        process = subprocess.Popen(
            words, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            os.close(to_it)
            os.close(from_it)
            yield Page(out, back)
        finally:
            process.kill()
            process.wait()
            os.close(out)
            os.close(back)
