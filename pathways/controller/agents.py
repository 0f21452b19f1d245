"""The agents of other machines, as the controller knows them: they join, start hosts for it, and are lost.

A cluster that listens (`pathways up --listen`) has places: its islands. An agent brings the hosts of one island and
takes a free place. While a place is free, its island is lost (`recovery.py`): what clients ask of it waits, and new
slices go elsewhere. When the agent's link breaks, all its hosts are lost at once; the place is free again.

    link         see `far_links.py`; the agent says what it has, and gets a place
    control      a tunnel to the controller's gRPC server, for the agent and its hosts (pathways/transport/tunnels.py)

Owned by the event loop's thread; the `serve_` methods are called by threads of the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pathways import errors
from pathways.agent.island import start_of
from pathways.controller.far_links import FarLink, LinkDoor
from pathways.controller.log_sources import LogsThere
from pathways.plan.topology import Topology
from pathways.process import fd_passing
from pathways.process.config import ClusterOptions, ControllerConfig, HostConfig
from pathways.process.run_directory import authority_folder
from pathways.protocol import agent_pb2 as pb
from pathways.protocol import control_pb2 as pb_control
from pathways.transport.links import Links
from pathways.transport.loop import Loop
from pathways.transport.tunnels import Tunnels
from pathways.trust import Authority, Identity, Port, Renewal, Role, Tokens
from pathways.trust.identity import shown

_MOST_LOG_CHARS = 8192


class FarHost:
    """A host process on another machine. Like `HostProcess`, which is one of this machine."""

    def __init__(self, agent: Agent, host: int, incarnation: int) -> None:
        self.pid = 0  # known when the agent has started it; of that machine
        self.returncode: int | None = None
        self._agent = agent
        self._host = host
        self.incarnation = incarnation
        self._log_tail = ""
        self._on_end: Callable[[], None] | None = None

    def poll(self) -> int | None:
        """How the process ended, None while nothing is known of its end."""
        return self.returncode

    def kill(self) -> None:
        """Asks the agent to kill the process."""
        if self.returncode is None:
            end = pb.EndHost(host=self._host, incarnation=self.incarnation)
            self._agent.requests.put_nowait(pb.AgentRequest(end_host=end))

    def watch(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        """Calls `on_end` once, when the process has ended, unless `end` was called before."""
        self._on_end = on_end

    def end(self) -> None:
        """Asks the agent to kill the process. From now on nothing that still comes from it counts."""
        self._on_end = None
        self.kill()
        self._agent.forget(self._host, self)

    def ended(self, returncode: int, log_tail: str) -> None:
        """The agent reports the end of the process, or is lost itself."""
        if self.returncode is None:
            self.returncode, self._log_tail = returncode, log_tail
            if (on_end := self._on_end) is not None:
                self._on_end = None
                on_end()

    def hand_over(self, message: fd_passing.Message, segment: Any) -> None:
        """Lets the agent make a twin of a client's segment and give it to the host."""
        hand = pb.HandClient(
            host=self._host,
            incarnation=self.incarnation,
            client=message["client"],
            arena_bytes=self._agent.arena_bytes_of(segment),
        )
        self._agent.requests.put_nowait(pb.AgentRequest(hand_client=hand))

    def log_tail(self) -> str:
        """The last lines of its log, as the agent sent them."""
        return self._log_tail


