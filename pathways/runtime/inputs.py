"""How a host makes an array of a client's bytes: prepared once per placement, then a few microseconds per array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from pathways import _jaxlib
from pathways.runtime.packing import Packing
from pathways.runtime.routes import Placed


class Inputs:
    """A placement as one host needs it: which cells its devices show, and which devices they are."""

    def __init__(
        self, placed: Placed, first: int, count: int, device: Callable[[int], jax.Device], sharding: NamedSharding
    ) -> None:
        """`first` and `count` say which devices are this host's, by global number."""
        self.packing: Packing = placed.packing
        self.sharding = sharding
        here = [
            (number, cell)
            for number, cell in zip(placed.devices, placed.cells, strict=True)
            if first <= number < first + count
        ]
        self._cells = [cell for _, cell in here]
        self._devices = [device(number) for number, _ in here]
        self.mask = sum({1 << number - first for number, _ in here})
        self._aval = _jaxlib.shaped_array(placed.type.shape, placed.type.dtype, False)

    def unpack(self, memory: Any) -> jax.Array:
        """An array of packed memory, which stays as it is; on CPU the array is that memory."""
        cells: Any = self.packing.view(memory)
        return _jaxlib.assemble(self._aval, self.sharding, [cells[(*cell, ...)] for cell in self._cells], self._devices)

    def cut(self, whole: np.ndarray) -> jax.Array:
        """An array of the whole value in C order."""
        full: Any = whole
        step = self.packing.cell
        parts = [
            full[(*(slice(at * size, (at + 1) * size) for at, size in zip(cell, step, strict=True)), ...)]
            for cell in self._cells
        ]
        return _jaxlib.assemble(self._aval, self.sharding, parts, self._devices)
