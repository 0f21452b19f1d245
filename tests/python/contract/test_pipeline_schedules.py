"""`pw.pipeline` under each schedule: plain JAX's values, in the schedule's order (SCHED-1), or a refusal that says why.

Map: divided backward steps; several chunks per slice; "auto" and lengths; several pipelines; loops; what is
refused, also of orders of one's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_cases import expected

import pathways as pw
from pathways import errors
from pathways.compiler.lengths import Lengths
from pathways.compiler.orders import interleaved, one_forward_one_backward, zero_bubble_h1
from pathways.compiler.schedule import search

RNG = np.random.default_rng(5)
ROWS, SIZE, COUNT = 8, 4, 4


def normal(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 0.7).astype(np.float32)


WEIGHTS = [normal(SIZE, SIZE) for _ in range(6)]
BATCH, TARGETS = normal(ROWS, SIZE), normal(ROWS, SIZE)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def mse(y: Any, t: Any) -> Any:
    return jnp.mean((y - t) ** 2)


def full(ws: Any, x: Any, t: Any) -> Any:
    for w in ws:
        x = layer(w, x)
    return mse(x, t)


def stages_on(slices: Sequence[Any], count: int) -> list[Any]:
    """The stages of a model on the slices in turn."""
    return [pw.jit(layer, devices=slices[n % len(slices)], name=f"f{n}") for n in range(count)]


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)


def units(lowered: Any, depth: int, pipeline: int = 0) -> list[list[str]]:
    """Per slice, the units of a pipeline in the order of the plan: `F0`, `B0`, `W0`, with chunk 1 `F0.1`."""
    rows: list[list[str]] = [[] for _ in range(depth)]
    pattern = r"call f(\d+)[.]\d+ [(](\w)\w+, microbatch (\d+)(?:, chunk (\d+))?(?: of pipeline (\d+))?[)]"
    for stage, phase, number, chunk, other in re.findall(pattern, lowered.as_text("plan")):
        if int(other or 0) == pipeline:
            rows[int(stage) % depth].append(f"{phase.upper()}{number}" + (f".{chunk}" if chunk else ""))
    return rows


def step_of(model: Any) -> Any:
    return pw.program(jax.value_and_grad(model), name="step")


def own(order: Callable[..., Any]) -> Any:
    """A definition, as a user would give it."""
    return lambda *size: [(unit.phase.name[0], unit.microbatch, unit.chunk) for unit in order(*size)]


# ------------------------------------------------------------------------------------------------------ equal bits
def tied(ws: Any) -> Any:
    """The first and the last stage share a weight, which two slices use."""
    return [ws[0], ws[1], ws[0]]


@pytest.mark.parametrize("tie", [False, True])
def test_all_schedules_give_the_same_bits_and_so_does_none(cluster, add, tie: bool) -> None:
    """One debugs with "none". 1.7 ** m lets the gradients differ in size, so each order of additions has its bits."""
    slices = [add(1) for _ in range(3)]
    scale = (1.7 ** np.arange(ROWS)).astype(np.float32)[:, None]
    found = {}
    for schedule in ("none", "GPipe", "1F1B", "ZeroBubbleH1", "auto"):
        model = pw.pipeline(stages_on(slices, 3), microbatches=8, schedule=schedule, loss=mse)
        share = tied if tie else list
        step = pw.program(jax.value_and_grad(lambda ws, x, t, m=model, s=share: m(s(ws), x, t)))
        found[schedule] = jax.tree.map(np.asarray, step(WEIGHTS[: 2 if tie else 3], BATCH * scale, TARGETS * scale))
    for schedule, got in found.items():
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(found["none"]), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=schedule)


# ------------------------------------------------------------------------------------------------- names and values


CASES = {  # the schedule, its slices, its stages, what the order is by definition
    "ZeroBubbleH1": ("ZeroBubbleH1", 3, 3, "ZeroBubbleH1"),
    "Interleaved1F1B": ("Interleaved1F1B", 2, 4, "Interleaved1F1B"),
    "three chunks": ("Interleaved1F1B", 2, 6, "Interleaved1F1B"),
    "Circular": ("Circular", 2, 4, "Circular"),
    "Circular, one chunk": ("Circular", 3, 3, "GPipe"),
    "own, divided": (own(zero_bubble_h1), 3, 3, "ZeroBubbleH1"),
    "own, in chunks": (own(interleaved), 2, 4, "Interleaved1F1B"),
}


def piped(add: Any, case: str) -> Any:
    schedule, depth, count, _ = CASES[case]
    stages = stages_on([add(1) for _ in range(depth)], count)
    return pw.pipeline(stages, microbatches=COUNT, loss=mse, schedule=schedule)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("case", CASES)
def test_values_and_order(add: Any, case: str) -> None:
    _, depth, count, definition = CASES[case]
    step = step_of(piped(add, case))
    ws = WEIGHTS[:count]
    assert units(step.lower(ws, BATCH, TARGETS), depth) == expected(definition, depth, COUNT, count // depth)
    close(step(ws, BATCH, TARGETS), jax.value_and_grad(full)(ws, BATCH, TARGETS))


@pytest.mark.one_process
@pytest.mark.parametrize("case", ["ZeroBubbleH1", "Interleaved1F1B"])
def test_under_one_jit(add: Any, case: str) -> None:
    _, depth, count, definition = CASES[case]
    model, ws = piped(add, case), WEIGHTS[:count]
    step = pw.program(jax.value_and_grad(jax.jit(lambda *args: model(*args))))
    assert units(step.lower(ws, BATCH, TARGETS), depth) == expected(definition, depth, COUNT, count // depth)
    close(step(ws, BATCH, TARGETS), jax.value_and_grad(full)(ws, BATCH, TARGETS))


@pytest.mark.one_process
def test_checkpoint_around_the_whole_model(add: Any) -> None:
    """A backward step then computes forward steps again, of all stages in turn. With chunks, that is a cycle."""
    around = jax.value_and_grad(jax.checkpoint(full))
    for case in ("ZeroBubbleH1", "Interleaved1F1B"):
        model, ws = piped(add, case), WEIGHTS[: CASES[case][2]]
        step = pw.program(jax.value_and_grad(jax.checkpoint(lambda *args, model=model: model(*args))))
        if case == "ZeroBubbleH1":
            close(step(ws, BATCH, TARGETS), around(ws, BATCH, TARGETS))
        else:
            with pytest.raises(errors.ScheduleError, match=r"cannot be followed: backward . of 'f0' .* by its data"):
                step(ws, BATCH, TARGETS)


@pytest.mark.one_process
def test_neighbours_and_one_function_in_several_chunks(add: Any) -> None:
    """Two stages side by side on a slice are one chunk; chunks may be one function, which shares its weights."""
    slices = [add(1), add(1)]
    one = [pw.jit(layer, devices=s, name=f"f{n}") for n, s in enumerate(slices)]
    places = [0, 0, 1, 0, 1, 1]
    model = pw.pipeline([one[n] for n in places], microbatches=COUNT, loss=mse, schedule="Circular")

    def tied(loss: Any) -> Any:
        return jax.value_and_grad(lambda ws: loss([ws[n] for n in places], BATCH, TARGETS))

    close(pw.program(tied(model))(WEIGHTS[:2]), tied(full)(WEIGHTS[:2]))
    lowered = pw.program(tied(model)).lower(WEIGHTS[:2])
    found = [list(dict.fromkeys(row)) for row in units(lowered, 2)]
    assert found == expected("Circular", 2, COUNT, 2)


@pytest.mark.one_process
def test_slices_in_turn_without_a_schedule(add: Any) -> None:
    slices = [add(1), add(1)]
    for count in (3, 4):
        model = pw.pipeline(stages_on(slices, count), microbatches=2, loss=mse, schedule="none")
        ws = WEIGHTS[:count]
        close(step_of(model)(ws, BATCH, TARGETS), jax.value_and_grad(full)(ws, BATCH, TARGETS))


# ------------------------------------------------------------------------------------------------- "auto" and lengths


LENGTHS = [{"F": 1.0, "B": 2.0}, {"F": 4.0, "B": 1.0}, {"F": 1.0, "B": 1.0, "T": 0.5}]


def test_auto_takes_the_lengths_of_the_pipeline(add: Any) -> None:
    stages = stages_on([add(1) for _ in range(3)], 3)
    ws = WEIGHTS[:3]
    step = step_of(pw.pipeline(stages, microbatches=COUNT, loss=mse, schedule="auto", lengths=LENGTHS))
    lowered = step.lower(ws, BATCH, TARGETS)
    choice = search.choose(3, COUNT, [Lengths(1, 2), Lengths(4, 1), Lengths(1, 1, 0, 0.5)])
    assert lowered.logical.schedule == f"auto ({choice.name})"
    found = [[f"{unit[0].name[0]}{unit[1]}" for unit in sequence] for sequence in choice.sequences]
    assert units(lowered, 3) == found
    plot = step.schedule_plot(ws, BATCH, TARGETS)
    assert plot.source == "plan, from given lengths"
    assert plot.lengths == (Lengths(1, 2), Lengths(4, 1), Lengths(1, 1, 0, 0.5))
    assert plot.end == pytest.approx(choice.makespan)
    close(step(ws, BATCH, TARGETS), jax.value_and_grad(full)(ws, BATCH, TARGETS))
    counted = step_of(pw.pipeline(stages, microbatches=COUNT, loss=mse, schedule="auto"))
    assert counted.lower(ws, BATCH, TARGETS).logical.schedule == "auto (1F1B)"


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("schedule", "count", "makespan"),
    [  # of lengths F = 1, B = 1, W = 1 per stage
        ("1F1B", 2, (COUNT + 1) * 3.0),
        ("ZeroBubbleH1", 2, COUNT * 3.0 + 1.0),
        ("Interleaved1F1B", 4, COUNT * 6.0 + 3.0),
        ("Circular", 4, COUNT * 6.0 + 3.0),
    ],
)
def test_the_plot_has_the_formula_of_each_schedule(add: Any, schedule: str, count: int, makespan: float) -> None:
    model = pw.pipeline(
        stages_on([add(1), add(1)], count),
        microbatches=COUNT,
        loss=mse,
        schedule=schedule,
        lengths={"F": 1, "B": 1, "W": 1},
    )
    plot = step_of(model).schedule_plot(WEIGHTS[:count], BATCH, TARGETS)
    assert plot.schedule == schedule
    assert plot.end == makespan
    busy = 3.0 * COUNT * count / 2
    assert plot.bound == pytest.approx(100 * (1 - busy / makespan))


@pytest.mark.one_process
def test_lengths_of_neighbours_and_of_a_loss_on_its_own_slice(add: Any) -> None:
    slices = [add(1), add(1), add(1)]
    two = [pw.jit(layer, devices=slices[n], name=f"f{k}") for k, n in enumerate((0, 0, 1))]
    loss = pw.jit(mse, devices=slices[2], name="loss")
    good: dict[str, Any] = {"microbatches": COUNT, "schedule": "GPipe"}
    each = [{"F": 1, "B": 2}, {"F": 3, "B": 4}, {"F": 5, "B": 6}]
    plain = step_of(pw.pipeline(two, **good, loss=mse, lengths=each)).lower(WEIGHTS[:3], BATCH, TARGETS)
    assert plain.logical.pipelines[0].lengths == (Lengths(4, 6), Lengths(5, 6))
    last = step_of(pw.pipeline(two, **good, loss=loss, lengths=[*each, {"F": 0, "B": 1}]))
    found = last.lower(WEIGHTS[:3], BATCH, TARGETS).logical.pipelines[0].lengths
    assert found == (Lengths(4, 6), Lengths(5, 6), Lengths(0, 1))
    with pytest.raises(errors.OptionError, match="one for each of 4 stages, got 3 items"):
        pw.pipeline(two, **good, loss=loss, lengths=each)


# ------------------------------------------------------------------------------------------------- several pipelines


def test_two_pipelines_with_a_schedule_each(add: Any) -> None:
    """The second model reads the gradient step of the first one, on the same slices."""
    slices = [add(1), add(1)]
    first = pw.pipeline(stages_on(slices, 2), microbatches=COUNT, loss=mse, schedule="ZeroBubbleH1")
    second = pw.pipeline(stages_on(slices, 4), microbatches=2, loss=mse, schedule="Interleaved1F1B")
    third = pw.pipeline(stages_on(slices, 2), microbatches=COUNT, loss=mse, schedule="auto")

    def train(one: Any, two: Any, three: Any) -> Any:
        def step(ws: Any) -> Any:
            grads = jax.grad(one)(ws[:2], BATCH, TARGETS)
            moved = [w - 0.1 * g for w, g in zip(ws[:2], grads, strict=True)]
            more = jax.grad(two)([*moved, *ws[2:4]], TARGETS, BATCH)
            return grads, more, jax.value_and_grad(three)(more[:2], BATCH, TARGETS)

        return step

    step = pw.program(train(first, second, third), name="step")
    ws = WEIGHTS[:4]
    close(step(ws), train(full, full, full)(ws))
    lowered = step.lower(ws)
    assert [each.schedule for each in lowered.logical.pipelines] == ["ZeroBubbleH1", "Interleaved1F1B", "auto (1F1B)"]
    assert lowered.logical.schedule == "ZeroBubbleH1 and Interleaved1F1B and auto (1F1B)"
    assert units(lowered, 2, 0) == expected("ZeroBubbleH1", 2, COUNT)
    assert units(lowered, 2, 1) == expected("Interleaved1F1B", 2, 2, 2)
    assert units(lowered, 2, 2) == expected("1F1B", 2, COUNT)
    plot = step.schedule_plot(ws)
    assert plot.lengths == () and plot.bound is not None
    with pytest.raises(
        errors.OptionError, match=r"lengths of .*: expected one item for all stages, or one for each of 4"
    ):
        step.schedule_plot(ws, lengths=[{"F": 1, "B": 1}] * 2)


@pytest.mark.one_process
def test_pipelines_that_run_at_the_same_time(add: Any) -> None:
    """Neither reads anything of the other, on slices of their own."""
    first = pw.pipeline(stages_on([add(1), add(1)], 2), microbatches=COUNT, loss=mse, schedule="ZeroBubbleH1")
    second = pw.pipeline(stages_on([add(1), add(1)], 4), microbatches=COUNT, loss=mse, schedule="Circular")

    def both(one: Any, two: Any) -> Any:
        return jax.value_and_grad(lambda ws: one(ws[:2], BATCH, TARGETS) + two(ws[2:], BATCH, TARGETS))

    step = pw.program(both(first, second))
    close(step(WEIGHTS), both(full, full)(WEIGHTS))
    lowered = step.lower(WEIGHTS)
    assert units(lowered, 2, 0) == expected("ZeroBubbleH1", 2, COUNT)
    assert units(lowered, 2, 1) == expected("Circular", 2, COUNT, 2)


# ------------------------------------------------------------------------------------------------- loops


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubbleH1", "auto"])
def test_each_iteration_of_a_loop_is_a_pipeline_of_its_own(add: Any, schedule: str) -> None:
    """Training steps in a `jax.lax.scan`: its body is traced once, so all iterations have the names of one pipeline."""
    model = pw.pipeline(stages_on([add(1), add(1)], 2), microbatches=COUNT, loss=mse, schedule=schedule)
    batches = np.stack([BATCH, TARGETS, BATCH * 0.5])

    def steps(loss: Any) -> Any:
        def one(ws: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(ws, x, TARGETS)
            return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

        return lambda ws, xs: jax.lax.scan(one, ws, xs)

    program = pw.program(steps(model), name="steps")
    lowered = program.lower(WEIGHTS[:2], batches)
    assert len(lowered.logical.pipelines) == 3
    for number in range(3):
        definition = "1F1B" if schedule == "auto" else schedule
        assert units(lowered, 2, number) == expected(definition, 2, COUNT)
    close(program(WEIGHTS[:2], batches), steps(full)(WEIGHTS[:2], batches))


@pytest.mark.one_process
def test_gradients_around_a_loop_of_pipelines(add: Any) -> None:
    """Each iteration reads the one before. GPipe's order allows that; that of 1F1B would be a cycle."""

    def around(loss: Any) -> Any:
        def total(ws: Any, xs: Any) -> Any:
            return jax.lax.scan(lambda c, x: (c + loss(ws, x * (1 + c), TARGETS), None), 0.0, xs)[0]

        return jax.value_and_grad(total)

    stages, batches = stages_on([add(1), add(1)], 2), np.stack([BATCH, TARGETS])
    model = pw.pipeline(stages, microbatches=COUNT, loss=mse, schedule="GPipe")
    program = pw.program(around(model))
    close(program(WEIGHTS[:2], batches), around(full)(WEIGHTS[:2], batches))
    lowered = program.lower(WEIGHTS[:2], batches)
    for number in range(2):
        assert units(lowered, 2, number) == expected("GPipe", 2, COUNT)
    model = pw.pipeline(stages, microbatches=COUNT, loss=mse, schedule="1F1B")
    with pytest.raises(errors.ScheduleError, match="cannot be followed"):
        pw.program(around(model))(WEIGHTS[:2], batches)


