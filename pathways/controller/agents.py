"""The agents of other machines, as the controller knows them: they join, and are lost. Each is an `AgentMachine`.

A cluster that listens (`pathways up --listen`) begins with free places (`machines.py`), or with none. An agent brings
hosts of one island, and takes their places; if the cluster has no fixed shape, it opens the island (`places.py`). While
a place is free, its island is lost (`recovery.py`): what clients ask of it waits, and new slices go elsewhere. When the
agent's link breaks, all its hosts are lost at once; their places are free again.

    link         see `pathways/agent/link_door.py`; the agent says what it has, and gets a place
    control      a tunnel to the controller's gRPC server, for the agent and its hosts (pathways/transport/tunnels.py)

Owned by the event loop's thread; the `serve_` methods are called by threads of the port.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pathways import errors
from pathways.agent.link_door import FarLink, LinkDoor
from pathways.controller.agent_machine import AgentMachine
from pathways.controller.call_meters import call_meter
from pathways.controller.fabrics import Fabrics, check_same_kind, neighbour_of
from pathways.controller.machines import Placement
from pathways.controller.observations import Losses
from pathways.controller.places import Places, Shape
from pathways.controller.relays import Relays
from pathways.process.config import ClusterOptions, ControllerConfig
from pathways.process.memory import memory_bytes
from pathways.process.run_directory import authority_folder
from pathways.process.shared_room import SharedRoom
from pathways.protocol import control_pb2 as pb_control
from pathways.transport.callers import end
from pathways.transport.links import Links
from pathways.transport.loop import Loop
from pathways.transport.tunnels import Tunnels
from pathways.trust import Authority, Identity, Port, Renewal, Role, Tokens

_log = logging.getLogger(__name__)


class Agents:
    """All agents of a cluster. One that does not listen has none."""

    def __init__(
        self,
        native: Any,
        shape: Shape,
        options: ClusterOptions,
        control_path: str,
        controller_segment: Any,
        placement: Placement,
        losses: Losses,
        may_join: bool,
    ) -> None:
        """`control_path`: the Unix socket of the controller's gRPC server for other machines. `may_join`: whether the
        cluster listens.
        """
        self._native = native
        self.hub = native.LinkHub(most_received=memory_bytes() // 4)
        self._controller_segment = controller_segment
        self.port = ""  # where agents join
        self._shape = shape
        self._options = options
        self._control_path = control_path
        self._placement = placement
        self._losses = losses
        self._places = Places(shape, placement, options)
        self.fabrics = Fabrics()
        self._may_join = may_join
        self._by_name: dict[str, AgentMachine] = {}  # also those whose links are about to open
        self.loop = Loop()
        self.links = Links(self.loop, native)
        self._door = LinkDoor(self._open, self._opened, self.links)
        self._relays = Relays(native, self.links, lambda name: any(agent.name == name for agent in self._direct()))
        self._tunnels = Tunnels(self.loop)
        #: For what comes by the tunnels of machines, and of clients elsewhere.
        self.call_room = SharedRoom(memory_bytes() // 4)
        self._lock = threading.Lock()
        self._tunnels_of: dict[str, set[socket.socket]] = {}  # by name of the machine; guarded by _lock
        self._let_go: Callable[[socket.socket], object] = lambda connection: None
        #: Called with the hosts whose places an agent has taken.
        self.on_joined: Callable[[Sequence[int]], None] = lambda hosts: None

    def add_client(self, client: int, segment: Any, link: Any) -> None:
        """From now on hosts of other machines may complete the client's futures, through the hub. It maps the client's
        memory for that, once more, where machines may join. `link`: to a client on another machine.
        """
        if self._may_join:
            self.hub.add_client(client, segment, link)

    def remove_client(self, client: int) -> None:
        """The client is gone, if it was there."""
        self.hub.remove_client(client)

    def by_token(self, token: str) -> AgentMachine:
        """The agent whose link got this secret.

        Raises:
            PermissionDeniedError: there is none.
        """
        for agent in self._by_name.values():
            if secrets.compare_digest(agent.link.token, token):
                return agent
        raise errors.PermissionDeniedError("this is no agent of this cluster, or its link has broken")

    def knows(self, token: str) -> bool:
        """Whether an agent's link got this secret."""
        return any(secrets.compare_digest(agent.link.token, token) for agent in self._by_name.values())

    # -- called by the port's thread ----------------------------------------------------------------------------------

    def serve_at(self, port: Port) -> None:
        """Says what the port does for agents."""
        self.port = str(port.address)
        self._let_go = port.let_go
        self._door.serve_at(port, "link", [Role.HOST])
        self._relays.serve_at(port)
        port.on("control", [Role.HOST], self._serve_control)

    def _serve_control(self, connection: socket.socket, identity: Identity, hello: dict[str, Any]) -> None:
        def forget() -> None:
            with self._lock:
                own = self._tunnels_of[identity.name]
                own.remove(connection)
                if not own:
                    del self._tunnels_of[identity.name]

        def over() -> None:
            forget()
            self._let_go(connection)

        with self._lock:
            self._tunnels_of.setdefault(identity.name, set()).add(connection)
        try:
            self._tunnels.add_to(self._control_path, connection, over, call_meter(self.call_room, identity))
        except OSError:  # nobody listens any more: the cluster ends
            forget()
            raise

    def _end_tunnels(self, name: str) -> None:
        """Of a machine that is lost, which may not be there to end them."""
        with self._lock:
            for connection in self._tunnels_of.get(name, ()):
                end(connection)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _open(self, identity: Identity, hello: dict[str, Any]) -> tuple[FarLink | None, dict[str, Any]]:
        """Keeps an agent's places for it."""
        if (old := self._by_name.get(identity.name)) is not None and old.link.carried is not None:
            self.lose(old, "it calls again, because it has lost its relay")  # CERT-6: nobody else has its name
        if hello.get("may_go_via") and (address := self._relays.choose(len(self._direct()))):
            return None, {"go_via": address}
        relay = self._relays.called(str(hello["via"]), identity.name) if "via" in hello else None
        if identity.name in self._by_name:
            raise errors.ConnectError(
                f"a machine called {identity.name} is in this cluster already: give this one another --name"
            )
        neighbour = neighbour_of(identity, hello)
        island, hosts = self._places.take(hello, list(self._by_name.values()))
        check_same_kind(neighbour, [other.neighbour for other in self._by_name.values() if other.island == island])
        neighbour.hosts.extend(hosts)
        there = identity.peer.rpartition(":")[0]
        ports = zip(hosts, hello["ports"], strict=True)
        secret = secrets.token_hex(16)  # CERT-1: see pathways/host/stream_sockets.py
        streams = {host: f"{identity.name}@{there}:{int(port)}#{secret}" for host, port in ports}
        pool = self.links.native if relay is None else None
        link = FarLink(self.hub.open_link(True, pool), identity, lambda why: self.lose(agent, why))
        carried = {} if relay is None else relay.place(link)
        agent = AgentMachine(
            identity, island, streams, neighbour, link, self._native, self._options, self._controller_segment
        )
        agent.on_fabric = functools.partial(self.fabrics.report, agent)
        self._by_name[agent.name] = agent
        return link, {
            "island": island,
            "island_name": self._places.name_of(island),
            "hosts": hosts,
            "island_hosts": self._shape.topology.islands[island],
            "options": dataclasses.asdict(self._options),
            "secret": secret,
            **carried,
        }

    def _opened(self, link: FarLink) -> None:
        agent = next(agent for agent in self._by_name.values() if agent.link is link)
        where = self._where(agent)
        _log.info("the agent %s has joined as %s", agent.name, where)
        self._placement.fill(agent.hosts, agent)
        asyncio.get_running_loop().call_soon(self.on_joined, agent.hosts)

    def lose(self, agent: AgentMachine, why: str) -> None:
        """Counts an agent and its hosts as lost. A second call does nothing."""
        if self._by_name.get(agent.name) is not agent:
            return
        level, end = (logging.INFO, "has left") if agent.may_go else (logging.WARNING, f"is lost: {why}")
        _log.log(level, "the agent %s of %s %s", agent.name, self._where(agent), end)
        del self._by_name[agent.name]
        if not agent.may_go:
            self._losses.machine(agent.name, why)
        self._relays.lose(agent.name, why)
        self._placement.free(agent, is_lost=not agent.may_go)
        agent.link.close()
        self._end_tunnels(agent.name)
        agent.lost(why)
        self.fabrics.lost(agent, why)

    def _where(self, agent: AgentMachine) -> str:
        """For people."""
        island, hosts = self._places.name_of(agent.island), self._shape.topology.islands[agent.island]
        some = "" if len(agent.hosts) == len(hosts) else f"hosts {', '.join(map(str, agent.hosts))} of "
        return f"{some}island {island}"

    def stats(self) -> list[pb_control.MachineStats]:
        """What people want to know of each machine that has joined, by island."""
        there = sorted(self._there(), key=lambda agent: agent.hosts)
        return [agent.stats(self._places.name_of(agent.island)) for agent in there]

    def _there(self) -> list[AgentMachine]:
        return [agent for agent in self._by_name.values() if agent.link.is_open]

    def _direct(self) -> list[AgentMachine]:
        """Those that no relay carries."""
        return [agent for agent in self._there() if agent.link.carried is None]

    def called(self, machine: str) -> AgentMachine:
        """The agent of a machine, whose link is open.

        Raises:
            ConnectError: no machine of this name has joined, or it is lost.
        """
        if not self._may_join:
            raise errors.ConnectError(
                f"no machine {machine!r}: no machine can join this cluster: its hosts are all on the controller's "
                "machine. Name a host or an island by its number"
            )
        there = {agent.name: agent for agent in self._there()}
        if machine not in there:
            if self._placement.is_lost(machine):
                raise errors.ConnectError(f"machine {machine} is lost: ask again when its agent has joined again")
            raise errors.ConnectError(
                f"no machine {machine!r} has joined this cluster; there are: {', '.join(sorted(there)) or 'none'}"
            )
        return there[machine]

    def close(self) -> None:
        """Ends all links, and their threads."""
        for agent in list(self._by_name.values()):
            agent.link.close()
        self._relays.close()
        self.links.close()
        self._tunnels.close()
        self.loop.close()


class _Served(Protocol):
    def serve_at(self, port: Port) -> None:
        """Says what the port does for these callers."""
        ...


def open_port(config: ControllerConfig, *served: _Served) -> tuple[Port, Renewal | None]:
    """Listens for other machines. The folder of the authority, or a link to it, is in the cluster's directory.

    Raises:
        ConnectError: it cannot listen there.
        OptionError: the folder holds no authority, and none can be made there.
    """
    folder = authority_folder(config.directory)
    if config.authority:
        try:
            os.makedirs(config.authority, 0o700, exist_ok=True)
        except OSError as error:
            raise errors.OptionError(
                f"the authority cannot be kept in {config.authority}: {error.strerror or error}"
            ) from None
        os.symlink(config.authority, folder)
    authority = Authority.open_or_create(config.authority or folder)  # its messages name the folder
    if config.insecure_plaintext:
        port, renewal = Port(config.listen, None, None, Tokens(folder)), None
    else:
        own = authority.credentials(Role.CONTROLLER, "controller")
        renewal = Renewal(own, authority.renewed)
        port = Port(config.listen, renewal, authority, Tokens(folder))
    for each in served:
        each.serve_at(port)
    return port.start(), renewal
