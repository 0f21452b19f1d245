"""A cluster of doubles within the test's process: its controller is real, its hosts and machines are objects.

A host answers as its fields say. So a test decides what happens while islands are introduced to each other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import types
from typing import Any

import control_doubles
from control_clusters import SMALL

from pathways.controller.client_manager import ClientManager
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.records import HostRecord
from pathways.controller.recovery import Islands
from pathways.process.config import ClusterOptions, ControllerConfig, HostConfig, dump, load_host
from pathways.protocol import control_pb2 as pb
from pathways.protocol.wire import Stage


@dataclasses.dataclass
class Ways:
    """How the hosts of one number behave."""

    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # not set: it is still starting
    answers: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # not set: it does not answer
    refuses: set[int] = dataclasses.field(default_factory=set)  # the successors of these hosts, once
    cannot_start: bool = False


class Host:
    """A host process."""

    pid = 4242

    def __init__(self, world: World, config: HostConfig) -> None:
        self.config = load_host(dump(config))
        self.returncode: int | None = None
        self.asked: list[pb.ReplacePeers] = []
        self.handed: list[int] = []
        self.segments = {host for host, fd in enumerate(config.segment_fds) if fd >= 0}
        self._world = world
        self._on_end: Any = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        record, ways = self._world.cluster.hosts[self.config.host], self._world.ways[self.config.host]
        await ways.ready.wait()
        self._world.cluster.host_stage(record, pb.HostStage(stage=Stage.HOST_READY))
        while (request := await record.requests.get()) is not None:
            if request.WhichOneof("what") == "replace_peers":
                self.asked.append(request.replace_peers)
                await ways.answers.wait()
                self._answer(record, request, ways)

    def _answer(self, record: HostRecord, request: pb.HostRequest, ways: Ways) -> None:
        refused = [
            pb.Answer(number=each.host, error=pb.Error(type="ValueError", message="no, thanks"))
            for each in request.replace_peers.successors
            if each.host in ways.refuses
        ]
        ways.refuses -= {each.number for each in refused}
        replaced = pb.PeersReplaced(refused=refused)
        self._world.clients.report(record, pb.HostReport(request=request.request, peers_replaced=replaced))

    def known(self) -> set[int]:
        """The hosts that it knows: from its configuration, or since it was told of them."""
        known = {host for host, epoch in enumerate(self.config.epochs) if epoch != -1}
        return known | {each.host for request in self.asked for each in request.successors}

    def poll(self) -> int | None:
        return self.returncode

    def watch(self, loop: asyncio.AbstractEventLoop, on_end: Any) -> None:
        self._on_end = on_end

    def die(self) -> None:
        """It ends by itself, and the controller sees it."""
        self.returncode, on_end, self._on_end = -9, self._on_end, None
        self._task.cancel()
        if on_end is not None:
            on_end()

    def kill(self) -> None:
        self.returncode = -9

    def end(self) -> None:
        self._on_end = None
        self.kill()
        self._task.cancel()

    def hand_over(self, message: Any, segment: Any) -> None:
        self.handed.append(message["peer"])

    def log_tail(self) -> str:
        return ""


class Machine:
    """What starts hosts: an agent, or the controller's own machine."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def ready(self, timeout_s: float | None = None) -> None:
        await self._world.can_launch.wait()
        await asyncio.sleep(0)

    def launch(self, config: HostConfig, token: str, segment: Any) -> Host:
        if self._world.ways[config.host].cannot_start:
            raise OSError("no room for it")
        host = Host(self._world, config)
        self._world.launched.append(host)
        return host

    def log_tail(self) -> str:
        return ""

    def end(self) -> None:
        pass


class Agents:
    """The machines of a cluster that listens."""

    hub = types.SimpleNamespace(add_group=lambda *_: None)

    def __init__(self, world: World) -> None:
        self._world = world
        self.machines: dict[int, Machine] = {}
        self.on_joined: Any = None
        self.given_up: list[int] = []

    def of(self, island: int) -> Machine | None:
        return self.machines.get(island)

    def stream_of(self, host: int) -> str:
        island = self._world.cluster.topology.island_of(host)
        return f"m{island}@10.0.0.1:{5000 + host}" if island in self.machines else ""

    def lose_island(self, island: int, why: str) -> None:
        self.given_up.append(island)
        self.lose(island)

    def join(self, *islands: int) -> None:
        for island in islands:
            self.machines[island] = Machine(self._world)
            self.on_joined(island)

    def lose(self, island: int) -> None:
        """The machine's link breaks."""
        del self.machines[island]
        for host in self._world.cluster.hosts:
            if self._world.cluster.topology.island_of(host.number) == island and isinstance(host.process, Host):
                host.process.die()


class World:
    """The cluster. Make it on a running loop. `far`: it listens, and machines bring its hosts; else all are here."""

    def __init__(self, folder: pathlib.Path, islands: int, hosts: int = 1, *, far: bool, **options: Any) -> None:
        sizes = ClusterOptions(islands, hosts, 1, **{"start_timeout_s": 20.0, **SMALL, **options})
        config = ControllerConfig(sizes, "cpu", str(folder), os.getpid(), -1, -1, "somewhere" if far else "")
        self.launched: list[Host] = []
        self.can_launch = asyncio.Event()  # not set: what starts hosts is not ready
        self.can_launch.set()
        self.ways = [Ways() for _ in range(sizes.hosts)]
        self.cluster = cluster = ClusterManager(config, control_doubles)
        cluster.segment = control_doubles.controller_segment()
        cluster._segments = [cluster.new_segment(number) for number in range(sizes.hosts)]
        cluster.controller = control_doubles.Controller(cluster.segment, cluster._segments)
        cluster.start_coordinator = lambda island, incarnation: None  # type: ignore[method-assign]
        cluster.processes = Machine(self)  # type: ignore[assignment]
        self.agents = Agents(self)
        if far:
            cluster.agents = self.agents  # type: ignore[assignment]
        self.clients = ClientManager(cluster)
        self.islands = Islands(cluster, self.clients)
        for ways in self.ways:
            ways.ready.set()
            ways.answers.set()

    def up(self) -> list[int]:
        """The hosts that are in the order."""
        return [host.number for host in self.cluster.hosts if host.state == "up"]

    async def until(self, condition: Any, what: str) -> None:
        """Waits until something is so."""
        async with asyncio.timeout(10):
            while not condition():
                assert not self.cluster.done.done(), self.cluster.failure
                await asyncio.sleep(0.001)
        assert condition(), what

    def process(self, number: int) -> Host:
        """The host of this number."""
        process = self.cluster.hosts[number].process
        assert isinstance(process, Host)
        return process

    def check_everybody_is_known(self) -> None:
        """Of any two hosts that are up, each knows the other."""
        for number in self.up():
            assert set(self.up()) <= self.process(number).known() | {number}, number

    def requests(self) -> int:
        """How many introductions the hosts have got."""
        return sum(len(host.asked) for host in self.launched)

    async def close(self) -> None:
        """Ends the cluster."""
        self.cluster.end("the test is over")
        for host in self.cluster.hosts:
            host.process.end()
        await asyncio.sleep(0)
        for connection in (self.clients.connections._listener,):
            asyncio.get_running_loop().remove_reader(connection.fileno())
            connection.close()
        os.close(self.clients.connections._pidfd)
