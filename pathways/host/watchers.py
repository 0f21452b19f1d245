"""Waits for values that are not ready yet, so that the enqueue thread can sleep on its doorbell instead."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import jax

from pathways.process.foreign_code import in_foreign_code

_log = logging.getLogger(__name__)


class Watchers:
    """Threads that sleep in `block_until_ready`, so that the enqueue thread can sleep on its doorbell instead.

    When the enqueue thread has nothing else to do, it gives `arm` one pending value of each ready queue. A watcher
    waits for that value with the GIL released, then rings the host's doorbell.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._watched: set[int] = set()  # id() of each value that a watcher waits for; the watcher keeps it alive
        self._threads = 0

    def arm(self, values: list[jax.Array]) -> None:
        """Makes the doorbell ring when one of `values` is ready. Enqueue thread only."""
        for value in values:
            if id(value) in self._watched:
                continue
            self._watched.add(id(value))
            if self._threads < len(self._watched):
                self._threads += 1
                threading.Thread(target=self._loop, name="pw-watch", daemon=True).start()
            self._work.put(value)

    def stop(self) -> None:
        """Ends each thread when its wait is over."""
        for _ in range(self._threads):
            self._work.put(None)

    def _loop(self) -> None:
        while (value := self._work.get()) is not None:
            with in_foreign_code():
                try:
                    value.block_until_ready()
                except Exception:  # failed or donated: the executor finds out when it polls the value
                    pass
                except BaseException:
                    _log.exception("a value could not be waited for")
                self._watched.discard(id(value))
                value = None
            self._core.ring()
