"""Callbacks and host functions in loops that the controller orders, and in branches: they are called as often, in the
order and with the values that plain JAX calls them with.

No iteration's calls are dropped, and none is made for an iteration or a case that is not taken.
ERR-1: a call that fails fails what depends on it, by name, and nothing else. CTL-1: no call decides for a host.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import pathways as pw
from pathways import errors

SCALAR = jax.ShapeDtypeStruct((), np.float32)
TURNS = 20
LONG = 1000

Seen = list[tuple[str, float]]


class Calls:
    """What was called, and the calls of each kind."""

    def __init__(self) -> None:
        self.seen: Seen = []

    def record(self, name: str, v: Any) -> np.ndarray:
        self.seen.append((name, float(v)))
        return np.asarray(v)

    def kinds(self) -> dict[str, Callable[[str, Any], Any]]:
        """By name, a function of a name and a value, which gives a value."""

        def pure(name: str, x: Any) -> Any:
            return jax.pure_callback(lambda v: self.record(name, v), SCALAR, x)

        def effect(call: Callable[..., Any]) -> Callable[[str, Any], Any]:
            def make(name: str, x: Any) -> Any:
                call(lambda v: (self.record(name, v), None)[1], x)
                return x

            return make

        return {
            "pure": pure,
            "debug": effect(jax.debug.callback),
            "debug_ordered": effect(lambda f, x: jax.debug.callback(f, x, ordered=True)),
            "io": effect(lambda f, x: io_callback(f, None, x)),
            "io_ordered": effect(lambda f, x: io_callback(f, None, x, ordered=True)),
        }


def fori(call: Any, f: Any, g: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, TURNS, lambda i, x: g(call("a", f(x))), x)


def scan(call: Any, f: Any, g: Any, x: Any) -> Any:
    def turn(x: Any, row: Any) -> Any:
        x = call("a", f(x))
        return g(x), call("b", x + row)

    x, rows = jax.lax.scan(turn, x, jnp.arange(float(TURNS)))
    return x + rows.sum()


def until(call: Any, f: Any, g: Any, x: Any) -> Any:
    """A loop that the data ends: iterations are ordered ahead."""
    return call("end", jax.lax.while_loop(lambda x: x < TURNS, lambda x: g(call("a", f(x))), x))


def in_the_test(call: Any, f: Any, g: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda x: call("test", x) < TURNS, lambda x: g(f(x)), x)


def bounded(call: Any, f: Any, g: Any, x: Any) -> Any:
    return pw.while_loop(lambda x: x < TURNS, lambda x: g(call("a", f(x))), x, max_iterations=2 * TURNS)


def nested(call: Any, f: Any, g: Any, x: Any) -> Any:
    def turn(i: Any, x: Any) -> Any:
        x = jax.lax.fori_loop(0, TURNS, lambda j, x: call("inner", f(x)), x)
        return call("outer", g(x))

    return jax.lax.fori_loop(0, TURNS, turn, x)


def in_branches(call: Any, f: Any, g: Any, x: Any) -> Any:
    def turn(i: Any, x: Any) -> Any:
        return jax.lax.cond(x % 3 == 1, lambda x: call("odd", f(x)), lambda x: g(f(x)), x)

    return jax.lax.fori_loop(0, TURNS, turn, x)


def branch(call: Any, f: Any, g: Any, x: Any) -> Any:
    cases = [lambda x: call("first", f(x)), lambda x: g(x), lambda x: call("last", f(f(x)))]
    for n in (0, 1, 2):
        x = jax.lax.switch(jnp.int32(x) * 0 + n, cases, x)
    return x


def loop_in_branch(call: Any, f: Any, g: Any, x: Any) -> Any:
    def loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, TURNS, lambda i, x: call("a", f(x)), x)

    x = jax.lax.cond(x < 5, loop, lambda x: call("not", g(x)), x)
    return jax.lax.cond(x < 5, lambda x: call("not", g(x)), loop, x)


PROGRAMS = (fori, scan, until, in_the_test, bounded, nested, in_branches, branch, loop_in_branch)


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("kind", list(Calls().kinds()))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_every_kind_in_every_construct_is_called_as_plain_jax_calls_it(add: Any, kind: str, program: Any) -> None:
    """Outside of the placed functions, and inside of one."""
    calls = Calls()
    here, there = add(1), add(1)
    call = calls.kinds()[kind]
    want = float(jax.jit(lambda x: program(call, lambda x: x + 1, lambda x: x * 1, x))(np.float32(0)))
    jax.effects_barrier()
    expected, calls.seen = calls.seen, []
    f, g = pw.jit(lambda x: x + 1, devices=here), pw.jit(lambda x: x * 1, devices=there)
    inside = {name: pw.jit(lambda x, name=name: call(name, x), devices=there) for name, _ in expected}
    for how in (call, lambda name, x: inside[name](x) if name in inside else x):
        run = pw.program(lambda x, how=how: program(how, f, g, x))
        for _ in range(2):
            assert float(run(np.float32(0))) == want
            jax.effects_barrier()
            if "ordered" in kind:
                assert calls.seen == expected
            assert sorted(calls.seen) == sorted(expected)
            calls.seen = []


def test_prints_of_a_loop_come_in_its_order(add: Any, capfd: Any) -> None:
    f, g = (pw.jit(lambda x: x + 1, devices=add(1)) for _ in range(2))

    def turn(i: Any, x: Any) -> Any:
        x = g(f(x))
        jax.debug.print("turn {i}: x is {x}", i=i, x=x)
        return x

    pw.program(lambda x: jax.lax.fori_loop(0, 40, turn, x))(np.float32(0))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == [f"turn {n}: x is {2.0 * (n + 1)}" for n in range(40)]


def test_an_ordered_call_of_a_thousand_iterations_comes_once_each(add: Any) -> None:
    """And the program behind the loop comes behind it, wherever it runs."""
    here, there = add(1), add(1)
    calls = Calls()
    f = pw.jit(lambda x: x + 1, devices=here)

    def turn(i: Any, x: Any) -> Any:
        x = f(x)
        io_callback(lambda v: (calls.record("turn", v), None)[1], None, x, ordered=True)
        return x

    loop = pw.program(lambda x: jax.lax.fori_loop(0, LONG, turn, x))
    after = pw.jit(
        lambda x: io_callback(lambda v: (calls.record("after", v), None)[1], None, x, ordered=True), devices=there
    )
    x = loop(np.float32(0))
    after(np.float32(7))
    jax.effects_barrier()
    assert float(x) == LONG
    assert calls.seen == [*(("turn", float(n)) for n in range(1, LONG + 1)), ("after", 7.0)]


def test_host_functions_in_loops(add: Any) -> None:
    """Reinforcement learning: the environment is on one slice, what learns on another."""
    act = pw.jit(lambda w: pw.host_callback(lambda w: np.float32(w.sum() + 1), SCALAR, w), devices=add(1))
    learn = pw.jit(lambda w, seen: w - 0.1 * seen, devices=add(1))
    start = np.ones(4, np.float32)

    def turn(w: Any) -> Any:
        return learn(w, act(w))

    want = start
    for _ in range(50):
        want = want - np.float32(0.1) * np.float32(want.sum() + 1)
    counted = pw.program(lambda w: jax.lax.fori_loop(0, 50, lambda _, w: turn(w), w))
    np.testing.assert_allclose(np.asarray(counted(start)), want, atol=1e-5)
    decided = pw.program(lambda w: jax.lax.while_loop(lambda s: s[0] < 50, lambda s: (s[0] + 1, turn(s[1])), (0, w))[1])
    np.testing.assert_allclose(np.asarray(decided(start)), want, atol=1e-5)


def test_gradients_of_a_loop_with_callbacks(add: Any) -> None:
    @jax.custom_vjp
    def sine(x: Any) -> Any:
        return jax.pure_callback(lambda v: np.sin(v, dtype=np.float32), SCALAR, x)

    sine.defvjp(lambda x: (sine(x), x), lambda x, g: (g * jax.pure_callback(np.cos, SCALAR, x),))
    f, g = pw.jit(lambda x: sine(x) + 0.5 * x, devices=add(1)), pw.jit(lambda x: x * 1.5, devices=add(1))

    def loop(f: Any, g: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (g(f(x)), x), x, None, length=TURNS)[1].sum()

    def bounded(f: Any, g: Any, x: Any) -> Any:
        state = pw.while_loop(lambda s: s[0] < TURNS, lambda s: (s[0] + 1, g(f(s[1]))), (0, x), max_iterations=30)
        return state[1]

    for each in (loop, bounded):
        want = jax.value_and_grad(lambda x, e=each: e(lambda x: jnp.sin(x) + 0.5 * x, lambda x: x * 1.5, x))(0.3)
        got = pw.program(jax.value_and_grad(lambda x, e=each: e(f, g, x)))(np.float32(0.3))
        np.testing.assert_allclose(np.asarray(got[0]), want[0], 1e-4)
        np.testing.assert_allclose(np.asarray(got[1]), want[1], 1e-3)


@pytest.mark.parametrize("size", (1, 2, 4))
def test_a_call_that_fails_in_the_middle_fails_what_depends_on_it(add: Any, size: int) -> None:
    """On several hosts, too, an iteration behind it calls nobody: its inputs are stand-ins."""
    where, there = add(size), add(1)
    calls = Calls()

    def picky(v: Any) -> Any:
        calls.record("call", v)
        if v == 25:
            raise ValueError("twenty-five is too much")
        return np.asarray(v)

    asks = pw.jit(lambda x: jax.pure_callback(picky, SCALAR, x) + 1, devices=where)
    counts = pw.jit(lambda n: n + 1, devices=there)

    def turn(_: Any, state: Any) -> Any:
        return asks(state[0]), counts(state[1])

    run = pw.program(lambda x, n: jax.lax.fori_loop(0, 60, turn, (x, n)))
    bad, count = run(np.float32(0), np.int32(0))
    with pytest.raises(errors.CallbackFailedError, match=r"pure_callback.*picky.*ValueError: twenty-five is too much"):
        np.asarray(bad)
    assert int(count) == 60
    assert calls.seen == [("call", float(n)) for n in range(26)]
    good, count = run(np.float32(26), np.int32(0))
    assert float(good) == 86 and int(count) == 60


@pytest.mark.parametrize("ordered", [False, True])
def test_a_print_that_fails_in_the_middle_is_told_by_the_barrier(add: Any, ordered: bool) -> None:
    calls = Calls()

    def picky(v: Any) -> None:
        if v == 25:
            raise ValueError("twenty-five is too much")
        calls.record("call", v)

    f, g = (pw.jit(lambda x: x + 1, devices=add(1)) for _ in range(2))

    def turn(_: Any, x: Any) -> Any:
        x = f(x)
        jax.debug.callback(picky, x, ordered=ordered)
        return x

    _, y = pw.program(lambda x: (jax.lax.fori_loop(0, 60, turn, x), g(x)))(np.float32(0))
    with pytest.raises(errors.CallbackFailedError, match=r"picky.*ValueError: twenty-five is too much"):
        jax.effects_barrier()
    assert float(y) == 1
    assert calls.seen == [("call", float(n)) for n in range(1, 25)]
    pw.program(lambda x: jax.lax.fori_loop(0, 60, turn, x))(np.float32(30))
    jax.effects_barrier()
    assert len(calls.seen) == 24 + 60


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("loop", ["counted", "decided"])
def test_a_loop_that_is_dropped_calls_nobody_any_more(add: Any, quiet: Callable[..., Any], how: str, loop: str) -> None:
    calls = Calls()

    def slow(v: Any) -> Any:
        time.sleep(0.01)
        return calls.record("call", v)

    f, g = pw.jit(lambda x: x + 1, devices=add(1)), pw.jit(lambda x: x * 1, devices=add(1))

    def turn(x: Any) -> Any:
        return g(jax.pure_callback(slow, SCALAR, f(x)))

    def fun(x: Any) -> Any:
        if loop == "counted":
            return jax.lax.fori_loop(0, LONG, lambda _, x: turn(x), x)
        return jax.lax.while_loop(lambda x: x < LONG, turn, x)

    run = pw.program(fun)
    y: Any = None
    while y is None:
        with contextlib.suppress(errors.DeadlineExceededError):  # its hosts may compile for longer than that
            y = (run.with_timeout(0.5) if how == "deadline" else run)(np.float32(0))
    failures: list[Exception] = []

    def read() -> None:  # on an embedded cluster, who waits does the work
        try:
            np.asarray(y)
        except errors.PathwaysError as failure:
            failures.append(failure)

    reader = threading.Thread(target=read)
    reader.start()
    while how == "cancel" and len(calls.seen) < 5:
        time.sleep(0.01)
    if how == "cancel":
        pw.cancel(y)
    reader.join(60)
    assert isinstance(failures[0], errors.CancelledError if how == "cancel" else errors.DeadlineExceededError)
    quiet()  # runs that hosts have been granted finish
    last = len(calls.seen)
    assert last < LONG / 2
    time.sleep(0.2)
    assert len(calls.seen) == last
    assert float(run(np.float32(LONG - 3))) >= LONG


def test_everything_of_a_loop_comes_back(add: Any, cluster: Any, quiet: Callable[..., dict[str, Any]]) -> None:
    f = pw.jit(lambda x: x + 1, devices=add(1))

    def turn(_: Any, x: Any) -> Any:
        x = f(x)
        io_callback(lambda v: None, None, x, ordered=True)
        jax.debug.callback(lambda v: None, x)
        return x

    run = pw.program(lambda x: jax.lax.fori_loop(0, 40, turn, x))

    def runs() -> None:
        for _ in range(5):
            run(np.float32(0))
        jax.effects_barrier()

    runs()
    before = quiet()["kept"]
    for _ in range(3):
        runs()
    quiet(back_to=before)
