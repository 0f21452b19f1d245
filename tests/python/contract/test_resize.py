"""MOVE-1: a slice gets another shape with its arrays, which keep their names, values and shardings; what was compiled
for the old shape is compiled again; and what cannot be cut so, or has no room, changes nothing."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways.api.arrays import put
from pathways.api.programs.compiled import Lowering

VALUE = np.arange(16, dtype=np.float32).reshape(4, 4)


def parts_of(array: Any) -> list[Any]:
    """The shape of each device's part."""
    return [shard.data.shape for shard in array.addressable_shards]


def test_training_goes_on_bit_by_bit(add: Any) -> None:
    """With donated state. Each step works element by element on what the axis cuts, so no sum depends on the shape."""
    optimizer = optax.adam(1e-2)
    cut = P(None, "x")

    def step(weights: Any, state: Any, x: Any) -> Any:
        grads = jnp.cos(weights) * x  # as the gradient of sum(sin(weights) * x)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    def train(slice_: Any, sizes: dict[int, int]) -> Any:
        f = pw.jit(step, devices=slice_, in_shardings=(cut, None, cut), donate_argnums=(0, 1), name="step")
        weights = pw.device_put(VALUE / 7, slice_, cut)
        state = jax.tree.map(lambda leaf: pw.device_put(np.asarray(leaf), slice_), optimizer.init(VALUE / 7))
        x = pw.device_put(VALUE, slice_, cut)
        for number in range(8):
            if number in sizes:
                slice_.resize((sizes[number],))
                assert slice_.shape == (sizes[number],) == tuple(slice_.mesh.shape.values())
                assert len({device.id for device in slice_.devices}) == sizes[number]
            weights, state = f(weights, state, x)
        return jax.tree.map(np.asarray, (weights, state, x))

    want = train(add(2), {})
    for sizes in ({1: 4, 5: 2}, {2: 1, 4: 4}, {0: 4, 1: 1, 7: 2}):
        jax.tree.map(np.testing.assert_array_equal, train(add(2), sizes), want)


