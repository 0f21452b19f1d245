"""Machines that a cluster cannot tell from real ones.

One process stands for all machines of `benchmarks.scale.agents`. Each machine has a certificate, a link of two
connections, a tunnel for gRPC, the session of its agent, and the sessions of its hosts, as pathways/agent and
pathways/host have them. What is modelled: hosts are no processes, their devices compute nothing (`ModelledHost`), and
programs are planned, but not compiled. One event loop serves all, because the machines share the cores with the
controller that is measured. One more thread serves their sockets (pathways/transport).

Of relays the link to the controller is real, and what goes over it; what goes on from a relay to a machine that it
carries goes through memory, because both are in this process.

It answers "prepare", which trades a token for the certificates; "dial", after which the machines join; "stats".
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.empty_pb2 import Empty

from pathways import _native, errors
from pathways.agent.island import config_of
from pathways.agent.ways import OpenLink, Ways
from pathways.plan.binding import BoundProgram, HostPlan, host_plan
from pathways.plan.memory_profile import Profile, ProgramMemory, sizes_of
from pathways.process.config import ClusterOptions, HostConfig
from pathways.protocol import agent_pb2 as pb_agent
from pathways.protocol import agent_pb2_grpc as rpc_agent
from pathways.protocol import control_pb2 as pb
from pathways.protocol import control_pb2_grpc as rpc
from pathways.protocol import wire
from pathways.protocol.serialization import dump, load_program
from pathways.transport.connection import Connection, Pair, delivering
from pathways.transport.loop import Loop
from pathways.transport.tunnels import TunnelServer
from pathways.trust import Credentials, dial_answered, join

#: As pathways/agent: a link says something so often; an agent dials again after so long; the ring to other machines.
_HEARTBEAT_S, _RETRY_S, _LINK_RING_BYTES = 0.5, 1.0, 1 << 20
_DEVICE_BYTES = 1 << 30
_PORT = 9  # where the hosts would receive network transfers: the machines have none
_BUFFER = memoryview(bytearray(1 << 20))  # what a link collects is sent before the next one collects


class Programs:
    """What the hosts of all machines make of a program. It is read once, because it is the same for all of them."""

    def __init__(self) -> None:
        self._number = -1
        self._bound: BoundProgram
        #: For devices from 0 on; by the place of a host on its machine, and whether it is the program's first host.
        self._memory: dict[tuple[int, bool], ProgramMemory] = {}

    def bound(self, request: pb.StoreProgram, config: HostConfig) -> BoundProgram:
        """The program on the cluster's devices."""
        if request.program_id != self._number:  # all hosts ask for it before the next one
            bindings = tuple(tuple(binding.devices) for binding in request.bindings)
            program = load_program(request.program)
            self._bound = BoundProgram(program, bindings, len(config.devices), dict(request.islands))
            self._number, self._memory = request.program_id, {}
        return self._bound

    def memory(self, profile: Profile, plan: HostPlan, config: HostConfig) -> ProgramMemory:
        """What a run of the program takes on a host. The programs of the bench do the same on each machine, so it is
        computed for one of them: on a real cluster each host computes its own, on its own cores. Only the program's
        first host tells the results.
        """
        key = config.rank, config.host == self._bound.hosts()[0]
        if key not in self._memory:
            self._memory[key] = _moved(profile.memory(plan, [0] * len(plan.launches)), -config.devices[0])
        return _moved(self._memory[key], config.devices[0])


def _moved(memory: ProgramMemory, by: int) -> ProgramMemory:
    """The same on other devices."""
    devices = tuple(dataclasses.replace(need, device=need.device + by) for need in memory.devices)
    return dataclasses.replace(memory, devices=devices)


