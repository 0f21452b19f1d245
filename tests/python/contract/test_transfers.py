"""Transfers between slices: right for any pair of shardings, device counts and dtypes at any distance, against NumPy.

Map: any journey, any dtype (`test_any_journey`, `test_keys`); every distance takes the way that the plan's text says
(`test_every_distance`, `test_the_route_is_in_the_plans_text`); MEM-4 (`test_shards_that_stay_share_memory`); doubles: a
slow channel (`test_a_slow_channel`), a full arena (`test_a_full_arena`, `test_what_never_fits`).
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from thoroughness import THOROUGHNESS

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
RELAXED = settings(max_examples=15 * THOROUGHNESS, suppress_health_check=[HealthCheck.function_scoped_fixture])
NARROW = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz")
NARROW += ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *(name for name in NARROW if hasattr(jnp, name) and hasattr(ml_dtypes, name)),
]


def sample(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Small numbers of any type, in no order that a wrong stride would keep."""
    wide = np.dtype(dtype) if dtype[:2] in ("bo", "co") else np.dtype(getattr(ml_dtypes, dtype, dtype))
    numbers = (np.arange(math.prod(shape), dtype=np.uint64) * 2654435761 >> 7) % (2 if wide.itemsize == 1 else 251)
    value = numbers.reshape(shape).astype(wide)
    return value * wide.type(1 - 2j) if wide.kind == "c" else value


def same(got: Any, want: np.ndarray, about: str = "") -> None:
    """Equal in type, shape and every bit."""
    mine = np.asarray(got)
    assert (mine.dtype, mine.shape) == (want.dtype, want.shape), about
    assert mine.tobytes() == want.tobytes(), about


def largest(cluster: Any) -> int:
    """Devices of the largest slice."""
    return max(len(hosts) for hosts in cluster.islands) * len(cluster.devices) // len(cluster.hosts)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("local", "islands", "machines")]


@pytest.fixture(params=["embedded", *SLOW])
def cluster(request: pytest.FixtureRequest) -> Any:
    """A connected cluster, of each kind in turn; and as if on several machines."""
    return request.getfixturevalue(f"{request.param}_cluster")


@pytest.fixture
def slices(cluster: Any, add: Any) -> list[Any]:
    """Two slices of each shape, spread over islands and devices."""
    shapes = [(1,), (2,), (4,), (8,), (2, 2), (1, 2), (4, 1), (2, 4), (4, 2)]
    return [add(shape) for shape in shapes if math.prod(shape) <= largest(cluster) for _ in range(2)]


@st.composite
def journeys(draw: Any) -> Any:
    """Where an array goes, stop by stop: (which slice, which spec), and its shape and dtype."""
    stops = draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=4))
    shape = draw(st.sampled_from([(8, 8), (16, 8), (8, 16, 3), (8, 0), (24, 40), (256, 64), (256, 512), (1,), ()]))
    return stops, shape, draw(st.sampled_from(DTYPES))


@RELAXED
@given(journey=journeys())
def test_any_journey(slices: list[Any], journey: Any) -> None:
    """One program of transfers; and the same journey one `pw.device_put` at a time."""
    stops, shape, dtype = journey
    value = sample(shape, dtype)
    route = []
    for which, spec in stops:
        slice_ = slices[which % len(slices)]
        known = SPECS[len(slice_.axis_names)] if len(shape) > 1 else [P()]
        route.append((slice_, known[spec % len(known)]))

    def travel(x: Any) -> list[Any]:
        seen = []
        for slice_, spec in route[1:]:
            x = pw.device_put(x, slice_, spec)
            seen.append(x)
        return seen

    with jax.enable_x64(True):
        start = pw.device_put(value, *route[0])
        for got in (pw.program(travel)(start), travel(start)):
            for (slice_, spec), array in zip(route[1:], got, strict=True):
                assert array.sharding.is_equivalent_to(jax.sharding.NamedSharding(slice_.mesh, spec), len(shape))
                same(array, value)
        same(start, value)


def test_keys(slices: list[Any]) -> None:
    """A PRNG key's words are never cut."""
    for impl in ("threefry2x32", "rbg"):
        keys = jax.random.split(jax.random.key(7, impl=impl), 8)
        array = pw.device_put(keys, slices[-1], P("x"))
        for slice_, spec in ((slices[0], P()), (slices[-2], P("y")), (slices[-1], P(("x", "y")))):
            array = pw.device_put(array, slice_, spec)
            back = jax.device_get(array)
            assert array.dtype == keys.dtype
            np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))


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


