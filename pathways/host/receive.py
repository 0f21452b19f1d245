"""The memory of one receive: a block per part of the value, in the shared memory that senders' copiers write into.

On CPU, JAX uses a block's memory as it is. The block returns to its arena when the last array on it is gone.

A receive allocates its blocks when its run is prepared, before the run's turn to execute. It gets memory only within
the budget for transfers. The controller admits only runs that fit into this budget, so the first receive that waits
gets its memory when the receives before it are done (MEM-2).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pathways import errors
from pathways.plan.host_resharding import HostReshardPlan
from pathways.plan.memory_profile import block_bytes
from pathways.plan.shard_packing import aligned


class ReceiveAllocation:
    """The memory of one receive. Per block: an array on shared memory, or None where shards are shown; its offset."""

    __slots__ = ("offsets", "shards", "views")

    def __init__(self, views: list[np.ndarray | None], offsets: list[int]) -> None:
        self.views = views
        self.offsets = offsets
        self.shards: list[Any] = []  # this host's own source shards, once they exist


def allocate_receive(core: Any, host: int, plan_here: HostReshardPlan, budget: int) -> ReceiveAllocation | None:
    """Allocates every block, or returns None when the `budget` (bytes) has not enough left now.

    Raises:
        ResourceExhaustedError: the blocks are larger than the whole budget.
    """
    if core.arena_capacity() > 0 and sum(block_bytes(nbytes) for nbytes, _ in plan_here.spans if nbytes) > budget:
        raise errors.ResourceExhaustedError(
            f"a transfer brings {plan_here.total} bytes to host {host}, whose memory for transfers has {budget} bytes"
        )
    dtype = plan_here.target.type.dtype
    views: list[np.ndarray | None] = []
    offsets: list[int] = []
    for (_, shape), direct in zip(plan_here.spans, plan_here.direct, strict=True):
        if direct:
            views.append(None)
            offsets.append(0)
        else:
            block = allocate_block(core, shape, dtype, budget)
            if block is None:
                return None
            views.append(block[0])
            offsets.append(block[1])
    return ReceiveAllocation(views, offsets)


def allocate_block(core: Any, shape: tuple[int, ...], dtype: np.dtype, budget: int) -> tuple[np.ndarray, int] | None:
    """Allocates one block for an array; returns the array and the block's offset, or None: no room now."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return np.empty(shape, dtype), 0
    if core.arena_capacity() == 0:  # embedded: no other process writes here, so private memory will do
        raw = aligned(nbytes)
        return raw.view(dtype).reshape(shape), raw.ctypes.data
    memory = core.allocate(nbytes, budget - block_bytes(nbytes) + nbytes)
    return (np.frombuffer(memory, dtype).reshape(shape), memory.offset) if memory is not None else None
