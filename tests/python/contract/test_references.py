"""References to mutable arrays (`jax.new_ref`): what programs read and write, against the same under `jax.jit`.

Map: EFF-1 (no write is lost), ORD-1 (runs in flight write one after the other), MEM-4 (what somebody has read stays),
ERR-1 (a run that failed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways import errors

X = np.arange(4, dtype=np.float32)
ONES = np.ones(4, np.float32)

Make = Callable[[Callable[..., Any]], Any]


def same(got: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


@pytest.fixture
def here(add: Any) -> Any:
    return add(2)


@pytest.fixture
def there(add: Any) -> Any:
    return add(2)


def writes_and_ignores(first: Make, second: Make, program: Make) -> list[Any]:
    seen = jax.new_ref(jnp.zeros(4))

    def step(v: Any) -> Any:
        seen[...] += v  # the result does not depend on it
        return v

    f = program(first(step))
    return [f(X), f(X), seen[...]]


def makes_and_freezes(first: Make, second: Make, program: Make) -> list[Any]:
    def step(v: Any) -> Any:
        r = jax.new_ref(jnp.zeros_like(v))

        def body(c: Any, i: Any) -> Any:
            r[i] = 2.0 * v[i]
            return c + r[i], None

        total, _ = jax.lax.scan(body, 0.0, jnp.arange(4))
        return jax.freeze(r), total

    return list(program(first(step))(X))


def takes(first: Make, second: Make, program: Make) -> list[Any]:
    a, b = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.ones(4))

    def step(a: Any, v: Any, *, b: Any) -> Any:
        a[1:3] += v[1:3] * b[...][0]
        return a[...].sum()

    f = program(first(step))
    return [f(a, X, b=b), f(a, X, b=b), a[...], f(b, X, b=a), b[...]]


def makes_outside_of_a_placed_function(first: Make, second: Make, program: Make) -> list[Any]:
    put, get = first(lambda r, v: r.addupdate(v)), second(lambda r: r[...] * 2)

    def step(v: Any) -> Any:
        r = jax.new_ref(v)
        put(r, v)
        half = get(r)
        put(r, v)
        return half, r[...]

    return list(program(step)(X))


def goes_between_slices(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(jnp.zeros(4))
    one, two = first(lambda v: r[...] + v), second(lambda v: r.__setitem__(..., v * 2))

    def step(v: Any) -> Any:
        two(one(v))
        return one(v)

    f = program(step)
    return [f(X), r[...], f(X), r[...], f(X)]


def scans(length: int) -> Callable[[Make, Make, Make], list[Any]]:
    def case(first: Make, second: Make, program: Make) -> list[Any]:
        total, count = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.int32(0))
        one = first(lambda v: total.__setitem__(..., total[...] + v))
        two = second(lambda v: v * total[...])

        def step(rows: Any) -> Any:
            def body(c: Any, row: Any) -> Any:
                one(row)
                count[...] += 1
                return c + two(row), c

            return jax.lax.scan(body, jnp.zeros(4), rows)

        rows = np.arange(4 * length, dtype=np.float32).reshape(length, 4) % 5
        return [*program(step)(rows), total[...], count[...]]

    return case


def whiles(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(jnp.zeros(4))
    one = first(lambda v: r.__setitem__(..., r[...] + v))

    def step(v: Any) -> Any:
        return jax.lax.while_loop(lambda i: i < 5, lambda i: (one(v), i + 1)[1], 0)

    return [program(step)(X), r[...]]


def branches(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(jnp.zeros(4))
    one, two = first(lambda v: r.__setitem__(..., r[...] + v)), first(lambda v: r.__setitem__(..., r[...] * v))

    def step(which: Any, v: Any) -> Any:
        return jax.lax.switch(which, [lambda: (one(v), 0)[1], lambda: (two(v), 1)[1], lambda: 2])

    f = program(step)
    out = []
    for which in (0, 1, 2, 1):
        out += [f(np.int32(which), X), r[...]]
    return out


def differentiates(first: Make, second: Make, program: Make) -> list[Any]:
    count, rows = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros(4))

    def inner(w: Any) -> Any:
        count[...] += 1
        rows[...] = jax.lax.stop_gradient(w) * 3
        return w * w

    squares = first(inner)

    def step(w: Any) -> Any:
        return jax.value_and_grad(lambda w: second(jnp.sum)(jax.checkpoint(squares)(w)))(w)

    return [*jax.tree.leaves(program(step)(X)), rows[...]]


def sums_gradients_in_a_reference(first: Make, second: Make, program: Make) -> list[Any]:
    sums = jax.new_ref(jnp.zeros(4))
    loss = first(lambda w, v: ((w * v) ** 2).sum())

    def step(w: Any, rows: Any) -> Any:
        def body(_: Any, row: Any) -> Any:
            value, grad = jax.value_and_grad(loss)(w, row)
            sums[...] += grad
            return None, value

        _, values = jax.lax.scan(body, None, rows)
        new = w - 0.1 * sums[...]
        sums[...] = jnp.zeros(4)
        return new, values

    f = program(step)
    rows = np.stack([X, ONES, X + 1])
    w, values = f(ONES, rows)
    return [w, values, sums[...], *f(w, rows)]


def has_a_custom_rule(first: Make, second: Make, program: Make) -> list[Any]:
    seen = jax.new_ref(jnp.zeros(4))

    @jax.custom_vjp
    def marked(v: Any) -> Any:
        return v * 2

    def backward(_: Any, cotangent: Any) -> Any:
        seen[...] = cotangent  # the cotangent, on the side
        return (cotangent * 2,)

    marked.defvjp(lambda v: (v * 2, None), backward)
    loss = first(lambda v: (marked(v) * 3).sum())
    return [program(jax.grad(loss))(X), seen[...]]


def batches(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(jnp.zeros((3, 4)))
    add_to = first(lambda r, v: r.addupdate(v))
    f = program(lambda r, v: jax.vmap(add_to)(r, v))
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    f(r, rows)
    f(r, rows)
    return [r[...]]


def draws_numbers(first: Make, second: Make, program: Make) -> list[Any]:
    key = jax.new_ref(jax.random.key(7))

    def step() -> Any:
        key[...], now = jax.random.split(key[...])
        return jax.random.uniform(now, (3,))

    f = program(first(step))
    return [f(), f(), f(), jax.random.key_data(key[...])]


def has_a_number(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(0.0)
    f = program(first(lambda: r.__setitem__(..., r[...] + 1)))
    for _ in range(3):
        f()
    return [r[...]]


def is_used_in_this_process(first: Make, second: Make, program: Make) -> list[Any]:
    r = jax.new_ref(jnp.zeros(4))
    f = program(first(lambda v: r.addupdate(v)))
    out = []
    f(X)
    out += [r[...], r[1:3], r[jnp.array([0, 3])]]
    r[1] = 5.0  # a part of it
    f(X)
    out.append(r[...])
    r[...] = np.ones(4, np.float32)  # all of it
    f(X)
    r[...] += 1.0
    f(X)
    r.addupdate(jnp.ones(4))
    out.append(jax.jit(lambda: r[...] * 2)())
    jax.jit(lambda: r.__setitem__(0, 40.0))()
    f(X)
    out.append(jax.freeze(r))
    return out


CASES = {
    case.__name__: case
    for case in (
        writes_and_ignores,
        makes_and_freezes,
        takes,
        makes_outside_of_a_placed_function,
        goes_between_slices,
        whiles,
        branches,
        differentiates,
        sums_gradients_in_a_reference,
        has_a_custom_rule,
        batches,
        draws_numbers,
        has_a_number,
        is_used_in_this_process,
    )
} | {"short scan": scans(3), "long scan": scans(20)}


@pytest.mark.parametrize("case", CASES)
def test_as_under_jit(case: str, here: Any, there: Any) -> None:
    first, second = (lambda f: pw.jit(f, devices=here)), (lambda f: pw.jit(f, devices=there))
    wanted = CASES[case](jax.jit, jax.jit, jax.jit)
    for program in (pw.program, lambda f: pw.program(jax.jit(f))):
        for got, value in zip(CASES[case](first, second, program), wanted, strict=True):
            same(got, value)


def test_runs_in_flight_write_one_after_the_other(here: Any, there: Any) -> None:
    """ORD-1. What somebody has read between them stays (MEM-4)."""
    r = jax.new_ref(jnp.ones(4))
    double, add_one = (
        pw.jit(lambda: r.__setitem__(..., r[...] * 2), devices=here),
        pw.jit(lambda: r.addupdate(ONES), devices=here),
    )
    elsewhere = pw.jit(lambda: r.__setitem__(..., r[...] * 3), devices=there)
    kept, wanted, value = [], [], ONES
    for _ in range(5):
        double()
        add_one()
        kept.append(r[...])
        elsewhere()
        wanted.append(value * 2 + 1)
        value = wanted[-1] * 3
    same(np.asarray(kept), wanted)
    same(r[...], value)
    assert "donating" in str(double.lower().as_text("plan"))


def test_the_value_stays_on_its_slice(here: Any) -> None:
    r = jax.new_ref(jnp.zeros(4))
    f = pw.jit(lambda r, v: r.__setitem__(..., r[...] + v), devices=here, in_shardings=P("x"))
    for _ in range(3):
        f(r, ONES)
    got = r[...]
    assert type(got) is pw.Array and got.slice is here and got.sharding.spec == P("x")
    assert len(f._compiled) == 1
    same(r[1:3], ONES[1:3] * 3)
    assert type(r[...]) is pw.Array, "a part was read"
    assert len(r.sharding.device_set) == 1, "JAX asked for it, so it is in this process"
    f(r, ONES)
    same(r[...], ONES * 4)
    r[...] = r[...] * 2
    assert type(r[...]) is pw.Array, "the whole was replaced there"
    f(r, ONES)
    same(r[...], ONES * 9)


def test_calls_that_differ_in_their_references(here: Any) -> None:
    f = pw.jit(lambda r: r[...] * 2, devices=here)
    r = jax.new_ref(jnp.ones(4))
    for value in (r, X, jax.new_ref(jnp.ones(3)), jax.new_ref(jnp.ones(4, jnp.int32)), np.ones(4, np.int32), r, ONES):
        got, wanted = f(value), np.asarray(value[...]) * 2
        same(got, wanted)
        assert got.dtype == wanted.dtype


def test_a_run_that_fails(here: Any) -> None:
    """ERR-1: the reference has the run's error, until all of it is written."""
    r, other = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.zeros(4))

    def fails(v: Any) -> Any:
        raise ValueError("no answer")

    def step(v: Any) -> None:
        r[...] += jax.pure_callback(fails, jax.ShapeDtypeStruct(v.shape, v.dtype), v)

    pw.jit(lambda: other.__setitem__(..., r[...] + 1), devices=here)()
    pw.jit(step, devices=here)(X)
    with pytest.raises(errors.CallbackFailedError, match="no answer"):
        np.asarray(r[...])
    with pytest.raises(errors.CallbackFailedError, match="no answer"):
        r[0] = 1.0
    same(other[...], ONES)
    r[...] = X
    pw.jit(lambda: r.addupdate(ONES), devices=here)()
    same(r[...], X + 1)


