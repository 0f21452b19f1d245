"""Clients and operators on other machines, as they come in at the controller's port.

    session      a connection that stays open for as long as the process is there; it gives the process its secret. An
                 operator needs nothing else.
    client       the link of a client (`pathways/agent/link_door.py`): the client says how big its block is, and the
                 head makes a twin
    console      a tunnel to the controller's gRPC server, where a secret says who calls (`connections.py`)

Owned by the event loop's thread; the `serve_` methods are called by the port's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Any

from pathways import errors
from pathways.agent.link_door import OPEN_TIMEOUT_S, FarLink, LinkDoor
from pathways.controller.call_meters import call_meter
from pathways.controller.connections import Connections
from pathways.controller.records import Connection
from pathways.process.config import ClientSizes
from pathways.process.memory import memory_bytes
from pathways.process.shared_room import SharedRoom
from pathways.transport import connection as transport
from pathways.transport.links import Links
from pathways.transport.tunnels import Tunnels
from pathways.trust import Identity, Port, Role

_log = logging.getLogger(__name__)

_ROLES = (Role.CLIENT, Role.OPERATOR)
# The head's twin of a client's arena has room for gaps. What clients send into it without need stays below half of
# the machine's memory, of one client and of all: see `LinkHub`.
_TWIN = 4
#: What a client may ask for, at least and at most.
_LEAST = ClientSizes(futures=64, ring_bytes=1 << 12, arena_bytes=1 << 12)
_MOST = dataclasses.replace(ClientSizes(), arena_bytes=max(1 << 30, memory_bytes() // 2 // _TWIN))
# A twin beside its arena, rings and futures, and how many twins there may be: then these take an eighth of the memory.
_BESIDE = 2 * _MOST.ring_bytes + 32 * _MOST.futures
_MOST_TWINS = memory_bytes() // 8 // _BESIDE


@dataclasses.dataclass(eq=False)
class FarConnection(Connection):
    """A connection of a process on another machine."""

    identity: Identity = dataclasses.field(kw_only=True)
    far: FarLink | None = None
    is_served: bool = False
    end_session: Callable[[], object] = lambda: None

    @property
    def who(self) -> str:
        """See `Connection`."""
        return f"{self.identity} at {self.identity.peer}"

    @property
    def proven_name(self) -> str | None:
        """See `Connection`. An operator may be called like a client, but does not get that client's folder."""
        return f"{self.identity.name}@operator" if self.is_operator else self.identity.name

    @property
    def is_operator(self) -> bool:
        """See `Connection`."""
        return self.identity.role is Role.OPERATOR

    def close(self) -> None:
        """See `Connection`."""
        self.has_segment.set()  # who waits for it sees that the connection is closed
        self.end_session()
        far, self.far, self.link = self.far, None, None
        if far is not None:
            far.close()


class FarClients:
    """The connections of other machines' clients and operators."""

    def __init__(
        self,
        native: Any,
        hub: Any,
        links: Links,
        status_segment: Any,
        connections: Connections,
        control_path: str,
        call_room: SharedRoom,
    ) -> None:
        """`control_path`: the Unix socket of the controller's gRPC server for clients. `call_room`: for their calls."""
        self._native = native
        self._hub = hub
        self._links = links
        self._status = status_segment
        self._connections = connections
        self._control_path = control_path
        self._call_room = call_room
        self._loop = asyncio.get_running_loop()
        self._door = LinkDoor(self._open, self._opened, links)
        self._tunnels = Tunnels(links.loop)
        self._let_go: Callable[[socket.socket], object] = lambda connection: None

    def serve_at(self, port: Port) -> None:
        """Says what the port does for clients and operators."""
        port.on("session", _ROLES, self._serve_session, lambda *caller: self._door.on_loop(self._admit, *caller))
        port.on("console", _ROLES, self._serve_console)
        self._let_go = port.let_go
        self._door.serve_at(port, "client", _ROLES)

    def _serve_console(self, connection: socket.socket, identity: Identity, hello: dict[str, Any]) -> None:
        meter = call_meter(self._call_room, identity)
        self._tunnels.add_to(self._control_path, connection, lambda: self._let_go(connection), meter)

    def _serve_session(self, sock: socket.socket, identity: Identity, hello: dict[str, Any]) -> None:
        connection: FarConnection = hello["connection"]
        connection.is_served = True

        def ended(why: str) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the cluster has ended
                self._loop.call_soon_threadsafe(self._connections.lost, connection)

        def end() -> None:
            served.end()
            self._let_go(sock)

        loop = self._links.loop
        nothing = transport.delivering(loop, lambda data: None)  # it has nothing to say
        served = transport.Connection(loop, sock, ended, parse=nothing)
        connection.end_session = end
        served.start()
        if connection.number not in self._connections.open:
            end()

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _admit(self, identity: Identity, hello: dict[str, Any]) -> dict[str, Any]:
        bell = self._native.bell_segment()
        connection = FarConnection(next(self._connections.numbers), 0, secrets.token_hex(16), bell, identity=identity)
        self._connections.add(connection)
        hello["connection"] = connection  # for `_serve_session`, which gets the same first line
        self._loop.call_later(OPEN_TIMEOUT_S, self._give_up, connection)
        return {"session": connection.token}

    def _open(self, identity: Identity, hello: dict[str, Any]) -> tuple[FarLink, dict[str, Any]]:
        """Makes the twin of a client's block, and the link that keeps it."""
        connection = self._connections.of(str(hello.get("session", "")))
        is_own = isinstance(connection, FarConnection) and (
            (connection.identity.role, connection.identity.name) == (identity.role, identity.name)
        )
        if not isinstance(connection, FarConnection) or not is_own or connection.far is not None:
            raise errors.PermissionDeniedError("no session of this client waits for a link")
        sizes = _checked_sizes(hello)
        if sum(each.link is not None for each in self._connections.open.values()) >= _MOST_TWINS:
            raise errors.ResourceExhaustedError(
                f"the controller's memory is enough for {_MOST_TWINS} clients on other machines, and so many are there"
            )
        try:
            # Nobody pays for pages that are not touched.
            twin = self._native.client_segment(sizes.futures, sizes.ring_bytes, _TWIN * sizes.arena_bytes)
            native = self._hub.open_client_link(twin, connection.bell, self._status, self._links.native)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise errors.ConnectError(f"the controller has no memory for {sizes}: {error}") from error
        link = FarLink(native, identity, lambda why: self._lost(connection, why))
        connection.segment, connection.link, connection.far = twin, native, link
        return link, {}

    def _opened(self, link: FarLink) -> None:
        for connection in self._connections.open.values():
            if isinstance(connection, FarConnection) and connection.far is link:
                connection.has_segment.set()

    def _give_up(self, connection: FarConnection) -> None:
        """A caller that has gone before it was told its secret is nobody's connection."""
        if not connection.is_served:
            self._lost(connection, "it has gone before it was served")

    def _lost(self, connection: FarConnection, why: str) -> None:
        _log.info("the connection of %s is over: %s", connection.who, why)
        self._connections.lost(connection)


def _checked_sizes(hello: dict[str, Any]) -> ClientSizes:
    """The sizes of a client's block, from its first line (TRUST-1)."""
    found = {}
    for field in dataclasses.fields(ClientSizes):
        size, least, most = hello.get(field.name), getattr(_LEAST, field.name), getattr(_MOST, field.name)
        if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= most:
            raise errors.ConnectError(f"a client's {field.name} is from {least} to {most}, got {str(size)[:50]}")
        found[field.name] = size
    return ClientSizes(**found)
