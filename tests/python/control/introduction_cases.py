"""A cluster of doubles within the test's process: its controller is real, its hosts and machines are objects.

A host answers as its fields say. So a test decides what happens while islands are introduced to each other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import control_doubles
from control_clusters import SMALL

from pathways.controller.client_manager import ClientManager
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.machines import ProgramText
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
    refuses_clients: bool = False
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
            elif request.WhichOneof("what") == "attach_client":
                await ways.answers.wait()
                attached = pb.Error(type="ValueError", message="no, thanks") if ways.refuses_clients else pb.Error()
                self._world.clients.report(record, pb.HostReport(request=request.request, client_attached=attached))

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
        self.handed.append(message.get("peer", -1))

    def log_tail(self) -> str:
        return ""

    def resident_bytes(self) -> int:
        return 0


class Machine:
    """Another machine, or the controller's."""

    logs = None
    name = "m"

    def __init__(self, world: World, *, hosts: Sequence[int] = (), shares_memory: bool = False) -> None:
        """`hosts`: those that it brings when it joins."""
        self._world = world
        self.hosts = hosts
        self.shares_memory = shares_memory
        self.given_up = 0
        self.evicted: list[str] = []

    def new_segment(self, host: int) -> Any:
        return control_doubles.host_segment(host, self._world.cluster.topology.hosts, 1 << 12, 0)

    def stream_of(self, host: int, incarnation: int) -> str:
        return f"m{self.hosts[0]}@10.0.0.1:{5000 + host}" if self.hosts else f"unix:/stream-{host}"

    def clock_ahead_ns(self) -> int:
        return 0

    def cannot_start(self, why: str) -> None:
        self.given_up += 1
        self._world.agents.leave(self)

    def evict(self, process: Any, why: str) -> None:
        self.evicted.append(why)
        self._world.agents.leave(self)

    async def ready(self, timeout_s: float | None = None) -> None:
        await self._world.can_launch.wait()
        await asyncio.sleep(0)

    def hand_program(self, program: ProgramText, hosts: Sequence[int]) -> None:
        """Its hosts have nothing to do."""

    def launch(self, config: HostConfig, token: str, segments: Sequence[Any]) -> Host:
        if self.shares_memory:
            config = dataclasses.replace(
                config, segment_fds=tuple(-1 if each is None else each.fd for each in segments)
            )
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
    """The machines that join, by the first of their hosts' islands."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.machines: dict[int, Machine] = {}

    def join(self, *islands: int) -> None:
        """A machine for each of these islands."""
        for island in islands:
            self.machines[island] = self.bring(*self._world.cluster.topology.islands[island])

    def bring(self, *hosts: int) -> Machine:
        """A machine with these hosts."""
        machine = Machine(self._world, hosts=hosts)
        self._world.cluster.placement.fill(hosts, machine)
        self._world.cluster.agents.on_joined(hosts)
        return machine

    def lose(self, island: int) -> None:
        """The link of an island's machine breaks."""
        self.leave(self.machines.pop(island))

    def leave(self, machine: Machine) -> None:
        """The link of a machine breaks."""
        self._world.cluster.placement.free(machine, is_lost=True)
        for number in machine.hosts:
            process = self._world.cluster.hosts[number].process
            if isinstance(process, Host):
                process.die()


class World:
    """The cluster. Make it on a running loop. `far`: machines bring its hosts; else all are here. `here`: so many
    islands are here, machines bring the others.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        islands: int,
        hosts: int = 1,
        *,
        far: bool = False,
        here: int | None = None,
        **options: Any,
    ) -> None:
        sizes = ClusterOptions(islands, hosts, 1, **{"start_timeout_s": 20.0, **SMALL, **options})
        config = ControllerConfig(sizes, "cpu", str(folder), os.getpid(), -1, -1, "somewhere")
        self.launched: list[Host] = []
        self.can_launch = asyncio.Event()  # not set: what starts hosts is not ready
        self.can_launch.set()
        self.ways = [Ways() for _ in range(sizes.hosts)]
        filled = hosts * (0 if far else islands if here is None else here)
        self.cluster = cluster = ClusterManager(config, control_doubles, filled)
        self.agents = Agents(self)
        self.here = Machine(self, shares_memory=True)
        cluster.here = self.here  # type: ignore[assignment]
        cluster.placement.fill(range(filled), self.here)
        cluster.hosts = [cluster._absent(number) for number in range(sizes.hosts)]
        cluster.controller = control_doubles.Controller(cluster.segment, [host.segment for host in cluster.hosts])
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
        self.cluster.agents.close()
