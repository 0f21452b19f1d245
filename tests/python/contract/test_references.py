"""References to mutable arrays (`jax.new_ref`): what programs read and write, against the same under `jax.jit`.

Map: EFF-1 (no write is lost), ORD-1 (runs in flight write one after the other), MEM-4 (what somebody has read stays),
ERR-1 (a run that failed).
"""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P
from reference_cases import CASES, ONES, X

import pathways as pw
from pathways import errors


def same(got: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


@pytest.fixture
def here(add: Any) -> Any:
    return add(2)


@pytest.fixture
def there(add: Any) -> Any:
    return add(2)


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
    double = pw.jit(lambda: r.__setitem__(..., r[...] * 2), devices=here)
    add_one = pw.jit(lambda: r.addupdate(ONES), devices=here)
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
    forward = jax.custom_jvp(lambda v: (r.addupdate(v), v)[1])
    forward.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    with pytest.raises(errors.EffectError, match="custom_jvp_call"):  # as jax.jit
        pw.program(forward)(X)
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


def test_a_host_function_must_not_have_one_inside(here: Any) -> None:
    r = jax.new_ref(jnp.zeros(4))
    kind = jax.ShapeDtypeStruct((4,), np.float32)
    step = pw.jit(lambda v: pw.host_callback(lambda v: v + np.asarray(r[...]), kind, v), devices=here)
    with pytest.raises(errors.ProgramError, match=r"a reference \(jax.new_ref\) inside"):
        step(X)


def test_references_made_of_arrays_of_a_slice_and_copies(here: Any) -> None:
    x = pw.device_put(X, here)
    r = jax.new_ref(x)
    assert type(r[...]) is pw.Array
    f = pw.jit(lambda r: r.addupdate(ONES), devices=here)
    other = copy.deepcopy(r)
    f(r)
    r[0] = 7.0
    f(r)
    another = pickle.loads(pickle.dumps(r))
    f(another)
    same(x, X)
    same(other[...], X)
    same(r[...], [8, 3, 4, 5])
    same(another[...], [9, 4, 5, 6])


def test_what_was_compiled_for_a_reference(here: Any) -> None:
    r, f = jax.new_ref(jnp.zeros(4)), pw.jit(lambda r, v: r.__setitem__(..., v[...] * 2), devices=here)
    compiled = f.lower(r, X).compile()
    compiled(r, X)
    same(r[...], X * 2)
    assert f.eval_shape(r, X) is None
    with pytest.raises(errors.ProgramError, match=r"argument r: compiled for a reference"):
        compiled(X, X)
    with pytest.raises(errors.ProgramError, match=r"argument v: compiled for an array, got Ref"):
        compiled(r, jax.new_ref(jnp.ones(4)))


def test_beside_a_variable(here: Any) -> None:
    r, v = jax.new_ref(jnp.zeros(4)), pw.Variable(ONES, here, name="v")
    seen: list[Any] = []
    double = pw.jit(lambda x: (r.addupdate(x), x * 2)[1], devices=here)

    def step(act: Any) -> Any:
        def body() -> Any:
            v.value = double(v.value)
            act(v.value)
            return v.value.sum()

        return pw.program(body)

    f = step(lambda x: jax.debug.callback(lambda each: seen.append(np.asarray(each)), x))
    same(f(), 8)
    same(f(), 16)
    jax.effects_barrier()
    same(seen, [ONES * 2, ONES * 4])
    with pytest.raises(errors.EffectError, match="ErrorEffect"):
        step(lambda x: checkify.check(x.sum() > 0, "too small"))()
    same(r[...], ONES * 3)
    same(v.value, ONES * 4)


def test_two_programs_by_several_threads(here: Any) -> None:
    """ORD-1."""
    r = jax.new_ref(jnp.zeros(4))
    f = pw.jit(lambda: r.addupdate(ONES), devices=here)
    g = pw.jit(lambda v: r.__setitem__(..., r[...] + v), devices=here)

    def work() -> None:
        for _ in range(10):
            f()
            r[...].block_until_ready()
            g(ONES)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(r[...], ONES * 60)


def test_a_slice_that_gets_another_shape(add: Any) -> None:
    here = add(2)
    r = jax.new_ref(jnp.zeros(4))
    f = pw.jit(lambda v: r.addupdate(v), devices=here, in_shardings=P("x"))
    f(X)
    here.resize((1,))
    f(X)
    same(r[...], X * 2)
