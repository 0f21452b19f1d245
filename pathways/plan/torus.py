"""Devices that are joined as a torus, and where a slice may lie there so that it keeps neighbours. Pure.

A chip of a TPU has links to the next chips along x, y and z. Along an axis that wraps, the last chip has a link to the
first one. Where each core of a chip is a device of its own, the cores are neighbours, too. Chips of different TPU
slices have no links to each other.

A slice lies in a box. Each axis of the slice has some axes of the box for itself, and its devices follow a walk through
these, each step of which is a link. So devices that are neighbours in the slice are neighbours in the torus (TORUS-1).
The walk ends beside its start where it can, because collectives along an axis are rings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from pathways.plan.topology import Topology

#: Where a device is: the TPU slice, x, y, z, and the core on the chip.
Coordinates: TypeAlias = tuple[int, ...]
AXES = 5
#: What a device counts that a slice must not take.
CLOSED = 1 << 40
#: A grid has so many cells per device at most: what hosts say is not trusted to be a box.
_MOST_CELLS = 8

_Cell: TypeAlias = tuple[int, ...]


class Tori:
    """The torus of each island, as far as its hosts have said where their devices are. For one thread."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._of_host: dict[int, tuple[list[Coordinates], tuple[bool, ...]]] = {}
        self._tori: dict[int, Torus | None] = {}

    def put(self, host: int, coordinates: Sequence[int], wraps: Sequence[bool]) -> None:
        """A host says where its devices are.

        Args:
            host: its number.
            coordinates: the `Coordinates` of its devices, one after the other.
            wraps: whether x, y and z wrap.

        Raises:
            ValueError: that makes no sense.
        """
        count = self._topology.count_of(host)
        if len(coordinates) != AXES * count or len(wraps) != AXES - 2 or min(coordinates) < 0:
            raise ValueError(f"coordinates {list(coordinates)[:50]} of {count} devices, of axes that wrap: {wraps}")
        each = [tuple(coordinates[AXES * n : AXES * (n + 1)]) for n in range(count)]
        self._of_host[host] = each, tuple(wraps)
        self._tori.pop(self._topology.island_of(host), None)

    def grow(self, topology: Topology) -> None:
        """The cluster has one island more."""
        self._topology = topology

    def of(self, island: int) -> Torus | None:
        """The torus of an island; None: its devices have no coordinates, or those make none."""
        if island not in self._tori:
            self._tori[island] = self._made(self._topology.islands[island])
        return self._tori[island]

    def _made(self, hosts: Sequence[int]) -> Torus | None:
        count = self._topology.count_of(hosts[0])
        known: dict[int, Coordinates] = {}
        wraps: tuple[bool, ...] = (True,) * (AXES - 2)
        for row, host in enumerate(hosts):
            if host in self._of_host:
                places, said = self._of_host[host]
                known.update({row * count + n: at for n, at in enumerate(places)})
                wraps = tuple(a and b for a, b in zip(wraps, said, strict=True))
        sizes = [1 + max(axis) for axis in zip(*known.values(), strict=True)]
        if not known or len(set(known.values())) < len(known) or math.prod(sizes) > _MOST_CELLS * len(known):
            return None
        return Torus(known, wraps, count)

    @property
    def coordinates(self) -> tuple[Coordinates, ...]:
        """By device number; empty where it is not known."""
        found: list[Coordinates] = [()] * (self._topology.hosts * self._topology.devices_per_host)
        for host, (places, _) in self._of_host.items():
            first = host * self._topology.devices_per_host
            found[first : first + len(places)] = places
        return tuple(found)


