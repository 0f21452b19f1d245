"""The proxy's sockets: it listens, lets callers in, and gives each connection a thread (`connections.py`).

CERT-4: callers by TLS shake hands in the listener's thread, and have none of their own before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import stat
import threading
from collections.abc import Sequence
from typing import Any

from pathways.proxy.connections import Connection
from pathways.proxy.service import Service
from pathways.transport.callers import Caller, Callers, Steps
from pathways.transport.loop import Loop
from pathways.transport.tunnels import Tunnels

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
CLOSE_S = 5.0
_BACKLOG = 128


class Server:
    """A gRPC server on `addresses`, such as "127.0.0.1:0" or "unix:/path". With `tls`, callers come by TLS."""

    def __init__(self, service: Service, addresses: Sequence[str], tls: ssl.SSLContext | None = None) -> None:
        """Listens when it returns. Raises `OSError` when an address cannot be had."""
        self._service, self._tls = service, tls
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        #: Clients have one or two connections each, and some may have no call yet.
        self._most = 2 * service.limits.sessions + 64
        self._lock = threading.Lock()
        self._connections: dict[object, Connection | None] = {}  # None: its thread begins
        self._none_left = threading.Condition(self._lock)
        self._is_closed = False
        self._loop = Loop("pw-proxy")
        self._tunnels = Tunnels(self._loop)
        with contextlib.ExitStack() as sockets:
            opened = [sockets.enter_context(_listen(address)) for address in addresses]
            sockets.pop_all()
        self.ports: list[int] = [0 if sock.family == socket.AF_UNIX else sock.getsockname()[1] for sock in opened]
        self._callers = [Callers("pw-proxy-arrive", sock, self._arrive, self._no_place, HANDSHAKE_S) for sock in opened]

    def close(self) -> None:
        """Ends all sessions and stops listening."""
        for callers in self._callers:
            callers.close()
        with self._lock:
            self._is_closed = True
            connections = [connection for connection in self._connections.values() if connection is not None]
        for connection in connections:
            connection.end()
        with self._none_left:
            self._none_left.wait_for(lambda: not self._connections, CLOSE_S)
        self._tunnels.close()
        self._loop.close()

    def _arrive(self, caller: Caller) -> Steps[None]:
        try:
            if self._tls is not None:
                yield from caller.shake_hands(self._tls)
        except OSError as error:
            log.info("a connection of %s ends: %s", caller.peer, error)
            caller.leave()
            caller.sock.close()
            return
        caller.leave()
        self._admit(caller.sock, "unix" if caller.sock.family == socket.AF_UNIX else caller.peer)

    def _no_place(self, peer: str, why: str) -> None:
        log.warning("a connection of %s is refused: %s", peer, why)

    def _admit(self, sock: socket.socket, peer: str) -> None:
        with self._lock:
            is_full = len(self._connections) >= self._most and not self._make_room()
            if self._is_closed or is_full:
                log.warning("a connection of %s is refused: there are %d", peer, len(self._connections))
                sock.close()
                return
            self._connections[sock] = None
        threading.Thread(target=self._serve, args=(sock, peer), name="pw-proxy-client", daemon=True).start()

    def _make_room(self) -> bool:
        """Ends the oldest connection without a call: whoever only keeps connections open keeps nobody out. Under the
        lock. It goes when its thread is over, so for a moment there is one more than there may be.
        """
        for connection in self._connections.values():
            if connection is not None and connection.is_idle and not connection.is_given_up:
                connection.is_given_up = True
                connection.end()
                return True
        return False

    def _serve(self, sock: socket.socket, peer: str) -> None:
        """The thread of one connection."""
        try:
            near, identities = self._plain(sock)
            connection = Connection(self._service, near, peer, identities)
            with self._lock:
                self._connections[sock] = connection
                is_closed = self._is_closed
            if is_closed:
                connection.end()
            connection.run()
        except OSError as error:  # of this caller's socket
            log.info("a connection of %s ends: %s", peer, error)
            sock.close()
        except Exception:
            log.exception("the connection of %s ends by an error of the proxy", peer)
            sock.close()
        finally:
            with self._none_left:
                del self._connections[sock]
                self._none_left.notify_all()

    def _plain(self, sock: socket.socket) -> tuple[socket.socket, tuple[str, ...]]:
        """A socket with what is within TLS, and the names in the caller's certificate."""
        if not isinstance(sock, ssl.SSLSocket):
            sock.setblocking(True)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock, ()
        near, far = socket.socketpair()
        self._tunnels.add(sock, far)
        return near, _names_in(sock.getpeercert())


def _names_in(certificate: Any) -> tuple[str, ...]:
    if not certificate:
        return ()
    names = [value for _, value in certificate.get("subjectAltName", ())]
    names += [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return tuple(dict.fromkeys(names))


def _listen(address: str) -> socket.socket:
    """A socket that listens. What a server that is gone has left at a Unix address is removed. Raises `OSError`."""
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
                    os.unlink(path)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            where: Any = path
        else:
            host, _, port = address.rpartition(":")
            family, kind, _, _, where = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            sock = socket.socket(family, kind)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(where)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except (OSError, ValueError, OverflowError) as error:
        raise OSError(f"the proxy cannot listen on {address}: {error}") from error
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(path)
        except OSError:
            return False
        return True