class Host:
    """A host of a modelled machine: the native half, and its session with the controller."""

    def __init__(self, config: HostConfig, native: _native.ModelledHost, programs: Programs) -> None:
        self.config = config
        self.native = native
        self._programs = programs
        self._twins: dict[int, asyncio.Future[_native.Segment]] = {}
        self._reports: asyncio.Queue[pb.HostReport] = asyncio.Queue()

    def twin(self, client: int) -> asyncio.Future[_native.Segment]:
        """The twin of a client's memory, which the agent makes."""
        if client not in self._twins:
            self._twins[client] = asyncio.get_running_loop().create_future()
        return self._twins[client]

    async def converse(self, path: str, token: str) -> None:
        """Says that the host is ready, and does what the controller asks for until it says to stop."""
        for stage, device_bytes in ((wire.Stage.HOST_JOINED, 0), (wire.Stage.HOST_READY, _DEVICE_BYTES)):
            self._report(stage=pb.HostStage(stage=stage, device_bytes=device_bytes))
        async with grpc.aio.insecure_channel(f"unix:{path}", options=wire.LINKED_OPTIONS) as channel:
            session = rpc.HostsStub(channel).Session(
                _outgoing(self._reports), wait_for_ready=True, metadata=wire.bearer(token)
            )
            async for request in session:
                match request.WhichOneof("what"):
                    case "stop":
                        return
                    case "attach_client":
                        answer = await self._attach_client(request.attach_client)
                    case "replace_peers":
                        answer = self._replace_peers(request.replace_peers)
                    case "report_stats":
                        answer = pb.HostReport(stats=pb.HostCounts())
                    case "trace":
                        answer = pb.HostReport(traced=pb.TracePart(host=self.config.host, remark="it is modelled"))
                    case what:
                        raise RuntimeError(f"a modelled host does not {what}")
                answer.request = request.request
                self._reports.put_nowait(answer)

    def _report(self, **what: Any) -> None:
        self._reports.put_nowait(pb.HostReport(**what))

    async def _attach_client(self, request: pb.AttachClient) -> pb.HostReport:
        twin = await self.twin(request.client)
        self.native.attach_client(request.client, twin, request.futures)
        return pb.HostReport(client_attached=pb.Error())

    def _replace_peers(self, request: pb.ReplacePeers) -> pb.HostReport:
        for each in request.successors:
            self.native.open_peer(each.host, each.epoch, each.loss)
        return pb.HostReport(peers_replaced=pb.PeersReplaced())

    def store_program(self, request: pb.StoreProgram) -> None:
        """Plans a program, and says so."""
        number, host = request.program_id, self.config.host
        bound = self._programs.bound(request, self.config)
        plan = host_plan(bound, host, True)
        profile = Profile(bound, host, receives_on_host=True)
        memory = dump(self._programs.memory(profile, plan, self.config), pb.ProgramMemory)
        sizes = sizes_of(plan, profile, [0] * len(plan.launches))
        self.native.add_plan(number, plan.block, request.client, *sizes)
        self._report(program_compiled=pb.ProgramCompiled(program_id=number, memory=memory))
        self._report(program_stored=pb.Answer(number=number))


