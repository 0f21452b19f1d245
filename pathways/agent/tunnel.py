"""Byte tunnels between machines for what is rare: each carries one gRPC connection over one connection of a port.

Hosts and the agent find the controller's gRPC server at a Unix socket of their own machine, where `TunnelServer`
listens. For each connection there it dials the controller's port, and the controller's end goes on to the real server's
Unix socket. So hosts need neither addresses nor certificates to speak with the controller.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable

from pathways import errors

_CHUNK_BYTES = 1 << 16
_MOST_QUEUED = 1 << 20
_LINGER_S = 5.0
_TCP_THIN_LINEAR_TIMEOUTS = 16  # linux/tcp.h; Python's socket module does not have it


def send_again_soon(connection: socket.socket) -> None:
    """Asks the kernel to send lost packets again at equal intervals for a while, not at ever longer ones. So after a
    cable was pulled for 2 s, the other machine is heard soon, and nobody takes it for lost.
    """
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)


class _End:
    """One end of a tunnel, and the bytes that wait to be written to it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.queued = bytearray()
        self.is_over = False  # nothing more can be read from it
        self.watched = 0  # the events for which a selector watches it

    def read(self) -> bytes:
        """What can be read now; nothing at its end, too: see `is_over`."""
        try:
            data = self.connection.recv(_CHUNK_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return b""
        except OSError:
            data = b""
        self.is_over = not data
        return data

    def write(self) -> bool:
        """Writes what it takes now. False: the connection is gone."""
        while self.queued:
            try:
                count = self.connection.send(self.queued[:_CHUNK_BYTES])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return True
            except OSError:
                return False
            del self.queued[:count]
        return True

    def pending(self) -> bool:
        """Whether bytes can be read that no selector sees, because TLS has decrypted them already."""
        return isinstance(self.connection, ssl.SSLSocket) and self.connection.pending() > 0


class _Tunnel:
    """Two connections, and what goes both ways between them."""

    def __init__(self, one: socket.socket, other: socket.socket, on_end: Callable[[], object]) -> None:
        self.ends = (_End(one), _End(other))
        self.on_end = on_end
        self.until: float | None = None  # one end is over: the other one takes what is left until then

    def move(self) -> bool:
        """Moves what can be moved now. False: the tunnel is over."""
        one, other = self.ends
        for source, target in ((one, other), (other, one)):
            while self.until is None and len(target.queued) < _MOST_QUEUED and (data := source.read()):
                target.queued += data
            if source.is_over and self.until is None:
                self.until = time.monotonic() + _LINGER_S
            if not target.is_over and not target.write():
                return False
        if self.until is None:
            return True
        return any(end.queued and not end.is_over for end in self.ends) and time.monotonic() < self.until

    def wanted(self, end: _End) -> int:
        """The events of an end that its tunnel waits for. An end whose partner takes no more is read again when the
        partner could write.
        """
        partner = self.ends[1] if end is self.ends[0] else self.ends[0]
        wanted = selectors.EVENT_WRITE if end.queued and not end.is_over else 0
        if self.until is None and len(partner.queued) < _MOST_QUEUED:
            wanted |= selectors.EVENT_READ
        return wanted

    def has_hidden_bytes(self) -> bool:
        """Whether more can be moved at once, although no selector says so."""
        one, other = self.ends
        return self.until is None and any(
            source.pending() and len(target.queued) < _MOST_QUEUED for source, target in ((one, other), (other, one))
        )

    def close(self) -> None:
        """Closes both connections."""
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.connection.close()
        self.on_end()


class Splicer:
    """Carries the bytes of many tunnels with one thread: a TLS connection may be used by one thread at a time, and an
    idle tunnel shall cost no thread. Any thread may call any method.
    """

    def __init__(self) -> None:
        """The thread starts with the first tunnel."""
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._new: list[_Tunnel] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._tunnels: set[_Tunnel] = set()  # the thread's, as what follows
        self._ending: set[_Tunnel] = set()

    def add(self, one: socket.socket, other: socket.socket, on_end: Callable[[], object] = lambda: None) -> None:
        """Carries bytes both ways until either connection ends, then closes both, and calls `on_end`."""
        for connection in (one, other):
            send_again_soon(connection)
        tunnel = _Tunnel(one, other, on_end)
        with self._lock:
            if self._is_closed:
                tunnel.close()
                return
            self._new.append(tunnel)
            if self._thread is None:
                self._thread = threading.Thread(target=self._carry_all, name="pw-tunnels", daemon=True)
                self._thread.start()
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Takes no more tunnels. The thread ends when those that are open have ended."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.eventfd_write(self._wake, 1)
                if self._thread is None:
                    self._free()

    def _free(self) -> None:
        self._selector.close()
        os.close(self._wake)

    def add_to(self, path: str, connection: socket.socket, on_end: Callable[[], object] = lambda: None) -> None:
        """The same between a connection and a Unix socket of this machine. Raises OSError: nothing listens there."""
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            near.connect(path)
        except OSError:
            near.close()
            raise
        self.add(connection, near, on_end)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _carry_all(self) -> None:
        while True:
            with self._lock:
                new, self._new = self._new, []
                if self._is_closed and not new and not self._tunnels:
                    self._free()
                    return
            self._tunnels.update(new)
            woken = dict.fromkeys([*new, *self._ending])
            for tunnel in list(woken):
                self._serve(tunnel)
            woken.clear()
            for key, _ in self._selector.select(_LINGER_S if self._ending else None):
                if key.data is None:
                    os.eventfd_read(self._wake)
                else:
                    woken[key.data] = None
            for tunnel in woken:
                self._serve(tunnel)

    def _serve(self, tunnel: _Tunnel) -> None:
        try:
            while tunnel.move():
                if tunnel.until is not None:
                    self._ending.add(tunnel)
                if not tunnel.has_hidden_bytes():
                    for end in tunnel.ends:
                        self._watch(end, tunnel)
                    return
        except Exception as error:  # the other tunnels go on
            print(f"a tunnel broke: {error}", file=sys.stderr, flush=True)
        self._ending.discard(tunnel)
        self._tunnels.discard(tunnel)
        try:
            for end in tunnel.ends:
                if end.watched:
                    self._selector.unregister(end.connection)
            tunnel.close()
        except Exception:  # of who hears of the end; the other tunnels go on
            traceback.print_exc()

    def _watch(self, end: _End, tunnel: _Tunnel) -> None:
        wanted = tunnel.wanted(end)
        if wanted == end.watched:
            return
        if not wanted:
            self._selector.unregister(end.connection)
        elif end.watched:
            self._selector.modify(end.connection, wanted, tunnel)
        else:
            self._selector.register(end.connection, wanted, tunnel)
        end.watched = wanted


class TunnelServer:
    """Listens at a Unix socket of this machine, and tunnels each connection to where `dial` connects."""

    def __init__(self, path: str, dial: Callable[[], socket.socket]) -> None:
        self._dial = dial
        self._splicer = Splicer()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old = os.umask(0o177)
        try:
            self._listener.bind(path)
        finally:
            os.umask(old)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="pw-tunnels", daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections; open tunnels go on until one of their ends is closed."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._splicer.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._tunnel, args=(near,), name="pw-tunnel", daemon=True).start()

    def _tunnel(self, near: socket.socket) -> None:
        try:
            far = self._dial()
        except (errors.PathwaysError, OSError) as error:
            print(f"a tunnel to the controller could not be opened: {error}", file=sys.stderr, flush=True)
            near.close()
            return
        self._splicer.add(near, far)
