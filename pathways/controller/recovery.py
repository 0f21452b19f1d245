"""Islands that are lost and come back (ERR-2): a lost host costs its island what it held, and nobody anything else.

An island's hosts are one collective group, which cannot be mended; so with one of them all are lost. Life of an island:

    up -> lost        a host's process ended. The others are killed; the native controller takes the island out of the
                      order, and fails what depended on it; the surviving hosts hear of it in the order.
    lost -> starting  every other host has taken the new segments in, for the old rings may be torn; then new processes
                      are started, on a coordination service of their own.
    starting -> up    they are ready, and know every client and every living program: then the order is opened to them.
    starting -> lost  a host ended, or was not ready in time: again, up to `MOST_FAILED_STARTS` times in a row. Then
                      the cluster fails.

While an island is away, its clients' work for it waits in the order, unread by anybody; slices, groups and programs
stay what they are. All of it runs on the controller's event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import traceback
from typing import Any

from pathways import errors
from pathways.controller.client_manager import Membership
from pathways.controller.cluster_manager import Cluster, first_lost
from pathways.controller.records import Host

MOST_FAILED_STARTS = 3


@dataclasses.dataclass
class Island:
    """One island's history."""

    number: int
    hosts: tuple[int, ...]
    is_up: bool = True
    incarnation: int = 0
    failed_starts: int = 0  # in a row
    loss: int = 0  # the cluster's number of its last loss
    predecessor_failure: str = ""  # the failure reason of it then
    predecessor_client: int = 0  # the youngest client that there was
    task: asyncio.Task[None] | None = None


class Islands:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: Cluster, membership: Membership) -> None:
        self.cluster = cluster
        self.membership = membership
        self.islands = [Island(number, hosts) for number, hosts in enumerate(cluster.topology.islands)]
        self._losses = 0
        # One island at a time exchanges its segments with the others, so that no two wait for each other's old ones.
        self._exchanging = asyncio.Lock()
        cluster.on_host_ended = self._host_ended
        cluster.on_end.append(self._stop)

    def _stop(self, failure: errors.PathwaysError) -> None:
        for island in self.islands:
            if island.task is not None:
                island.task.cancel()

    # -- up, starting -> lost ----------------------------------------------------------------------------------------

    def _host_ended(self, host: Host) -> None:
        if host.is_lost:
            return
        island = self.islands[self.cluster.topology.island_of(host.number)]
        self._lose(island, first_lost(host, self._members(island)).exit_report())

    def _members(self, island: Island) -> list[Host]:
        return [self.cluster.hosts[number] for number in island.hosts]

    def _lose(self, island: Island, exit_report: str) -> None:
        """Ends what is left of an island, and begins to start it anew."""
        print(f"island {island.number} is lost: {exit_report}", file=sys.stderr, flush=True)
        if island.task is not None:
            island.task.cancel()
        members = [member for member in self._members(island) if not member.is_lost]
        for member in members:
            self.cluster.end_host(member)  # before anything else: from here on nobody writes for them
        self.membership.hosts_lost(members)
        if island.is_up:
            island.is_up = False
            island.failed_starts = 0
            island.predecessor_failure = f"{errors.HostLostError.__name__}: {exit_report}"
            island.predecessor_client = self.membership.youngest_client
            island.loss = self._losses = self.cluster.controller.lose_hosts(
                list(island.hosts), island.predecessor_failure
            )
        else:
            island.failed_starts += 1
            if island.failed_starts == MOST_FAILED_STARTS:
                self.cluster.fail(
                    errors.HostLostError(
                        f"{exit_report}\nIsland {island.number} could not be started again, {MOST_FAILED_STARTS} times "
                        "in a row; the cluster has ended with it; connect again."
                    )
                )
                return
        island.task = asyncio.get_running_loop().create_task(self._start(island))

    # -- lost -> starting -> up --------------------------------------------------------------------------------------

    async def _start(self, island: Island) -> None:
        hosts: list[Host] = []
        try:
            async with self._exchanging:
                hosts = await self._start_hosts(island)
            limit = self.cluster.config.options.start_timeout_s
            try:
                await asyncio.wait_for(asyncio.gather(*(host.ready.wait() for host in hosts)), limit)
            except TimeoutError:
                late = next(host for host in hosts if not host.ready.is_set())
                self._lose(island, f"{late.name} was not ready after {limit:g} s. {late.exit_report()}")
                return
            await self.membership.serve(hosts)
            for host in hosts:
                self.cluster.controller.restore_host(host.number, host.segment)
                host.opened_at = self._losses
            island.is_up = True
            island.task = None
            print(f"island {island.number} is back, start {island.incarnation}", file=sys.stderr, flush=True)
        except Exception as error:
            if self.cluster.done.done():
                return
            traceback.print_exc()
            self._lose(island, f"island {island.number} could not be started: {type(error).__name__}: {error}")

    async def _start_hosts(self, island: Island) -> list[Host]:
        cluster = self.cluster
        segments: dict[int, Any] = {number: cluster.new_segment(number) for number in island.hosts}
        others = [host for host in cluster.hosts if not host.is_lost]
        await asyncio.gather(*(self._introduce(other, island, segments) for other in others))
        everyone = [segments.get(host.number, None if host.is_lost else host.segment) for host in cluster.hosts]
        island.incarnation += 1
        cluster.start_coordinator(island.number, island.incarnation)
        started: list[Host] = []
        for number in island.hosts:
            cluster.hosts[number] = cluster.start_host(
                number, everyone, island.incarnation, island.predecessor_failure, island.predecessor_client
            )
            started.append(cluster.hosts[number])
        return started

    async def _introduce(self, other: Host, island: Island, segments: dict[int, Any]) -> None:
        """Gives `other` the new segments; returns when it uses nothing of the old ones, or is lost itself."""
        has_been_told = 0 <= other.opened_at < island.loss
        streams = {
            number: self.cluster.stream_of(number, island.incarnation + 1)
            for number in segments
            if self.cluster.topology.machine_of(number) != other.config.machine
        }
        await self.membership.replace_peers(other, segments, streams, island.loss if has_been_told else 0)
