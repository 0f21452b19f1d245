"""SCHED-1: scopes say which calls are microbatches. What is doubtful without them is followed exactly with them.

Map: forms of the loop; programs that are refused without scopes; several pipelines; sums without a schedule; bodies and
the memo; what is refused.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_cases import (
    batches,
    expected,
    follows,
    layer,
    network,
    orders,
    place,
    placed_network,
    slices,
    square,
    weights,
)
from reference import Reference

from pathways import _jaxlib, errors
from pathways.compiler import pipeline, pipeline_spec
from pathways.compiler.ir import NodeKind, Phase
from pathways.compiler.partition import bodies
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.pipeline_spec import PipelineSpec
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.schedule import own
from pathways.compiler.trace import Argument, trace
from pathways.plan.binding import BoundProgram, host_plan
from pathways.plan.memory_profile import Profile

MESHES = slices(3)
STAGES = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(MESHES)]
LOSS = placed(square, MESHES[2], name="loss")
ONE = placed_network(MESHES)
PLAIN = network([layer] * 3, square)


def scope(microbatch, name="p0"):
    return jax.named_scope(f"pw.{name}.mb{microbatch}")


def around(one, name="p0"):
    def total(ws, xs):
        losses = []
        for n, x in enumerate(xs):
            with scope(n, name):
                losses.append(one(ws, x))
        return sum(losses)

    return jax.value_and_grad(total)


def inside(one, name="p0"):
    def step(ws, xs):
        total, grads = 0.0, None
        for n, x in enumerate(xs):
            with scope(n, name):
                loss, more = jax.value_and_grad(one)(ws, x)
            total += loss
            grads = more if grads is None else jax.tree.map(jnp.add, grads, more)
        return total, grads

    return step


def traced(fun, ws, xs):
    return trace(fun, [[place(w, m) for w, m in zip(ws, MESHES, strict=True)], [place(x, MESHES[0]) for x in xs]])


def check(fun, plain, schedule="1F1B", microbatches=4):
    """Compiles a step and runs it in the reference interpreter; its results are plain JAX's."""
    ws, xs = weights(3), batches(microbatches)
    program = compile_traced(traced(fun, ws, xs), {"schedule": schedule})
    for a, b in zip(Reference(program)(*ws, *xs), jax.tree.leaves(plain(ws, xs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)
    return program


def refused(fun, message, schedule="1F1B", error=errors.ScheduleError, **options):
    with pytest.raises(error, match=message):
        compile_traced(traced(fun, weights(3), batches(4)), {"schedule": schedule, **options})


@jax.custom_vjp
def doubled(ws, x):
    return ONE(ws, x)


doubled.defvjp(lambda ws, x: (ONE(ws, x), (ws, x)), lambda kept, g: jax.vjp(ONE, *kept)[1](g))

FORMS = {
    "around": around(ONE),
    "inside": inside(ONE),
    "jit inside": inside(jax.jit(ONE)),
    "jit around": jax.jit(around(ONE)),
    "remat": around(jax.checkpoint(ONE)),
    "custom derivative": around(doubled),
}


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_the_loop_has_its_order_and_right_values(form, schedule):
    program = check(FORMS[form], around(PLAIN), schedule)
    follows(program, schedule, 3, 4)


def test_vmap_around_keeps_the_scopes():
    def many(one):
        return lambda ws, xs: jax.vmap(around(one), in_axes=(0, None))([jnp.stack([w, w * 2]) for w in ws], xs)

    follows(check(many(ONE), many(PLAIN)), "1F1B", 3, 4)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["pw.p0.mb3"], _jaxlib.Scope("p0", 3)),
        (["pw.model_1.mb12.s7", "a layer"], _jaxlib.Scope("model_1", 12, 7)),
        (["pw.outer.mb1", "pw.inner.mb0"], _jaxlib.Scope("inner", 0)),
        (["pw.p0.mb3", "pw.p0.mb.s1"], _jaxlib.Scope("p0", 3, 1)),
        (["pw.p0.mb.s1"], _jaxlib.Scope("p0", None, 1)),
        (["pw.p0.mb3", "pw.p0.s1"], _jaxlib.Scope("p0", 3)),
        (["pw.p0.s1"], None),
        (["pw.p0.mb"], None),
        (["pw.p0.mb3.layer"], None),
        (["upw.p0.mb3"], None),
        ([], None),
    ],
)
def test_the_names_of_scopes(names, found):
    def run(x):
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(jax.named_scope(name))
            return jnp.sin(x)

    for fun, x in ((run, 1.0), (jax.grad(run), 1.0), (jax.vmap(run), jnp.ones(3))):
        assert {_jaxlib.scope_of(eqn) for eqn in jax.make_jaxpr(fun)(x).jaxpr.eqns} == {found}


