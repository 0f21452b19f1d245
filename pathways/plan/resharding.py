"""Reshard plans: which bytes of which source shard go where, for any pair of shardings and device counts.

Pure functions of two placements. A *cell* is one distinct part of an array under a sharding; replicas of a cell lie on
several devices. A destination host receives each of its cells once, in one *block*, also when several of its devices
show the cell (use the block's memory as their shard). The source cells that overlap a block fill it, each byte once. A
source cell is read from a replica on the same host if there is one; otherwise the destinations read from different
replicas. A block that is a whole source cell of its own host needs no block memory: the devices show the source shards
themselves (MEM-4).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from pathways.compiler.ir import ArrayType, MeshSpec
from pathways.plan.shard_packing import Packing

Region = tuple[tuple[int, int], ...]  # per dimension: start, stop


@dataclasses.dataclass(frozen=True)
class Placement:
    """An array's type on physical devices: `devices[i]` is the global number of logical device i of its mesh."""

    type: ArrayType
    mesh: MeshSpec
    devices: tuple[int, ...]

    def parts(self) -> tuple[int, ...]:
        """Per dimension, the number of parts into which it is cut."""
        if self.type.tiling is not None:
            return self.type.tiling.grid
        sizes = dict(self.mesh.axes)
        return tuple(math.prod(sizes[axis] for axis in axes) for axes in self.type.spec)

    @functools.cached_property
    def packing(self) -> Packing:
        """The packed form in which a client sends the bytes to the hosts."""
        return Packing(self.type.shape, self.type.dtype, self.parts())

    def region(self, cell: Sequence[int]) -> Region:
        """The region of the array that a cell covers."""
        steps = [size // parts for size, parts in zip(self.type.shape, self.parts(), strict=True)]
        return tuple((at * step, (at + 1) * step) for at, step in zip(cell, steps, strict=True))

    @functools.cached_property
    def cells(self) -> tuple[tuple[int, ...], ...]:
        """The cell of each logical device."""
        if (tiling := self.type.tiling) is not None:
            return tuple(tuple(map(int, np.unravel_index(cell, tiling.grid))) for cell in tiling.cells)
        sizes = [size for _, size in self.mesh.axes]
        names = [name for name, _ in self.mesh.axes]
        out = []
        for number in range(len(self.devices)):
            coordinates, rest = {}, number
            for name, size in zip(reversed(names), reversed(sizes), strict=True):
                coordinates[name], rest = rest % size, rest // size
            cell = []
            for axes in self.type.spec:
                at = 0
                for axis in axes:
                    at = at * dict(self.mesh.axes)[axis] + coordinates[axis]
                cell.append(at)
            out.append(tuple(cell))
        return tuple(out)

    @functools.cached_property
    def replicas(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """By cell, the global numbers of the devices that hold it."""
        holders: dict[tuple[int, ...], list[int]] = {}
        for device, cell in zip(self.devices, self.cells, strict=True):
            holders.setdefault(cell, []).append(device)
        return {cell: tuple(devices) for cell, devices in holders.items()}

    def pieces(self, devices_per_host: int) -> list[tuple[int, int, int]]:
        """What each host needs of the packed form: (host, first byte, bytes), each as long as it can be."""
        grid, stride = self.parts(), self.packing.stride
        needed: dict[int, set[int]] = {}
        for device, cell in zip(self.devices, self.cells, strict=True):
            number = 0
            for at, parts in zip(cell, grid, strict=True):
                number = number * parts + at
            needed.setdefault(device // devices_per_host, set()).add(number)
        pieces: list[tuple[int, int, int]] = []
        for host, numbers in sorted(needed.items()):
            for number in sorted(numbers):
                last = pieces[-1] if pieces else None
                if last is not None and last[0] == host and last[1] + last[2] == number * stride:
                    pieces[-1] = (host, last[1], last[2] + stride)
                else:
                    pieces.append((host, number * stride, stride))
        return pieces


@dataclasses.dataclass(frozen=True)
class Block:
    """One receive buffer on a destination host: a cell, and the devices there that show it.

    If the host holds the same cell of the source, `shards` gives for each device the device whose source shard it
    shows: its own shard as it is, or the shard of another device of the host, by a copy between the devices. No bytes
    are then received in the block.
    """

    region: Region
    devices: tuple[int, ...]
    shards: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The block's size per dimension."""
        return tuple(stop - start for start, stop in self.region)


@dataclasses.dataclass(frozen=True)
class Copy:
    """One rectangle: copied from a source device's shard into a block."""

    device: int
    source: Region  # relative to the shard
    block: int  # number among the destination host's blocks
    target: Region  # relative to the block

    @property
    def elements(self) -> int:
        """Number of array elements in the rectangle."""
        return math.prod(stop - start for start, stop in self.target)


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
    """A whole transfer: the blocks by destination host, the copies by (source host, destination host)."""

    blocks: dict[int, tuple[Block, ...]]
    copies: dict[tuple[int, int], tuple[Copy, ...]]

    def sources(self, host: int) -> tuple[int, ...]:
        """Hosts that send to `host`, itself included."""
        return tuple(sorted(source for source, target in self.copies if target == host))

    def destinations(self, host: int) -> tuple[int, ...]:
        """Hosts that `host` sends to, itself included."""
        return tuple(sorted(target for source, target in self.copies if source == host))

    @property
    def elements(self) -> int:
        """Number of array elements that go from one host to another."""
        return sum(
            copy.elements for (source, target), copies in self.copies.items() if source != target for copy in copies
        )

    def is_direct(self, host: int) -> bool:
        """Whether every block of `host` is a whole source shard of its own, or empty."""
        return all(block.shards or not math.prod(block.shape) for block in self.blocks.get(host, ()))


def reshard_plan(source: Placement, target: Placement, devices_per_host: int, host: int | None = None) -> ReshardPlan:
    """The reshard plan of one array from one placement to another.

    Every host of the target has at least one source host, because the source host also reports that the value exists,
    or its error (ERR-1). When the array has no elements, the source's first host is the source of every target host.

    With `host`, the result is only that host's part: its copies; its source hosts, without their copies; and the blocks
    of the host itself and of the hosts that it sends to. The work then depends only on that host's own shards.
    """
    if source.type.shape != target.type.shape:
        raise ValueError(f"a route keeps the shape: {source.type.shape} is not {target.type.shape}")
    shape, each = source.type.shape, devices_per_host
    blocks: dict[int, dict[tuple[int, ...], list[int]]] = {}  # by host and cell; their order gives their numbers
    for device, cell in zip(target.devices, target.cells, strict=True):
        blocks.setdefault(device // each, {}).setdefault(cell, []).append(device)
    numbers = {receiver: {cell: number for number, cell in enumerate(cells)} for receiver, cells in blocks.items()}
    copies: dict[tuple[int, int], list[Copy]] = {}
    parts, target_parts = source.parts(), target.parts()
    holders: dict[tuple[int, ...], dict[int, int]] = {}  # by cell: one device of each host that holds it
    cell_of = dict(zip(source.devices, source.cells, strict=True))
    for device, cell in cell_of.items():
        holders.setdefault(cell, {}).setdefault(device // each, device)

    def shards(receiver: int, there: tuple[int, ...], devices: Sequence[int]) -> tuple[int, ...]:
        """Per device of the receiver, the device whose source shard it shows; () when the block must be assembled."""
        region = target.region(there)
        if math.prod(shape) == 0:
            return ()
        cell = tuple(start // (size // n) for (start, _), size, n in zip(region, shape, parts, strict=True))
        if receiver not in holders[cell] or source.region(cell) != region:
            return ()
        own = holders[cell][receiver]
        return tuple(device if cell_of.get(device) == cell else own for device in devices)

    def add(device: int, cell: tuple[int, ...], receiver: int, there: tuple[int, ...]) -> None:
        part, region = source.region(cell), target.region(there)
        both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, part, strict=True))
        copies.setdefault((device // each, receiver), []).append(
            Copy(device, _relative(both, part), numbers[receiver][there], _relative(both, region))
        )

    for receiver in blocks if host is None else blocks.keys() & {host}:
        for there, devices in blocks[receiver].items():
            if shards(receiver, there, devices):
                copies.setdefault((receiver, receiver), [])
                continue
            for cell in _overlapping(target.region(there), shape, parts):
                device = _choose(holders[cell], receiver)
                if host is None or device // each == host:
                    add(device, cell, receiver, there)
                else:
                    copies.setdefault((device // each, receiver), [])
    if host is not None:
        for cell in {cell for device, cell in cell_of.items() if device // each == host}:
            for there in _overlapping(source.region(cell), shape, target_parts):
                for receiver in {device // each for device in target.replicas[there]} - {host}:
                    device = _choose(holders[cell], receiver)
                    if device // each == host:
                        add(device, cell, receiver, there)
    if math.prod(shape) == 0:
        first = source.devices[0] // each
        copies = {(first, receiver): [] for receiver in blocks if host in (None, first, receiver)}
    concerned = blocks if host is None else {host, *(receiver for _, receiver in copies)}
    return ReshardPlan(
        {
            receiver: tuple(
                Block(target.region(cell), tuple(devices), shards(receiver, cell, devices))
                for cell, devices in cells.items()
            )
            for receiver, cells in blocks.items()
            if receiver in concerned
        },
        {pair: tuple(items) for pair, items in copies.items()},
    )


def _overlapping(region: Region, shape: Sequence[int], parts: Sequence[int]) -> itertools.product[tuple[int, ...]]:
    """The cells of a uniform grid that share elements with `region`."""
    ranges = []
    for (start, stop), size, count in zip(region, shape, parts, strict=True):
        step = size // count
        ranges.append(range(start // step, (stop + step - 1) // step) if step and stop > start else range(0))
    return itertools.product(*ranges)


def _relative(region: Region, origin: Region) -> Region:
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(region, origin, strict=True))


def _choose(holders: Mapping[int, int], receiver: int) -> int:
    """The device from which `receiver` reads a cell: its own device if that holds the cell; else one of another host,
    chosen by the receiver's number, so that the receivers read from different replicas.
    """
    own = holders.get(receiver)
    return own if own is not None else tuple(holders.values())[receiver % len(holders)]


def rectangle(copy: Copy, shard: Sequence[int], block: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """A copy as the numbers of a rectangle in `csrc/bulk/copy_plan.h`: byte offsets in the shard and in the block,
    bytes in a row, and the number of dimensions above rows; then for each dimension, outermost first: its count, and
    its strides in the shard and in the block.
    """
    dimensions: list[tuple[int, int, int]] = []
    offsets, strides = [0, 0], [itemsize, itemsize]
    extents = [stop - start for start, stop in copy.target]
    for axis in reversed(range(len(extents))):
        offsets[0] += copy.source[axis][0] * strides[0]
        offsets[1] += copy.target[axis][0] * strides[1]
        if extents[axis] != 1:
            inner = dimensions[-1] if dimensions else (1, itemsize, itemsize)
            if strides == [inner[0] * inner[1], inner[0] * inner[2]]:  # no gap to the inner dimension
                dimensions[-1:] = [(inner[0] * extents[axis], inner[1], inner[2])]
            else:
                dimensions.append((extents[axis], strides[0], strides[1]))
        strides = [strides[0] * shard[axis], strides[1] * block[axis]]
    row = itemsize
    if dimensions and dimensions[0][1:] == (itemsize, itemsize):
        row = dimensions.pop(0)[0] * itemsize
    outer = [number for dimension in reversed(dimensions) for number in dimension]
    return (*offsets, row, len(dimensions), *outer)


def slices(region: Region) -> tuple[slice, ...]:
    """A region as an index of NumPy."""
    return tuple(slice(start, stop) for start, stop in region)
