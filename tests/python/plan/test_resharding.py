"""Routes: for any two placements, every element of every destination is written exactly once, from a holder of it.

Map: exactly once and right (`test_any_plan`); replicas on the spot first, else spread; what a host without bytes
hears; cost at thousands of devices; refusals.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pathways.compiler.ir import ArrayType, MeshSpec, Tiling
from pathways.plan.resharding import Block, Placement, ReshardPlan, rectangle, reshard_plan, slices

MESHES = [(), (1,), (2,), (3,), (4,), (8,), (2, 2), (4, 2), (2, 4), (1, 4), (2, 3), (2, 2, 2)]


def placed(shape: tuple[int, ...], mesh: tuple[int, ...], spec: Any, devices: tuple[int, ...]) -> Placement:
    axes = tuple(zip("xyz", mesh, strict=False))
    return Placement(ArrayType(shape, np.dtype(np.float32), 0, spec), MeshSpec("m", axes), devices)


@st.composite
def specs(draw: Any, mesh: tuple[int, ...], rank: int) -> tuple[tuple[str, ...], ...]:
    """Any assignment of the mesh's axes to dimensions, in any order, or to none."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations("xyz"[: len(mesh)])):
        where = draw(st.integers(-1, rank - 1))
        if where >= 0:
            dims[where].append(axis)
    return tuple(map(tuple, dims))


@st.composite
def pairs(draw: Any) -> tuple[Placement, Placement, int]:
    """Two placements of one array, on devices that may or may not overlap, and the devices per host."""
    rank = draw(st.integers(0, 3))
    ends = []
    for _ in range(2):
        mesh = draw(st.sampled_from(MESHES))
        ends.append((mesh, draw(specs(mesh, rank))))
    shape = []
    for dim in range(rank):
        parts = [math.prod(dict(zip("xyz", mesh, strict=False))[axis] for axis in spec[dim]) for mesh, spec in ends]
        shape.append(math.lcm(*parts) * draw(st.integers(0, 2)))
    made = []
    for mesh, spec in ends:
        devices = draw(st.permutations(range(12)))[: math.prod(mesh)]
        made.append(placed(tuple(shape), mesh, spec, tuple(devices)))
    return made[0], made[1], draw(st.sampled_from([1, 2, 4, 12]))


def tiled(where: Placement) -> Placement:
    """The same placement, said by a tiling."""
    grid = where.parts()
    cells = tuple(int(np.ravel_multi_index(cell, grid)) if grid else 0 for cell in where.cells)
    kind = ArrayType(where.type.shape, where.type.dtype, 0, ((),) * len(grid), tiling=Tiling(grid, cells))
    return Placement(kind, where.mesh, where.devices)


def shards_of(where: Placement, full: np.ndarray) -> dict[int, np.ndarray]:
    return {device: full[slices(where.region(cell))] for device, cell in zip(where.devices, where.cells, strict=True)}


def same_cell(where: Placement, device: int, block: Block) -> bool:
    return where.region(dict(zip(where.devices, where.cells, strict=True))[device]) == block.region


def carry_out(
    plan: ReshardPlan, source: Placement, full: np.ndarray, each: int
) -> tuple[dict[int, np.ndarray], dict[int, Any]]:
    """What the destination's devices show after the copies, and how often each element of each block was written."""
    shards = shards_of(source, full)
    blocks = {host: [np.full(block.shape, -1, full.dtype) for block in group] for host, group in plan.blocks.items()}
    counts = {host: [np.zeros(block.shape, int) for block in group] for host, group in plan.blocks.items()}
    for (sender, receiver), copies in plan.copies.items():
        for copy in copies:
            assert copy.device // each == sender, "a host sends what its own devices hold"
            blocks[receiver][copy.block][slices(copy.target)] = shards[copy.device][slices(copy.source)]
            counts[receiver][copy.block][slices(copy.target)] += 1
    shown = {}
    for host, group in plan.blocks.items():
        for number, block in enumerate(group):
            for n, device in enumerate(block.devices):
                shown[device] = blocks[host][number]
                if block.shards:  # shown as it is, or copied from a neighbour
                    assert block.shards[n] // each == host
                    assert (
                        device == block.shards[n] or shards.get(device) is None or not same_cell(source, device, block)
                    )
                    shown[device] = shards[block.shards[n]]
            if block.shards:
                assert not counts[host][number].any(), "nobody writes what is shown as it is"
                counts[host][number] += 1
    return shown, counts


