"""The host buffers of one session: bytes that came for arrays, and bytes that were read and that the client will fetch.

They come and go by calls of their own, beside the stream of requests, so a request may come before its bytes. PROXY-4:
there is room for so many bytes that come, and for as many that are read. A buffer reserves room first, and waits when
there is none. Rules, so that nothing waits for itself:

* A buffer waits behind those that waited before. What comes and the session's next request needs does not wait, because
  that request takes the buffers before it. So twice the bytes may be there for a moment.
* A buffer that comes has at most `limit` bytes. One that is read may have more, when it is alone.

Threading: any thread may call. Callbacks are called without the lock, by the thread whose call made them possible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from pathways.proxy.errors import Code, Refused
from pathways.proxy.host_arrays import Bytes

Then = Callable[[Refused | None], None]


class _Room:
    """Room for bytes, and who waits for it. Its user's lock guards it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved: dict[int, int] = {}  # handle to bytes
        self.used = 0  # their sum
        self.queue: dict[int, tuple[int, Then]] = {}  # those without room, first come first served

    def reserve(self, handle: int, size: int, then: Then, wanted: frozenset[int]) -> bool:
        """Whether there is room at once; if not, `then` is one of those that `admit` returns later."""
        if self._fits(handle, size, bool(self.queue), wanted):
            self._book(handle, size)
            return True
        self.queue[handle] = size, then
        return False

    def release(self, handle: int) -> None:
        """Gives back the room of `handle`, or its place in the queue."""
        self.queue.pop(handle, None)
        self.used -= self.reserved.pop(handle, 0)

    def admit(self, wanted: frozenset[int]) -> list[Then]:
        """Takes from the queue what has room now, and returns whom to tell."""
        admitted = []
        must_queue = False
        for handle, (size, then) in list(self.queue.items()):
            if self._fits(handle, size, must_queue, wanted):
                del self.queue[handle]
                self._book(handle, size)
                admitted.append(then)
            else:
                must_queue = True
        return admitted

    def close(self) -> list[Then]:
        """Forgets all, and returns who waited."""
        waiting = [then for _, then in self.queue.values()]
        self.queue.clear()
        self.reserved.clear()
        self.used = 0
        return waiting

    def __contains__(self, handle: int) -> bool:
        return handle in self.reserved or handle in self.queue

    def _fits(self, handle: int, size: int, must_queue: bool, wanted: frozenset[int]) -> bool:
        if handle in wanted:
            return self.used + size <= 2 * self.limit or not self.used
        return not must_queue and (self.used + size <= self.limit or not self.used)

    def _book(self, handle: int, size: int) -> None:
        self.reserved[handle] = size
        self.used += size


class HostBuffers:
    """Bytes by handles of the client."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._coming, self._read = _Room(limit), _Room(limit)
        self._stored: dict[int, Bytes] = {}
        self._wanted: frozenset[int] = frozenset()  # what the next request needs and has not come
        self._wake: Callable[[], None] | None = None
        self._is_closed = False

    def reserve(self, handle: int, size: int, then: Then, is_read: bool = False) -> None:
        """Calls `then(None)` when there is room for `size` bytes for `handle`, or with what is wrong with that."""
        with self._lock:
            wrong = self._wrong(handle, size, is_read)
            room = self._read if is_read else self._coming
            if wrong is None and not room.reserve(handle, size, then, self._wanted):
                return
        then(wrong)

    def put(self, handle: int, data: Bytes) -> None:
        """Stores the bytes for which `reserve` has room. Without room, because the session has ended, they are lost."""
        with self._lock:
            if handle not in self._coming.reserved and handle not in self._read.reserved:
                return
            self._stored[handle] = data
            self._wanted -= {handle}
            wake = None
            if not self._wanted:
                wake, self._wake = self._wake, None
        if wake:
            wake()

    def release(self, handle: int) -> None:
        """Drops a buffer and its room, if it is there."""
        with self._lock:
            self._stored.pop(handle, None)
            admitted = []
            for room in (self._coming, self._read):
                room.release(handle)
                admitted += room.admit(self._wanted)
        for then in admitted:
            then(None)

    def look_up(self, handle: int) -> Bytes:
        """The bytes of `handle`. Raises `Refused` when there are none."""
        with self._lock:
            if handle not in self._stored:
                raise Refused(Code.NOT_FOUND, f"there is no host buffer {handle}")
            return self._stored[handle]

    def take(self, handle: int) -> Bytes:
        """The same; the buffer is no longer here."""
        data = self.look_up(handle)
        self.release(handle)
        return data

    def all_here(self, handles: Iterable[int], wake: Callable[[], None]) -> bool:
        """Whether all have come. If not, `wake` is called once they have. A new call replaces the one before."""
        with self._lock:
            self._wanted = frozenset(handle for handle in handles if handle not in self._stored)
            is_here = not self._wanted
            self._wake = None if is_here else wake
            admitted = [] if is_here else self._coming.admit(self._wanted)
        for then in admitted:
            then(None)
        return is_here

    def close(self) -> None:
        """The session has ended: all bytes go, and who waits for room is told."""
        with self._lock:
            self._is_closed = True
            self._stored.clear()
            self._wake = None
            waiting = self._coming.close() + self._read.close()
        for then in waiting:
            then(_ended())

    @property
    def used_bytes(self) -> int:
        """The bytes that are here or on their way."""
        return self._coming.used + self._read.used

    def _wrong(self, handle: int, size: int, is_read: bool) -> Refused | None:
        if self._is_closed:
            return _ended()
        if handle in self._coming or handle in self._read:
            return Refused(Code.ALREADY_EXISTS, f"host buffer {handle} exists already")
        if size < 0 or (size > self._coming.limit and not is_read):
            return Refused(
                Code.RESOURCE_EXHAUSTED,
                f"a host buffer of {size} bytes; the proxy takes at most {self._coming.limit} of one client, so put "
                "the array in shards, or start the proxy with a higher limit",
            )
        return None


def _ended() -> Refused:
    return Refused(Code.CANCELLED, "the session has ended")
