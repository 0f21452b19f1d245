"""Loops and exchanges inside branches that the data decides: each case is a loop of at most one iteration.

Values and gradients are plain JAX's, for each case, kept and donated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw

X = np.linspace(-1, 2, 8, dtype=np.float32).reshape(4, 2)
TO = np.asarray([0, 1, 1, 0], np.int32)

Form = Callable[[Any, Any], Any]


def forms(f: Any, g: Any, send: Any) -> dict[str, Form]:
    """Programs of an array and of a number that decides. `f` and `g` are on slices, `send` exchanges rows between."""

    def grows(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0].sum() < c[1], lambda c: (f(c[0]), c[1]), (x, jnp.float32(30)))[0]

    def turns(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (g(c), None), x, None, length=20)[0]

    def nested(x: Any, n: Any) -> Any:
        inner = lambda x: jax.lax.cond(x.sum() > 2, turns, f, x)
        return jax.lax.cond(n > 0, inner, lambda x: jax.lax.cond(n < -1, grows, g, x), x)

    def each_turn(c: Any, i: Any) -> Any:
        return jax.lax.cond(i % 3 == 1, grows, lambda c: f(c) - c, c), c.sum()

    def tree(x: Any, n: Any) -> Any:
        one = lambda x: {"a": turns(x), "b": (x.sum(), jnp.int32(3))}
        return jax.lax.cond(n > 0, one, lambda x: {"a": f(x), "b": (x.min(), jnp.int32(4))}, x)

    def gradient(case: Any) -> Form:
        return lambda x, n: jax.grad(lambda x: jnp.sum(f(jax.lax.cond(n > 0, case, lambda x: g(x) * 2, x)) ** 2))(x)

    return {
        "while or scan": lambda x, n: jax.lax.cond(n > 0, turns, grows, x),
        "switch": lambda x, n: jax.lax.switch(n, [grows, turns, f, lambda x: x], x),
        "nested": nested,
        "in a scan": lambda x, n: jax.lax.scan(each_turn, x, jnp.arange(18) + n),
        "a tree": tree,
        "an exchange": lambda x, n: jax.lax.cond(n > 0, send, lambda x: f(x) * 0 + 1, x),
        "gradient of a scan": gradient(turns),
        "gradient of an exchange": gradient(send),
    }


NAMES = tuple(forms(None, None, None))


@pytest.mark.parametrize("name", NAMES)
def test_values(add: Any, quiet: Any, name: str) -> None:
    here, there = add(2), add(1)

    def affine(x: Any) -> Any:
        return x * 1.5 + 1

    def wave(x: Any) -> Any:
        return jnp.sin(x) + x

    f, g = pw.jit(affine, devices=here), pw.jit(wave, devices=there)

    def send(x: Any) -> Any:
        sent = pw.exchange(x, TO % there.size, to=there, capacity=4)
        return sent.back(g(sent.rows))

    mine, plain = forms(f, g, send)[name], jax.jit(forms(affine, wave, wave)[name])
    programs = [pw.program(mine), pw.program(mine, donate_argnums=0)]
    before = None
    for turn, n in enumerate((1, 0, 2, -2, 7, 1, 0, 2, -2, 7)):
        if turn == 5:
            before = quiet()["kept"]
        want = plain(X, np.int32(n))
        for program in programs:
            got = program(pw.device_put(X, here), np.int32(n))
            assert jax.tree.structure(got) == jax.tree.structure(want)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(np.asarray(a), b, rtol=2e-4, atol=2e-4)
            del got, a
    quiet(back_to=before)


def test_an_error_and_a_deadline_inside(add: Any, quiet: Any) -> None:
    f = pw.jit(lambda x: x * 2, devices=add(1))
    g = pw.jit(lambda x: x + 1, devices=add(1))

    def fails(x: Any) -> Any:
        return pw.host_callback(_raise, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    broken = pw.jit(fails, devices=add(1))(X)
    endless = lambda x: jax.lax.while_loop(lambda c: c.sum() > -1e30, lambda c: g(f(c)) * 0, x)
    program = pw.program(lambda x, n: jax.lax.cond(n > 0, endless, f, x))
    np.testing.assert_array_equal(np.asarray(program(X, 0)), X * 2)
    for n in (0, 1):
        with pytest.raises(pw.errors.PathwaysError, match="not today"):
            program.with_timeout(30)(broken, n).block_until_ready()
    chosen = pw.program(lambda x, s: jax.lax.cond(s.sum() > 0, endless, f, x))
    with pytest.raises(pw.errors.PathwaysError, match="not today"):
        chosen.with_timeout(30)(X, broken).block_until_ready()
    with pytest.raises(pw.errors.DeadlineExceededError):
        np.asarray(program.with_timeout(0.2)(X, 1))
    before = quiet()["kept"]
    with pytest.raises(pw.errors.DeadlineExceededError):
        np.asarray(program.with_timeout(0.2)(X, 1))
    np.testing.assert_array_equal(np.asarray(program(X, 0)), X * 2)
    quiet(back_to=before)


def _raise(x: Any) -> Any:
    raise ValueError("not today")
