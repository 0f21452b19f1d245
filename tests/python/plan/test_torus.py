"""Where a slice may lie in a torus: each box is checked against all others by plain enumeration.

TORUS-1: `test_neighbours_in_a_slice_are_neighbours_in_the_torus`, `test_shapes_that_have_a_box`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from pathways.plan.topology import Topology
from pathways.plan.torus import CLOSED, Coordinates, Tori, Torus

#: TPU slices, x, y, z, cores. Small tori of every kind: lines, squares, cubes, with two cores per chip, odd sizes.
SIZES = [
    (1, 8, 1, 1, 1),
    (1, 4, 4, 1, 1),
    (1, 4, 2, 1, 2),
    (1, 2, 2, 4, 1),
    (1, 3, 5, 1, 1),
    (1, 4, 3, 2, 1),
    (2, 2, 4, 1, 1),
]
WRAPS = list(itertools.product([False, True], repeat=3))


def cells(sizes: Sequence[int]) -> dict[int, Coordinates]:
    """The coordinates of devices that fill a grid, numbered in C order."""
    return dict(enumerate(itertools.product(*map(range, sizes))))


def links(sizes: Sequence[int], wraps: Sequence[bool]) -> set[tuple[int, int]]:
    """The pairs of devices that are joined, in both directions."""
    number = {at: device for device, at in cells(sizes).items()}
    found = set()
    for at, device in number.items():
        for axis in range(1, 5):
            after = list(at)
            after[axis] += 1
            if after[axis] == sizes[axis] and (axis < 4 and wraps[axis - 1]):
                after[axis] = 0
            other = number.get(tuple(after), device)
            if other != device:
                found |= {(device, other), (other, device)}
    return found


def shapes(most: int) -> Iterator[tuple[int, ...]]:
    """All shapes of up to three axes with so many devices at most."""
    for axes in (1, 2, 3):
        yield from (shape for shape in itertools.product(range(1, most + 1), repeat=axes) if math.prod(shape) <= most)


def steps(devices: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pairs of neighbours in a slice."""
    mesh = np.asarray(devices).reshape(shape)
    for axis, size in enumerate(shape):
        for n in range(size - 1):
            yield from zip(mesh.take(n, axis).flat, mesh.take(n + 1, axis).flat, strict=True)


def rings(devices: Sequence[int], shape: Sequence[int], joined: set[tuple[int, int]]) -> int:
    """How many axes of a slice are closed."""
    mesh = np.asarray(devices).reshape(shape)
    ends = [(mesh.take(0, axis).flat, mesh.take(-1, axis).flat) for axis in range(len(shape))]
    return sum(all(a == b or (a, b) in joined for a, b in zip(*pair, strict=True)) for pair in ends)


@pytest.mark.parametrize("sizes", SIZES)
def test_neighbours_in_a_slice_are_neighbours_in_the_torus(sizes: tuple[int, ...]) -> None:
    """Whatever is taken already, and whichever axes wrap."""
    draw = np.random.default_rng(sum(sizes))
    count = math.prod(sizes)
    placed = 0
    for wraps in WRAPS:
        joined, torus = links(sizes, wraps), Torus(cells(sizes), wraps, 2)
        for shape in shapes(count):
            load = draw.choice([0, 0, 1, CLOSED], count)
            found = torus.place(shape, load)
            if found is None:
                continue
            placed += 1
            total, devices = found
            assert len(set(devices)) == math.prod(shape) == len(devices)
            assert total == load[list(devices)].sum() < CLOSED
            assert all(pair in joined for pair in steps(devices, shape)), (wraps, shape, devices)
    assert placed > 100


@pytest.mark.parametrize("sizes", [(1, 8, 1, 1, 1), (1, 4, 4, 1, 1), (1, 3, 4, 1, 1), (1, 2, 2, 2, 1)])
def test_a_slice_of_two_axes_has_a_box_whenever_there_is_one(sizes: tuple[int, ...]) -> None:
    """All boxes whose axes are lines, listed by hand: the one that is chosen has as little load as the best of them."""
    draw = np.random.default_rng(3)
    count, at = math.prod(sizes), cells(sizes)
    number = {place: device for device, place in at.items()}
    for wraps in WRAPS:
        torus = Torus(at, wraps, 1)
        for first, second in itertools.permutations((1, 2, 3), 2):
            for a, b in itertools.product(range(1, sizes[first] + 1), range(1, sizes[second] + 1)):
                load = draw.choice([0, 1, 2, CLOSED], count, p=[0.4, 0.3, 0.2, 0.1])
                least = CLOSED
                for corner in at.values():
                    box = []
                    for i, j in itertools.product(range(a), range(b)):
                        cell = list(corner)
                        cell[first] += i
                        cell[second] += j
                        for axis in (first, second):
                            cell[axis] %= sizes[axis] if wraps[axis - 1] else 1 << 30
                        box.append(number.get(tuple(cell)))
                    if None not in box:
                        least = min(least, int(sum(load[device] for device in box if device is not None)))
                found = torus.place((a, b), load)
                assert least == CLOSED or (found is not None and found[0] <= least), (wraps, (a, b), load)


