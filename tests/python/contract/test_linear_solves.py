"""Linear solves whose operator is spread over slices: `jax.lax.custom_linear_solve` and what JAX builds on it. Values
and gradients are those of plain JAX, whose rules for derivatives hold. So are other constructs that only group
operations.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import linear_call
from jax.scipy.sparse import linalg

import pathways as pw

DRAWN = np.random.default_rng(0).standard_normal((7, 6)).astype(np.float32) * 0.3
M = DRAWN[:6] @ DRAWN[:6].T + np.eye(6, dtype=np.float32)
V = DRAWN[6]

Halves = list[Any]


def product(halves: Halves, m: Any) -> Any:
    """The product with a matrix whose rows are on two slices."""
    return lambda x: jnp.concatenate([halves[0](m[:3], x), halves[1](m[3:], x)])


def cg(halves: Halves, m: Any, v: Any) -> Any:
    return linalg.cg(product(halves, m), v, maxiter=20)[0]


def cg_of_trees(halves: Halves, m: Any, v: Any) -> Any:
    def apply(t: Any) -> Any:
        return {"a": halves[0](m, t["a"]), "b": 2 * halves[1](m, t["b"])}

    found = linalg.cg(apply, {"a": v, "b": 3 * v}, maxiter=20)[0]
    return found["a"] + found["b"]


def bicgstab(halves: Halves, m: Any, v: Any) -> Any:
    return linalg.bicgstab(product(halves, m), v, maxiter=20)[0]


def gmres(halves: Halves, m: Any, v: Any) -> Any:
    return linalg.gmres(product(halves, m), v, maxiter=3, restart=6, solve_method="incremental")[0]


def gmres_batched(halves: Halves, m: Any, v: Any) -> Any:
    return linalg.gmres(product(halves, m), v, maxiter=3, restart=6, solve_method="batched")[0]


def least_squares(halves: Halves, m: Any, v: Any) -> Any:
    """By the normal equations."""
    normal = lambda x: product(halves, m.T)(product(halves, m)(x))
    return linalg.cg(normal, product(halves, m.T)(v), maxiter=20)[0]


def direct(halves: Halves, m: Any, v: Any) -> Any:
    return jax.lax.custom_linear_solve(
        product(halves, m),
        v,
        lambda _, b: jnp.linalg.solve(m, b),
        transpose_solve=lambda _, b: jnp.linalg.solve(m.T, b),
    )


def root(halves: Halves, m: Any, v: Any) -> Any:
    def solve(f: Any, start: Any) -> Any:
        return jax.lax.fori_loop(0, 40, lambda _, x: x - 0.3 * f(x), start)

    def tangent(g: Any, y: Any) -> Any:
        return jnp.linalg.solve(jax.jacobian(g)(y), y)

    return jax.lax.custom_root(lambda x: product(halves, m)(x) + 0.1 * x**3 - v, jnp.zeros_like(v), solve, tangent)


def in_a_loop(halves: Halves, m: Any, v: Any) -> Any:
    """Steps of a trust region: a solve in each iteration."""
    return jax.lax.scan(lambda v, _: (jnp.sin(cg(halves, m, v)), None), v, None, length=20)[0]


@pytest.mark.parametrize(
    "solve",
    [cg, cg_of_trees, bicgstab, gmres, gmres_batched, least_squares, direct, root, in_a_loop],
    ids=lambda each: each.__name__,
)
def test_solves_and_their_gradients_are_those_of_plain_jax(add: Any, solve: Any) -> None:
    halves = [pw.jit(lambda w, x: w @ x, devices=add(1)) for _ in range(2)]
    plain = [lambda w, x: w @ x] * 2
    got = pw.program(lambda m, v: solve(halves, m, v))(M, V)
    np.testing.assert_allclose(np.asarray(got), solve(plain, M, V), rtol=1e-3, atol=1e-4)

    def grads(halves: Halves) -> Any:
        return jax.grad(lambda m, v: jnp.sum(jnp.sin(solve(halves, m, v))), argnums=(0, 1))

    for one, other in zip(pw.program(grads(halves))(M, V), grads(plain)(M, V), strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-3, atol=1e-4)


def test_what_only_groups_operations_is_opened(add: Any) -> None:
    @jax.custom_batching.custom_vmap
    def batched(x: Any) -> Any:
        return second(first(x))

    @batched.def_vmap
    def _(size: int, is_batched: Any, x: Any) -> Any:
        return 3 * second(first(x)), True

    first, second = (pw.jit(lambda x, n=n: x * n, devices=add(1)) for n in (2, 5))
    for fun, factor in (
        (batched, 10),
        (jax.vmap(batched), 30),
        (lambda x: jax.lax.composite(lambda x: second(first(x)), name="test.twice")(x), 10),
        (lambda x: linear_call(lambda _, x: first(x), lambda _, x: second(x), (), x), 2),
        (jax.grad(lambda x: linear_call(lambda _, x: first(x), lambda _, x: second(x), (), x).sum()), 5 / V),
    ):
        np.testing.assert_allclose(np.asarray(pw.program(fun)(V)), V * factor, rtol=1e-6)