class Agent:
    """One agent that has a place."""

    def __init__(
        self,
        identity: Identity,
        island: int,
        hosts: tuple[int, ...],
        streams: tuple[str, ...],
        link: FarLink,
        native: Any,
        controller_segment: Any,
    ) -> None:
        self.identity = identity
        self.name = identity.name
        self._native = native
        self._since = time.monotonic()
        self.island = island
        # Where each host receives network transfers, as `MACHINE@ADDRESS`.
        self.streams = dict(zip(hosts, streams, strict=True))
        self.link = link
        self._controller_segment = controller_segment
        self.requests: asyncio.Queue[pb.AgentRequest | None] = asyncio.Queue()
        self.logs = LogsThere(self.name, self.requests.put_nowait)
        self._hosts: dict[int, FarHost] = {}

    def arena_bytes_of(self, segment: Any) -> int:
        """The size of the arena in a client's segment."""
        return int(self._native.arena_bytes_of(segment))

    async def ready(self, timeout_s: float | None = None) -> None:
        """Returns when it can start hosts: at once, because it gets its requests when it can."""

    def launch(self, config: HostConfig, token: str, segment: Any) -> FarHost:
        """Starts a host; `segment` is its twin here."""
        host = self._hosts[config.host] = FarHost(self, config.host, config.incarnation)
        self.link.native.add_host(config.host, config.incarnation, segment, self._controller_segment)
        self.requests.put_nowait(pb.AgentRequest(start_host=start_of(config, token)))
        return host

    def forget(self, number: int, host: FarHost) -> None:
        """Takes no more records from a host."""
        if self._hosts.get(number) is host:
            del self._hosts[number]
            self.link.native.remove_host(number)

    def report(self, report: pb.AgentReport) -> None:
        """Takes in what the agent says of its hosts (TRUST-1: of its own island's only)."""
        if report.WhichOneof("report") == "log_piece":
            self.logs.answered(report.log_piece)
            return
        what = report.started if report.WhichOneof("report") == "started" else report.ended
        host = self._hosts.get(what.host)
        if host is None or host.incarnation != what.incarnation:
            return
        if isinstance(what, pb.FarHostStarted):
            host.pid = what.pid
        else:
            host.ended(what.returncode, what.log_tail[:_MOST_LOG_CHARS])

    def stats(self) -> pb_control.MachineStats:
        """See `MachineStats`."""
        link = self.link.native.stats()
        return pb_control.MachineStats(
            island=self.island,
            name=self.name,
            address=self.identity.peer,
            is_encrypted=self.identity.is_encrypted,
            bytes_out=link["bytes_out"],
            bytes_in=link["bytes_in"],
            round_trip_ns=link["round_trip_ns"],
            connected_s=time.monotonic() - self._since,
        )

    def lost(self, why: str) -> None:
        """Counts all its hosts as killed."""
        self.requests.put_nowait(None)
        self.logs.lost(why)
        for host in list(self._hosts.values()):
            host.ended(-signal.SIGKILL, f"Its machine, {self.name}, is lost: {why}.")


