"""Branches that leave one result on different slices: the values are those of plain JAX, wherever a case makes them.

The result lives where an operand lives that it may be, else where it is read first, else where the first case makes it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def three(add: Any) -> list[Any]:
    return [add(2), add(2), add(1)]


def placed(slices: list[Any]) -> list[Any]:
    """A function on each slice."""
    specs = [P("x") if slice_.mesh.size > 1 else P() for slice_ in slices]
    return [
        pw.jit(lambda x, n=n: x * (n + 2) + 1, devices=slice_, in_shardings=spec, out_shardings=spec)
        for n, (slice_, spec) in enumerate(zip(slices, specs, strict=True))
    ]


PLAIN = [lambda x, n=n: x * (n + 2) + 1 for n in range(3)]


def slice_of(array: Any, slices: list[Any]) -> int:
    return next(n for n, each in enumerate(slices) if each is array.slice)


def test_a_result_lives_where_the_operand_lives(three: list[Any]) -> None:
    f, g, _ = placed(three)
    run = pw.program(lambda p, x: jax.lax.cond(p, f, g, x))
    for home in (0, 1):
        x = pw.device_put(X, three[home], P("x"))
        for p in (True, False):
            y = run(p, x)
            np.testing.assert_array_equal(np.asarray(y), PLAIN[0 if p else 1](X))
            assert slice_of(y, three) == home


def test_a_result_lives_where_it_is_read_first_else_where_the_first_case_makes_it(three: list[Any]) -> None:
    f, g, h = placed(three)

    def read(p: Any, x: Any) -> Any:
        y = jax.lax.cond(p, f, g, x)
        return y, h(y), g(y)

    for p in (True, False):
        y, there, also = pw.program(read)(p, X)
        want = PLAIN[0 if p else 1](X)
        for value, expected in ((y, want), (there, PLAIN[2](want)), (also, PLAIN[1](want))):
            np.testing.assert_array_equal(np.asarray(value), expected)
        assert slice_of(y, three) == 2
        cases = [lambda x: f(x).sum(), lambda x: g(x).max()]
        y = pw.program(lambda n, x, cases=cases: jax.lax.switch(n, cases, x))(np.int32(not p), X)
        assert float(y) == (want.sum() if p else want.max())
        assert slice_of(y, three) == 0


def test_a_case_that_hands_its_operand_on(three: list[Any]) -> None:
    f, g, _ = placed(three)
    run = pw.program(lambda n, x: jax.lax.switch(n, [f, g, lambda x: x], x))
    for home in (0, 1, 2):
        x = pw.device_put(X, three[home])
        for n in range(3):
            y = run(np.int32(n), x)
            np.testing.assert_array_equal(np.asarray(y), X if n == 2 else PLAIN[n](X))
            assert slice_of(y, three) == home


def switched(fs: list[Any], n: Any, x: Any) -> Any:
    return jax.lax.switch(n, [lambda x: fs[0](x), lambda x: fs[2](fs[1](x)), lambda x: fs[1](x)], x)


def nested(fs: list[Any], n: Any, x: Any) -> Any:
    inner = lambda x: jax.lax.cond(n == 1, fs[1], lambda x: fs[2](x), x)
    return jax.lax.cond(n == 0, fs[0], inner, x)


def several(fs: list[Any], n: Any, x: Any) -> Any:
    """Several results, each elsewhere in each case; one is a constant in one of them."""
    a, b, c = jax.lax.cond(
        n > 0,
        lambda x: (fs[0](x), fs[1](x), jnp.zeros_like(x)),
        lambda x: (fs[1](x) + 1, fs[2](x), fs[2](x)),
        x,
    )
    return fs[0](a) + fs[1](b) + c


def in_loop(fs: list[Any], n: Any, x: Any) -> Any:
    def turn(i: Any, x: Any) -> Any:
        return jax.lax.switch((i + n) % 3, [lambda x, f=f: f(x) * 0.125 for f in fs], x)

    return jax.lax.fori_loop(0, 20, turn, x)


def in_while(fs: list[Any], n: Any, x: Any) -> Any:
    def turn(state: Any) -> Any:
        i, x = state
        return i + 1, jax.lax.cond(x[0] > 3, lambda x: fs[0](x) * 0.25, lambda x: fs[1](x), x)

    return jax.lax.while_loop(lambda s: s[0] < 20 + n, turn, (0, x))[1]


def with_loops(fs: list[Any], n: Any, x: Any) -> Any:
    def loop(f: Any) -> Any:
        return lambda x: jax.lax.fori_loop(0, 20, lambda _, x: f(x) * 0.25, x)

    return jax.lax.cond(n > 0, loop(fs[0]), loop(fs[1]), x)


PROGRAMS = (switched, nested, several, in_loop, in_while, with_loops)


@pytest.mark.parametrize("home", [None, 1], ids=["nowhere", "placed"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_values_are_those_of_plain_jax(three: list[Any], program: Any, home: int | None) -> None:
    fs = placed(three)
    x = X if home is None else pw.device_put(X, three[home], P("x"))
    run = pw.program(lambda n, x: program(fs, n, x))
    for n in range(3):
        want = jax.jit(lambda n, x: program(PLAIN, n, x))(n, X)
        np.testing.assert_allclose(np.asarray(run(np.int32(n), x)), want, rtol=1e-5)


@pytest.mark.parametrize("program", [switched, nested, several, in_loop], ids=lambda each: each.__name__)
def test_gradients_are_those_of_plain_jax(three: list[Any], program: Any) -> None:
    def wavy(fs: list[Any]) -> list[Any]:
        return [lambda x, f=f: jnp.sin(f(x)) for f in fs]

    fs = wavy(placed(three))
    run = pw.program(jax.value_and_grad(lambda x, n: program(fs, n, x).sum()))
    for n in range(3):
        value, grad = jax.value_and_grad(lambda x, n: program(wavy(PLAIN), n, x).sum())(X / 8, n)
        got = run(X / 8, np.int32(n))
        np.testing.assert_allclose(np.asarray(got[0]), value, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.asarray(got[1]), grad, rtol=1e-4, atol=1e-5)


def test_a_case_that_fails_fails_the_result(three: list[Any]) -> None:
    """ERR-1: the transfer of a case that is not taken is not made, and that of a case that failed fails."""

    def fail(v: Any) -> Any:
        raise ValueError("no such case")

    f, g, h = placed(three)
    bad = pw.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x), devices=three[1])
    run = pw.program(lambda p, x: (jax.lax.cond(p, f, lambda x: bad(g(x)), x), h(x)))
    for _ in range(3):
        y, other = run(True, pw.device_put(X, three[0], P("x")))
        np.testing.assert_array_equal(np.asarray(y), PLAIN[0](X))
        y, other = run(False, pw.device_put(X, three[0], P("x")))
        with pytest.raises(pw.errors.CallbackFailedError, match="no such case"):
            np.asarray(y)
        np.testing.assert_array_equal(np.asarray(other), PLAIN[2](X))


HOWS = ("by itself", "grad of it", "grad of a program", "vmap of a program")
CONSTRUCTS = [(kind, how) for kind in ("cond", "scan", "while") for how in HOWS if kind != "while" or "grad" not in how]


@pytest.mark.parametrize(("kind", "how"), CONSTRUCTS)
def test_outside_of_a_program_it_is_one_of_its_own(three: list[Any], kind: str, how: str) -> None:
    """Where JAX runs a loop or a branch by itself, as `jax.grad` around a program does."""
    f, g, _ = placed(three)
    w = pw.device_put(np.float32(3), three[0])

    def over(f: Any, g: Any, w: Any) -> Any:
        if kind == "cond":
            return lambda x: jax.lax.cond(x.sum() > 0, lambda x: f(x) * w, lambda x: g(x), x).sum()
        if kind == "scan":
            return lambda x: jax.lax.scan(lambda x, _: (g(f(x * w)), x.sum()), x, None, length=3)[1].sum()
        return lambda x: jax.lax.while_loop(lambda x: x.sum() < 1000, lambda x: g(f(x * w)), x).sum()

    plain, run = over(PLAIN[0], PLAIN[1], np.float32(3)), over(f, g, w)
    rows = np.stack([X, X + 1])
    wrap = {
        "by itself": lambda fun: fun,
        "grad of it": jax.grad,
        "grad of a program": lambda fun: jax.grad(pw.program(fun) if fun is run else fun),
        "vmap of a program": lambda fun: jax.vmap(pw.program(fun) if fun is run else fun),
    }[how]
    given = rows if "vmap" in how else X
    spec = P() if "vmap" in how else P("x")
    np.testing.assert_allclose(
        np.asarray(wrap(run)(pw.device_put(given, three[0], spec))), np.asarray(wrap(plain)(given)), rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["cond", "scan", "while"])
def test_outside_of_a_program_it_may_start_from_values_of_this_process(three: list[Any], kind: str) -> None:
    """No array of a slice is among the arguments, neither forward nor backward."""
    f, g, _ = placed(three)

    def over(f: Any, g: Any) -> Any:
        if kind == "cond":
            return lambda x: jax.lax.cond(x.sum() > 0, lambda x: f(g(x)), lambda x: x, x)
        if kind == "scan":
            return lambda x: jax.lax.scan(lambda x, _: (g(f(x)), None), x, None, length=3)[0]
        return lambda x: jax.lax.while_loop(lambda x: x.sum() < 1000, lambda x: g(f(x)), x)

    run, plain = over(f, g), over(*PLAIN[:2])
    for given in (X, jax.numpy.asarray(X)):
        np.testing.assert_allclose(np.asarray(run(given)), np.asarray(plain(given)), rtol=1e-6)
        if kind != "while":
            found, expected = (jax.vjp(fun, given)[1](np.ones_like(X))[0] for fun in (run, plain))
            np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-6)
