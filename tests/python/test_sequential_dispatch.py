"""Sequential dispatch on real hosts: the same results and the same errors, node by node."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways import errors


def test_there_are_two_ways_of_dispatch() -> None:
    with pytest.raises(ValueError, match="got 'both'"):
        pw.LocalCluster(dispatch="both")


@pytest.mark.slow
def test_results_and_errors_are_those_of_parallel_dispatch() -> None:
    with pw.connect(pw.LocalCluster(islands=2, hosts_per_island=2, dispatch="sequential"), progress=False) as cluster:
        devices = pw.make_virtual_device_set()
        first, second = (devices.add_slice(shape=(2,), axis_names=("x",), island=island) for island in (0, 1))
        total = pw.jit(lambda x: x + jnp.sum(x), devices=first, in_shardings=P("x"), out_shardings=P("x"), name="total")
        twice = pw.jit(lambda x: x * 2, devices=second, in_shardings=P("x"), out_shardings=P("x"), name="twice")

        @pw.program
        def there_and_back(x: jax.Array) -> jax.Array:
            return total(twice(total(x)))

        def plain(x: np.ndarray) -> np.ndarray:
            once = (x + x.sum()) * 2
            return np.asarray(once + once.sum(), np.float32)

        x = np.arange(4, dtype=np.float32)
        value, expected = pw.device_put(x, first, P("x")), x
        for _ in range(5):  # in flight together, each on the result of the one before
            value, expected = there_and_back(value), plain(expected)
        np.testing.assert_allclose(np.asarray(value), expected)
        assert sum(host["goes"] for host in cluster.stats()["hosts"]) == 5 * (2 + 4 + 4)

        deleted = there_and_back(pw.device_put(x, first, P("x")))
        deleted.delete()
        with pytest.raises((errors.PathwaysError, RuntimeError, ValueError)):
            np.asarray(total(deleted))
        np.testing.assert_allclose(np.asarray(there_and_back(x)), plain(x))


@pytest.mark.slow
def test_rows_that_are_there_before_their_exchange() -> None:
    """The rows are arguments, so a host has them before it is told to prepare the exchange."""
    with pw.connect(pw.LocalCluster(islands=2, devices_per_host=2, dispatch="sequential"), progress=False):
        devices = pw.make_virtual_device_set()
        first, second = (devices.add_slice(devices=2, island=island) for island in (0, 1))
        triple = pw.jit(lambda x: x * 3, devices=second, out_shardings=P("x"))

        @pw.program
        def visit(x: jax.Array, to: jax.Array) -> jax.Array:
            sent = pw.exchange(x, to, to=second, capacity=8, overflow="drop")
            return sent.back(triple(sent.rows))

        x, to = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8, dtype=np.int32) % 2
        for _ in range(3):
            got = visit(pw.device_put(x, first, P("x")), pw.device_put(to, first, P("x")))
            np.testing.assert_array_equal(np.asarray(got), x * 3)
