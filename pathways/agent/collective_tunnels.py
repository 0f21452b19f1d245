"""The fabric `link`: what gloo sends to other machines goes between their agents, in TLS 1.3 (FAB-1, CERT-1).

gloo listens at an address that it is given, at a port that the kernel chooses, and tells the island's other hosts where
that is. So each host is given an address of the loopback interface, which is its own on all machines of the island. The
host listens there on its own machine. On each other one, the agent listens there in its place, and tunnels each
connection to the agent of the host's machine, which goes on to the host.

A host learns the ports of all hosts in its group, tells them to its agent, and waits for the answer, before it has a
device (pathways/host/main.py:meet_hosts). So all agents listen before the island computes anything.

CERT-1 (what for): a neighbour reaches a host of the present group where that host's collectives listen, and nothing
else of this machine. Of this machine's processes, only hosts of that group get into a tunnel.

Belongs to the agent's event loop; the port, the tunnels and the hosts' calls have threads of their own.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from pathways import errors
from pathways.agent.fabric import check_neighbour, dial_neighbour
from pathways.process import fd_passing
from pathways.process.tcp_sockets import tcp_sockets
from pathways.protocol import agent_pb2 as pb
from pathways.transport.loop import Listener, Loop
from pathways.transport.tunnels import Tunnels, TunnelServer
from pathways.trust import Identity, Port, Renewal, Role

#: Each pair of devices on two machines has a connection, for each set of devices that computes together.
MOST_OF_ONE = 1 << 12
_PURPOSE = "collective"
_FIRST = ipaddress.IPv4Address("127.77.0.0")
_BACKLOG = 1 << 12
_SAYS_S = 10.0
_READINGS = 3  # the kernel may leave out a socket while others come and go


def address_on_link(host: int) -> str:
    """The loopback address that belongs to a host of the cluster, on every machine of its island."""
    return str(_FIRST + host)


class CollectiveTunnels:
    """One machine's part in it."""

    def __init__(self, directory: str, credentials: Renewal, port: Port) -> None:
        """`directory`: of the agent. `port`: where agents of other machines call."""
        # A loop of its own: what is behind a large message is not the controller's, nor another machine's.
        self._loop = Loop("pw-collectives")
        self._directory = directory
        self._credentials = credentials
        self._port = port
        self._tunnels = Tunnels(self._loop)
        self._neighbours = pb.Neighbours()
        self._group: _Group | None = None
        port.on(_PURPOSE, [Role.HOST], self._take, self._admit)

    def set_neighbours(self, neighbours: pb.Neighbours) -> None:
        """The machines of the next groups."""
        self._neighbours = neighbours

    def begin(self, incarnation: int) -> str:
        """The Unix socket at which the hosts of a new group tell their ports."""
        self.end()
        path = f"{self._directory}/collectives-{incarnation}.sock"
        self._group = _Group(self._loop, path, incarnation, self._neighbours, self._credentials)
        return path

    def end(self) -> None:
        """Ends the present group; tunnels go on until a host at their end is gone. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    # -- from other machines: the port's thread -----------------------------------------------------------------------

    def _admit(self, identity: Identity, hello: dict[str, Any]) -> Mapping[str, Any]:
        group = self._group
        check_neighbour(identity, hello, "" if group is None else group.neighbours.secret)
        self._target(hello)
        return {}

    def _take(self, connection: socket.socket, identity: Identity, hello: dict[str, Any]) -> None:
        target = self._target(hello)
        host = socket.socket()
        host.setblocking(False)
        host.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host.connect_ex(target)  # the tunnel ends if it does not listen
        self._tunnels.add(connection, host, lambda: self._port.let_go(connection))

    def _target(self, hello: Mapping[str, Any]) -> tuple[str, int]:
        group, host = self._group, hello.get("host")
        if group is None or hello.get("incarnation") != group.incarnation or host not in list(group.ports):
            raise errors.ConnectError("the host that the caller means does not listen here now")
        return address_on_link(int(host)), group.ports[host]


class _Group:
    """The hosts of one incarnation of an island."""

    def __init__(
        self, loop: Loop, path: str, incarnation: int, neighbours: pb.Neighbours, credentials: Renewal
    ) -> None:
        self.incarnation = incarnation
        self.neighbours = neighbours
        self.ports: dict[int, int] = {}  # of hosts here: where their collectives listen
        self._loop = loop
        self._path = path
        self._credentials = credentials
        self._lock = threading.Lock()  # guards the fields below, and changes of `ports`
        self._is_over = False
        self._pids: list[int] = []  # of the hosts here
        self._servers: dict[int, TunnelServer] = {}  # by host elsewhere
        self._listener = Listener(loop, fd_passing.listen(path), self._accept)

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.close()
        os.unlink(self._path)
        with self._lock:
            self._is_over = True
            for server in self._servers.values():
                server.close()

    # -- from hosts here ----------------------------------------------------------------------------------------------

    def _accept(self, connection: socket.socket, _: object) -> None:
        threading.Thread(target=self._hear, args=(connection,), name="pw-collectives", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        """A host says where its group's hosts listen, and waits until it can call them there."""
        why = ""
        with connection, contextlib.suppress(OSError):  # it has ended
            said, _ = fd_passing.receive(connection, _SAYS_S)
            try:
                ports = {int(host): int(port) for host, port in said["ports"].items()}
                self._open(int(said["host"]), ports, fd_passing.peer(connection)[0])
            except (errors.PathwaysError, OSError) as error:
                why = str(error)
            fd_passing.send(connection, {"error": why})

    def _open(self, host: int, ports: Mapping[int, int], pid: int) -> None:
        with self._lock:
            if self._is_over:
                raise errors.ConnectError("the group has ended")
            for machine in self.neighbours.others:
                for there in machine.hosts:
                    if there not in self._servers:
                        self._servers[there] = self._serve(machine, there, ports[there])
            self._pids.append(pid)
            self.ports[host] = ports[host]

    def _serve(self, machine: pb.Neighbours.Machine, host: int, port: int) -> TunnelServer:
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections get it from here
            listener.bind((address_on_link(host), port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise errors.ConnectError(
                f"the collectives of host {host}, which is on machine {machine.name}, cannot be reached: this machine "
                f"cannot listen at {address_on_link(host)}:{port}: {error.strerror}. Are both agents on one machine?"
            ) from None
        secret, incarnation = self.neighbours.secret, self.incarnation
        dial = functools.partial(
            dial_neighbour, machine, self._credentials, _PURPOSE, secret, incarnation=incarnation, host=host
        )
        return TunnelServer(self._loop, listener, dial, functools.partial(self._check, host))

    def _check(self, host: int, near: socket.socket) -> None:
        """Other users of this machine can call any of its loopback addresses."""
        # Both ends: two connections to different places may come from one port.
        ends = near.getpeername(), near.getsockname()
        for pid in tuple(self._pids) * _READINGS:
            with contextlib.suppress(OSError):  # it has ended
                if any(((each.address, each.port), each.peer) == ends for each in tcp_sockets(pid)):
                    return
        raise errors.PermissionDeniedError(f"who calls host {host} from this machine is none of its hosts")