def test_a_call_that_is_refused_changes_nothing(here: Any) -> None:
    r = jax.new_ref(jnp.zeros(4))
    twice = pw.jit(lambda a, b: a.__setitem__(..., b[...] + 1), devices=here)
    closed = pw.jit(lambda a: a.__setitem__(..., r[...] + 1), devices=here)
    for call in (lambda: twice(r, r), lambda: closed(r)):
        with pytest.raises(errors.EffectError, match=r"one reference .* twice"):
            call()
    with pytest.raises(ValueError, match="reference"):  # as jax.jit
        jax.jit(lambda a, b: None)(r, r)
    for result in (lambda: r, lambda: jax.new_ref(X)):
        with pytest.raises(ValueError, match="returned a mutable array reference"):
            pw.jit(result, devices=here)()
    with pytest.raises(errors.EffectError, match="freeze"):
        pw.program(lambda: jax.freeze(r))()
    with pytest.raises(errors.ProgramError, match="put its value"):
        pw.device_put(r, here)
    with pytest.raises(errors.ProgramError, match="put the value"):
        pw.program(lambda v: pw.device_put(jax.new_ref(v), here))(X)
    same(r[...], np.zeros(4))


def test_the_bounded_loop(here: Any) -> None:
    r = jax.new_ref(jnp.zeros(4))
    add_to = pw.jit(lambda v: r.addupdate(v), devices=here)

    def loop(v: Any) -> Any:
        def body(c: Any) -> Any:
            add_to(v)
            return c + v.sum()

        return pw.while_loop(lambda c: c < 20, body, 0.0, max_iterations=9)

    same(pw.program(loop)(X), 24.0)
    same(r[...], X * 4)
    with pytest.raises(errors.EffectError, match=r"a derivative of pw\.while_loop uses a reference"):
        pw.program(jax.grad(loop))(X)
    with pytest.raises(errors.EffectError, match=r"the test of pw\.while_loop reads one"):
        pw.program(lambda c: pw.while_loop(lambda c: c < r[...].sum(), lambda c: c + 1, c, max_iterations=9))(0.0)
    same(r[...], X * 4)


