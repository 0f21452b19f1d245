"""The gRPC services of the controller. They turn requests into calls of its managers, and errors into refusals.

TRUST-1: the secret of the caller's connection says which client makes a call, see `ClientManager.caller`. Only the
requests of `Suspend`, `Resume` and `Limit` name a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.empty_pb2 import Empty

from pathways import errors
from pathways.controller import client_limits
from pathways.controller.agent_machine import AgentMachine
from pathways.controller.agents import Agents
from pathways.controller.client_manager import ClientManager
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.logs import Logs
from pathways.controller.observations import slice_stats
from pathways.controller.records import ClientRecord, Questions
from pathways.process.children import resident_bytes
from pathways.protocol import agent_pb2 as agent_pb
from pathways.protocol import agent_pb2_grpc as agent_rpc
from pathways.protocol import control_pb2 as pb
from pathways.protocol import control_pb2_grpc as rpc
from pathways.protocol import wire
from pathways.protocol.serialization import dump
from pathways.protocol.wire import Stage

#: So many slices, and as many sets of hosts, may one client have.
MOST_OF_CLIENT = 1 << 14

_Reply = TypeVar("_Reply")
_In = TypeVar("_In")
_Out = TypeVar("_Out")
_Handler = Callable[[Any, Any, Any], Awaitable[_Reply]]


def _refusing(handler: _Handler[_Reply]) -> _Handler[_Reply]:
    """Turns a `PathwaysError` into a refusal that the client raises again as the same class."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: Any) -> _Reply:
        try:
            return await handler(self, request, context)
        except errors.PathwaysError as error:
            await wire.refuse(context, error)

    return wrapped


async def _exchange(
    incoming: AsyncIterator[_In],
    take: Callable[[_In], None],
    over: Callable[[], None],
    queue: asyncio.Queue[_Out | None],
) -> AsyncIterator[_Out]:
    """Both directions of a stream: yields the items of a queue until None, and gives `take` each incoming message.

    `over` is called when no more messages come in.
    """

    async def read() -> None:
        try:
            async for message in incoming:
                take(message)
        finally:
            over()

    reader = asyncio.ensure_future(read())
    try:
        while (item := await queue.get()) is not None:
            yield item
    finally:
        reader.cancel()


def _check_count(what: str, of_client: Collection[int]) -> None:
    """A client that asks for more and more harms only itself."""
    if len(of_client) >= MOST_OF_CLIENT:
        raise errors.ResourceExhaustedError(
            f"this client has {len(of_client)} {what}, and one client may have {MOST_OF_CLIENT}: release slices that "
            "you no longer use, and see whether a loop makes new ones"
        )


@contextlib.asynccontextmanager
async def _until_over(requests: AsyncIterator[Empty], context: Any) -> AsyncIterator[asyncio.Event]:
    """An event that is set when the caller says no more, or its call has ended in any way."""
    over = asyncio.Event()
    context.add_done_callback(lambda _: over.set())

    async def read() -> None:
        try:
            async for _ in requests:
                pass
        finally:
            over.set()

    reader = asyncio.ensure_future(read())
    try:
        yield over
    finally:
        reader.cancel()


