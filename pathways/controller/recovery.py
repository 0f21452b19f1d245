"""Recovery of lost islands (ERR-2). A lost host costs its island the values that the island held; nothing else is lost.

The hosts of an island are one collective group. A group that lost one member cannot be repaired, so all hosts of the
island are lost with it. The controller then starts the island again. States of an island:

    up -> lost        The process of one host ended. The controller kills the other hosts of the island. The native
                      controller removes the island from the order and fails what depended on it. The surviving hosts
                      are notified of the loss in the order.
    lost -> starting  Every other host maps the new segments, because the old rings may hold half-written records. Then
                      the controller starts new processes, with a coordination service of their own. Hosts on other
                      machines share no rings, and start at once (`introductions.py`). An island whose places are not
                      all filled waits until they are (`machines.py`).
    starting -> up    The new hosts are ready, and know every client and every living program. Every other host knows
                      them. Then the controller opens the order to them.
    starting -> lost  A host ended, or was not ready in time. The controller tries again. After `MOST_FAILED_STARTS`
                      failures in a row the island's machine counts as useless: another machine is lost, and its places
                      are free. Without its own machine the controller can do nothing, so the cluster fails.

While an island is lost or starting, the clients' work for it waits in the order, and no host reads it. Slices, groups
and programs stay as they are. Everything here runs on the controller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from pathways import errors
from pathways.controller.client_manager import ClientManager
from pathways.controller.cluster_manager import ClusterManager, first_lost
from pathways.controller.introductions import Introductions, Start
from pathways.controller.records import HostRecord, Island
from pathways.process.pulses import LOOK_S, Pulses

_log = logging.getLogger(__name__)

MOST_FAILED_STARTS = 3


class Islands:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager, client_manager: ClientManager) -> None:
        self.cluster = cluster
        self.client_manager = client_manager
        self.islands = [Island(number, hosts) for number, hosts in enumerate(cluster.topology.islands)]
        self._losses = 0
        cluster.on_opened = self._opened
        self._introductions = Introductions(cluster, client_manager.requests)
        cluster.on_host_ended = self._host_ended
        cluster.on_places_open = self._open_places
        cluster.agents.on_joined = self._joined
        cluster.on_end.append(self._stop)
        watch = Pulses(cluster.native.pulse_of).watch(self._hosts_here, self._silent)
        self._watching = [asyncio.get_running_loop().create_task(each) for each in (watch, self._evict_faulty())]

    def _stop(self, failure: errors.PathwaysError) -> None:
        self._introductions.stop()
        for watching in self._watching:
            watching.cancel()
        for island in self.islands:
            if island.task is not None:
                island.task.cancel()

    # -- islands that agents bring -----------------------------------------------------------------------------------

    def _open_places(self) -> None:
        """Makes each island that has free places one that is lost, and that no agent has brought yet."""
        for island in self.islands:
            if not self.cluster.placement.are_filled(island.hosts):
                self._open(island)

    def _opened(self, number: int) -> None:
        """An agent has opened an island, and is about to take places of it."""
        self.islands.append(Island(number, self.cluster.topology.islands[number]))
        self._open(self.islands[-1])

    def _open(self, island: Island) -> None:
        """The native controller knows already that the island's hosts are not there."""
        island.incarnation, island.is_up = -1, False
        island.predecessor_failure = f"{errors.HostLostError.__name__}: island {island.number} has not joined yet"
        island.predecessor_client = self.client_manager.youngest_client
        self.cluster.resources.set_missing(island.number, "has not started as yet")

    def _joined(self, hosts: Sequence[int]) -> None:
        """An agent has taken the places of these hosts."""
        for number in sorted({self.cluster.topology.island_of(host) for host in hosts}):
            island = self.islands[number]
            if self.cluster.placement.are_filled(island.hosts) and not self.cluster.done.done():
                if island.task is not None:  # a start by the place's last agent, which is lost
                    island.task.cancel()
                island.failed_starts = 0
                island.task = asyncio.get_running_loop().create_task(self._start(island))

    # -- up, starting -> lost ----------------------------------------------------------------------------------------

    def _hosts_here(self) -> list[HostRecord]:
        """Those of other machines are watched by their agents."""
        machine_of = self.cluster.placement.of
        return [host for host in self.cluster.hosts if not host.is_lost and machine_of(host.number).shares_memory]

    def _silent(self, host: HostRecord, why: str) -> None:
        """Kills a host that is stopped or frozen; its end is then seen as that of any other (END-1)."""
        host.error = host.error or why
        host.process.kill()

    async def _evict_faulty(self) -> None:
        """Looks for hosts that have sent the controller what makes no sense; nothing more of them is read (FAULT-1)."""
        while True:
            await asyncio.sleep(LOOK_S)
            for number, what in self.cluster.controller.take_faults():
                self.cluster.evict(self.cluster.hosts[number], what)

    def _host_ended(self, host: HostRecord) -> None:
        if host.is_lost:
            return
        island = self.islands[self.cluster.topology.island_of(host.number)]
        self._lose(island, first_lost(host, self._members(island)).exit_report())

    def _members(self, island: Island) -> list[HostRecord]:
        return [self.cluster.hosts[number] for number in island.hosts]

    def _lose(self, island: Island, exit_report: str) -> None:
        """Kills the remaining hosts of an island, and begins to start the island again."""
        _log.warning("island %d is lost: %s", island.number, exit_report)
        if island.task is not None:
            island.task.cancel()
        members = [member for member in self._members(island) if not member.is_lost]
        drained = self.cluster.resources.drained  # whose end is no loss
        if lost := [member.number for member in members if member.number not in drained]:
            self.cluster.losses.hosts(island.number, lost, exit_report)
        for member in members:
            self.cluster.end_host(member)  # first: from here on no process writes in their name
        self.client_manager.hosts_lost(members, exit_report)
        if island.is_up:
            self._leave_order(island, exit_report)
        else:
            island.failed_starts += 1
            if island.failed_starts == MOST_FAILED_STARTS:
                why = f"Island {island.number} could not be started again, {MOST_FAILED_STARTS} times in a row"
                for machine in self.cluster.placement.machines(island.hosts):
                    machine.cannot_start(f"{exit_report}\n{why}")
        if not self.cluster.placement.are_filled(island.hosts):  # it waits for an agent: see `_joined`
            self.cluster.resources.set_missing(island.number, "is lost, with its machine")
        elif not self.cluster.done.done():
            island.task = asyncio.get_running_loop().create_task(self._start(island))

    def _leave_order(self, island: Island, why: str) -> None:
        """Takes an island out of the order, and fails what depended on it."""
        island.is_up = False
        island.failed_starts = 0
        island.predecessor_failure = f"{errors.HostLostError.__name__}: {why}"
        island.predecessor_client = self.client_manager.youngest_client
        island.loss = self._losses = self.cluster.controller.lose_hosts(list(island.hosts), island.predecessor_failure)

    # -- lost -> starting -> up --------------------------------------------------------------------------------------

    async def _start(self, island: Island) -> None:
        start = Start(island)
        try:
            await self.cluster.agents.fabrics.whole(self.cluster.placement.machines(island.hosts))
            self._introductions.begin(start)
            hosts = await start.launched
            limit = self.cluster.config.options.start_timeout_s
            try:
                async with asyncio.timeout(limit):
                    for host in hosts:
                        await host.ready.wait()
            except TimeoutError:
                late = next(host for host in hosts if not host.ready.is_set())
                self._lose(island, f"{late.name} was not ready after {limit:g} s. {late.exit_report()}")
                return
            await start.introduced
            await self.client_manager.serve(hosts)
            for host in hosts:
                self.cluster.controller.restore_host(host.number, host.segment, host.gone)
                host.opened_at = self._losses
            island.is_up = True
            island.task = None
            self.cluster.resources.set_missing(island.number, None)
            _log.info("island %d is back, start %d", island.number, island.incarnation)
        except Exception as error:
            if self.cluster.done.done():
                return
            if not isinstance(error, errors.PathwaysError):  # whose text says all
                _log.exception("island %d could not be started", island.number)
            self._lose(island, f"island {island.number} could not be started: {type(error).__name__}: {error}")
        finally:
            start.end()
