"""Arrays as Python values: what waits and what does not, conversions, copies, pytrees, and their end."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

import pathways as pw

# Some show what becomes of a `jax.jit` of the user's own, which takes arrays off their slice.
pytestmark = [pytest.mark.one_island, pytest.mark.filterwarnings("ignore::pathways.errors.FetchWarning")]

VALUE = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture
def slice_(cluster: Any) -> Any:
    """Two devices."""
    return pw.make_virtual_device_set(cluster).add_slice(devices=2)


@pytest.fixture
def x(slice_: Any) -> pw.Array:
    """VALUE, cut over two devices."""
    return pw.device_put(VALUE, slice_, P("x"))


def slow_array(slice_: Any) -> pw.Array:
    """An array whose value takes long enough to be met while it is being computed."""
    slow = pw.jit(lambda v: jax.lax.fori_loop(0, 30_000, lambda i, a: jnp.sin(a) + i, v), devices=slice_)
    return slow(np.ones((64, 64), np.float32))


def test_it_is_a_jax_array(x: pw.Array) -> None:
    assert isinstance(x, jax.Array) and isinstance(x, pw.Array) and type(x) is pw.Array
    assert not isinstance(x, np.ndarray)
    assert x.committed and x.is_fully_addressable and not x.is_fully_replicated
    assert x.devices() == set(x.slice.devices)
    assert x.aval.str_short() == "float32[4,2]"


@pytest.mark.slow
def test_repr_never_waits_and_is_ready_says_so(local_cluster: Any) -> None:
    slice_ = pw.make_virtual_device_set(local_cluster).add_slice(devices=1)
    slow = slow_array(slice_)
    text = repr(slow)
    assert "float32[64,64]" in text and "pending" in text and slice_.mesh_spec.name in text
    assert not slow.is_ready()
    assert "pending" in f"{[slow]}"
    slow.block_until_ready()
    assert slow.is_ready() and "pending" not in repr(slow)


def test_str_and_format_show_the_value(x: pw.Array) -> None:
    assert str(x) == str(VALUE)
    assert f"{x[1, 0]:.2f}" == "2.00" and f"{x}" == str(VALUE)


def test_array_protocol(x: pw.Array) -> None:
    value = np.asarray(x)
    assert value.dtype == np.float32 and not value.flags.writeable
    assert np.asarray(x) is value  # fetched once
    mine = np.array(x)
    mine[0] = 9
    np.testing.assert_array_equal(np.asarray(x), VALUE)
    assert np.asarray(x, dtype=np.float64).dtype == np.float64
    assert np.asarray(x, copy=False) is value
    with pytest.raises(ValueError, match="copy"):
        np.asarray(x, dtype=np.int32, copy=False)


def test_conversions(x: pw.Array) -> None:
    assert (float(x[1, 1]), int(x[1, 1]), bool(x[1, 1]), complex(x[1, 1])) == (3.0, 3, True, 3 + 0j)
    assert x[1, 1].item() == 3.0 and x.tolist() == VALUE.tolist()
    assert list(range(4))[x[1, 1].astype(int)] == 3
    assert len(x) == 4 and 3.0 in x and 99.0 not in x
    for convert in (float, int, complex):
        with pytest.raises(TypeError, match="only scalar arrays"):
            convert(x)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(x)
    with pytest.raises(TypeError, match="integer"):
        [0, 1][x[0, 0]]
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)
    with pytest.raises(TypeError, match="0-d"):
        len(x.sum())
    if (x[0] == 0).all() or not (x[0] >= 0).all():
        pytest.fail("a condition took the wrong way")


def test_copies(x: pw.Array, slice_: Any) -> None:
    for other in (copy.copy(x), copy.deepcopy({"a": [x]})["a"][0], x.copy(), jnp.array(x)):
        assert type(other) is pw.Array and other is not x and other.slice is slice_ and other.sharding == x.sharding
        pw.jit(lambda v: v + 1, devices=slice_, donate_argnums=0)(other)
        np.testing.assert_array_equal(np.asarray(x), VALUE)
    assert jnp.asarray(x) is x


def test_a_pickle_holds_the_value(x: pw.Array, slice_: Any) -> None:
    got = pickle.loads(pickle.dumps({"a": x}))["a"]
    assert type(got) is np.ndarray
    np.testing.assert_array_equal(got, VALUE)
    pickled = pickle.dumps(pw.device_put(jax.random.key(5), slice_), protocol=0)
    np.testing.assert_array_equal(jax.random.key_data(pickle.loads(pickled)), jax.random.key_data(jax.random.key(5)))
    assert pickled.startswith(b"cpathways.api.array\n_unpickle_key\n")  # older pickles have this name, too


def test_pytrees(x: pw.Array, slice_: Any) -> None:
    tree = {"a": x, "b": (x + 1, None)}
    assert jax.block_until_ready(tree)["a"] is x
    got = jax.device_get(tree)
    assert type(got["b"][0]) is np.ndarray
    np.testing.assert_array_equal(got["b"][0], VALUE + 1)
    doubled = jax.tree.map(lambda v: v * 2, tree)
    assert type(doubled["a"]) is pw.Array
    np.testing.assert_array_equal(np.asarray(doubled["b"][0]), (VALUE + 1) * 2)
    flat, unravel = ravel_pytree(tree)
    assert type(flat) is pw.Array and flat.shape == (16,)
    assert type(unravel(flat)["a"]) is pw.Array


def test_to_a_device_of_this_process(x: pw.Array) -> None:
    here = jax.device_put(x, jax.devices()[0])
    assert not isinstance(here, pw.Array)
    np.testing.assert_array_equal(here, VALUE)


def test_copy_to_host_async(x: pw.Array) -> None:
    x.copy_to_host_async()
    x.copy_to_host_async()
    np.testing.assert_array_equal(np.asarray(x), VALUE)


def test_deleted_arrays(x: pw.Array) -> None:
    y = x + 1
    x.delete()
    x.delete()
    assert x.is_deleted() and not y.is_deleted()
    assert "deleted" in repr(x) and "deleted" in str(x) and x.shape == (4, 2)
    for use in (
        lambda: x.block_until_ready(),
        lambda: x.is_ready(),
        lambda: x.copy_to_host_async(),
        lambda: float(x[0]),
        lambda: np.asarray(x),
        lambda: jax.device_get(x),
        lambda: pickle.dumps(x),
        lambda: x.tolist(),
        lambda: copy.copy(x),
        lambda: list(x),
        lambda: pw.device_put(x, y.slice),
        lambda: pw.program(lambda v: v + 1)(x),
        lambda: pw.jit(lambda v: v, devices=y.slice)(x),
    ):
        with pytest.raises(pw.errors.DeletedArrayError, match=r"deleted|donated"):
            use()
    np.testing.assert_array_equal(np.asarray(y), VALUE + 1)


def test_a_fetched_value_outlives_its_array(x: pw.Array) -> None:
    value = np.asarray(x)
    x.delete()
    np.testing.assert_array_equal(value, VALUE)


def test_nothing_is_left_of_arrays_forgotten(slice_: Any, cluster: Any) -> None:
    x = pw.device_put(np.ones(4, np.float32), slice_)
    np.asarray(x + 1), np.asarray(x[0])
    cluster.native.flush()
    before = cluster.stats()["futures"]
    for n in range(300):
        y = x + 1
        if n % 50 == 0:
            np.asarray(y), x[0]
    del y
    np.asarray(x + 1)
    cluster.native.flush()
    assert cluster.stats()["futures"] <= before + 40


@pytest.mark.watchdog(300)
def test_two_threads_fetch_and_wait(slice_: Any) -> None:
    wrong: list[BaseException] = []
    start = threading.Barrier(2)

    def work(seed: int) -> None:
        try:
            start.wait()
            x = pw.device_put(np.full(4, seed, np.float32), slice_, P("x"))
            for n in range(20):
                np.testing.assert_array_equal(np.asarray(x + n), np.full(4, seed + n))
                (x * n).block_until_ready()
                assert float(jax.jit(lambda v: v.sum())(x)) == 4 * seed
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@pytest.mark.watchdog(300)
def test_two_threads_read_one_array(slice_: Any) -> None:
    x = pw.device_put(np.zeros((64, 64), np.float32), slice_)
    for n in range(40):
        y = x + n
        got: list[Any] = []
        threads = [threading.Thread(target=lambda y=y, got=got: got.append(np.asarray(y))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 2 and all((value == n).all() for value in got)


def test_what_jax_refuses_numpy_does(embedded_cluster: Any) -> None:
    """`jnp.polyfit` takes no integers; `np.polyfit` does, and so of an array. A wrong call is refused by NumPy."""
    slice_ = pw.make_virtual_device_set(embedded_cluster).add_slice(devices=2)
    x = pw.device_put(np.arange(5, dtype=np.int32), slice_)
    np.testing.assert_allclose(np.polyfit(x, x * 2 + 1, 1), [2, 1], atol=1e-6)
    np.testing.assert_allclose(np.polyfit(np.arange(5.0), x, 1), [1, 0], atol=1e-5)
    with pytest.raises((TypeError, ValueError)):
        np.polyfit(x, x[:3], 1)
    with pytest.raises(ValueError, match=r"concatenate|dimension"):
        np.concatenate([x, np.zeros((2, 2, 2))])
