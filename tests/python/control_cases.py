"""Loops and branches for tests: each case is written once, over placed functions or over plain ones.

`CASES` has them by name. A case is a function of `Placed` and of the arguments `ARGUMENTS`; it takes those that it
names. `homes` says on which slice an argument lives.
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
    "w": _normal(3, 3),
    "v": _normal(3, 3),
    "x": _normal(3, 3),
    "xs": _normal(4, 3, 3),
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


# Loops whose count is known.


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
        value = p.f(w, value) * jax.random.bernoulli(key, 0.5, (3, 3)) + jax.random.normal(one, (3, 3))
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
        c = jax.lax.cond(i == 0, lambda c: p.f(w, c), lambda c: p.h(c), c)
        return jax.lax.switch(i + 1, [lambda c: c, lambda c: p.put(c, "a") * 2, lambda c: c - 1], c)

    return jax.lax.fori_loop(0, 5, body, x)


@_case("x", known=True)
def a_branch_that_is_known(p: Placed, w: Any, x: Any) -> Any:
    return jax.lax.cond(True, lambda c: p.f(w, c), lambda c: p.h(c), x)


@_case("w", "xs", known=True)
def carry_that_starts_as_a_constant(p: Placed, w: Any, xs: Any) -> Any:
    start = (0.0, jnp.zeros((3, 3)), 1.0)
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
