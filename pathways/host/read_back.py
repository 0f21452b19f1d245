"""How a host brings a small result to its client: its share of the value, as one C-ordered array (READ-1).

Shards that lie in this process's memory as the whole array has them are copied by `_core` itself, by a recipe that is
made once per sharding, shape and dtype; what lies otherwise (on another device, packed, or cut across) goes through
NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways import _jaxlib

#: The whole value's bytes; per part that this host writes (shard, offset in the whole, bytes), or None: use `write`;
#: and how to get at the shards, None for an array of one shard.
Recipe = tuple[int, tuple[tuple[int, int, int], ...] | None, Callable[[Any], Sequence[Any]] | None]


def recipe(value: jax.Array, platform: str) -> Recipe:
    """How to read back arrays like `value`."""
    nbytes = value.size * value.dtype.itemsize
    if platform != "cpu" or _jaxlib.is_sub_byte(value.dtype):
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
            # In C order a part is in one piece when all dimensions behind the first of more than one row are whole.
            if sizes[axis] != value.shape[axis] and math.prod(sizes[:axis]) > 1:
                return nbytes, None, None
        start = int(np.ravel_multi_index(starts, value.shape)) if starts and value.size else 0
        parts.append((number, start * value.dtype.itemsize, shard.data.size * value.dtype.itemsize))
    return nbytes, tuple(parts), _jaxlib.shards_of


def whole(value: jax.Array) -> np.ndarray:
    """All of a value whose shards are all here. XLA's empty shards need not have the shape that they should."""
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
