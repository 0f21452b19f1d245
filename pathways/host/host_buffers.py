"""Makes an array of a client's bytes: preparation once per placement, then a few microseconds per array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from pathways import _jaxlib
from pathways.plan.binding import local_mask
from pathways.plan.resharding import Placement
from pathways.plan.shard_packing import Packing


class Inputs:
    """A placement as one host needs it: the host's devices, and the cell that each of them shows."""

    def __init__(
        self,
        placed: Placement,
        host: int,
        devices_per_host: int,
        device: Callable[[int], jax.Device],
        sharding: NamedSharding,
    ) -> None:
        """`device(number)` returns this host's device of that global number."""
        self.type = placed.type
        self.packing: Packing = placed.packing
        self.sharding = sharding
        here = [
            (number, cell)
            for number, cell in zip(placed.devices, placed.cells, strict=True)
            if number // devices_per_host == host
        ]
        self._cells = [cell for _, cell in here]
        self._devices = [device(number) for number, _ in here]
        self.mask = local_mask(placed.devices, host, devices_per_host)
        self._aval = _jaxlib.shaped_array(placed.type.shape, placed.type.dtype, False)

    def unpack(self, memory: Any) -> jax.Array:
        """Makes an array of packed memory, which must stay unchanged: on CPU the array uses that memory."""
        cells: Any = self.packing.view(memory)
        return _jaxlib.assemble(self._aval, self.sharding, [cells[(*cell, ...)] for cell in self._cells], self._devices)

    def cut(self, whole: np.ndarray) -> jax.Array:
        """Makes an array of the whole value in C order."""
        full: Any = whole
        step = self.packing.cell
        parts = [
            full[(*(slice(at * size, (at + 1) * size) for at, size in zip(cell, step, strict=True)), ...)]
            for cell in self._cells
        ]
        return _jaxlib.assemble(self._aval, self.sharding, parts, self._devices)
