"""Clients off the devices: the controller takes no more of their work, their runs end, the hosts offload their buffers.

    held      the native controller leaves what the client sends in its ring
    quiet     every run that it took before is over, on all hosts
    offloaded    a command in the order made every host move the client's buffers off its devices; each has said so
    resumed   a command made them bring everything back; each has said so; then the client's records are taken again

SUSP-1: a client is suspended on all hosts or on none. Where one host cannot, the others undo what they did, and the
client is as it was before, with nothing lost.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

from pathways import errors
from pathways.controller.cluster_manager import Cluster
from pathways.controller.records import Client
from pathways.protocol import control_pb2 as pb
from pathways.protocol import payloads

#: How often the controller is asked whether a client's runs are over.
QUIET_LOOK_S = 0.002


class Suspension:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: Cluster, clients: Mapping[int, Client]) -> None:
        """`clients`: those that there are now, by number; the client manager changes it."""
        self._cluster = cluster
        self._clients = clients
        self._requests = itertools.count(1)
        #: By host and request: whose buffers, and the answer.
        self._answers: dict[tuple[int, int], tuple[int, asyncio.Future[pb.ClientOffloaded]]] = {}

    async def suspend(self, client: Client, to_disk: bool) -> int:
        """Off the devices; the bytes that left them. Of a suspended client: nothing.

        Raises:
            ResourceExhaustedError: a host has no room; the client goes on.
        """
        return await asyncio.shield(asyncio.ensure_future(self._suspend(client, to_disk)))

    async def resume(self, client: Client) -> int:
        """Back to the devices; the bytes that came. Of a client that is not suspended: nothing.

        Raises:
            ComputationError: a device has no room; the client stays suspended.
        """
        return await asyncio.shield(asyncio.ensure_future(self._resume(client)))

    async def _suspend(self, client: Client, to_disk: bool) -> int:
        async with client.moving:
            if client.suspended:
                return 0
            controller = self._cluster.controller
            controller.suspend(client.number)
            try:
                while not controller.is_quiet(client.number):
                    await asyncio.sleep(QUIET_LOOK_S)
                    if self._cluster.failure is not None:
                        raise self._cluster.failure
                nbytes = await self._everywhere(client, payloads.OFFLOAD, payloads.RESTORE, to_disk)
            except BaseException:
                controller.resume(client.number)
                raise
            controller.offload(client.number)
            client.suspended = True
            return nbytes

    async def _resume(self, client: Client) -> int:
        async with client.moving:
            if not client.suspended:
                return 0
            controller = self._cluster.controller
            if refused := controller.restore(client.number):
                raise errors.from_text(refused, errors.ResourceExhaustedError)
            try:
                nbytes = await self._everywhere(client, payloads.RESTORE, payloads.OFFLOAD, False)
            except BaseException:
                controller.offload(client.number)
                raise
            client.suspended = False
            controller.resume(client.number)
            return nbytes

    async def _everywhere(self, client: Client, kind: int, undo: int, to_disk: bool) -> int:
        answers = await self._ask(client, kind, to_disk)
        if failures := [answer.error for answer in answers if answer.error]:
            await self._ask(client, undo, False)
            raise errors.from_text(failures[0], errors.ComputationError)
        return sum(answer.bytes for answer in answers)

    async def _ask(self, client: Client, kind: int, to_disk: bool) -> list[pb.ClientOffloaded]:
        if client.number not in self._clients:
            raise _gone(client.number)
        request = next(self._requests)
        futures = []
        for host in self._cluster.hosts:
            future = asyncio.get_running_loop().create_future()
            self._answers[host.number, request] = client.number, future
            futures.append(self._cluster.unless_ended(future))
        self._cluster.controller.command_for(client.number, kind, payloads.offload(request, to_disk))
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for host in self._cluster.hosts:
                self._answers.pop((host.number, request), None)

    def report(self, host: int, report: pb.ClientOffloaded) -> None:
        """A host's answer."""
        _, future = self._answers.get((host, report.request), (0, None))
        if future is not None and not future.done():
            future.set_result(report)

    def host_lost(self, host: int) -> None:
        """It has nothing of anybody's any more, and says nothing (ERR-2)."""
        for (number, _), (_, future) in self._answers.items():
            if number == host and not future.done():
                future.set_result(pb.ClientOffloaded())

    def client_gone(self, client: int) -> None:
        """Hosts say nothing of a client that is gone (OWN-1): who waits for their word hears it here."""
        for owner, future in self._answers.values():
            if owner == client and not future.done():
                future.set_exception(_gone(client))


def _gone(client: int) -> errors.PathwaysError:
    return errors.ClusterClosedError(f"client {client} left the cluster meanwhile; all it had is freed")
