"""Loops that the controller orders, iteration by iteration: values and gradients are plain JAX's.

A loop that fails, is late or loses a host leaves nothing. The order itself is tested in
`tests/cpp/loops/test_loops.cc`.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import CASES, HOMES, Placed
from control_on_slices import placed_on
from thoroughness import THOROUGHNESS

import pathways as pw
from pathways._native import StepKind
from pathways.plan.composite import composite_of
from pathways.testing import stand_in

LOOPS = ("scan_reverse", "nested_scan", "keys", "scan", "mixed_dtypes", "fori_loop", "map", "remat_body")
W, V = (np.random.default_rng(n).normal(size=(4, 4)).astype(np.float32) for n in (1, 2))
X = np.ones((4, 4), np.float32)


def same(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(leaf).astype(np.float64) for leaf in (a, b))
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", LOOPS if THOROUGHNESS > 1 else LOOPS[:1])
def test_values_and_gradients(add: Any, quiet: Any, name: str) -> None:
    case = CASES[name]
    slices = {where: add(1) for where in "abc"}
    placed = placed_on(slices)
    args = [pw.device_put(x, slices[HOMES[n]]) for n, x in zip(case.names, case.values(), strict=True)]
    same(args, case.values())  # now it is known what reading them keeps
    before = quiet()["kept"]
    for make in ("forward", "backward"):
        program = pw.program(getattr(case, make)(placed), unroll=0)
        assert program.lower(*args).logical.loops
        same(program(*args), getattr(case, make)(Placed())(*map(jnp.asarray, case.values())))
    same(args, case.values())  # the user keeps them
    quiet(back_to=before)


def test_a_loop_of_which_only_what_it_moves_is_used_has_a_run(add: Any) -> None:
    f = pw.jit(lambda x: x + 1, devices=add(1))

    def turned(x: Any, y: Any, z: Any) -> Any:
        return jax.lax.fori_loop(0, 41, lambda _, c: (c[1], c[0], f(c[2])), (x, y, z))[:2]

    program, args = pw.program(turned, unroll=0), (np.float32(1), np.float32(10), np.float32(100))
    assert program.lower(*args).logical.loops
    same(program(*args), (10, 1))


def test_another_number_of_iterations_in_flight(add: Any, quiet: Any) -> None:
    """Room for what a run receives is kept for each run in flight. Values are right with any number."""
    f, g = (pw.jit(lambda x: x * 0.5 + 1, devices=add(1)) for _ in range(2))
    loop = lambda x: jax.lax.fori_loop(0, 300, lambda _, c: g(f(c)), x)
    kept = quiet()["kept"]
    for options, parallel in (({}, 10), ({"parallel_iterations": 1}, 1), ({"parallel_iterations": 40}, 40)):
        program = pw.program(loop, **options)
        assert composite_of(program.lower(X).bound).parallel == parallel
        same(program(X), 2 * X)
        program.clear_cache()
    quiet(back_to=kept)


def test_iterations_in_flight_where_nothing_moves(add: Any) -> None:
    f, g = (pw.jit(lambda x: x * 0.5 + 1, devices=add(1)) for _ in range(2))
    counted = lambda call: lambda x: jax.lax.fori_loop(0, 300, lambda _, c: call(c), x)
    nested = lambda x: jax.lax.fori_loop(0, 20, lambda _, c: g(counted(f)(c)), x)
    ended = lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 1.9, f, x)
    for loop, parallel in ((counted(f), 64), (counted(lambda c: g(f(c))), 10), (nested, 10), (ended, 10)):
        assert composite_of(pw.program(loop, unroll=0).lower(X).bound).parallel == parallel
    assert composite_of(pw.program(counted(f), parallel_iterations=4).lower(X).bound).parallel == 4
    same(pw.program(counted(f))(X), 2 * X)


def test_what_is_carried_twice_passed_on_kept_or_donated(add: Any, quiet: Any) -> None:
    here, there = add(2), add(1)
    f = pw.jit(lambda w, x: jnp.tanh(x @ w), devices=here, name="f")
    g = pw.jit(lambda w, x: jnp.sin(x @ w) + x, devices=there, name="g")

    def plain(w: Any, v: Any, x: Any, f: Any, g: Any) -> Any:
        turned = jax.lax.fori_loop(0, 23, lambda _, c: (f(w, c[0]), c[2], c[1]), (x, v, w))
        twice = jax.lax.fori_loop(0, 20, lambda _, c: (lambda y: (y, y))(f(w, c[0]) + c[1]), (x, x))
        there_and_back = jax.lax.fori_loop(0, 30, lambda _, c: f(w, g(v, c)), turned[0])
        return turned, twice, there_and_back, there_and_back, x

    args = [pw.device_put(W, here), pw.device_put(V, there), pw.device_put(X, here)]
    expected = plain(W, V, X, lambda w, x: jnp.tanh(x @ w), lambda w, x: jnp.sin(x @ w) + x)
    program = pw.program(lambda w, v, x: plain(w, v, x, f, g))
    same(program(*args), expected)
    before = quiet()["kept"]
    same([program(*args), program(*args)], [expected, expected])
    quiet(back_to=before)
    step = pw.program(lambda x, w: jax.lax.fori_loop(0, 40, lambda _, c: f(w, c), x), donate_argnums=0)
    x = pw.device_put(X, here)
    for _ in range(3):  # each takes what the last one gave
        given, x = x, step(x, args[0])
        assert given.is_deleted()
    want = jnp.asarray(X)
    for _ in range(120):
        want = jnp.tanh(want @ W)
    same(x, want)
    steps = composite_of(step.lower(x, args[0]).bound).steps
    # The counter, which nobody reads, is gone.
    assert [len(each.inputs) for each in steps if each.kind == StepKind.LOOP] == [1]


def test_many_iterations_in_flight_hold_up_no_other_client() -> None:
    """SHARE-1: beside a loop with 64 iterations of 5 ms in flight, another client waits for few of them."""
    with pw.connect(pw.LocalCluster(1, 1, 1)) as cluster, pw.connect(cluster.address) as other:
        ours, theirs = (pw.make_virtual_device_set(each).add_slice(devices=1) for each in (cluster, other))
        step, double = (
            pw.jit(lambda x: stand_in.step(x + 1, 5_000), devices=ours),
            pw.jit(lambda x: x * 2, devices=theirs),
        )
        loop = pw.program(lambda x, n: jax.lax.fori_loop(0, n, lambda _, c: step(c), x), static_argnums=1)
        assert composite_of(loop.lower(X, 10**6).bound).parallel == 64
        same([loop(X, 20), double(X)], [X + 20, X * 2])
        medians = [1.0]
        while medians[-1] >= 0.16:  # half of what the 64 iterations take
            assert len(medians) < 6, medians  # a busy machine is late, but not each time
            endless, waits = loop.with_timeout(3)(X, 10**6), []
            while not endless.is_ready():
                began = time.monotonic()
                same(double(X), X * 2)
                waits.append(time.monotonic() - began)
            with pytest.raises(pw.errors.DeadlineExceededError):
                np.asarray(endless)
            medians.append(statistics.median(waits or medians))
        same(double(X), X * 2)


def test_an_error_in_an_iteration_fails_what_depends_on_it_alone(add: Any, cluster: Any, quiet: Any) -> None:
    if cluster.is_embedded:
        jax.jit(jnp.linalg.cholesky).lower(X)  # registers LAPACK's handlers
    here, there = add(1), add(1)

    def broken(x: Any) -> Any:
        return jax.ffi.ffi_call("lapack_spotrf_ffi", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    bad = pw.jit(lambda i, x: jax.lax.cond(i == 7, broken, lambda x: x + 1, x), devices=here, name="bad")
    good = pw.jit(lambda x: x + 1, devices=there, name="good")
    program = pw.program(lambda x, y: jax.lax.fori_loop(0, 20, lambda i, c: (bad(i, c[0]), good(c[1])), (x, y)))
    for _ in range(2):
        failed, fine = program(X, X)
        with pytest.raises(pw.errors.ComputationError, match="Wrong number of results"):
            np.asarray(failed)
        same(fine, X + 20)
    before = quiet()["kept"]
    failed, fine = program(X, X)
    with pytest.raises(pw.errors.ComputationError):
        np.asarray(failed)
    quiet(back_to=before)


def test_a_deadline_inside_a_loop(add: Any, quiet: Any) -> None:
    f = pw.jit(lambda w, x: jnp.tanh(x @ w), devices=add(1), name="f")
    program = pw.program(lambda x: jax.lax.fori_loop(0, 10**7, lambda _, c: f(W, c), x), name="endless")
    short = pw.program(lambda x: jax.lax.fori_loop(0, 20, lambda _, c: f(W, c), x))
    jax.block_until_ready(short(X))
    pw.cancel(program(X))  # from here on it is compiled
    before = quiet()["kept"]
    late = program.with_timeout(0.1)(X)
    behind = short(X)  # the client's later runs wait for the loop's end
    with pytest.raises(pw.errors.DeadlineExceededError, match="'endless'"):
        np.asarray(late)
    assert np.isfinite(np.asarray(behind)).all()
    del late, behind
    quiet(back_to=before)


@pytest.mark.slow
def test_a_host_is_killed_and_another_client_runs_between() -> None:
    with pw.connect(pw.LocalCluster(2, 1, 1)) as cluster:
        devices = pw.make_virtual_device_set(cluster)
        here, there = (devices.add_slice(shape=(1,), axis_names=("x",), island=n) for n in (0, 1))
        f = pw.jit(lambda w, x: jnp.tanh(x @ w), devices=here, name="f")
        g = pw.jit(lambda w, x: jnp.sin(x @ w) + x, devices=there, name="g")
        program = pw.program(lambda x: jax.lax.fori_loop(0, 10**6, lambda _, c: f(W, g(V, c)), x))
        alone = pw.program(lambda x: jax.lax.fori_loop(0, 50, lambda _, c: f(W, c), x))
        expected = np.asarray(alone(X))
        endless = program(X)
        with pw.connect(cluster.address) as other:
            theirs = pw.make_virtual_device_set(other).add_slice(shape=(1,), axis_names=("x",), island=0)
            double = pw.jit(lambda x: x * 2, devices=theirs)
            for _ in range(20):  # between the iterations
                same(double(X), X * 2)
        assert not endless.is_ready()
        os.kill(cluster.stats()["hosts"][1]["pid"], signal.SIGKILL)
        with pytest.raises(pw.errors.HostLostError):
            np.asarray(endless)
        same(alone(X), expected)  # on the other island
