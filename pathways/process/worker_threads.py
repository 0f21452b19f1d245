"""Threads for jobs that may block: as many threads as jobs at the same time, or up to a bound."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable

from pathways.process.foreign_code import in_foreign_code

Job = Callable[[], None]


class WorkerThreads:
    """A pool that grows to the number of jobs under way, or to `most`. Without `most`, no job waits for another.

    With `most`, owners take turns: who gives many jobs at once delays another owner's job by one of them per thread.
    The jobs of one owner start in the order in which they were given.
    """

    def __init__(self, name: str, most: int | None = None, *, is_foreign: bool = False) -> None:
        """`is_foreign`: the jobs use jaxlib, and the end of the interpreter waits for them (foreign_code.py)."""
        self._name = name
        self._most = most
        self._guard = in_foreign_code if is_foreign else contextlib.nullcontext
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._waiting: collections.OrderedDict[int, collections.deque[Job]] = collections.OrderedDict()  # by owner
        self._threads = 0
        self._busy = 0  # jobs that are not over
        self._is_stopped = False

    def do(self, job: Job, owner: int = 0) -> None:
        """Starts `job` on a thread: at once, or when one of `most` threads is free. `job` must raise nothing."""
        with self._changed:
            self._busy += 1
            grows = self._busy > self._threads and self._threads != self._most
            self._threads += grows
            self._waiting.setdefault(owner, collections.deque()).append(job)
            self._changed.notify()
        if grows:
            threading.Thread(target=self._loop, name=self._name, daemon=True).start()

    def stop(self) -> None:
        """Ends each thread when no job is left for it."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _next(self) -> Job | None:
        """The next job of the owner whose turn it is; waits for one. None: there will be none."""
        with self._changed:
            while not self._waiting:
                if self._is_stopped:
                    return None
                self._changed.wait()
            owner, jobs = next(iter(self._waiting.items()))
            job = jobs.popleft()
            if jobs:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            return job

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            with self._guard():
                job()
                del job
            with self._changed:
                self._busy -= 1
