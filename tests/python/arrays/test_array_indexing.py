"""Indexing arrays outside programs: NumPy's and JAX's results, and one program for every position."""

from __future__ import annotations

from typing import Any

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways.api.arrays import indexing

pytestmark = pytest.mark.one_process

VALUE = np.arange(48, dtype=np.float32).reshape(4, 6, 2)
BASIC = [
    0,
    -1,
    3,
    np.int64(2),
    slice(1, 3),
    slice(0, 0),
    slice(3, 1),
    slice(None, None, 2),
    slice(None, None, -1),
    (1, 2),
    (1, 2, 1),
    (..., 1),
    (None, 1),
    (1, None, ...),
    (slice(1, 3), slice(2, 4)),
    (slice(1, 3), 2, None, slice(0, 1)),
    (),
    ...,
    None,
]
ADVANCED = [
    True,
    (0, [1, 2]),
    np.array([1, 2]),
    np.array([[0, 1], [2, 3]]),
    VALUE[:, 0, 0] > 10,
    VALUE > 7,
    (slice(None), np.array([3, 0])),
    (np.array([0, 1]), np.array([2, 2])),
    (..., np.array([True, False])),
]


@pytest.fixture
def x(cluster: Any) -> pw.Array:
    """VALUE, cut over two devices."""
    return pw.device_put(VALUE, pw.make_virtual_device_set(cluster).add_slice(devices=2), P("x"))


def test_basic_and_advanced_indices(x: pw.Array) -> None:
    for index in (*BASIC, *ADVANCED):
        got = x[index]
        assert type(got) is pw.Array and got.slice is x.slice
        np.testing.assert_array_equal(np.asarray(got), VALUE[index], err_msg=repr(index))


def test_out_of_bounds_is_the_edge_as_in_jax(x: pw.Array) -> None:
    for index in (4, -5, 100, (0, 6), (0, -7)):
        np.testing.assert_array_equal(np.asarray(x[index]), np.asarray(jnp.asarray(VALUE)[index]))


def test_indices_that_are_arrays_of_the_cluster(x: pw.Array) -> None:
    rows = pw.device_put(np.array([2, 0]), x.slice)
    np.testing.assert_array_equal(np.asarray(x[rows]), VALUE[[2, 0]])
    np.testing.assert_array_equal(np.asarray(x[rows[0]]), VALUE[2])
    np.testing.assert_array_equal(np.asarray(x[x > 7]), VALUE[VALUE > 7])
    np.testing.assert_array_equal(np.asarray(x[:, rows, 1]), VALUE[:, [2, 0], 1])
    assert [10, 11, 12][rows[0]] == 12


def test_updates(x: pw.Array) -> None:
    theirs = jnp.asarray(VALUE)
    for index in (1, slice(1, 3), (..., 0), np.array([0, 2]), (0, 1, 1)):
        for method, value in (
            ("set", 7.0),
            ("add", 1),
            ("multiply", 2.0),
            ("divide", 4),
            ("min", 3),
            ("max", x[0, 0, 0]),
        ):
            got = getattr(x.at[index], method)(value)
            want = getattr(theirs.at[index], method)(np.asarray(value) if method == "max" else value)
            assert type(got) is pw.Array and got.slice is x.slice
            np.testing.assert_allclose(np.asarray(got), np.asarray(want))
    np.testing.assert_array_equal(np.asarray(x.at[0].get()), VALUE[0])
    np.testing.assert_array_equal(np.asarray(x.at[:, 1].set(np.zeros(2))), np.asarray(theirs.at[:, 1].set(np.zeros(2))))
    np.testing.assert_array_equal(np.asarray(x.at[9].set(5)), VALUE)  # out of bounds: dropped, as in JAX
    np.testing.assert_array_equal(np.asarray(x.at[VALUE > 20].set(5)), np.where(VALUE > 20, 5, VALUE))
    np.testing.assert_array_equal(np.asarray(x.at[1:3, 0].apply(jnp.exp)), np.asarray(theirs.at[1:3, 0].apply(jnp.exp)))
    np.testing.assert_array_equal(np.asarray(x.at[0].add(1, mode="drop")), np.asarray(theirs.at[0].add(1)))
    np.testing.assert_array_equal(np.asarray(x), VALUE)


def test_one_program_serves_every_position(x: pw.Array, cluster: Any) -> None:
    x[0], x[0:2], x[0, 1]
    compiled = len(cluster.operations.known)
    for n in range(4):
        np.testing.assert_array_equal(np.asarray(x[n]), VALUE[n])
        np.testing.assert_array_equal(np.asarray(x[n - 4, n + 1]), VALUE[n, n + 1])
    x.at[0].set(x[0]), x.at[0:2].add(1)
    compiled = len(cluster.operations.known)
    for n in range(3):
        np.testing.assert_array_equal(np.asarray(x.at[n].set(x[3])[n]), VALUE[3])
        np.testing.assert_array_equal(np.asarray(x.at[n : n + 2].add(1)[n : n + 2]), VALUE[n : n + 2] + 1)
        np.testing.assert_array_equal(np.asarray(x[n : n + 2]), VALUE[n : n + 2])
    assert len(cluster.operations.known) == compiled


def test_bad_indices_are_refused_as_in_jax(x: pw.Array) -> None:
    theirs = jnp.asarray(VALUE)
    for index in ((1, 1, 1, 1), "a", 1.5, [1, 2], slice(0.5, 1)):
        with pytest.raises((IndexError, TypeError)) as wanted:
            theirs[index]
        with pytest.raises(wanted.type):
            x[index]


def test_iteration(x: pw.Array, cluster: Any) -> None:
    rows = list(x)
    assert len(rows) == len(x) == 4
    np.testing.assert_array_equal(np.stack(rows), VALUE)
    many = pw.device_put(np.arange(230), x.slice)
    assert [int(n) for n in many] == list(range(230))
    with pytest.raises(TypeError, match="0-d"):
        iter(x.sum())
    first, *rest = x[:, 0, 0]
    assert (float(first), len(rest)) == (0.0, 3)


extents = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)
entries = st.one_of(st.integers(-5, 4), st.none(), st.slices(6), st.just(...))


@hypothesis.given(extents, st.lists(entries, max_size=4))
def test_splitting_an_index_keeps_its_meaning(shape: tuple[int, ...], index: list[Any]) -> None:
    value = np.arange(int(np.prod(shape))).reshape(shape)
    try:
        want = value[tuple(index)]
    except IndexError:
        return
    basic = indexing.split(shape, tuple(index))
    assert basic is not None
    basic_shape, starts = basic
    at = iter(starts)
    window = tuple(
        slice(None) if size is None else slice(start := next(at), start + size) for size in basic_shape.sizes
    )
    np.testing.assert_array_equal(value[window][tuple(map(indexing.thawed, basic_shape.rest))], want)
    assert next(at, None) is None
