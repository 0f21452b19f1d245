"""Programs of every shape, on every cluster: results equal what plain Python over the same functions gives."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw


def near(got: Any, want: Any) -> None:
    """Equal structure, types and shapes, and values up to the last bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(jnp.asarray(b))
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-6)


def on(slice_: Any, fun: Callable[..., Any], **options: Any) -> Any:
    return pw.jit(fun, devices=slice_, **options)


VALUE = np.arange(1, 9, dtype=np.float32)


def test_chain_on_one_slice(add: Any, cluster: Any) -> None:
    f, g = (on(slice_, fun) for slice_ in [add(2)] for fun in (lambda x: x + 1, lambda x: x * 3))
    before = cluster.stats()["dispatches"]
    near(pw.program(lambda x: g(f(g(f(x)))))(VALUE), ((VALUE + 1) * 3 + 1) * 3)
    assert cluster.stats()["dispatches"] == before + 1
    near(g(f(g(f(VALUE)))), ((VALUE + 1) * 3 + 1) * 3)
    assert cluster.stats()["dispatches"] == before + 5


def test_diamond_over_four_slices(add: Any) -> None:
    top, left, right, bottom = (
        on(slice_, fun)
        for slice_, fun in zip(
            [add(2), add(1), add((2, 2)), add(4)],
            [lambda x: x + 1, lambda x: x * 2, lambda x: x * 3, lambda x, y: (x - y, x * y)],
            strict=True,
        )
    )

    @pw.program
    def diamond(x: Any) -> Any:
        up = top(x)
        return bottom(left(up), right(up))

    up = VALUE + 1
    near(diamond(VALUE), (up * 2 - up * 3, up * 2 * (up * 3)))


def test_back_and_forth_between_two_slices(add: Any) -> None:
    ping, pong = on(add(4), lambda x: x * 2), on(add(4), lambda x: x + 1)

    @pw.program
    def rally(x: Any) -> Any:
        for _ in range(8):
            x = pong(ping(x))
        return x

    want = VALUE
    for _ in range(8):
        want = want * 2 + 1
    near(rally(VALUE), want)
    untraced = VALUE
    for _ in range(8):
        untraced = pong(ping(untraced))
    near(untraced, want)


def test_crossing_programs_do_not_deadlock(add: Any) -> None:
    """ORD-2: programs that cross slices in opposite directions, many at once."""
    one, two = add(4), add(4)
    plus_one, doubled = on(one, lambda x: x + 1), on(two, lambda x: x * 2)
    plus_three, times_four = on(two, lambda x: x + 3), on(one, lambda x: x * 4)
    there = pw.program(lambda x: doubled(plus_one(x)))
    back = pw.program(lambda x: times_four(plus_three(x)))
    results = [(there(VALUE), back(VALUE)) for _ in range(50)]
    for first, second in results:
        near(first, (VALUE + 1) * 2)
        near(second, (VALUE + 3) * 4)


def test_three_slices_of_other_shapes_and_axes(add: Any) -> None:
    a = on(add((2, 2)), lambda x: x * 2, in_shardings=P("y", "x"), out_shardings=P("x", "y"))
    b = on(add(4), lambda x: x + 1, in_shardings=P("x"), out_shardings=P(None, "x"))
    c = on(add(1), lambda x: x - 3)
    matrix = np.arange(32, dtype=np.float32).reshape(8, 4)
    near(pw.program(lambda x: (a(x), b(a(x)), c(b(a(x)))))(matrix), (matrix * 2, matrix * 2 + 1, matrix * 2 + 1 - 3))


def test_results_repeated_and_passed_through(add: Any) -> None:
    f = on(add(2), lambda x: x + 1)

    @pw.program
    def odd(x: Any, y: Any) -> Any:
        z = f(x)
        return z, x, {"again": z, "first": x}, y, z

    for x in (VALUE, pw.device_put(VALUE, f.slice)):
        near(odd(x, 3), (VALUE + 1, VALUE, {"again": VALUE + 1, "first": VALUE}, 3, VALUE + 1))


def test_passed_through_results_outlive_their_arguments(add: Any) -> None:
    slice_ = add(2)
    same = pw.program(lambda x: (x, x))
    x = pw.device_put(VALUE, slice_)
    first, second = same(x)
    x.delete()
    first.delete()
    near(second, VALUE)


def test_no_arguments_and_constants(add: Any) -> None:
    slice_ = add(2)
    big = np.arange(4096, dtype=np.float32).reshape(64, 64)
    one = on(slice_, lambda: jnp.ones((4, 4)))
    closed = on(slice_, lambda x: x + big)
    near(one(), np.ones((4, 4), np.float32))
    near(pw.program(lambda: (one(), jnp.arange(3), 2.5))(), (np.ones((4, 4), np.float32), np.arange(3), 2.5))
    near(pw.program(lambda: closed(big[0]))(), big + big[0])
    near(pw.program(lambda x: closed(x) + jnp.asarray(big))(big[0]), big + big[0] + big)


def test_results_none_and_empty(add: Any) -> None:
    f = on(add(2), lambda x: x + 1)
    assert pw.program(lambda x: None)(VALUE) is None
    assert pw.program(lambda x: {"a": None, "b": ()})(VALUE) == {"a": None, "b": ()}
    near(pw.program(lambda x: (f(x), None))(VALUE), (VALUE + 1, None))


