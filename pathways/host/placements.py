"""The placements that clients have described to a host. Puts and restores name them by the client's numbers.

The enqueue thread alone uses it.
"""

from __future__ import annotations

from pathways.host.devices import HostDevices
from pathways.host.host_buffers import LocalPlacement
from pathways.plan.resharding import Placement


class Placements:
    """The placements of all clients of one host."""

    def __init__(self, devices: HostDevices) -> None:
        self._devices = devices
        self._placements: dict[tuple[int, int], LocalPlacement] = {}  # by client and number

    def define(self, client: int, number: int, placed: Placement) -> None:
        """Stores a placement in place of the client's earlier one of that number.

        Raises:
            ValueError: it names devices of other islands; then the client has no placement of that number.
        """
        self._placements.pop((client, number), None)
        if not all(map(self._devices.has, placed.devices)):
            raise ValueError(f"a placement names devices {placed.devices}, not all of the island of this host")
        self._placements[client, number] = LocalPlacement(placed, self._devices)

    def of(self, client: int, number: int) -> LocalPlacement:
        """A client's placement of that number.

        Raises:
            ValueError: the client has described none.
        """
        known = self._placements.get((client, number))
        if known is None:
            raise ValueError(f"client {client} has not described its placement {number}, or not as it should")
        return known

    def forget(self, client: int) -> None:
        """Drops all placements of a client that is gone."""
        for key in [key for key in self._placements if key[0] == client]:
            del self._placements[key]