def pairs_by_distance(cluster: Any) -> dict[str, tuple[Any, Any]]:
    """Two slices for each distance that the cluster has; each of one host's devices, or of one device."""
    devices = pw.make_virtual_device_set(cluster)
    each = len(cluster.devices) // len(cluster.hosts)
    alone = [devices.add_slice(devices=1, island=i) for i in range(len(cluster.islands)) for _ in range(4 * each)]
    found: dict[str, tuple[Any, Any]] = {}
    for one, two in itertools.combinations(alone, 2):
        a, b = one.devices[0], two.devices[0]
        found.setdefault(
            "same device"
            if a.id == b.id
            else "same host"
            if a.host == b.host
            else "same island"
            if a.island == b.island
            else "other island",
            (one, two),
        )
    return found


@pytest.mark.slow
def test_every_distance(islands_cluster: Any) -> None:
    """Every dtype over every distance; and the bytes take the way that the plan's text says."""
    ways = {
        "same device": "by within one device, no copy: {} bytes",
        "same host": "by between devices of a host: {} bytes, 1 pairs",
        "same island": "by shared memory: {} bytes, hosts ",
        "other island": "by shared memory: {} bytes, hosts ",
    }
    pairs = pairs_by_distance(islands_cluster)
    assert pairs.keys() == ways.keys()
    with jax.enable_x64(True):
        for distance, (one, two) in pairs.items():
            values = [sample((4, 6), dtype) for dtype in DTYPES]
            starts = [pw.device_put(value, one) for value in values]
            move = pw.program(lambda arrays, two=two: [pw.device_put(array, two) for array in arrays])
            for dtype, value, array in zip(DTYPES, values, move(starts), strict=True):
                same(array, value, f"{dtype} over {distance}")
            text = move.lower(starts).as_text("plan")
            told = [line for line in text.splitlines() if " transfer on " in line]
            for value in values:  # the lines are in an order of the compiler's
                way = ways[distance].format(value.nbytes)
                assert sum(way in line for line in told) == sum(v.nbytes == value.nbytes for v in values), text


@pytest.mark.slow
def test_every_dtype_between_machines(machines_cluster: Any) -> None:
    """Bytes go as network transfers where machines differ, through memory where they do not; into one array from
    both.
    """
    one, two = (pw.make_virtual_device_set(machines_cluster).add_slice(shape=(4,)) for _ in range(2))
    before = machines_cluster.stats()["hosts"]
    with jax.enable_x64(True):
        values = [sample((4, 8), dtype) for dtype in DTYPES]
        starts = [pw.device_put(value, one, P("x")) for value in values]
        turn = pw.program(lambda arrays: [pw.device_put(array, two, P(None, "x")) for array in arrays])
        for dtype, value, array in zip(DTYPES, values, turn(starts), strict=True):
            same(array, value, dtype)
        text = turn.lower(starts).as_text("plan")
    for value in values:  # a quarter of each shard stays, a quarter goes next door, and half to the other machine
        part = value.nbytes // 16
        assert f"shared memory: {4 * part} bytes" in text and f"stream between machines: {8 * part} bytes" in text
    after = machines_cluster.stats()["hosts"]
    moved = {
        key: sum(b[key] - a[key] for a, b in zip(before, after, strict=True)) for key in ("bytes_shipped", "bytes_sent")
    }
    assert moved == {
        "bytes_shipped": sum(v.nbytes for v in values) // 2,
        "bytes_sent": sum(v.nbytes for v in values) // 4,
    }


@pytest.mark.slow
def test_the_route_is_in_the_plans_text(islands_cluster: Any) -> None:
    """Kinds of ways, bytes and pairs; a reshard that keeps some shards where they are says how many."""
    devices = pw.make_virtual_device_set(islands_cluster)
    one, two = devices.add_slice(shape=(4,), island=0), devices.add_slice(shape=(4,), island=1)
    value = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    start = pw.device_put(value, one, P("x"))

    def told(slice_: Any, spec: P) -> str:
        program = pw.program(lambda x: pw.device_put(x, slice_, spec))
        np.testing.assert_array_equal(np.asarray(program(start)), value)
        (line,) = [line for line in program.lower(start).as_text("plan").splitlines() if " transfer on " in line]
        return line.partition(" by ")[2]

    assert re.fullmatch(r"shared memory: 16384 bytes, hosts 0->2 x2, 1->3 x2", told(two, P("x")))
    assert re.fullmatch(
        r"within a host: 8192 bytes, hosts 0->0 x4, 1->1 x4; shared memory: 8192 bytes, hosts 0->1 x4, 1->0 x4",
        told(one, P(None, "x")),
    )
    whole = pw.device_put(start, one, P())  # on each host; one block of it, for its two devices
    assert np.array_equal(np.asarray(whole), value)
    assert "within a host: 16384 bytes" in told(one, P()) and "shared memory: 16384 bytes" in told(one, P())


