"""`pw.accumulate_gradients`: the loss and gradients of plain JAX's full batch, added where they are made.

Map: values; where the sums are; a schedule around it; what is refused.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_cases import expected

import pathways as pw
from pathways import errors

RNG = np.random.default_rng(5)
WEIGHTS = [RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(3)]
BATCH, TARGETS = (RNG.normal(size=(8, 4)).astype(np.float32) for _ in range(2))


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def mse(y: Any, t: Any) -> Any:
    return jnp.mean((y - t) ** 2)


def network(stages: Any, loss: Any) -> Any:
    def one(ws: Any, x: Any, t: Any, *, scale: Any = 1.0) -> Any:
        for stage, w in zip(stages, ws, strict=True):
            x = stage(w, x)
        return loss(x, t) * scale

    return one


PLAIN = network([layer] * 3, mse)


@pytest.fixture
def one(add: Any) -> Any:
    slices = [add(1) for _ in range(3)]
    stages = [pw.jit(layer, devices=s, name=f"f{n}") for n, s in enumerate(slices)]
    return network(stages, pw.jit(mse, devices=slices[2]))


def close(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=1e-6)


def test_values_are_those_of_the_full_batch(one: Any) -> None:
    want = jax.value_and_grad(PLAIN)(WEIGHTS, BATCH, TARGETS)
    close(pw.accumulate_gradients(one, 4)(WEIGHTS, BATCH, TARGETS), want)
    for schedule in ("none", "1F1B"):
        close(pw.program(pw.accumulate_gradients(one, 4), schedule=schedule)(WEIGHTS, BATCH, TARGETS), want)
    summed = pw.accumulate_gradients(one, 4, reduce="sum")(WEIGHTS, BATCH, TARGETS)
    close(summed, jax.tree.map(lambda x: x * 4, want))
    half = jax.value_and_grad(PLAIN)(WEIGHTS, BATCH, TARGETS, scale=0.5)
    close(pw.accumulate_gradients(one, 2)(WEIGHTS, BATCH, TARGETS, scale=0.5), half)


@pytest.mark.one_process
def test_more_than_a_loss_and_other_arguments(one: Any) -> None:
    def with_more(model: Any) -> Any:
        def loss(x: Any, ws: Any, t: Any) -> Any:
            value = model(ws, x, t)
            return value, {"loss": value}

        return loss

    (total, more), grads = pw.accumulate_gradients(with_more(one), 4, argnums=(1,), has_aux=True)(
        BATCH, WEIGHTS, TARGETS
    )
    close((total, grads), jax.value_and_grad(lambda *ws: PLAIN(*ws, BATCH, TARGETS), argnums=(0,))(WEIGHTS))
    parts = [PLAIN(WEIGHTS, BATCH[2 * n : 2 * n + 2], TARGETS[2 * n : 2 * n + 2]) for n in range(4)]
    close(more, {"loss": jnp.stack(parts)})
    last = pw.accumulate_gradients(lambda x, t, ws: one(ws, x, t), 4, argnums=-1)(BATCH, TARGETS, WEIGHTS)
    close(last, jax.value_and_grad(PLAIN)(WEIGHTS, BATCH, TARGETS))


def plan(one: Any, schedule: str) -> list[str]:
    text = pw.program(pw.accumulate_gradients(one, 4), schedule=schedule).lower(WEIGHTS, BATCH, TARGETS).as_text("plan")
    rows = re.findall(r"call (f1|plain)[.]\d+ [(](\w)\w*, microbatch (\d+)[)] on (\S+):", text)
    slices = {where for name, _, _, where in rows if name == "f1"}
    return [f"{phase.upper()}{number}" for _, phase, number, where in rows if where in slices]


@pytest.mark.one_process
def test_each_gradient_is_added_when_it_exists(one: Any) -> None:
    """Without a schedule the calls are in the order of the text."""
    assert plan(one, "none") == ["F0", "B0", "F1", "B1", "S1", "F2", "B2", "S2", "F3", "B3", "S3"]


@pytest.mark.one_process
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_schedule_of_the_program_is_for_its_microbatches(one: Any, schedule: str) -> None:
    units = plan(one, schedule)
    assert [unit for unit in units if unit[0] != "S"] == expected(schedule, 3, 4)[1]
    assert [unit for unit in units if unit[0] == "S"] == ["S1", "S2", "S3"]


@pytest.mark.one_process
def test_a_pipeline_within(add: Any) -> None:
    stages = [pw.jit(layer, devices=add(1), name=f"f{n}") for n in range(3)]
    model = pw.pipeline(stages, microbatches=2, loss=mse)
    step = pw.accumulate_gradients(model, 2)
    close(step(WEIGHTS, BATCH, TARGETS), jax.value_and_grad(PLAIN)(WEIGHTS, BATCH, TARGETS))
    text = step.lower(WEIGHTS, BATCH, TARGETS).as_text("plan")
    for n in range(3):  # the second pipeline keeps no activations before the first has ended
        units = re.findall(rf"call f{n}[.]\d+ [(](\w)\w+, microbatch (\d)(?: of pipeline (\d))?[)]", text)
        order = [f"{phase.upper()}{number}" for phase, number, _ in units]
        assert order == 2 * expected("1F1B", 3, 2)[n]
        assert [int(pipeline or 0) for _, _, pipeline in units] == [0] * 4 + [1] * 4


@pytest.mark.one_process
def test_a_loss_without_placed_functions(add: Any) -> None:
    ws = [pw.device_put(w, add(1)) for w in WEIGHTS[:1]]
    got = pw.accumulate_gradients(lambda ws, x: jnp.mean((x @ ws[0]) ** 2), 4)(ws, BATCH)
    close(got, jax.value_and_grad(lambda ws: jnp.mean((BATCH @ ws[0]) ** 2))(WEIGHTS[:1]))


@pytest.mark.one_process
def test_what_does_not_fit_is_named(one: Any) -> None:
    for call, message in (
        (lambda: pw.accumulate_gradients(3, 4), "loss of accumulate_gradients: expected a function, got 3 of type int"),
        (
            lambda: pw.accumulate_gradients(one, 0),
            "microbatches of accumulate_gradients of 'one': expected an integer of",
        ),
        (lambda: pw.accumulate_gradients(one, 4, reduce="no"), "reduce of accumulate_gradients of 'one': expected"),
        (lambda: pw.accumulate_gradients(one, 4, argnums=()), "argnums of accumulate_gradients of 'one': expected an "),
        (
            lambda: pw.accumulate_gradients(one, 4, argnums="x"),
            "argnums of accumulate_gradients of 'one': expected an ",
        ),
        (lambda: pw.accumulate_gradients(one, 4, argnums=5)(WEIGHTS, BATCH, TARGETS), "3 positional arguments, got 5"),
        (
            lambda: pw.accumulate_gradients(one, 3)(WEIGHTS, BATCH, TARGETS),
            "argument 1 of accumulate_gradients of 'one'",
        ),
        (lambda: pw.accumulate_gradients(one, 4)(WEIGHTS), "arguments to cut of accumulate_gradients of 'one'"),
    ):
        with pytest.raises(errors.ProgramError, match=re.escape(message)):
            call()
