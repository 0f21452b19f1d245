"""Shard-level routes: which bytes of which source shard go where, for any pair of shardings and device counts.

Pure functions of two placements. A *cell* is one distinct part of an array under a sharding; replicas of a cell lie on
several devices. A destination host lands each of its cells once, in one *block*, whatever the number of its devices
that show it; each block is filled from source cells that overlap it, each byte once, from a replica on the same host
where there is one, else from replicas spread over the destinations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from pathways.compiler.ir import ArrayType, MeshSpec

Region = tuple[tuple[int, int], ...]  # per dimension: start, stop


@dataclasses.dataclass(frozen=True)
class Placed:
    """An array's type on physical devices: `devices[i]` is the global number of logical device i of its mesh."""

    type: ArrayType
    mesh: MeshSpec
    devices: tuple[int, ...]

    def parts(self) -> tuple[int, ...]:
        """Per dimension, the number of pieces it is cut into."""
        sizes = dict(self.mesh.axes)
        return tuple(math.prod(sizes[axis] for axis in axes) for axes in self.type.spec)

    def region(self, cell: Sequence[int]) -> Region:
        """The part of the array that a cell is."""
        steps = [size // parts for size, parts in zip(self.type.shape, self.parts(), strict=True)]
        return tuple((at * step, (at + 1) * step) for at, step in zip(cell, steps, strict=True))

    @functools.cached_property
    def cells(self) -> tuple[tuple[int, ...], ...]:
        """The cell of each logical device."""
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
        """Global devices that hold each cell."""
        holders: dict[tuple[int, ...], list[int]] = {}
        for device, cell in zip(self.devices, self.cells, strict=True):
            holders.setdefault(cell, []).append(device)
        return {cell: tuple(devices) for cell, devices in holders.items()}


@dataclasses.dataclass(frozen=True)
class Block:
    """One landing place on a destination host: a cell, and the devices there that show it."""

    region: Region
    devices: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extent per dimension."""
        return tuple(stop - start for start, stop in self.region)


@dataclasses.dataclass(frozen=True)
class Copy:
    """One rectangle, from within a source device's shard to within a block."""

    device: int
    source: Region  # relative to the shard
    block: int  # number among the destination host's blocks
    target: Region  # relative to the block


@dataclasses.dataclass(frozen=True)
class Route:
    """A whole transfer: blocks by destination host, copies by (source host, destination host)."""

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
        """Array elements that cross from one host to another."""
        return sum(math.prod(stop - start for start, stop in copy.target)
                   for (source, target), copies in self.copies.items() if source != target for copy in copies)


def route(source: Placed, target: Placed, devices_per_host: int) -> Route:
    """The route of one array from one placement to another.

    Every host of the target has at least one source, if only to hear from it that the value exists (ERR-1 and order
    travel the same way as bytes): a target without bytes to get hears from the source's first host.
    """
    if source.type.shape != target.type.shape:
        raise ValueError(f"a route keeps the shape: {source.type.shape} is not {target.type.shape}")
    blocks: dict[int, dict[Region, list[int]]] = {}
    for device, cell in zip(target.devices, target.cells, strict=True):
        host = device // devices_per_host
        blocks.setdefault(host, {}).setdefault(target.region(cell), []).append(device)
    copies: dict[tuple[int, int], list[Copy]] = {}
    parts = source.parts()
    for host, regions in blocks.items():
        for number, region in enumerate(regions):
            for cell in _overlapping(region, source.type.shape, parts):
                part = source.region(cell)
                both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, part, strict=True))
                device = _choose(source.replicas[cell], host, devices_per_host)
                copy = Copy(device, _relative(both, part), number, _relative(both, region))
                copies.setdefault((device // devices_per_host, host), []).append(copy)
        if not any(target_host == host for _, target_host in copies):
            copies[source.devices[0] // devices_per_host, host] = []
    return Route({host: tuple(Block(region, tuple(devices)) for region, devices in regions.items())
                  for host, regions in blocks.items()},
                 {pair: tuple(items) for pair, items in copies.items()})


def _overlapping(region: Region, shape: Sequence[int], parts: Sequence[int]) -> itertools.product[tuple[int, ...]]:
    """Cells of a uniform grid that share elements with `region`."""
    ranges = []
    for (start, stop), size, count in zip(region, shape, parts, strict=True):
        step = size // count
        ranges.append(range(start // step, (stop + step - 1) // step) if step and stop > start else range(0))
    return itertools.product(*ranges)


def _relative(region: Region, origin: Region) -> Region:
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(region, origin, strict=True))


def _choose(replicas: Sequence[int], host: int, devices_per_host: int) -> int:
    """A holder on the same host if there is one; else one that differs from destination to destination."""
    for device in replicas:
        if device // devices_per_host == host:
            return device
    return replicas[host % len(replicas)]


def slices(region: Region) -> tuple[slice, ...]:
    """A region as NumPy indexes it."""
    return tuple(slice(start, stop) for start, stop in region)