def test_shards_that_stay_share_memory(cluster: Any, add: Any) -> None:
    """MEM-4: where device and extent stay no byte is moved, and nobody's buffer is given away under another's name."""
    one = add((2, 2))
    other = [slice_ for slice_ in (add((2, 2)) for _ in range(8)) if slice_.devices == one.devices]
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    start = pw.device_put(value, one, P("x"))
    jax.block_until_ready(start)
    for slice_ in other[:1]:
        before = cluster.stats()["bytes_moved"]
        moved = jax.block_until_ready(pw.device_put(start, slice_, P("x")))
        assert cluster.stats()["bytes_moved"] == before
        give = pw.jit(lambda x: x + 1, devices=slice_, in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0)
        same(give(moved), value + 1)
        same(start, value)


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a cluster of one's own: two islands of one host."""
    from pathways.cluster.launcher import start_local_cluster

    started: list[Any] = []

    def start(**wanted: Any) -> tuple[Any, Any, Any]:
        for name in [name for name in wanted if name.startswith("PATHWAYS_")]:
            monkeypatch.setenv(name, wanted.pop(name))
        started.append(start_local_cluster(2, 1, 1, **wanted))
        started.append(pw.connect(started[-1].address))
        devices = pw.make_virtual_device_set(started[-1])
        return started[-1], devices.add_slice(devices=1, island=0), devices.add_slice(devices=1, island=1)

    yield start
    for thing in reversed(started):
        thing.close()


@pytest.mark.slow
def test_a_slow_channel(private: Callable[..., Any]) -> None:
    """Copies that take 0.3 s do not stall the host that makes them, and hold their source until they are done."""
    _, one, two = private(PATHWAYS_TEST_SLOW_COPIES="0.3")
    add_one = pw.jit(lambda x: x + 1, devices=one)
    double = pw.jit(lambda x: x * 2, devices=two)
    small, large = np.arange(8, dtype=np.float32), np.arange(1 << 20, dtype=np.float32)
    both = pw.program(lambda x: double(add_one(x)))
    for value in (small, large):
        jax.block_until_ready(add_one(value))
        same(both(value), (value + 1) * 2)  # compiled
        results = [both(value + n) for n in range(3)]  # their sources are theirs alone
        begin = time.monotonic()
        for n in range(20):
            same(add_one(value + n), value + n + 1)
        told = results[2].is_ready()
        assert not told or time.monotonic() - begin > 0.9, "a host that copies goes on computing"
        for n, result in enumerate(results):
            same(result, (value + n + 1) * 2)


@pytest.mark.slow
def test_a_full_arena(private: Callable[..., Any]) -> None:
    """Room for two receives and slow copies, so that it is freed late: runs wait for it and none fails; what only live
    arrays keep out fails and says so, and goes through when they are gone."""
    _, one, two = private(transfer_memory=9 << 20, PATHWAYS_TEST_SLOW_COPIES="0.05")
    value = np.arange(1 << 20, dtype=np.float32) % 7  # 4 MiB
    start = pw.device_put(value, one)
    total = pw.jit(lambda x: x.sum(), devices=two)
    moved = pw.program(lambda x: total(pw.device_put(x, two)))
    for result in [moved(start) for _ in range(8)]:
        same(result, value.sum(dtype=np.float32))
    held = [jax.block_until_ready(pw.device_put(start, two)) for _ in range(2)]
    with pytest.raises(pw.errors.ResourceExhaustedError):
        pw.device_put(start, two).block_until_ready()
    for array in held:
        same(array, value)
        array.delete()
    same(pw.device_put(start, two), value)


@pytest.mark.slow
def test_what_never_fits(private: Callable[..., Any]) -> None:
    _, one, two = private(transfer_memory=1 << 20)
    start = pw.device_put(np.zeros(1 << 20, np.float32), one)
    moved = pw.device_put(start, two)
    with pytest.raises(pw.errors.ResourceExhaustedError):
        moved.block_until_ready()
    same(start, np.zeros(1 << 20, np.float32))