def test_every_kind_of_array_keeps_its_name_value_and_sharding(
    add: Any, cluster: Any, quiet: Callable[..., Any]
) -> None:
    slice_ = add((2, 1))
    cluster.operations = None
    before = quiet()["kept"]
    values = [
        (VALUE, P("x")),
        (VALUE.astype(ml_dtypes.bfloat16), P(None, "x")),
        (np.array([True, False, True, True]), P("x")),
        (np.float64(3.5), P()),
        (np.zeros((0, 4), np.int8), P(None, "x")),
        (np.arange(4).astype(ml_dtypes.int4), P("x")),
        (np.arange(8, dtype=np.complex64), P()),
        (np.zeros((1 << 18,), np.uint8) + 3, P("x")),
    ]
    arrays = [pw.device_put(value, slice_, spec) for value, spec in values]
    keys = pw.jit(lambda: jax.random.split(jax.random.key(7), 4), devices=slice_)()
    handles = [array.raw_handle for array in (*arrays, keys)]
    for shape in ((4, 1), (2, 2), (2, 1)):
        slice_.resize(shape)
        assert [array.raw_handle for array in (*arrays, keys)] == handles
        for array, (value, spec) in zip(arrays, values, strict=True):
            assert array.is_ready()
            assert array.sharding.is_equivalent_to(slice_.sharding(spec), array.ndim)
            array.cached = None
            np.testing.assert_array_equal(np.asarray(array), value)
        assert parts_of(arrays[0]) == [(4 // shape[0], 4)] * (shape[0] * shape[1])
        words = jax.random.key_data(jax.random.split(jax.random.key(7), 4))
        keys.cached = None
        np.testing.assert_array_equal(jax.random.key_data(keys._value()), words)
        fresh = pw.device_put(VALUE * 2, slice_, P("x"))
        np.testing.assert_array_equal(np.asarray(fresh - arrays[0]), VALUE)
    del fresh, arrays, array, keys
    cluster.operations = None
    quiet(back_to=before, but_arenas=True)


def test_an_axis_of_one_device_cuts_nothing_and_later_programs_cut_again(add: Any) -> None:
    slice_ = add(2)
    x = pw.device_put(VALUE, slice_, P("x"))
    f = pw.jit(lambda x: x + 1, devices=slice_, in_shardings=P("x"), out_shardings=P("x"))
    slice_.resize((1,))
    np.testing.assert_array_equal(np.asarray(f(x)), VALUE + 1)
    slice_.resize((4,))
    assert x.is_fully_replicated
    assert parts_of(f(x)) == [(1, 4)] * 4
    np.testing.assert_array_equal(np.asarray(f(x)), VALUE + 1)


def test_what_does_not_divide_is_refused_before_anything_happens(add: Any, cluster: Any) -> None:
    slice_ = add(2)
    x = pw.device_put(VALUE[:2], slice_, P("x"))
    f = pw.jit(lambda x: x * 2, devices=slice_)
    np.testing.assert_array_equal(np.asarray(f(x)), VALUE[:2] * 2)
    mesh, devices, dispatches = slice_.mesh_spec, slice_.devices, cluster.native.dispatches
    with pytest.raises(pw.errors.ShardingError, match=r"float32\[2,4\]: dimension 0 of size 2.* 4 parts"):
        slice_.resize((4,))
    assert (slice_.mesh_spec, slice_.devices, cluster.native.dispatches) == (mesh, devices, dispatches)
    np.testing.assert_array_equal(np.asarray(f(x)), VALUE[:2] * 2)
    del x
    variable = pw.Variable(VALUE[:2], slice_, P("x"), name="scale")
    with pytest.raises(pw.errors.ShardingError, match="variable 'scale'"):
        slice_.resize((4,))
    variable.delete()
    with pytest.raises(pw.errors.ShardingError, match="variable 'scale'"):
        slice_.resize((4,))
    del variable
    slice_.resize((4,))
    assert slice_.shape == (4,)


def test_shapes_that_make_no_sense(add: Any, cluster: Any) -> None:
    slice_ = add((2, 1))
    x = pw.device_put(VALUE, slice_, P("x"))
    wrong: list[Any] = [(), (2,), (2, 1, 1), (0, 1), (-2, 1), ("2", 1), (2.0, 1), (True, 2), 4, None, (1 << 70, 1)]
    for shape in wrong:
        with pytest.raises(pw.errors.SliceError):
            slice_.resize(shape)
    with pytest.raises(pw.errors.SliceError, match="the biggest has"):
        slice_.resize((64, 1))
    with pytest.raises(pw.errors.SliceError, match="a slice of"):
        cluster.resize(x, (1, 1))
    with pytest.raises(pw.errors.TraceError):
        pw.program(lambda x: slice_.resize((1, 1)) or x)(x)
    assert slice_.shape == (2, 1)
    before = slice_.mesh_spec
    slice_.resize((2, 1))
    assert slice_.mesh_spec is before, "nothing to do"
    np.testing.assert_array_equal(np.asarray(x * 2), VALUE * 2)


def test_what_was_made_for_the_old_shape(add: Any) -> None:
    """Functions and programs compile again; what a user holds of the old shape is refused, or means the new one."""
    slice_, other = add(2), add(1)
    f = pw.jit(lambda x: x * 2, devices=slice_, in_shardings=slice_.sharding(P("x")))
    g = pw.jit(lambda x, n: x + n, devices=slice_, static_argnums=1)
    plus = pw.jit(lambda x: x + 1, devices=other)
    kept = pw.device_put(VALUE * 3, slice_, P("x"))
    both = pw.program(lambda x: plus(f(x)) + kept)
    ones = pw.jit(lambda: jnp.ones(4), devices=slice_, out_shardings=P("x"))
    x = pw.device_put(VALUE, slice_, P("x"))
    timed, lowered, old = both.with_timeout(100), both.lower(x), slice_.sharding(P("x"))
    held = lowered.compile()
    for size in (2, 4, 1, 2):
        slice_.resize((size,))
        np.testing.assert_array_equal(np.asarray(f(VALUE)), VALUE * 2)
        np.testing.assert_array_equal(np.asarray(g(VALUE, 5)), VALUE + 5)
        np.testing.assert_array_equal(np.asarray(both(x)), VALUE * 5 + 1)
        np.testing.assert_array_equal(np.asarray(timed(x)), VALUE * 5 + 1)
        np.testing.assert_array_equal(np.asarray((x + 1) * x), (VALUE + 1) * VALUE)
        np.testing.assert_array_equal(np.asarray(pw.device_put(x, other)), VALUE)
        put = pw.device_put(VALUE, old)
        np.testing.assert_array_equal(np.asarray(put), VALUE)
        assert parts_of(put) == [(4 // size, 4)] * size
        assert parts_of(ones()) == [(4 // size,)] * size
    for stale in (lambda: held(x), lowered.compile):
        with pytest.raises(pw.errors.SliceResizedError, match="lower and compile it again"):
            stale()
    np.testing.assert_array_equal(np.asarray(both.lower(x).compile()(x)), VALUE * 5 + 1)


def test_traces_that_jax_keeps(add: Any) -> None:
    """A loop's body is traced once, whatever program it is part of: the trace of the old shape is not used again."""
    slice_ = add(2)
    plus = pw.jit(lambda x: x + 1, devices=slice_, in_shardings=P("x"))

    def body(carry: Any, _: Any) -> Any:
        return plus(carry), None

    three = pw.program(lambda x: jax.lax.scan(body, x, None, length=3)[0])
    long = pw.program(lambda x: jax.lax.scan(body, x, None, length=20)[0])  # a loop that is not unrolled
    x = pw.device_put(VALUE, slice_, P("x"))
    for size in (2, 4, 2):
        slice_.resize((size,))
        np.testing.assert_array_equal(np.asarray(three(x)), VALUE + 3)
        np.testing.assert_array_equal(np.asarray(long(x)), VALUE + 20)


def test_variables_keep_their_values(add: Any) -> None:
    slice_ = add(2)
    count = pw.Variable(0, slice_, name="count")
    total = pw.Variable(np.zeros((4, 4), np.float32), slice_, P("x"), name="total")
    gone = pw.Variable(VALUE, slice_, P("x"), name="gone")
    double = pw.jit(lambda x: x * 2, devices=slice_)

    @pw.program
    def step(x: Any) -> Any:
        count.value += 1
        total.value = total.value + double(x)
        return count.value

    read_gone = pw.program(lambda x: double(gone.value) + x)
    np.testing.assert_array_equal(np.asarray(read_gone(VALUE)), VALUE * 3)
    gone.delete()
    for number, size in enumerate((2, 4, 1, 2), start=1):
        slice_.resize((size,))
        assert int(step(VALUE)) == number
        np.testing.assert_array_equal(np.asarray(total.value), VALUE * 2 * number)
    with pytest.raises(pw.errors.DeletedArrayError):
        read_gone(VALUE)
    gone.value = VALUE
    np.testing.assert_array_equal(np.asarray(read_gone(VALUE)), VALUE * 3)


def test_a_pipeline_follows_its_slices(add: Any) -> None:
    first, last = add(1), add(1)
    stages = [pw.jit(lambda w, x: jnp.tanh(x * w), devices=where, name="stage") for where in (first, last)]
    model = pw.pipeline(stages, microbatches=2, schedule="1F1B", loss=lambda y: jnp.sum(y * y))
    grads = pw.program(jax.grad(lambda w, x: model(w, x)))
    weights = [pw.device_put(VALUE[number], where) for number, where in enumerate((first, last))]
    want = [np.asarray(each) for each in grads(weights, VALUE)]
    for slice_, size in ((first, 2), (last, 4), (first, 1)):
        slice_.resize((size,))
        for got, expected in zip(grads(weights, VALUE), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got), expected)


def test_a_put_goes_on_after_a_resize(add: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That comes after the put has looked at what the slice is cut into."""
    slice_ = add(2)
    look = put._layout
    sizes: list[int] = []

    def look_early(*args: Any) -> Any:
        layout = look(*args)
        if sizes:
            slice_.resize((sizes.pop(),))
        return layout

    monkeypatch.setattr(put, "_layout", look_early)
    for spec, size in ((P("x"), 4), (None, 1)):
        sizes[:] = [size]
        array = pw.device_put(VALUE, slice_, spec)
        assert len(array.addressable_shards) == size
        np.testing.assert_array_equal(array, VALUE)


def test_other_threads_wait_and_lose_nothing(add: Any, quiet: Callable[..., Any]) -> None:
    """Calls, reads, puts, operators and variables while the slice grows and shrinks."""
    slice_ = add(2)
    f = pw.jit(lambda x: x + 1, devices=slice_, in_shardings=P("x"))
    x = pw.device_put(VALUE, slice_, P("x"))
    count = pw.Variable(0, slice_, name="count")

    @pw.program
    def step(x: Any) -> Any:
        count.value += 1
        return f(x)

    np.asarray(step(x))
    quiet()
    stop = threading.Event()
    failures: list[BaseException] = []
    rounds = [0, 0]

    def work(number: int) -> None:
        try:
            while not stop.is_set():
                y, own = f(x), step(x)
                z = pw.device_put(VALUE, slice_, P("x"))
                y.delete() if rounds[number] % 3 == 0 else np.testing.assert_array_equal(np.asarray(y), VALUE + 1)
                np.testing.assert_array_equal(np.asarray(z + own), VALUE * 2 + 1)
                np.testing.assert_array_equal(np.asarray(f(VALUE)), VALUE + 1)
                rounds[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for size in (4, 1, 2, 4, 2):
        slice_.resize((size,))
        before = list(rounds)
        while not failures and any(now == old for now, old in zip(rounds, before, strict=True)):
            time.sleep(0.01)  # each thread comes to the end of a round
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert int(count.value) == sum(rounds) + 1
    np.testing.assert_array_equal(np.asarray(f(x)), VALUE + 1)


def test_a_suspended_client_is_resized_when_it_is_resumed(add: Any, cluster: Any) -> None:
    slice_ = add(2)
    x = pw.device_put(VALUE, slice_, P("x"))
    x.block_until_ready()
    cluster.suspend()
    errors: list[BaseException] = []

    def resize() -> None:
        try:
            slice_.resize((4,))
        except BaseException as error:
            errors.append(error)

    resizer = threading.Thread(target=resize)
    resizer.start()
    time.sleep(0.2)
    assert slice_.shape == (2,)
    cluster.resume()
    resizer.join()
    assert not errors
    assert slice_.shape == (4,)
    np.testing.assert_array_equal(np.asarray(x * 2), VALUE * 2)


@pytest.mark.slow
def test_without_memory_for_it_nothing_changes(start: Callable[..., Any]) -> None:
    """On CPU, what comes by a transfer lies in the host's memory for transfers: 6 MiB do not fit 4."""
    with start(1, 1, 2, device_memory=8 << 20, transfer_memory=4 << 20) as cluster:
        slice_ = pw.make_virtual_device_set(cluster).add_slice(2)
        value = np.arange(6 << 18, dtype=np.float32)
        x = pw.device_put(value, slice_, P("x"))
        f = pw.jit(lambda x: x[:4] * 2, devices=slice_)
        devices = slice_.devices
        with pytest.raises(pw.errors.ResourceExhaustedError):
            slice_.resize((1,))
        assert (slice_.shape, slice_.devices) == ((2,), devices)
        np.testing.assert_array_equal(np.asarray(f(x)), value[:4] * 2)
        np.testing.assert_array_equal(np.asarray(x), value)
        load = cluster.stats()["device_load"]
        assert sum(load) == 2, "the controller has taken the change back"


@pytest.mark.slow
def test_a_host_that_is_lost_meanwhile(start: Callable[..., Any]) -> None:
    """A slice of the lost island stays as it is, and says why, until the lost array is deleted. Others go on."""
    with start(2, 1, 4) as cluster:
        devices = pw.make_virtual_device_set(cluster)
        here, there = devices.add_slice(2, island=0), devices.add_slice(2, island=1)
        kept, lost = pw.device_put(VALUE, here, P("x")), pw.device_put(VALUE, there, P("x"))
        kept.block_until_ready(), lost.block_until_ready()
        os.kill(cluster.stats()["hosts"][1]["pid"], signal.SIGKILL)
        # The move may be under way when the host is found to be lost: then it is to be called again.
        with pytest.raises(pw.errors.HostLostError, match=r"delete it|Call it again"):
            there.resize((4,))
        with pytest.raises(pw.errors.HostLostError, match="delete it"):
            there.resize((4,))
        assert there.shape == (2,)
        here.resize((4,))
        with pytest.raises(pw.errors.HostLostError):
            np.asarray(lost)
        lost.delete()
        there.resize((4,))
        np.testing.assert_array_equal(np.asarray(kept), VALUE)
        for slice_ in (here, there):
            again = pw.device_put(VALUE, slice_, P("x"))
            np.testing.assert_array_equal(np.asarray(again + 1), VALUE + 1)
            assert parts_of(again) == [(1, 4)] * 4


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.lists(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2), (2, 4)]), min_size=1, max_size=4),
    st.lists(
        st.sampled_from([P(), P("x"), P("y"), P(("x", "y")), P("x", "y"), P(None, "x"), P("y", "x")]),
        min_size=1,
        max_size=3,
    ),
)
def test_any_sequence_of_shapes(sessions: Callable[[str], Any], shapes: list[tuple[int, int]], specs: list[P]) -> None:
    embedded_cluster = sessions("embedded")
    slice_ = pw.make_virtual_device_set(embedded_cluster).add_slice(shape=(2, 2), axis_names=("x", "y"))
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    arrays = [pw.device_put(value + number, slice_, spec) for number, spec in enumerate(specs)]
    total = pw.jit(lambda *xs: sum(xs), devices=slice_)
    for shape in shapes:
        slice_.resize(shape)
        assert slice_.shape == shape
        np.testing.assert_array_equal(np.asarray(total(*arrays)), sum(value + n for n in range(len(arrays))))
        arrays = [array + 1 for array in arrays]
        arrays = [array - 1 for array in arrays]
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(np.asarray(array), value + number)


def test_a_slice_gets_another_shape_while_a_program_is_bound_to_it(
    add: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread resizes it when the program has looked at the shape, and has not taken the devices yet."""
    slice_ = add(2)
    f = pw.jit(lambda x: x + 3, devices=slice_, in_shardings=P("x"))
    grow = threading.Thread(target=slice_.resize, args=((4,),))
    control, bind = type(cluster).control, Lowering.bind

    def look(self: Any) -> Any:
        if inspect.currentframe().f_back.f_code is bind.__code__ and grow.ident is None:
            grow.start()
            grow.join(1)  # it waits for the program
        return control(self)

    monkeypatch.setattr(type(cluster), "control", look)
    np.testing.assert_array_equal(np.asarray(f(VALUE)), VALUE + 3)
    grow.join()
    assert slice_.shape == (4,)
    np.testing.assert_array_equal(np.asarray(f(VALUE)), VALUE + 3)
