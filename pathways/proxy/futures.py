"""Futures of a session, and waits for several buffers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

from pathways.proxy.arrays import Held
from pathways.proxy.behind import Done
from pathways.proxy.errors import refusal_of
from pathways.proxy.handles import OWN

#: The handle of a future that is ready. It is never used up, so that futures for which there is nothing to wait take no
#: room.
READY = OWN


@dataclasses.dataclass(frozen=True)
class Future:
    """What was started: it is over when these buffers are ready. A client asks once."""

    held: tuple[Held, ...]


def when_all_ready(held: Sequence[Held], then: Done) -> None:
    """Calls `then` once: when all buffers are ready, or with the first error, which names the request that made the
    buffer.
    """
    if not held:
        then(None)
        return
    wait = _Wait(len(held), then)
    for each in held:
        each.buffer.when_ready(lambda error, each=each: wait.done(each, error))  # type: ignore[misc]


class _Wait:
    """Counts buffers down. Any thread may call `done`."""

    def __init__(self, count: int, then: Done) -> None:
        self._lock, self._left, self._then = threading.Lock(), count, then

    def done(self, held: Held, error: BaseException | None) -> None:
        """One more is ready, or has failed."""
        with self._lock:
            if error is not None and self._left > 0:
                self._left = 0
            elif error is None:
                self._left -= 1
            is_over = self._left == 0
            if is_over:
                self._left = -1
        if is_over:
            self._then(refusal_of(error).within(held.context) if error is not None else None)