@pytest.mark.one_process
def test_a_schedule_within_a_loop_that_the_data_ends(add: Any) -> None:
    stages = stages_on([add(1), add(1)], 2)

    def loop(loss: Any) -> Any:
        def once(ws: Any) -> Any:
            grads = jax.grad(loss)(ws, BATCH, TARGETS)
            return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]

        return lambda ws: jax.lax.while_loop(lambda ws: jnp.sum(ws[0]) > 0, once, ws)

    for schedule in ("1F1B", "none"):
        model = pw.pipeline(stages, microbatches=COUNT, loss=mse, schedule=schedule, name="m")
        (turns,) = pw.program(loop(model)).lower(WEIGHTS[:2]).logical.loops
        assert turns.count is None


def test_weights_that_are_variables(add: Any) -> None:
    """Each run updates them in place, behind the pipeline."""
    slices = [add(1), add(1)]
    model = pw.pipeline(stages_on(slices, 2), microbatches=COUNT, loss=mse, schedule="ZeroBubbleH1")
    weights = [pw.Variable(w, s) for w, s in zip(WEIGHTS, slices, strict=False)]

    @pw.program
    def step() -> Any:
        value, grads = jax.value_and_grad(model)([w.value for w in weights], BATCH, TARGETS)
        for w, g in zip(weights, grads, strict=True):
            w.value -= 0.1 * g
        return value

    want = WEIGHTS[:2]
    for _ in range(3):
        value, grads = jax.value_and_grad(full)(want, BATCH, TARGETS)
        want = [w - 0.1 * g for w, g in zip(want, grads, strict=True)]
        close(step(), value)
    close([w.value for w in weights], want)
    assert units(step.lower(), 2) == expected("ZeroBubbleH1", 2, COUNT)


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.one_process
def test_slices_that_do_not_fit_the_schedule(add: Any) -> None:
    slices = [add(1), add(1)]
    turn = stages_on(slices, 4)
    for schedule in ("1F1B", "GPipe", "ZeroBubbleH1", "auto"):
        with pytest.raises(
            errors.ProgramError, match=f"one stage per slice under '{schedule}'. Give 'Interleaved1F1B'"
        ):
            pw.pipeline(turn, microbatches=4, schedule=schedule)
    for schedule in ("Interleaved1F1B", "Circular", own(one_forward_one_backward)):
        with pytest.raises(
            errors.ProgramError, match=r"visits slices in the order .*; expected each of the 2 slices in"
        ):
            pw.pipeline(turn[:3], microbatches=4, schedule=schedule)
    model = pw.pipeline(stages_on(slices, 2), microbatches=4, loss=mse, schedule="Interleaved1F1B")
    with pytest.raises(errors.ScheduleError, match="each slice has one chunk of the model"):
        step_of(model)(WEIGHTS[:2], BATCH, TARGETS)
    model = pw.pipeline(turn, microbatches=1, loss=mse, schedule="Interleaved1F1B")
    with pytest.raises(errors.ScheduleError, match=r"of pipeline .* 1 microbatches do not divide by 2 slices"):
        step_of(model)(WEIGHTS[:4], BATCH, TARGETS)
    model = pw.pipeline(stages_on(slices, 2), microbatches=4, schedule="ZeroBubbleH1")
    with pytest.raises(errors.ScheduleError, match="it splits backward steps, and the program has none"):
        model(WEIGHTS[:2], BATCH)


