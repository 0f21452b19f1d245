"""Short loops of JAX around placed functions run on the hosts, unrolled: values and gradients are plain JAX's.

The cases are those of `control_cases`; here they run on every kind of cluster. Longer loops, and branches that only the
data decides, are in `test_control_flow.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import CASES, HOMES, Placed
from control_on_slices import placed_on

import pathways as pw

RUN = (
    "scan",
    "scan_reverse",
    "keys",
    "nested_scan",
    "mixed_dtypes",
    "fori_loop",
    "put_in_the_body",
    "map",
    "remat_body",
)


@pytest.mark.sampled(0.35)
@pytest.mark.parametrize("name", RUN)
def test_values_and_gradients(add: Any, name: str) -> None:
    case = CASES[name]
    slices = {where: add(1) for where in "abc"}
    placed = placed_on(slices)
    args = [pw.device_put(x, slices[HOMES[n]]) for n, x in zip(case.names, case.values(), strict=True)]
    for make in ("forward", "backward"):
        got = pw.program(getattr(case, make)(placed))(*args)
        expected = getattr(case, make)(Placed())(*map(jnp.asarray, case.values()))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            a, b = (np.asarray(leaf).astype(np.float64) for leaf in (a, b))
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("length", [1, 3])
def test_a_weight_put_in_the_body_gets_its_gradient_where_it_lives(add: Any, length: int) -> None:
    """JAX takes the forward transfer out of the loop, and leaves the cotangents' transfers in it."""
    here, there = add(1), add(1)
    mix = pw.jit(lambda w, c: jnp.tanh(c @ w), devices=there)

    def loss(w: Any, x: Any, put: Any, mix: Any) -> Any:
        return jax.lax.scan(lambda c, _: (mix(put(w), c), None), x, None, length=length)[0].sum()

    random = np.random.default_rng(2)
    w, x = (random.normal(size=(3, 3)).astype(np.float32) for _ in range(2))
    step = pw.program(jax.grad(lambda w, x: loss(w, x, lambda w: pw.device_put(w, there), mix)))
    got = step(pw.device_put(w, here), pw.device_put(x, there))
    expected = jax.grad(lambda w, x: loss(w, x, lambda w: w, lambda w, c: jnp.tanh(c @ w)))(w, x)
    np.testing.assert_allclose(np.asarray(got), expected, rtol=2e-5, atol=2e-5)
    assert got.slice is here


def test_an_index_beyond_the_cases_is_clamped(add: Any) -> None:
    f = pw.jit(lambda x: x * 2, devices=add(1))
    fun = lambda f: (
        lambda x: jax.lax.fori_loop(-1, 3, lambda i, c: f(c) + jax.lax.select_n(i, jnp.int32(10), jnp.int32(20)), x)
    )
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(np.asarray(pw.program(fun(f))(x)), fun(lambda x: x * 2)(x))


def test_a_pipeline_written_as_a_scan_follows_its_schedule(add: Any) -> None:
    first, second = add(1), add(1)
    f = pw.jit(lambda w, x: jnp.tanh(x @ w), devices=first)
    g = pw.jit(lambda w, y: jnp.sum(y @ w), devices=second)
    plain = lambda w, v, xs: jax.lax.scan(lambda c, x: (c + jnp.sum(jnp.tanh(x @ w) @ v), None), 0.0, xs)[0]

    @pw.program(schedule="1F1B")
    def step(w: Any, v: Any, xs: Any) -> Any:
        def loss(w: Any, v: Any) -> Any:
            return jax.lax.scan(lambda c, x: (c + g(v, f(w, x)), None), 0.0, xs)[0]

        return jax.value_and_grad(loss, (0, 1))(w, v)

    random = np.random.default_rng(1)
    w, v, xs = (random.normal(size=shape).astype(np.float32) for shape in ((3, 3), (3, 2), (4, 5, 3)))
    placed = pw.device_put(w, first), pw.device_put(v, second)
    for a, b in zip(
        jax.tree.leaves(step(*placed, xs)),
        jax.tree.leaves(jax.value_and_grad(plain, (0, 1))(w, v, xs)),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-5)
    labels = [line for line in step.lower(*placed, xs).as_text("program").splitlines() if "microbatch" in line]
    assert any("backward, microbatch 0" in line for line in labels)


def test_a_while_loop_is_shown(add: Any) -> None:
    f = pw.jit(lambda x: x * 2, devices=add(1), name="f")
    x = np.ones(3, np.float32)
    program = pw.program(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, f, x))
    np.testing.assert_array_equal(program(x), 4 * x)
    text = program.lower(x).as_text("plan")
    assert "of jax.lax.while_loop(%1, %0), while its first result is true" in text and "call f." in text


@pytest.mark.parametrize("behind", ["nothing", "reads", "sends", "reads both"])
@pytest.mark.parametrize("body", ["alone", "beside", "swapped", "within"])
def test_a_long_loop_whose_body_computes_nothing(add: Any, body: str, behind: str) -> None:
    """The compiler finds that a function gives what it got. So the loop hands on a buffer, which the caller keeps."""
    here, there = add(1), add(1)
    same = pw.jit(lambda x: x * 1, devices=here)
    halve = pw.jit(lambda x: x / 2, devices=here)
    double = pw.jit(lambda x: x * 2, devices=here)
    away = pw.jit(lambda x: x + 1, devices=there)

    def alone(c: Any) -> Any:
        return same(c[0]), same(c[1])

    bodies: dict[str, Any] = {
        "alone": alone,
        "beside": lambda c: (same(c[0]), halve(double(c[1]))),
        "swapped": lambda c: (c[1], c[0]),
        "within": lambda c: jax.lax.scan(lambda c, _: (alone(c), None), c, None, length=17)[0],
    }
    readers: dict[str, Any] = {
        "nothing": lambda a, b, x: (a, b),
        "reads": lambda a, b, x: (double(a), b),
        "sends": lambda a, b, x: (away(a), b),
        "reads both": lambda a, b, x: (double(a), away(b), halve(x)),
    }

    @pw.program
    def program(x: Any, y: Any) -> Any:
        last, _ = jax.lax.scan(lambda c, _: (bodies[body](c), None), (x, y), None, length=20)  # without a counter
        return readers[behind](*last, x)

    x, y = np.arange(3, dtype=np.float32), np.ones(3, np.float32)
    read = {"nothing": (x, y), "reads": (x * 2, y), "sends": (x + 1, y), "reads both": (x * 2, y + 1, x / 2)}[behind]
    for a, b in ((x, y), (pw.device_put(x, here), pw.device_put(y, here))):
        for got, expected in zip(program(a, b), read, strict=True):
            np.testing.assert_array_equal(np.asarray(got), expected)
    np.testing.assert_array_equal(np.asarray(a), x)
