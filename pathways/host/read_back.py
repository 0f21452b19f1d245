"""Reads a small result back to its client: this host's share of the value, as part of one C-ordered array (READ-1).

If each shard is one contiguous part of the whole array in this process's memory, `_core` itself copies the shards, by a
recipe that is made once per sharding, shape and dtype. Other shards (on an accelerator, packed, or not contiguous in
the whole) go through NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways import _jaxlib
from pathways.quirks import Quirks

#: Three things. The bytes of the whole value. For each part that this host writes: (shard, offset in the whole, bytes);
#: or None: use `write`. The function that gets the shards; None for an array of one shard.
Recipe = tuple[int, tuple[tuple[int, int, int], ...] | None, Callable[[Any], Sequence[Any]] | None]


def recipe(value: jax.Array, quirks: Quirks) -> Recipe:
    """The recipe for reading back arrays like `value`."""
    nbytes = value.size * value.dtype.itemsize
    if not quirks.is_host_memory or _jaxlib.is_sub_byte(value.dtype):
        return nbytes, None, None
    shards = value.addressable_shards
    if len(shards) == 1 and shards[0].data.size == value.size:
        return nbytes, ((0, 0, nbytes),) if shards[0].replica_id == 0 else (), None
    parts = []
    for number, shard in enumerate(shards):
        if shard.replica_id != 0:
            continue
        starts, sizes = [], shard.data.shape
        for axis, cut in enumerate(shard.index):
            starts.append(cut.start or 0)
            # In C order a part is contiguous if every dimension after its first dimension of more than one row is
            # whole.
            if sizes[axis] != value.shape[axis] and math.prod(sizes[:axis]) > 1:
                return nbytes, None, None
        start = int(np.ravel_multi_index(starts, value.shape)) if starts and value.size else 0
        parts.append((number, start * value.dtype.itemsize, shard.data.size * value.dtype.itemsize))
    return nbytes, tuple(parts), _jaxlib.shards_of


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
