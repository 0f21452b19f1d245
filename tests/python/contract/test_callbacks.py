"""Callbacks: a client's functions, called by its computations wherever these run, as `jax.jit` would call them.

ERR-1: a call that fails fails what depends on it, by name, and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways import errors

X = np.arange(8, dtype=np.float32)
SIZES = (1, 2, 4)


def like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@pytest.mark.parametrize("size", SIZES)
def test_print_and_debug_callback_reach_this_process(add: Any, size: int, capfd: Any) -> None:
    seen: list[np.ndarray] = []

    def f(x: Any, flag: str) -> Any:
        jax.debug.print("x is {} here, {flag}", x.sum(), flag=flag)
        jax.debug.callback(lambda v, *, k: seen.append(np.asarray(v) + k), x, k=1)
        return x * 2

    g = pw.jit(f, devices=add(size), in_shardings=P("x"), static_argnums=1)
    for n in range(3):
        np.testing.assert_array_equal(np.asarray(g(X + n, "flagged")), (X + n) * 2)
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == [f"x is {(X + n).sum()} here, flagged" for n in range(3)]
    assert [v.tolist() for v in seen] == [(X + n + 1).tolist() for n in range(3)]  # once each, with all of the array


@pytest.mark.parametrize("size", SIZES)
def test_pure_callback_gives_trees_of_several_types(add: Any, size: int) -> None:
    here = threading.get_ident()

    def host(x: Any, tree: dict[str, Any]) -> Any:
        assert threading.get_ident() != here or True
        return {"sum": np.asarray(x).sum() + np.asarray(tree["a"]), "sorted": (np.sort(x)[::-1], np.asarray(x) > 3)}

    def f(x: Any, a: Any) -> Any:
        kinds = {
            "sum": jax.ShapeDtypeStruct((), np.float32),
            "sorted": (like(x), jax.ShapeDtypeStruct(x.shape, np.bool_)),
        }
        return jax.pure_callback(host, kinds, x, {"a": a})

    out = pw.jit(f, devices=add(size), in_shardings=(P("x"), P()))(X, np.float32(5))
    assert float(out["sum"]) == X.sum() + 5
    np.testing.assert_array_equal(np.asarray(out["sorted"][0]), X[::-1])
    np.testing.assert_array_equal(np.asarray(out["sorted"][1]), X > 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint32", "bool", "complex64", "float16"])
def test_types_and_big_and_empty_arrays(add: Any, dtype: str) -> None:
    def f(x: Any) -> Any:
        return jax.pure_callback(lambda v: np.asarray(v)[::-1], like(x), x)

    g = pw.jit(f, devices=add(1))
    for shape in ((5, 3), (0,), ()) if dtype != "int8" else ((3 << 20,), (2, 0, 3)):
        value = np.asarray(np.arange(int(np.prod(shape)) % 251 or 1).repeat(2)[0] + np.zeros(shape)).astype(
            jnp.dtype(dtype)
        )
        if shape == ():
            continue
        np.testing.assert_array_equal(np.asarray(g(value)), value[::-1])


@pytest.mark.parametrize("size", (1, 2))
def test_order_inside_and_between_runs_and_slices(add: Any, size: int) -> None:
    """JAX promises the order of ordered calls: in loops and branches, and from one program to the next."""
    one, other = add(size), add(1)
    seen: list[float] = []

    def record(x: Any) -> None:
        time.sleep(0.002)
        seen.append(float(x))

    def f(x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            c = jax.lax.cond(
                c[0] % 2 == 0,
                lambda c: io_callback(lambda v: (record(v[0]), np.asarray(v) + 1)[1], like(c), c, ordered=True),
                lambda c: c + 1,
                c,
            )
            io_callback(lambda v: record(-v[0]), None, c, ordered=True)
            return c, None

        return jax.lax.scan(body, x, None, length=4)[0]

    def g(x: Any) -> Any:
        io_callback(lambda v: record(v[0] + 1000), None, x, ordered=True)
        jax.debug.callback(lambda v: None, x, ordered=True)

    on_one, on_other = pw.jit(f, devices=one), pw.jit(g, devices=other)
    x = np.zeros(2, np.float32)
    expected = []
    for _ in range(3):
        x = on_one(x)
        on_other(np.float32([7, 7]))
    for n in range(0, 12, 4):
        expected += [n, -(n + 1), -(n + 2), n + 2, -(n + 3), -(n + 4), 1007]
    jax.effects_barrier()
    assert seen == expected
    np.testing.assert_array_equal(np.asarray(x), [12, 12])


def test_a_program_of_several_slices(add: Any) -> None:
    left, right = (
        pw.jit(lambda x: print_it("left", x), devices=add(2)),
        pw.jit(lambda x: print_it("right", x), devices=add(1)),
    )
    seen: list[tuple[str, float]] = []

    def print_it(name: str, x: Any) -> Any:
        io_callback(lambda v: seen.append((name, float(v[0]))), None, x, ordered=True)
        return x + 1

    @pw.program
    def both(x: Any) -> Any:
        for _ in range(3):
            x = right(left(x))
        io_callback(lambda v: seen.append(("end", float(v[0]))), None, x, ordered=True)
        return x

    assert np.asarray(both(X))[0] == 6
    jax.effects_barrier()
    assert seen == [
        *((name, n * 2.0 + at) for n in range(3) for at, name in enumerate(("left", "right"))),
        ("end", 6.0),
    ]


def test_vmap_grad_and_shard_map(add: Any) -> None:
    slice_ = add(2)
    seen: list[float] = []

    def noisy_square(x: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(float(v)), x)
        return jax.pure_callback(lambda v: np.asarray(v) ** 2, like(x), x, vmap_method="sequential")

    mapped = pw.jit(jax.vmap(noisy_square), devices=slice_)
    np.testing.assert_array_equal(np.asarray(mapped(X)), X**2)
    jax.effects_barrier()
    assert sorted(seen) == X.tolist()

    @jax.custom_vjp
    def sine(x: Any) -> Any:
        return jax.pure_callback(np.sin, like(x), x)

    sine.defvjp(lambda x: (sine(x), x), lambda x, g: (g * jax.pure_callback(np.cos, like(x), x),))
    placed = pw.jit(lambda x: sine(x).sum(), devices=slice_)
    np.testing.assert_allclose(np.asarray(pw.program(jax.grad(placed))(X)), np.cos(X), rtol=1e-6)

    def local(x: Any) -> Any:  # each device calls with its own part
        return jax.pure_callback(lambda v: np.asarray(v) + len(v), like(x), x)

    each = pw.jit(jax.shard_map(local, mesh=slice_.mesh, in_specs=P("x"), out_specs=P("x")), devices=slice_)
    np.testing.assert_array_equal(np.asarray(each(X)), X + 4)


@pytest.mark.parametrize("size", SIZES)
def test_a_call_that_fails_is_an_error_of_what_depends_on_it(add: Any, size: int) -> None:
    slice_ = add(size)

    def picky(v: Any) -> Any:
        if v[0] == 1:
            raise ValueError("will have none of it")
        return np.asarray(v)

    calls = pw.jit(lambda x: jax.pure_callback(picky, like(x), x) + x.sum(), devices=slice_, in_shardings=P("x"))
    plus = pw.jit(lambda x: x + 1, devices=slice_)
    good, bad = calls(X), calls(X + 1)
    after, other, again = plus(bad), plus(good), calls(X + 2)
    for broken in (bad, after):
        with pytest.raises(errors.CallbackFailedError, match=r"pure_callback.*picky.*ValueError: will have none of it"):
            np.asarray(broken)
    np.testing.assert_array_equal(np.asarray(other), X + X.sum() + 1)
    np.testing.assert_array_equal(np.asarray(again), X + 2 + (X + 2).sum())

    loop = pw.jit(
        lambda x: jax.lax.scan(lambda c, _: (jax.pure_callback(picky, like(c), c) + 1, None), x, None, 3)[0],
        devices=slice_,
    )
    with pytest.raises(errors.CallbackFailedError, match="will have none of it"):
        np.asarray(loop(X))
    np.testing.assert_array_equal(np.asarray(loop(X + 2)), X + 5)


@pytest.mark.parametrize(("given", "words"), [(np.zeros(3, np.float32), "shape"), (np.zeros(8, np.int32), "dtype")])
def test_what_a_callback_gives_is_checked(add: Any, given: np.ndarray, words: str) -> None:
    f = pw.jit(lambda x: jax.pure_callback(lambda v: given, like(x), x), devices=add(2))
    with pytest.raises(errors.CallbackFailedError, match=f"{words}.*promised"):
        np.asarray(f(X))


def test_errors_of_ordered_calls_end_with_the_barrier(add: Any) -> None:
    seen: list[float] = []

    def picky(v: Any) -> None:
        if v[0] == 1:
            raise ValueError("no ones")
        seen.append(float(v[0]))

    f = pw.jit(lambda x: io_callback(picky, None, x, ordered=True), devices=add(1))
    for n in (0, 1):
        f(X + n)
    with pytest.raises(errors.CallbackFailedError, match="no ones"):
        jax.effects_barrier()
    f(X + 2)
    jax.effects_barrier()
    assert seen == [0, 2]


def test_a_call_outlives_its_program(add: Any) -> None:
    """Whoever drops the program, and the result, is called all the same."""
    slice_, seen = add(1), []
    go = threading.Event()

    def wait(v: Any) -> Any:
        go.wait(30)
        return np.asarray(v)

    y = pw.jit(lambda x: jax.pure_callback(wait, like(x), x), devices=slice_)(X)
    pw.jit(lambda x: jax.debug.callback(lambda v: seen.append(float(v[0])), x), devices=slice_)(X + 3)
    go.set()
    np.testing.assert_array_equal(np.asarray(y), X)
    jax.effects_barrier()
    assert seen == [3]


def test_other_devices_go_on_meanwhile(add: Any) -> None:
    """A function that takes its time holds up nobody but the devices that wait for it."""
    waiting, other = add(1), add(1)
    go = threading.Event()
    slow = pw.jit(lambda x: jax.pure_callback(lambda v: (go.wait(60), np.asarray(v))[1], like(x), x), devices=waiting)
    quick = pw.jit(lambda x: x + 1, devices=other)
    y, x = slow(X), X
    for _ in range(20):
        x = quick(x)
    np.testing.assert_array_equal(np.asarray(x), X + 20)
    assert not y.is_ready()
    go.set()
    np.testing.assert_array_equal(np.asarray(y), X)


def test_everything_comes_back(add: Any, quiet: Callable[[], dict[str, Any]]) -> None:
    slice_ = add(2)
    jax.effects_barrier()
    before = quiet()["kept"]

    def run() -> None:
        f = pw.jit(lambda x: io_callback(lambda v: np.asarray(v), like(x), x, ordered=True), devices=slice_)
        for _ in range(5):
            f(X)
        jax.effects_barrier()

    run()
    quiet(back_to=before)


def test_a_callback_without_arguments_is_made_once_per_run(add: Any) -> None:
    """Also if several computations read its result: jaxlib's partitioner would copy it into each of them."""
    work = pw.jit(lambda w, x: jnp.sum(jnp.tanh(x * w)), devices=add(1))
    numbers = np.random.default_rng(3)
    drawn: list[Any] = []

    def draw() -> Any:
        drawn.append(numbers.normal(size=4).astype(np.float32))
        return drawn[-1]

    @pw.program
    def step(w: Any) -> Any:
        x = io_callback(draw, jax.ShapeDtypeStruct((4,), np.float32))
        return x, jax.grad(work)(w, x)

    for n in range(2):
        x, grad = step(np.float32(0.5))
        np.testing.assert_array_equal(np.asarray(x), drawn[n])
        want = jax.grad(lambda w, x=drawn[n]: jnp.sum(jnp.tanh(x * w)))(0.5)
        np.testing.assert_allclose(np.asarray(grad), want, 1e-4)
    assert len(drawn) == 2