class Island:
    """The hosts of a machine under one controller: as pathways/agent/island.py, without processes."""

    def __init__(
        self,
        path: str,
        options: ClusterOptions,
        here: Sequence[int],
        island: Sequence[int],
        devices: int,
        link: _native.MachineLink,
        programs: Programs,
        report: Callable[..., None],
    ) -> None:
        self._path = path
        self._options = options
        self._here = here
        self._island = island
        self._devices = devices  # of each host
        self._link = link
        self._programs = programs
        self._report = report
        self._controller = _native.controller_segment()
        self._segments: dict[int, _native.Segment] = {}
        self._incarnation = -1
        self._hosts: dict[int, tuple[Host, asyncio.Task[None]]] = {}

    def start(self, request: pb_agent.StartHost) -> None:
        """Starts a host. The first one of an incarnation takes the place of the whole last incarnation."""
        options = self._options
        config = config_of(request, options, "cpu", self._here, self._island, self._devices)
        if config.incarnation != self._incarnation:
            self.end()
            self._incarnation = config.incarnation
            self._segments = {
                host: _native.host_segment(
                    host,
                    self._here[-1] + 1 - self._here[0],
                    options.host_ring_bytes,
                    options.host_arena_bytes,
                    link_ring_bytes=_LINK_RING_BYTES,
                    first_peer=self._here[0],
                )
                for host in self._here
            }
        self._link.add_host(config.host, config.incarnation, self._segments[config.host], self._controller)
        epochs = (*config.epochs, *[-1] * (options.room - len(config.epochs)))
        native = _native.ModelledHost(
            config.host, len(config.devices), _DEVICE_BYTES, self._segments, self._controller, epochs
        )
        host = Host(config, native, self._programs)
        task = asyncio.get_running_loop().create_task(self._run(host, request.token))
        self._hosts[config.host] = (host, task)
        self._report(started=pb_agent.FarHostStarted(host=config.host, incarnation=config.incarnation, pid=os.getpid()))

    async def _run(self, host: Host, token: str) -> None:
        code, text = 0, ""
        try:
            await host.converse(self._path, token)
        except Exception as error:  # as the end of a host process, which the agent reports
            code, text = 1, f"{type(error).__name__}: {error}"
        ended = pb_agent.FarHostEnded(
            host=host.config.host, incarnation=host.config.incarnation, returncode=code, log_tail=text
        )
        self._report(ended=ended)

    def end_host(self, number: int, incarnation: int) -> None:
        """Ends a host, if this incarnation of it is there."""
        if number in self._hosts and self._hosts[number][0].config.incarnation == incarnation:
            _, task = self._hosts.pop(number)
            task.cancel()
            self._link.remove_host(number)

    def hand_client(self, request: pb_agent.HandClient) -> None:
        """Gives a host a twin of a client's memory, if this incarnation of the host is there."""
        host, _ = self._hosts.get(request.host, (None, None))
        if host is not None and host.config.incarnation == request.incarnation:
            host.twin(request.client).set_result(self._link.twin_client(request.client, request.arena_bytes))

    def hand_program(self, handed: pb_agent.HandProgram) -> None:
        """Gives a program to those hosts of this incarnation that are there."""
        request = pb.StoreProgram.FromString(handed.program)
        for number in handed.hosts:
            host, _ = self._hosts.get(number, (None, None))
            if host is not None and host.config.incarnation == handed.incarnation:
                host.store_program(request)

    def step(self) -> None:
        """Lets the hosts do what has come for them."""
        for host, _ in self._hosts.values():
            host.native.step()

    def launches(self) -> int:
        """How many computations its hosts have launched."""
        return sum(host.native.launches for host, _ in self._hosts.values())

    def end(self) -> None:
        """Ends all hosts."""
        for number, (host, _) in list(self._hosts.items()):
            self.end_host(number, host.config.incarnation)


@dataclasses.dataclass(frozen=True)
class Site:
    """What all machines have in common."""

    address: str
    directory: str
    hosts: int
    devices_per_host: int
    programs: Programs
    sockets: Loop


