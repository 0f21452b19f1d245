"""Reads a small result back to its client: this host's share of the value, as part of one C-ordered array (READ-1).

A recipe, made once per sharding, shape and dtype, says which bytes of the whole array these are. If each shard is one
piece of it in this process's memory, `_core` itself copies the shards. Other shards (on an accelerator, packed, or not
contiguous in the whole) go through NumPy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pathways import _jaxlib
from pathways.plan.shard_packing import Packing
from pathways.quirks import Quirks

#: Four things. The bytes of the whole value. For each piece that this host writes: (shard, offset in the whole, bytes).
#: Whether each shard is one piece, which can be copied as it is; else use `write`. The function that gets the shards;
#: None for an array of one shard.
Recipe = tuple[int, tuple[tuple[int, int, int], ...], bool, Callable[[Any], Sequence[Any]] | None]


def recipe(value: jax.Array, quirks: Quirks) -> Recipe:
    """The recipe for reading back arrays like `value`."""
    nbytes = value.size * value.dtype.itemsize
    may_copy = quirks.is_host_memory and not _jaxlib.is_sub_byte(value.dtype)
    shards = value.addressable_shards
    if len(shards) == 1 and shards[0].data.size == value.size:
        return nbytes, ((0, 0, nbytes),) if shards[0].replica_id == 0 else (), may_copy, None
    pieces = []
    for number, shard in enumerate(shards):
        if shard.replica_id == 0:
            starts = [cut.start or 0 for cut in shard.index]
            found = [(number, *piece) for piece in _pieces(value.shape, starts, shard.data.shape, value.dtype.itemsize)]
            may_copy = may_copy and len(found) <= 1
            pieces += found
    return nbytes, tuple(pieces), may_copy, _jaxlib.shards_of


def _pieces(
    shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int], itemsize: int
) -> Iterator[tuple[int, int]]:
    """The parts of a C-ordered array that a block of it takes: (offset, bytes) of each."""
    if 0 in sizes:
        return
    axis = len(shape) - 1  # from this one on, a piece goes on
    while axis > 0 and sizes[axis] == shape[axis]:
        axis -= 1
    nbytes = math.prod(sizes[max(axis, 0) :]) * itemsize
    for at in np.ndindex(*sizes[: max(axis, 0)]):
        first = [start + add for start, add in itertools.zip_longest(starts, at, fillvalue=0)]
        yield (int(np.ravel_multi_index(first, shape)) * itemsize if first else 0), nbytes


def whole(value: jax.Array) -> np.ndarray:
    """The whole of a value whose shards are all here. XLA's empty shards may have a wrong shape, so make those anew."""
    return np.asarray(value) if value.size else np.empty(value.shape, value.dtype)


def write(value: jax.Array, memory: memoryview) -> None:
    """Writes this host's share of `value` into `memory`, which holds the whole: each distinct part once."""
    if value.size == 0:
        return
    if memory.nbytes < value.size * value.dtype.itemsize:
        raise ValueError(f"a value of {value.size * value.dtype.itemsize} bytes does not fit into {memory.nbytes}")
    full = np.frombuffer(memory, value.dtype, value.size).reshape(value.shape)
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            full[shard.index] = np.asarray(shard.data)


def write_packed(value: jax.Array, memory: memoryview) -> list[tuple[int, int]]:
    """The same in the packed form. Returns which pieces these are: (offset, bytes) of each."""
    if value.size == 0:
        return []
    shards = [shard for shard in value.addressable_shards if shard.replica_id == 0]
    if not shards:
        return []
    grid = tuple(size // part for size, part in zip(value.shape, shards[0].data.shape, strict=True))
    packing = Packing(value.shape, value.dtype, grid)
    if memory.nbytes < packing.nbytes:
        raise ValueError(f"a packed value of {packing.nbytes} bytes does not fit into {memory.nbytes}")
    cells = packing.view(memory)
    pieces = []
    for shard in shards:
        cell = tuple((cut.start or 0) // size for cut, size in zip(shard.index, packing.cell, strict=True))
        cells[cell] = np.asarray(shard.data)
        number = int(np.ravel_multi_index(cell, grid)) if grid else 0
        pieces.append((number * packing.stride, cells[cell].nbytes))
    return pieces
