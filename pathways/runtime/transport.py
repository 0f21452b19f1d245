"""Bytes between hosts of one machine: written once, by the sender, into the receiver's shared memory.

A receiver takes one 64-byte-aligned block per landing; senders copy their rectangles straight into it; on CPU, JAX then
takes the block as it is. A block goes back to its arena when the last array on it is gone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pathways import errors
from pathways.runtime.routes import Block, Copy, slices


@dataclasses.dataclass(frozen=True)
class Landings:
    """The blocks of one receive: arrays on shared memory, and where they are."""

    views: list[np.ndarray]
    offsets: list[int]


class Transport:
    """One host's sending and receiving. Used by the enqueue thread."""

    def __init__(self, core: Any, host: int, devices: int) -> None:
        self._core = core
        self._host = host
        self._devices = devices
        self.bytes_sent = 0  # to other hosts

    def allocate(self, blocks: Sequence[Block], dtype: np.dtype) -> Landings | None:
        """Room for every block, or None when there is not enough now.

        Raises:
            ResourceExhaustedError: there never will be.
        """
        views: list[np.ndarray] = []
        offsets: list[int] = []
        total = sum(math.prod(block.shape) for block in blocks) * dtype.itemsize
        if total > self._core.arena_capacity():
            raise errors.ResourceExhaustedError(
                f"a transfer brings {total} bytes to host {self._host}, whose shared memory for transfers has "
                f"{self._core.arena_capacity()} bytes"
            )
        for block in blocks:
            nbytes = math.prod(block.shape) * dtype.itemsize
            memory = self._core.allocate(max(nbytes, 1))
            if memory is None:
                return None
            views.append(np.frombuffer(memory, dtype, math.prod(block.shape)).reshape(block.shape))
            offsets.append(memory.offset)
        return Landings(views, offsets)

    def send(
        self,
        value: jax.Array,
        devices: dict[int, jax.Device],
        copies: Sequence[Copy],
        blocks: Sequence[Block],
        destination: int,
        offsets: Sequence[int],
    ) -> None:
        """Copies the rectangles of `copies` out of `value`'s shards into `destination`'s blocks at `offsets`."""
        if not copies:
            return
        shards = {shard.device: shard.data for shard in value.addressable_shards}
        arrays = {number: np.asarray(shards[device]) for number, device in devices.items()}
        targets: dict[int, np.ndarray] = {}
        for copy in copies:
            target = targets.get(copy.block)
            if target is None:
                shape = blocks[copy.block].shape
                nbytes = math.prod(shape) * value.dtype.itemsize
                memory = self._core.peer_block(destination, offsets[copy.block], nbytes)
                target = targets[copy.block] = np.frombuffer(memory, value.dtype, math.prod(shape)).reshape(shape)
            piece = arrays[copy.device][slices(copy.source)]
            target[slices(copy.target)] = piece
            if destination != self._host:
                self.bytes_sent += piece.nbytes