@settings(max_examples=400)
@given(pairs())
def test_any_plan(case: tuple[Placement, Placement, int]) -> None:
    source, target, each = case
    full = np.arange(math.prod(source.type.shape), dtype=np.int64).reshape(source.type.shape)
    plan = reshard_plan(source, target, each)
    shown, counts = carry_out(plan, source, full, each)
    wanted = shards_of(target, full)
    assert shown.keys() == wanted.keys()
    for device, shard in wanted.items():
        np.testing.assert_array_equal(shown[device], shard)
    for host, groups in counts.items():
        assert all((count == 1).all() for count in groups), "each element is written exactly once"
        assert {device // each for block in plan.blocks[host] for device in block.devices} == {host}
        assert plan.sources(host), "every destination hears from somebody"
        regions = [block.region for block in plan.blocks[host]]
        assert len(set(regions)) == len(regions) or not full.size, (
            "a host lands each part once, however many devices show it"
        )
    crossing = sum(
        math.prod(b - a for a, b in copy.target) for (a, b), copies in plan.copies.items() if a != b for copy in copies
    )
    assert plan.elements == crossing
    for host in {device // each for device in source.devices}:
        assert all(host in plan.sources(receiver) for receiver in plan.destinations(host))


@settings(max_examples=200)
@given(pairs(), st.sampled_from([1, 2, 8]))
def test_rectangles_in_bytes(case: tuple[Placement, Placement, int], itemsize: int) -> None:
    """A copy by strides writes the same bytes as the copy by regions."""
    source, target, each = case
    full = np.arange(math.prod(source.type.shape) * itemsize, dtype=np.uint8).reshape(*source.type.shape, itemsize)
    plan = reshard_plan(source, target, each)
    shards = {device: np.ascontiguousarray(shard) for device, shard in shards_of(source, full).items()}
    for (_, receiver), copies in plan.copies.items():
        for copy in copies:
            block = plan.blocks[receiver][copy.block]
            wanted = np.zeros((*block.shape, itemsize), np.uint8)
            wanted[slices(copy.target)] = shards[copy.device][slices(copy.source)]
            flat, got = shards[copy.device].reshape(-1), np.zeros(wanted.size, np.uint8)
            shard_shape = shards[copy.device].shape[:-1]
            start, to, row, rank, *dims = rectangle(copy, shard_shape, block.shape, itemsize)
            assert len(dims) == 3 * rank and rank <= len(block.shape)
            for at in itertools.product(*(range(count) for count in dims[::3])):
                a = start + sum(map(math.prod, zip(at, dims[1::3], strict=True)))
                b = to + sum(map(math.prod, zip(at, dims[2::3], strict=True)))
                got[b : b + row] = flat[a : a + row]
            np.testing.assert_array_equal(got.reshape(wanted.shape), wanted)


@settings(max_examples=200)
@given(pairs())
def test_what_is_on_the_host_does_not_cross(case: tuple[Placement, Placement, int]) -> None:
    source, target, each = case
    for (sender, receiver), copies in reshard_plan(source, target, each).copies.items():
        if sender != receiver:
            for copy in copies:
                cell = dict(zip(source.devices, source.cells, strict=True))[copy.device]
                assert all(device // each != receiver for device in source.replicas[cell])


def test_same_placement_stays_where_it_is() -> None:
    where = placed((8, 8), (2, 2), (("x",), ("y",)), (0, 1, 2, 3))
    plan = reshard_plan(where, where, 2)
    assert set(plan.copies) == {(0, 0), (1, 1)} and plan.elements == 0
    assert not any(plan.copies.values()) and plan.is_direct(0) and plan.is_direct(1)
    assert all(block.shards == block.devices for blocks in plan.blocks.values() for block in blocks), "MEM-4: no copy"


def test_replicas_share_the_sending() -> None:
    source = placed((64,), (8,), ((),), tuple(range(8)))
    target = placed((64,), (8,), (("x",),), tuple(range(8, 16)))
    plan = reshard_plan(source, target, 1)
    assert sorted(sender for sender, _ in plan.copies) == list(range(8)), "each replica serves one destination"
    assert plan.elements == 64
    source = placed((64,), (8,), ((),), tuple(range(8)))  # on four hosts of two devices: each host serves one
    target = placed((64,), (8,), (("x",),), tuple(range(8, 16)))
    assert sorted(sender for sender, _ in reshard_plan(source, target, 2).copies) == list(range(4))


def test_a_destination_without_bytes_hears_from_one_host() -> None:
    source = placed((0, 4), (2,), ((), ("x",)), (0, 1))
    target = placed((0, 4), (4,), ((), ("x",)), (2, 3, 4, 5))
    plan = reshard_plan(source, target, 2)
    assert {receiver: plan.sources(receiver) for receiver in plan.blocks} == {1: (0,), 2: (0,)}
    assert all(not copies for copies in plan.copies.values())


def test_the_shape_is_kept() -> None:
    with pytest.raises(ValueError, match=r"\(4,\) is not \(8,\)"):
        reshard_plan(placed((4,), (1,), ((),), (0,)), placed((8,), (1,), ((),), (1,)), 1)


@settings(max_examples=200)
@given(pairs())
def test_a_hosts_own_part(case: tuple[Placement, Placement, int]) -> None:
    """What one host works out for itself is what the whole plan says about it."""
    source, target, each = case
    whole = reshard_plan(source, target, each)
    for host in {device // each for device in (*source.devices, *target.devices)}:
        mine = reshard_plan(source, target, each, host)
        assert mine.sources(host) == whole.sources(host) and mine.destinations(host) == whole.destinations(host)
        assert mine.blocks == {at: whole.blocks[at] for at in mine.blocks}
        assert mine.blocks.keys() == {*whole.destinations(host), *({host} & whole.blocks.keys())}
        for pair, copies in whole.copies.items():
            if pair[0] == host:
                assert sorted(mine.copies[pair], key=repr) == sorted(copies, key=repr)
        assert all(host in pair for pair in mine.copies)


@pytest.mark.parametrize(
    ("mesh", "one", "other", "most"),
    [
        ((4096,), (("x",), ()), (("x",), ()), 64),
        ((64, 64), (("x",), ("y",)), (("y",), ("x",)), 64),
        ((64, 64), (("x", "y"), ()), (("y", "x"), ()), 64),
        ((4096,), ((), ()), (("x",), ()), 64),
        ((4096,), (("x",), ()), ((), ()), 64 * 64),
        ((64, 64), ((), ("x",)), (("x",), ()), 64 * 64),
    ],
    ids=["same", "transposed-axes", "permuted", "replicated-cut", "cut-replicated", "columns-rows"],
)
def test_a_hosts_part_of_thousands_of_devices(mesh: tuple[int, ...], one: Any, other: Any, most: int) -> None:
    """COST-3: a host of 64 devices among 128 hosts copies what its own shards need, whatever the others do."""
    count, each = 4096, 64
    source = placed((4096, 4096), mesh, one, tuple(range(count)))
    target = placed((4096, 4096), mesh, other, tuple(range(count, 2 * count)))
    for host in (3, 67):
        begin = time.process_time()
        plan = reshard_plan(source, target, each, host)
        copies = sum(map(len, plan.copies.values()))
        assert copies <= most
        print(
            f"host {host}: {copies} copies to {len(plan.destinations(host))} hosts, {len(plan.sources(host))} "
            f"sources, {time.process_time() - begin:.2f} s"
        )


def test_every_spec_of_a_mesh_of_two_axes() -> None:
    """All combinations of two axes on two dimensions, both ends, on hosts of two devices."""
    dims = [()], [("x",)], [("y",)], [("x", "y")], [("y", "x")]
    every = [(a[0], b[0]) for a in dims for b in dims if not set(a[0]) & set(b[0])]
    full = np.arange(64).reshape(8, 8)
    for one, other in itertools.product(every, every):
        source = placed((8, 8), (2, 2), one, (0, 1, 2, 3))
        target = placed((8, 8), (4, 2), other, (2, 3, 4, 5, 6, 7, 8, 9))
        shown, _ = carry_out(reshard_plan(source, target, 2), source, full, 2)
        for device, shard in shards_of(target, full).items():
            np.testing.assert_array_equal(shown[device], shard)


@given(pairs())
def test_pieces_of_the_packed_form(pair: tuple[Placement, Placement, int]) -> None:
    """Each host's pieces are the cells of its devices; no two of them could be one."""
    where, _, each = pair
    packing = where.packing
    assume(packing.nbytes > 0)
    needed = np.zeros((12, packing.nbytes), bool)  # by host
    for device, cell in zip(where.devices, where.cells, strict=True):
        begin = int(np.ravel_multi_index(cell, where.parts())) * packing.stride if cell else 0
        needed[device // each, begin : begin + packing.stride] = True
    pieces = where.pieces(each)
    for (host, at, nbytes), (other, begin, _) in itertools.pairwise(pieces):
        assert (host, at + nbytes) < (other, begin)
    for host, at, nbytes in pieces:
        assert needed[host, at : at + nbytes].all()
        needed[host, at : at + nbytes] = False
    assert not needed.any()


@given(pairs())
def test_a_tiling_is_what_a_spec_says(pair: tuple[Placement, Placement, int]) -> None:
    source, target, each = pair
    assert reshard_plan(tiled(source), tiled(target), each) == reshard_plan(source, target, each)
    assert tiled(source).pieces(each) == source.pieces(each)


@pytest.mark.parametrize(
    ("grid", "cells", "words"),
    [
        ((2,), (0, 1), "cannot be cut into"),
        ((3, 1), (0, 1, 2), "cannot be cut into"),
        ((0, 1), (), "cannot be cut into"),
        ((2, 1), (0, 1, 1), "equally often"),
        ((2, 1), (0, 0), "equally often"),
        ((2, 1), (0, 2), "equally often"),
        ((2, 1), (0, -1), "equally often"),
        ((2, 1), (0, 1, 0, 1, 0, 1), "4 devices"),
    ],
)
def test_tilings_that_cut_nothing_evenly(grid: tuple[int, ...], cells: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tiling(grid, cells).check((4, 4), 4 if words == "4 devices" else len(cells))


def test_a_tiling_of_very_many_parts_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="equally often"):
        Tiling((1 << 60,), (0,)).check((1 << 60,), 1)