def test_static_arguments(add: Any) -> None:
    power = on(add(2), lambda x, n: x**n, static_argnums=1)
    near(power(VALUE, 2), VALUE**2)
    near(power(VALUE, 3), VALUE**3)

    @functools.partial(pw.program, static_argnums=0, static_argnames="shift")
    def pick(n: int, x: Any, *, shift: int = 0) -> Any:
        return power(x, n) + shift

    near(pick(2, VALUE), VALUE**2)
    near(pick(3, VALUE, shift=1), VALUE**3 + 1)
    near(pick(2, VALUE, shift=1), VALUE**2 + 1)


def test_keywords_and_pytrees(add: Any) -> None:
    f = on(add(2), lambda tree, *, scale: jax.tree.map(lambda x: x * scale, tree))
    tree = {"a": VALUE, "b": [VALUE[:2], (VALUE[0], None)]}
    want = jax.tree.map(lambda x: x * np.float32(2), tree)
    near(f(tree, scale=2.0), want)
    near(pw.program(lambda tree, scale=1.0: f(tree, scale=scale))(tree, scale=2.0), want)
    near(pw.program(lambda tree, scale=1.0: f(tree, scale=scale))(tree), tree)


def test_one_program_many_signatures(add: Any) -> None:
    f = on(add(2), lambda x: x * 2)
    double = pw.program(lambda x: f(x))
    for _ in range(2):
        for value in (VALUE, VALUE[:2], VALUE.astype(np.int32), 3, 2.5, VALUE.reshape(2, 4)):
            near(double(value), jnp.asarray(value) * 2)


def test_host_values_and_arrays_of_other_slices_are_moved(add: Any) -> None:
    one, two = add(2), add(4)
    f = on(one, lambda x, y: x + y)
    near(f(pw.device_put(VALUE, two, P("x")), VALUE), VALUE * 2)
    near(pw.program(lambda x, y: f(x, y))(pw.device_put(VALUE, two, P("x")), jnp.asarray(VALUE)), VALUE * 2)


def test_device_put_inside(add: Any) -> None:
    one, two = add(2), add((2, 2))
    f = on(one, lambda x: x + 1)

    @pw.program
    def moved(x: Any) -> Any:
        return pw.device_put({"here": f(x)}, two, P(("y", "x")))

    out = moved(VALUE)
    assert out["here"].slice is two and out["here"].sharding.spec[0] == ("y", "x")
    near(out, {"here": VALUE + 1})


def test_plain_operations_between_computations(add: Any) -> None:
    f, g = on(add(2), lambda x: x + 1), on(add(2), lambda x: x * 2)
    near(pw.program(lambda x: jnp.sin(g(jnp.exp(f(x)) - 1)).sum())(VALUE), jnp.sin((jnp.exp(VALUE + 1) - 1) * 2).sum())
    near(pw.program(lambda x: x * 2 + 1)(VALUE), VALUE * 2 + 1)


def test_programs_inside_programs(add: Any) -> None:
    f = on(add(2), lambda x: x + 1)
    inner = pw.program(lambda x: f(f(x)))
    near(pw.program(lambda x: inner(inner(x)))(VALUE), VALUE + 4)


def test_a_long_chain_and_a_wide_fan(add: Any) -> None:
    f = on(add(2), lambda x: x + 1)

    @pw.program
    def chain(x: Any) -> Any:
        for _ in range(128):
            x = f(x)
        return x

    near(chain(VALUE), VALUE + 128)
    total = on(f.slice, lambda *xs: sum(xs))
    near(pw.program(lambda x: total(*[f(x) for _ in range(64)]))(VALUE), (VALUE + 1) * 64)


def test_collectives(add: Any) -> None:
    slice_ = add(4)
    total = on(slice_, jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=slice_.mesh, in_specs=P("x"), out_specs=P()))
    mean = on(slice_, lambda x: x - x.mean(), in_shardings=P("x"), out_shardings=P("x"))
    near(pw.program(lambda x: (total(x), mean(x)))(VALUE), (VALUE.reshape(4, 2).sum(0), VALUE - VALUE.mean()))


def test_slices_that_share_devices(add: Any, cluster: Any) -> None:
    slices = [add(2) for _ in range(2 * len(cluster.devices))]
    functions = [on(slice_, lambda x: x + 1) for slice_ in slices]

    @pw.program
    def tour(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    near(tour(VALUE), VALUE + len(slices))


def test_lowered_text_and_compile(add: Any) -> None:
    f, g = on(add(2), lambda x: x + 1, name="f"), on(add(2), lambda x: x * 2, name="g")
    lowered = pw.program(lambda x: g(f(x)), name="both").lower(jax.ShapeDtypeStruct((8,), np.float32))
    for level, word in (("mpmd", "mpmd"), ("ifrt", "ifrt"), ("program", "f"), ("plan", "program both")):
        assert word in lowered.as_text(level)
    near(lowered.compile()(VALUE), (VALUE + 1) * 2)
    with pytest.raises(pw.errors.ProgramError, match="structure"):
        lowered.compile()(VALUE, VALUE)
    one = pw.jit(lambda x: (x**2).sum(), devices=add(2)).lower(VALUE).compile()  # keeps its slice
    gc.collect()
    for transformed in (jax.grad(one), jax.jit(one), jax.vmap(one), pw.program(one)):
        with pytest.raises(pw.errors.ProgramError, match="compiled for one signature, so JAX cannot transform"):
            transformed(VALUE)
    near(one(VALUE), (VALUE**2).sum())
