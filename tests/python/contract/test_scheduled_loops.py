"""Pipelines with a schedule in loops and branches that stay loops and branches (SCHED-1): values and order.

Map: every schedule in a scan; kinds of loops and branches; `jax.grad` around the loop; loops of the user's own; several
pipelines; state; what is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_cases import expected

import pathways as pw
from pathways import errors

RNG = np.random.default_rng(11)
ROWS, SIZE, STEPS = 8, 4, 3
SCHEDULES = ["none", "GPipe", "1F1B", "ZeroBubbleH1", "Interleaved1F1B", "Circular", "auto"]


def normal(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 0.7).astype(np.float32)


WEIGHTS = [normal(SIZE, SIZE) for _ in range(4)]
XS, TS = normal(STEPS, ROWS, SIZE), normal(STEPS, ROWS, SIZE)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def mse(y: Any, t: Any) -> Any:
    return jnp.mean((y - t) ** 2)


def plain(ws: Any, x: Any, t: Any) -> Any:
    for w in ws:
        x = layer(w, x)
    return mse(x, t)


def model_on(slices: Sequence[Any], schedule: Any, stages: int = 2, microbatches: int = 4) -> Any:
    """A pipeline of stages on the slices in turn."""
    functions = [pw.jit(layer, devices=slices[n % len(slices)], name=f"f{n}") for n in range(stages)]
    return pw.pipeline(functions, microbatches=microbatches, schedule=schedule, loss=mse)


def step_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """One training step: the body of a scan."""

    def step(ws: Any, row: Any) -> Any:
        loss, grads = jax.value_and_grad(model)(ws, *row)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), loss

    return step


def epoch_of(model: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ws, xs, ts: jax.lax.scan(step_of(model), ws, (xs, ts))


def looped(fun: Callable[..., Any], **options: Any) -> Any:
    """A program whose loops stay loops."""
    return pw.program(fun, name="looped", unroll=0, **options)


def one_by_one(step: Callable[..., Any], ws: Any, *arrays: Any) -> tuple[Any, np.ndarray]:
    """A call per step."""
    program = pw.program(step, name="step")
    losses = []
    for row in zip(*arrays, strict=True):
        ws, loss = program(ws, row)
        losses.append(np.asarray(loss))
    return ws, np.stack(losses)


def same(got: Any, want: Any) -> None:
    """Equal in every bit."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def units(text: str, depth: int) -> list[list[str]]:
    """Per slice, the units in the order of the text of a program: `F0`, `B0`, `W0`, with chunk 1 `F0.1`."""
    rows: list[list[str]] = [[] for _ in range(depth)]
    pattern = r"call f(\d+)[.]\d+[(].*[)] on \S+ (\w)\w+, microbatch (\d+)(?:, chunk (\d+))?(?: of pipeline \d+)? #"
    for stage, phase, number, chunk in re.findall(pattern, text):
        rows[int(stage) % depth].append(f"{phase.upper()}{number}" + (f".{chunk}" if chunk else ""))
    return rows


def order_of(program: Any, *args: Any) -> list[list[str]]:
    return units(program.lower(*args).as_text("program"), 2)


# ------------------------------------------------------------------------------------------------------- schedules
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_epoch_is_one_program_with_the_bits_of_its_steps(cluster, add, schedule: str) -> None:
    """SCHED-1: in the body of a loop the order is the schedule's; the bits are those of one call per step, and of the
    unrolled loop.
    """
    slices = [add(1), add(1)]
    chunks = 2 if schedule in ("Interleaved1F1B", "Circular") else 1
    model = model_on(slices, schedule, 2 * chunks)
    ws = WEIGHTS[: 2 * chunks]
    epoch = looped(epoch_of(model))
    if schedule not in ("none", "auto"):
        assert order_of(epoch, ws, XS, TS) == expected(schedule, 2, 4, chunks)
    got = epoch(ws, XS, TS)
    same(got, one_by_one(step_of(model), ws, XS, TS))
    close(got, jax.jit(epoch_of(plain))(ws, XS, TS))


def test_a_loop_that_is_unrolled_has_the_same_bits(cluster, add) -> None:
    model = model_on([add(1), add(1)], "1F1B")
    same(looped(epoch_of(model))(WEIGHTS[:2], XS, TS), pw.program(epoch_of(model))(WEIGHTS[:2], XS, TS))


