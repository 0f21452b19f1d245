"""Pipelines on a cluster: each schedule runs in its order, with plain JAX's values (SCHED-1)."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw
from pathways import errors

RNG = np.random.default_rng(0)
WEIGHTS = [RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(3)]
BATCH = RNG.normal(size=(5, 2, 4)).astype(np.float32)
ORDERS = {  # of the last and the first of three stages, for five microbatches
    "GPipe": ("F0 F1 F2 F3 F4 B0 B1 B2 B3 B4", "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"),
    "1F1B": ("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4", "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
    "ZeroBubbleH1": ("F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4", "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
}
CHUNKED = {  # of each of two slices with two chunks, for four microbatches; the second number is the chunk
    "Interleaved1F1B": (
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ),
    "Circular": ("F0 F1 F0.1 F1.1 F2 F3 F2.1 F3.1 B0.1 B1.1 B0 B1 B2.1 B3.1 B2 B3",) * 2,
}


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def head(w: Any, x: Any) -> Any:
    return jnp.sum((x @ w) ** 2)


def train(stages: Any) -> Any:
    def loss(ws: Any, x: Any) -> Any:
        for stage, w in zip(stages, ws, strict=True):
            x = stage(w, x)
        return x

    def step(ws: Any, batch: Any) -> Any:
        total, grads = jax.value_and_grad(lambda ws: sum(loss(ws, batch[n]) for n in range(len(batch))))(ws)
        return total, [w - 0.01 * g for w, g in zip(ws, grads, strict=True)]

    return step


@pytest.mark.parametrize("schedule", ORDERS)
def test_training_steps_of_a_pipeline(add: Any, schedule: str) -> None:
    slices = [add(2), add(1), add(1)]
    stages = [
        pw.jit(f, devices=s, name=f"f{n}") for n, (f, s) in enumerate(zip([layer, layer, head], slices, strict=True))
    ]
    step = pw.program(train(stages), schedule=schedule, donate_argnums=0)
    text = step.lower(WEIGHTS, BATCH).as_text("plan")
    for stage, order in zip((2, 0), ORDERS[schedule], strict=True):
        calls = re.findall(rf"call f{stage}[.]\d+ [(](\w)\w*, microbatch (\d)[)]", text)
        assert " ".join(f"{phase.upper()}{number}" for phase, number in calls) == order
    got: Any = [pw.device_put(w, s) for w, s in zip(WEIGHTS, slices, strict=True)]
    want: Any = WEIGHTS
    for _ in range(3):
        loss, got = step(got, BATCH)
        expected, want = train([layer, layer, head])(want, BATCH)
        np.testing.assert_allclose(np.asarray(loss), expected, rtol=1e-4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", CHUNKED)
def test_two_chunks_per_slice(add: Any, schedule: str) -> None:
    slices = [add(1), add(1)]
    functions, places = [layer, layer, layer, head], [*slices, *slices]
    weights = [*WEIGHTS, WEIGHTS[0]]
    stages = [pw.jit(f, devices=s, name=f"f{n}") for n, (f, s) in enumerate(zip(functions, places, strict=True))]
    step = pw.program(train(stages), schedule=schedule)
    text = step.lower(weights, BATCH[:4]).as_text("plan")
    for stage, order in enumerate(CHUNKED[schedule]):
        calls = re.findall(rf"call f[{stage}{stage + 2}][.]\d+ [(](\w)\w*, microbatch (\d)(?:, chunk (\d))?[)]", text)
        found = [f"{phase.upper()}{number}" + (f".{chunk}" if chunk else "") for phase, number, chunk in calls]
        assert " ".join(found) == order
    loss, got = step([pw.device_put(w, s) for w, s in zip(weights, places, strict=True)], BATCH[:4])
    expected, want = train(functions)(weights, BATCH[:4])
    np.testing.assert_allclose(np.asarray(loss), expected, rtol=1e-4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)


def test_a_schedule_that_cannot_be_followed_is_refused_before_anything_runs(add: Any) -> None:
    f = pw.jit(lambda w, x: w * x, devices=add(1), name="f")

    def chained(w: Any, xs: Any) -> Any:
        y = 1.0
        for x in xs:
            y = f(w, x * y)
        return y

    with pytest.raises(errors.ScheduleError, match=r"'f' .* 3 times, and its calls are connected"):
        pw.program(chained, schedule="1F1B")(np.float32(2), list(np.ones(3, np.float32)))
    with pytest.raises(errors.OptionError, match=r"'ZeroBubbleH2ZeroTxLatency' is not built: .* give 'ZeroBubbleH1'"):
        pw.program(chained, schedule="ZeroBubbleH2ZeroTxLatency")(np.float32(2), list(np.ones(3, np.float32)))
