"""Functions that use references (`jax.new_ref`): each runs with placed functions and programs, and with `jax.jit`.

A case takes what places a function, what places one elsewhere, and what makes a program; it gives values to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

X = np.arange(4, dtype=np.float32)
ONES = np.ones(4, np.float32)

Make = Callable[[Callable[..., Any]], Any]


def writes_and_ignores(first: Make, second: Make, program: Make) -> list[Any]:
    seen = jax.new_ref(jnp.zeros(4))

    def step(v: Any) -> Any:
        seen[...] += v  # the result does not depend on it
        return v

    f = program(first(step))
    return [f(X), f(X), seen[...]]


def makes_and_freezes(first: Make, second: Make, program: Make) -> list[Any]:
    def step(v: Any) -> Any:
        r = jax.new_ref(jnp.zeros_like(v))

        def body(c: Any, i: Any) -> Any:
            r[i] = 2.0 * v[i]
            return c + r[i], None

        total, _ = jax.lax.scan(body, 0.0, jnp.arange(4))
        return jax.freeze(r), total

    return list(program(first(step))(X))


def takes(first: Make, second: Make, program: Make) -> list[Any]:
    a, b = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.ones(4))

    def step(a: Any, v: Any, *, b: Any) -> Any:
        a[1:3] += v[1:3] * b[...][0]
        return a[...].sum()

    f = program(first(step))
    return [f(a, X, b=b), f(a, X, b=b), a[...], f(b, X, b=a), b[...]]


def makes_outside_of_a_placed_function(first: Make, second: Make, program: Make) -> list[Any]:
    put, get = first(lambda r, v: r.addupdate(v)), second(lambda r: r[...] * 2)

    def step(v: Any) -> Any:
        r = jax.new_ref(v)
        put(r, v)
        half = get(r)
        put(r, v)
        return half, r[...]

    return list(program(step)(X))


def goes_between_slices(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(jnp.zeros(4))
    one, two = first(lambda v: r[...] + v), second(lambda v: r.__setitem__(..., v * 2))

    def step(v: Any) -> Any:
        two(one(v))
        return one(v)

    f = program(step)
    return [f(X), r[...], f(X), r[...], f(X)]


def scans(length: int) -> Callable[[Make, Make, Make], list[Any]]:
    def case(first: Make, second: Make, program: Make) -> list[Any]:
        total, count = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.int32(0))
        one = first(lambda v: total.__setitem__(..., total[...] + v))
        two = second(lambda v: v * total[...])

        def step(rows: Any) -> Any:
            def body(c: Any, row: Any) -> Any:
                one(row)
                count[...] += 1
                return c + two(row), c

            return jax.lax.scan(body, jnp.zeros(4), rows)

        rows = np.arange(4 * length, dtype=np.float32).reshape(length, 4) % 5
        return [*program(step)(rows), total[...], count[...]]

    return case


def whiles(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(jnp.zeros(4))
    one = first(lambda v: r.__setitem__(..., r[...] + v))

    def step(v: Any) -> Any:
        return jax.lax.while_loop(lambda i: i < 5, lambda i: (one(v), i + 1)[1], 0)

    return [program(step)(X), r[...]]


def branches(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(jnp.zeros(4))
    one, two = first(lambda v: r.__setitem__(..., r[...] + v)), first(lambda v: r.__setitem__(..., r[...] * v))

    def step(which: Any, v: Any) -> Any:
        return jax.lax.switch(which, [lambda: (one(v), 0)[1], lambda: (two(v), 1)[1], lambda: 2])

    f = program(step)
    out = []
    for which in (0, 1, 2, 1):
        out += [f(np.int32(which), X), r[...]]
    return out


def differentiates(first: Make, second: Make, program: Make) -> list[Any]:
    count, rows = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros(4))

    def inner(w: Any) -> Any:
        count[...] += 1
        rows[...] = jax.lax.stop_gradient(w) * 3
        return w * w

    squares = first(inner)

    def step(w: Any) -> Any:
        return jax.value_and_grad(lambda w: second(jnp.sum)(jax.checkpoint(squares)(w)))(w)

    return [*jax.tree.leaves(program(step)(X)), rows[...]]


def sums_gradients_in_a_reference(first: Make, second: Make, program: Make) -> list[Any]:
    sums = jax.new_ref(jnp.zeros(4))
    loss = first(lambda w, v: ((w * v) ** 2).sum())

    def step(w: Any, rows: Any) -> Any:
        def body(_: Any, row: Any) -> Any:
            value, grad = jax.value_and_grad(loss)(w, row)
            sums[...] += grad
            return None, value

        _, values = jax.lax.scan(body, None, rows)
        new = w - 0.1 * sums[...]
        sums[...] = jnp.zeros(4)
        return new, values

    f = program(step)
    rows = np.stack([X, ONES, X + 1])
    w, values = f(ONES, rows)
    return [w, values, sums[...], *f(w, rows)]


def takes_the_gradient_itself(first: Make, second: Make, program: Make) -> list[Any]:
    sums = jax.new_ref(jnp.zeros(4))

    def step(sums: Any, v: Any) -> Any:
        value, pull = jax.vjp(lambda v: (v**2).sum(), v)
        pull.with_refs(sums)(1.0)  # JAX adds the gradient to the reference
        return value

    f = program(first(step))
    return [f(sums, X), f(sums, ONES), sums[...]]


def has_a_custom_rule(first: Make, second: Make, program: Make) -> list[Any]:
    seen = jax.new_ref(jnp.zeros(4))

    @jax.custom_vjp
    def marked(v: Any) -> Any:
        return v * 2

    def backward(_: Any, cotangent: Any) -> Any:
        seen[...] = cotangent  # the cotangent, on the side
        return (cotangent * 2,)

    marked.defvjp(lambda v: (v * 2, None), backward)
    loss = first(lambda v: (marked(v) * 3).sum())
    return [program(jax.grad(loss))(X), seen[...]]


def batches(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(jnp.zeros((3, 4)))
    add_to = first(lambda r, v: r.addupdate(v))
    f = program(lambda r, v: jax.vmap(add_to)(r, v))
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    f(r, rows)
    f(r, rows)
    return [r[...]]


def draws_numbers(first: Make, second: Make, program: Make) -> list[Any]:
    key = jax.new_ref(jax.random.key(7))

    def step() -> Any:
        key[...], now = jax.random.split(key[...])
        return jax.random.uniform(now, (3,))

    f = program(first(step))
    return [f(), f(), f(), jax.random.key_data(key[...])]


def has_a_number(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(0.0)
    f = program(first(lambda: r.__setitem__(..., r[...] + 1)))
    for _ in range(3):
        f()
    return [r[...]]


def is_used_in_this_process(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(jnp.zeros(4))
    f = program(first(lambda v: r.addupdate(v)))
    out = []
    f(X)
    out += [r[...], r[1:3], r[jnp.array([0, 3])]]
    r[1] = 5.0  # a part of it
    f(X)
    out.append(r[...])
    r[...] = np.ones(4, np.float32)  # all of it
    f(X)
    r[...] += 1.0
    f(X)
    r.addupdate(jnp.ones(4))
    out.append(jax.jit(lambda: r[...] * 2)())
    jax.jit(lambda: r.__setitem__(0, 40.0))()
    f(X)
    out.append(jax.freeze(r))
    return out


CASES = {
    case.__name__: case
    for case in (
        writes_and_ignores,
        makes_and_freezes,
        takes,
        makes_outside_of_a_placed_function,
        goes_between_slices,
        whiles,
        branches,
        differentiates,
        sums_gradients_in_a_reference,
        takes_the_gradient_itself,
        has_a_custom_rule,
        batches,
        draws_numbers,
        has_a_number,
        is_used_in_this_process,
    )
} | {"short scan": scans(3), "long scan": scans(20)}
