"""A mixture of experts on slices of its own as a stage of a pipeline (SCHED-1, EXCH-1): values, order, refusals."""

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

RNG = np.random.default_rng(3)
ROWS, SIZE = 16, 8
X, T = (RNG.normal(size=(ROWS, SIZE)).astype(np.float32) for _ in range(2))
FIRST, LAST = (RNG.normal(size=(SIZE, SIZE)).astype(np.float32) * 0.5 for _ in range(2))


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def error(y: Any, t: Any) -> Any:
    return jnp.mean((y[0] - t) ** 2) + 0.1 * y[1]


class Model:
    """A dense stage, a mixture, a dense stage. The mixture's home is the first slice or one of its own."""

    def __init__(self, add: Any, own_home: bool = False) -> None:
        self.slices = [add(1), add(1), *([add(1)] if own_home else [])]
        self.experts = [add(1), add(1)]
        home = self.slices[2] if own_home else self.slices[0]
        self.mixture = pw.nn.MixtureOfExperts(
            dense, pw.nn.TopKGate(4, 2, SIZE), home=home, slices=self.experts, capacity=64, block=8
        )
        made = self.mixture.init(jax.random.key(0), lambda key: jax.random.normal(key, (SIZE, SIZE)) * 0.5)
        self.params = [FIRST, made, LAST]
        self.stages = [
            pw.jit(dense, devices=self.slices[0], name="f0"),
            self.mixed,
            pw.jit(lambda w, x: (dense(w, x[0]), x[1]), devices=self.slices[1], name="f1"),
        ]
        self.loss = pw.jit(error, devices=self.slices[1], name="loss")

    def mixed(self, params: Any, x: Any) -> Any:
        """The stage: the penalty of the gate goes along with the rows."""
        mixed = self.mixture(params, x)
        return mixed.results, mixed.penalty

    def pipeline(self, schedule: Any, microbatches: int = 4) -> Any:
        return pw.pipeline(self.stages, microbatches=microbatches, schedule=schedule, loss=self.loss)

    def one_by_one(self, microbatches: int = 4) -> Any:
        """Loss and gradients without a pipeline: a run per microbatch."""

        def one(params: Any, x: Any, t: Any) -> Any:
            for stage, p in zip(self.stages, params, strict=True):
                x = stage(p, x)
            return self.loss(x, t)

        run = pw.program(jax.value_and_grad(one))
        parts = [
            jax.tree.map(np.asarray, run(self.params, x, t))
            for x, t in zip(np.split(X, microbatches), np.split(T, microbatches), strict=True)
        ]
        return jax.tree.map(lambda *each: sum(each) / microbatches, *parts)


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def units(text: str, name: str) -> list[str]:
    """The units of a placed function in the order of the text."""
    pattern = rf"call {name}[.]\d+[(].*[)] on \S+ (\w)\w+, microbatch (\d+)"
    return [phase.upper() + number for phase, number in re.findall(pattern, text)]


@pytest.mark.parametrize("schedule", ["none", "GPipe", "1F1B", "ZeroBubbleH1", "auto"])
def test_a_mixture_is_a_stage_under_each_schedule(cluster, add, schedule: str) -> None:
    model = Model(add)
    step = pw.program(jax.value_and_grad(model.pipeline(schedule)))
    close(step(model.params, X, T), model.one_by_one())
    if schedule in ("GPipe", "1F1B"):
        text = step.lower(model.params, X, T).as_text("program")
        first, last = expected(schedule, 2, 4)
        assert units(text, "f0") == units(text, "route") == units(text, "combine") == first
        assert units(text, "f1") == last
        assert units(text, "experts") == [unit for unit in first for _ in model.experts]


def test_a_schedule_that_cannot_divide_experts_is_refused(cluster, add) -> None:
    """The first stage is not divided, so there a mixture may be a stage under ZeroBubbleH1."""
    model = Model(add, own_home=True)
    with pytest.raises(
        errors.ScheduleError, match=r"backward 0 of 'experts' .* cannot be divided .* Give schedule '1F1B'"
    ):
        pw.program(jax.grad(model.pipeline("ZeroBubbleH1", 2)))(model.params, X, T)


@pytest.mark.parametrize("schedule", ["none", "1F1B"])
def test_a_mixture_with_a_home_of_its_own_in_a_loop(cluster, add, schedule: str) -> None:
    model = Model(add, own_home=True)
    pipeline = model.pipeline(schedule, 2)

    def epoch(params: Any, xs: Any, ts: Any) -> Any:
        def step(params: Any, row: Any) -> Any:
            loss, grads = jax.value_and_grad(pipeline)(params, *row)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

        return jax.lax.scan(step, params, (xs, ts))

    xs, ts = np.stack([X] * 3), np.stack([T] * 3)
    want = pw.program(epoch)(model.params, xs, ts)
    close(pw.program(epoch, unroll=0)(model.params, xs, ts), want)
    loss, _ = model.one_by_one(2)
    assert np.asarray(want[1])[0] == pytest.approx(loss, rel=1e-5)
    assert np.asarray(want[1])[2] < loss


def test_a_mixture_in_one_of_two_chunks(cluster, add) -> None:
    model = Model(add, own_home=True)
    one, _, home = model.slices
    stages = [
        model.stages[0],
        model.mixed,
        pw.jit(lambda w, x: (dense(w, x[0]), x[1]), devices=one, name="f2"),
        pw.jit(lambda w, x: (dense(w, x[0]), x[1]), devices=home, name="f3"),
    ]
    loss = pw.jit(error, devices=home, name="loss")
    found = []
    for schedule in ("Interleaved1F1B", "Circular", "none"):
        pipeline = pw.pipeline(stages, microbatches=2, schedule=schedule, loss=loss)
        found.append(pw.program(jax.value_and_grad(pipeline))([*model.params, LAST], X, T))
    close(found[0], found[2])
    close(found[1], found[2])


def test_experts_that_two_stages_share_have_no_place_in_a_schedule(cluster, add) -> None:
    model = Model(add)
    other = pw.nn.MixtureOfExperts(
        dense, pw.nn.TopKGate(4, 2, SIZE), home=model.slices[1], slices=model.experts, capacity=64, block=8
    )
    stages = [model.stages[0], lambda p, x: model.mixture(p, x).results, lambda p, x: other(p, x).results]
    loss = pw.jit(lambda y, t: jnp.mean((y - t) ** 2), devices=model.slices[1])
    params = [FIRST, model.params[1], model.params[1]]
    ordered = pw.pipeline(stages, microbatches=2, schedule="1F1B", loss=loss)
    with pytest.raises(errors.ProgramError, match=r"stages\[1\] .* beside its own slice .* so has stages\[2\]"):
        pw.program(jax.grad(ordered))(params, X, T)
    free = pw.pipeline(stages, microbatches=2, schedule="none", loss=loss)
    assert all(
        np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(pw.program(jax.grad(free))(params, X, T))
    )


def test_a_stage_that_calls_nothing_and_a_loss_without_a_slice_are_refused(cluster, add) -> None:
    model = Model(add)
    stages = [model.stages[0], lambda w, x: dense(w, x)]
    with pytest.raises(errors.ProgramError, match=r"loss of pipeline .* expected a placed function"):
        pw.pipeline(stages, microbatches=2, loss=error)
    with pytest.raises(errors.ProgramError, match=r"stages\[1\] .* a function that calls some, got .* calls none"):
        pw.program(pw.pipeline(stages, microbatches=2))([FIRST, LAST], X)
