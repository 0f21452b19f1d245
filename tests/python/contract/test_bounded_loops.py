"""`pw.while_loop` with a bound: values and derivatives are those of plain JAX's scan with a mask, kept and donated.

What needs no placed function is in `tests/python/compiler/test_while_loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import ARGUMENTS, Placed
from control_on_slices import placed_on

import pathways as pw

MOST = 4
COUNTS = (0, 1, 3, MOST)
W, V, X = (ARGUMENTS[name] * np.float32(0.5) for name in ("w", "v", "x"))

Loop = Callable[..., Any]
Form = Callable[[Loop, Placed, Any, Any, Any, Any], Any]


def masked(test: Any, body: Any, first: Any, *, max_iterations: int, **_: Any) -> Any:
    """What plain JAX differentiates: a scan over all iterations that there can be."""

    def step(carry: Any, _: Any) -> Any:
        goes_on, after = test(carry), body(carry)
        return jax.tree.map(lambda a, b: jnp.where(goes_on, a, b), after, carry), None

    return jax.lax.scan(step, first, None, length=max_iterations)[0]


def one_slice(loop: Loop, p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    return loop(lambda c: c[1] < n, lambda c: (p.f(w, c[0]), c[1] + 1), (x, 0), max_iterations=MOST)


def two_slices(loop: Loop, p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    def body(c: Any) -> Any:
        return p.f(w, c[0]) + c[1], p.g(v, c[1]), p.count(c[2])

    return loop(lambda c: c[2] < n, body, (x, p.put(x * 2, "b"), jnp.int32(0)), max_iterations=MOST)


def a_test_on_another_slice(loop: Loop, p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    def test(c: Any) -> Any:
        return (p.total(c[0]) > 1e-6) & (c[1] < n)

    return loop(test, lambda c: (p.f(w, c[0]), c[1] + 1), (x, 0), max_iterations=MOST)


def a_tree(loop: Loop, p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    def body(c: Any) -> Any:
        key, one = jax.random.split(c["key"])
        value = p.f(w, c["value"]) * jax.random.bernoulli(one, 0.5, (4, 4)) + c["half"].astype(jnp.float32)
        return {**c, "value": value, "half": c["half"] * 0.5, "key": key, "count": c["count"] + 1}

    first = {"value": x, "half": x.astype(jnp.bfloat16), "key": jax.random.key(7), "count": 0, "none": None}
    last = loop(lambda c: c["count"] < n, body, first, max_iterations=MOST)
    return {**last, "key": jax.random.key_data(last["key"])}


def captured(loop: Loop, p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    y = p.g(v, x)
    c = loop(lambda c: c[1] < n, lambda c: (p.f(w, c[0]) * y, c[1] + 1), (p.h(x), 0), max_iterations=MOST)
    return p.g(v, c[0]), y


def put_in_the_body(loop: Loop, p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    def body(c: Any) -> Any:
        return p.put(p.g(v, p.put(p.f(w, c[0]), "b")), "a"), c[1] + 1

    return loop(lambda c: c[1] < n, body, (x, 0), max_iterations=MOST)


def a_loop_in_the_body(loop: Loop, p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    def body(c: Any) -> Any:
        y, i = loop(lambda d: d[1] < c[1], lambda d: (p.f(w, d[0]), d[1] + 1), (c[0], 0), max_iterations=MOST)
        return p.g(v, y), c[1] + 1 + 0 * i

    return loop(lambda c: c[1] < n, body, (x, 0), max_iterations=MOST)


def in_a_scan(loop: Loop, p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    def turn(c: Any, i: Any) -> Any:
        return one_slice(loop, p, w, v, c, jnp.minimum(n, i))[0] + x, p.total(c)

    return jax.lax.scan(turn, x, jnp.arange(18) % 3)


def in_a_branch(loop: Loop, p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    return jax.lax.cond(n > 1, lambda x: two_slices(loop, p, w, v, x, n)[0], lambda x: p.f(w, x), x)


def saved_now_and_then(loop: Loop, p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    def body(c: Any) -> Any:
        return p.f(w, p.g(v, c[0])), c[1] + 1

    return loop(lambda c: c[1] < n, body, (x, 0), max_iterations=MOST, save_every=3)


FORMS: dict[str, Form] = {
    form.__name__: form
    for form in (
        one_slice,
        two_slices,
        a_test_on_another_slice,
        a_tree,
        captured,
        put_in_the_body,
        a_loop_in_the_body,
        in_a_scan,
        in_a_branch,
        saved_now_and_then,
    )
}


def loss(form: Form, loop: Loop, p: Placed) -> Callable[..., Any]:
    def fun(w: Any, v: Any, x: Any, n: Any) -> Any:
        leaves = jax.tree.leaves(form(loop, p, w, v, x, n))
        floats = [leaf.astype(jnp.float32) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in floats)

    return fun


def first_order(form: Form, loop: Loop, p: Placed) -> Callable[..., Any]:
    """(arguments) -> what the form gives, and the gradients of a number made of it."""
    gradient = jax.grad(loss(form, loop, p), (0, 1, 2))
    return lambda w, v, x, n: (form(loop, p, w, v, x, n), gradient(w, v, x, n))


def second_order(form: Form, loop: Loop, p: Placed) -> Callable[..., Any]:
    """(arguments) -> reverse over reverse mode, and forward over forward mode."""
    fun = loss(form, loop, p)

    def squares(w: Any, v: Any, x: Any, n: Any) -> Any:
        return sum(jnp.sum(part**2) for part in jax.grad(fun, (0, 1, 2))(w, v, x, n))

    def twice(w: Any, v: Any, x: Any, n: Any) -> Any:
        once = lambda w: jax.jvp(lambda w: fun(w, v, x, n), (w,), (w,))[1]
        return jax.jvp(once, (w,), (x,))[1]

    return lambda w, v, x, n: (jax.grad(squares, (0, 1, 2))(w, v, x, n), twice(w, v, x, n))


def same(got: Any, expected: Any, tolerance: float = 5e-4) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        wide = np.float32 if b.dtype == jnp.bfloat16 else b.dtype
        np.testing.assert_allclose(
            np.asarray(a).astype(wide), np.asarray(b).astype(wide), rtol=tolerance, atol=tolerance
        )


def play(add: Any, quiet: Any, mine: Any, plain: Any, tolerance: float = 5e-4) -> None:
    slices = {where: add(1) for where in "abc"}
    p = placed_on(slices)
    fun = mine(pw.while_loop, p)
    programs = [pw.program(fun), pw.program(fun, donate_argnums=(0, 2))]
    expected, before = jax.jit(plain(masked, Placed())), None
    for turn, n in enumerate((*COUNTS, *COUNTS)):
        if turn == len(COUNTS):
            before = quiet()["kept"]
        want = expected(W, V, X, np.int32(n))
        for program in programs:
            args = [pw.device_put(W, slices["a"]), pw.device_put(V, slices["b"]), pw.device_put(X, slices["a"])]
            same(program(*args, np.int32(n)), want, tolerance)
            del args
    quiet(back_to=before)


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(add: Any, quiet: Any, name: str) -> None:
    form = FORMS[name]
    play(add, quiet, lambda *with_: first_order(form, *with_), lambda *with_: first_order(form, *with_))


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("name", ["one_slice", "two_slices", "captured", "a_loop_in_the_body", "saved_now_and_then"])
def test_second_derivatives(add: Any, quiet: Any, name: str) -> None:
    form = FORMS[name]
    play(add, quiet, lambda *with_: second_order(form, *with_), lambda *with_: second_order(form, *with_), 5e-3)


def test_a_donated_training_loop_that_reads_its_losses_late(add: Any) -> None:
    """Each step has another number of iterations: that of its batch."""
    slices = {where: add(1) for where in "abc"}

    def step_of(loop: Loop, p: Placed) -> Callable[..., Any]:
        def step(w: Any, v: Any, x: Any, n: Any) -> Any:
            value, gradient = jax.value_and_grad(loss(two_slices, loop, p))(w, v, x, n)
            return w - 0.05 * gradient, value

        return step

    program = pw.program(step_of(pw.while_loop, placed_on(slices)), donate_argnums=0)
    plain = jax.jit(step_of(masked, Placed()))
    w, v, want = pw.device_put(W, slices["a"]), pw.device_put(V, slices["b"]), W
    losses, expected = [], []
    for k in range(10):
        x, n = X * np.float32(k / 4 - 1), np.int32(k % (MOST + 1))
        w, value = program(w, v, x, n)
        want, right = plain(want, V, x, n)
        losses.append(value)
        expected.append(right)
    same(losses, expected, 2e-3)
    same(w, want, 2e-3)


def test_too_many_iterations_are_told(add: Any) -> None:
    here, there = add(1), add(1)
    f = pw.jit(lambda w, x: x * w, devices=here, name="f")
    g = pw.jit(lambda x: x + 1, devices=there, name="g")

    def loop(w: Any, x: Any, n: Any, **options: Any) -> Any:
        return pw.while_loop(
            lambda c: c[1] < n, lambda c: (g(f(w, c[0])), c[1] + 1), (x, 0), max_iterations=MOST, **options
        )

    gradient = pw.program(jax.value_and_grad(lambda w, x, n: loop(w, x, n)[0].sum()))
    stops = pw.program(lambda w, x, n: loop(w, x, n, overflow="stop", return_status=True))
    for n in (MOST - 1, MOST, MOST + 1, MOST + 100):
        is_fine = n <= MOST
        value, slope = gradient(np.float32(2), X, n)
        assert np.isfinite(np.asarray(value)) == np.isfinite(np.asarray(slope)) == is_fine
        (last, count), status = stops(np.float32(2), X, n)
        assert int(count) == int(status.iterations) == min(n, MOST)
        assert bool(status.is_complete) == is_fine
        want = X
        for _ in range(min(n, MOST)):
            want = want * 2 + 1
        np.testing.assert_allclose(np.asarray(last), want, rtol=1e-5)


def test_without_a_bound(add: Any) -> None:
    f = pw.jit(lambda w, x: jnp.sin(x * w), devices=add(1), name="f")

    def fun(loop: Loop, f: Any, w: Any, n: Any) -> Any:
        return loop(lambda c: c[1] < n, lambda c: (f(w, c[0]), c[1] + 1), (X, 0))[0]

    w, n = np.float32(1.5), np.int32(3)

    def both(loop: Loop, f: Any) -> Any:
        return lambda w, n: jax.jvp(lambda w: fun(loop, f, w, n), (w,), (w,))

    got = pw.program(both(pw.while_loop, f))(w, n)
    same(got, both(jax.lax.while_loop, lambda w, x: jnp.sin(x * w))(w, n))
    with pytest.raises(pw.errors.ProgramError, match="and has no max_iterations"):
        pw.program(jax.grad(lambda w, n: fun(pw.while_loop, f, w, n).sum()))(w, n)


def test_outside_of_a_program_it_runs_where_its_arrays_are(add: Any) -> None:
    f = pw.jit(lambda w, x: jnp.sin(x @ w), devices=add(1), name="f")

    def fun(loop: Loop, f: Any, x: Any) -> Any:
        return lambda w: loop(lambda c: c[1] < 3, lambda c: (f(w, c[0]), c[1] + 1), (x, 0), max_iterations=MOST)[0]

    w, x = pw.device_put(W, f.slice), pw.device_put(X, f.slice)
    got = fun(pw.while_loop, f, x)(w), jax.grad(lambda w: fun(pw.while_loop, f, x)(w).sum())(w)
    assert all(type(array) is pw.Array and array.slice is f.slice for array in got)
    g = lambda w, x: jnp.sin(x @ w)
    same(got, (fun(masked, g, X)(W), jax.grad(lambda w: fun(masked, g, X)(w).sum())(jnp.asarray(W))))
