"""All links of a process to other machines: the loop receives for them, and one thread sends for them.

A link has a connection per direction. Against it go only signs of life (`Connection.beats`). What it sends comes from
memory of other processes, for which one thread waits: it cannot wait for sockets, too. `csrc/link/link.h` says what the
bytes are, and the native pool which link has some (`csrc/link/link_pool.h`).

POOL-2: if a connection takes nothing now, nothing more is collected for its link until it takes it. LINK-1: a link
breaks once, for the first reason that either connection finds, or if nothing was heard of it for `SILENCE_S`. No link's
fault is another one's.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from pathways.transport import HEARTBEAT_S, SILENCE_S
from pathways.transport.connection import Connection, Pair, delivering, ignoring
from pathways.transport.loop import Loop

_log = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20


class Link(Pair):
    """One end of a link that a `Links` carries."""

    def __init__(
        self,
        links: Links,
        native: Any,
        sending: socket.socket,
        receiving: socket.socket,
        on_broken: Callable[[str], object],
        on_delivered: Callable[[], object] | None,
    ) -> None:
        super().__init__(on_broken)
        self._links, self._native = links, native
        loop = links.loop
        self.sending = Connection(
            loop, sending, self.ended, parse=ignoring(loop), on_room=self._resume, silence_s=SILENCE_S
        )
        deliver = native.deliver if on_delivered is None else lambda data: (native.deliver(data), on_delivered())
        self.receiving = Connection(loop, receiving, self.ended, parse=delivering(loop, deliver), silence_s=SILENCE_S)
        self.sending.other, self.receiving.other = self.receiving, self.sending
        self.sending.beats = True

    def ended(self, why: str) -> None:
        """See `Pair`."""
        if not self.is_over:
            _log.warning("a link broke: %s", why)
        super().ended(why)
        self._links.drop(self._native)

    def close(self) -> None:
        """Ends the link. When this returns, nobody uses its connections any more. A second call does nothing."""
        super().close()
        self._links.drop(self._native)
        self._native.close()

    def _resume(self) -> None:
        self._links.native.resume(self._native.slot)


class Links:
    """Any thread may call any method. The thread starts with the first link, and ends after `close` with the last."""

    def __init__(self, loop: Loop, native: Any) -> None:
        """`native`: the module. Links are opened with `self.native` as their pool."""
        self.loop = loop
        self.native = native.LinkPool()
        self._lock = threading.Lock()  # guards the fields below
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._links: dict[Any, Link] = {}  # by the native link

    def add(
        self,
        native: Any,
        sending: socket.socket,
        receiving: socket.socket,
        on_broken: Callable[[str], object],
        on_delivered: Callable[[], object] | None = None,
    ) -> Link:
        """Carries a link from now on.

        Args:
            native: the native link, of this pool.
            sending: the connection on which this end sends.
            receiving: the connection on which it receives.
            on_broken: called once, on the loop's thread, with the reason, when it breaks; not when it was closed.
            on_delivered: called on the loop's thread after each delivery, because a native link calls nobody.
        """
        link = Link(self, native, sending, receiving, on_broken, on_delivered)
        with self._lock:
            self._links[native] = link
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_all, name="pw-links-send", daemon=True)
                self._thread.start()
        link.start(link.receiving, link.sending)
        self.native.resume(native.slot)
        return link

    def drop(self, native: Any) -> None:
        """Carries a link no more, whose connections have ended."""
        with self._lock:
            self._links.pop(native, None)
        if self._is_closed:
            self.native.wake()

    def close(self) -> None:
        """Ends the thread when the last link is closed."""
        self._is_closed = True
        self.native.wake()

    def _send_all(self) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        while True:
            found = native = link = None  # or the last link would stay until another one has something
            found = self.native.collect(buffer, HEARTBEAT_S / 2)
            if found is None:
                with self._lock:
                    if self._is_closed and not self._links:
                        self._thread = None
                        return
                continue
            native, count, error = found
            link = self._links.get(native)
            if link is None:  # it has just been closed
                continue
            if error:
                link.sending.break_off(f"it broke the protocol: {error}")
                continue
            with link.sending.lock:  # or there might be room before the pause
                if not link.sending.is_over and not link.sending.send(buffer[:count]):
                    self.native.pause(native.slot)
