"""Returns the memory of a client's arena to the machine when it is no longer used.

The arena keeps every page that was written, also when no block lies on it. So a client that ran far ahead once, with
big arguments, would hold that memory for ever. When much of the arena is in use, a thread starts to sample its use.
Some time after most of the arena is free again, the thread returns the pages of the free blocks, and ends. It does so
too if much was freed and then the use does not change: arrays of the client that live on keep the rest of the arena in
use. A call waits for this thread only at the lock of the arena, a few milliseconds at most.
"""

from __future__ import annotations

import threading
import time
from typing import Any

#: The thread starts only when at least this many bytes are in use.
MUCH_BYTES = 64 << 20
#: Seconds between two samples; and how many samples in a row must find that the burst is over.
SAMPLE_S, CALM_SAMPLES = 0.25, 4


class ArenaTrimmer:
    """Trims one client's arena. Its thread runs only after much of the arena was in use."""

    def __init__(self, native: Any) -> None:
        """`native`: the native client, which has `arena_in_use`, `trim_arena` and `closed`."""
        self._native = native
        self._lock = threading.Lock()
        self._is_looking = False  # guarded by _lock
        self._most = 0  # bytes in use at the height; callers raise it without the lock, so it may miss a little
        self.bytes_returned = 0

    def block_taken(self) -> None:
        """Call it when a big block was allocated."""
        # Here, not in the samples: a burst may be over before the first of them.
        used = self._native.arena_in_use()
        self._most = max(self._most, used)
        if self._is_looking or used < MUCH_BYTES:
            return
        with self._lock:
            begins, self._is_looking = not self._is_looking, True
        if not begins:
            return
        threading.Thread(target=self._look, name="pw-tidy", daemon=True).start()

    def _look(self) -> None:
        last = calm = 0
        while calm < CALM_SAMPLES:
            time.sleep(SAMPLE_S)
            if self._native.closed:
                return
            used, before = self._native.arena_in_use(), last
            last = used
            is_still = used == before and self._most - used >= MUCH_BYTES
            calm = calm + 1 if is_still or used <= self._most // 4 else 0
        with self._lock:
            self._is_looking = False  # a block allocated from now on starts the next thread
            self._most = 0
        self.bytes_returned += self._native.trim_arena()