@pytest.mark.one_process
def test_an_own_order_that_lacks_a_chunk_or_weight_steps(add: Any) -> None:
    slices = [add(1), add(1)]

    def order(stage: int, stages: int, microbatches: int, chunks: int) -> Any:
        return [("F", m, 0) for m in range(microbatches)]

    model = pw.pipeline(stages_on(slices, 4), microbatches=2, loss=mse, schedule=order)
    with pytest.raises(errors.ScheduleError, match=r"stage 0 of 2: .*'F' lacks microbatches \[0, 1\] of chunk 1"):
        step_of(model)(WEIGHTS[:4], BATCH, TARGETS)

    def half(stage: int, stages: int, microbatches: int, chunks: int) -> Any:
        return [*((p, m, 0) for p in "FB" for m in range(microbatches)), ("W", 0, 0)]

    model = pw.pipeline(stages_on(slices, 2), microbatches=2, loss=mse, schedule=half)
    with pytest.raises(errors.ScheduleError, match=r"'W' lacks microbatches \[1\]"):
        step_of(model)(WEIGHTS[:2], BATCH, TARGETS)

    def only_here(stage: int, stages: int, microbatches: int, chunks: int) -> Any:
        return [(p, m, 0) for p in ("FBW" if stage == 0 else "FB") for m in range(microbatches)]

    model = pw.pipeline(stages_on(slices, 2), microbatches=2, loss=mse, schedule=only_here)
    with pytest.raises(errors.ScheduleError, match=r"the order of stage 1 has not each step of slice .* it misses"):
        step_of(model)(WEIGHTS[:2], BATCH, TARGETS)


@pytest.mark.one_process
def test_accumulated_gradients_have_one_stage_per_slice(add: Any) -> None:
    stages = stages_on([add(1), add(1)], 4)

    def loss(ws: Any, x: Any) -> Any:
        for stage, w in zip(stages, ws, strict=True):
            x = stage(w, x)
        return jnp.sum(x)

    for schedule in ("Interleaved1F1B", "Circular", "1F1B"):
        step = pw.program(pw.accumulate_gradients(loss, microbatches=2), schedule=schedule)
        with pytest.raises(errors.ScheduleError, match="more than once; expected one stage per slice"):
            step(WEIGHTS[:4], BATCH)