def test_the_order_of_ones_own(cluster, add) -> None:
    def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[tuple[str, int, int]]:
        return [(phase, m, 0) for m in reversed(range(microbatches)) for phase in "FB"]

    epoch = looped(epoch_of(model_on([add(1), add(1)], order)))
    assert order_of(epoch, WEIGHTS[:2], XS, TS) == [["F3", "B3", "F2", "B2", "F1", "B1", "F0", "B0"]] * 2
    close(epoch(WEIGHTS[:2], XS, TS), jax.jit(epoch_of(plain))(WEIGHTS[:2], XS, TS))


# ------------------------------------------------------------------------------------------ kinds of loops and branches
def nested(model: Any) -> Any:
    """Two epochs over the same data."""
    return lambda ws, xs, ts: jax.lax.scan(lambda ws, _: epoch_of(model)(ws, xs, ts), ws, None, length=2)


def counted(model: Any) -> Any:
    def step(n: Any, ws: Any, xs: Any, ts: Any) -> Any:
        return step_of(model)(ws, (xs[n], ts[n]))[0]

    return lambda ws, xs, ts: jax.lax.fori_loop(0, STEPS, lambda n, ws: step(n, ws, xs, ts), ws)


def until(model: Any) -> Any:
    """Trains until the loss is small, or for 4 steps."""

    def go_on(carry: Any) -> Any:
        return (carry[1] < 4) & (carry[2] > 0.1)

    def step(carry: Any, x: Any, t: Any) -> Any:
        ws, loss = step_of(model)(carry[0], (x, t))
        return ws, carry[1] + 1, loss

    start = np.int32(0), np.float32(1)
    return lambda ws, xs, ts: jax.lax.while_loop(go_on, lambda c: step(c, xs[0], ts[0]), (ws, *start))


def sometimes(model: Any) -> Any:
    """A branch in a loop: only every second step trains."""

    def step(ws: Any, row: Any) -> Any:
        return jax.lax.cond(jnp.sum(row[0]) > 0, lambda: step_of(model)(ws, row), lambda: (ws, model(ws, *row)))

    return lambda ws, xs, ts: jax.lax.scan(step, ws, (xs, ts))


def switched(model: Any) -> Any:
    def train(rate: float) -> Any:
        def run(ws: Any, x: Any, t: Any) -> Any:
            grads = jax.grad(model)(ws, x, t)
            return jax.tree.map(lambda w, g: w - rate * g, ws, grads)

        return run

    which = jnp.int32(1)
    return lambda ws, xs, ts: jax.lax.switch(
        (xs[0, 0, 0] > 9).astype(int) + which, [*map(train, (0.1, 0.2, 0.3))], ws, xs[0], ts[0]
    )


def evaluated(model: Any) -> Any:
    """Forward only."""
    return lambda ws, xs, ts: jax.lax.map(lambda row: model(ws, *row), (xs, ts))


@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubbleH1"])
@pytest.mark.parametrize("kind", [nested, counted, until, sometimes, switched], ids=lambda kind: kind.__name__)
def test_kinds_of_loops_and_branches(cluster, add, kind: Any, schedule: str) -> None:
    program = looped(kind(model_on([add(1), add(1)], schedule)))
    text = program.lower(WEIGHTS[:2], XS, TS).as_text("program")
    trained = expected(schedule, 2, 4)
    for row, want in zip(units(text, 2), trained, strict=True):
        assert [row[n : n + len(want)] for n in range(len(row))].count(want) == (3 if kind is switched else 1), row
    close(program(WEIGHTS[:2], XS, TS), jax.jit(kind(plain))(WEIGHTS[:2], XS, TS))


def test_a_loop_of_forward_steps(cluster, add) -> None:
    program = looped(evaluated(model_on([add(1), add(1)], "1F1B")))
    assert order_of(program, WEIGHTS[:2], XS, TS) == [["F0", "F1", "F2", "F3"]] * 2
    close(program(WEIGHTS[:2], XS, TS), jax.jit(evaluated(plain))(WEIGHTS[:2], XS, TS))


# ------------------------------------------------------------------------------------------- the gradient of a loop
def gradient(model: Any) -> Any:
    """The loss of all steps: `jax.grad` is around the loop."""

    def total(ws: Any, xs: Any, ts: Any) -> Any:
        return jnp.sum(jax.lax.map(lambda row: model(ws, *row), (xs, ts)))

    return jax.value_and_grad(total)


