"""A bound on host memory that tasks use for a moment: a restore's bytes between the files and the devices.

MEM-7: the ledger counts what an array takes on its devices, not what is read from files and converted on the way
there. Each task takes that from this budget first, and waits while others have it. Any thread may use it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


class HostBudget:
    """So many bytes, taken in turn: who came first gets its bytes first, so that small ones do not starve a big one."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes, at least 1."""
        self.limit = limit
        self.high_water = 0  # bytes
        self._used = 0  # guarded by _changed, as are the fields below
        self._next, self._turn = 0, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, nbytes: int) -> Iterator[None]:
        """Has `nbytes` inside of the context. More than the limit gets all of it, alone."""
        taken = min(nbytes, self.limit)
        with self._changed:
            ticket, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._turn == ticket and self._used + taken <= self.limit)
            self._turn += 1
            self._used += taken
            self.high_water = max(self.high_water, self._used)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._used -= taken
                self._changed.notify_all()

    def batches(self, items: Sequence[Item], size: Callable[[Item], int]) -> Iterator[tuple[list[Item], int]]:
        """Groups of items, in their order, each with its bytes. A group of several items is within the limit."""
        group: list[Item] = []
        total = 0
        for item in items:
            nbytes = size(item)
            if group and total + nbytes > self.limit:
                yield group, total
                group, total = [], 0
            group.append(item)
            total += nbytes
        if group:
            yield group, total
