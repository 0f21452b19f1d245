"""The packed form in which a client sends an array to the hosts: cell after cell, so that a host uses its shards as
they are.

A *cell* is one distinct part of the array under its sharding (see `resharding`). In the packed form the cells follow
each other in C order of their position in the grid. Each cell is in C order itself and begins at a multiple of 64
bytes, because XLA uses memory on a CPU device without a copy only when it is aligned so.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Packing:
    """The packed form of arrays of one shape, cut into `grid` equal parts per dimension."""

    shape: tuple[int, ...]
    dtype: np.dtype
    grid: tuple[int, ...]

    @functools.cached_property
    def cell(self) -> tuple[int, ...]:
        """Shape of a cell."""
        return tuple(size // parts for size, parts in zip(self.shape, self.grid, strict=True))

    @functools.cached_property
    def stride(self) -> int:
        """Bytes from the beginning of one cell to that of the next."""
        return -(-math.prod(self.cell) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the packed form."""
        return math.prod(self.grid) * self.stride

    @functools.cached_property
    def _strides(self) -> tuple[int, ...]:
        outer = [math.prod(self.grid[axis + 1 :]) * self.stride for axis in range(len(self.grid))]
        inner = [math.prod(self.cell[axis + 1 :]) * self.dtype.itemsize for axis in range(len(self.cell))]
        return (*outer, *inner)

    def view(self, memory: Any) -> np.ndarray:
        """Packed memory as an array with the dimensions of `grid`, then those of a cell: `view(m)[cell]` is a cell."""
        if self.nbytes == 0:
            return np.empty((*self.grid, *self.cell), self.dtype)
        return np.ndarray((*self.grid, *self.cell), self.dtype, memory, 0, self._strides)

    def pack(self, source: Any, memory: Any) -> None:
        """Writes an array of this shape into packed memory, every byte once; a sharded `jax.Array` shard by shard."""
        import jax  # not above: the controller, which packs nothing, does without JAX

        target = self.view(memory)
        if isinstance(source, jax.Array) and source.is_fully_addressable and not source.is_fully_replicated:
            for shard in source.addressable_shards:
                if shard.replica_id == 0:
                    self._write(target, np.asarray(shard.data), [cut.start or 0 for cut in shard.index])
            return
        source = np.asarray(source)
        rank = len(self.shape)
        if math.prod(self.grid) == 1:
            np.copyto(target.reshape(self.shape), source, casting="unsafe")
            return
        split = source.reshape([size for pair in zip(self.grid, self.cell, strict=True) for size in pair])
        order = (*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
        np.copyto(target, split.transpose(order), casting="unsafe")

    def unpack(self, memory: Any) -> np.ndarray:
        """The array in packed memory: the memory itself where the cells follow each other in the array, too."""
        cells = self.view(memory)
        rank = len(self.shape)
        order = [axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair]
        return np.ascontiguousarray(cells.transpose(order)).reshape(self.shape)

    def _write(self, target: np.ndarray, part: np.ndarray, start: Sequence[int]) -> None:
        """Writes a part of the array that begins at `start` into the cells it overlaps."""
        if part.size == 0:
            return
        ranges = [
            range(first // step, -(-(first + size) // step))
            for first, size, step in zip(start, part.shape, self.cell, strict=True)
        ]
        for cell in itertools.product(*ranges):
            inside, outside = [], []
            for at, first, size, step in zip(cell, start, part.shape, self.cell, strict=True):
                low, high = max(at * step, first), min((at + 1) * step, first + size)
                inside.append(slice(low - at * step, high - at * step))
                outside.append(slice(low - first, high - first))
            target[cell][tuple(inside)] = part[tuple(outside)]


def aligned(nbytes: int) -> np.ndarray:
    """Private memory of this process, aligned so that XLA uses it without a copy."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return raw[first : first + nbytes]
