"""One host's part of a resharding: computed once, when the host's plan is registered. Pure.

A receiver allocates one block, aligned to 64 bytes, per cell that it receives. The senders' native copiers
(csrc/bulk/copier.h) write their rectangles directly into the block. A shard that changes neither device nor extent is
not copied (MEM-4).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pathways.plan.resharding import Placement, ReshardPlan, rectangle


@dataclasses.dataclass(frozen=True)
class HostReshardPlan:
    """The part of one host in a reshard plan.

    A position is the number of one of the host's own devices among the source's (or target's) devices on this host.

    Sending: `reads` are the positions of the source shards that are read. `copy_plans` gives for each destination host
    what is written there, as the words that `csrc/bulk/copy_plan.h` reads.

    Receiving: `spans` gives the bytes (0: the block takes no memory) and the shape of each block. `direct` says for
    each block whether source shards are used in its place. `shows` gives for each target device of this host, in the
    target's order, its block, and the position of the source shard used in place of the block, or -1. `sources` are the
    hosts that send. Each of the source's `sources_here` shards on this host has the shape `source_shard`, and elements
    of `itemsize` bytes. `copied` counts the bytes that devices of this host copy to each other.
    """

    target: Placement
    reads: tuple[int, ...]
    copy_plans: dict[int, np.ndarray]
    sources: tuple[int, ...]
    spans: tuple[tuple[int, tuple[int, ...]], ...]
    direct: tuple[bool, ...]
    shows: tuple[tuple[int, int], ...]
    copied: int
    sources_here: int
    source_shard: tuple[int, ...]
    itemsize: int

    @property
    def total(self) -> int:
        """Bytes of the receive buffers on this host."""
        return sum(nbytes for nbytes, _ in self.spans)


def host_reshard_plan(
    resharding: ReshardPlan, source: Placement, target: Placement, host: int, devices_per_host: int
) -> HostReshardPlan:
    """The part of `host` in a reshard plan."""
    itemsize = target.type.dtype.itemsize
    own = [device for device in source.devices if device // devices_per_host == host]
    position = {device: number for number, device in enumerate(own)}
    shard = source.packing.cell
    reads = sorted(
        {
            position[copy.device]
            for (sender, _), copies in resharding.copies.items()
            if sender == host
            for copy in copies
        }
    )
    number = {own[at]: n for n, at in enumerate(reads)}
    copy_plans = {}
    for (sender, receiver), copies in resharding.copies.items():
        if sender != host:
            continue
        blocks = resharding.blocks[receiver]
        words = [int(receiver == host and any(block.shards for block in blocks))]
        words += [len(reads), *(math.prod(shard) * itemsize for _ in reads)]
        words += [len(blocks), *(math.prod(block.shape) * itemsize for block in blocks), len(copies)]
        for copy in copies:
            words += [number[copy.device], copy.block, *rectangle(copy, shard, blocks[copy.block].shape, itemsize)]
        copy_plans[receiver] = np.array(words, np.uint64)
    spans, shown, copied = [], {}, 0
    for at, block in enumerate(resharding.blocks.get(host, ())):
        nbytes = math.prod(block.shape) * itemsize
        spans.append((0 if block.shards else nbytes, block.shape))
        for n, device in enumerate(block.devices):
            shown[device] = (at, position[block.shards[n]] if block.shards else -1)
            copied += nbytes if block.shards and block.shards[n] != device else 0
    return HostReshardPlan(
        target,
        tuple(reads),
        copy_plans,
        resharding.sources(host),
        tuple(spans),
        tuple(bool(block.shards) for block in resharding.blocks.get(host, ())),
        tuple(shown[device] for device in target.devices if device in shown),
        copied,
        len(own),
        shard,
        itemsize,
    )
