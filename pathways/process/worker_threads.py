"""Threads for jobs that may block: as many threads as jobs at the same time, or up to a bound."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class WorkerThreads:
    """A pool that grows to the number of jobs under way, or to `most`. Without `most`, no job waits for another."""

    def __init__(self, name: str, most: int | None = None) -> None:
        self._name = name
        self._most = most
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0  # guarded by _lock
        self._busy = 0  # jobs that are not over; guarded by _lock

    def do(self, job: Callable[[], None]) -> None:
        """Starts `job` on a thread: at once, or when one of `most` threads is free. `job` must raise nothing."""
        with self._lock:
            self._busy += 1
            grows = self._busy > self._threads and self._threads != self._most
            self._threads += grows
        if grows:
            threading.Thread(target=self._loop, name=self._name, daemon=True).start()
        self._work.put(job)

    def stop(self) -> None:
        """Ends each thread when its job is over."""
        with self._lock:
            threads = self._threads
        for _ in range(threads):
            self._work.put(None)

    def _loop(self) -> None:
        while (job := self._work.get()) is not None:
            job()
            del job
            with self._lock:
                self._busy -= 1