@pytest.mark.parametrize("schedule", ["none", "GPipe", "1F1B", "ZeroBubbleH1"])
def test_forward_and_backward_bodies_follow_the_schedule_each_on_its_own(cluster, add, schedule: str) -> None:
    """SCHED-1: a body has the units of its pipeline in the order in which the schedule has them."""
    program = looped(gradient(model_on([add(1), add(1)], schedule)))
    if schedule != "none":
        for got, want in zip(order_of(program, WEIGHTS[:2], XS, TS), expected(schedule, 2, 4), strict=True):
            forward = [unit for unit in want if unit[0] == "F"]
            assert got == forward + [unit for unit in want if unit[0] != "F"]
    close(program(WEIGHTS[:2], XS, TS), jax.jit(gradient(plain))(WEIGHTS[:2], XS, TS))


# ------------------------------------------------------------------------------------------- loops of the user's own
def own_loop(functions: Any, scoped: bool = False) -> Any:
    """A microbatch after the other, with the gradient of each."""

    def step(ws: Any, row: Any) -> Any:
        x, t = row

        def loss(ws: Any, n: int) -> Any:
            y = x[2 * n : 2 * n + 2]
            for w, function in zip(ws, functions[:2], strict=True):
                y = function(w, y)
            return functions[2](y, t[2 * n : 2 * n + 2])

        total, grads = 0.0, None
        for n in range(4):
            with jax.named_scope(f"pw.mine.mb{n}" if scoped else "plain"):
                one, more = jax.value_and_grad(loss)(ws, n)
            total, grads = total + one, more if grads is None else jax.tree.map(jnp.add, grads, more)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), total

    return lambda ws, xs, ts: jax.lax.scan(step, ws, (xs, ts))


@pytest.mark.parametrize("scoped", [False, True])
def test_the_schedule_of_a_program_is_that_of_the_bodies_in_it(cluster, add, scoped: bool) -> None:
    slices = [add(1), add(1)]
    functions = [pw.jit(layer, devices=each, name=f"f{n}") for n, each in enumerate(slices)]
    functions.append(pw.jit(mse, devices=slices[1], name="loss"))
    program = looped(own_loop(functions, scoped), schedule="1F1B")
    assert order_of(program, WEIGHTS[:2], XS, TS) == expected("1F1B", 2, 4)
    close(program(WEIGHTS[:2], XS, TS), jax.jit(own_loop([layer, layer, mse]))(WEIGHTS[:2], XS, TS))


def accumulated(loss: Any) -> Any:
    def step(ws: Any, row: Any) -> Any:
        value, grads = pw.accumulate_gradients(lambda ws, row: loss(ws, *row), microbatches=4)(ws, row)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    return lambda ws, xs, ts: jax.lax.scan(step, ws, (xs, ts))


def test_accumulated_gradients(cluster, add) -> None:
    slices = [add(1), add(1)]
    functions = [pw.jit(layer, devices=each, name=f"f{n}") for n, each in enumerate(slices)]
    last = pw.jit(mse, devices=slices[1], name="loss")
    program = looped(
        accumulated(lambda ws, x, t: last(functions[1](ws[1], functions[0](ws[0], x)), t)), schedule="1F1B"
    )
    assert order_of(program, WEIGHTS[:2], XS, TS) == expected("1F1B", 2, 4)
    close(program(WEIGHTS[:2], XS, TS), jax.jit(epoch_of(plain))(WEIGHTS[:2], XS, TS))


def test_two_pipelines_in_one_body_and_one_behind_the_loop(cluster, add) -> None:
    slices = [add(1), add(1)]
    one, two = model_on(slices, "1F1B"), model_on(slices, "GPipe", microbatches=2)

    def train(one: Any, two: Any) -> Any:
        def run(ws: Any, xs: Any, ts: Any) -> Any:
            both = lambda ws, x, t: one(ws, x, t) + two(ws, x, t)
            ws, losses = epoch_of(both)(ws, xs, ts)
            return ws, losses, two(ws, xs[0], ts[0])

        return run

    program = looped(train(one, two))
    text = program.lower(WEIGHTS[:2], XS, TS).as_text("program")
    assert "of pipeline 1" in text
    close(program(WEIGHTS[:2], XS, TS), jax.jit(train(plain, plain))(WEIGHTS[:2], XS, TS))


