"""Closed-over arrays become arguments through every construct of JAX that has a jaxpr inside, with JAX's own values.

`lift` alone, on jaxprs. What users see of it is in `contract/test_closed_over.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.sparse.linalg
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pathways import _jaxlib
from pathways.api.programs.while_loop import while_loop
from pathways.compiler.added_primitives.grouped_blocks import over_blocks
from pathways.compiler.closures import ClosedOver, Place, lift
from pathways.compiler.ir import MeshSpec
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import device_put

N = 64
RNG = np.random.default_rng(7)
A = (RNG.normal(size=(N, N)) / N).astype(np.float32)
B = jnp.asarray(RNG.normal(size=(N, N)) / N, jnp.float32)
X = RNG.normal(size=N).astype(np.float32)
LEFT, RIGHT = (MeshSpec(name, (("x", 1),)) for name in ("left", "right"))


def inner(x: Any) -> Any:
    """A jit keeps what it closes over, wherever it is called."""
    return jax.jit(lambda y: A @ y + jnp.sin(B @ y))(x)


@jax.custom_vjp
def custom(x: Any) -> Any:
    return inner(x)


custom.defvjp(lambda x: (inner(x), x), lambda x, g: (jax.jit(lambda y: B @ y)(g) + x,))


@jax.custom_jvp
def forward(x: Any) -> Any:
    return inner(x)


forward.defjvp(lambda x, t: (inner(*x), jax.jit(lambda y: B @ y)(*t)))


def sharded(x: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.shard_map(inner, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)


def solved(operator: Callable[[Any], Any], symmetric: bool) -> Callable[[Any], Any]:
    """Solves `y + a little of operator(y) = x`, by an iteration that closes over a big array, too."""

    def iteration(matvec: Any, b: Any) -> Any:
        return jax.lax.fori_loop(0, 8, lambda _, y: y + jax.jit(lambda r: r + 0 * (B @ r))(b - matvec(y)), b)

    def around(x: Any) -> Any:
        return jax.lax.custom_linear_solve(lambda y: y + 0.1 * operator(y), x, iteration, iteration, symmetric)

    return around


SYMMETRIC = jax.jit(lambda y: (A + A.T) @ y)
NOT_SYMMETRIC = jax.jit(lambda y: A @ (B @ y))


def rooted(x: Any) -> Any:
    def by_iteration(f: Any, y: Any) -> Any:
        return jax.lax.fori_loop(0, 8, lambda _, y: y - f(y), y)

    return jax.lax.custom_root(lambda y: y + 0.1 * inner(y) - x, x, by_iteration, lambda g, y: solved(g, False)(y))


def mixture(x: Any) -> Any:
    """Three groups of 2, 0 and 1 blocks, whose body closes over big arrays."""
    ends, groups = jnp.array([2, 2, 3], jnp.int32), jnp.stack([x, x + 1, x + 2])
    return over_blocks(lambda w, row: w * inner(row), ends, groups, jnp.stack([x, 2 * x, 3 * x, 4 * x]))


def writing(loop: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """A function that adds to a reference in what `loop` makes of it."""

    def around(x: Any) -> Any:
        reference = jax.new_ref(jnp.zeros_like(x))

        def step(y: Any) -> Any:
            reference[...] += inner(y)
            return A @ y + inner(y)

        return loop(step, x) + reference[...]

    return around


CONSTRUCTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: A @ x + B @ x,
    "jit": inner,
    "a jit in a jit": jax.jit(lambda x: inner(inner(x))),
    "scan": lambda x: jax.lax.scan(lambda c, row: (inner(c) + row, row * c), x, B)[0],
    "a scan that reads more": lambda x: jax.lax.scan(lambda c, row: (inner(c) + B @ row, inner(row)), x, B)[1],
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, c: inner(c), x),
    "while_loop": lambda x: jax.lax.while_loop(
        lambda c: c[0] + 0 * inner(c[1])[0] < 3, lambda c: (c[0] + 1, inner(c[1])), (0.0, x)
    )[1],
    "cond": lambda x: jax.lax.cond(x[0] > 0, inner, lambda y: jax.jit(lambda z: B @ z)(y), x),
    "switch": lambda x: jax.lax.switch(1, [lambda y: y, inner, lambda y: jax.jit(lambda z: A @ z)(y)], x),
    "a branch in a loop": lambda x: jax.lax.fori_loop(
        0, 4, lambda i, c: jax.lax.cond(i % 2 == 0, inner, lambda y: y * 2, c), x
    ),
    "remat": lambda x: jax.checkpoint(lambda y: inner(y) + A @ y)(x),
    "the gradient of remat": jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(inner(y)))(x).sum()),
    "custom_vjp": custom,
    "the gradient of custom_vjp": jax.grad(lambda x: custom(x).sum()),
    "custom_jvp": forward,
    "the gradient of custom_jvp": jax.grad(lambda x: forward(x).sum()),
    "vmap": lambda x: jax.vmap(inner)(jnp.stack([x, x + 1])),
    "the gradient of a scan": jax.grad(lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, length=3)[0].sum()),
    "shard_map": sharded,
    "a symmetric solve": solved(SYMMETRIC, True),
    "the gradient of a symmetric solve": jax.grad(lambda x: jnp.sin(solved(SYMMETRIC, True)(x)).sum()),
    "a solve": solved(NOT_SYMMETRIC, False),
    "the gradient of a solve": jax.grad(lambda x: jnp.sin(solved(NOT_SYMMETRIC, False)(x)).sum()),
    "a solve of many": lambda x: jax.vmap(solved(NOT_SYMMETRIC, False))(jnp.stack([x, x + 1])),
    "cg": lambda x: jax.scipy.sparse.linalg.cg(lambda y: 3 * y + SYMMETRIC(y), x, maxiter=4)[0],
    "bicgstab": lambda x: jax.scipy.sparse.linalg.bicgstab(lambda y: 3 * y + NOT_SYMMETRIC(y), x, maxiter=4)[0],
    "gmres": lambda x: jax.scipy.sparse.linalg.gmres(lambda y: 3 * y + NOT_SYMMETRIC(y), x, maxiter=1, restart=3)[0],
    "custom_root": rooted,
    "the derivative of custom_root": lambda x: jax.jvp(rooted, (x,), (x,))[1],
    "a mixture": mixture,
    "the gradient of a mixture": jax.grad(lambda x: jnp.sin(mixture(x)).sum()),
    "a jit that writes a reference": writing(lambda step, x: jax.jit(step)(x)),
    "a loop that writes a reference": writing(lambda step, x: jax.lax.fori_loop(0, 3, lambda _, c: step(c), x)),
    "a while_loop that writes a reference": writing(
        lambda step, x: jax.lax.while_loop(
            lambda c: c[0] + 0 * inner(c[1])[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0.0, x)
        )[1]
    ),
    "a branch that writes a reference": writing(lambda step, x: jax.lax.cond(x[0] > 0, inner, step, x)),
    "pw.while_loop": lambda x: while_loop(lambda c: inner(c).sum() < 1e9, inner, x, max_iterations=3),
    "the gradient of pw.while_loop": jax.grad(
        lambda x: while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, inner(c[1])), (0, x), max_iterations=5)[1].sum()
    ),
}


def stands_in(value: Any) -> ClosedOver | None:
    return ClosedOver(value, is_free=True) if np.size(value) >= N * N else None


def constants(jaxpr: Any) -> Iterator[Any]:
    """All constants and literals, at any depth."""
    inside, consts = _jaxlib.opened(jaxpr)
    yield from consts
    for eqn in inside.eqns:
        yield from (v.val for v in eqn.invars if isinstance(v, _jaxlib.Literal))
        for sub in _jaxlib.jaxprs_in(eqn.params):
            yield from constants(sub)


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_no_big_constant_stays(construct: str) -> None:
    fun = CONSTRUCTS[construct]
    closed = _jaxlib.in_low_terms(jax.make_jaxpr(fun)(X))
    assert any(np.size(each) >= N * N for each in constants(closed))
    lifted, values = lift(closed, stands_in)
    assert not any(np.size(each) >= N * N for each in constants(lifted))
    assert 1 <= len(values) <= 4  # each array once, not once per call (JAX itself may see an array as two objects)
    got = jax.jit(_jaxlib.as_function(lifted))(X, *(each.value for each in values))
    for one, other in zip(got, jax.tree.leaves(jax.jit(fun)(X)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_small_functions_stay_as_they_are() -> None:
    closed = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x * np.float32(2), length=3)[0])(X)
    assert lift(closed, stands_in) == (closed, [])


def test_equal_calls_still_share_one_jaxpr() -> None:
    f = jax.jit(lambda y: A @ y)
    lifted, values = lift(jax.make_jaxpr(lambda x: f(f(x)))(X), stands_in)
    one, other = (eqn.params["jaxpr"] for eqn in lifted.jaxpr.eqns)
    assert one is other and len(values) == 1


def test_each_slice_that_reads_an_array_has_an_argument_of_its_own() -> None:
    """A free array goes to the slices of the placed functions and the transfers that read it."""
    left, right = (placed(lambda y: B @ y + inner(y), mesh, name=mesh.name) for mesh in (LEFT, RIGHT))
    over = placed(lambda y, m: m @ y, RIGHT, name="over")

    def program(x: Any) -> Any:
        y = jax.lax.fori_loop(0, 20, lambda _, c: left(c), x)
        return over(device_put(right(y), RIGHT), B) + device_put(A, LEFT, P("x"))[0]

    _, values = lift(jax.make_jaxpr(program)(X), stands_in)
    of_b = [each.place for each in values if each.value is B]
    assert sorted(map(str, of_b)) == sorted(map(str, (Place(LEFT), Place(RIGHT))))
    assert Place(LEFT, (("x",), ())) in [each.place for each in values]


def test_what_lies_somewhere_is_one_argument() -> None:
    left, right = (placed(lambda y: B @ y, mesh, name=mesh.name) for mesh in (LEFT, RIGHT))
    _, values = lift(
        jax.make_jaxpr(lambda x: left(x) + right(x))(X), lambda value: ClosedOver(value) if value is B else None
    )
    assert values == [ClosedOver(B)]
