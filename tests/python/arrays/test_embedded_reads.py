"""Reading on an embedded cluster: the value lies in this process, so a read sends nothing (READ-2)."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw


@pytest.fixture
def slice_(embedded_cluster: Any) -> Any:
    return pw.make_virtual_device_set().add_slice(devices=2)


@pytest.fixture
def sends_nothing(embedded_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a read that sends a request fails the test."""

    def refuse(array: Any) -> Any:
        raise AssertionError(f"a request was sent for {array!r}")

    monkeypatch.setattr(embedded_cluster.transfer, "read_back", refuse)


@pytest.mark.usefixtures("sends_nothing")
def test_every_kind_of_read_sends_nothing(slice_: Any) -> None:
    f = pw.jit(lambda x: {"a": x + 1, "b": [x * 2, jnp.sum(x)]}, devices=slice_)
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    out = f(value)
    for array in jax.tree_util.tree_leaves(out):
        array.copy_to_host_async()
    got = jax.device_get(out)
    np.testing.assert_array_equal(got["a"], value + 1)
    np.testing.assert_array_equal(got["b"][0], value * 2)
    assert got["b"][1] == 15 and float(out["b"][1]) == 15
    assert np.asarray(out["a"]) is np.asarray(out["a"]), "a value is made once and kept"
    assert not np.asarray(out["a"]).flags.writeable
    np.testing.assert_array_equal(np.asarray(pw.device_put(value, slice_, jax.sharding.PartitionSpec("x"))), value)
    assert "1.," in repr(f(value)["a"].block_until_ready())


@pytest.mark.usefixtures("sends_nothing")
def test_every_dtype_is_as_jax_reads_it(slice_: Any) -> None:
    f = pw.jit(lambda x: x[...], devices=slice_)
    for dtype in ("bool", "int8", "int4", "uint32", "bfloat16", "float16", "complex64"):
        want = np.asarray(jnp.arange(8).astype(dtype))
        got = np.asarray(f(want))
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())
    with jax.enable_x64(True):
        wide = [f(np.arange(3, dtype=dtype) + 2**40) for dtype in (np.int64, np.float64, np.complex128)]
    for array in wide:  # the mode of the call counts, not that of the read
        assert np.asarray(array).dtype == array.dtype and array.dtype.itemsize >= 8
        np.testing.assert_array_equal(np.asarray(array).real, np.arange(3) + 2**40)
    key = f(jax.random.key(7))
    np.testing.assert_array_equal(jax.random.key_data(jax.device_get(key)), jax.random.key_data(jax.random.key(7)))
    with pytest.raises(TypeError, match="extended dtype"):
        np.asarray(key)


def test_a_value_that_was_read_outlives_a_donation(slice_: Any) -> None:
    """MEM-4: NumPy has the host's own memory, so the donation gets a copy."""
    f = pw.jit(lambda x: x + 1, devices=slice_, donate_argnums=0)
    x = pw.device_put(np.zeros(4096, np.float32), slice_)
    seen = []
    for step in range(20):
        seen.append(np.asarray(x))
        x, old = f(x), x
        with pytest.raises(pw.errors.DeletedArrayError):
            np.asarray(old)
        assert all((value == n).all() for n, value in enumerate(seen)), step
    x.copy_to_host_async()
    f(x)
    with pytest.raises(pw.errors.DeletedArrayError):
        np.asarray(x)


def test_what_is_off_its_devices_is_read_when_it_is_back(embedded_cluster: Any, slice_: Any) -> None:
    x = pw.jit(lambda x: x + 1, devices=slice_)(np.zeros(4, np.float32)).block_until_ready()
    embedded_cluster.suspend()
    read: list[Any] = []
    thread = threading.Thread(target=lambda: read.append(np.asarray(x)))
    thread.start()
    thread.join(0.2)
    embedded_cluster.resume()
    thread.join(30)
    np.testing.assert_array_equal(read[0], np.ones(4))


def test_threads_read_while_others_launch(slice_: Any) -> None:
    """A thread inside a step may have released Python's lock: others do not look at the host's tables then."""
    f = pw.jit(lambda x: (x + 1, jnp.sum(x)), devices=slice_)
    heavy = pw.jit(lambda x: x @ x @ x, devices=slice_)
    wrong: list[Any] = []
    over = threading.Event()

    def launch() -> None:
        x = np.ones((256, 256), np.float32)
        while not over.is_set():
            heavy(x).block_until_ready()

    def read(number: int) -> None:
        try:
            for step in range(50):
                more, total = f(np.full(3, number + step, np.float32))
                assert float(total) == 3 * (number + step)
                np.testing.assert_array_equal(more, np.full(3, number + step + 1))
        except BaseException as error:
            wrong.append(error)

    launcher = threading.Thread(target=launch)
    readers = [threading.Thread(target=read, args=(1000 * n,)) for n in range(3)]
    for thread in (launcher, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    over.set()
    launcher.join()
    assert not wrong, wrong[0]
