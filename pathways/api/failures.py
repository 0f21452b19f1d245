"""Failures that nobody has read: told once, on stderr and to whoever asked by `cluster.on_failure`.

A run may fail whose results nobody waits for: they were dropped, or the run was made for its callbacks. The native
client knows which failures nobody has read (csrc/client/failures.h). A thread of this process asks it twice per second,
so a call costs nothing more. It writes one paragraph per failure through `logging` (logger "pathways", level ERROR),
which goes to stderr unless the program has set up its logs. The end of the process, and `close`, tell what is left.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from pathways import errors

_log = logging.getLogger("pathways")
#: Seconds between two looks.
LOOK_S = 0.5
#: The most paragraphs in a minute, and at the end of the process: what is more is only counted. Hooks get everything.
MOST_PARAGRAPHS = 5
_MINUTE_S = 60.0
#: The most characters of an error's text in a paragraph.
MOST_CHARACTERS = 1500

Hook = Callable[[errors.PathwaysError], object]


class UnreadFailures:
    """Tells what failed on one connection and nobody read."""

    def __init__(self, native: Any, settle: Callable[[], object]) -> None:
        """`native`: the native client. `settle`: lets go of what this library itself holds and needs no more."""
        self._native = native
        self._settle = settle
        self._hooks: list[Hook] = []
        self._lock = threading.Lock()  # one thread tells at a time
        self._thread: threading.Thread | None = None
        self._since = 0.0  # the minute in which paragraphs are counted
        self._paragraphs = self._untold = 0

    def add_hook(self, hook: Hook) -> None:
        """`hook` gets each failure that nobody has read from now on."""
        self._hooks.append(hook)

    def watch(self) -> None:
        """Looks for failures from now on. Call it before the first run."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="pw-failures", daemon=True)
            self._thread.start()
            atexit.register(self.end)

    def end(self) -> None:
        """Tells what is left: also failures of arrays that are still there. Call it before the client is closed."""
        atexit.unregister(self.end)
        self.tell(at_end=True)

    def tell(self, at_end: bool = False) -> None:
        """Tells what is to be told now."""
        if self._native.closed:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._since > _MINUTE_S:
                self._summarize()
                self._since, self._paragraphs = now, 0
            for text, futures in self._native.take_unread(at_end):
                self._tell(errors.from_text(text, errors.ComputationError), futures)
            if at_end:
                self._summarize()

    def _tell(self, error: errors.PathwaysError, futures: int) -> None:
        for hook in list(self._hooks):
            try:
                hook(error)
            except Exception:
                _log.exception("a function given to cluster.on_failure failed")
        if self._paragraphs >= MOST_PARAGRAPHS:
            self._untold += 1
            return
        self._paragraphs += 1
        words = str(error)
        if len(words) > MOST_CHARACTERS:
            words = f"{words[:MOST_CHARACTERS]} [...]"
        what = "an array" if futures == 1 else f"{futures} arrays"
        _log.error("Nobody has read a failure of %s: %s: %s", what, type(error).__name__, words)

    def _summarize(self) -> None:
        if self._untold:
            _log.error("Nobody has read %d further failures, either; cluster.on_failure gets each", self._untold)
            self._untold = 0

    def _look(self) -> None:
        while not self._native.closed:
            time.sleep(LOOK_S)
            try:
                self._settle()
                self.tell()
            except Exception:  # the cluster is lost: whoever uses it is told
                return