# ------------------------------------------------------------------------------------------------------------- state
def test_state_of_an_optimizer_donated_weights_and_a_variable(cluster, add, quiet) -> None:
    slices = [add(1), add(1)]
    model, optimizer = model_on(slices, "1F1B"), optax.adam(0.01)
    seen = pw.Variable(np.float32(0), slices[1])

    def train(model: Any, note: Callable[[Any], None]) -> Any:
        def step(carry: Any, row: Any) -> Any:
            ws, state = carry
            loss, grads = jax.value_and_grad(model)(ws, *row)
            updates, state = optimizer.update(grads, state, ws)
            return (optax.apply_updates(ws, updates), state), loss

        def run(ws: Any, state: Any, xs: Any, ts: Any) -> Any:
            carry, losses = jax.lax.scan(step, (ws, state), (xs, ts))
            note(jnp.sum(losses))
            return carry, losses

        return run

    def note(total: Any) -> None:
        seen.value = seen.value + total

    program = looped(train(model, note), donate_argnums=(0, 1))
    ws: Any = [pw.device_put(w, each) for w, each in zip(WEIGHTS, slices, strict=False)]
    state: Any = optimizer.init(WEIGHTS[:2])
    want_ws: Any = WEIGHTS[:2]
    want_state = state
    for _ in range(2):
        (ws, state), losses = program(ws, state, XS, TS)
        (want_ws, want_state), want = jax.jit(train(plain, lambda _: None))(want_ws, want_state, XS, TS)
    close((ws, losses), (want_ws, want))
    assert np.isfinite(np.asarray(seen.value))


# ----------------------------------------------------------------------------------------------------------- refused
def test_a_loop_inside_of_a_microbatch_has_no_place_in_a_schedule(cluster, add) -> None:
    slices = [add(1), add(1)]
    functions = [pw.jit(layer, devices=each, name=f"f{n}") for n, each in enumerate(slices)]
    last = pw.jit(mse, devices=slices[1], name="loss")

    def loss(ws: Any, x: Any, t: Any) -> Any:
        return last(jax.lax.fori_loop(0, 3, lambda _, x: functions[1](ws[1], functions[0](ws[0], x)), x), t)

    def plain_loss(ws: Any, x: Any, t: Any) -> Any:
        return mse(jax.lax.fori_loop(0, 3, lambda _, x: layer(ws[1], layer(ws[0], x)), x), t)

    with pytest.raises(errors.ScheduleError, match=r"microbatch 0 has placed functions inside jax.lax.scan .*unroll="):
        looped(accumulated(loss), schedule="1F1B").lower(WEIGHTS[:2], XS, TS)
    close(looped(accumulated(loss))(WEIGHTS[:2], XS, TS), jax.jit(epoch_of(plain_loss))(WEIGHTS[:2], XS, TS))


def test_a_schedule_without_a_pipeline_in_any_body_is_refused(cluster, add) -> None:
    slice_ = add(1)

    def move(xs: Any) -> Any:
        return jax.lax.map(lambda x: pw.device_put(x, slice_), xs)

    with pytest.raises(errors.ScheduleError, match="no pipeline in it"):
        looped(move, schedule="1F1B").lower(XS)


# --------------------------------------------------------------------------------------------------------- callbacks
@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubbleH1"])
@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_in_scheduled_loops(cluster, add, schedule: str, ordered: bool) -> None:
    """EFF-1: an epoch of scheduled steps with a call of the client in each step, and one in each microbatch."""
    slices = [add(1), add(1)]
    steps: list[int] = []
    seen: list[float] = []

    def noisy(w: Any, x: Any) -> Any:
        y = layer(w, x)
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.sum(x), ordered=ordered)
        return y

    functions = [pw.jit(noisy, devices=slices[0], name="f0"), pw.jit(layer, devices=slices[1], name="f1")]
    model = pw.pipeline(functions, microbatches=4, schedule=schedule, loss=mse)

    def epoch(ws: Any, xs: Any, ts: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            n, ws = carry
            ws, loss = step_of(model)(ws, row)
            jax.debug.callback(lambda n, loss: steps.append(int(n)), n, loss, ordered=ordered)
            return (n + 1, ws), loss

        (_, ws), losses = jax.lax.scan(step, (np.int32(0), ws), (xs, ts))
        return ws, losses

    program = looped(epoch)
    assert order_of(program, WEIGHTS[:2], XS, TS) == expected(schedule, 2, 4)
    got = program(WEIGHTS[:2], XS, TS)
    jax.effects_barrier()
    close(got, jax.jit(epoch_of(plain))(WEIGHTS[:2], XS, TS))
    want = XS.reshape(STEPS * 4, -1).sum(1)
    if ordered:
        assert steps == list(range(STEPS))
        np.testing.assert_allclose(seen, want, rtol=1e-4, atol=1e-5)
    else:
        assert sorted(steps) == list(range(STEPS))
        np.testing.assert_allclose(sorted(seen), sorted(want), rtol=1e-4, atol=1e-5)
