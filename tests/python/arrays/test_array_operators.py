"""Operators on arrays outside programs: what JAX gives, on the array's own slice, compiled once."""

from __future__ import annotations

import gc
import operator
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways.api.arrays import operators

# Some show what becomes of a `jax.jit` of the user's own, which takes arrays off their slice.
pytestmark = [pytest.mark.one_process, pytest.mark.filterwarnings("ignore::pathways.errors.FetchWarning")]

BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    divmod,
]
WHOLE = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
VALUES = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 1], [2, 3, 4]])


@pytest.fixture
def slice_(cluster: Any) -> Any:
    """Two devices."""
    return pw.make_virtual_device_set(cluster).add_slice(devices=2)


def same(got: Any, want: Any) -> None:
    """Equal in structure, dtype, weak type and value."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert type(mine) is pw.Array
        assert (mine.shape, mine.dtype, mine.weak_type) == (theirs.shape, theirs.dtype, theirs.weak_type)
        a, b = np.asarray(mine), np.asarray(theirs)
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=1e-6)


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_binary_operators_with_arrays_and_numbers(slice_: Any, dtype: str) -> None:
    ours, theirs = pw.device_put(VALUES.astype(dtype), slice_, P("x")), jnp.asarray(VALUES.astype(dtype))
    ops = [operator.add, operator.mul, operator.lt, operator.eq] if dtype in ("uint8", "bool", "bfloat16") else BINARY
    for op in ops:
        same(op(ours, 2), op(theirs, 2))
        same(op(2.5, ours), op(2.5, theirs))
        same(op(ours, ours[::-1]), op(theirs, theirs[::-1]))
        same(op(VALUES.astype(dtype), ours), op(jnp.asarray(VALUES.astype(dtype)), theirs))
        same(op(ours, theirs), op(theirs, theirs))
        same(op(theirs, ours), op(theirs, theirs))


def test_operators_of_whole_numbers(slice_: Any) -> None:
    ours, theirs = pw.device_put(VALUES.astype(np.int32), slice_), jnp.asarray(VALUES, np.int32)
    for op in WHOLE:
        same(op(ours, 3), op(theirs, 3))
        same(op(3, ours), op(3, theirs))
    same(~ours, ~theirs)
    same(ours << np.int32(2), theirs << np.int32(2))


def test_unary_operators_and_matmul(slice_: Any) -> None:
    value = VALUES.astype(np.float32) - 4
    ours, theirs = pw.device_put(value, slice_, P("x")), jnp.asarray(value)
    same(
        [-ours, +ours, abs(ours), round(ours, 1), ours.T, ours.mT],
        [-theirs, +theirs, abs(theirs), round(theirs, 1), theirs.T, theirs.mT],
    )
    same([ours @ ours.T, value.T @ ours, ours.T @ theirs], [theirs @ theirs.T, value.T @ theirs, theirs.T @ theirs])


def test_methods_and_properties(slice_: Any) -> None:
    value = VALUES.astype(np.float32)
    ours, theirs = pw.device_put(value, slice_, P("x")), jnp.asarray(value)
    for name, *args in [
        ("sum",),
        ("mean",),
        ("std",),
        ("max", 0),
        ("argmin", 1),
        ("cumsum", 1),
        ("reshape", -1),
        ("reshape", 2, 6),
        ("astype", jnp.int32),
        ("ravel",),
        ("flatten",),
        ("transpose", 1, 0),
        ("squeeze",),
        ("swapaxes", 0, 1),
        ("clip", 2, 5),
        ("round",),
        ("dot", value.T),
        ("prod",),
        ("repeat", 2),
        ("take", 3),
        ("copy",),
        ("any",),
        ("all",),
        ("conj",),
        ("view", jnp.int32),
    ]:
        same(getattr(ours, name)(*args), getattr(theirs, name)(*args))
    same([ours.real, ours.imag], [theirs.real, theirs.imag])
    assert (ours.size, ours.nbytes, ours.ndim, ours.itemsize) == (12, 48, 2, 4)
    with pytest.raises(TypeError, match="immutable"):
        ours[0] = 1


def test_numbers_promote_weakly(slice_: Any) -> None:
    half = pw.device_put(jnp.ones(4, jnp.bfloat16), slice_)
    assert (half * 2.0).dtype == jnp.bfloat16
    assert (half * np.float32(2)).dtype == jnp.float32
    whole = pw.device_put(np.arange(4, dtype=np.int8), slice_)
    assert (whole + 1).dtype == np.int8
    assert (whole + 1.0).dtype == jnp.float32
    weak = pw.device_put(3.0, slice_)
    assert weak.weak_type and (weak + 1).weak_type and (half + weak).dtype == jnp.bfloat16


def test_64_bits_with_x64(slice_: Any) -> None:
    with jax.enable_x64(True):
        wide = pw.device_put(np.arange(4) + 2**40, slice_)
        same(wide + 1, jnp.arange(4) + 2**40 + 1)
        assert (wide * 0.5).dtype == np.float64
        narrow = pw.device_put(np.arange(4, dtype=np.float32), slice_)
        assert (narrow + 1).dtype == np.float32
    assert (narrow + 1).dtype == np.float32


def test_numbers_that_compare_equal_are_told_apart(slice_: Any) -> None:
    ones = pw.device_put(np.ones(2, np.float32), slice_)
    assert np.isposinf(np.asarray(ones / 0.0)).all()
    assert np.isneginf(np.asarray(ones / -0.0)).all()
    ints = pw.device_put(np.ones(2, np.int32), slice_)
    assert [(ints + one).dtype for one in (1, 1.0, True)] == [np.int32, np.float32, np.int32]
    for _ in range(3):
        assert np.isnan(np.asarray(ones + float("nan"))).all()


def test_a_shortcut_tells_its_operands_apart(slice_: Any) -> None:
    one, two = (pw.device_put(np.full(2, n, np.float32), slice_) for n in (1, 5))
    for _ in range(3):
        assert (one - one).tolist() == [0, 0]
        assert (one - two).tolist() == [-4, -4]
        assert (two - one).tolist() == [4, 4]
        assert (3 - one).tolist() == [2, 2]
        assert (one - 3).tolist() == [-2, -2]


def test_each_operation_is_compiled_once_and_a_number_costs_no_message(slice_: Any, cluster: Any) -> None:
    x = pw.device_put(np.ones((2, 3), np.float32), slice_)
    y = pw.device_put(np.ones((2, 3), np.float32), slice_)
    for _ in range(2):
        x + 1, x * y, -x, jnp.tanh(x), x[1]
    before = cluster.stats()
    compiled = len(cluster.operations.known)
    for _ in range(10):
        x + 1, x * y, -x, jnp.tanh(x)
    after = cluster.stats()
    assert after["dispatches"] - before["dispatches"] == 40
    # Forty results were dropped meanwhile: a few commands release them; numbers would have cost ten.
    assert after["controller"]["commands"] <= before["controller"]["commands"] + 4 or not cluster.is_embedded
    assert len(cluster.operations.known) == compiled
    assert sum(after["compiles"]) == sum(before["compiles"])


def test_numbers_that_keep_changing_are_passed(slice_: Any, cluster: Any) -> None:
    x = pw.device_put(np.ones(6, np.float32), slice_)
    total = operators.CONSTANTS + 20
    values = [float(np.asarray(x * (1 / n))[0]) for n in range(1, total + 1)]
    np.testing.assert_allclose(values, [1 / n for n in range(1, total + 1)], rtol=1e-6)
    compiled = len(cluster.operations.known)
    for n in range(20):
        x * (n + 0.125)
    assert len(cluster.operations.known) == compiled


def test_elementwise_results_keep_the_sharding(slice_: Any) -> None:
    x = pw.device_put(np.ones((4, 2), np.float32), slice_, P("x"))
    for result in (x + 1, x * x, jnp.exp(x), x > 0, x.astype(jnp.int32), jnp.zeros_like(x), jnp.where(x > 0, x, 0.0)):
        assert result.sharding == x.sharding
        assert result.slice is slice_


def test_arrays_of_two_slices_meet_on_the_larger_ones(cluster: Any) -> None:
    add = pw.make_virtual_device_set(cluster).add_slice
    left, right = add(devices=2), add(devices=1)
    big = pw.device_put(np.arange(8, dtype=np.float32), left, P("x"))
    small = pw.device_put(np.float32(10), right)
    for result in (big + small, small + big, jnp.add(small, big)):
        assert result.slice is left
        assert result.tolist() == list(range(10, 18))
    other = pw.device_put(np.arange(8, dtype=np.float32), right)
    assert (big + other).slice is left and (other + big).slice is right


def test_arrays_of_two_clusters_do_not_meet(local_cluster: Any, embedded_cluster: Any) -> None:
    here, there = (
        pw.device_put(np.ones(2), pw.make_virtual_device_set(c).add_slice(devices=1))
        for c in (embedded_cluster, local_cluster)
    )
    with pytest.raises(pw.errors.PlacementError, match="different clusters"):
        here + there


def test_deleted_and_donated_arrays_are_refused(slice_: Any) -> None:
    x = pw.device_put(np.ones(4, np.float32), slice_)
    y = x + 1
    for _ in range(2):
        x * y, x + 1, x[0]
    x.delete()
    for use in (
        lambda: x + 1,
        lambda: x * y,
        lambda: y * x,
        lambda: x[0],
        lambda: jnp.sin(x),
        lambda: x.sum(),
        lambda: np.sin(x),
        lambda: np.asarray(x),
        lambda: -x,
        lambda: jax.jit(lambda v: v)(x),
    ):
        with pytest.raises(pw.errors.DeletedArrayError, match="deleted"):
            use()
    step = pw.jit(lambda v: v + 1, devices=slice_, donate_argnums=0)
    z = step(y)
    with pytest.raises(pw.errors.DeletedArrayError, match="donated"):
        y + 1
    assert (z + 1).tolist() == [4, 4, 4, 4]


def test_errors_of_jax_come_through(slice_: Any) -> None:
    x = pw.device_put(np.ones((2, 3), np.float32), slice_)
    with pytest.raises(ValueError, match="Incompatible shapes"):
        x + pw.device_put(np.ones((4,), np.float32), slice_)
    with pytest.raises(TypeError):
        x + "one"
    assert (x == "one") is False or not np.any(x == "one")
    with pytest.raises(TypeError):
        x @ None


@pytest.mark.watchdog(300)
def test_two_threads_compute_with_arrays(slice_: Any) -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            value = np.arange(4, dtype=np.float32) + seed
            x = pw.device_put(value, slice_)
            for n in range(150):
                y = (x * 2 + seed) - x
                if n % 10 == 0:
                    np.testing.assert_array_equal(np.asarray(y), value + seed)
                    assert float(jnp.sum(y[1:])) == float((value + seed)[1:].sum())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_what_was_compiled_goes_with_its_table(slice_: Any) -> None:
    """Also while a function lives from which some of it was traced: a closed connection keeps nothing here."""
    x = pw.device_put(np.arange(4, dtype=np.float32), slice_)
    gradient = jax.grad(lambda v: (v * v).sum())
    np.testing.assert_array_equal(np.asarray(gradient(x)), np.arange(4) * 2)
    cluster = slice_.cluster
    table, cluster.operations = cluster.operations, None
    kept = [weakref.ref(each) for each in table.known.values()]
    del table
    gc.collect()
    assert kept and not any(each() is not None for each in kept)
