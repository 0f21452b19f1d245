"""MOVE-1: a slice moves with its arrays between runs; they keep their names and values, and nothing equal is compiled
again. Programs that Python has forgotten are forgotten by the hosts too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import pathways as pw

VALUE = np.arange(16, dtype=np.float32).reshape(4, 4)


def others(cluster: Any, slice_: Any) -> list[int]:
    """Devices other than the slice's, on the last island."""
    count = slice_.size
    taken = {device.id for device in slice_.devices}
    last = max(device.island for device in cluster.devices)
    free = [device.id for device in cluster.devices if device.island == last and device.id not in taken]
    all_of_it = [device.id for device in cluster.devices if device.island == last]
    return free[-count:] if len(free) >= count else all_of_it[::-1][:count]


@pytest.fixture(params=["remap", "resize"])
def change(request: pytest.FixtureRequest, cluster: Any) -> Callable[[Any], None]:
    """Moves a slice of two devices, or gives it another shape."""
    if request.param == "remap":
        return lambda slice_: cluster.remap(slice_, others(cluster, slice_))
    return lambda slice_: slice_.resize((4,))


def step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ weights["a"]) @ weights["b"] - x) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def test_training_goes_on_bit_by_bit(add: Any, cluster: Any, quiet: Callable[..., Any]) -> None:
    """There and back again: the same bits as without, and the way back compiles nothing."""
    start = {"a": np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16), "b": np.ones((16, 4), np.float32) / 7}

    def train(slice_: Any, moves: list[Any]) -> Any:
        f = pw.program(
            pw.jit(step, devices=slice_, in_shardings=({"a": P(None, "x"), "b": P("x")}, P()), name="step"),
            donate_argnums=0,
        )
        specs = {"a": P(None, "x"), "b": P("x")}
        weights, x = pw.device_put(start, slice_, specs), pw.device_put(VALUE, slice_)
        losses = []
        for number in range(8):
            weights, loss = f(weights, x)
            losses.append(loss)
            if number in (1, 3, 5) and moves:
                cluster.remap(slice_, moves[(1, 3, 5).index(number)])
                assert [device.id for device in slice_.devices] == moves[(1, 3, 5).index(number)]
        return jax.tree.map(np.asarray, (weights, losses, x))

    slice_ = add(2)
    home, away = [device.id for device in slice_.devices], others(cluster, slice_)
    want = train(slice_, [])
    compiles = [sum(cluster.stats()["compiles"])]
    for moves in ([away, home, away], [home, away, home]):
        got = train(slice_, moves)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        compiles.append(sum(cluster.stats()["compiles"]))
    assert compiles[2] == compiles[1], "what the hosts have compiled for those devices is not compiled again"


def test_every_kind_of_array_keeps_its_name(add: Any, cluster: Any, quiet: Callable[..., Any]) -> None:
    slice_ = add((2, 1))
    cluster.operations = None  # and the scalars that they keep
    before = quiet()["kept"]
    values = [
        (VALUE, P("x")),
        (VALUE.astype(ml_dtypes.bfloat16), P(None, "x")),
        (np.array([True, False, True, True]), P("x")),
        (np.float64(3.5), P()),
        (np.zeros((0, 4), np.int8), P()),
        (np.arange(4).astype(ml_dtypes.int4), P("x")),
        (np.arange(8, dtype=np.complex64), P()),
        (np.zeros((1 << 18,), np.uint8) + 3, P("x")),
    ]
    arrays = [pw.device_put(value, slice_, spec) for value, spec in values]
    keys = pw.jit(lambda: jax.random.split(jax.random.key(7), 4), devices=slice_)()
    handles = [array.raw_handle for array in (*arrays, keys)]
    away, home = others(cluster, slice_), [device.id for device in slice_.devices]
    for devices in (away, home, away[::-1]):
        cluster.remap(slice_, [cluster.devices[number] for number in devices])
        assert slice_.devices[0].id == devices[0]
        assert [array.raw_handle for array in (*arrays, keys)] == handles
        for array, (value, _) in zip(arrays, values, strict=True):
            assert array.is_ready()
            np.testing.assert_array_equal(np.asarray(array + 0 if array.dtype == np.float32 else array), value)
        words = jax.random.key_data(jax.random.split(jax.random.key(7), 4))
        np.testing.assert_array_equal(jax.random.key_data(keys._value()), words)
        for array in (*arrays, keys):
            array.cached = None  # read it again where it lies then
    fresh = pw.device_put(VALUE * 2, slice_, P("x"))  # a placement known from before, elsewhere now
    np.testing.assert_array_equal(np.asarray(fresh - arrays[0]), VALUE)
    del fresh, arrays, array, keys
    cluster.operations = None
    quiet(back_to=before, but_arenas=True)