class Agents:
    """All agents of a cluster that listens."""

    def __init__(
        self, native: Any, topology: Topology, options: ClusterOptions, control_path: str, controller_segment: Any
    ) -> None:
        """`control_path`: the Unix socket of the controller's gRPC server for other machines."""
        self._native = native
        self.hub = native.LinkHub()
        self._controller_segment = controller_segment
        self.port = ""  # where agents join
        self._topology = topology
        self._options = options
        self._control_path = control_path
        self._by_island: dict[int, Agent] = {}
        self.loop = Loop()
        self.links = Links(self.loop, native)
        self._door = LinkDoor(self._open, self._opened, self.links)
        self._tunnels = Tunnels(self.loop)
        self._lock = threading.Lock()
        self._tunnels_of: dict[str, set[socket.socket]] = {}  # by name of the machine; guarded by _lock
        self._let_go: Callable[[socket.socket], object] = lambda connection: None
        #: Called with the island of an agent whose link is open.
        self.on_joined: Callable[[int], None] = lambda island: None

    def of(self, island: int) -> Agent | None:
        """The agent that has this place, if its link is open."""
        agent = self._by_island.get(island)
        return agent if agent is not None and agent.link.is_open else None

    def by_token(self, token: str) -> Agent:
        """The agent whose link got this secret.

        Raises:
            PermissionDeniedError: there is none.
        """
        for agent in self._by_island.values():
            if secrets.compare_digest(agent.link.token, token):
                return agent
        raise errors.PermissionDeniedError("this is no agent of this cluster, or its link has broken")

    def knows(self, token: str) -> bool:
        """Whether an agent's link got this secret."""
        return any(secrets.compare_digest(agent.link.token, token) for agent in self._by_island.values())

    def stream_of(self, host: int) -> str:
        """Where a host receives network transfers; empty while its place is free."""
        agent = self.of(self._topology.island_of(host))
        return "" if agent is None else agent.streams[host]

    # -- called by threads of the port -------------------------------------------------------------------------------

    def serve_at(self, port: Port) -> None:
        """Says what the port does for agents."""
        self.port = str(port.address)
        self._let_go = port.let_go
        self._door.serve_at(port, "link", [Role.HOST])
        port.on("control", [Role.HOST], self._serve_control)

    def _serve_control(self, connection: socket.socket, identity: Identity, hello: dict[str, Any]) -> bool:
        def forget() -> None:
            with self._lock:
                own = self._tunnels_of[identity.name]
                own.remove(connection)
                if not own:
                    del self._tunnels_of[identity.name]

        def end() -> None:
            forget()
            self._let_go(connection)

        with self._lock:
            self._tunnels_of.setdefault(identity.name, set()).add(connection)
        try:
            self._tunnels.add_to(self._control_path, connection, end)
        except OSError:  # nobody listens any more: the cluster ends
            forget()
            raise
        return True

    def _end_tunnels(self, name: str) -> None:
        """Of a machine that is lost, which may not be there to end them."""
        with self._lock:
            for connection in self._tunnels_of.get(name, ()):
                with contextlib.suppress(OSError):
                    # (`SSLSocket.shutdown` would take the TLS state away that the loop uses.)
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _open(self, identity: Identity, hello: dict[str, Any]) -> tuple[FarLink, dict[str, Any]]:
        """Gives an agent its place."""
        if any(agent.name == identity.name for agent in self._by_island.values()):
            raise errors.ConnectError(
                f"a machine called {identity.name} is in this cluster already: give this one another --name"
            )
        island = self._place_for(hello)
        hosts = self._topology.islands[island]
        there = identity.peer.rpartition(":")[0]
        streams = tuple(f"{identity.name}@{there}:{int(port)}" for port in hello["ports"])
        link = FarLink(self.hub.open_link(True, self.links.native), identity, lambda why: self.lose(agent, why))
        agent = Agent(identity, island, hosts, streams, link, self._native, self._controller_segment)
        self._by_island[island] = agent
        return link, {"island": island, "options": dataclasses.asdict(self._options)}

    def _place_for(self, hello: Mapping[str, Any]) -> int:
        """A free place that the agent's hosts fit.

        Raises:
            UnsupportedVersionError: the agent runs another release.
            ConnectError: there is no such place.
        """
        topology = self._topology
        for what, ours in (
            ("jax", topology.jax_version),
            ("jaxlib", topology.jaxlib_version),
            ("platform", topology.platform),
        ):
            if hello.get(what) != ours:
                raise errors.UnsupportedVersionError(
                    f"the agent has {what} {shown(hello.get(what))}, the cluster {ours!r}: use the same on both sides"
                )
        shape = (hello.get("hosts"), hello.get("devices_per_host"))
        wanted = (len(topology.islands[0]), topology.devices_per_host)
        ports = hello.get("ports")
        if not isinstance(ports, list) or not all(isinstance(port, int) and 0 < port < 1 << 16 for port in ports):
            raise errors.ConnectError(f"the agent's ports make no sense: {shown(ports)}")
        if shape != wanted or len(ports) != wanted[0]:
            raise errors.ConnectError(
                f"the agent brings {_number(shape[0])} hosts of {_number(shape[1])} devices, but an island of this "
                f"cluster has {wanted[0]} hosts of {wanted[1]} devices: start the agent with --hosts {wanted[0]} "
                f"--devices-per-host {wanted[1]}"
            )
        asked = hello.get("island")
        free = [number for number in range(len(topology.islands)) if number not in self._by_island]
        if asked is None and free:
            return free[0]
        if asked in free:
            return int(asked)
        taken = {number: agent.name for number, agent in self._by_island.items()}
        raise errors.ConnectError(
            f"no place is free for {'the agent' if asked is None else f'island {_number(asked)}'}: the cluster has "
            f"{len(topology.islands)} islands, taken by {taken}"
        )

    def _opened(self, link: FarLink) -> None:
        agent = next(agent for agent in self._by_island.values() if agent.link is link)
        print(f"the agent {agent.name} has joined as island {agent.island}", file=sys.stderr, flush=True)
        asyncio.get_running_loop().call_soon(self.on_joined, agent.island)

    def lose(self, agent: Agent, why: str) -> None:
        """Counts an agent and its hosts as lost. A second call does nothing."""
        if self._by_island.get(agent.island) is not agent:
            return
        print(f"the agent {agent.name} of island {agent.island} is lost: {why}", file=sys.stderr, flush=True)
        del self._by_island[agent.island]
        asyncio.get_running_loop().run_in_executor(None, agent.link.close)
        self._end_tunnels(agent.name)
        agent.lost(why)

    def stats(self) -> list[pb_control.MachineStats]:
        """What people want to know of each machine that has joined, by island."""
        return [agent.stats() for _, agent in sorted(self._by_island.items()) if agent.link.is_open]

    def called(self, machine: str) -> Agent:
        """The agent of a machine, whose link is open.

        Raises:
            ConnectError: no machine of this name has joined.
        """
        there = {agent.name: agent for agent in self._by_island.values() if agent.link.is_open}
        if machine not in there:
            raise errors.ConnectError(
                f"no machine {machine!r} has joined this cluster; there are: {', '.join(sorted(there)) or 'none'}"
            )
        return there[machine]

    def let_go(self, agent: Agent) -> None:
        """Asks an agent to leave. It is lost when its link ends."""
        agent.requests.put_nowait(pb.AgentRequest(leave={}))

    def close(self) -> None:
        """Ends all links, and their threads."""
        for agent in list(self._by_island.values()):
            agent.link.close()
        self.links.close()
        self._tunnels.close()
        self.loop.close()

    def lose_island(self, island: int, why: str) -> None:
        """Counts the agent of an island as lost."""
        if (agent := self._by_island.get(island)) is not None:
            self.lose(agent, why)


def _number(said: Any) -> str:
    """For a message: what should be a small number, and may be anything."""
    return str(said) if isinstance(said, int) and abs(said) < 1 << 31 else shown(said)


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
