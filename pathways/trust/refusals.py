"""The log of refused connections: a line for each, but no more than a log can hold. Any thread may call."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_MOST_PER_SECOND = 20


class RefusalLog:
    """Writes at most 20 lines in a second; a line says how many more there were, when the next one is written."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        # All below is guarded by _lock.
        self._count = 0
        self._second = -1
        self._written = 0
        self._left_out = 0

    @property
    def count(self) -> int:
        """How many there were."""
        with self._lock:
            return self._count

    def add(self, text: str, *values: object) -> None:
        """Counts a refusal and writes its line. `text` and `values` as for `logging`."""
        with self._lock:
            self._count += 1
            second = int(self._clock())
            if second != self._second:
                self._second, self._written = second, 0
            self._written += 1
            if self._written > _MOST_PER_SECOND:
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
        if left_out:
            self._log.warning("%d more connections were refused, without a line each", left_out)
        self._log.warning(text, *values)
