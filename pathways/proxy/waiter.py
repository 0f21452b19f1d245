"""Tells when arrays of a client are ready, by one thread for all of them.

One that waits for an island that is down has failed, for whoever asks here (ERR-2).
"""

from __future__ import annotations

import collections
import threading
from typing import Any

from pathways import errors
from pathways.api.session import Session
from pathways.proxy.behind import Done
from pathways.proxy.islands import Islands

#: How long it waits for one array before it looks at the others again. Most become ready in the order they were added.
_LOOK_S = 0.002

#: Who waited for an island that was down so long ago has failed: it may be back, but not with what was started before.
LOSS_AGE_S = 0.1

_Wait = tuple[list[Any], Done]


class Waiter:
    """Waits for arrays of one session."""

    def __init__(self, session: Session, islands: Islands) -> None:
        self._native, self._islands = session.native, islands
        self._added: collections.deque[_Wait] = collections.deque()
        self._wake = threading.Semaphore(0)
        self._is_closed = False
        self._end: errors.PathwaysError | None = None  # the cluster's: why nothing becomes ready any more
        self._thread = threading.Thread(target=self._run, name="pathways-door-waiter", daemon=True)
        self._thread.start()

    def add(self, arrays: list[Any], then: Done) -> None:
        """Calls `then` when all these arrays are ready, or one has failed."""
        if all(self._native.state(array) == "ready" for array in arrays):
            then(None)
            return
        self._added.append((arrays, then))
        self._wake.release()

    def close(self) -> None:
        """Waits no more; whoever waits is told that the session is over."""
        self._is_closed = True
        self._wake.release()
        self._thread.join()
        for _, then in self._added:
            then(errors.ClusterClosedError("the session is over"))

    def _run(self) -> None:
        waiting: collections.deque[_Wait] = collections.deque()
        while not self._is_closed:
            if not waiting:
                self._wake.acquire()
            while self._added:
                waiting.append(self._added.popleft())
            for _ in range(len(waiting)):
                arrays, then = waiting.popleft()
                if not self._settled(arrays, then):
                    waiting.append((arrays, then))
            if waiting:
                self._wait(waiting[0][0])
        self._added.extendleft(reversed(waiting))

    def _settled(self, arrays: list[Any], then: Done) -> bool:
        """Tells the end of these arrays, if it has come."""
        failure: BaseException | None = self._end
        try:
            while arrays and failure is None:
                state, loss = self._native.state(arrays[-1]), None
                if state == "pending":
                    loss = self._islands.loss_of(arrays[-1].slice.binding.devices, LOSS_AGE_S)
                    if loss is None:
                        return False
                    state = self._native.state(arrays[-1])  # how the host ended is told meanwhile
                if state != "ready":
                    failure = loss if state == "pending" else failure_of(arrays[-1])
                arrays.pop()
        except errors.PathwaysError as error:  # the cluster has ended
            failure = error
        then(failure)
        return True

    def _wait(self, arrays: list[Any]) -> None:
        try:
            self._native.wait_raw(arrays[-1].raw_handle, _LOOK_S)
        except errors.PathwaysError as error:  # the cluster has ended
            self._end = error


def failure_of(array: Any) -> BaseException:
    """What an array has failed with."""
    if array.is_deleted():
        return errors.DeletedArrayError(f"it was deleted: {array!r}")
    error: BaseException = array._failure()
    return error
