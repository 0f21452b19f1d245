"""The resource manager: every request is either placed by the rules or refused with what was asked and what there is.

RM-1 load, RM-2 map, RM-3 groups: `test_any_history_keeps_the_books`.
TORUS-1: `test_slices_of_a_torus`.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways.controller.resource_manager import ResourceManager
from pathways.errors import SliceError
from pathways.plan.topology import Topology

grids = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


def manager(islands: int = 2, hosts: int = 2, devices: int = 4) -> ResourceManager:
    return ResourceManager(Topology.grid(islands, hosts, devices))


def is_rectangle_or_run(devices: tuple[int, ...], width: int) -> bool:
    rows = [device // width for device in devices]
    columns = [device % width for device in devices]
    height, breadth = max(rows) - min(rows) + 1, max(columns) - min(columns) + 1
    rectangle = height * breadth == len(devices)
    run = devices == tuple(range(devices[0], devices[0] + len(devices)))
    return rectangle or run


@given(grids, shapes, st.integers(0, 3) | st.none())
def test_a_slice_is_placed_contiguously_or_refused(
    grid: tuple[int, int, int], shape: tuple[int, ...], island: int | None
) -> None:
    topology = Topology.grid(*grid)
    resources = ResourceManager(topology)
    names = tuple("abc"[: len(shape)])
    possible = math.prod(shape) <= grid[1] * grid[2] and (island is None or island < grid[0])
    if not possible:
        with pytest.raises(SliceError) as refusal:
            resources.allocate(shape, names, island)
        assert str(math.prod(shape)) in str(refusal.value)
        assert resources.slices == ()
        return
    binding = resources.allocate(shape, names, island)
    assert binding.shape == shape and binding.axis_names == names
    assert island is None or binding.island == island
    assert len(binding.devices) == math.prod(shape)
    assert is_rectangle_or_run(binding.devices, grid[2])
    assert binding.devices == tuple(sorted(binding.devices)), "row-major, host after host"
    resources.validate()


@given(grids, st.lists(st.tuples(shapes, st.booleans()), max_size=12), st.randoms(use_true_random=False))
def test_any_history_keeps_the_books(
    grid: tuple[int, int, int], history: list[tuple[tuple[int, ...], bool]], random: object
) -> None:
    resources = ResourceManager(Topology.grid(*grid))
    for shape, release in history:
        try:
            binding = resources.allocate(shape)
        except SliceError:
            continue
        groups = resources.groups
        assert groups[binding.group] == binding.hosts
        resources.validate()
        if release:
            resources.release(binding.slice_id)
            resources.validate()
            assert resources.groups == groups, "RM-3"
    for binding in resources.slices:
        resources.release(binding.slice_id)
    assert set(resources.device_load()) == {0}


@given(grids)
def test_single_devices_fill_the_cluster_evenly(grid: tuple[int, int, int]) -> None:
    resources = ResourceManager(Topology.grid(*grid))
    total = resources.topology.devices
    for _ in range(total):
        resources.allocate((1,))
    assert resources.device_load() == (1,) * total
    for _ in range(total):
        resources.allocate((1,))
    assert resources.device_load() == (2,) * total, "multiplexing goes to the least loaded place"


def test_islands_take_turns() -> None:
    resources = manager(islands=3)
    assert [resources.allocate((2,)).island for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_islands_of_different_sizes_are_compared_by_load_per_device() -> None:
    resources = ResourceManager(Topology(((0,), (1, 2, 3)), devices_per_host=2))
    assert [resources.allocate((2,)).island for _ in range(4)] == [0, 1, 1, 1]


def test_release_makes_room() -> None:
    resources = manager(islands=1, hosts=1, devices=4)
    first = resources.allocate((2,))
    second = resources.allocate((2,))
    assert set(first.devices).isdisjoint(second.devices)
    resources.release(first.slice_id)
    assert resources.allocate((2,)).devices == first.devices


def test_a_matrix_shape_keeps_its_rows_on_one_host() -> None:
    binding = manager().allocate((2, 4), ("data", "model"))
    assert binding.devices == (0, 1, 2, 3, 4, 5, 6, 7) and binding.hosts == (0, 1)
    tall = ResourceManager(Topology.grid(1, 3, 4)).allocate((3, 2), ("x", "y"))
    assert tall.devices == (0, 1, 4, 5, 8, 9), "each row of two on one host"


def test_a_slice_of_one_host_stays_on_one_host() -> None:
    resources = manager(islands=1)
    assert resources.allocate((2, 2)).hosts == (0,)
    assert resources.allocate((4,)).hosts == (1,)


def test_a_count_without_a_rectangle_is_a_run() -> None:
    assert manager().allocate((5,)).devices == (0, 1, 2, 3, 4)


def test_three_axes_and_more() -> None:
    assert len(manager(1, 4, 4).allocate((2, 4, 2), ("a", "b", "c")).devices) == 16
    assert len(manager(1, 4, 4).allocate((2, 2, 2, 2)).devices) == 16


def test_equal_hosts_share_a_group() -> None:
    resources = manager(islands=1)
    whole, again = resources.allocate((8,)), resources.allocate((2, 4))
    assert whole.group == again.group == resources.group([1, 0])
    assert resources.allocate((2,)).group != whole.group
    with pytest.raises(SliceError, match=r"hosts 0\.\.1"):
        resources.group([2])


def test_remap_moves_a_slice_and_its_load() -> None:
    resources = manager()
    binding = resources.allocate((2,))
    moved = resources.remap(binding.slice_id, (9, 8))
    assert moved.devices == (9, 8) and moved.island == 1 and moved.hosts == (2,)
    assert resources.binding(binding.slice_id) == moved
    assert sum(resources.device_load()) == 2 and resources.device_load()[8] == 1
    resources.validate()
    for wrong, words in (((1,), "2 distinct"), ((1, 1), "2 distinct"), ((7, 8), "one island"), ((0, 99), "0..15")):
        with pytest.raises(SliceError, match=words):
            resources.remap(binding.slice_id, wrong)
    resources.validate()


@pytest.mark.parametrize(
    ("shape", "names", "island", "words"),
    [
        ((), (), None, "empty shape"),
        ((0,), ("x",), None, "positive ints, got (0,)"),
        ((2, -1), ("x", "y"), None, "positive ints, got (2, -1)"),
        ((2.5,), ("x",), None, "positive ints"),
        ("ab", ("x",), None, "positive ints"),
        (3, ("x",), None, "positive ints, got 3"),
        ((2, 2), ("x",), None, "has 2 axes, but 1 axis names"),
        ((2, 2), ("x", "x"), None, "differ"),
        ((2,), ("x",), 2, "on island 2, but the cluster has islands 0..1"),
        ((2,), ("x",), -1, "on island -1"),
        ((9,), ("x",), None, "9 devices was asked for, but a slice lies on one island and the biggest has 8"),
        ((3, 3), ("x", "y"), 1, "(9 devices) was asked for on island 1, which has 8 devices"),
    ],
)
def test_bad_requests_say_what_was_asked_and_what_there_is(
    shape: tuple[int, ...], names: tuple[str, ...], island: int | None, words: str
) -> None:
    resources = manager()
    with pytest.raises(SliceError) as refusal:
        resources.allocate(shape, names, island)
    assert words in str(refusal.value)
    resources.validate()


def test_an_unknown_slice() -> None:
    with pytest.raises(SliceError, match="no slice 3; live slices: none"):
        manager().release(3)


def test_a_big_island_is_placed_quickly_and_right() -> None:
    resources = ResourceManager(Topology.grid(1, 2048, 4))
    assert resources.allocate((1024, 4)).hosts == tuple(range(1024))
    assert resources.allocate((1024, 4)).hosts == tuple(range(1024, 2048))
    resources.validate()


def test_another_shape_stays_on_the_island_if_it_has_room() -> None:
    resources = manager()
    binding = resources.allocate((2, 1), ("x", "y"), island=0)
    resources.allocate((4,), island=0)
    grown = resources.remap(binding.slice_id, shape=(4, 2))
    assert (grown.island, grown.devices, grown.axis_names) == (0, tuple(range(8)), ("x", "y"))
    with pytest.raises(SliceError, match="the biggest has 8 devices"):
        resources.remap(binding.slice_id, shape=(3, 3))
    with pytest.raises(SliceError, match="2 axis names"):
        resources.remap(binding.slice_id, shape=(3,))
    assert resources.binding(binding.slice_id) == grown
    named = resources.remap(binding.slice_id, devices=(9, 8), shape=(1, 2))
    assert (named.devices, named.shape) == ((9, 8), (1, 2))
    resources.validate()


def test_a_move_is_on_both_sides_until_it_is_settled_or_undone() -> None:
    resources = manager()
    binding = resources.allocate((2,), island=0)
    resources.remap(binding.slice_id, (8, 9))
    resources.remap(binding.slice_id, (12, 13))
    assert resources.slices_on([0]) == resources.slices_on([3]) == (binding.slice_id,)
    assert resources.slices_on([2]) == ()
    resources.undo(binding.slice_id)
    assert resources.binding(binding.slice_id) == binding
    assert (resources.slices_on([0]), resources.slices_on([3])) == ((binding.slice_id,), ())
    resources.validate()
    resources.remap(binding.slice_id, (8, 9))
    resources.settle(binding.slice_id)
    resources.undo(binding.slice_id)  # of one that is settled, nothing
    assert (resources.slices_on([0]), resources.slices_on([2])) == ((), (binding.slice_id,))
    resources.remap(binding.slice_id, (0, 1))
    resources.release(binding.slice_id)
    assert resources.slices_on(range(4)) == ()
    resources.validate()


def test_drained_hosts_take_no_slices() -> None:
    resources = manager()
    first = resources.allocate((2,), island=0)
    resources.set_drained([0], True)
    for _ in range(4):
        assert 0 not in resources.allocate((4,)).hosts
    assert resources.allocate((4,), island=0).devices == (4, 5, 6, 7)
    with pytest.raises(SliceError, match=r"hosts \[0\] are drained.*pathways undrain"):
        resources.allocate((5,), island=0)
    assert resources.allocate((5,)).island == 1
    with pytest.raises(SliceError, match=r"drained hosts \[0\]"):
        resources.remap(first.slice_id, (2, 3))
    assert [devices for _, devices in resources.places(first.slice_id)] == [(4, 5), (14, 15)]
    resources.remap(first.slice_id, (4, 5))
    resources.undo(first.slice_id)
    assert resources.binding(first.slice_id) == first, "the way back is open: its arrays are there"
    resources.set_drained([1, 2, 3], True)
    assert resources.places(first.slice_id) == []
    with pytest.raises(SliceError, match="no room"):
        resources.allocate((1,))
    resources.set_drained([3], False)
    assert resources.drained == {0, 1, 2}
    assert resources.allocate((4,)).hosts == (3,)
    resources.set_missing(1, "is lost")
    assert resources.places(first.slice_id) == []
    resources.set_drained([1, 2, 3], False)
    there = resources.topology.island_devices(1)[: len(first.devices)]
    with pytest.raises(SliceError, match=r"are on island 1, which is lost; `cluster\.wait_for"):
        resources.remap(first.slice_id, there)
    resources.validate()


def on_a_ring(hosts: int = 4, devices: int = 2) -> ResourceManager:
    """One island whose devices are joined as a ring, host after host."""
    resources = manager(1, hosts, devices)
    for host in range(hosts):
        places = [(0, host * devices + n, 0, 0, 0) for n in range(devices)]
        resources.tori.put(host, [number for place in places for number in place], (True, False, False))
    return resources


def test_slices_of_a_torus() -> None:
    resources = on_a_ring()
    first = resources.allocate((3,))
    assert first.devices == (0, 1, 2)
    second = resources.allocate((3,))
    assert second.devices == (3, 4, 5)
    resources.release(first.slice_id)
    across = resources.allocate((5,))
    assert across.devices == (6, 7, 0, 1, 2) and across.hosts == (0, 1, 3)
    resources.validate()
    assert resources.remap(across.slice_id, shape=(4,)).devices == (6, 7, 0, 1)
    resources.validate()


def test_without_a_box_a_slice_lies_as_on_other_devices() -> None:
    resources, plain = on_a_ring(), manager(1, 4, 2)
    for shape in [(2, 3), (2, 4), (4, 2)]:  # of a line, no two axes of the slice can have an axis for themselves
        assert resources.allocate(shape).devices == plain.allocate(shape).devices


def test_free_devices_go_before_neighbours() -> None:
    resources = manager(1, 1, 4)
    resources.tori.put(0, [number for x in (0, 2, 1, 3) for number in (0, x, 0, 0, 0)], (False, False, False))
    assert resources.allocate((4,)).devices == (0, 2, 1, 3)
    for device in (2, 3):
        resources.remap(resources.allocate((1,)).slice_id, (device,))
    assert resources.allocate((2,)).devices == (0, 1), "free ones, which have no link"
    resources.validate()


def test_drained_hosts_of_a_torus() -> None:
    resources = on_a_ring()
    resources.set_drained([1], True)
    assert resources.allocate((6,)).devices == (4, 5, 6, 7, 0, 1)
    with pytest.raises(SliceError, match="drained"):
        resources.allocate((7,))
    resources.validate()
