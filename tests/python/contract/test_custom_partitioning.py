"""Functions with a partitioning of their own (`jax.experimental.custom_partitioning`) on slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

import pathways as pw

pytestmark = pytest.mark.one_island

X = np.arange(16, dtype=np.float32).reshape(4, 4)


def _scaled(factor: float) -> Any:
    """x * factor, with a partitioning of its own: by a rule for Shardy, as JAX wants it now."""

    def body(x: Any) -> Any:
        return x * factor

    fun = custom_partitioning(body)

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        return mesh, body, result.sharding, (arguments[0].sharding,)

    fun.def_partition(partition=partition, sharding_rule="i j -> i j")
    return fun


def _total() -> Any:
    """The sum of each row and the row's last value; two results, one static argument, and collectives in its parts."""

    def body(x: Any, axis: int) -> Any:
        return jnp.sum(x, axis), jnp.take(x, -1, axis)

    fun = custom_partitioning(body, static_argnums=(1,))

    def partition(axis: int, mesh: Any, arguments: Any, result: Any) -> Any:
        raise AssertionError("a compiler of another process cannot call this")

    fun.def_partition(partition=partition, sharding_rule="i j -> i, i")
    return fun


def test_custom_partitioning(add: Callable[..., Any]) -> None:
    one, two = add(2), add((2, 2))
    twice, thrice, total = _scaled(2), _scaled(3), _total()
    placed = pw.jit(twice, devices=one, in_shardings=P("x"), out_shardings=P("x"))
    mapped = jax.shard_map(twice, mesh=two.mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))
    for found, expected in (
        (placed(X), 2 * X),
        (pw.jit(lambda x: total(x, 1), devices=two, in_shardings=P("x", "y"))(X), (X.sum(1), X[:, -1])),
        (pw.jit(lambda x: jax.lax.scan(lambda c, _: (twice(c), None), x, None, 3)[0], devices=one)(X), 8 * X),
        (pw.jit(mapped, devices=two)(X), 2 * X),
        (pw.program(lambda x: thrice(placed(x)) + 1)(X), 6 * X + 1),
        (thrice(pw.device_put(X, one, P("x"))), 3 * X),
    ):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_it_is_exported(add: Callable[..., Any]) -> None:
    exported = jax.export.export(pw.jit(_scaled(2), devices=add(1)), platforms=["cpu"])(X)
    np.testing.assert_array_equal(exported.call(X), 2 * X)