class ControllerService(rpc.ControllerServicer):
    """The requests of clients."""

    def __init__(self, client_manager: ClientManager) -> None:
        self._client_manager = client_manager
        self._programs = client_manager.programs
        self._callbacks = client_manager.callbacks
        self._cluster = client_manager.cluster
        self._logs = Logs(self._cluster)

    def _caller(self, context: Any) -> ClientRecord:
        return self._client_manager.caller(wire.token_of(context))

    def _owner(self, context: Any, slice_id: int) -> ClientRecord:
        client = self._caller(context)
        if slice_id not in client.slices:
            raise errors.SliceError(
                f"no slice {slice_id} of this client; its slices: {sorted(client.slices) or 'none'}"
            )
        return client

    async def WatchStartup(self, request: Empty, context: Any) -> AsyncIterator[pb.StartupEvent]:  # noqa: D102
        sent = 0
        while True:
            while sent < len(self._cluster.startup):
                event = self._cluster.startup[sent]
                yield event
                sent += 1
                if event.stage in (Stage.CLUSTER_READY, Stage.FAILED) and sent == len(self._cluster.startup):
                    return
            await self._cluster.startup_events()

    @_refusing
    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:  # noqa: D102
        client = await self._client_manager.join(wire.token_of(context), request)
        return pb.JoinReply(
            client=client.number,
            topology=dump(self._cluster.topology, pb.Topology),
            host_pids=[host.process.pid for host in self._cluster.hosts],
        )

    @_refusing
    async def Leave(self, request: Empty, context: Any) -> Empty:  # noqa: D102
        self._client_manager.remove(self._caller(context).number)
        return Empty()

    @_refusing
    async def AllocateSlice(self, request: pb.AllocateSliceRequest, context: Any) -> pb.SliceBinding:  # noqa: D102
        client = self._caller(context)
        island = request.island if request.HasField("island") else None
        _check_count("slices", client.slices)
        kind = request.kind if request.HasField("kind") else None
        shape, names = tuple(request.shape), tuple(request.axis_names)
        binding = self._cluster.resources.allocate(shape, names, island, kind, tuple(request.devices))
        client.slices.add(binding.slice_id)
        reply = dump(self._cluster.numbers.bind(binding), pb.SliceBinding)
        try:
            await self._client_manager.attached(client, binding.hosts)
        except asyncio.CancelledError:  # nobody hears of the slice
            if binding.slice_id in client.slices:
                client.slices.remove(binding.slice_id)
                self._cluster.resources.release(binding.slice_id)
            raise
        return reply

    @_refusing
    async def ReleaseSlice(self, request: pb.ReleaseSliceRequest, context: Any) -> Empty:  # noqa: D102
        client = self._owner(context, request.slice_id)
        client.slices.remove(request.slice_id)
        self._cluster.resources.release(request.slice_id)
        return Empty()

    @_refusing
    async def RemapSlice(self, request: pb.RemapSliceRequest, context: Any) -> pb.SliceBinding:  # noqa: D102
        client = self._owner(context, request.slice_id)
        binding = self._cluster.resources.remap(request.slice_id, tuple(request.devices), tuple(request.shape))
        reply = dump(self._cluster.numbers.bind(binding), pb.SliceBinding)
        await self._client_manager.attached(client, binding.hosts)
        return reply

    @_refusing
    async def EndRemap(self, request: pb.EndRemapRequest, context: Any) -> Empty:  # noqa: D102
        self._owner(context, request.slice_id)
        resources = self._cluster.resources
        (resources.undo if request.is_undone else resources.settle)(request.slice_id)
        return Empty()

    async def Moves(  # noqa: D102
        self, answers: AsyncIterator[pb.MoveAnswer], context: Any
    ) -> AsyncIterator[pb.MoveRequest]:
        try:
            client = self._caller(context)
        except errors.PathwaysError as error:
            await wire.refuse(context, error)
        moves = self._client_manager.slice_moves
        requests = moves.open(client)

        def over() -> None:
            if client.moves is requests:
                moves.close(client)

        async for request in _exchange(answers, functools.partial(moves.answer, client), over, requests):
            yield request

    @_refusing
    async def Group(self, request: pb.GroupRequest, context: Any) -> pb.GroupReply:  # noqa: D102
        client = self._caller(context)
        _check_count("sets of hosts", client.groups)
        client.groups.add(group := self._cluster.numbers.group(request.hosts))
        return pb.GroupReply(group=group)

    @_refusing
    async def RegisterProgram(self, request: pb.RegisterProgramRequest, context: Any) -> pb.RegisterProgramReply:  # noqa: D102
        return pb.RegisterProgramReply(program_id=self._programs.register(self._caller(context), request))

    @_refusing
    async def RegisterComposite(  # noqa: D102
        self, request: pb.RegisterCompositeRequest, context: Any
    ) -> pb.RegisterProgramReply:
        return pb.RegisterProgramReply(program_id=self._programs.register_composite(self._caller(context), request))

    @_refusing
    async def WaitCompiled(self, request: pb.ProgramRequest, context: Any) -> Empty:  # noqa: D102
        await self._programs.wait_compiled(self._caller(context), request.program_id)
        return Empty()

    @_refusing
    async def Analyze(self, request: pb.ProgramRequest, context: Any) -> pb.AnalyzeReply:  # noqa: D102
        return pb.AnalyzeReply(hosts=await self._programs.analyze(self._caller(context), request.program_id))

    @_refusing
    async def NameVariables(self, request: pb.VariablesRequest, context: Any) -> Empty:  # noqa: D102
        self._caller(context).variables = wire.checked_variables(request)
        return Empty()

    @_refusing
    async def ForgetPrograms(self, request: pb.ForgetProgramsRequest, context: Any) -> Empty:  # noqa: D102
        self._programs.forget(self._caller(context), request.program_ids)
        return Empty()

    @_refusing
    async def Suspend(self, request: pb.SuspendRequest, context: Any) -> pb.MovedReply:  # noqa: D102
        self._client_manager.check_operator(wire.token_of(context), f"suspend client {request.client}", request.client)
        client = self._client_manager.client(request.client)
        client.stays_away = True
        try:
            return pb.MovedReply(bytes=await self._client_manager.suspension.suspend(client, request.disk))
        finally:
            client.stays_away = client.suspended

    @_refusing
    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.MovedReply:  # noqa: D102
        self._client_manager.check_operator(wire.token_of(context), f"resume client {request.client}", request.client)
        client = self._client_manager.client(request.client)
        client.stays_away = False
        return pb.MovedReply(bytes=await self._client_manager.suspension.resume(client))

    @_refusing
    async def Limit(self, request: pb.LimitRequest, context: Any) -> pb.ClientLimits:  # noqa: D102
        self._client_manager.check_operator(wire.token_of(context), f"change the limits of client {request.client}")
        return client_limits.message(self._client_manager.limit(request))

    async def Callbacks(  # noqa: D102
        self, answers: AsyncIterator[pb.CallbackPart], context: Any
    ) -> AsyncIterator[pb.CallbackPart]:
        try:
            client = self._caller(context)
        except errors.PathwaysError as error:
            await wire.refuse(context, error)
        if client.questions is not None:
            await wire.refuse(context, errors.ClusterClosedError(f"client {client.number} answers already"))
        questions = client.questions = Questions()

        def over() -> None:
            if client.questions is questions:
                self._callbacks.stop_answering(client)

        questions.put_nowait(pb.CallbackPart())  # tells the client that the stream is open
        async for question in _exchange(
            answers, functools.partial(self._callbacks.answer_host, client), over, questions
        ):
            yield question

    @_refusing
    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:  # noqa: D102
        await self._cluster.hosts_started()
        topology = self._cluster.topology
        reply = pb.StatsReply(
            topology=dump(topology, pb.Topology),
            address=self._cluster.address,
            uptime_s=time.monotonic() - self._cluster.started_at,
        )
        hosts = self._cluster.hosts[:]  # an island may open meanwhile
        counts: Sequence[pb.HostCounts | None] = [None] * len(hosts)
        if not request.brief:
            reply.clients.extend(self._client_manager.client_stats())
            reply.device_load.extend(self._cluster.resources.device_load())
            pid, counters = os.getpid(), self._cluster.controller.stats(topology.hosts)
            reply.controller.MergeFrom(pb.ControllerStats(pid=pid, resident_bytes=resident_bytes(pid), **counters))
            reply.port = self._cluster.agents.port
            reply.machines.extend(self._cluster.agents.stats())
            _, own = self._client_manager.names_seen_by(wire.token_of(context))
            reply.losses.MergeFrom(self._cluster.losses.message(with_reasons=own is None))
            owners = {number: client for client, each in self._client_manager.clients.items() for number in each.slices}
            reply.slices.extend(slice_stats(self._cluster.resources.slices, owners))
            counts = await self._client_manager.host_counts()
        drained = self._cluster.resources.drained
        for host, counted in zip(hosts, counts, strict=True):
            reply.hosts.add(
                host=host.number,
                island=topology.island_of(host.number),
                pid=host.process.pid,
                resident_bytes=host.process.resident_bytes() or (counted.resident_bytes if counted else 0),
                machine=topology.machine_of(host.number),
                machine_name=self._cluster.placement.name_of(host.number),
                devices=host.config.devices,
                counts=counted,
                restarts=max(0, host.incarnation),
                state=host.state,
                is_drained=host.number in drained,
            )
        return reply

    async def Trace(self, requests: AsyncIterator[Empty], context: Any) -> AsyncIterator[pb.TracePart]:  # noqa: D102
        try:
            async with _until_over(requests, context) as over:
                who, own = self._client_manager.names_seen_by(wire.token_of(context))
                async with contextlib.aclosing(self._client_manager.recordings.record(who, own, over)) as parts:
                    async for part in parts:
                        yield part
        except errors.PathwaysError as error:
            await wire.refuse(context, error)

    async def Profile(self, requests: AsyncIterator[Empty], context: Any) -> AsyncIterator[pb.ProfilePart]:  # noqa: D102
        try:
            async with _until_over(requests, context) as over:
                self._client_manager.check_operator(wire.token_of(context), "profile the hosts")
                who, _ = self._client_manager.names_seen_by(wire.token_of(context))
                async with contextlib.aclosing(self._client_manager.profiles.record(who, over)) as parts:
                    async for part in parts:
                        yield part
        except errors.PathwaysError as error:
            await wire.refuse(context, error)

    @_refusing
    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:  # noqa: D102
        self._client_manager.check_operator(wire.token_of(context), "drain hosts")
        return pb.DrainReply(island=await self._client_manager.draining.drain(request))

    @_refusing
    async def Undrain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:  # noqa: D102
        self._client_manager.check_operator(wire.token_of(context), "let slices lie on drained hosts again")
        return pb.DrainReply(island=self._client_manager.draining.undrain(request))

    async def Logs(self, request: pb.LogsRequest, context: Any) -> AsyncIterator[pb.LogPart]:  # noqa: D102
        try:
            self._client_manager.check_operator(wire.token_of(context), "read the logs of the cluster")
            await self._cluster.hosts_started()
            async with contextlib.aclosing(self._logs.read(request)) as parts:
                async for part in parts:
                    yield part
        except errors.PathwaysError as error:
            await wire.refuse(context, error)

    @_refusing
    async def Shutdown(self, request: Empty, context: Any) -> Empty:  # noqa: D102
        self._client_manager.check_operator(wire.token_of(context), "end the cluster")
        connection = self._client_manager.connections.of(wire.token_of(context))
        who = "an operator" if connection.client is None else f"client {connection.client.number}"
        reason = f"{who} ({connection.who}) asked it to end"
        # End the cluster after this reply, so that the caller receives it.
        asyncio.get_running_loop().call_later(0.01, self._cluster.end, reason)
        return Empty()