def towers(stages, loss):
    """Two towers of the same functions and weights, whose results meet in the loss."""

    def one(ws, x):
        left, right = x, x[::-1] * 0.5
        for stage, w in zip(stages[:2], ws, strict=False):
            left, right = stage(left, w), stage(right, w)
        return loss(stages[2](left, ws[2])) + loss(stages[2](right, ws[2]))

    return one


def layers(stages, loss):
    """Two calls of one function with the same weights in each stage."""

    def one(ws, x):
        for stage, w in zip(stages, ws, strict=True):
            x = stage(stage(x, w), w)
        return loss(x)

    return one


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("model", [towers, layers])
def test_towers_and_layers_are_parts_of_a_microbatch(model, schedule):
    one, plain = model(STAGES, LOSS), model([layer] * 3, square)
    program = check(around(one), around(plain), schedule)
    follows(program, schedule, 3, 4)
    calls = [node for node in program.nodes if node.origin == "f0" and node.label.phase is Phase.FORWARD]
    assert [node.label.microbatch for node in calls] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_second_derivatives_are_followed():
    def second(one):
        return jax.grad(lambda ws, xs: jnp.sum(around(one)(ws, xs)[1][0]))

    follows(check(second(ONE), second(PLAIN)), "1F1B", 3, 4)


def test_one_microbatch_may_be_left_without_gradients():
    def last_only(one):
        def total(ws, xs):
            with scope(0):
                a = one(ws, xs[0])
            with scope(1):
                return a + jax.lax.stop_gradient(one(ws, xs[1]))

        return jax.value_and_grad(total)

    ws, xs = weights(3), batches(2)
    program = compile_traced(traced(last_only(ONE), ws, xs), {"schedule": "1F1B"})
    assert orders(program) == {"s0": ["F0", "F1", "B0"], "s1": ["F0", "F1", "B0"], "s2": ["F0", "B0", "F1"]}


def test_pipelines_of_one_program_are_independent():
    def twice(one):
        def step(ws, xs):
            _, grads = inside(one, "first")(ws, xs)
            moved = [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]
            return inside(one, "second")(moved, xs[:3])

        return step

    program = check(twice(ONE), twice(PLAIN))
    for number, microbatches in ((0, 4), (1, 3)):
        rows = {}
        for node in program.nodes:
            if node.origin and node.label is not None and node.label.pipeline == number:
                row = rows.setdefault(program.meshes[program.computations[node.computation].mesh].name, [])
                unit = f"{node.label.phase.name[0]}{node.label.microbatch}"
                if unit not in row:
                    row.append(unit)
        assert list(rows.values()) == expected("1F1B", 3, microbatches)


def test_pipelines_one_after_the_other_keep_the_activations_of_one():
    """Three whole pipelines in the text: on each slice the first ends before the second begins. Two that the text calls
    in turn are in turn."""

    def of_three(one):
        return lambda ws, xs: [inside(one, name)(ws, xs) for name in "abc"]

    program = check(of_three(ONE), of_three(PLAIN))
    for mesh in range(3):
        calls = [
            node.label.pipeline
            for node in program.nodes
            if node.origin and node.label is not None and program.computations[node.computation].mesh == mesh
        ]
        assert calls == sorted(calls)

    def in_turn(one):
        def total(ws, xs):
            losses = []
            for n, x in enumerate(xs):
                for name in "ab":
                    with scope(n, name):
                        losses.append(one(ws, x))
            return sum(losses)

        return jax.value_and_grad(total)

    program = check(in_turn(ONE), in_turn(PLAIN))
    calls = [node.label for node in program.nodes if node.origin == "f0"]
    assert [(label.pipeline, label.microbatch) for label in calls[:6]] == [(n, m) for m in range(3) for n in (0, 1)]


def test_calls_outside_of_the_scopes_have_no_label():
    prepare = placed(lambda w: w * 2.0, MESHES[0], name="prepare")
    update = placed(lambda w, g: w - 0.1 * g, MESHES[0], name="update")

    def step(one, prepare, update):
        def run(ws, xs):
            loss, grads = inside(one)([prepare(ws[0]), *ws[1:]], xs)
            return loss, update(ws[0], grads[0])

        return run

    program = check(step(ONE, prepare, update), step(PLAIN, lambda w: w * 2.0, lambda w, g: w - 0.1 * g))
    follows(program, "1F1B", 3, 4)
    assert [node.label for node in program.nodes if node.origin in ("prepare", "update")] == [None, None]


