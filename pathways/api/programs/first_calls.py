"""What the first calls of a client's programs took, stage by stage, and the line that a long one shows.

A first call traces a program, partitions it and waits until its hosts have compiled it. `Program` says when each stage
begins. `cluster.stats()["first_calls"]` has the seconds of the newest ones. A call that takes longer than two seconds
shows a line on stderr, if that is a terminal or a notebook with ipywidgets; the line goes when the call is over. While
hosts compile, it says how far each of them is.

Threading: calls of several threads may overlap. The list is appended to and copied, which Python's lock makes safe. One
line is shown at a time. A thread of the line asks the hosts; nobody waits for it.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

#: After how many seconds a call shows its line.
PATIENCE_S = 2.0
#: How often the hosts are asked.
_EVERY_S = 1.0
#: How many hosts a line has at most.
_HOSTS = 4
_KEPT = 64
_line_in_use = threading.Lock()


#: Asks which hosts compile: number, and how many of how many computations are compiled.
Ask = Callable[[], list[tuple[int, int, int]]]


class FirstCalls:
    """Those of one client, the newest."""

    def __init__(self, ask: Ask = list) -> None:
        self._ask = ask
        self._done: collections.deque[FirstCall] = collections.deque(maxlen=_KEPT)

    def begin(self, name: str) -> FirstCall:
        """For a `with` statement around the first call of the program of this name. A call that fails is not kept."""
        return FirstCall(name, self._done, self._ask)

    def now(self) -> list[dict[str, Any]]:
        """The newest at the end: `{"program": name, "trace": seconds, "partition": seconds, "compile": seconds}`."""
        return [{"program": each.name, **each.seconds()} for each in tuple(self._done)]


class FirstCall:
    """One first call. It begins with its first stage."""

    def __init__(self, name: str, done: collections.deque[FirstCall], ask: Ask = list) -> None:
        self.name = name
        self._done = done
        self._ask = ask
        self._hosts: list[tuple[int, int, int]] = []  # the last answer
        self._began: list[tuple[str, float]] = []  # stages, each with its begin
        self._ended: float | None = None
        self._timer: threading.Timer | None = None
        self._line: Live | None = None
        self._lock = threading.Lock()  # between the end and the line

    def stage(self, name: str) -> None:
        """From now on it does this."""
        self._began.append((name, time.monotonic()))

    def seconds(self) -> dict[str, float]:
        """What each stage has taken until now."""
        began = list(self._began)
        ends = [at for _, at in began[1:]] + [time.monotonic() if self._ended is None else self._ended]
        return {name: round(end - at, 3) for (name, at), end in zip(began, ends, strict=True)}

    def __enter__(self) -> FirstCall:
        if _is_shown():
            self._timer = threading.Timer(PATIENCE_S, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            with self._lock:
                if self._line is not None:
                    self._line.stop()
                    _line_in_use.release()
        if kind is None:
            self._done.append(self)

    def _show(self) -> None:
        with self._lock:
            if self._ended is None and _line_in_use.acquire(blocking=False):
                self._line = Live(
                    get_renderable=self._text,
                    console=Console(stderr=True),
                    refresh_per_second=4,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._line.start()
                threading.Thread(target=self._keep_asking, name="pw-first-call", daemon=True).start()

    def _keep_asking(self) -> None:
        while self._ended is None:
            if self._began and self._began[-1][0] == "compile":
                try:
                    self._hosts = self._ask()
                except Exception:  # the cluster is closed, or a host is lost; the call itself says so
                    return
            time.sleep(_EVERY_S)

    def _text(self) -> Text:
        took = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.seconds().items())
        hosts = [f"host {host}: {done} of {count}" for host, done, count in self._hosts]
        if len(hosts) > _HOSTS:
            hosts = [*hosts[: _HOSTS - 1], f"{len(hosts) - _HOSTS + 1} more"]
        there = f" ({', '.join(hosts)})" if hosts else ""
        return Text(f"first call of {self.name}: {took}{there}", no_wrap=True, overflow="ellipsis")


def _is_shown() -> bool:
    """Whether stderr is read by a person who wants to know. A line in a notebook needs ipywidgets."""
    if os.environ.get("PATHWAYS_PROGRESS") == "0":
        return False
    if "ipykernel" in sys.modules:
        return importlib.util.find_spec("ipywidgets") is not None
    return sys.stderr is not None and sys.stderr.isatty()