class HostsService(rpc.HostsServicer):
    """The hosts' sessions."""

    def __init__(self, client_manager: ClientManager) -> None:
        self._client_manager = client_manager
        self._cluster: ClusterManager = client_manager.cluster

    async def Session(  # noqa: D102
        self, reports: AsyncIterator[pb.HostReport], context: Any
    ) -> AsyncIterator[pb.HostRequest]:
        token = wire.token_of(context)
        host = self._cluster.host_with(token)
        if host is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this is no host of this cluster")
            raise AssertionError("abort raises")
        self._cluster.host_stage(host, pb.HostStage(stage=Stage.HOST_CONNECTED))

        def over() -> None:
            self._cluster.session_ended(host)
            host.requests.put_nowait(None)  # the host has closed its end of the stream, so close ours

        take = functools.partial(self._client_manager.report, host)
        async for request in _exchange(reports, take, over, host.requests):
            yield request


class AgentsService(agent_rpc.AgentsServicer):
    """The sessions of other machines' agents."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    async def _caller(self, context: Any) -> AgentMachine:
        try:
            return self._agents.by_token(wire.token_of(context))
        except errors.PathwaysError as error:
            await wire.refuse(context, error)

    async def Session(  # noqa: D102
        self, reports: AsyncIterator[agent_pb.AgentReport], context: Any
    ) -> AsyncIterator[agent_pb.AgentRequest]:
        agent = await self._caller(context)

        def over() -> None:
            agent.requests.put_nowait(None)
            # When a relay is silent, the machine that it carries may be the first one to give up.
            carried = f", while the relay {agent.link.via} carried it" if agent.link.via else ""
            self._agents.lose(agent, f"its session is over{carried}")

        async for request in _exchange(reports, agent.report, over, agent.requests):
            yield request

    async def Programs(self, request: Empty, context: Any) -> AsyncIterator[agent_pb.HandProgram]:  # noqa: D102
        agent = await self._caller(context)
        while (handed := await agent.programs.get()) is not None:
            program, hosts, incarnation = handed
            message = agent_pb.HandProgram(program=program.data, hosts=hosts, incarnation=incarnation)
            del handed, program
            yield message
            del message
