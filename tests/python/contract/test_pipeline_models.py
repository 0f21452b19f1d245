"""`pw.pipeline`: values and gradients are plain JAX's, in the schedule's order (SCHED-1); bad input is named.

Map: models of many kinds; ways to call; the order by definition; what is refused.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from pipeline_cases import expected

import pathways as pw
from pathways import errors

RNG = np.random.default_rng(11)
ROWS, SIZE, COUNT = 8, 4, 4


def normal(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 0.7).astype(np.float32)


WEIGHTS = [normal(SIZE, SIZE) for _ in range(3)]
BATCH, TARGETS = normal(ROWS, SIZE), normal(ROWS, SIZE)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def linear(w: Any, x: Any) -> Any:
    return x @ w


def mse(y: Any, t: Any) -> Any:
    return jnp.mean((y.astype(jnp.float32) - t) ** 2)


class Model:
    """Stages, and how each is placed; the parameters of all; a batch, its targets, and a loss."""

    def __init__(
        self,
        stages: list[Callable[..., Any]],
        params: Any,
        *,
        per_stage: Callable[[Any], list[Any]] = list,
        batch: Any = BATCH,
        targets: tuple[Any, ...] = (TARGETS,),
        loss: Callable[..., Any] = mse,
        devices: tuple[int, ...] = (1, 1, 1),
        shardings: tuple[Any, ...] = (None, None, None),
        has_aux: bool = False,
        rtol: float = 2e-5,
    ) -> None:
        self.stages, self.params, self.per_stage = stages, params, per_stage
        self.batch, self.targets, self.loss = batch, targets, loss
        self.devices, self.shardings, self.has_aux, self.rtol = devices, shardings, has_aux, rtol

    def plain(self, params: Any) -> Any:
        """The whole batch at once; with `has_aux`, part by part as the pipeline does."""
        if not self.has_aux:
            return self.loss(self.through(params, self.batch), *self.targets)
        whole = (self.through(params, self.batch), *self.targets)
        parts = [self.loss(*(a[2 * n : 2 * n + 2] for a in whole)) for n in range(COUNT)]
        return sum(p[0] for p in parts) / COUNT, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(p[1] for p in parts))

    def through(self, params: Any, x: Any) -> Any:
        for stage, w in zip(self.stages, self.per_stage(params), strict=True):
            x = stage(w, x)
        return x

    def piped(self, add: Any, schedule: Any) -> Callable[[Any], Any]:
        stages = [
            pw.jit(f, devices=add(n), in_shardings=spec, name=f"f{number}")
            for number, (f, n, spec) in enumerate(zip(self.stages, self.devices, self.shardings, strict=True))
        ]
        model = pw.pipeline(stages, microbatches=COUNT, loss=self.loss, schedule=schedule)
        return lambda params: model(self.per_stage(params), self.batch, *self.targets)


def embed(e: Any, tokens: Any) -> Any:
    return e[tokens]


def first_and_skip(w: Any, x: Any) -> Any:
    y = layer(w, x)
    return y, y


def middle_with_skip(w: Any, x: Any) -> Any:
    return layer(w, x[0]), x[1]


def last_with_skip(w: Any, x: Any) -> Any:
    return linear(w, x[0]) + x[1]


def dropout(w: Any, x: Any) -> Any:
    y = layer(w, x["x"])
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (SIZE,)))(x["key"])
    return {"x": jnp.where(kept, y, 0), "key": jax.vmap(lambda key: jax.random.fold_in(key, 1))(x["key"])}


def deep(ws: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0]


def loss_and_more(y: Any, t: Any) -> Any:
    return mse(y, t), {"mean": jnp.mean(y), "rows": jnp.sum(y, axis=1)}


TREES = [{"w": w, "b": normal(SIZE)} for w in WEIGHTS]
MODELS = {
    "tanh": Model([layer] * 3, WEIGHTS),
    "linear": Model([linear] * 3, WEIGHTS),
    "trees": Model([lambda p, x: layer(p["w"], x) + p["b"]] * 3, TREES),
    "remat": Model([jax.checkpoint(layer), jax.checkpoint(layer), linear], WEIGHTS),
    "scan": Model([deep, layer, deep], [np.stack(WEIGHTS), WEIGHTS[0], np.stack(WEIGHTS) * 0.5]),
    "tied": Model(
        [embed, layer, lambda p, x: (x @ p[1]) @ p[0].T],
        {"e": normal(16, SIZE), "w": WEIGHTS[0], "o": WEIGHTS[1]},
        per_stage=lambda p: [p["e"], p["w"], (p["e"], p["o"])],
        batch=RNG.integers(0, 16, ROWS),
        targets=(RNG.integers(0, 16, ROWS),),
        loss=lambda y, t: -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(y), t[:, None], 1)),
    ),
    "skip": Model([first_and_skip, middle_with_skip, last_with_skip], WEIGHTS),
    "frozen": Model([layer, lambda w, x: layer(jax.lax.stop_gradient(w), x), linear], WEIGHTS),
    "nothing to learn in front": Model([lambda _, x: x * 2.0, layer, linear], [(), *WEIGHTS[1:]]),
    "bf16": Model(
        [layer] * 3,
        [jnp.asarray(w, jnp.bfloat16) for w in WEIGHTS],
        batch=jnp.asarray(BATCH, jnp.bfloat16),
        rtol=5e-2,
    ),
    "dropout": Model(
        [dropout, dropout, lambda w, x: linear(w, x["x"])],
        WEIGHTS,
        batch={"x": BATCH, "key": jax.random.split(jax.random.key(0), ROWS)},
    ),
    "two devices": Model([layer, layer, linear], WEIGHTS, devices=(1, 2, 2), shardings=(None, (None, P("x")), None)),
    "fsdp": Model([layer, layer, linear], WEIGHTS, devices=(1, 2, 1), shardings=(None, (P("x"), P("x")), None)),
    "more than a loss": Model([layer] * 3, WEIGHTS, loss=loss_and_more, has_aux=True),
}


def close(got: Any, want: Any, rtol: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(1e-2, float(np.abs(b).max())))


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients_are_those_of_plain_jax(add: Any, kind: str) -> None:
    model = MODELS[kind]
    want = jax.value_and_grad(model.plain, has_aux=model.has_aux)(model.params)
    step = pw.program(jax.value_and_grad(model.piped(add, "1F1B"), has_aux=model.has_aux))
    close(step(model.params), want, model.rtol)


@pytest.mark.sampled(0.5)
@pytest.mark.one_process
@pytest.mark.parametrize("schedule", ["none", "GPipe"])
@pytest.mark.parametrize("kind", ["tanh", "tied", "skip", "dropout"])
def test_each_schedule_has_the_same_values(add: Any, kind: str, schedule: str) -> None:
    model = MODELS[kind]
    step = pw.program(jax.value_and_grad(model.piped(add, schedule)))
    close(step(model.params), jax.value_and_grad(model.plain)(model.params), model.rtol)


def stages_on(add: Any, count: int = 3, functions: Any = layer) -> list[Any]:
    return [pw.jit(functions, devices=add(1), name=f"f{n}") for n in range(count)]


def full(ws: Any, x: Any, t: Any) -> Any:
    return mse(layer(ws[2], layer(ws[1], layer(ws[0], x))), t)


def test_an_optimizer_step_inside(add: Any) -> None:
    slices = [add(1) for _ in range(3)]
    model = pw.pipeline([pw.jit(layer, devices=s) for s in slices], microbatches=COUNT, loss=mse)

    def update(loss: Any) -> Any:
        def step(ws: Any, moments: Any, x: Any, t: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(ws, x, t)
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
            return jax.tree.map(lambda w, m: w - 0.1 * m, ws, moments), moments, value

        return step

    step = pw.program(update(model), donate_argnums=(0, 1))
    got: Any = [[pw.device_put(a, s) for a, s in zip(WEIGHTS, slices, strict=True)] for a in (0, 1)]
    got[1] = [pw.device_put(np.zeros_like(w), s) for w, s in zip(WEIGHTS, slices, strict=True)]
    want: Any = [WEIGHTS, [np.zeros_like(w) for w in WEIGHTS]]
    for _ in range(3):
        *got, loss = step(*got, BATCH, TARGETS)
        *want, value = update(full)(*want, BATCH, TARGETS)
        close(loss, value, 2e-5)
    close(got, want, 2e-5)
    for w, s in zip(got[0], slices, strict=True):
        assert w.slice is s


def test_alone_it_is_a_program_of_its_own(add: Any) -> None:
    model = pw.pipeline(stages_on(add), microbatches=COUNT, loss=mse, name="model")
    assert repr(model) == "<pw.pipeline 'model' of 3 stages>"
    close(model(WEIGHTS, BATCH, TARGETS), full(WEIGHTS, BATCH, TARGETS), 2e-5)
    summed = pw.pipeline(stages_on(add), microbatches=COUNT, loss=mse, reduce="sum")
    close(summed(WEIGHTS, BATCH, TARGETS), COUNT * full(WEIGHTS, BATCH, TARGETS), 2e-5)
    assert "program model" in model.lower(WEIGHTS, BATCH, TARGETS).as_text("plan")


def test_inference(add: Any) -> None:
    model = pw.pipeline(stages_on(add, functions=lambda w, x: {"y": layer(w, x["y"])}), microbatches=2)
    got = model(WEIGHTS, {"y": BATCH})
    close(got, {"y": layer(WEIGHTS[2], layer(WEIGHTS[1], layer(WEIGHTS[0], BATCH)))}, 2e-5)


def test_what_may_be_around_it(add: Any) -> None:
    stages = stages_on(add)
    model = pw.pipeline(stages, microbatches=COUNT, loss=mse)
    many = [np.stack([w, w * 0.5]) for w in WEIGHTS]

    def over_weights(loss: Any) -> Any:
        return jax.vmap(jax.value_and_grad(loss), in_axes=(0, None, None))

    close(pw.program(over_weights(model))(many, BATCH, TARGETS), over_weights(full)(many, BATCH, TARGETS), 2e-5)

    def with_more(loss: Any) -> Any:
        def more(ws: Any, x: Any, t: Any) -> Any:
            value = loss(ws, x, t)
            return value * 2, {"loss": value}

        return jax.grad(more, has_aux=True)

    close(pw.program(with_more(model))(WEIGHTS, BATCH, TARGETS), with_more(full)(WEIGHTS, BATCH, TARGETS), 2e-5)
    by_batch = pw.program(jax.grad(model, argnums=1))
    close(by_batch(WEIGHTS, BATCH, TARGETS), jax.grad(full, argnums=1)(WEIGHTS, BATCH, TARGETS), 2e-5)
    jitted = pw.program(jax.value_and_grad(jax.jit(lambda ws: model(ws, BATCH, TARGETS))))
    close(jitted(WEIGHTS), jax.value_and_grad(full)(WEIGHTS, BATCH, TARGETS), 2e-5)
    remat = pw.program(jax.value_and_grad(jax.checkpoint(lambda ws: model(ws, BATCH, TARGETS))))
    close(remat(WEIGHTS), jax.value_and_grad(full)(WEIGHTS, BATCH, TARGETS), 2e-5)
    eager = jax.value_and_grad(model)(
        [pw.device_put(w, s.slice) for w, s in zip(WEIGHTS, stages, strict=True)], BATCH, TARGETS
    )
    close(eager, jax.value_and_grad(full)(WEIGHTS, BATCH, TARGETS), 2e-5)


def test_what_is_static_for_a_stage(add: Any) -> None:
    slices = [add(1), add(1)]

    def act(kind: str, x: Any) -> Any:
        return {"tanh": jnp.tanh, "sin": jnp.sin}[kind](x)

    def grow(times: int, x: Any) -> Any:
        return x * times if times > 2 else x

    model = pw.pipeline(
        [pw.jit(act, devices=slices[0], static_argnums=0), pw.jit(lambda w, x: x @ w, devices=slices[1])],
        microbatches=4,
    )
    w = np.eye(3, 4, dtype=np.float32)
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    close(pw.program(lambda w, x: model(["sin", w], x))(w, x), jnp.sin(x) @ w, 2e-5)
    gradient = pw.program(jax.grad(lambda w, x: jnp.sum(model(["tanh", w], x))))
    close(gradient(w, x), jax.grad(lambda w: jnp.sum(jnp.tanh(x) @ w))(w), 2e-5)
    numbers = pw.pipeline([pw.jit(grow, devices=one, static_argnums=0) for one in slices], microbatches=2)
    close(pw.program(lambda x: numbers([3, 1], x))(x), x * 3, 0)


def test_arrays_of_the_cluster_that_a_program_closes_over(add: Any) -> None:
    stages = stages_on(add)
    model = pw.pipeline(stages, microbatches=COUNT, loss=mse)
    batch, targets = pw.device_put(BATCH, stages[0].slice), pw.device_put(TARGETS, stages[2].slice)
    step = pw.program(jax.value_and_grad(lambda ws: model(ws, batch, targets)))
    close(step(WEIGHTS), jax.value_and_grad(full)(WEIGHTS, BATCH, TARGETS), 2e-5)


def units(text: str, pipeline: int = 0) -> dict[str, list[str]]:
    """Per stage function, its units in the order of the plan."""
    rows: dict[str, list[str]] = collections.defaultdict(list)
    for name, phase, number, other in re.findall(
        r"call (f\d+)[.]\d+ [(](\w)\w+, microbatch (\d+)(?: of pipeline (\d+))?[)]", text
    ):
        if int(other or 0) == pipeline:
            rows[name].append(f"{phase.upper()}{number}")
    return rows


@pytest.mark.sampled(0.4)
@pytest.mark.one_process
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 6), (3, 2), (4, 8), (8, 5)])
def test_the_order_by_definition(add: Any, schedule: str, stages: int, microbatches: int) -> None:
    model = pw.pipeline(stages_on(add, stages), microbatches=microbatches, schedule=schedule, loss=mse)
    rows = (2 * microbatches, SIZE)
    ws = [WEIGHTS[0]] * stages
    text = pw.program(jax.value_and_grad(model)).lower(ws, np.ones(rows), np.ones(rows)).as_text("plan")
    found = units(text)
    assert [found[f"f{n}"] for n in range(stages)] == expected(schedule, stages, microbatches)


@pytest.mark.one_process
def test_two_pipelines_of_one_program(add: Any) -> None:
    """A step of two calls of one model; the second reads what the first has learned. And neighbours on one slice."""
    model = pw.pipeline(stages_on(add), microbatches=COUNT, loss=mse)

    def twice(loss: Any) -> Any:
        def step(ws: Any) -> Any:
            grads = jax.grad(loss)(ws, BATCH, TARGETS)
            return jax.value_and_grad(loss)([w - 0.1 * g for w, g in zip(ws, grads, strict=True)], TARGETS, BATCH)

        return step

    step = pw.program(twice(model))
    close(step(WEIGHTS), twice(full)(WEIGHTS), 2e-5)
    text = step.lower(WEIGHTS).as_text("plan")
    for number in (0, 1):
        found = units(text, number)
        assert [found[f"f{n}"] for n in range(3)] == expected("1F1B", 3, COUNT)
    slices = [add(1), add(1)]
    neighbours = [pw.jit(layer, devices=slices[n], name=f"f{k}") for k, n in enumerate((0, 0, 1))]
    joined = pw.program(jax.value_and_grad(pw.pipeline(neighbours, microbatches=COUNT, loss=mse)))
    close(joined(WEIGHTS, BATCH, TARGETS), jax.value_and_grad(full)(WEIGHTS, BATCH, TARGETS), 2e-5)
    found = units(joined.lower(WEIGHTS, BATCH, TARGETS).as_text("plan"))
    assert [found[f"f{n}"] for n in (0, 1, 2)] == [expected("1F1B", 2, COUNT)[n] for n in (0, 0, 1)]


@pytest.mark.one_process
def test_one_jit_of_a_pipeline_that_is_called_twice(add: Any) -> None:
    """JAX traces it once, so both calls have the same scopes. Two that do not depend on each other are one pipeline."""
    model = pw.pipeline(stages_on(add), microbatches=COUNT, loss=mse)
    jitted = jax.jit(lambda ws: model(ws, BATCH, TARGETS))

    def both(loss: Any) -> Any:
        return jax.value_and_grad(lambda ws: loss(ws) + loss([w * 2 for w in ws]))

    close(pw.program(both(jitted))(WEIGHTS), both(lambda ws: full(ws, BATCH, TARGETS))(WEIGHTS), 2e-5)

    def one_behind_the_other(ws: Any) -> Any:
        return jax.grad(jitted)([w - g for w, g in zip(ws, jax.grad(jitted)(ws), strict=True)])

    with pytest.raises(errors.ScheduleError, match=r"cannot be followed: .* call it without jax.jit: each call is a"):
        pw.program(one_behind_the_other)(WEIGHTS)


@pytest.mark.one_process
def test_a_program_that_is_made_anew_is_the_same_program(add: Any) -> None:
    model = pw.pipeline(stages_on(add), microbatches=COUNT, loss=mse)
    texts = {
        pw.program(lambda ws: model(ws, BATCH, TARGETS), name="again")
        .trace(WEIGHTS)
        .jaxpr.pretty_print(name_stack=True)
        for _ in range(3)
    }
    assert len(texts) == 1


@pytest.mark.one_process
def test_a_skip_connection_goes_from_its_maker_to_its_reader(add: Any) -> None:
    model = MODELS["skip"]
    text = pw.program(jax.value_and_grad(model.piped(add, "1F1B"))).lower(model.params).as_text("plan")
    slices = dict(re.findall(r"call (f\d)[.]\d+ [(]forward, microbatch 0[)] on (\S+):", text))
    assert len(slices) == 3
    sent = collections.Counter(re.findall(r"transfer on (\S+):", text))
    # Of each microbatch: the middle gets a value and a cotangent; the last stage two values; the first two cotangents.
    assert [sent[slices[f"f{n}"]] for n in range(3)] == [2 * COUNT] * 3


@pytest.mark.one_process
def test_what_is_no_pipeline(add: Any) -> None:
    stages = stages_on(add)
    good: dict[str, Any] = {"microbatches": 4, "name": "m"}
    for change, message in (
        ({"stages": []}, "stages of pipeline 'm': expected a list of placed functions, got []"),
        ({"stages": stages[0]}, "stages of pipeline 'm': expected a list of placed functions, got <pw.jit 'f0'"),
        ({"stages": [stages[0], 3]}, "stages[1] of pipeline 'm': expected a placed function, pw.jit(fun, "),
        ({"stages": [*stages, stages[0]]}, "stages[0] and stages[3] of pipeline 'm' are on slice"),
        ({"microbatches": 0}, "microbatches of pipeline 'm': expected an integer of at least 1, got 0"),
        ({"microbatches": True}, "expected an integer of at least 1, got True"),
        ({"microbatches": 2.0}, "expected an integer of at least 1, got 2.0"),
        ({"reduce": "max"}, "reduce of pipeline 'm': expected \"mean\" or \"sum\", got 'max'"),
        ({"loss": 3}, "loss of pipeline 'm': expected a function loss(output, *targets), got 3"),
    ):
        with pytest.raises(errors.ProgramError, match=re.escape(message)):
            pw.pipeline(**{"stages": stages, **good, **change})
    for lengths, message in (
        ({"F": 1.0}, "lengths of pipeline 'm': expected a mapping with the keys \"F\""),
        ([{"F": 1.0, "B": 2.0}] * 2, "lengths of pipeline 'm': expected one item for all stages, or one for each of 3"),
        ({"F": 1.0, "B": -2.0}, "lengths of pipeline 'm'['B']: expected a number of seconds from 0 on, got -2.0"),
    ):
        with pytest.raises(errors.OptionError, match=re.escape(message)):
            pw.pipeline(stages, **good, lengths=lengths)
    with pytest.raises(errors.OptionError, match="unknown schedule '1f1b'; did you mean '1F1B'"):
        pw.pipeline(stages, microbatches=4, schedule="1f1b")


@pytest.mark.one_process
def test_calls_that_do_not_fit(add: Any) -> None:
    model = pw.pipeline(stages_on(add), microbatches=4, loss=mse, name="m")
    x = np.ones((8, SIZE), np.float32)
    for args, message in (
        ((WEIGHTS[:2], x, x), "params of pipeline 'm': expected one pytree per stage, 3 in all, got 2"),
        (
            ({"w": WEIGHTS}, x, x),
            "expected a list or tuple with one pytree per stage, 3 in all, got an object of type dict",
        ),
        ((WEIGHTS, x[:6], x[:6]), "batch of pipeline 'm': expected a first dimension that divides into 4 microbatches"),
        (
            (WEIGHTS, {"a": x, "b": x[:4]}, x),
            "batch['b'] of pipeline 'm': expected 8 examples in its first dimension, as",
        ),
        ((WEIGHTS, x, x[:4]), "targets[0] of pipeline 'm': expected 8 examples in its first dimension, as in batch"),
        ((WEIGHTS, x, np.float32(3)), "targets[0] of pipeline 'm': expected an array with the batch as its first"),
    ):
        with pytest.raises(errors.ProgramError, match=re.escape(message)):
            model(*args)
    without = pw.pipeline(stages_on(add), microbatches=4, name="m")
    with pytest.raises(errors.ProgramError, match=r"pipeline 'm' has no loss, so it takes .params, batch., got 1 more"):
        without(WEIGHTS, x, x)
    rows = pw.pipeline(stages_on(add), microbatches=4, name="m", loss=lambda y, t: jnp.sum(y, 1))
    with pytest.raises(
        errors.ProgramError, match=r"loss of pipeline 'm': expected it to return a scalar.*float32\[2\]"
    ):
        rows(WEIGHTS, x, x)
    one = pw.jit(lambda w, x: jnp.sum(x @ w)[None], devices=add(1))
    scalars = pw.pipeline([*stages_on(add, 2), one], microbatches=4, name="m")
    with pytest.raises(
        errors.ProgramError, match="last stage of pipeline 'm': expected the microbatch's 2 examples as"
    ):
        scalars(WEIGHTS, x)
    with pytest.raises(errors.ScheduleError, match="has schedule 'GPipe', and pipeline 'm' in it has schedule '1F1B'"):
        pw.program(lambda ws: model(ws, x, x), schedule="GPipe")(WEIGHTS)
    with pytest.raises(errors.OptionError, match="'merge' makes other computations than schedule '1F1B'"):
        pw.program(lambda ws: model(ws, x, x), merge=True)(WEIGHTS)
    mine = pw.pipeline(stages_on(add), microbatches=4, loss=mse, name="m", schedule=lambda *_: [("F", 0, 0)])
    with pytest.raises(
        errors.ScheduleError, match=r"of pipeline 'm' .*stage 0 of 3: expected each of 4 microbatches once"
    ):
        mine(WEIGHTS, x, x)