def test_sums_without_a_schedule_are_made_behind_their_gradients():
    decode = placed(lambda y, e, w: y @ e.T @ w, MESHES[2], name="decode")

    def tied(stages, decode, loss):
        return lambda ws, x: loss(decode(stages[1](stages[0](x, ws[0]), ws[1]), ws[0], ws[2]))

    one, plain = tied(STAGES, decode, LOSS), tied([layer] * 2, lambda y, e, w: y @ e.T @ w, square)
    program = check(around(one), around(plain), "none")
    calls = [node for node in program.nodes if node.kind is NodeKind.CALL]
    assert [n.label.microbatch for n in calls if n.origin == "f1"] == [0, 1, 2, 3, 0, 1, 2, 3]
    sums = [node for node in calls if node.label is not None and node.label.phase is Phase.SUM]
    assert sorted(node.label.microbatch for node in sums) == [1, 1, 1, 2, 2, 2, 3, 3, 3]  # one on each slice
    for node in sums:
        place = calls.index(node)
        makers = [n for n, other in enumerate(calls) if set(other.outputs) & set(node.inputs)]
        assert all(other in sums for other in calls[max(makers) + 1 : place])
    names = [mesh.name for mesh in program.meshes]
    sent = [
        node
        for node in program.nodes
        if node.kind is NodeKind.TRANSFER
        and names[program.values[node.inputs[0]].mesh] == "s2"
        and names[program.values[node.outputs[0]].mesh] == "s0"
    ]
    assert len(sent) == 1  # the decoder's share of the tied gradient crosses once, not once per microbatch


def peaks(schedule, microbatches, rows=1024):
    """Per stage, each on a host of its own, the most memory in activations of one microbatch."""
    ws = [Argument((4, 4), np.float32, False, mesh, ((), ())) for mesh in MESHES]
    xs = [Argument((rows, 4), np.float32, False, MESHES[0], ((), ())) for _ in range(microbatches)]
    bound = BoundProgram(
        compile_traced(trace(around(ONE), [ws, xs]), {"schedule": schedule}), ((0,), (1,), (2,)), devices_per_host=1
    )
    found = []
    for host in range(3):
        plan = host_plan(bound, host, True)
        (need,) = Profile(bound, host, True).memory(plan, [0] * len(plan.launches)).devices
        found.append(need.peak / (rows * 4 * 4))
    return found


def test_the_activations_that_a_schedule_keeps():
    """1F1B: as many as there are stages from this one on, two per microbatch here; GPipe: of all microbatches."""
    few = [peaks("1F1B", microbatches) for microbatches in (4, 8, 16)]
    assert few[0] == few[1] == few[2]
    assert [round(peak) for peak in few[0]] == [6, 5, 3]
    for microbatches in (4, 8):
        assert all(peak >= 2 * microbatches for peak in peaks("GPipe", microbatches))


def test_scopes_do_not_multiply_the_bodies(monkeypatch):
    lowered = []
    lower = bodies._jaxlib.lower_jaxpr

    def counting(*args):
        lowered.append(args)
        return lower(*args)

    monkeypatch.setattr(bodies._jaxlib, "lower_jaxpr", counting)
    monkeypatch.setattr(pipeline, "key_of", lambda traced: None)  # compiles what it has compiled before, too
    counts = []
    for fun in (inside(ONE), unscoped):
        for microbatches in (4, 6):
            lowered.clear()
            compile_traced(traced(fun, weights(3), batches(microbatches)), {"schedule": "1F1B"})
            counts.append(len(lowered))
    assert counts[:2] == counts[2:]
    assert 10 < counts[0] < 20


def unscoped(ws, xs):
    total, grads = 0.0, None
    for x in xs:
        loss, more = jax.value_and_grad(ONE)(ws, x)
        total += loss
        grads = more if grads is None else jax.tree.map(jnp.add, grads, more)
    return total, grads


def test_programs_that_differ_in_scopes_only_are_different_programs():
    def forward(first, second):
        def run(ws, xs):
            out = []
            for number, x in zip((first, second), xs, strict=True):
                with scope(number):
                    out.append(STAGES[1](STAGES[0](x, ws[0]), ws[1]))
            return out

        return run

    programs = [
        compile_traced(traced(forward(*numbers), weights(3), batches(2)), {"schedule": "GPipe"})
        for numbers in ((0, 1), (1, 0))
    ]
    made = [[node.label.microbatch for node in p.nodes if node.origin == "f0"] for p in programs]
    reads = [[node.inputs[0] for node in p.nodes if node.origin == "f0"] for p in programs]
    assert made == [[0, 1], [0, 1]]
    assert reads[0] == reads[1][::-1]


