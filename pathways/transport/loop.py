"""A loop: one thread that serves non-blocking sockets, however many there are.

    Loop        the thread
    Listener    takes connections at a socket that listens
    Connection  see connection.py

Threading: any thread may call any method.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

#: Seconds between two looks for connections that are silent or late.
LOOK_S = 0.25
BUFFER_BYTES = 1 << 20
_AT_ONCE = 64  # connections that a listener takes in one turn
#: What is wrong when a process, or the machine, has no room for one more connection now.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Served:
    """A non-blocking socket that a loop serves."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.loop, self.sock, self.descriptor = loop, sock, sock.fileno()
        self.lock = threading.RLock()
        self.watched = 0  # the events for which epoll watches it

    def turn(self, events: int) -> None:
        """Something has happened. Called by the loop, as the others."""

    def wanted(self) -> int:
        """The events that it waits for."""
        return select.EPOLLIN

    def look(self, now: float) -> None:
        """Called every `LOOK_S` after `look_after`."""


class Loop:
    """Its thread starts with the first connection, and ends after `close` when the last connection has ended."""

    def __init__(self, name: str = "pw-transport") -> None:
        self._name = name
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self.buffer = memoryview(bytearray(BUFFER_BYTES))  # for what has come; the thread's
        self._lock = threading.Lock()  # guards all below
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._served: dict[int, Served] = {}  # by descriptor
        self._looked_after: set[Served] = set()
        self._again: dict[Served, int] = {}  # to be served, although epoll sees nothing

    def add(self, served: Served) -> bool:
        """Serves it from now on. Under its lock, as the methods below. False: the loop is closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._served[served.descriptor] = served
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self.watch(served)
        return True

    def watch(self, served: Served) -> None:
        """Waits for the events that it wants now."""
        wanted, watched = served.wanted(), served.watched
        if wanted == watched or self._served.get(served.descriptor) is not served:
            return
        served.watched = wanted
        if not wanted:
            self._epoll.unregister(served.descriptor)
        elif watched:
            self._epoll.modify(served.descriptor, wanted)
        else:
            self._epoll.register(served.descriptor, wanted)

    def look_after(self, served: Served) -> None:
        """Has it `look` from now on."""
        with self._lock:
            if self._served.get(served.descriptor) is served:
                self._looked_after.add(served)
                os.eventfd_write(self._wake, 1)

    def again(self, served: Served, events: int) -> None:
        """Has it `turn` soon, as if epoll had seen these events."""
        with self._lock:
            if self._served.get(served.descriptor) is served:
                self._again[served] = self._again.get(served, 0) | events
                if threading.current_thread() is not self._thread:
                    os.eventfd_write(self._wake, 1)

    def forget(self, served: Served) -> None:
        """Serves it no more."""
        with self._lock:
            self._looked_after.discard(served)
            self._again.pop(served, None)
            if self._served.get(served.descriptor) is served:  # its socket may be closed, and the number another's
                del self._served[served.descriptor]
                if served.watched:
                    with contextlib.suppress(OSError):
                        self._epoll.unregister(served.descriptor)
                if self._is_closed:
                    os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Takes nothing more. What is there goes on until it ends. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._thread is None:
                self._free()
            else:
                os.eventfd_write(self._wake, 1)

    def _free(self) -> None:
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        next_look = 0.0
        while True:
            if self._is_closed:
                with self._lock:
                    if not self._served:
                        self._free()
                        return
            timeout = 0 if self._again else LOOK_S if self._looked_after else None
            for descriptor, events in self._epoll.poll(timeout):
                if (found := self._served.get(descriptor)) is not None:
                    found.turn(events)
                elif descriptor == self._wake:
                    os.eventfd_read(self._wake)
            if self._again:
                with self._lock:
                    again, self._again = self._again, {}
                for served, events in again.items():
                    served.turn(events)
            if self._looked_after and (now := time.monotonic()) >= next_look:
                next_look = now + LOOK_S
                with self._lock:
                    looked_after = list(self._looked_after)
                for served in looked_after:
                    served.look(now)


class Listener(Served):
    """Takes connections at a socket that listens, until it is closed. It waits while the process has no descriptors."""

    def __init__(self, loop: Loop, sock: socket.socket, on_connection: Callable[[socket.socket, Any], object]) -> None:
        """`on_connection`: gets each connection with the address of its other end, on the loop's thread."""
        super().__init__(loop, sock)
        self._on_connection = on_connection
        self._waits = False
        with self.lock:
            loop.add(self)

    def close(self) -> None:
        """Listens no more, and closes the socket."""
        with self.lock:
            self.loop.forget(self)
            self.sock.close()

    def wanted(self) -> int:
        """See `Served`, as for the others."""
        return 0 if self._waits else select.EPOLLIN

    def turn(self, events: int) -> None:
        """Takes connections: several, because those that are there may keep the loop busy for all of a turn."""
        for _ in range(_AT_ONCE):
            try:
                connection, name = self.sock.accept()
            except OSError as fault:
                if fault.errno in EXHAUSTED:
                    _log.error("no connection can be taken: %s", fault.strerror)
                    self._wait(True)
                return
            try:
                connection.setblocking(True)
                self._on_connection(connection, name)
            except Exception:  # of one caller; the others come in
                _log.exception("a connection could not be taken")
                connection.close()

    def look(self, now: float) -> None:
        """Tries again whether there are descriptors."""
        self._wait(False)

    def _wait(self, does: bool) -> None:
        with self.lock:
            self._waits = does
            self.loop.watch(self)
            self.loop.look_after(self)