def test_what_is_deleted_meanwhile(
    add: Any, cluster: Any, change: Any, quiet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slice_ = add(2)
    cluster.operations = None
    before = quiet()["kept"]
    arrays = [pw.device_put(VALUE, slice_, P("x")) for _ in range(2)]
    control = cluster.control()
    wait = control.wait_compiled

    def delete_then_wait(*arguments: Any) -> None:
        deleter = threading.Thread(target=arrays[0].delete)
        deleter.start()
        deleter.join()
        wait(*arguments)

    monkeypatch.setattr(control, "wait_compiled", delete_then_wait)
    change(slice_)
    monkeypatch.undo()
    with pytest.raises(pw.errors.DeletedArrayError):
        np.asarray(arrays[0])
    np.testing.assert_array_equal(np.asarray(arrays[1]), VALUE)
    arrays.clear()
    quiet(back_to=before, but_arenas=True)


def test_what_is_still_to_come_and_what_failed_follows_as_well(add: Any, cluster: Any, change: Any) -> None:
    if cluster.is_embedded:
        jax.jit(jnp.linalg.cholesky).lower(VALUE)
    slice_ = add(2)
    bad = pw.jit(
        lambda x: jax.ffi.ffi_call("lapack_spotrf_ffi", jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
        devices=slice_,
        name="bad",
    )

    def heavy(x: Any) -> Any:
        square = jnp.full((256, 256), 0.001) + x[0, 0] * 0
        return x + 1 + jax.lax.fori_loop(0, 30, lambda _, m: jnp.tanh(m @ m), square)[0, 0] * 0

    slow = pw.jit(heavy, devices=slice_)
    pending, failed = slow(slow(VALUE)), bad(VALUE)
    change(slice_)
    for _ in range(2):
        with pytest.raises(pw.errors.ComputationError, match="'bad'"):
            np.asarray(failed)
        with pytest.raises(pw.errors.ComputationError, match="'bad'"):
            np.asarray(slow(failed))
        np.testing.assert_array_equal(np.asarray(slow(pending)), VALUE + 3)


def test_programs_over_two_slices_and_operators_follow(add: Any, cluster: Any) -> None:
    one, two = add(2), add(1)
    double, plus = pw.jit(lambda x: x * 2, devices=one), pw.jit(lambda x: x + 1, devices=two)
    both = pw.program(lambda x: plus(double(x)))
    x = pw.device_put(VALUE, one)
    timed = both.with_timeout(100)
    held = both.lower(x).compile()
    for slice_ in (one, two, one):
        np.testing.assert_array_equal(np.asarray(both(x)), VALUE * 2 + 1)
        np.testing.assert_array_equal(np.asarray((x + 1) * x), (VALUE + 1) * VALUE)
        cluster.remap(slice_, others(cluster, slice_))
        np.testing.assert_array_equal(np.asarray(timed(x)), VALUE * 2 + 1)
        np.testing.assert_array_equal(np.asarray(held(x)), VALUE * 2 + 1)
        np.testing.assert_array_equal(np.asarray(pw.device_put(x, two)), VALUE)
    text = both.lower(x).as_text("plan")
    assert f"devices {', '.join(str(device.id) for device in one.devices)} on" in text


def test_other_threads_wait_and_lose_nothing(add: Any, cluster: Any, quiet: Callable[..., Any]) -> None:
    """Calls, reads, puts and deletions while the slice moves to and fro."""
    slice_ = add(2)
    f = pw.jit(lambda x: x + 1, devices=slice_)
    x = pw.device_put(VALUE, slice_)
    np.asarray(f(x))
    quiet()
    stop = threading.Event()
    failures: list[BaseException] = []
    rounds = [0, 0]

    def work(number: int) -> None:
        try:
            while not stop.is_set():
                y = f(x)
                z = pw.device_put(VALUE, slice_)
                y.delete() if rounds[number] % 3 == 0 else np.testing.assert_array_equal(np.asarray(y), VALUE + 1)
                np.testing.assert_array_equal(np.asarray(z), VALUE)
                rounds[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    home, away = [device.id for device in slice_.devices], others(cluster, slice_)
    for devices in (away, home) * 5:
        cluster.remap(slice_, devices)
        time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert min(rounds) > 0
    np.testing.assert_array_equal(np.asarray(f(x)), VALUE + 1)


def test_programs_are_forgotten_with_their_last_user(add: Any, cluster: Any, quiet: Callable[..., Any]) -> None:
    slice_ = add(2)
    x = pw.device_put(VALUE, slice_)
    before = [host["programs"] for host in quiet()["hosts"]]
    results = []
    for number in range(5):
        f = pw.jit(lambda x, number=number: x * number, devices=slice_)
        results.append(f(x))
        del f
    for number, result in enumerate(results):  # their runs went on
        np.testing.assert_array_equal(np.asarray(result), VALUE * number)
    deadline = time.monotonic() + 60
    while [host["programs"] for host in quiet()["hosts"]] != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [host["programs"] for host in quiet()["hosts"]] == before


def test_devices_that_make_no_sense(add: Any, cluster: Any) -> None:
    slice_ = add(2)
    x = pw.device_put(VALUE, slice_, P("x"))
    here = [device.id for device in slice_.devices]
    wrong: list[Any] = [[0], [0, 0], [0, len(cluster.devices)], [0, -1], [0, 1 << 40], ["0", "1"], 3, [True, 0]]
    if len(cluster.islands) > 1:
        wrong.append([0, len(cluster.devices) - 1])
    for devices in wrong:
        with pytest.raises(pw.errors.SliceError):
            cluster.remap(slice_, devices)
    with pytest.raises(pw.errors.SliceError, match="a slice of"):
        cluster.remap(x, here)
    assert [device.id for device in slice_.devices] == here
    np.testing.assert_array_equal(np.asarray(x * 2), VALUE * 2)


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.lists(st.permutations(range(8)).map(lambda order: order[:4]), min_size=1, max_size=4),
    st.lists(
        st.sampled_from([P(), P("x"), P("y"), P(("x", "y")), P("x", "y"), P(None, "x"), P("y", "x")]),
        min_size=1,
        max_size=3,
    ),
)
def test_any_sequence_of_moves(sessions: Callable[[str], Any], moves: list[list[int]], specs: list[P]) -> None:
    embedded_cluster = sessions("embedded")
    slice_ = pw.make_virtual_device_set(embedded_cluster).add_slice(shape=(2, 2), axis_names=("x", "y"))
    arrays = [pw.device_put(VALUE + number, slice_, spec) for number, spec in enumerate(specs)]
    total = pw.jit(lambda *xs: sum(xs), devices=slice_)
    for devices in moves:
        embedded_cluster.remap(slice_, devices)
        assert [device.id for device in slice_.devices] == devices
        np.testing.assert_array_equal(np.asarray(total(*arrays)), sum(VALUE + n for n in range(len(arrays))))
        arrays = [array + 1 for array in arrays]
        arrays = [array - 1 for array in arrays]
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(np.asarray(array), VALUE + number)