class Machine:
    """One modelled machine: what an agent's process does, see pathways/agent/main.py."""

    def __init__(self, site: Site, name: str, credentials: Credentials) -> None:
        self._site = site
        self._name = name
        self._dial = functools.partial(dial_answered, site.address, credentials)
        self._ways = Ways(self._dial, None, None, True)
        #: The relay that it is, and that which carries it.
        self.relay: ModelledRelay | None = None
        self.via: ModelledRelay | None = None
        self._path = os.path.join(site.directory, f"{name}.sock")
        self._island: Island | None = None
        self.begun_again: list[str] = []  # why, each time

    def launches(self) -> int:
        """See `Island.launches`."""
        return 0 if self._island is None else self._island.launches()

    def becomes_relay(self) -> ModelledRelay:
        """Makes it a relay."""
        self.relay = ModelledRelay(self._name, self._dial, self._site.sockets)
        return self.relay

    def _open(self) -> OpenLink:
        hello: dict[str, Any] = {
            "hosts": self._site.hosts,
            "devices_per_host": self._site.devices_per_host,
            "platform": "cpu",
            "jax": importlib.metadata.version("jax"),
            "jaxlib": importlib.metadata.version("jaxlib"),
            "ports": [_PORT] * self._site.hosts,
            "island": None,
        }
        if self.via is None:
            return self._ways.open(**hello)
        sending, welcome = self._dial("link-up", via=self.via.name, **hello)
        self.via.expect(welcome["carried"][0])
        receiving, _ = self._dial("link-down", session=welcome["session"])
        return OpenLink(welcome, sending, receiving, self.via.name)

    async def run(self) -> None:
        """Joins, and joins again when its link has broken."""
        while True:
            try:
                why = await self._serve()
            except (OSError, errors.PathwaysError, grpc.RpcError) as error:
                why = f"{type(error).__name__}: {error}"
            self.begun_again.append(why)
            await asyncio.sleep(_RETRY_S)

    async def _serve(self) -> str:
        """Serves one controller until the link breaks; returns why it did."""
        async with contextlib.AsyncExitStack() as stack:
            opened = await asyncio.to_thread(self._open)
            welcome = opened.welcome
            stack.callback(opened.sending.close)
            stack.callback(opened.receiving.close)
            reports: asyncio.Queue[pb_agent.AgentReport] = asyncio.Queue()
            hub = _native.LinkHub()
            native, on_wire = opened.join(_native, hub, None)
            stack.callback(native.close)
            stack.callback(on_wire.close)
            island = self._island = Island(
                self._path,
                ClusterOptions(**welcome["options"]),
                welcome["hosts"],
                welcome["island_hosts"],
                self._site.devices_per_host,
                native,
                self._site.programs,
                lambda **what: reports.put_nowait(pb_agent.AgentReport(**what)),
            )
            stack.callback(island.end)
            link: _LinkEnd | _Branch
            if self.via is None:
                link = _LinkEnd(on_wire, self._site.sockets, opened.sending, opened.receiving, island.step)
            else:
                link = self.via.add(welcome["carried"][0], on_wire, island.step)
            stack.callback(link.close)
            beats = stack.enter_context(_task(link.beat()))
            if self.relay is not None:
                await self.relay.open(stack)
            tunnels = TunnelServer(self._site.sockets, self._path, lambda: self._dial("control")[0])
            stack.callback(os.unlink, self._path)
            stack.callback(tunnels.close)
            session = stack.enter_context(_task(self._converse(welcome["session"], island, reports)))
            done, _ = await asyncio.wait((session, link.broken, beats), return_when=asyncio.FIRST_COMPLETED)
            first = done.pop()
            if first is session:
                return f"the session is over: {first.exception() or 'the controller ended it'}"
            return str(first.exception() or first.result())

    async def _converse(self, token: str, island: Island, reports: asyncio.Queue[pb_agent.AgentReport]) -> None:
        async with grpc.aio.insecure_channel(f"unix:{self._path}", options=wire.LINKED_OPTIONS) as channel:
            stub, metadata = rpc_agent.AgentsStub(channel), wire.bearer(token)

            async def pass_programs_on() -> None:
                async for handed in stub.Programs(Empty(), wait_for_ready=True, metadata=metadata):
                    island.hand_program(handed)

            with _task(pass_programs_on()):
                async for request in stub.Session(_outgoing(reports), wait_for_ready=True, metadata=metadata):
                    what = request.WhichOneof("request")
                    if what == "start_host":
                        island.start(request.start_host)
                    elif what == "end_host":
                        island.end_host(request.end_host.host, request.end_host.incarnation)
                    elif what == "hand_client":
                        island.hand_client(request.hand_client)
                    elif what == "read_log":
                        piece = pb_agent.LogPiece(request=request.read_log.request, is_missing=True)
                        reports.put_nowait(pb_agent.AgentReport(log_piece=piece))
                    elif what == "leave":
                        return


@contextlib.contextmanager
def _task(work: Coroutine[Any, Any, Any]) -> Iterator[asyncio.Task[Any]]:
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield task
    finally:
        task.cancel()


class _LinkEnd:
    """A machine's end of its link. What arrives is delivered, the hosts do it, and what they say goes out at once."""

    def __init__(
        self,
        link: _native.Link,
        sockets: Loop,
        sending: socket.socket,
        receiving: socket.socket,
        step: Callable[[], None],
    ) -> None:
        self._link = link
        self._step = step
        loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[str] = loop.create_future()  # why
        self._ends = Pair(lambda why: loop.call_soon_threadsafe(self.broken.set_result, why))

        def deliver(data: memoryview) -> None:
            link.deliver(data)
            loop.call_soon_threadsafe(self._work)

        self._out = Connection(sockets, sending, self._ends.ended)
        self._ends.start(
            self._out, Connection(sockets, receiving, self._ends.ended, parse=delivering(sockets, deliver))
        )

    def close(self) -> None:
        """Ends it."""
        self._ends.close()

    async def beat(self) -> None:
        """Works also when nothing arrives: a link that says nothing is taken for broken."""
        while True:
            self._work()
            await asyncio.sleep(_HEARTBEAT_S)

    def _work(self) -> None:
        self._step()
        while not self._out.kept_bytes and (count := self._link.collect(_BUFFER)):
            self._out.send(_BUFFER[:count])


