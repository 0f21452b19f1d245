"""Gives the memory of a client's arena back to the machine once it is no longer used.

The arena keeps what it has had: pages that were written stay, though no block lies on them. So a client that ran far
ahead once, with big arguments, would hold that memory for ever. When much is in use, a thread begins to look, and some
time after most of it is free again the thread returns the pages of the free blocks, and ends. Nothing on the way of a
call waits for it but for the lock of the arena, a few milliseconds at most.
"""

from __future__ import annotations

import threading
import time
from typing import Any

#: In use before anybody looks, and kept at the least.
MUCH_BYTES = 64 << 20
#: Between two looks; and how many of them in a row must see most of it free.
SAMPLE_S, CALM_SAMPLES = 0.25, 4


class ArenaTrimmer:
    """Looks after one client's arena, while there is something to look at."""

    def __init__(self, native: Any) -> None:
        """`native`: the client, with `arena_in_use` and `trim_arena`."""
        self._native = native
        self._lock = threading.Lock()
        self._is_looking = False  # guarded by _lock
        self.bytes_returned = 0

    def block_taken(self) -> None:
        """A big block was taken."""
        if self._is_looking or self._native.arena_in_use() < MUCH_BYTES:
            return
        with self._lock:
            begins, self._is_looking = not self._is_looking, True
        if not begins:
            return
        threading.Thread(target=self._look, name="pw-tidy", daemon=True).start()

    def _look(self) -> None:
        most = calm = 0
        while calm < CALM_SAMPLES:
            time.sleep(SAMPLE_S)
            if self._native.closed:
                return
            used = self._native.arena_in_use()
            most = max(most, used)
            calm = calm + 1 if used <= most // 4 else 0
        with self._lock:
            self._is_looking = False  # what comes from here on is looked at by the next
        self.bytes_returned += self._native.trim_arena()
