"""A page in headless Chromium, for tests, over the pipe of its DevTools protocol: it needs no package and no port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. A context manager, which ends the browser."""

    def __init__(self, width: int = 1400, height: int = 1000) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="pw-chromium-", ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = [CHROMIUM, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}",
                   "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
                   "--hide-scrollbars", *(["--no-sandbox"] if os.geteuid() == 0 else []), "about:blank"]  # fmt: skip
        # Chromium reads commands from descriptor 3, and writes to 4.
        place = (
            "import fcntl, os, sys; own = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]; "
            "os.dup2(own[0], 3); os.dup2(own[1], 4); os.execv(sys.argv[3], sys.argv[3:])"
        )
        shell = [sys.executable, "-c", place, str(theirs_in), str(theirs_out), *command]
        self._process = subprocess.Popen(
            shell, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest = b""
        self._number = 0
        self._session = ""
        self.said: list[str] = []  # on its console, and errors of the page
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(
            self._to, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Runtime.exceptionThrown":
            self.said.append(str(message["params"]["exceptionDetails"])[:1000])
        if message.get("method") == "Runtime.consoleAPICalled":
            self.said.append(str(message["params"]["args"])[:1000])
        if message.get("method") == "Log.entryAdded":
            self.said.append(str(message["params"]["entry"])[:1000])
        return message

    def open(self, url: str) -> None:
        """Goes to an address."""
        self.call("Page.navigate", url=url)

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, timeout_s: float = 120.0) -> Any:
        """Waits until an expression is true in the page, and returns its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, (expression, self.text()[:3000], self.said)
            time.sleep(0.1)
        return value

    def text(self) -> str:
        """What the page says."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def resize(self, width: int, height: int) -> None:
        """The size of the page in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def colors(self, scheme: str) -> None:
        """`dark` or `light`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: str) -> None:
        """Writes a PNG of the whole page."""
        made = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(made["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self._session = ""
            self.call("Browser.close")
        self._process.wait(30)
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()