class _Branch:
    """The same of a machine that a relay carries."""

    def __init__(self, branch: _native.RelayLink, end: _native.Carrier, step: Callable[[], None]) -> None:
        self._branch, self._end, self._step = branch, end, step
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # of its relay, which is not lost

    def close(self) -> None:
        """Ends it."""
        self._branch.close()

    async def beat(self) -> None:
        """Its relay does it."""
        await asyncio.get_running_loop().create_future()

    def work(self) -> None:
        """Takes what its relay has for it, and says what it has to say."""
        while count := self._branch.collect(_BUFFER):
            self._end.deliver(_BUFFER[:count])
        self._step()
        while count := self._end.collect(_BUFFER):
            self._branch.deliver(_BUFFER[:count])


class ModelledRelay:
    """What is modelled of a relay: the trunk, as `pathways/agent/relay.py` has it."""

    def __init__(self, name: str, dial: Callable[..., tuple[socket.socket, dict[str, Any]]], sockets: Loop) -> None:
        self.name = name
        self._dial, self._sockets = dial, sockets
        self._hub = _native.RelayHub()
        self._expected: dict[int, _native.RelayLink] = {}
        self._branches: dict[int, _Branch] = {}
        self.is_open = asyncio.Event()

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Opens the trunk, which ends with the stack."""
        sending, welcome = await asyncio.to_thread(self._dial, "trunk-up", port=_PORT)
        receiving, _ = await asyncio.to_thread(self._dial, "trunk-down", session=welcome["session"])
        trunk = _LinkEnd(self._hub.open_trunk(), self._sockets, sending, receiving, self._work)
        for close in (sending.close, receiving.close, trunk.close):
            stack.callback(close)
        stack.enter_context(_task(trunk.beat()))
        self.is_open.set()

    def expect(self, number: int) -> None:
        """A machine is about to come. The controller sends for it soon."""
        self._expected[number] = self._hub.open_branch(number)

    def add(self, number: int, end: _native.Carrier, step: Callable[[], None]) -> _Branch:
        """Carries a machine."""
        self._branches[number] = _Branch(self._expected.pop(number), end, step)
        return self._branches[number]

    def _work(self) -> None:
        for branch in self._branches.values():
            branch.work()


async def _outgoing(reports: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while True:
        yield await reports.get()


class Machines:
    """All machines of this process, on the event loop of a thread. The methods are called by the main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._sockets = Loop()
        self._directory = tempfile.TemporaryDirectory(prefix="pathways-machines-")
        self._machines: list[Machine] = []
        self._tasks: list[Any] = []
        threading.Thread(target=self._loop.run_forever, name="machines", daemon=True).start()

    def prepare(self, address: str, token: str, count: int, hosts: int, devices_per_host: int) -> None:
        """Gets a certificate for each machine."""
        site = Site(address, self._directory.name, hosts, devices_per_host, Programs(), self._sockets)
        for number in range(count):
            name = f"modelled{number}"
            self._machines.append(Machine(site, name, join(address, token, name)))

    def dial(self, relays: int = 0) -> float:
        """Lets all machines dial at once. Returns the time of that (`time.monotonic`). The first `relays` of them carry
        the others, which dial when these have joined.
        """
        begin = time.monotonic()
        carriers = [machine.becomes_relay() for machine in self._machines[:relays]]
        for number, machine in enumerate(self._machines):
            if relays and number == relays:
                for relay in carriers:
                    asyncio.run_coroutine_threadsafe(relay.is_open.wait(), self._loop).result()
            if relays and number >= relays:
                machine.via = carriers[number % relays]
            self._tasks.append(asyncio.run_coroutine_threadsafe(machine.run(), self._loop))
        return begin

    def stats(self) -> dict[str, Any]:
        """What became of the machines: why some joined again, and how many computations their hosts launched."""
        for task in self._tasks:
            if task.done():
                task.result()  # a fault of a modelled machine
        return {
            "begun_again": [why for machine in self._machines for why in machine.begun_again],
            "launches": sum(machine.launches() for machine in self._machines),
        }

    def stop(self) -> None:
        """Ends them: with this process."""
        self._directory.cleanup()
