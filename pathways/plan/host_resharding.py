"""What one host does of a resharding: worked out once, when its plan is registered. Pure.

A receiver takes one 64-byte-aligned block per part; senders' native copiers (csrc/memory/copier.h) write their
rectangles straight into it. Shards that change neither device nor extent are not copied (MEM-4).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pathways.plan.resharding import Placement, ReshardPlan, rectangle


@dataclasses.dataclass(frozen=True)
class HostReshardPlan:
    """One route at one host. Positions count the host's own devices of an end, in the order of that end's devices.

    `reads` are the positions of source shards that are copied from; `copy plans` what is written, per destination host,
    as `csrc/memory/copier.h` reads it. Of the receiving half: `spans` gives each block's bytes (0: it takes no memory)
    and shape, `direct` whether shards are shown for it, `shows` for each local target device its block, and the source
    position that it shows instead or -1; `copied` are the bytes that devices copy among themselves.
    """

    target: Placement
    reads: tuple[int, ...]
    copy_plans: dict[int, np.ndarray]
    sources: tuple[int, ...]
    spans: tuple[tuple[int, tuple[int, ...]], ...]
    direct: tuple[bool, ...]
    shows: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]
    copied: int

    @property
    def total(self) -> int:
        """Bytes that land here."""
        return sum(nbytes for nbytes, _ in self.spans)


def host_reshard_plan(
    resharding: ReshardPlan, source: Placement, target: Placement, host: int, devices_per_host: int
) -> HostReshardPlan:
    """What `host` does of a route."""
    itemsize = target.type.dtype.itemsize
    own = [device for device in source.devices if device // devices_per_host == host]
    position = {device: number for number, device in enumerate(own)}
    shard = [size // parts for size, parts in zip(source.type.shape, source.parts(), strict=True)]
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
    here = tuple(device for device in target.devices if device in shown)
    return HostReshardPlan(
        target,
        tuple(reads),
        copy_plans,
        resharding.sources(host),
        tuple(spans),
        tuple(bool(block.shards) for block in resharding.blocks.get(host, ())),
        tuple(shown[device] for device in here),
        here,
        copied,
    )
