"""Loops and branches for tests: each case is written once, over placed functions or over plain ones.

`CASES` has them by name. A case is a function of `Placed` and of the arguments `ARGUMENTS`; it takes those that it
names. `HOMES` says on which slice an argument lives. First come loops whose count is known, then branches.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_random = np.random.default_rng(7)


def _normal(*shape: int) -> np.ndarray:
    return _random.normal(size=shape).astype(np.float32)


#: `w` and `v` are weights, `x` a value, `xs` four of them, `n` a small number, `yes` and `no` are
#: numbers above and below 0.
ARGUMENTS: dict[str, Any] = {
    "w": _normal(4, 4),
    "v": _normal(4, 4),
    "x": _normal(4, 4),
    "xs": _normal(4, 4, 4),
    "n": np.int32(3),
    "yes": np.float32(1.5),
    "no": np.float32(-1.5),
}
HOMES = {"w": "a", "v": "b", "x": "a", "xs": "a", "n": "a", "yes": "a", "no": "b"}


def _f(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def _g(w: Any, x: Any) -> Any:
    return jnp.sin(x @ w) + x


def _h(x: Any) -> Any:
    return x * 0.5 + 1


def _total(x: Any) -> Any:
    return jnp.sum(x**2)


def _count(n: Any) -> Any:
    return n + 1


@dataclasses.dataclass(frozen=True)
class Placed:
    """The functions of the cases: `f` and `count` on slice a, `g` and `total` on slice b, `h` on slice c. `put` moves a
    value to a slice.
    """

    f: Callable[..., Any] = _f
    g: Callable[..., Any] = _g
    h: Callable[..., Any] = _h
    total: Callable[..., Any] = _total
    count: Callable[..., Any] = _count
    put: Callable[[Any, str], Any] = lambda x, where: x

    @classmethod
    def by(cls, place: Callable[[Callable[..., Any], str, str], Any], put: Callable[[Any, str], Any]) -> Placed:
        """Each function placed by `place(function, slice, name)`."""
        homes = {"f": (_f, "a"), "g": (_g, "b"), "h": (_h, "c"), "total": (_total, "b"), "count": (_count, "a")}
        return cls(**{name: place(fun, where, name) for name, (fun, where) in homes.items()}, put=put)


@dataclasses.dataclass(frozen=True)
class Case:
    """One case. `known`: its loops are short and its branches known, so it is unrolled. `argnames`: the gradient's."""

    name: str
    fun: Callable[..., Any]
    known: bool
    argnames: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The names of its arguments."""
        return [name for name in inspect.signature(self.fun).parameters if name != "p"]

    def values(self) -> list[Any]:
        """Its arguments."""
        return [ARGUMENTS[name] for name in self.names]

    def forward(self, p: Placed) -> Callable[..., Any]:
        """(arguments) -> results."""
        return lambda *args: self.fun(p, **dict(zip(self.names, args, strict=True)))

    def backward(self, p: Placed) -> Callable[..., Any]:
        """(arguments) -> a number made of all results, and its gradients."""

        def loss(*args: Any) -> Any:
            leaves = jax.tree.leaves(self.forward(p)(*args))
            floats = [leaf.astype(jnp.float32) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in floats)

        return jax.value_and_grad(loss, tuple(self.names.index(name) for name in self.argnames))


CASES: dict[str, Case] = {}


def _case(*argnames: str, known: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fun: Callable[..., Any]) -> Callable[..., Any]:
        name = fun.__name__.strip("_")
        CASES[name] = Case(name, fun, known, argnames)
        return fun

    return add


@_case("w", "v", "x", "xs", known=True)
def scan(p: Placed, w: Any, v: Any, x: Any, xs: Any) -> Any:
    return jax.lax.scan(lambda c, y: (p.f(w, c + y), p.total(p.g(v, c))), x, xs)


@_case("w", "x", known=True)
def scan_without_xs(p: Placed, w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (p.f(w, c), c.sum()), x, None, length=5)


@_case("w", "v", "x", "xs", known=True)
def scan_without_ys(p: Placed, w: Any, v: Any, x: Any, xs: Any) -> Any:
    return jax.lax.scan(lambda c, y: (p.g(v, p.f(w, c + y)), None), x, xs)[0]


@_case("w", "x", "xs", known=True)
def scan_reverse(p: Placed, w: Any, x: Any, xs: Any) -> Any:
    return jax.lax.scan(lambda c, y: (p.f(w, c) + y, p.h(c)), x, xs, reverse=True)


@_case("w", "x", "xs", known=True)
def scan_of_length_0(p: Placed, w: Any, x: Any, xs: Any) -> Any:
    return jax.lax.scan(lambda c, y: (p.f(w, c + y), p.total(c)), x, xs[:0])


@_case("w", "x", "xs", known=True)
def scan_of_length_1(p: Placed, w: Any, x: Any, xs: Any) -> Any:
    return jax.lax.scan(lambda c, y: (p.f(w, c + y), p.total(c)), x, xs[:1])


@_case("w", "v", "x", "xs", known=True)
def two_carried_slices(p: Placed, w: Any, v: Any, x: Any, xs: Any) -> Any:
    def body(c: Any, y: Any) -> Any:
        left, right = c
        return (p.f(w, left + y), p.g(v, right) + left), None

    return jax.lax.scan(body, (x, p.put(x * 2, "b")), xs)[0]


@_case("w", "x", "xs", known=True)
def mixed_dtypes(p: Placed, w: Any, x: Any, xs: Any, n: Any) -> Any:
    def body(c: Any, y: Any) -> Any:
        value, count, half, seen = c
        value = p.f(w, value + y)
        return (value, p.count(count), half * 2, seen | (value.sum() > 0)), count

    return jax.lax.scan(body, (x, n, x.astype(jnp.bfloat16), False), xs)


@_case("w", "x", known=True)
def keys(p: Placed, w: Any, x: Any, n: Any) -> Any:
    def body(c: Any, key: Any) -> Any:
        value, carried = c
        carried, one = jax.random.split(carried)
        value = p.f(w, value) * jax.random.bernoulli(key, 0.5, (4, 4)) + jax.random.normal(one, (4, 4))
        return (value, carried), one

    first = jax.random.key(n)
    (value, last), all_ = jax.lax.scan(body, (x, first), jax.random.split(first, 3))
    return value, jax.random.key_data(last), jax.random.key_data(all_)


@_case("w", "x", known=True)
def captured_tied_weights(p: Placed, w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (p.g(w, p.f(w, c)), None), x, None, length=3)[0]


@_case("w", "v", "x", "xs", known=True)
def nested_scan(p: Placed, w: Any, v: Any, x: Any, xs: Any) -> Any:
    def outer(c: Any, y: Any) -> Any:
        c, inner = jax.lax.scan(lambda d, z: (p.f(w, d + z), p.total(d)), c, xs[:2] + y)
        return p.g(v, c), inner

    return jax.lax.scan(outer, x, xs)


@_case("w", "xs", known=True)
def map_(p: Placed, w: Any, xs: Any) -> Any:
    return jax.lax.map(lambda y: p.h(p.f(w, y)), xs)


@_case("w", "x", "xs", known=True)
def fori_loop(p: Placed, w: Any, x: Any, xs: Any) -> Any:
    return jax.lax.fori_loop(0, 4, lambda i, c: p.f(w, c) + i * xs[i], x)


@_case("w", "x", known=True)
def branch_on_the_number_of_the_iteration(p: Placed, w: Any, x: Any) -> Any:
    def body(i: Any, c: Any) -> Any:
        c = jax.lax.cond(i == 0, lambda c: p.f(w, c), lambda c: p.put(p.h(c), "a"), c)
        return jax.lax.switch(i + 1, [lambda c: c, lambda c: p.f(w, c) * 2, lambda c: c - 1], c)

    return jax.lax.fori_loop(0, 5, body, x)


@_case("x", known=True)
def a_branch_that_is_known(p: Placed, w: Any, x: Any) -> Any:
    return jax.lax.cond(True, lambda c: p.f(w, c), lambda c: p.h(c), x)


@_case("w", "xs", known=True)
def carry_that_starts_as_a_constant(p: Placed, w: Any, xs: Any) -> Any:
    start = (0.0, jnp.zeros((4, 4)), 1.0)
    return jax.lax.scan(lambda c, y: ((c[0] + p.total(p.f(w, y)), c[1] + y, p.h(c[2])), None), start, xs)[0]


@_case("w", "v", "x", known=True)
def carry_that_the_body_leaves_elsewhere(p: Placed, w: Any, v: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (p.g(v, p.f(w, c)), p.h(c)), x, None, length=3)


@_case("w", "v", "x", known=True)
def carried_tuple_with_a_pass_through(p: Placed, w: Any, v: Any, x: Any, n: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        value, kept, _, _, number = c
        return (p.f(w, value), kept, w, value, number), (kept, number)

    return jax.lax.scan(body, (x, v, w * 2, x + 1, n), None, length=3)


@_case("w", "x", "xs", known=True)
def one_value_carried_twice(p: Placed, w: Any, x: Any, xs: Any) -> Any:
    def body(c: Any, y: Any) -> Any:
        one, two = c
        new = p.f(w, one + two)
        return (new, new), y

    return jax.lax.scan(body, (x, x), xs)


@_case("w", "x", "xs", known=True)
def remat_body(p: Placed, w: Any, x: Any, xs: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(lambda c, y: (p.h(p.f(w, c + y)), p.total(c))), x, xs)


@_case("w", "x", known=True)
def put_in_the_body(p: Placed, w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (p.put(p.g(w, p.put(c, "b")), "a"), p.put(c, "c")), x, None, length=3)


@_case("w", "x", "xs", known=True)
def second_derivative_of_scan(p: Placed, w: Any, x: Any, xs: Any) -> Any:
    return jax.grad(lambda w: jax.lax.scan(lambda c, y: (p.f(w, c + y), None), x, xs)[0].sum())(w)


@_case(known=True)
def value_and_grad_with_aux_through_a_scan(p: Placed, w: Any, x: Any, xs: Any) -> Any:
    def loss(w: Any) -> Any:
        c, seen = jax.lax.scan(lambda c, y: (p.f(w, c + y), (p.total(c), y)), x, xs)
        return p.total(c), {"seen": seen, "last": c}

    return jax.value_and_grad(loss, has_aux=True)(w)


@_case(known=True)
def value_and_grad_in_the_body(p: Placed, w: Any, v: Any, xs: Any) -> Any:
    def body(c: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w, v: p.total(p.g(v, p.f(w, y))), (0, 1))(w, v)
        return jax.tree.map(jnp.add, c, (loss, grads)), loss

    return jax.lax.scan(body, (0.0, (jnp.zeros_like(w), jnp.zeros_like(v))), xs)


@_case("w", "xs", known=True)
def vmap_of_a_scan(p: Placed, w: Any, xs: Any) -> Any:
    return jax.vmap(lambda y: jax.lax.scan(lambda c, _: (p.f(w, c), c.sum()), y, None, length=3))(xs)


@_case("w", "x", "xs", known=True)
def associative_use_of_what_is_stacked(p: Placed, w: Any, x: Any, xs: Any) -> Any:
    _, ys = jax.lax.scan(lambda c, y: (p.f(w, c + y), p.h(c)), x, xs)
    return jax.lax.scan(lambda c, y: (c + p.h(y), None), x, ys[::-1])[0], ys.sum(0), ys


_TABLE = np.arange(16, dtype=np.float32).reshape(4, 4) / 16


@_case("w", "x", known=True)
def captured_constants(p: Placed, w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, row: (p.f(w, c) + _TABLE, p.g(w, c * row).sum()), x, jnp.asarray(_TABLE))


@_case("w", "x", known=True)
def complex_carry(p: Placed, w: Any, x: Any) -> Any:
    start = jax.lax.complex(x, x * 2)
    last, all_ = jax.lax.scan(lambda c, _: (c * 1j + p.f(w, c.real), c), start, None, length=3)
    return last.real, last.imag, all_.imag


@_case("w", "v", "x")
def cond(p: Placed, w: Any, v: Any, x: Any, yes: Any) -> Any:
    return jax.lax.cond(yes > 0, lambda x: p.f(w, x), lambda x: p.f(v, x) * 2, x)


@_case("w", "x")
def switch(p: Placed, w: Any, x: Any, n: Any) -> Any:
    return jax.lax.switch(n - 2, [lambda x: p.f(w, x), lambda x: p.f(w, p.f(w, x)), lambda x: x * 2], x)


@_case("w", "v", "x")
def cond_with_captured_values(p: Placed, w: Any, v: Any, x: Any, no: Any) -> Any:
    y = p.g(v, x)
    z = p.f(w, y)
    return jax.lax.cond(no > 0, lambda: p.f(w, y) + z, lambda: p.f(v, z) - jnp.float32(2))


@_case("w", "v", "x")
def cond_in_cond(p: Placed, w: Any, v: Any, x: Any, yes: Any, no: Any) -> Any:
    def inner(x: Any) -> Any:
        return jax.lax.cond(no > 0, lambda x: p.f(w, x), lambda x: p.f(v, x) + 1, x)

    return jax.lax.cond(yes > 0, inner, lambda x: p.f(w, x) * 3, x)


@_case("w", "x")
def cond_with_one_empty_branch(p: Placed, w: Any, x: Any, no: Any) -> Any:
    return jax.lax.cond(no > 0, lambda x: p.f(w, x), lambda x: x, x)


@_case("w", "v", "x", "xs")
def scan_of_cond(p: Placed, w: Any, v: Any, x: Any, xs: Any) -> Any:
    def body(c: Any, y: Any) -> Any:
        c = jax.lax.cond(c.sum() > 0, lambda c: p.f(w, c) - y, lambda c: p.f(v, c + y) + 1, c)
        return c, p.total(c)

    return jax.lax.scan(body, x, xs)


@_case("w", "v", "x")
def branches_on_different_slices(p: Placed, w: Any, v: Any, x: Any, yes: Any) -> Any:
    y = jax.lax.cond(yes > 0, lambda x: p.put(p.f(w, x), "b"), lambda x: p.g(v, x), x)
    return p.h(y)


@_case("w", "v", "x")
def branches_read_on_one_slice(p: Placed, w: Any, v: Any, x: Any, no: Any) -> Any:
    return p.g(v, jax.lax.cond(no > 0, lambda x: p.f(w, x), lambda x: p.g(v, x), x))


@_case("w", "v", "x")
def transfers_in_a_branch(p: Placed, w: Any, v: Any, x: Any, yes: Any) -> Any:
    return jax.lax.cond(yes > 0, lambda x: p.h(p.f(w, p.g(v, x))), lambda x: p.h(x), x)


@_case("w", "x")
def predicate_made_on_another_slice(p: Placed, w: Any, v: Any, x: Any) -> Any:
    return jax.lax.cond(p.total(p.g(v, x)) > 3, lambda x: p.f(w, x), lambda x: -p.f(w, x), x)


@_case("w", "x")
def two_conds_of_one_predicate(p: Placed, w: Any, x: Any, yes: Any) -> Any:
    decides = yes > 0
    y = jax.lax.cond(decides, lambda x: p.f(w, x), lambda x: x * 2, x)
    return jax.lax.cond(decides, lambda y: y - 1, lambda y: p.f(w, y), y)


@_case("w", "v", "x")
def predicate_made_in_a_branch_that_is_not_taken(p: Placed, w: Any, v: Any, x: Any, no: Any) -> Any:
    def inner(x: Any) -> Any:
        y = p.f(w, x)
        return jax.lax.cond(p.total(y) > 1, lambda y: p.f(v, y), lambda y: y * 2, y)

    return jax.lax.cond(no > 0, inner, lambda x: p.f(w, x), x)


@_case("w", "v", "x")
def union_of_residuals(p: Placed, w: Any, v: Any, x: Any, yes: Any) -> Any:
    def long(x: Any) -> Any:
        return jnp.sin(p.f(w, x)) * p.f(v, x * x)

    return jax.lax.cond(yes > 0, long, lambda x: jnp.cos(x)[:, ::-1] * p.f(w, x), x)


@_case("w", "x", "xs")
def cond_of_scan(p: Placed, w: Any, x: Any, xs: Any, yes: Any) -> Any:
    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda c, y: (p.f(w, c + y), None), x, xs)[0]

    return jax.lax.cond(yes > 0, loop, lambda x: p.f(w, x), x)


@_case("w", "xs")
def vmap_of_a_cond(p: Placed, w: Any, xs: Any) -> Any:
    return jax.vmap(lambda y: jax.lax.cond(y.sum() > 0, lambda y: p.f(w, y), lambda y: y * 2, y))(xs)


@_case("w", "x")
def cond_whose_results_are_constants(p: Placed, w: Any, x: Any, yes: Any) -> Any:
    y, n = jax.lax.cond(yes > 0, lambda: (jnp.ones((4, 4)), 1), lambda: (p.f(w, x), 2))
    return p.f(w, y), n


# Loops whose count only the data knows. JAX differentiates none of them.


@_case()
def fori_loop_dynamic(p: Placed, w: Any, x: Any, n: Any) -> Any:
    return jax.lax.fori_loop(0, n, lambda i, c: p.f(w, c) + i, x)


@_case()
def while_loop(p: Placed, w: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[1] < 5, lambda c: (p.f(w, c[0]), c[1] + 1), (x, 0))


@_case()
def while_with_zero_iterations(p: Placed, w: Any, x: Any, no: Any) -> Any:
    return jax.lax.while_loop(lambda c: no > 0, lambda c: p.f(w, c), x), x


@_case()
def while_with_early_exit(p: Placed, w: Any, x: Any, n: Any) -> Any:
    def test(c: Any) -> Any:
        return (c[1] < 50) & (p.total(c[0]) > 0.01)

    return jax.lax.while_loop(test, lambda c: (p.f(w, c[0]) * 0.5, p.count(c[1])), (x, n))


@_case()
def while_of_while(p: Placed, w: Any, v: Any, x: Any) -> Any:
    def outer(c: Any) -> Any:
        value, count = c
        value, inner = jax.lax.while_loop(
            lambda d: d[1] < count + 2, lambda d: (p.f(w, d[0]), d[1] + 1), (value, jnp.int32(0))
        )
        return p.f(v, value), count + inner

    return jax.lax.while_loop(lambda c: c[1] < 9, outer, (x, jnp.int32(0)))


@_case()
def while_of_cond(p: Placed, w: Any, v: Any, x: Any) -> Any:
    def body(c: Any) -> Any:
        value, count = c
        return jax.lax.cond(count % 2 == 0, lambda y: p.f(w, y), lambda y: p.f(v, y) + 1, value), count + 1

    return jax.lax.while_loop(lambda c: c[1] < 5, body, (x, 0))


@_case()
def while_over_two_slices(p: Placed, w: Any, v: Any, x: Any) -> Any:
    def body(c: Any) -> Any:
        left, right, count = c
        return p.f(w, left) + right, p.g(v, right), count + 1

    return jax.lax.while_loop(lambda c: c[2] < 4, body, (x, p.put(x, "b"), 0))


@_case()
def while_whose_carry_is_read_in_a_later_branch(p: Placed, w: Any, x: Any) -> Any:
    def body(c: Any) -> Any:
        now, before, count = c
        y = jax.lax.cond(count > 2, lambda: p.f(w, now) + before, lambda: p.f(w, now))
        return y, now, count + 1

    return jax.lax.while_loop(lambda c: c[2] < 5, body, (x, x, 0))


@_case()
def while_that_swaps(p: Placed, w: Any, x: Any, v: Any) -> Any:
    def body(c: Any) -> Any:
        one, two, _, count = c
        return two, p.f(w, one), v, count + 1

    return jax.lax.while_loop(lambda c: c[3] < 5, body, (x, p.f(w, x), v, 0))


@_case()
def loop_of_the_arguments_of_two_callers(p: Placed, w: Any, x: Any) -> Any:
    y = p.f(w, x)
    one = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (p.f(w, c[0]), c[1] + 1), (y, 0))[0]
    two = jax.lax.while_loop(lambda c: c[1] < 2, lambda c: (p.f(one, c[0]), c[1] + 1), (y, 0))[0]
    return one, two, y
