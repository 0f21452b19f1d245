"""Loops that the data ends: `jax.lax.while_loop`, and `fori_loop` with a computed bound. Nobody asks the client.

Values are plain JAX's; WALK-4: the controller hears from a host whether there is another iteration. What is not told
apart here from loops with a known count is in `test_ordered_loops.py`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import ARGUMENTS, CASES, HOMES, Placed
from control_on_slices import placed_on

import pathways as pw
from pathways._native import StepKind
from pathways.plan.composite import composite_of

WHILES = sorted(name for name in CASES if "while" in name or name == "fori_loop_dynamic")
#: Other arguments, with which a loop has another number of iterations, or none.
WAYS: tuple[dict[str, Any], ...] = ({}, {"n": np.int32(0), "x": -ARGUMENTS["x"]}, {"n": np.int32(9)})
X = np.ones((4, 4), np.float32)


def same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", WHILES)
def test_values(add: Any, quiet: Any, name: str) -> None:
    case = CASES[name]
    slices = {where: add(1) for where in "abc"}
    program, plain = pw.program(case.forward(placed_on(slices))), jax.jit(case.forward(Placed()))
    steps = composite_of(program.lower(*case.values()).bound).steps
    assert any(step.kind in (StepKind.DECIDED, StepKind.AHEAD) for step in steps)
    before = None
    for turn, way in enumerate((*WAYS, *WAYS)):
        if turn == len(WAYS):  # what is small and was given as a number is known now
            before = quiet()["kept"]
        values = {**ARGUMENTS, **way}
        args = [pw.device_put(values[n], slices[HOMES[n]]) for n in case.names]
        got = program(*args)
        same(got, plain(*(values[n] for n in case.names)))
        same(args, [values[n] for n in case.names])  # the user keeps them
        del got, args
    quiet(back_to=before)


@pytest.mark.parametrize("donates", [False, True], ids=["kept", "donated"])
def test_any_number_of_iterations(add: Any, quiet: Any, donates: bool) -> None:
    here, there = add(2), add(1)
    f = pw.jit(lambda x: x * 2, devices=here, name="f")
    g = pw.jit(lambda x: x + 1, devices=there, name="g")

    def turned(x: Any, y: Any, n: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[2] < n, lambda c: (f(c[0]), g(c[1]), c[2] + 1), (x, y, 0))

    program = pw.program(turned, donate_argnums=(0, 1) if donates else ())
    before = None
    counts = (0, 1, 2, 7, 100)
    for turn, n in enumerate((*counts, *counts)):
        if turn == len(counts):
            before = quiet()["kept"]
        x, y = pw.device_put(X, here), pw.device_put(X, there)
        got = program(x, y, n)
        assert x.is_deleted() == y.is_deleted() == donates
        same(got, (jnp.asarray(X * 2.0**n), jnp.asarray(X + n), jnp.int32(n)))
        del got, x, y
    quiet(back_to=before)


def test_which_loops_run_ahead(add: Any, quiet: Any) -> None:
    """A body that is one run hands its carry on as it was when it is not taken: swapped values, what it only passes on,
    and the scalar itself as a carried value too.
    """
    here, there = add(2), add(1)
    f = pw.jit(lambda x: x * 2, devices=here, name="f")
    g = pw.jit(lambda x, m: (x + 1, (x.sum() < m)), devices=there, name="g")

    def turned(x: Any, y: Any, k: Any, m: Any, f: Any = f, g: Any = g) -> Any:
        def body(c: Any) -> Any:
            a, b, z, k, go = c
            z, go = g(z, m)
            return f(b), a, z, k, go

        return jax.lax.while_loop(lambda c: c[4], body, (x, x, y, k, m > 0))

    def nested(x: Any, n: Any, f: Any = f) -> Any:
        def body(c: Any) -> Any:
            return jax.lax.while_loop(lambda d: d[1] < c[1], lambda d: (f(d[0]), d[1] + 1), (c[0], 0))[0], c[1] + 1

        return jax.lax.while_loop(lambda c: c[1] < n, body, (x, 0))

    plain = (lambda x: x * 2, lambda x, m: (x + 1, (x.sum() < m)))
    program, inner = pw.program(turned), pw.program(nested)
    kinds = [step.kind for step in composite_of(program.lower(X, X, X, np.float32(1)).bound).steps]
    assert StepKind.AHEAD in kinds and StepKind.DECIDED not in kinds
    kinds = [step.kind for step in composite_of(inner.lower(X, 3).bound).steps]
    assert StepKind.AHEAD in kinds and StepKind.DECIDED in kinds
    before = None
    for turn, m in enumerate((0, 17, 200, 0, 17, 200)):
        if turn == 3:
            before = quiet()["kept"]
        m = np.float32(m)
        same(program(X, X, X, m), jax.jit(lambda x, y, k, m: turned(x, y, k, m, *plain))(X, X, X, m))
        same(inner(X, turn % 3 * 2), jax.jit(lambda x, n: nested(x, n, plain[0]))(X, turn % 3 * 2))
    quiet(back_to=before)


def test_a_loop_in_a_training_step_that_reads_late(add: Any) -> None:
    """Each step takes the parameters that the last one made; the losses are read at the end."""
    here, there = add(1), add(1)
    f = pw.jit(lambda w, x: w * 0.9 + x, devices=here, name="f")
    total = pw.jit(jnp.sum, devices=there, name="total")

    def step(w: Any, x: Any) -> Any:
        w, n = jax.lax.while_loop(lambda c: (c[1] < 9) & (total(c[0]) < 99), lambda c: (f(c[0], x), c[1] + 1), (w, 0))
        return w, (total(w), n)

    program, w = pw.program(step, donate_argnums=0), pw.device_put(X, here)
    want, losses, expected = jnp.asarray(X), [], []
    for k in range(12):
        w, loss = program(w, X * k / 8)
        losses.append(loss)
        n = 0
        while n < 9 and jnp.sum(want) < 99:
            want, n = want * 0.9 + X * k / 8, n + 1
        expected.append((jnp.sum(want), jnp.int32(n)))
    for got, right in zip(losses, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got[0]), np.asarray(right[0]), rtol=1e-4)
        assert int(got[1]) == int(right[1])


def test_forward_derivatives(add: Any) -> None:
    f = pw.jit(lambda x: x * x, devices=add(1), name="f")

    def fun(x: Any, f: Any = f) -> Any:
        return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (f(c[0]), c[1] + 1), (x, 0))[0]

    x, t = np.float32(1.25), np.float32(2)
    got = pw.program(lambda x, t: jax.jvp(fun, (x,), (t,)))(x, t)
    same(got, jax.jvp(lambda x: fun(x, lambda x: x * x), (x,), (t,)))


def test_a_scalar_that_fails_fails_what_comes_behind(add: Any, cluster: Any, quiet: Any) -> None:
    """The carry is right, but nobody knows how long the loop should have been."""
    if cluster.is_embedded:
        jax.jit(jnp.linalg.cholesky).lower(X)  # registers LAPACK's handlers
    here, there = add(1), add(1)

    def broken(x: Any) -> Any:
        bad = jax.ffi.ffi_call("lapack_spotrf_ffi", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return bad.sum() < 0

    less = pw.jit(lambda n, x: jax.lax.cond(n == 4, broken, lambda x: n < 9, x), devices=there, name="less")
    f = pw.jit(lambda x: x + 1, devices=here, name="f")

    def fun(x: Any, y: Any) -> Any:
        return jax.lax.while_loop(lambda c: less(c[1], X), lambda c: (f(c[0]), c[1] + 1), (x, 0)), f(y)

    program = pw.program(fun)
    for _ in range(2):
        failed, fine = program(X, X)
        for leaf in failed:
            with pytest.raises(pw.errors.ComputationError, match="Wrong number of results"):
                np.asarray(leaf)
        same(fine, jnp.asarray(X + 1))
    del failed, fine, leaf
    before = quiet()["kept"]
    jax.block_until_ready(program(X, X)[1])
    quiet(back_to=before)


def endless(add: Any) -> Any:
    here, there = add(1), add(1)
    f = pw.jit(lambda x: x + 1, devices=here, name="f")
    g = pw.jit(lambda n: n + 1, devices=there, name="g")
    return pw.program(
        lambda x: jax.lax.while_loop(lambda c: c[1] >= 0, lambda c: (f(c[0]), g(c[1]) % 99), (x, 0)), name="endless"
    )


def test_an_endless_loop_ends_at_its_deadline(add: Any, quiet: Any) -> None:
    program = endless(add)
    pw.cancel(program(X))  # from here on it is compiled
    before = quiet()["kept"]
    for late in program.with_timeout(0.1)(X):
        with pytest.raises(pw.errors.DeadlineExceededError, match="'endless'"):
            np.asarray(late)
    del late
    quiet(back_to=before)


def test_a_batch_of_loops_goes_on_for_each_element_as_its_test_says(add: Any) -> None:
    f, g = (pw.jit(lambda x, n=n: x * 1.5 + n, devices=add(1)) for n in range(2))

    def loops(f: Any, g: Any, xs: Any, keys: Any) -> Any:
        def turn(state: Any) -> Any:
            count, x, key = state
            return count + 1, g(f(x)), jax.random.split(key)[0]

        start = lambda x, key: jax.lax.while_loop(lambda s: s[1].sum() < 100, turn, (0, x, key))
        counts, xs, keys = jax.vmap(start)(xs, keys)
        return counts, xs, jax.random.key_data(keys)

    def bounded(f: Any, g: Any, xs: Any) -> Any:
        last = jax.vmap(lambda x: pw.while_loop(lambda x: x.sum() < 50, lambda x: g(f(x)), x, max_iterations=9))(xs)
        return last.sum()

    xs = np.float32([[1, 2], [50, 60], [3, 90], [0, 0]])
    keys = jax.random.split(jax.random.key(0), 4)
    plain = [lambda x, n=n: x * 1.5 + n for n in range(2)]
    for got, want in zip(
        pw.program(lambda xs, keys: loops(f, g, xs, keys))(xs, keys), loops(*plain, xs, keys), strict=True
    ):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
    got = pw.program(jax.grad(lambda xs: bounded(f, g, xs)))(xs)
    np.testing.assert_allclose(np.asarray(got), jax.grad(lambda xs: bounded(*plain, xs))(xs), rtol=1e-5)


def test_an_endless_loop_ends_at_ctrl_c(add: Any, quiet: Any) -> None:
    program = endless(add)
    pw.cancel(program(X))  # from here on it is compiled
    before = quiet()["kept"]
    running = program.with_timeout(20)(X)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    started = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        np.asarray(running[0])
    assert time.monotonic() - started < 10
    timer.join()
    pw.cancel(running)
    with pytest.raises(pw.errors.CancelledError):
        np.asarray(running[0])
    del running
    quiet(back_to=before)


@pytest.mark.slow
def test_a_host_is_killed_and_another_client_runs_between() -> None:
    with pw.connect(pw.LocalCluster(2, 1, 1, platform="cpu")) as cluster:
        devices = pw.make_virtual_device_set(cluster)
        program = endless(lambda _: devices.add_slice(shape=(1,), axis_names=("x",)))
        running = program(X)
        with pw.connect(cluster.address) as other:
            theirs = pw.make_virtual_device_set(other).add_slice(shape=(1,), axis_names=("x",), island=0)
            double = pw.jit(lambda x: x * 2, devices=theirs)
            for _ in range(20):  # between the iterations
                same(double(X), jnp.asarray(X * 2))
        assert not running[0].is_ready()
        os.kill(cluster.stats()["hosts"][1]["pid"], signal.SIGKILL)
        for leaf in running:
            with pytest.raises(pw.errors.HostLostError):
                np.asarray(leaf)