def test_beside_an_exchange_and_in_a_mixture(here: Any, there: Any) -> None:
    r = jax.new_ref(jnp.zeros(4))
    sends = pw.jit(lambda v: (r.addupdate(v), v)[1], devices=here)

    @pw.program
    def step(v: Any) -> Any:
        sent = pw.exchange(sends(v), jnp.zeros(4, jnp.int32), to=there, capacity=8)
        return pw.jit(lambda rows: rows.sum(), devices=there)(sent.rows)

    same(step(X), X.sum())
    same(r[...], X)

    def expert(params: Any, rows: Any) -> Any:
        sums = jax.new_ref(jnp.zeros_like(rows))
        sums[...] = rows @ params
        if params.shape[0] == 3:
            r[...] += 1
        return sums[...]

    def mixture(features: int) -> Any:
        gate = pw.nn.TopKGate(experts=2, k=2, features=features)
        mixed = pw.nn.MixtureOfExperts(expert, gate, home=here, slices=[there], capacity=16, block=2)
        params = mixed.init(jax.random.key(0), lambda key: jnp.eye(features))
        rows = np.ones((8, features), np.float32)
        return pw.program(mixed)(params, rows).results, rows

    same(*mixture(4))
    with pytest.raises(errors.EffectError, match="an expert of a mixture uses a reference"):
        mixture(3)