def test_shapes_that_have_a_box() -> None:
    """Of a cube of 4 x 4 x 4 that wraps, as each axis of the slice takes axes of the cube for itself."""
    torus = Torus(cells((1, 4, 4, 4, 1)), (True, True, True), 4)
    free = [0] * 64
    for shape in [(64,), (16, 4), (4, 16), (4, 4, 4), (8, 4), (2, 4, 2), (12,), (3, 4), (1, 16, 1, 4), (48,)]:
        assert torus.place(shape, free) is not None, shape
    for shape in [(5,), (2, 2, 2, 2), (32, 8), (65,), (7, 7)]:
        assert torus.place(shape, free) is None, shape


def test_rings_come_first_then_few_hosts() -> None:
    sizes = (1, 4, 4, 1, 1)
    flat, torus = links(sizes, (False,) * 3), Torus(cells(sizes), (False,) * 3, 4)
    for shape, closed in [((4,), 1), ((16,), 1), ((2, 4), 1), ((8,), 1), ((2, 2), 2), ((4, 4), 0)]:
        found = torus.place(shape, [0] * 16)
        assert found is not None and rings(found[1], shape, flat) == closed, (shape, found)
    around, wrapped = links(sizes, (True,) * 3), Torus(cells(sizes), (True,) * 3, 4)
    for shape, closed in [((4,), 1), ((4, 4), 2), ((4, 2), 2), ((16,), 1), ((3,), 0)]:
        found = wrapped.place(shape, [0] * 16)
        assert found is not None and rings(found[1], shape, around) == closed, (shape, found)
    trays = {(x // 2 * 2 + y // 2) * 4 + x % 2 * 2 + y % 2: (0, x, y, 0, 0) for x in range(4) for y in range(4)}
    for shape, hosts in [((4,), 1), ((2, 2), 1), ((2, 4), 2), ((8,), 2)]:
        found = Torus(trays, (True,) * 3, 4).place(shape, [0] * 16)
        assert found is not None and len({device // 4 for device in found[1]}) == hosts, (shape, found)


def test_a_box_may_lie_across_the_end_of_an_axis() -> None:
    load = [0, 0, 0, 9, 9, 0, 0, 0]
    at = cells((1, 8, 1, 1, 1))
    assert Torus(at, (True, False, False), 1).place((6,), load) == (0, (5, 6, 7, 0, 1, 2))
    found = Torus(at, (False, False, False), 1).place((6,), load)
    assert found is not None and found[0] == 18
    closed = [CLOSED if each else 0 for each in load]
    assert Torus(at, (False, False, False), 1).place((6,), closed) is None
    del at[4]
    assert Torus(at, (True, False, False), 1).place((6,), [0] * 8) is None, "a device is missing: perhaps no ring"
    assert Torus(at, (True, False, False), 1).place((4,), [0] * 8) == (0, (0, 1, 2, 3))


def test_a_slice_lies_on_one_tpu_slice() -> None:
    torus = Torus(cells((2, 4, 2, 1, 1)), (True, True, True), 4)
    found = torus.place((2, 4), [1] * 8 + [0] * 8)
    assert found is not None and set(found[1]) == set(range(8, 16))
    assert torus.place((16,), [0] * 16) is None


def test_what_hosts_say() -> None:
    tori = Tori(Topology.grid(2, 2, 2))
    assert tori.of(0) is None and tori.coordinates == ((),) * 8
    tori.put(0, [0, 0, 0, 0, 0, 0, 1, 0, 0, 0], [True] * 3)
    first = tori.of(0)
    assert first is not None and first.place((3,), [0] * 4) is None
    tori.put(1, [0, 2, 0, 0, 0, 0, 3, 0, 0, 0], [True, False, False])
    whole = tori.of(0)
    assert whole is not None and whole.place((3,), [0, 9, 0, 0]) == (0, (2, 3, 0))
    assert tori.of(1) is None
    assert tori.coordinates[2:5] == ((0, 2, 0, 0, 0), (0, 3, 0, 0, 0), ())
    for coordinates, wraps in [
        ([0] * 9, [True] * 3),
        ([0] * 10, [True]),
        ([-1] + [0] * 9, [True] * 3),
        ([], [True] * 3),
    ]:
        with pytest.raises(ValueError, match="of 2 devices"):
            tori.put(2, coordinates, wraps)
    tori.put(2, [0] * 10, [True] * 3)
    assert tori.of(1) is None, "two devices at one place"
    tori.put(2, [0, 0, 0, 0, 0, 0, 1 << 30, 1 << 30, 1 << 30, 0], [True] * 3)
    assert tori.of(1) is None, "a host cannot make the controller keep a grid of any size"


def test_a_pod_is_searched() -> None:
    """The largest of a TPU v5p."""
    torus = Torus(cells((1, 16, 16, 24, 1)), (True,) * 3, 4)
    found = torus.place((16, 16, 24), [0] * 6144)
    assert found is not None and set(found[1]) == set(range(6144))
    found = torus.place((64, 4), [1] * 3072 + [0] * 3072)
    assert found is not None and found[0] == 0
