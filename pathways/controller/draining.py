"""Lets a machine go without losing a buffer: no new slices, until those that lie there have gone; then it leaves.

A slice belongs to its client, which alone can move its arrays (`cluster.remap`). So the controller waits for the
clients, and when they do not move in time, it says which of them still have slices there, and the machine stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.records import ClientRecord

#: Seconds between two looks whether the slices have gone.
LOOK_S = 0.05


class Draining:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager, clients: Mapping[int, ClientRecord]) -> None:
        self._cluster = cluster
        self._clients = clients

    async def drain(self, machine: str, timeout_s: float, force: bool) -> int:
        """Lets a machine go, and returns the number of the island that it was.

        Args:
            machine: its name.
            timeout_s: how long to wait until no slice lies there.
            force: lets it go then, whatever lies there; its arrays are lost.

        Raises:
            ConnectError: no machine of this name has joined.
            SliceError: slices still lie there after the time; nothing has changed.
        """
        agents = self._cluster.agents_of_machines()
        agent = agents.called(machine)
        resources = self._cluster.resources
        resources.set_missing(agent.island, "is being drained")
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (left := self._slices_on(agent.island)) and asyncio.get_running_loop().time() < deadline:
            await self._cluster.unless_ended(asyncio.ensure_future(asyncio.sleep(LOOK_S)))
        if left and not force:
            resources.set_missing(agent.island, None)
            raise errors.SliceError(
                f"machine {machine} has still {_named(left)} after {timeout_s:g} s: their clients can move them "
                "(cluster.remap), or release them; force lets the machine go, and loses what lies there"
            )
        agents.let_go(agent)
        return agent.island

    def _slices_on(self, island: int) -> dict[int, int]:
        """The number of slices on an island, by client."""
        here = {binding.slice_id for binding in self._cluster.resources.slices if binding.island == island}
        counts = {number: len(client.slices & here) for number, client in self._clients.items()}
        return {number: count for number, count in counts.items() if count}


def _named(slices: Mapping[int, int]) -> str:
    """For people: `2 slices of client 3, 1 slice of client 4`."""
    return ", ".join(
        f"{count} slice{'s' if count > 1 else ''} of client {client}" for client, count in sorted(slices.items())
    )
