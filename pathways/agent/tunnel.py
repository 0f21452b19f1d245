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

    def write_all(self) -> None:
        """Writes all that waits, as the last thing; gives up when the connection takes nothing for `_LINGER_S`."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(_LINGER_S)
            self.connection.sendall(self.queued)

    def pending(self) -> bool:
        """Whether bytes can be read that no selector sees, because TLS has decrypted them already."""
        return isinstance(self.connection, ssl.SSLSocket) and self.connection.pending() > 0


def splice(one: socket.socket, other: socket.socket) -> None:
    """Carries bytes both ways until either connection ends, then closes both. Uses the calling thread alone, because a
    TLS connection may be used by one thread at a time.
    """
    for connection in (one, other):
        send_again_soon(connection)
    ends = (_End(one), _End(other))
    ways = ((ends[0], ends[1]), (ends[1], ends[0]))
    try:
        with selectors.DefaultSelector() as selector:
            for end in ends:
                selector.register(end.connection, selectors.EVENT_READ)
            while True:
                for source, target in ways:
                    while len(target.queued) < _MOST_QUEUED and (data := source.read()):
                        target.queued += data
                    if source.is_over:
                        target.write_all()
                        return
                    if not target.write():
                        return
                for source, target in ways:
                    # An end whose partner takes no more is read again when the partner could write.
                    wanted = selectors.EVENT_READ if len(target.queued) < _MOST_QUEUED else 0
                    wanted |= selectors.EVENT_WRITE if source.queued else 0
                    selector.modify(source.connection, wanted or selectors.EVENT_WRITE)
                if not any(end.pending() for end in ends):
                    selector.select(_LINGER_S)
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                end.connection.close()


def splice_to(path: str, connection: socket.socket) -> None:
    """Carries bytes between a connection and a Unix socket of this machine until either ends, then closes both."""
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        near.connect(path)
    except OSError:
        near.close()
        raise
    splice(connection, near)


class TunnelServer:
    """Listens at a Unix socket of this machine, and tunnels each connection to where `dial` connects."""

    def __init__(self, path: str, dial: Callable[[], socket.socket]) -> None:
        self._dial = dial
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
        splice(near, far)