class Torus:
    """The devices of an island by their coordinates. Immutable."""

    def __init__(self, coordinates: Mapping[int, Coordinates], wraps: Sequence[bool], devices_per_host: int) -> None:
        """`coordinates`: by number of the device in its island, no two alike. `wraps`: whether x, y and z do."""
        sizes = tuple(1 + max(axis) for axis in zip(*coordinates.values(), strict=True))
        self._devices = np.full(sizes, -1, np.int64)
        for device, at in coordinates.items():
            self._devices[at] = device
        # Where a cell is empty, an axis may be longer than what is known of it: then its ends have no link.
        is_whole = math.prod(sizes) == len(coordinates)
        self._wraps = (False, *(is_whole and wrap for wrap in wraps), False)
        self._devices_per_host = devices_per_host

    def place(self, shape: Sequence[int], load: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        """The load of the least loaded box that keeps neighbours, and its devices, in C order of `shape`.

        Of such boxes the one is chosen in which most axes of the slice are rings; then the one of the fewest hosts;
        then one that is aligned to its own size. None: no box has this shape, or each has a device that is `CLOSED`.

        Args:
            shape: the sizes of the slice's axes.
            load: of each device, by its number in the island.
        """
        grid = np.where(self._devices < 0, CLOSED, np.asarray(load, np.int64)[self._devices])
        best: tuple[tuple[int, ...], Any] | None = None
        for form in _forms(tuple(shape), self._devices.shape[1:]):
            at, total, crooked = self._corner(grid, (1, *(math.prod(axis) for axis in zip(*form, strict=True))))
            if total < CLOSED:
                walks = [_walk(sizes) for sizes in form]
                open_axes = sum(not self._is_ring(walk) for walk in walks)
                devices = self._devices_of(at, walks)
                key = (total, open_axes, np.unique(devices // self._devices_per_host).size, crooked)
                if best is None or key < best[0]:
                    best = key, devices
        return None if best is None else (best[0][0], tuple(best[1].tolist()))

    def _corner(self, grid: Any, extents: Sequence[int]) -> tuple[_Cell, int, int]:
        """The first cell of the least loaded box of this size, its load, and how many of its axes are not aligned."""
        for axis, (extent, wraps) in enumerate(zip(extents, self._wraps, strict=True)):
            if wraps and extent < grid.shape[axis]:
                grid = np.concatenate([grid, np.take(grid, range(extent - 1), axis)], axis)
            grid = np.lib.stride_tricks.sliding_window_view(grid, extent, axis).sum(-1)
        corners = np.argwhere(grid == grid.min())
        crooked = (corners % np.asarray(extents) != 0).sum(1)
        first = int(crooked.argmin())
        at = tuple(corners[first].tolist())
        return at, int(grid[at]), int(crooked[first])

    def _is_ring(self, walk: Sequence[_Cell]) -> bool:
        """Whether its end is beside its start, wherever it is put."""
        apart = [
            min(distance, size - distance) if wraps else distance
            for distance, size, wraps in zip(
                (abs(a - b) for a, b in zip(walk[0], walk[-1], strict=True)),
                self._devices.shape[1:],
                self._wraps[1:],
                strict=True,
            )
        ]
        return sum(apart) <= 1

    def _devices_of(self, at: _Cell, walks: Sequence[Sequence[_Cell]]) -> Any:
        cells = np.asarray(at[1:])
        for walk in walks:
            cells = cells[..., None, :] + np.asarray(walk)
        cells = cells.reshape(-1, AXES - 1) % self._devices.shape[1:]
        return self._devices[at[0]][tuple(cells.T)]


def _forms(shape: tuple[int, ...], room: tuple[int, ...]) -> Iterator[tuple[_Cell, ...]]:
    """By axis of a slice, the size of its box along each axis of the torus. No axis of the torus is used twice. `room`:
    how long the axes of the torus are.
    """
    if not shape:
        yield ()
        return
    for sizes in _boxes(shape[0], room):
        left = tuple(1 if size > 1 else cells for size, cells in zip(sizes, room, strict=True))
        for others in _forms(shape[1:], left):
            yield (sizes, *others)


def _boxes(count: int, room: tuple[int, ...]) -> Iterator[_Cell]:
    """The sizes of all boxes of so many cells in this room."""
    if not room:
        if count == 1:
            yield ()
        return
    for size in range(1, min(count, room[0]) + 1):
        if count % size == 0:
            for others in _boxes(count // size, room[1:]):
                yield (size, *others)


def _walk(sizes: tuple[int, ...]) -> list[_Cell]:
    """All cells of a box, each beside the one before. In a box of several axes, of which one has an even size, the last
    cell is beside the first.
    """
    even = next((axis for axis, size in enumerate(sizes) if size % 2 == 0), None)
    if even is None or math.prod(sizes) == sizes[even]:
        return _snake(sizes)
    line = _snake((*sizes[:even], 1, *sizes[even + 1 :]))
    rows, width = sizes[even], len(line)
    # There along all columns but the first, one row forwards and the next one backwards; then back along the first.
    there = [(row, n if row % 2 == 0 else width - n) for row in range(rows) for n in range(1, width)]
    ring = [(0, 0), *there, *((row, 0) for row in range(rows - 1, 0, -1))]
    return [(*line[n][:even], row, *line[n][even + 1 :]) for row, n in ring]


def _snake(sizes: tuple[int, ...]) -> list[_Cell]:
    """All cells of a box, each beside the one before: along the last axis forwards, then backwards, and so on."""
    if not sizes:
        return [()]
    rest = _snake(sizes[1:])
    return [(n, *cell) for n in range(sizes[0]) for cell in (rest if n % 2 == 0 else reversed(rest))]
