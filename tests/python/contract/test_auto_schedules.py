"""`schedule="auto"`: plain JAX's values, and an order whose runs fit the memory of their devices (MEM-3)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw
from pathways import errors
from pathways.api.pipelines.auto_schedule import needed_bytes
from pathways.compiler.schedule import model

KiB = 1 << 10
SIDE = 256  # an activation of a microbatch takes 256 KiB
MICROBATCHES = 8


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x * w)


def train(stages: Sequence[Callable[..., Any]], head: Callable[..., Any]) -> Any:
    def loss(ws: Any, x: Any) -> Any:
        for stage, w in zip(stages, ws, strict=True):
            x = stage(w, x)
        return head(x)

    def step(ws: Any, xs: Any) -> Any:
        total, grads = 0.0, None
        for x in xs:
            part, more = jax.value_and_grad(loss)(ws, x)
            total += part
            grads = more if grads is None else jax.tree.map(jnp.add, grads, more)
        return total, grads

    return step


def plain(x: Any) -> Any:
    return jnp.sum(x**2)


WEIGHTS = [np.float32(0.5 + n) for n in range(3)]


def batches(side: int) -> list[np.ndarray]:
    draw = np.random.default_rng(7)
    return [draw.normal(size=(side, side)).astype(np.float32) for _ in range(MICROBATCHES)]


def program(slices: Sequence[Any], schedule: str, **options: Any) -> Any:
    stages = [pw.jit(layer, devices=s, name=f"f{n}") for n, s in enumerate(slices)]
    head = pw.jit(plain, devices=slices[-1], name="loss")
    return pw.program(train(stages, head), schedule=schedule, name="step", **options)


def check(step: Any, slices: Sequence[Any], xs: list[np.ndarray]) -> None:
    ws = [pw.device_put(w, s) for w, s in zip(WEIGHTS, slices, strict=True)]
    loss, grads = step(ws, xs)
    wanted, want = jax.jit(train([layer] * 3, plain))(WEIGHTS, xs)
    np.testing.assert_allclose(np.asarray(loss), wanted, rtol=1e-4)
    for got, expected in zip(grads, want, strict=True):
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-3)


def forward_first(step: Any, xs: list[np.ndarray]) -> list[int]:
    """How many forward steps each stage does before its first backward step."""
    text = step.lower(WEIGHTS, xs).as_text("plan")
    calls = [re.findall(rf"call f{stage}[.]\d+ [(](\w+), microbatch", text) for stage in range(3)]
    return [phases.index("backward") for phases in calls]


@pytest.mark.parametrize("lengths", [None, [{"F": 1, "B": 2}, {"F": 3, "B": 1}, {"F": 1, "B": 1, "T": 2}]])
def test_auto_has_the_values_of_plain_jax(add: Any, lengths: Any) -> None:
    slices = [add(1), add(2), add(1)]
    step = program(slices, "auto", **({} if lengths is None else {"lengths": lengths}))
    check(step, slices, batches(4))
    assert step.lower(WEIGHTS, batches(4)).logical.schedule.startswith("auto (")


# A transfer takes as long as 4 steps, so the fastest order has many microbatches in flight.
FAR = {"F": 1, "B": 1, "T": 4}


@pytest.mark.slow
def test_auto_keeps_to_the_memory_of_the_devices(start: Callable[..., Any]) -> None:
    xs = batches(SIDE)
    one = SIDE * SIDE * 4
    before: list[int] | None = None
    kept = []
    for activations in (64, 14):
        with start(1, 3, 1, device_memory=activations * one) as cluster:
            devices = pw.make_virtual_device_set(cluster)
            slices = [devices.add_slice(devices=1) for _ in range(3)]
            step = program(slices, "auto", lengths=FAR)
            lowered = step.lower(WEIGHTS, xs)
            needs = needed_bytes(lowered.bound, {}, receives_on_host=True)
            assert max(needs.values()) <= activations * one
            if activations == 14:  # one microbatch more would not fit: it keeps two or three activations on a stage
                assert max(needs.values()) > (activations - 3) * one
            now = forward_first(step, xs)
            if before is not None:
                assert all(a <= b for a, b in zip(now, before, strict=True))
            before = now
            kept.append(sum(now))
            check(step, slices, xs)
    assert kept[0] > kept[1], kept


@pytest.mark.slow
def test_auto_of_a_pipeline_beside_another_schedule(start: Callable[..., Any]) -> None:
    """`pw.pipeline(schedule="auto")` keeps to the memory; a second pipeline with 1F1B stays as it is."""
    x = np.concatenate(batches(SIDE))
    one = SIDE * SIDE * 4
    kept = []
    for activations in (96, 32):
        with start(1, 3, 1, device_memory=activations * one) as cluster:
            devices = pw.make_virtual_device_set(cluster)
            stages = [pw.jit(layer, devices=devices.add_slice(devices=1), name=f"f{n}") for n in range(3)]
            models = [
                pw.pipeline(stages, microbatches=MICROBATCHES, loss=plain, schedule=schedule, lengths=FAR, reduce="sum")
                for schedule in ("auto", "1F1B")
            ]

            def both(ws: Any, x: Any, models: Any = models) -> Any:
                grads = jax.grad(models[0])(ws, x)
                return grads, jax.grad(models[1])([w - 1e-4 * g for w, g in zip(ws, grads, strict=True)], x)

            step = pw.program(both, name="step")
            lowered = step.lower(WEIGHTS, x)
            assert [each.is_searched for each in lowered.logical.pipelines] == [True, False]
            assert max(needed_bytes(lowered.bound, {}, receives_on_host=True).values()) <= activations * one
            first, second = model.stages_in_flight(lowered.logical)
            assert second == [3, 2, 1]
            kept.append(sum(first))
            got = step(WEIGHTS, x)
            want = both(WEIGHTS, x, [lambda ws, x: plain(layer(ws[2], layer(ws[1], layer(ws[0], x))))] * 2)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(np.asarray(a), b, rtol=1e-3)
    assert kept[0] > kept[1], kept


@pytest.mark.slow
def test_no_order_fits(start: Callable[..., Any]) -> None:
    xs = batches(SIDE)
    cluster = start(1, 3, 1, device_memory=3 * SIDE * SIDE * 4)
    devices = pw.make_virtual_device_set(cluster)
    slices = [devices.add_slice(devices=1) for _ in range(3)]
    step = program(slices, "auto", lengths=FAR)
    with pytest.raises(
        errors.ResourceExhaustedError,
        match=r"schedule 'auto' of program 'step': no order fits the memory of slice .* one microbatch in flight "
        r"there, a run still needs \d+ bytes on device \d, .* and the device has 786432",
    ):
        step(WEIGHTS, xs)
