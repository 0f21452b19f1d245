"""The devices of one host and of its island, by their global numbers; and the shardings of placements over them.

All parts of a host use it. The shardings are cached by the enqueue thread; any thread may use the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pathways import _jaxlib
from pathways.compiler import specs
from pathways.plan.resharding import Placement
from pathways.quirks import quirks_of


class HostDevices:
    """What a host knows of its devices. Immutable, but for the cache of shardings."""

    def __init__(
        self,
        host: int,
        local: Sequence[jax.Device],
        island: Sequence[jax.Device],
        first: int,
        per_host: int | None = None,
    ) -> None:
        """`local` are those of host `host`; `island` are the island's, in global order from number `first` on.
        `per_host`: how many numbers a host has; None: as many as it has devices.
        """
        self.host = host
        self.local = tuple(local)
        self.island = tuple(island)
        self.per_host = per_host or len(local)
        numbers = [
            first + row * self.per_host + number
            for row in range(len(island) // len(local))
            for number in range(len(local))
        ]
        self._by_number = dict(zip(numbers, island, strict=True))
        self.quirks = quirks_of(local[0].platform)
        self._shardings: dict[Any, Any] = {}

    @property
    def has_peers(self) -> bool:
        """Whether the island has other hosts too."""
        return len(self.island) > len(self.local)

    @property
    def coordinates(self) -> list[int]:
        """Where this host's devices are: the `Coordinates` of `pathways.plan.torus`, one after the other; empty where
        devices have no links of their own.
        """
        if not self.quirks.has_links:
            return []
        return [
            number
            for each in self.local
            for number in (getattr(each, "slice_index", 0), *each.coords, getattr(each, "core_on_chip", 0))
        ]

    def device(self, number: int) -> jax.Device:
        """The island's device of that global number."""
        return self._by_number[number]

    def has(self, number: int) -> bool:
        """Whether the island has a device of that global number."""
        return number in self._by_number

    def sharding(self, placed: Placement) -> Any:
        """The sharding of a placement's arrays: a `NamedSharding`; one of XLA's own for a tiling."""
        tiling = placed.type.tiling
        key = (placed.mesh.axes, placed.devices, placed.type.spec, tiling)
        known = self._shardings.get(key)
        if known is None and tiling is not None:
            devices = [self.device(number) for number in placed.devices]
            known = self._shardings[key] = _jaxlib.tiled_sharding(devices, tiling.grid, tiling.cells)
        elif known is None:
            mesh = device_mesh(placed.mesh.axes, [self.device(number) for number in placed.devices])
            known = self._shardings[key] = NamedSharding(mesh, specs.to_partition_spec(placed.type.spec))
        return known


def device_mesh(axes: Sequence[tuple[str, int]], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of these axes over devices in C order. Without axes, it has one axis for all devices."""
    axes = axes or (("_devices", len(devices)),)
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return Mesh(array.reshape([size for _, size in axes]), tuple(name for name, _ in axes))
