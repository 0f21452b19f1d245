"""Drains hosts without losing a buffer: they take no new slices, and the clients move those that lie there elsewhere.

What is drained is a machine, an island or a host. A machine leaves the cluster when nothing lies on it any more. The
hosts of an island, or a single host, stay: they take no slices until somebody lets them again (`undrain`), also when
they have been started again meanwhile. Several may drain the same hosts at a time: what one of them has drained stays
so when another one gives up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterable, Mapping

from pathways import errors
from pathways.controller.agent_machine import AgentMachine
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.host_requests import HostRequests
from pathways.controller.records import ClientRecord
from pathways.controller.slice_moves import SliceMoves
from pathways.protocol import control_pb2 as pb

#: Seconds between two looks whether the slices have gone.
LOOK_S = 0.05
#: Seconds until a slice that could not move is tried again: its client may have released memory, or moved it itself.
AGAIN_S = 2.0
#: A host has at least so many seconds to end what it does, when all slices have gone.
IDLE_S = 5.0
#: What a host does, in its statistics and for people.
_WORK = {"live_runs": "runs", "waiting": "steps that wait", "tasks": "tasks of checkpoints", "objects": "buffers"}
#: A machine that was told to leave does so within this time, in seconds; else it counts as lost.
LEAVE_S = 10.0


@dataclasses.dataclass(frozen=True)
class _Target:
    """What is drained: its name for people, its hosts, their island, and the machine that is to leave."""

    name: str
    hosts: tuple[int, ...]
    island: int
    machine: AgentMachine | None = None


class Draining:
    """Owned by the controller's event loop thread."""

    def __init__(
        self,
        cluster: ClusterManager,
        clients: Mapping[int, ClientRecord],
        requests: HostRequests,
        moves: SliceMoves,
    ) -> None:
        self._cluster = cluster
        self._requests = requests
        self._clients = clients
        self._moves = moves
        self._trying: dict[int, int] = {}  # by host that is not drained yet: how many drain it now

    async def drain(self, request: pb.DrainRequest) -> int:
        """Drains what the request names, and returns the number of its island.

        Raises:
            ConnectError: there is no such machine, island or host.
            SliceError: slices still lie there after the time, and the message names them, their clients, and why they
                have not moved; or somebody has let slices lie there meanwhile. This call drains nothing then.
            OptionError: the timeout is no number of seconds.
        """
        if not 0 <= request.timeout_s < math.inf:  # NaN, too
            raise errors.OptionError(f"drain expects timeout= seconds, 0 or more, got {request.timeout_s:g}")
        target = self._target(request)
        resources = self._cluster.resources
        before = resources.drained - self._trying.keys()
        for host in set(target.hosts) - before:
            self._trying[host] = self._trying.get(host, 0) + 1
        resources.set_drained(target.hosts, True)
        try:
            deadline = asyncio.get_running_loop().time() + request.timeout_s
            left = await self._move_all(target.hosts, deadline)
            if left and not request.force:
                raise errors.SliceError(
                    f"{target.name} has still {_named(left)} after {request.timeout_s:g} s. Make room elsewhere, move "
                    "them (cluster.remap) or close their clients, and drain again; force loses what lies there"
                )
            await self._wait_idle(target, deadline, request.force)
            if not resources.drained.issuperset(target.hosts):
                raise errors.SliceError(f"somebody has let slices lie on {target.name} again meanwhile; drain again")
        except BaseException:
            for host in self._trying.keys() & set(target.hosts):
                self._trying[host] -= 1
                if self._trying[host] == 0:
                    del self._trying[host]
                    resources.set_drained([host], False)
            raise
        for host in target.hosts:
            self._trying.pop(host, None)
        if target.machine is not None:
            await self._let_go(target.machine)
            # Whoever takes the place next is another machine; but what was drained by its number stays so.
            resources.set_drained(set(target.hosts) - before, False)
        return target.island

    def undrain(self, request: pb.DrainRequest) -> int:
        """Lets slices lie on drained hosts again; returns the number of their island.

        Raises:
            ConnectError: there is no such machine, island or host.
        """
        target = self._target(request)
        self._cluster.resources.set_drained(target.hosts, False)
        return target.island

    def _target(self, request: pb.DrainRequest) -> _Target:
        topology = self._cluster.topology
        what = request.WhichOneof("what")
        if what == "host":
            if not 0 <= request.host < topology.hosts:
                raise errors.ConnectError(f"no host {request.host}: the cluster has {topology.say_hosts()}")
            return _Target(f"host {request.host}", (request.host,), topology.island_of(request.host))
        if what == "island":
            if not 0 <= request.island < len(topology.islands):
                raise errors.ConnectError(f"no island {request.island}: the cluster has {topology.say_islands()}")
            return _Target(f"island {request.island}", topology.islands[request.island], request.island)
        machine = self._cluster.agents.called(request.machine)
        hosts = topology.islands[machine.island]  # which all end with the machine
        return _Target(f"machine {request.machine}", hosts, machine.island, machine)

    # -- moving ------------------------------------------------------------------------------------------------------

    async def _move_all(self, hosts: Iterable[int], deadline: float) -> dict[int, str]:
        """Has the clients move every slice away from hosts. Returns those that still lie there after the time: why."""
        clock = asyncio.get_running_loop().time
        while True:
            why = await self._move_once(hosts, deadline)
            again = clock() + AGAIN_S
            while (left := self._cluster.resources.slices_on(hosts)) and clock() < min(again, deadline):
                await self._cluster.unless_ended(asyncio.ensure_future(asyncio.sleep(LOOK_S)))
            if not left or clock() >= deadline:
                return {number: why.get(number, "it is being moved by its client") for number in left}

    async def _move_once(self, hosts: Iterable[int], deadline: float) -> dict[int, str]:
        """Asks each client once for each of its slices there, all clients at a time. Returns why slices stay."""
        left = set(self._cluster.resources.slices_on(hosts))
        why: dict[int, str] = {}

        async def ask(client: ClientRecord) -> None:
            for slice_id in sorted(client.slices & left):
                if (reason := await self._move(client, slice_id, deadline)) is not None:
                    why[slice_id] = f"client {client.number}: {reason}"

        await asyncio.gather(*(ask(client) for client in list(self._clients.values())))
        return why

    async def _move(self, client: ClientRecord, slice_id: int, deadline: float) -> str | None:
        """Has a client move one slice to the first hosts that have room. Returns why it stays; None: it has moved."""
        resources = self._cluster.resources
        if client.suspended:
            return "suspended; resume it first"
        reason = "no other host has enough devices"
        full: set[int] = set()
        while slice_id in {each.slice_id for each in resources.slices}:  # its client may let it go meanwhile
            places = resources.places(slice_id, without=full)
            left_s = deadline - asyncio.get_running_loop().time()
            if not places or left_s <= 0:
                return reason
            devices = places[0][1]
            try:
                await self._moves.move(client, slice_id, devices, left_s)
                return None
            except errors.ResourceExhaustedError as error:
                reason = str(error)
                full.update(self._cluster.topology.hosts_of(devices))
            except errors.PathwaysError as error:
                return str(error)
        return None

    async def _wait_idle(self, target: _Target, deadline: float, force: bool) -> None:
        """Waits until nothing of the time before the moves goes on there: runs whose results lie elsewhere read from
        these hosts, checkpoints are written, and buffers are let go of.

        Raises:
            SliceError: something still goes on after the time, which is `IDLE_S` at least; unless `force`.
        """
        clock = asyncio.get_running_loop().time
        end = max(deadline, clock() + IDLE_S)
        while busy := await self._busy(target.hosts):
            if clock() >= end:
                if force:
                    return
                raise errors.SliceError(f"{target.name} still works after its slices have gone: {busy}; drain again")
            await self._cluster.unless_ended(asyncio.ensure_future(asyncio.sleep(LOOK_S)))

    async def _busy(self, hosts: Iterable[int]) -> str:
        """What goes on at hosts, for people; empty: nothing. A host that is not there does nothing."""
        there = [host for number in hosts if (host := self._cluster.hosts[number]).ready.is_set() and not host.is_lost]
        counts = await asyncio.gather(*(self._requests.counts(host) for host in there))
        if any(each is None and not host.is_lost for each, host in zip(counts, there, strict=True)):
            return "it does not answer"
        sums = {what: sum(getattr(each, field, 0) for each in counts) for field, what in _WORK.items()}
        return ", ".join(f"{count} {what}" for what, count in sums.items() if count)

    # -- leaving -----------------------------------------------------------------------------------------------------

    async def _let_go(self, machine: AgentMachine) -> None:
        """Asks a machine to leave, and returns when it has."""
        machine.let_go()
        try:
            await self._cluster.unless_ended(asyncio.ensure_future(machine.is_lost.wait()), LEAVE_S)
        except TimeoutError:
            machine.link.on_lost("it was told to leave, and did not")


def _named(left: Mapping[int, str]) -> str:
    """For people: `2 slices: slice 0 (client 3: why), slice 5 (client 4: why)`."""
    each = ", ".join(f"slice {number} ({why})" for number, why in sorted(left.items()))
    return f"{len(left)} slice{'s' if len(left) > 1 else ''}: {each}"
