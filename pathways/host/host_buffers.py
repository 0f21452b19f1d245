"""A placement as one host needs it: it makes arrays of a client's bytes, of received blocks, and of shards.

Preparation is once per placement, then an array takes a few microseconds. Immutable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pathways import _jaxlib
from pathways.host.devices import HostDevices
from pathways.plan.binding import local_mask
from pathways.plan.resharding import Placement, slices


class LocalPlacement:
    """This host's `devices` of a placement, in the placement's order, and the cell that each of them shows."""

    def __init__(self, placed: Placement, here: HostDevices) -> None:
        local = [
            (here.device(number), cell)
            for number, cell in zip(placed.devices, placed.cells, strict=True)
            if number // here.per_host == here.host
        ]
        self.placed = placed
        self.type = placed.type
        self.sharding = here.sharding(placed)
        self.devices = [device for device, _ in local]
        self.cells = [cell for _, cell in local]
        self.mask = local_mask(placed.devices, here.host, here.per_host)
        self.bytes_per_device = placed.type.nbytes // math.prod(placed.parts())
        self._packing = placed.packing
        self._parts: list[Any] = [(*slices(placed.region(cell)), ...) for cell in self.cells]
        self._aval = _jaxlib.shaped_array(placed.type.shape, placed.type.dtype, False)

    def fits(self, mask: int, nbytes: int) -> bool:
        """Whether an array takes no more than `nbytes` bytes on each device of a mask of local devices (MEM-6)."""
        return not self.mask & ~mask and self.bytes_per_device <= nbytes

    def too_big(self, mask: int, nbytes: int) -> str:
        """Why an array does not fit; see `fits`."""
        return (
            f"the array takes {self.bytes_per_device} bytes on each of the local devices {_numbers(self.mask)}, but "
            f"the client has booked {nbytes} bytes on each of {_numbers(mask)}: book its space set and its bytes"
        )

    def unpack(self, memory: Any) -> jax.Array:
        """Makes an array of packed memory, which must stay unchanged: on CPU the array uses that memory.

        Raises:
            ValueError: the memory has another size.
        """
        if memory.nbytes != self._packing.nbytes:
            raise ValueError(f"a block of {memory.nbytes} bytes, the array takes {self._packing.nbytes}")
        cells: Any = self._packing.view(memory)
        return self.assemble([cells[(*cell, ...)] for cell in self.cells])

    def take(self, handed: Any) -> jax.Array:
        """Makes an array of what an embedded client handed over: packed memory, or an array of JAX's, which it keeps.

        Raises:
            ValueError: the memory is too small.
        """
        if not isinstance(handed, jax.Array):
            return self.unpack(handed)
        if not handed.devices().isdisjoint(self.sharding.device_set):  # copy it: the new array may be donated (MEM-4)
            handed = handed.copy()  # `device_put` ignores `may_alias=False` here
        return jax.device_put(handed, self.sharding)

    def cut(self, whole: np.ndarray) -> jax.Array:
        """Makes an array of the whole value in C order."""
        return self.assemble([whole[part] for part in self._parts])

    def zeros(self) -> jax.Array:
        """Makes an array of zeros."""
        return self.cut(np.zeros(self.type.shape, self.type.dtype))

    def assemble(self, parts: Sequence[Any]) -> jax.Array:
        """Makes an array of one part per device: see `_jaxlib.assemble`."""
        return _jaxlib.assemble(self._aval, self.sharding, parts, self.devices)


def _numbers(mask: int) -> list[int]:
    """The numbers of the devices of a mask."""
    return [number for number in range(mask.bit_length()) if mask >> number & 1]