@pytest.mark.parametrize("schedule", ["none", "1F1B", "ZeroBubbleH1"])
def test_in_the_stages_of_a_pipeline(here: Any, there: Any, schedule: str) -> None:
    calls, sums = [jax.new_ref(jnp.zeros(())) for _ in range(2)], jax.new_ref(jnp.zeros(4))

    def stage(number: int) -> Any:
        def run(w: Any, v: Any) -> Any:
            calls[number][...] += 1
            if number == 0:
                sums[...] += jax.lax.stop_gradient(v).sum(0)
            return jnp.tanh(v @ w)

        return pw.jit(run, devices=(here, there)[number], name=f"stage{number}")

    model = pw.pipeline([stage(0), stage(1)], microbatches=4, schedule=schedule, loss=lambda out: (out**2).mean())
    weights = [np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32) / 2]
    rows = np.arange(32, dtype=np.float32).reshape(8, 4) / 32

    def plain(weights: Any) -> Any:
        return (jnp.tanh(jnp.tanh(rows @ weights[0]) @ weights[1]) ** 2).mean()

    f = pw.program(jax.value_and_grad(model))
    for n in range(1, 3):
        value, grads = f(weights, rows)
        wanted = jax.value_and_grad(plain)(weights)
        for got, each in zip([value, *grads], jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(np.asarray(got), each, rtol=1e-5)
        same([each[...] for each in calls], [4 * n, 4 * n])
        np.testing.assert_allclose(np.asarray(sums[...]), rows.sum(0) * n, rtol=1e-6)


def test_a_derivative_outside_of_a_program(here: Any) -> None:
    count = jax.new_ref(jnp.zeros(()))

    def square(w: Any) -> Any:
        count[...] += 1
        return (w**2).sum()

    same(jax.grad(pw.jit(square, devices=here))(X), 2 * X)
    same(count[...], 1)
    with jax.disable_jit():
        pw.jit(square, devices=here)(X)
    same(count[...], 2)


def test_a_host_function_and_a_callback_read_and_write(here: Any) -> None:
    r = jax.new_ref(jnp.zeros(4))
    kind = jax.ShapeDtypeStruct((4,), np.float32)

    @pw.jit(devices=here)
    def step(v: Any) -> Any:
        r[...] += pw.host_callback(lambda v: v * 2, kind, v)
        jax.debug.callback(lambda v: None, r[...])
        return v

    step(X)
    step(X)
    same(r[...], X * 4)
    seen: list[Any] = []
    pw.jit(lambda v: jax.debug.callback(lambda _: seen.append(np.asarray(r[...])), v), devices=here)(X)
    jax.effects_barrier()
    same(seen[0], X * 4)


def test_a_slice_that_gets_another_shape(add: Any) -> None:
    here = add(2)
    r = jax.new_ref(jnp.zeros(4))
    f = pw.jit(lambda v: r.addupdate(v), devices=here, in_shardings=P("x"))
    f(X)
    here.resize((1,))
    f(X)
    same(r[...], X * 2)
