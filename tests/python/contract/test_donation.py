"""MEM-4: memory is taken over only when nobody else can still read it, whatever devices slices share."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from thoroughness import THOROUGHNESS

import pathways as pw

VALUE = np.arange(1, 9, dtype=np.float32)
#: Big enough for memory to be worth taking over, and to be used as it is and not copied.
BIG = np.arange(1 << 16, dtype=np.float32)


def slow(x: Any, products: int = 30) -> Any:
    """`x + 1`, some milliseconds later: whoever reads it reads it while later steps are already enqueued."""
    square = jnp.broadcast_to(x[:1] * 0 + 0.001, (256, 256))
    for _ in range(products):
        square = jnp.tanh(square @ square)
    return x + 1 + square[0, 0] * 0


def covering(add: Any, cluster: Any, size: int) -> list[Any]:
    """Slices that together hold every device twice."""
    return [add(size) for _ in range(2 * len(cluster.devices) // size)]


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_value_used_on_slices_that_share_devices_is_readable_afterwards(add: Any, cluster: Any, size: int) -> None:
    first = add(2)
    start = pw.jit(slow, devices=first)
    uses = [pw.jit(lambda x: x * 2, devices=slice_) for slice_ in covering(add, cluster, size)]

    @pw.program
    def spread(x: Any) -> Any:
        y = start(x)
        return y, [use(y) for use in uses], [use(use(y)) for use in uses]

    for value in (VALUE, BIG):
        y, once, twice = spread(value)
        for got, times in ((y, 1), *((x, 2) for x in once), *((x, 4) for x in twice)):
            np.testing.assert_array_equal(np.asarray(got), (value + 1) * times)


def test_an_intermediate_read_elsewhere_is_not_overwritten(add: Any, cluster: Any) -> None:
    """The last reader on its own slice would take the value over while other slices have not read it yet."""
    here = add(2)
    start, last = pw.jit(slow, devices=here), pw.jit(lambda x: x * 3, devices=here)
    uses = [pw.jit(lambda x: x * 2, devices=slice_) for slice_ in covering(add, cluster, 4)]

    @pw.program
    def run(x: Any) -> Any:
        y = start(x)
        return [use(y) for use in uses], last(y)

    for _ in range(5):
        others, mine = run(BIG)
        np.testing.assert_array_equal(np.asarray(mine), (BIG + 1) * 3)
        for other in others:
            np.testing.assert_array_equal(np.asarray(other), (BIG + 1) * 2)


def test_donated_arguments_are_gone(add: Any) -> None:
    f = pw.jit(lambda x, y: (x + y, x), devices=add(2), donate_argnums=0)
    x, y = pw.device_put(VALUE, f.slice), pw.device_put(VALUE, f.slice)
    out, same = f(x, y)
    assert x.is_deleted() and not y.is_deleted() and "deleted" in repr(x)
    for use in (
        lambda: np.asarray(x),
        lambda: f(x, y),
        lambda: f(y, x),
        x.block_until_ready,
        x.is_ready,
        x.copy_to_host_async,
        lambda: pw.device_put(x, f.slice),
    ):
        with pytest.raises(pw.errors.DeletedArrayError, match="deleted"):
            use()
    np.testing.assert_array_equal(np.asarray(out), VALUE * 2)
    np.testing.assert_array_equal(np.asarray(same), VALUE)


def test_an_array_donated_while_it_is_sent_elsewhere(add: Any) -> None:
    """The send of an earlier run is still waiting for the value when a later run takes it over."""
    here, there = add(2), add(4)
    start, read = pw.jit(slow, devices=here), pw.jit(lambda x: x * 2, devices=there)
    take = pw.jit(lambda x: x * 3, devices=here, donate_argnums=0)
    read_it = pw.program(lambda x: read(x))
    for _ in range(5):
        x = start(BIG)
        first, second, third = read_it(x), pw.device_put(x, there), take(x)
        assert x.is_deleted()
        for got, times in ((third, 3), (first, 2), (second, 1)):
            np.testing.assert_array_equal(np.asarray(got), (BIG + 1) * times)


def test_an_array_donated_while_it_is_read(add: Any) -> None:
    start = pw.jit(slow, devices=add(2))
    take = pw.jit(lambda x: x * 3, devices=start.slice, donate_argnums=0)
    x = start(BIG)
    x.copy_to_host_async()
    y = take(x)
    np.testing.assert_array_equal(np.asarray(y), (BIG + 1) * 3)
    seen = np.asarray(y)
    z = take(y)
    np.testing.assert_array_equal(seen, (BIG + 1) * 3)
    np.testing.assert_array_equal(np.asarray(z), (BIG + 1) * 9)


@pytest.mark.watchdog(300)
def test_an_array_pinned_while_its_donating_call_waits_for_room(embedded_cluster: Any) -> None:
    """A call that waits for credit lets other threads in. Of what they pin then (a save does) the call gets a copy."""
    here = pw.make_virtual_device_set(embedded_cluster).add_slice(devices=1)
    keep_busy = pw.jit(lambda x: slow(x, 1), devices=here)
    take = pw.jit(lambda x: x * 2, devices=here, donate_argnums=0)
    armed, idle, ended = threading.Event(), threading.Event(), threading.Event()
    target: list[Any] = []
    pinned: list[bool] = []

    def pin() -> None:
        while armed.wait() and not ended.is_set():
            armed.clear()
            array = target.pop()
            array._pin()
            pinned.append(not array.is_deleted())
            del array
            idle.set()

    thread = threading.Thread(target=pin, daemon=True)
    thread.start()
    start = pw.device_put(VALUE, here)
    np.testing.assert_array_equal(np.asarray(take(pw.device_put(VALUE, here))), VALUE * 2)
    runs = collections.deque(maxlen=1)
    in_time = 0
    deadline = time.monotonic() + 120  # on a busy machine the other thread is seldom in time
    for attempt in itertools.count():
        x = pw.device_put(VALUE + attempt, here)
        for _ in range(1100):  # more than a client may have in flight; reading `y` below waits for all of them
            runs.append(keep_busy(start))
        target.append(x)
        idle.clear()
        armed.set()
        before = embedded_cluster.native.dispatches
        y = take(x)
        idle.wait()
        if pinned.pop():
            in_time += 1
            assert embedded_cluster.native.dispatches - before == 2  # the copy, and the call
        np.testing.assert_array_equal(np.asarray(y), (VALUE + attempt) * 2)
        if in_time == 2 or (attempt >= 5 and in_time) or time.monotonic() > deadline:
            break
    ended.set()
    armed.set()
    thread.join()
    assert in_time != 0


def test_two_names_of_one_value(add: Any) -> None:
    f = pw.jit(lambda x: x + 1, devices=add(2))
    take = pw.jit(lambda x: x * 3, devices=f.slice, donate_argnums=0)
    one, two = pw.program(lambda x: (f(x), f(x)))(BIG)
    same, again = pw.program(lambda x: (x, x))(one)
    twice = pw.program(lambda x: [f(x)] * 2)(BIG)
    for array in (one, twice[0], again):
        np.testing.assert_array_equal(np.asarray(take(array)), (np.asarray(two) + 0) * 3)
    for array in (same, twice[1], two):
        np.testing.assert_array_equal(np.asarray(array), BIG + 1)


def test_one_array_as_two_arguments(add: Any) -> None:
    f = pw.jit(lambda x, y: x - 2 * y, devices=add(2), donate_argnums=0)
    g = pw.jit(lambda x, y: (x - 2 * y, y + x), devices=f.slice, donate_argnums=(0, 1))
    for _ in range(3):
        x = pw.device_put(BIG, f.slice)
        np.testing.assert_array_equal(np.asarray(f(x, x)), -BIG)
        assert x.is_deleted()
        x = pw.device_put(BIG, f.slice)
        np.testing.assert_array_equal(np.asarray(g(x, x)[1]), 2 * BIG)
        f(pw.device_put(BIG, f.slice), pw.device_put(BIG, f.slice))


def test_a_moved_array_is_not_its_source(add: Any, cluster: Any) -> None:
    source = pw.device_put(BIG, add(2))
    for slice_ in covering(add, cluster, 1):
        moved = pw.device_put(source, slice_)
        take = pw.jit(lambda x: x * 3, devices=slice_, donate_argnums=0)
        np.testing.assert_array_equal(np.asarray(take(moved)), BIG * 3)
    copies = [pw.device_put(source, source.slice) for _ in range(2)]
    take = pw.jit(lambda x: x * 5, devices=source.slice, donate_argnums=0)
    np.testing.assert_array_equal(np.asarray(take(copies[0])), BIG * 5)
    np.testing.assert_array_equal(np.asarray(copies[1]), BIG)
    np.testing.assert_array_equal(np.asarray(source), BIG)


def test_a_donated_host_value_is_the_callers_own(add: Any) -> None:
    take = pw.jit(lambda x: x * 3, devices=add(2), donate_argnums=0)
    mine, theirs = BIG.copy(), jnp.asarray(BIG)
    for value in (mine, theirs):
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(take(value)), BIG * 3)
        np.testing.assert_array_equal(np.asarray(value), BIG)


@st.composite
def graphs(draw: Any) -> Any:
    """Steps over a few slices, each reading one or two earlier values; which values come back; what is donated."""
    steps = []
    for number in range(draw(st.integers(1, 8))):
        inputs = draw(st.lists(st.integers(0, number), min_size=1, max_size=2))
        steps.append((draw(st.integers(0, 5)), inputs))
    results = draw(st.lists(st.integers(0, len(steps)), min_size=1, max_size=4))
    return steps, results, draw(st.booleans())


@settings(max_examples=10 * THOROUGHNESS, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graph=graphs())
def test_random_programs_over_slices_that_overlap(kept: dict[str, Any], graph: Any) -> None:
    steps, results, donate = graph
    functions = kept["functions"]

    def run(placed: bool, x: Any) -> Any:
        values = [x]
        for where, inputs in steps:
            function = functions[where] if placed else (lambda *xs: sum(xs) * 0.5 + len(xs))
            values.append(function(*[values[n] for n in inputs]))
        return [values[n] for n in results]

    program = pw.program(lambda x: run(True, x), donate_argnums=(0,) if donate else ())
    want = run(False, VALUE)
    for x in (VALUE, pw.device_put(VALUE, functions[0].slice, P("x"))):
        for got, expected in zip(program(x), want, strict=True):
            np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-6)


@pytest.fixture
def kept(add: Any) -> dict[str, Any]:
    """The six functions of the random programs, on slices of several sizes that share devices."""
    slices = [add(2), add(4), add(1), add((2, 2)), add(2), add(1)]
    return {"functions": [pw.jit(lambda *xs: sum(xs) * 0.5 + len(xs), devices=slice_) for slice_ in slices]}


def test_training_memory_is_reused(add: Any, cluster: Any) -> None:
    """Parameters that only their own step reads are donated for real: the plan says so, and no copy is made."""
    slice_ = add(2)
    step = pw.jit(lambda p, x: jax.tree.map(lambda w: w + x, p), devices=slice_, donate_argnums=0, name="step")
    params = [pw.device_put(BIG, slice_) for _ in range(4)]
    assert "donating" in step.lower(params, 1.0).as_text("plan")
    one = pw.device_put(np.float32(1), slice_)
    params = jax.block_until_ready(step(params, one))
    before = cluster.stats()["launches"], cluster.stats()["dispatches"]
    for _ in range(10):
        params = step(params, one)
    np.testing.assert_array_equal(np.asarray(params[3]), BIG + 11)
    hosts = len({device.host for device in slice_.devices})
    assert cluster.stats()["launches"] - before[0] == 10 * hosts
    assert cluster.stats()["dispatches"] - before[1] == 10


def test_what_comes_back_as_it_is_is_not_copied(add: Any, cluster: Any) -> None:
    """A donated argument that is a result has one name, before the run and after it, so the next run may take it."""
    slice_ = add(2)
    step = pw.jit(lambda frozen, w: (frozen, w + frozen), devices=slice_, donate_argnums=(0, 1))
    use = pw.jit(lambda frozen: frozen * 3, devices=slice_, donate_argnums=0)
    swap = pw.jit(lambda x, y: (y, x, x), devices=slice_, donate_argnums=(0, 1))
    both = jax.block_until_ready(step(*(pw.device_put(BIG, slice_) for _ in range(2))))
    jax.block_until_ready(use(both[0]))
    both = pw.device_put(BIG, slice_), both[1]
    before = cluster.stats()["dispatches"]
    for number in range(10):
        given = both
        both = step(*both)
        assert given[0].is_deleted() and given[1].is_deleted()
        if number % 4 == 3:
            np.testing.assert_array_equal(np.asarray(both[1]), BIG * (number + 3))
            both = both[0], both[1] + 0  # what was read is copied before it is donated
            before += 1
    tripled = use(both[0])
    assert cluster.stats()["dispatches"] - before == 11
    assert both[0].is_deleted()
    np.testing.assert_array_equal(np.asarray(tripled), BIG * 3)
    np.testing.assert_array_equal(np.asarray(both[1]), BIG * 12)
    w, one, two = swap(pw.device_put(BIG, slice_), both[1] + 0)
    np.testing.assert_array_equal(np.asarray(use(one)), BIG * 3)  # it has two names
    np.testing.assert_array_equal(np.asarray(two), BIG)
    np.testing.assert_array_equal(np.asarray(w), BIG * 12)


def test_what_is_kept_may_be_given_twice(add: Any) -> None:
    """Only what is donated must be one argument; the others may be the same array, host value or number."""
    slice_ = add(2)
    step = pw.jit(lambda state, x, y: state + x - 2 * y, devices=slice_, donate_argnums=0)
    both = pw.jit(lambda a, b, x, y: (a + x, b + y), devices=slice_, donate_argnums=(0, 1))
    x = pw.device_put(VALUE, slice_)
    frozen = np.frombuffer(VALUE.tobytes(), np.float32)
    for same in (x, VALUE, frozen, jnp.asarray(VALUE), 3.0, np.float32(3)):
        for _ in range(2):
            state = pw.device_put(VALUE, slice_)
            np.testing.assert_array_equal(np.asarray(step(state, same, same)), VALUE - np.asarray(same))
            assert state.is_deleted()
            a, b = pw.device_put(VALUE, slice_), pw.device_put(VALUE + 1, slice_)
            out = both(a, b, same, same)
            np.testing.assert_array_equal(np.asarray(out[0]), VALUE + np.asarray(same))
            np.testing.assert_array_equal(np.asarray(out[1]), VALUE + 1 + np.asarray(same))
            assert a.is_deleted() and b.is_deleted()
    np.testing.assert_array_equal(np.asarray(step(x, x, x)), VALUE * 0)  # donated and kept: it is what it was
    a = pw.device_put(VALUE, slice_)
    out = both(a, a, a, a)
    np.testing.assert_array_equal(np.asarray(out[0]), VALUE * 2)
    np.testing.assert_array_equal(np.asarray(out[1]), VALUE * 2)
