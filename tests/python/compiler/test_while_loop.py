"""`pw.while_loop` without slices: it is JAX's while_loop, and its derivatives are those of a scan with a mask.

Its loops over slices are in `tests/python/contract/test_bounded_loops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw

MOST = 5
_random = np.random.default_rng(3)
W, X = (_random.normal(size=(4, 4)).astype(np.float32) for _ in range(2))
XS = _random.normal(size=(3, 4, 4)).astype(np.float32)
NS = np.asarray([0, 2, MOST], np.int32)


def masked(test: Any, body: Any, first: Any, *, max_iterations: int, **_: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        goes_on, after = test(carry), body(carry)
        return jax.tree.map(lambda a, b: jnp.where(goes_on, a, b), after, carry), None

    return jax.lax.scan(step, first, None, length=max_iterations)[0]


def loss(loop: Any, **options: Any) -> Callable[..., Any]:
    def fun(w: Any, x: Any, n: Any) -> Any:
        body = lambda c: (jnp.tanh(c[0] @ w) * 1.1, c[1] + 1)
        return jnp.sum(jnp.sin(loop(lambda c: c[1] < n, body, (x, 0), max_iterations=MOST, **options)[0]))

    return fun


def same(got: Any, expected: Any, tolerance: float = 1e-3) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


#: Derivatives of a function of (w, x, n), each another order of JAX's transformations.
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f,
    "gradient": lambda f: jax.grad(f, (0, 1)),
    "gradient under jit": lambda f: jax.jit(jax.value_and_grad(f, (0, 1))),
    "gradient of a jit": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "gradient of a checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "forward": lambda f: lambda w, x, n: jax.jvp(lambda w, x: f(w, x, n), (w, x), (x, w)),
    "reverse over reverse": lambda f: jax.grad(lambda *a: jnp.sum(jax.grad(f)(*a) ** 2), (0, 1)),
    "forward over reverse": lambda f: lambda w, x, n: jax.jvp(lambda w: jax.grad(f)(w, x, n), (w,), (x,)),
    "reverse over forward": lambda f: jax.grad(lambda w, x, n: jax.jvp(lambda w: f(w, x, n), (w,), (x,))[1]),
    "hessian": lambda f: jax.hessian(f),
}


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("save_every", [1, 2, MOST + 1])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives(name: str, save_every: int) -> None:
    transform = TRANSFORMS[name]
    mine, plain = (jax.jit(transform(fun)) for fun in (loss(pw.while_loop, save_every=save_every), loss(masked)))
    for n in (0, 1, 3, MOST):
        same(mine(W, X, np.int32(n)), plain(W, X, np.int32(n)))


def test_any_order() -> None:
    def fun(loop: Any) -> Any:
        def number(x: Any) -> Any:
            return loop(lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]) * x, c[1] + 1), (x, 0), max_iterations=MOST)[0]

        return jax.grad(jax.grad(jax.grad(number)))

    same(fun(pw.while_loop)(jnp.float32(0.7)), fun(masked)(jnp.float32(0.7)))


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("axes", [(None, 0, None), (None, None, 0), (0, None, None), (0, 0, 0)])
@pytest.mark.parametrize("name", ["value", "gradient", "forward", "reverse over reverse"])
def test_batches(name: str, axes: tuple[int | None, ...]) -> None:
    """If each element has a count of its own, the loop ends with the last of them."""
    args = (
        W if axes[0] is None else XS * 0.5,
        X if axes[1] is None else XS,
        np.int32(3) if axes[2] is None else NS,
    )
    transform = TRANSFORMS[name]
    same(jax.vmap(transform(loss(pw.while_loop)), axes)(*args), jax.vmap(transform(loss(masked)), axes)(*args))

    def total(loop: Any) -> Any:
        return lambda *args: jnp.sum(jax.vmap(loss(loop), axes)(*args))

    same(jax.grad(total(pw.while_loop))(*args), jax.grad(total(masked))(*args))


def test_what_is_saved() -> None:
    """Only what the derivative of the body reads: not the sum, and not what is the same in each iteration."""

    def body(c: Any) -> Any:
        x, total, n = c
        return jnp.sin(x @ W), total + x, n + 1

    def fun(w: Any) -> Any:
        return pw.while_loop(lambda c: c[2] < 3, body, (w, w * 0, 0), max_iterations=7)[1].sum()

    text = str(jax.make_jaxpr(jax.grad(fun))(X))
    assert text.count("f32[7,4,4]") == 1 and "i32[7]" not in text
    assert "[7" not in str(jax.make_jaxpr(fun)(X))


def test_a_tree_of_many_kinds() -> None:
    def body(c: Any) -> Any:
        key, one = jax.random.split(c["key"])
        return {
            **c,
            "x": [jnp.sin(c["x"][0]) * jax.random.uniform(one), c["x"][1] * 2],
            "z": c["z"] * 1j,
            "n": c["n"] + 1,
            "yes": ~c["yes"],
            "key": key,
        }

    def fun(loop: Any) -> Any:
        def number(x: Any) -> Any:
            first = {
                "x": [x, x.astype(jnp.bfloat16)],
                "z": jax.lax.complex(x, x),
                "n": np.int8(0),
                "yes": True,
                "key": jax.random.key(3),
                "none": None,
            }
            last = loop(lambda c: c["n"] < 3, body, first, max_iterations=MOST)
            return jnp.sum(last["x"][0]) + jnp.sum(last["x"][1].astype(jnp.float32)) + jnp.sum(last["z"].imag)

        return jax.value_and_grad(number)

    same(fun(pw.while_loop)(X), fun(masked)(X))


def test_outside_of_programs_it_is_jax() -> None:
    assert jax.tree.map(float, pw.while_loop(lambda c: c[0] < 9, lambda c: (c[0] * 2, c[1]), (1.0, 5))) == (16.0, 5.0)
    assert int(pw.while_loop(lambda n: n < 9, lambda n: n + 1, 0)) == 9  # a carry without a bound needs no floats
    promoted = pw.while_loop(lambda x: x < 9, lambda x: x * jnp.float32(2), 1, max_iterations=9)
    assert promoted.dtype == jnp.float32 and float(promoted) == 16
    most = np.int64(7)  # as the length of a jax.lax.scan
    last, status = pw.while_loop(lambda n: n < 9, lambda n: n + 1, 0, max_iterations=most, return_status=True)
    assert (int(last), int(status.iterations), bool(status.is_complete)) == (7, 7, False)


@pytest.mark.parametrize("first", [1.0, 1j, np.float16(1), jnp.bfloat16(1), np.complex64(complex(np.inf, 1))], ids=str)
def test_what_ends_in_time_is_as_from_jax(first: Any) -> None:
    """The product that can make it NaN changes neither the type, nor what is infinite."""

    def fun(loop: Any, **options: Any) -> Any:
        return loop(lambda c: c[1] < 3, lambda c: (c[0] + 0, c[1] + 1), (first, 0), **options)[0]

    got, expected = fun(pw.while_loop, max_iterations=MOST), fun(jax.lax.while_loop)
    assert got.dtype == expected.dtype and got.weak_type == expected.weak_type
    np.testing.assert_array_equal(got, expected)
    assert np.isnan(fun(pw.while_loop, max_iterations=2))


@pytest.mark.parametrize("save_every", [1, 2, 3])
def test_too_many_iterations(save_every: int) -> None:
    def fun(x: Any, most: int, **options: Any) -> Any:
        return pw.while_loop(
            lambda c: c < 9.0, lambda c: c * 2, x, max_iterations=most, save_every=save_every, **options
        )

    assert float(fun(1.0, 4)) == 16 and float(jax.grad(fun)(1.0, 4)) == 16
    assert np.isnan(fun(1.0, 3)) and np.isnan(jax.grad(fun)(1.0, 3))
    last, status = fun(1.0, 3, overflow="stop", return_status=True)
    assert (float(last), int(status.iterations), bool(status.is_complete)) == (8, 3, False)
    assert float(jax.grad(lambda x: fun(x, 3, overflow="stop"))(1.0)) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_iterations": 0}, "max_iterations of pw.while_loop is 0 of type int; expected an int of at least 1, or"),
        ({"max_iterations": 2.0}, "max_iterations of pw.while_loop is 2.0 of type float; expected an int"),
        ({"max_iterations": True}, "max_iterations of pw.while_loop is True of type bool"),
        ({"max_iterations": 3, "save_every": 0}, "save_every of pw.while_loop is 0 of type int; expected an int of at"),
        ({"save_every": 2}, "save_every=2 and no max_iterations; without it nothing is saved"),
        ({"max_iterations": 3, "overflow": "error"}, "overflow of pw.while_loop is 'error'; expected \"nan\" or"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pw.errors.ProgramError, match=message):
        pw.while_loop(lambda x: x < 3, lambda x: x + 1, 0.0, **options)


def test_bad_functions() -> None:
    def call(test: Any, body: Any, first: Any = 0.0) -> None:
        pw.while_loop(test, body, first, max_iterations=3)

    with pytest.raises(TypeError, match="boolean scalar"):
        call(lambda x: x, lambda x: x + 1)
    with pytest.raises(TypeError, match="boolean scalar"):
        call(lambda x: jnp.ones(2) < x, lambda x: x + 1)
    with pytest.raises(TypeError, match=r"must have (identical types|equal types|same type structure)"):
        call(lambda x: x < 3, lambda x: (x + 1).astype(jnp.bfloat16), jnp.float32(0))
    with pytest.raises(TypeError, match="body"):
        call(lambda x: x < 3, lambda x: (x, x))
    with pytest.raises(pw.errors.ProgramError, match="carries no floating array, so it cannot say by NaN"):
        call(lambda n: n < 3, lambda n: n + 1, 0)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_reverse_mode_without_a_bound(around: Any) -> None:
    with pytest.raises(pw.errors.ProgramError, match="and has no max_iterations: what the iterations carry must be"):
        jax.grad(around(lambda w: pw.while_loop(lambda x: x < 9, lambda x: x * w, 2.0)))(3.0)
    np.testing.assert_allclose(  # what does not depend on the argument may be such a loop
        jax.grad(lambda w: pw.while_loop(lambda n: n < 9, lambda n: n + 1.0, 0.0) * w)(3.0), 9
    )
