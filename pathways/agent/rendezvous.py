"""Where the hosts of an island find each other: the coordination service of their `jax.distributed` group.

It runs in the agent of the island's first host, behind a Unix socket. The hosts of the island's other machines reach it
by tunnels between the agents: TLS 1.3, with the certificates of both machines (CERT-1), on every release of jaxlib. So
the service needs no port, and nothing that the group agrees on goes over the fabric.

Belongs to the agent's event loop; the agent's port and the tunnels have threads of their own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from pathways import errors
from pathways.agent.fabric import check_neighbour, dial_neighbour
from pathways.protocol import agent_pb2 as pb
from pathways.transport.loop import Loop
from pathways.transport.tunnels import Tunnels, TunnelServer
from pathways.trust import Identity, Port, Renewal, Role

_PURPOSE = "rendezvous"
#: The agent of the first host may hear later than the others that the island starts.
_BEGINS_S = 30.0
_AGAIN_S = 0.1


class Rendezvous:
    """One machine's part in it."""

    def __init__(self, loop: Loop, directory: str, name: str, credentials: Renewal | None, port: Port | None) -> None:
        """`loop`: serves the tunnels. `name`: of this machine. `port`: where agents of other machines may call."""
        self._loop = loop
        self._directory = directory
        self._name = name
        self._credentials = credentials
        self._port = port
        self._tunnels = Tunnels(loop)
        self._neighbours = pb.Neighbours(first=name)
        self._serves = ("", "")  # the secret of the island and the socket of its service, if it is here
        self._service: Any = None
        self._server: TunnelServer | None = None
        self._path = ""  # where the hosts here join
        if port is not None:
            port.on(_PURPOSE, [Role.HOST], self._take, self._admit)

    def set_neighbours(self, neighbours: pb.Neighbours) -> None:
        """The machines of the next groups."""
        self._neighbours = neighbours

    def begin(self, incarnation: int, members: int) -> str:
        """Where the hosts here join a new group; empty: one host needs none."""
        self.end()
        if members == 1:
            return ""
        path = self._path = f"{self._directory}/island-{incarnation}.sock"
        neighbours = self._neighbours
        if neighbours.first == self._name:
            from pathways._jaxlib.coordination import start_service

            self._service = start_service(f"unix:{path}", members)
            self._serves = (neighbours.secret, path)
        else:
            first = next(each for each in neighbours.others if each.name == neighbours.first)
            until = time.monotonic() + _BEGINS_S
            self._server = TunnelServer(
                self._loop, path, lambda: self._dial(first, neighbours.secret, incarnation, until)
            )
        return f"unix:{path}"

    def end(self) -> None:
        """Ends the group's service. A second call does nothing."""
        self._serves = ("", "")
        if self._server is not None:
            self._server.close()
            self._server = None
            os.unlink(self._path)  # another controller counts incarnations anew
        if self._service is not None:
            from pathways._jaxlib.coordination import stop_service

            stop_service(self._service)
            self._service = None

    # -- from other machines: threads of the port and of tunnels ------------------------------------------------------

    def _admit(self, identity: Identity, hello: dict[str, Any]) -> Mapping[str, Any]:
        secret, path = self._serves
        check_neighbour(identity, hello, secret)
        if os.path.basename(path) != f"island-{hello.get('incarnation')}.sock":
            raise errors.ConnectError("the group that the caller means does not meet here now")
        return {}

    def _take(self, connection: socket.socket, identity: Identity, hello: dict[str, Any]) -> None:
        port = self._port
        assert port is not None
        self._tunnels.add_to(self._serves[1], connection, lambda: port.let_go(connection))

    def _dial(self, first: pb.Neighbours.Machine, secret: str, incarnation: int, until: float) -> socket.socket:
        while True:
            try:
                return dial_neighbour(first, self._credentials, _PURPOSE, secret, incarnation=incarnation)
            except (errors.PathwaysError, OSError):
                if self._server is None or time.monotonic() > until:
                    raise
                time.sleep(_AGAIN_S)
