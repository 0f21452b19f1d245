"""The connections of client processes to the controller: opened, identified, closed.

Those of other machines come in at the port (`far_clients.py`); this file has those of this machine, on the descriptor
socket. Each client keeps one connection open for as long as it lives. The kernel reports the client's end to the
controller in two ways, and the first one counts: the pidfd of the process, and the closing of the socket. The socket
alone is not enough, because a forked child of the client may hold it open.

TRUST-1: the controller gives each connection a secret, and finds the caller of a call by the secret alone. It trusts
nothing else that the call contains. A process of the cluster's user that has not joined is an operator: it may inspect
the cluster, suspend and resume clients, and end the cluster.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import Callable

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.control_server import no_session
from pathways.controller.records import Connection, NearConnection
from pathways.process import fd_passing
from pathways.transport.loop import EXHAUSTED, LOOK_S

_log = logging.getLogger(__name__)


class Connections:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager, on_lost: Callable[[Connection], None]) -> None:
        """`on_lost` is called for each connection that is over, before its descriptors are closed."""
        self._cluster = cluster
        self._on_lost = on_lost
        self.open: dict[int, Connection] = {}
        self._by_token: dict[str, Connection] = {}
        self.numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(os.getpid())
        self._listener = fd_passing.listen(os.path.join(cluster.config.directory, "fds.sock"))
        self._listener.setblocking(False)
        self._listen()
        cluster.on_end.append(self._tell_end)

    def of(self, token: str) -> Connection:
        """The open connection to which the controller gave this secret.

        Raises:
            PermissionDeniedError: no open connection has this secret.
        """
        try:
            return self._by_token[token]
        except KeyError:
            raise no_session() from None

    def knows(self, token: str) -> bool:
        """Whether an open connection has this secret."""
        return token in self._by_token

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the other end has closed the connection already
            if error.errno in EXHAUSTED:  # or the event loop would do nothing else until there are descriptors
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(LOOK_S, self._listen)
            return
        pid, uid = fd_passing.peer(connection)
        try:
            if uid != os.getuid():
                raise PermissionError
            bell = self._cluster.native.bell_segment()
            pidfd = os.pidfd_open(pid)
        except (OSError, RuntimeError):  # no descriptor is left, or it is another user
            connection.close()
            return
        connection.setblocking(False)
        token = secrets.token_hex(16)
        record = NearConnection(next(self.numbers), pid, token, bell, socket=connection, pidfd=pidfd)
        self.add(record)
        self._loop.add_reader(pidfd, self._lost_near, record)
        self._loop.add_reader(connection.fileno(), self.read, record)
        try:
            hello: fd_passing.Message = {"kind": "hello", "token": token, "controller_pid": os.getpid()}
            fd_passing.send(connection, hello, [self._cluster.status_segment.fd, record.bell.fd, self._pidfd])
        except OSError:
            self._lost_near(record)
            return
        if self._cluster.failure is not None:
            self._tell_end(self._cluster.failure)

    def add(self, connection: Connection) -> None:
        """A connection that is open from now on."""
        self.open[connection.number] = self._by_token[connection.token] = connection

    def read(self, connection: NearConnection) -> None:
        """Takes the only message that a client may send: its segment. After any other message it is disconnected."""
        fds: list[int] = []
        try:
            message, fds = fd_passing.receive(connection.socket, 0.0)
            if message != {"kind": "segment"} or len(fds) != 1 or connection.segment is not None:
                raise ValueError(f"a client sent {str(message)[:1000]} with {len(fds)} descriptors")
            connection.segment = self._cluster.native.Segment.attach(fds.pop())
        except TimeoutError:
            return
        except Exception as error:
            for fd in fds:
                os.close(fd)
            if not isinstance(error, fd_passing.Closed):
                _log.warning("process %d was disconnected: %s", connection.pid, error)
            self._lost_near(connection)

    def _lost_near(self, connection: NearConnection) -> None:
        """The process ended, its socket closed, or it sent something wrong."""
        if connection.number in self.open:
            self._loop.remove_reader(connection.pidfd)
            self._loop.remove_reader(connection.socket.fileno())
            self.lost(connection)

    def lost(self, connection: Connection) -> None:
        """Closes a connection. A second call does nothing."""
        if self.open.pop(connection.number, None) is None:
            return
        self._by_token.pop(connection.token, None)
        self._on_lost(connection)
        connection.close()

    def _tell_end(self, failure: errors.PathwaysError) -> None:
        for connection in self.open.values():
            connection.tell({"kind": "failed", "error": type(failure).__name__, "message": str(failure)})
