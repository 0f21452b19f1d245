"""The agent's process: `python -m pathways.agent.main CONFIG LOCK_FD`, started by the supervisor for `pathways agent`.

It dials the controller, opens its link, and runs the hosts that the controller asks for. When the link breaks, it kills
its hosts, because the controller counts them as lost, and dials again until it is told to end. So an agent survives the
controller: a new controller at the same address takes it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import importlib
import importlib.metadata
import json
import logging
import os
import shutil
import signal
import socket
import sys
from typing import Any

import grpc
import grpc.aio
from google.protobuf.empty_pb2 import Empty

from pathways import errors
from pathways.agent import logs
from pathways.agent.collective_tunnels import MOST_OF_ONE, CollectiveTunnels
from pathways.agent.fabric import LINK, Fabric, everywhere
from pathways.agent.fabric_watch import FabricWatch
from pathways.agent.island import IslandHosts, shape_here
from pathways.agent.relay import Relay
from pathways.agent.rendezvous import Rendezvous
from pathways.agent.ways import OpenLink, Ways
from pathways.process import environment, installation, log_lines
from pathways.process.children import ParentLost, die_with_parent, take_descriptors
from pathways.process.config import ClusterOptions
from pathways.process.host_processes import HostProcesses
from pathways.process.log_files import keep_short
from pathways.process.supervisor import report
from pathways.protocol import agent_pb2 as pb
from pathways.protocol import agent_pb2_grpc as rpc
from pathways.protocol import wire
from pathways.transport.links import Links
from pathways.transport.loop import Loop
from pathways.transport.tunnels import TunnelServer
from pathways.trust import Credentials, Port, Renewal, dial_answered, given_token, renewed_at

_log = logging.getLogger("pathways.agent.main")

RETRY_S = 1.0
NATIVE = "pathways._native"


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """What `pathways agent` tells its process. `credentials`: the file; empty: the cluster is not encrypted, and the
    token is in the environment, because other users of the machine can read a command line.
    """

    address: str
    credentials: str
    directory: str
    name: str
    hosts: int
    devices_per_host: int
    platform: str
    island: str | None
    island_hosts: int | None
    fabric: tuple[str, str] | None  # see `Fabric`
    relay: str | None  # where it listens for machines that it carries; None: it carries nobody
    via: str | None  # the address of a relay that carries it; None: the controller says
    owner_pid: int
    owner_fd: int
    report_fd: int


class Agent:
    """One machine's agent. `run` on the main thread."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._native: Any = importlib.import_module(NATIVE)
        self._credentials = None
        self._token = given_token(None, os.environ)
        name = config.name
        if config.credentials:
            own = Credentials.load(config.credentials)
            name = own.identity.name
            self._credentials = Renewal(own, lambda old: renewed_at(config.address, old), config.credentials)
        self._loop = Loop()
        self._ports = [_reserved_port() for _ in range(config.hosts)]
        self._fabric = Fabric(*config.fabric) if config.fabric else None
        self._island_port = self._watch = self._collectives = None
        if self._fabric is not None and self._credentials is not None:
            if self._fabric == LINK:
                take_descriptors()
                self._island_port = Port(f"{everywhere()}:0", self._credentials, most_of_one=MOST_OF_ONE)
                self._collectives = CollectiveTunnels(config.directory, self._credentials, self._island_port)
            else:
                self._island_port = Port(f"{self._fabric.address}:0", self._credentials)
            self._watch = FabricWatch(self._loop, self._fabric, self._credentials, self._island_port)
        self._rendezvous = Rendezvous(self._loop, config.directory, name, self._credentials, self._island_port)
        if self._island_port is not None:
            self._island_port.start()
        self._name = name
        self._ways = Ways(self._dial, self._credentials, config.via, config.relay is not None)
        self._relay: Relay | None = None
        self._end: asyncio.Event
        self._ever_joined = False

    async def run(self) -> int:
        """Serves controllers until it is told to end. Returns the exit status."""
        loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        loop.add_reader(self._config.owner_fd, self._owner_ended)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._end.set)
        keeping = asyncio.create_task(keep_short(self._config.directory))
        while not self._end.is_set():
            waits_s = RETRY_S
            try:
                if await self._serve():
                    waits_s = 0.0
            except Exception as error:
                # Who starts an agent must hear at once why it cannot join. Later the controller may be away for a
                # while, or start again; whatever went wrong, another try may go well.
                if not self._ever_joined:
                    self._tell("error", message=f"{type(error).__name__}: {error}")
                    return 1
                if not isinstance(error, errors.PathwaysError | OSError):
                    _log.exception("a fault of this code")
                _log.warning("no controller: %s", error)
            if not self._end.is_set():
                await _either(self._end.wait(), asyncio.sleep(waits_s))
        keeping.cancel()
        if self._island_port is not None:
            self._island_port.close()
        if self._relay is not None:
            self._relay.close()
        return 0

    def _owner_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._config.owner_fd)
        self._end.set()

    def _tell(self, event: str, **fields: Any) -> None:
        report(self._config.report_fd, event, **fields)

    def _dial(self, purpose: str, **fields: Any) -> tuple[socket.socket, dict[str, Any]]:
        if self._credentials is None:
            fields |= {"token": self._token, "name": self._config.name}
        return dial_answered(self._config.address, self._credentials, purpose, **fields)

    async def _serve(self) -> bool:
        """Serves one controller until the link to it breaks. Whether the next try should be at once: see `Ways`."""
        loop = asyncio.get_running_loop()
        config = self._config
        reports: asyncio.Queue[pb.AgentReport | None] = asyncio.Queue()
        if config.relay is not None and self._relay is None and self._credentials is not None:
            self._relay = Relay(self._loop, self._native, config.relay, self._credentials, self._name, self._dial)
        opened = await asyncio.to_thread(self._open_link)
        welcome = opened.welcome
        hub = self._native.LinkHub()
        links = Links(self._loop, self._native)
        link, on_wire = opened.join(self._native, hub, links.native)
        broken: asyncio.Future[str] = loop.create_future()

        def break_link(why: str) -> None:
            if not broken.done():
                broken.set_result(why)

        options = ClusterOptions(**welcome["options"])
        processes = HostProcesses(
            "pathways.host.main:main",
            options.host_modules,
            environment.host_environment(
                shape_here(options, config.hosts, config.devices_per_host), config.platform, 0, os.environ
            ),
            os.path.join(config.directory, "logs", "fork-server.log"),
        )
        path = os.path.join(config.directory, "control.sock")
        tunnels = TunnelServer(self._loop, path, lambda: self._dial("control")[0])
        hosts = IslandHosts(
            config.directory,
            config.platform,
            options,
            welcome["hosts"],
            welcome["island_hosts"],
            config.devices_per_host,
            self._native,
            link,
            processes,
            reports.put_nowait,
            [f"{reserved.getsockname()[1]}#{welcome['secret']}" for reserved in self._ports],
            config.credentials,
            self._fabric,
            self._rendezvous,
            self._collectives,
        )

        def look_for_breaks() -> None:
            for _, why in on_wire.take_broken():
                loop.call_soon_threadsafe(break_link, why)

        carried = links.add(
            on_wire,
            opened.sending,
            opened.receiving,
            lambda why: loop.call_soon_threadsafe(break_link, why),
            on_delivered=look_for_breaks if opened.relay else None,
        )
        watching = [asyncio.ensure_future(hosts.watch_pulses())]
        if self._relay is not None:
            watching.append(asyncio.ensure_future(self._relay.serve()))
        try:
            processes.start()
            relay = ""
            if self._relay is not None:
                await self._relay.opened()
                relay = self._relay.address
            self._ever_joined = True
            where = f" over the relay {opened.relay}" if opened.relay else ""
            _log.info("has joined island %s%s, with the hosts %s", welcome["island_name"], where, welcome["hosts"])
            self._tell("joined", island=welcome["island"], name=welcome["island_name"], relay=relay, via=opened.relay)
            session = asyncio.ensure_future(self._converse(f"unix:{path}", welcome["session"], hosts, reports))
            await _either(self._end.wait(), _result(broken), session)
            _log.warning("the link is over: %s", broken.result() if broken.done() else "told to end")
        finally:
            for task in watching:
                task.cancel()
            if self._watch is not None:
                self._watch.stop()
            hosts.end()
            processes.end()
            tunnels.close()
            os.unlink(path)
            await asyncio.to_thread(carried.close)
            link.close()
            links.close()
        return self._ways.broke(opened)

    def _open_link(self) -> OpenLink:
        """A link to the controller."""
        config = self._config
        fabric = "" if self._island_port is None else self._island_port.address.endpoint
        if self._collectives is not None and self._island_port is not None:
            fabric = f"{LINK}:{self._island_port.address.port}"
        return self._ways.open(
            hosts=config.hosts,
            devices_per_host=config.devices_per_host,
            platform=config.platform,
            jax=importlib.metadata.version("jax"),
            jaxlib=importlib.metadata.version("jaxlib"),
            ports=[reserved.getsockname()[1] for reserved in self._ports],
            island=config.island,
            island_hosts=config.island_hosts,
            fabric=fabric,
        )

    async def _converse(
        self, address: str, token: str, hosts: IslandHosts, reports: asyncio.Queue[pb.AgentReport | None]
    ) -> None:
        """Does what the controller asks for, and passes programs on, until the session ends."""

        async def outgoing() -> Any:
            while (report := await reports.get()) is not None:
                yield report

        async with grpc.aio.insecure_channel(address, options=wire.LINKED_OPTIONS) as channel:
            stub, metadata = rpc.AgentsStub(channel), wire.bearer(token)

            async def pass_programs_on() -> None:
                async for handed in stub.Programs(Empty(), metadata=metadata):
                    hosts.hand_program(handed)

            async def obey() -> None:
                async for request in stub.Session(outgoing(), metadata=metadata):
                    what = request.WhichOneof("request")
                    if what == "start_host":
                        await hosts.start(request.start_host)
                    elif what == "end_host":
                        hosts.end_host(request.end_host.host, request.end_host.incarnation)
                    elif what == "hand_client":
                        hosts.hand_client(request.hand_client)
                    elif what == "read_log":
                        reports.put_nowait(logs.answer(self._config.directory, request.read_log))
                    elif what == "neighbours":
                        self._rendezvous.set_neighbours(request.neighbours)
                        if self._collectives is not None:
                            self._collectives.set_neighbours(request.neighbours)
                        if self._watch is not None:
                            self._watch.watch(request.neighbours, reports.put_nowait)
                    elif what == "leave":
                        self._tell("left", why=request.leave.why)
                        self._end.set()
                        return

            try:
                await _either(obey(), pass_programs_on())
            except grpc.RpcError as error:
                _log.warning("the session with the controller broke: %s", error)


def _reserved_port() -> socket.socket:
    """A port of this machine that stays reserved for a host: gRPC shares it, and nobody else gets it."""
    reserved = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("", 0))
    return reserved


async def _result(future: asyncio.Future[str]) -> str:
    return await asyncio.shield(future)


async def _either(*awaitables: Any) -> None:
    """Waits until one is done, and cancels the others. An exception of the first one is raised."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


def main() -> None:
    """Entry of the process."""
    config = AgentConfig(**json.loads(sys.argv[1]))
    log_lines.begin(f"agent {config.name}")
    faulthandler.register(signal.SIGUSR1)
    for fd in (config.owner_fd, config.report_fd, int(sys.argv[2])):
        os.set_inheritable(fd, False)
    with contextlib.suppress(ParentLost):
        die_with_parent(os.getppid(), signal.SIGTERM)  # the supervisor: it ends first only if somebody kills it
    supervisor = os.getppid()
    _log.info("begins: pathways %s, process %d, for %s", installation.version(), os.getpid(), config.address)
    status = asyncio.run(Agent(config).run())
    _log.info("ends with status %d", status)
    if os.getppid() != supervisor:
        shutil.rmtree(config.directory, ignore_errors=True)
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
