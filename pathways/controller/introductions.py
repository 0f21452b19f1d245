"""How the hosts of new islands and all other hosts get to know each other, before an island enters the order (ERR-2).

`recovery.py` begins a `Start` for each island that is to start. Islands that begin at the same time share an exchange:
each other host gets one request with the successors of all of them, and answers once. So n islands that join at once
cost about n requests, and not n * n. What begins while an exchange is under way takes part in the next one.

    on the same machine    Some of the new hosts share memory with others. The exchange waits until every other host has
                           answered, and then starts the new hosts. A host has answered when it uses no old segment any
                           more; old rings may hold half-written records.
    on other machines      No memory is shared, and a record counts only between the epochs that both ends know. So the
                           new hosts start at once, and the answers come meanwhile. A host answers as soon as it is
                           told. The loss itself may still be on its way to it, behind a block on a slow link.

Invariants:
    Of any two hosts that are not lost, the later one knows the earlier one from its configuration, and the earlier one
    has been told of the later one before the later one enters the order. Hosts of one exchange know each other from
    their configurations. For this, one exchange is under way at a time, and only an exchange makes hosts: so the hosts
    that an exchange begins with are all that it must tell. A host that is lost meanwhile needs to be told nothing.

    A start waits for the other hosts, but never for another start of its exchange. What goes wrong with it ends it
    alone: its machine is lost, its hosts cannot be started, it is cancelled, a host that shares memory with it refuses
    it. What the others know of it then does no harm. It is not in the order, so nobody sends it anything, and its next
    try is introduced to all of them, also to those that know it from their configurations.

    When a host that shares memory with the new ones does not answer, no start of the exchange can go on: nobody knows
    for which of them it does not. All of them have failed. A start that follows a failed one has an exchange of its
    own, so that an island that cannot start does not take others along again.

    A host on another machine that refuses a new one, or does not answer in `FAR_ANSWER_S`, is evicted instead
    (FAULT-1): nobody else's start may hang on what it says.

Everything here runs on the controller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.host_requests import HostRequests
from pathways.controller.records import HostRecord, Island, Peers
from pathways.protocol import control_pb2 as pb

_log = logging.getLogger(__name__)

#: A host on another machine has so long, in seconds, to say that it knows the new ones: starts of others wait for it.
FAR_ANSWER_S = 30.0


class Start:
    """One try to start an island. The task that awaits it calls `end` when it is over, whatever came of it."""

    def __init__(self, island: Island) -> None:
        loop = asyncio.get_running_loop()
        self.island = island
        self.incarnation = island.incarnation + 1
        self.segments: dict[int, Any] = {}  # of the new hosts; made by the exchange
        #: The island's hosts have been started. Cancelled with the task that awaits it.
        self.launched: asyncio.Future[list[HostRecord]] = loop.create_future()
        #: All other hosts know the new ones: they may enter the order.
        self.introduced: asyncio.Future[None] = loop.create_future()

    @property
    def is_over(self) -> bool:
        """Whether it has failed or was cancelled."""
        return self.launched.cancelled() or self.introduced.done()

    def fail(self, error: Exception) -> None:
        """The island cannot start. Only the first error counts."""
        for future in (self.launched, self.introduced):
            if not future.done():
                future.set_exception(error)

    def end(self) -> None:
        """Nobody waits for it any more."""
        for future in (self.launched, self.introduced):
            if not future.cancel() and not future.cancelled():
                future.exception()  # has been seen


class Introductions:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager, requests: HostRequests) -> None:
        self._cluster = cluster
        self._requests = requests
        self._waiting: list[Start] = []  # for the next exchange
        self._task: asyncio.Task[None] | None = None  # while an exchange is under way

    def begin(self, start: Start) -> None:
        """Takes a start of a lost island into the next exchange."""
        self._waiting.append(start)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Starts nothing more: the cluster has ended."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """One exchange after the other, while starts wait."""
        try:
            while starts := self._take():
                try:
                    await self._exchange(starts)
                except Exception as error:
                    if not self._cluster.done.done():
                        _log.exception("hosts could not be introduced to each other")
                    for start in starts:
                        start.fail(error)
        finally:
            self._task = None

    def _take(self) -> list[Start]:
        """The starts of the next exchange."""
        waiting = [start for start in self._waiting if not start.is_over]
        if waiting and waiting[0].island.failed_starts:
            self._waiting = waiting[1:]
            return waiting[:1]
        self._waiting = [start for start in waiting if start.island.failed_starts]
        return [start for start in waiting if not start.island.failed_starts]

    async def _exchange(self, starts: Sequence[Start]) -> None:
        placement = self._cluster.placement
        others = [host for host in self._cluster.hosts if not host.is_lost]
        for start in starts:
            try:
                start.segments = {number: placement.of(number).new_segment(number) for number in start.island.hosts}
            except errors.HostLostError as error:  # its machine is lost meanwhile
                start.fail(error)
        starts = [start for start in starts if not start.is_over]
        introduced = asyncio.gather(*self._introductions(others, starts))
        try:
            new = placement.machines(host for start in starts for host in start.segments)
            if any(placement.of(other.number) in new for other in others):
                await introduced
            await self._launch([start for start in starts if not start.is_over])
            await introduced
        finally:
            introduced.cancel()
        for start in starts:
            if not start.is_over:
                start.introduced.set_result(None)

    # -- to the other hosts ------------------------------------------------------------------------------------------

    def _introductions(self, others: Sequence[HostRecord], starts: Sequence[Start]) -> list[Any]:
        """What tells each host of the new ones.

        A host that was in the order at a loss replaces its peers only after it is notified of the loss; it gets the
        number of the loss. Any other host gets 0, and replaces them at once.
        """
        segments = {host: each for start in starts for host, each in start.segments.items()}
        where = self._cluster.where
        shared = {each for host in segments for each in where(host)}  # where others may be too
        made: dict[Any, pb.ReplacePeers] = {}  # hosts that are told the same share it
        found = []
        for other in others:
            losses = tuple(start.island.loss if 0 <= other.opened_at < start.island.loss else 0 for start in starts)
            here = tuple(each if each in shared else None for each in where(other.number))
            if (here, losses) not in made:
                successors = self._successors(here, starts, losses)
                made[here, losses] = pb.ReplacePeers(successors=successors)
            found.append(self._introduce(other, starts, made[here, losses], segments))
        return found

    def _successors(self, here: tuple[Any, ...], starts: Sequence[Start], losses: Sequence[int]) -> list[pb.Successor]:
        """The hosts of new islands, for a host that is `here`: see `ClusterManager.where`; None: none of them is."""
        cluster = self._cluster
        return [
            pb.Successor(
                host=host,
                loss=loss,
                stream=cluster.placement.of(host).stream_of(host, start.incarnation)
                if cluster.where(host) != here
                else "",
                epoch=start.incarnation,
                has_segment=cluster.placement.of(host) is here[0],
            )
            for start, loss in zip(starts, losses, strict=True)
            for host in start.island.hosts
        ]

    async def _introduce(
        self, other: HostRecord, starts: Sequence[Start], request: pb.ReplacePeers, segments: Mapping[int, Any]
    ) -> None:
        """Tells a host of the new ones. Returns when it uses no memory of their predecessors, or is lost itself."""
        is_near = self._cluster.placement.of(other.number).shares_memory
        limit = self._cluster.config.options.start_timeout_s  # the host itself may still be starting
        if other.is_served and not is_near:
            limit = FAR_ANSWER_S
        new = {host: start for start in starts for host in start.island.hosts}
        try:
            refused = await self._requests.replace_peers(other, request, segments, limit)
        except errors.HostLostError as error:
            refused = dict.fromkeys(new, str(error))
        for host, why in refused.items():
            why = f"{other.name} could not take the successor of host {host}: {why}"
            if is_near:
                new[host].fail(errors.HostLostError(why))
            elif not other.is_lost:  # it shares no memory with the new ones, so nothing can be wrong
                self._cluster.evict(other, why)

    # -- the new hosts -----------------------------------------------------------------------------------------------

    async def _launch(self, starts: Sequence[Start]) -> None:
        """Starts the hosts of islands. They know all hosts that are there now, and each other."""
        new = {host: (each, start.incarnation) for start in starts for host, each in start.segments.items()}
        peers = self._cluster.peers(new)
        for start in starts:
            try:
                await self._launch_island(start, peers)
            except Exception as error:
                if not isinstance(error, errors.PathwaysError):  # whose text says all
                    _log.exception("the hosts of an island could not be started")
                start.fail(error)
            await asyncio.sleep(0)  # many islands start: something else may have its turn

    async def _launch_island(self, start: Start, peers: Peers) -> None:
        cluster, island = self._cluster, start.island
        for machine in dict.fromkeys(map(cluster.placement.of, island.hosts)):
            await machine.ready(cluster.config.options.start_timeout_s)
        if start.is_over:
            return
        island.incarnation = start.incarnation
        hosts = []
        for number in island.hosts:
            cluster.hosts[number] = cluster.start_host(
                number, peers, island.incarnation, island.predecessor_failure, island.predecessor_client
            )
            hosts.append(cluster.hosts[number])
        start.launched.set_result(hosts)