def test_equal_pipelines_have_equal_names():
    spec = PipelineSpec("model", "1F1B", 4, tuple(MESHES))
    names = [pipeline_spec.register(spec, 0), pipeline_spec.register(spec, 1)]
    assert names[0] != names[1]
    assert [pipeline_spec.register(PipelineSpec("model", "1F1B", 4, tuple(MESHES)), n) for n in (0, 1)] == names
    assert pipeline_spec.find(names[0]) == spec


def between(ws, xs):
    out = []
    for n, x in enumerate(xs):
        with scope(n):
            y = STAGES[0](x, ws[0])
        y = STAGES[1](y, ws[1])
        with scope(n):
            out.append(STAGES[2](y, ws[2]))
    return out


def skips_one(ws, xs):
    out = []
    for n, x in enumerate(xs):
        with scope(n + (n > 1)):
            out.append(STAGES[0](x, ws[0]))
    return out


def carried(ws, xs):
    """Each microbatch reads a result of the backward step of the one before."""
    total, state = 0.0, 0.0
    for n, x in enumerate(xs):
        with scope(n):
            loss, grads = jax.value_and_grad(ONE)([ws[0] + state, *ws[1:]], x)
        total, state = total + loss, grads[0]
    return total


def visits_twice(ws, x):
    return square(STAGES[1](STAGES[0](STAGES[1](STAGES[0](x, ws[0]), ws[1]), ws[2]), ws[2]))


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (between, r"'f1' .* reads a result of a microbatch .*it has no scope; expected .*\"pw.p0.mb0\""),
        (skips_one, r"no placed call has the scope of microbatches \[2\] of 5 of pipeline 'p0'"),
        (
            carried,
            r"schedule '1F1B' of pipeline 'p0' of program 'carried' cannot be followed: .* by the schedule, that",
        ),
        (around(visits_twice), r"visit slices \['s0', 's1'\] more than once; expected one stage per slice"),
    ],
)
def test_what_cannot_be_followed_is_refused(fun, message):
    refused(fun, message)


def test_a_microbatch_may_read_the_one_before_if_the_schedule_allows_it():
    def state(stages):
        def run(ws, xs):
            kept, out = 0.0, []
            for n, x in enumerate(xs):
                with scope(n):
                    kept = stages[0](x + kept, ws[0])
                    out.append(stages[2](stages[1](kept, ws[1]), ws[2]))
            return out

        return run

    program = check(state(STAGES), state([layer] * 3))
    assert orders(program) == {name: ["F0", "F1", "F2", "F3"] for name in ("s0", "s1", "s2")}


def of(schedule, one=ONE):
    """A pipeline of four microbatches with a schedule of its own."""
    name = pipeline_spec.register(PipelineSpec("model", schedule, 4), 0)
    return around(one, name)


def test_a_pipeline_brings_its_schedule():
    follows(check(of("GPipe"), around(PLAIN), "none"), "GPipe", 3, 4)
    follows(check(of("GPipe"), around(PLAIN), "GPipe"), "GPipe", 3, 4)
    refused(
        of("GPipe"), "has schedule '1F1B', and pipeline 'model' in it has schedule 'GPipe'; expected one of the two"
    )
    refused(of("GPipe"), "'merge' makes other computations", "none", errors.OptionError, merge=True)


def backwards(stage, stages, microbatches, chunks):
    """All forward steps, then the backward steps from the last microbatch to the first."""
    del stage, stages, chunks
    return [("F", m, 0) for m in range(microbatches)] + [("B", m, 0) for m in reversed(range(microbatches))]


def test_a_schedule_of_ones_own():
    program = check(of(backwards), around(PLAIN), "none")
    assert list(orders(program).values()) == [["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0"]] * 3
    against = of(lambda stage, stages, count, chunks: [(p, m, 0) for m in range(count) for p in "BF"])
    refused(against, "cannot be followed: .* by the schedule", "none")


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([("F", 0, 0), ("B", 0, 0), ("F", 1, 0)], "'B' lacks microbatches \\[1\\]"),
        ([("F", 0, 0), ("F", 0, 0)], r"\('F', 0, 0\) is there twice"),
        ([("X", 0, 0)], r'phase "F", "B" or "W", microbatch from 0 to 1 and chunk 0, got \(\'X\', 0, 0\)'),
        ([("F", 2, 0)], r"got \('F', 2, 0\)"),
        ([("F", 0, 1)], r"got \('F', 0, 1\)"),
        (["F0"], "got 'F0'"),
        (None, "expected a list of units .*, got None"),
    ],
)
def test_an_order_of_ones_own_that_is_none(units, message):
    with pytest.raises(errors.ScheduleError, match=f"title, stage 1 of 2: .*{message}"):
        own.units_of(lambda *_: units, 1, 2, 2, 1, "title")
