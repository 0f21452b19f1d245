"""Eager transformations of a program, from outside it: `jax.grad`, `jax.value_and_grad`, `jax.vmap`.

Each placed step then runs on its own slice, one by one; results equal plain JAX's. Under `jax.jit` it is refused.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw

pytestmark = pytest.mark.one_island

W = np.full((3, 3), 0.1, np.float32)
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def plain(w: Any, x: Any) -> Any:
    return (jnp.tanh(x @ w) ** 2).sum()


@pytest.fixture
def loss(cluster: pw.Cluster) -> Any:
    devices = pw.make_virtual_device_set(cluster)
    left, right = devices.add_slice(devices=2), devices.add_slice(devices=2)
    first = pw.jit(lambda w, x: jnp.tanh(x @ w), left, in_shardings=(P(), P("x")), out_shardings=P("x"), name="first")
    second = pw.jit(lambda y: (y**2).sum(), right, name="second")

    @pw.program
    def two_slices(w: Any, x: Any) -> Any:
        return second(pw.device_put(first(w, x), right, P("x")))

    return two_slices


def test_grad_of_a_program_from_outside(cluster: pw.Cluster, loss: Any) -> None:
    gradient = jax.grad(loss)(W, X)
    assert isinstance(gradient, pw.Array)
    np.testing.assert_allclose(np.asarray(gradient), jax.grad(plain)(W, X), rtol=1e-5)


def test_value_and_grad_compiles_once(cluster: pw.Cluster, loss: Any) -> None:
    jax.value_and_grad(loss)(W, X)
    before = cluster.stats()["compiles"]
    value, gradient = jax.value_and_grad(loss)(W, X)
    assert cluster.stats()["compiles"] == before
    np.testing.assert_allclose(float(value), plain(W, X), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(gradient), jax.grad(plain)(W, X), rtol=1e-5)


def test_vmap_of_a_program_from_outside(cluster: pw.Cluster, loss: Any) -> None:
    batch = np.stack([X, X + 1])
    got = jax.vmap(loss, in_axes=(None, 0))(W, batch)
    np.testing.assert_allclose(np.asarray(got), jax.vmap(plain, in_axes=(None, 0))(W, batch), rtol=1e-5)


def test_a_program_inside_jit_is_refused(cluster: pw.Cluster, loss: Any) -> None:
    with pytest.raises(pw.errors.TraceError, match=r"jax\.jit"):
        jax.jit(loss)(W, X)


def test_an_exchange_is_transformed_in_the_program(cluster: pw.Cluster) -> None:
    """From outside, JAX would compile the exchange for this process. A loop is a program of its own."""
    devices = pw.make_virtual_device_set(cluster)
    here = devices.add_slice(devices=2)
    step = pw.jit(jnp.sin, here)

    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0].sum()

    def sent(x: Any) -> Any:
        return pw.exchange(x, np.zeros(4, np.int32), to=here, capacity=4).rows.sum()

    with pytest.raises(pw.errors.TraceError, match=r"pw\.program\(jax\.grad\(f\)\) instead of"):
        jax.grad(pw.program(sent))(X)
    inside, outside = pw.program(jax.grad(scanned))(X), jax.grad(pw.program(scanned))(X)
    np.testing.assert_allclose(np.asarray(outside), np.asarray(inside), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(pw.program(jax.grad(sent))(X)), np.ones_like(X))
