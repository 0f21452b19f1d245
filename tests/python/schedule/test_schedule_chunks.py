"""SCHED-1: pipelines in which each slice has several chunks of the model follow their schedule, or are refused.

Map: the order on the plan; which chunk a backward step is of; values; memory; refusals.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from pipeline_cases import (
    around,
    check,
    compiled,
    follows,
    inside,
    layer,
    network,
    placed_network,
    slices,
    square,
)
from thoroughness import THOROUGHNESS

from pathways import errors
from pathways.compiler.ir import Phase
from pathways.compiler.placed import TaggedFunction as placed

SCHEDULES = ("Interleaved1F1B", "Circular")
SIZES = [
    (schedule, stages, microbatches, chunks)
    for schedule in SCHEDULES
    for stages in range(2, 9)
    for microbatches in range(1, 17)
    for chunks in (2, 3)
    if schedule == "Circular" or microbatches % stages == 0
]
FEW = [
    ("Interleaved1F1B", 2, 2, 2),
    ("Interleaved1F1B", 2, 6, 3),
    ("Interleaved1F1B", 4, 8, 2),
    ("Interleaved1F1B", 8, 8, 2),
    ("Circular", 2, 1, 2),
    ("Circular", 3, 7, 2),
    ("Circular", 4, 8, 3),
]
PLAIN = network([layer] * 4, square)


@pytest.mark.sampled(0.35)
@pytest.mark.parametrize(("schedule", "stages", "microbatches", "chunks"), SIZES if THOROUGHNESS > 1 else FEW)
def test_the_order_on_the_plan(schedule, stages, microbatches, chunks):
    meshes = slices(stages) * chunks
    program = compiled(around(placed_network(meshes)), meshes, microbatches, schedule)
    follows(program, schedule, stages, microbatches, chunks)
    assert program.nodes[0].label is not None
    chunk = {node.origin: node.label.chunk for node in program.nodes if node.origin and node.label is not None}
    assert chunk == {f"f{n}": n // stages for n in range(stages * chunks)} | {"loss": chunks - 1}


def one_function(meshes):
    """All chunks of a slice are calls of one function, with weights of their own."""
    stages = {mesh: placed(layer, mesh, name="f") for mesh in meshes}
    return network([stages[mesh] for mesh in meshes], placed(square, meshes[-1], name="loss"))


def linear(meshes):
    """A backward step shares only its input and its weights with its forward step."""
    stages = {mesh: placed(lambda x, w: x @ w * 0.5, mesh, name="f") for mesh in meshes}
    return network([stages[mesh] for mesh in meshes], placed(square, meshes[-1], name="loss"))


def plain_between(meshes):
    stages = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]
    steps = [lambda x, w, f=f: jnp.sin(f(x * 2, w)) for f in stages]
    return network(steps, square)


def skip(meshes):
    """The first chunk of each slice sends to the second one, too."""
    stages = [placed(lambda x, w, early: layer(x, w) + early, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]

    def one(ws, x):
        made = [x]
        for n, (stage, w) in enumerate(zip(stages, ws, strict=True)):
            made.append(stage(made[-1], w, made[n - 1] if n > 1 else 0.0))
        return square(made[-1])

    return one


def plain_skip(ws, x):
    made = [x]
    for n, w in enumerate(ws):
        made.append(layer(made[-1], w) + (made[n - 1] if n > 1 else 0.0))
    return square(made[-1])


PLAIN_FORMS = {
    linear: network([lambda x, w: x @ w * 0.5] * 4, square),
    plain_between: network([lambda x, w: jnp.sin(layer(x * 2, w))] * 4, square),
    skip: plain_skip,
}


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", [inside, around])
@pytest.mark.parametrize("make", [placed_network, one_function, linear, plain_between, skip])
def test_values_of_two_chunks_per_slice(make, form, schedule):
    meshes = slices(2) * 2
    program = check(form(make(meshes)), form(PLAIN_FORMS.get(make, PLAIN)), schedule, meshes=meshes)
    follows(program, schedule, 2, 4, 2)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tied_weights_of_two_chunks_are_added_on_their_slice(schedule):
    meshes = slices(2) * 2
    stages = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]

    def tie(stages):
        return lambda ws, x: network(stages, square)([ws[0], ws[1], ws[0], ws[1]], x)

    program = check(around(tie(stages)), around(tie([layer] * 4)), schedule, meshes=meshes)
    follows(program, schedule, 2, 4, 2)
    gradients = [node for node in program.nodes if node.label is not None and node.label.phase is Phase.SUM]
    assert {node.label.stage for node in gradients} == {0, 1}


def test_forward_steps_only():
    meshes = slices(2) * 2
    one = placed_network(meshes)
    program = compiled(lambda ws, xs: [one(ws, x) for x in xs], meshes, 4, "Interleaved1F1B")
    labels = [node.label for node in program.nodes if node.origin == "f0" or node.origin == "f2"]
    assert [(label.microbatch, label.chunk) for label in labels] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)
    ]  # fmt: skip


def way(*numbers):
    """A pipeline whose microbatches visit slices in this order."""
    all_slices = slices(max(numbers) + 1)
    return [all_slices[n] for n in numbers]


@pytest.mark.parametrize(
    ("meshes", "schedule", "message"),
    [
        (way(0, 1, 0, 1), "1F1B", r"visit slices \['s0', 's1'\] more than once.* use Interleaved1F1B or Circular"),
        (way(0, 1, 0, 1), "ZeroBubbleH1", "more than once; expected one stage per slice"),
        (way(0, 1, 2), "Interleaved1F1B", "each slice has one chunk of the model; .* give '1F1B'"),
        (
            way(0, 1, 2, 0, 1, 2),
            "Interleaved1F1B",
            "4 microbatches do not divide by 3 slices; .* multiple of 3. 'Circular'",
        ),
        (way(0, 1, 1, 0), "Circular", r"in the order \['s0', 's1', 's0'\]; expected each of the 2 slices in turn"),
        (way(0, 1, 0), "Interleaved1F1B", r"in the order \['s0', 's1', 's0'\]; expected each of the 2 slices in turn"),
        (way(0, 1, 2, 1, 0, 2), "Circular", "expected each of the 3 slices in turn, the same number of times"),
    ],
)
def test_what_cannot_be_followed_is_refused(meshes, schedule, message):
    with pytest.raises(errors.ScheduleError, match=rf"schedule '{schedule}' of program '.*'.*{message}"):
        compiled(around(placed_network(meshes)), meshes, 4, schedule)


def test_slices_side_by_side_have_no_chunks():
    meshes = slices(3)
    f, g, h = (placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(meshes))

    def one(ws, x):
        y = f(x, ws[0])
        return jnp.sum(f(g(y, ws[1]) + h(y, ws[2]), ws[0]))

    with pytest.raises(errors.ScheduleError, match="expected each of the 3 slices in turn"):
        compiled(around(one), meshes, 3, "Circular")


def test_chunks_that_nothing_tells_apart_are_refused():
    """The backward steps of the two chunks of a slice read nothing of them, and are of one function."""
    f, g = (placed(lambda x, w: x + w[0], mesh, name=f"f{n}") for n, mesh in enumerate(slices(2)))
    one = lambda ws, x: jnp.sum(jnp.sin(g(f(g(f(x, ws[0]), ws[1]), ws[2]), ws[3])))
    with pytest.raises(errors.ScheduleError, match=r"shares nothing with one microbatch in one chunk"):
        compiled(jax.value_and_grad(lambda ws, xs: sum(one(ws, x) for x in xs)), slices(2) * 2, 4, "Interleaved1F1B")
