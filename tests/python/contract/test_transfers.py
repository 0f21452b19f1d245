"""Transfers between slices: right for any pair of shardings and device counts, against NumPy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import pathways as pw

SPECS = {
    1: [P(), P("x"), P(None, "x")],
    2: [
        P(),
        P("x"),
        P("y"),
        P(None, "x"),
        P("x", "y"),
        P("y", "x"),
        P(("x", "y")),
        P(("y", "x")),
        P(None, ("x", "y")),
        P(None, ("y", "x")),
    ],
}
RELAXED = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def largest(cluster: Any) -> int:
    """Devices of the largest slice."""
    return max(len(hosts) for hosts in cluster.islands) * len(cluster.devices) // len(cluster.hosts)


@pytest.fixture
def slices(cluster: Any, add: Any) -> list[Any]:
    """Two slices of each shape, spread over islands and devices."""
    shapes = [(1,), (2,), (4,), (8,), (2, 2), (1, 2), (4, 1), (2, 4), (4, 2)]
    return [add(shape) for shape in shapes if math.prod(shape) <= largest(cluster) for _ in range(2)]


@st.composite
def journeys(draw: Any) -> Any:
    """Where an array goes, stop by stop: (which slice, which spec), and its shape and dtype."""
    stops = draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=4))
    shape = draw(st.sampled_from([(8, 8), (16, 8), (8, 16, 3), (8, 0), (24, 40), (256, 64)]))
    return stops, shape, draw(st.sampled_from([np.float32, np.int8, np.bool_, np.uint16]))


@RELAXED
@given(journey=journeys())
def test_any_journey(slices: list[Any], journey: Any) -> None:
    """One program of transfers; and the same journey one `pw.device_put` at a time."""
    stops, shape, dtype = journey
    value = (np.arange(math.prod(shape)) % 251).reshape(shape).astype(dtype)
    route = []
    for which, spec in stops:
        slice_ = slices[which % len(slices)]
        known = SPECS[len(slice_.axis_names)]
        route.append((slice_, known[spec % len(known)]))

    def travel(x: Any) -> list[Any]:
        seen = []
        for slice_, spec in route[1:]:
            x = pw.device_put(x, slice_, spec)
            seen.append(x)
        return seen

    start = pw.device_put(value, *route[0])
    for got in (pw.program(travel)(start), travel(start)):
        for (slice_, spec), array in zip(route[1:], got, strict=True):
            assert array.sharding.is_equivalent_to(jax.sharding.NamedSharding(slice_.mesh, spec), len(shape))
            np.testing.assert_array_equal(np.asarray(array), value)
    np.testing.assert_array_equal(np.asarray(start), value)


@RELAXED
@given(one=st.integers(0, 9), two=st.integers(0, 9), three=st.integers(0, 9))
def test_between_computations(slices: list[Any], one: int, two: int, three: int) -> None:
    """Shardings as computations declare them: out of one, into another, on other slices."""
    wide = [slice_ for slice_ in slices if len(slice_.axis_names) == 2]
    specs = SPECS[2]
    f = pw.jit(lambda x: x * 2, devices=wide[one % len(wide)], out_shardings=specs[one])
    g = pw.jit(lambda x: x + 1, devices=wide[two % len(wide)], in_shardings=specs[two], out_shardings=specs[three])
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    np.testing.assert_array_equal(np.asarray(pw.program(lambda x: g(f(x)))(value)), value * 2 + 1)


def test_every_pair_of_shardings_between_two_meshes(cluster: Any, add: Any) -> None:
    one, two = add((2, 2)), add((2, 2) if largest(cluster) == 4 else (4, 2))
    value = np.arange(16 * 8, dtype=np.int32).reshape(16, 8)
    starts = [pw.device_put(value, one, spec) for spec in SPECS[2]]
    everywhere = pw.program(lambda x: [pw.device_put(x, two, spec) for spec in SPECS[2]])
    for start, spec in zip(starts, SPECS[2], strict=True):
        for array, target in zip(everywhere(start), SPECS[2], strict=True):
            np.testing.assert_array_equal(np.asarray(array), value, err_msg=f"{spec} -> {target}")


def test_every_pair_of_sizes(cluster: Any, add: Any) -> None:
    sizes = [size for size in (1, 2, 4, 8) if size <= largest(cluster)]
    value = np.arange(64, dtype=np.float32)
    for one, two in itertools.product(sizes, sizes):
        for start, end in itertools.product((P(), P("x")), (P(), P("x"))):
            array = pw.device_put(pw.device_put(value, add(one), start), add(two), end)
            np.testing.assert_array_equal(np.asarray(array), value)


def test_many_and_large_transfers_in_flight(add: Any) -> None:
    one, two = add(4), add(4)
    f = pw.jit(lambda x: x + 1, devices=one, in_shardings=P("x"), out_shardings=P("x"))
    g = pw.jit(lambda x: x * 2, devices=two, in_shardings=P("x"), out_shardings=P("x"))
    both = pw.program(lambda x: g(f(x)))
    value = np.arange(1 << 20, dtype=np.float32)
    start = pw.device_put(value, one, P("x"))
    results = [both(start) for _ in range(16)]
    for result in results:
        np.testing.assert_array_equal(np.asarray(result), (value + 1) * 2)


def test_bytes_moved_are_those_that_crossed(islands_cluster: Any) -> None:
    devices = pw.make_virtual_device_set(islands_cluster)
    one, two = devices.add_slice(devices=4, island=0), devices.add_slice(devices=4, island=1)
    value = np.arange(1 << 16, dtype=np.float32)
    start = jax.block_until_ready(pw.device_put(value, one, P("x")))
    before = islands_cluster.stats()["bytes_moved"]
    jax.block_until_ready(pw.device_put(start, two, P("x")))
    assert islands_cluster.stats()["bytes_moved"] - before == value.nbytes
