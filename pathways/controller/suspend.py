"""Suspends clients: takes a client off the devices, and brings it back. The steps, in order:

    held       the native controller takes no more records from the client; they stay in the client's ring
    quiet      every run that the controller took before is over, on all hosts
    offloaded  a command in the order made every host move the client's buffers off its devices; every host has answered
    resumed    a command made every host bring the buffers back; every host has answered; then the controller takes the
               client's records again

SUSP-1: a client is suspended on all hosts or on none. When one host fails, the other hosts undo their part. The client
is then in the state before, and has lost nothing.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.host_requests import HostRequests
from pathways.controller.offloading import leave_devices, return_to_devices
from pathways.controller.records import ClientRecord
from pathways.protocol import payloads


class Suspension:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager, clients: Mapping[int, ClientRecord], requests: HostRequests) -> None:
        """`clients`: those that there are now, by number; the client manager changes it."""
        self._cluster = cluster
        self._clients = clients
        self._requests = requests

    async def suspend(self, client: ClientRecord, to_disk: bool, most_s: float | None = None) -> int:
        """Takes a client off the devices. Returns the bytes that left them; 0 when the client is suspended already.

        `most_s`: seconds that its runs have to end; None: any time.

        Raises:
            ResourceExhaustedError: a host has no room, or the runs do not end; the client goes on.
        """
        ask = functools.partial(self._ask, client.number)
        native = self._cluster.controller
        steps = functools.partial(leave_devices, native, client.number, ask, self._pause, to_disk, most_s)
        return await asyncio.shield(self._move(client, True, steps))

    async def resume(self, client: ClientRecord) -> int:
        """Brings a client back to the devices. Returns the bytes that came back; 0 when the client is not suspended.

        Raises:
            ResourceExhaustedError: the budgets have no room for the client; the client stays suspended.
            ComputationError: a host could not bring the buffers back, for example because a device has no room; the
                client stays suspended.
        """
        ask = functools.partial(self._ask, client.number)
        steps = functools.partial(return_to_devices, self._cluster.controller, client.number, ask)
        return await asyncio.shield(self._move(client, False, steps))

    async def _move(self, client: ClientRecord, suspended: bool, steps: Callable[[], Awaitable[int]]) -> int:
        async with client.moving:
            if client.suspended == suspended:
                return 0
            nbytes = await steps()
            client.suspended = suspended
            client.stays_away = client.stays_away and suspended
            return nbytes

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._cluster.failure is not None:
            raise self._cluster.failure

    async def _ask(self, client: int, kind: int, to_disk: bool) -> list[tuple[str, int]]:
        if client not in self._clients:
            raise _gone(client)
        number, answers = self._requests.expect_all(client, without=self._clients[client].attaching)
        try:
            self._cluster.controller.command_for(client, kind, payloads.offload(number, to_disk))
            reports = await asyncio.gather(*map(self._cluster.unless_ended, answers))
        finally:
            for answer in answers:
                answer.cancel()
        moved = [report.client_offloaded for report in reports if report is not None]  # a lost host holds no buffers
        return [(each.error, each.bytes) for each in moved]

    def client_gone(self, client: int) -> None:
        """Hosts do not answer for a client that is gone (OWN-1): its open requests fail here."""
        self._requests.client_gone(client, _gone(client))


def _gone(client: int) -> errors.PathwaysError:
    return errors.ClusterClosedError(f"client {client} left the cluster meanwhile; all it had is freed")
