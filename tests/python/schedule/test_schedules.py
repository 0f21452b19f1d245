"""SCHED-1: a pipeline follows its schedule on each stage, or is refused; values are plain JAX's.

Map: the definitions on the plan; forms of the loop; values; sums of gradients. Programs that are refused are in
`test_schedule_refusals.py`.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from pipeline_cases import (
    around,
    batches,
    check,
    compiled,
    expected,
    follows,
    fori_inside,
    inside,
    layer,
    map_around,
    network,
    orders,
    placed_network,
    scan_around,
    scan_inside,
    sliced,
    slices,
    square,
    unit_name,
)
from thoroughness import THOROUGHNESS

from pathways import errors
from pathways.compiler.ir import MeshSpec, NodeKind, Phase
from pathways.compiler.orders import ORDERS
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import device_put
from pathways.plan.binding import BoundProgram, plan_text

PLAIN = network([layer] * 3, square)
SCHEDULES = ("GPipe", "1F1B", "ZeroBubbleH1", "Circular")
SIZES = [(stages, microbatches) for stages in range(2, 9) for microbatches in range(1, 17)]
FEW = [(2, 1), (2, 4), (3, 7), (4, 2), (5, 5), (8, 3), (8, 16)]


def nodes(program, phase):
    return [node for node in program.nodes if node.label is not None and node.label.phase is phase]


def transfers(program, source, target):
    """The transfers from slice `source` to slice `target`."""
    names = [mesh.name for mesh in program.meshes]
    ends = [
        (names[program.values[node.inputs[0]].mesh], names[program.values[node.outputs[0]].mesh])
        for node in program.nodes
        if node.kind is NodeKind.TRANSFER
    ]
    return ends.count((source, target))


@pytest.mark.parametrize("schedule", ORDERS)
def test_the_definitions(schedule):
    """The first stage makes its weights within its backward step: a weight step stands directly behind that."""
    for stages, microbatches in SIZES:
        for chunks in {"Circular": (1, 2, 3), "Interleaved1F1B": (2, 3)}.get(schedule, (1,)):
            if schedule == "Interleaved1F1B" and microbatches % stages:
                continue
            want = expected(schedule, stages, microbatches, chunks)
            got = [
                [unit_name(*unit) for unit in ORDERS[schedule].order(stage, stages, microbatches, chunks)]
                for stage in range(stages)
            ]
            for n, unit in reversed(list(enumerate(got[0]))):
                if unit[0] == "W":
                    assert got[0][n - 1] == f"B{got[0].pop(n)[1:]}"
            assert got == want, (stages, microbatches, chunks)


@pytest.mark.sampled(0.35)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES if THOROUGHNESS > 1 else FEW)
def test_the_order_on_the_plan(schedule, stages, microbatches):
    meshes = slices(stages)
    program = compiled(around(placed_network(meshes)), meshes, microbatches, schedule)
    follows(program, schedule, stages, microbatches)


FORMS = {
    "around": around,
    "inside": inside,
    "jit": lambda one: inside(jax.jit(one)),
    "remat": lambda one: around(jax.checkpoint(one)),
    "mean": lambda one: jax.value_and_grad(lambda ws, xs: jnp.mean(jnp.stack([one(ws, x) for x in xs]))),
    "vmap": lambda one: (
        lambda ws, xs: jax.vmap(around(one), in_axes=(0, None))([jnp.stack([w, w * 2]) for w in ws], xs)
    ),
}


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_the_loop_has_the_same_order_and_right_values(form, schedule):
    one = placed_network(slices(3))
    program = check(FORMS[form](one), FORMS[form](PLAIN), schedule, exact=form == "inside")
    follows(program, schedule, 3, 4)


LOOPS = {"scan_around": scan_around, "map_around": map_around, "scan_inside": scan_inside, "fori_inside": fori_inside}


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", LOOPS)
def test_loops_of_jax_over_microbatches_have_the_same_order_and_right_values(form, schedule):
    one = placed_network(slices(3))
    program = check(LOOPS[form](one), LOOPS[form](PLAIN), schedule, batch=np.stack(batches(4)))
    follows(program, schedule, 3, 4)


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_of_one_array_are_cut_off_as_they_are_needed(schedule):
    program = check(sliced(placed_network(slices(3))), sliced(PLAIN), schedule, batch=np.stack(batches(4)), exact=True)
    follows(program, schedule, 3, 4)
    cut = [
        node.label.microbatch
        for node in program.nodes
        if node.kind is NodeKind.CALL and node.inputs == (program.arguments[3],)
    ]
    first = next(
        n
        for n, node in enumerate(program.nodes)
        if node.kind is NodeKind.CALL and node.label is not None and node.label.phase is Phase.BACKWARD
    )
    assert cut == [0, 1, 2, 3]
    before = [node for node in program.nodes[:first] if node.inputs == (program.arguments[3],)]
    assert len(before) == (4 if schedule in ("GPipe", "Circular") else 3)


def stages_of(network_of, schedule, **options):
    """A network of its own: `network_of(make)` gives (weights, microbatch) -> loss; `make(f, slice, name)` a stage."""
    meshes = slices(3)
    one = network_of(lambda f, n, name: placed(f, meshes[n], name=name))
    plain = network_of(lambda f, n, name: f)
    return check(around(one), around(plain), schedule, **options)


def tied(make):
    embed, middle = make(lambda x, e: x @ e, 0, "embed"), make(layer, 1, "middle")
    decode, loss = make(lambda y, e, w: y @ e.T @ w, 2, "decode"), make(square, 2, "loss")
    return lambda ws, x: loss(decode(middle(embed(x, ws[0]), ws[1]), ws[0], ws[2]))


def skip(make):
    first, second = make(layer, 0, "first"), make(layer, 1, "second")
    third, loss = make(lambda x, y, w: jnp.tanh(x @ w + y), 2, "third"), make(square, 2, "loss")

    def one(ws, x):
        early = first(x, ws[0])
        return loss(third(second(early, ws[1]), early, ws[2]))

    return one


def linear(make):
    return network([make(lambda x, w: x @ w * 0.1, n, f"f{n}") for n in range(3)], make(square, 2, "loss"))


def constant_gradients(make):
    """The first backward steps read nothing that a microbatch has made."""
    stages = [
        make(lambda x, w: x @ w, 0, "f0"),
        make(lambda x, w: x + w[0], 1, "f1"),
        make(lambda x, w: x * w[0], 2, "f2"),
    ]
    return network(stages, make(jnp.sum, 2, "loss"))


def biases(make):
    """No backward step reads anything that a microbatch has made."""
    return network([make(lambda x, w: x + w[0], n, f"f{n}") for n in range(3)], make(jnp.sum, 2, "loss"))


def towers(make):
    """Two towers of the same functions and weights, whose results meet in the loss."""
    stages, loss = [make(layer, n, f"f{n}") for n in range(3)], make(square, 2, "loss")

    def one(ws, x):
        left, right = x, x[::-1] * 0.5
        for stage, w in zip(stages, ws, strict=True):
            left, right = stage(left, w), stage(right, w)
        return loss(left + right)

    return one


def plain_between(make):
    stages = [make(layer, n, f"f{n}") for n in range(3)]

    def one(ws, x):
        for stage, w in zip(stages, ws, strict=True):
            x = stage(x * 2, w) + 1
        return jnp.mean(x**2)

    return one


def layers_of_one_weight(make):
    stages = [make(layer, n, f"f{n}") for n in range(3)]
    loss = make(square, 2, "loss")
    return lambda ws, x: loss(stages[2](stages[1](stages[0](stages[0](x, ws[0]), ws[0]), ws[1]), ws[2]))


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [tied, skip, linear, constant_gradients, plain_between, layers_of_one_weight, towers])
def test_networks(make, schedule):
    program = stages_of(make, schedule)
    if schedule == "ZeroBubbleH1" and make is constant_gradients:
        # The gradient of a stage's input is a constant, or is that of its result. Then no step makes it.
        want = [[unit for unit in row if n == 0 or unit[0] != "B"] for n, row in enumerate(expected(schedule, 3, 4))]
        found = list(orders(program).values())
        assert [[unit for unit in row if n == 0 or unit[0] != "B"] for n, row in enumerate(found)] == want
    else:
        follows(program, schedule, 3, 4)
    if make is tied:  # SUM: the gradient crosses once per run, not once per microbatch
        assert transfers(program, "s2", "s0") == 1
        assert len(nodes(program, Phase.SUM)) == 3 * 3
    if make is plain_between:  # no plain computation has operations of several microbatches
        plain = [node for node in program.nodes if node.kind is NodeKind.CALL and not node.origin]
        assert sum(node.label is not None and node.label.phase is Phase.FORWARD for node in plain) == 24


def test_backward_steps_that_read_nothing_of_any_microbatch_are_refused():
    with pytest.raises(errors.ScheduleError, match=r"backward of '.*' shares nothing with one microbatch"):
        stages_of(biases, "1F1B")


def last_only(one):
    return jax.value_and_grad(lambda ws, xs: one(ws, xs[0]) + jax.lax.stop_gradient(one(ws, xs[1])))


def second_derivative(one):
    total = jax.grad(lambda ws, xs: sum(one(ws, x) for x in xs))
    return jax.grad(lambda ws, xs: sum(jnp.sum(g) for g in total(ws, xs)))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_fewer_or_more_backward_steps_than_microbatches(schedule):
    """As with scopes: what there is of a microbatch has its place."""
    one = placed_network(slices(3))
    program = check(last_only(one), last_only(PLAIN), schedule, microbatches=2)
    first = {"GPipe": ["F0", "F1", "B0"], "1F1B": ["F0", "B0", "F1"]}[schedule]
    assert list(orders(program).values()) == [["F0", "F1", "B0"], ["F0", "F1", "B0"], first]
    follows(check(second_derivative(one), second_derivative(PLAIN), schedule), schedule, 3, 4)


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loop_per_stage_with_plain_operations_between_them(schedule):
    """Plain operations of several microbatches stand together in the text; they are not one computation."""

    def step(stages, loss):
        def total(ws, xs):
            for stage, w in zip(stages, ws, strict=True):
                xs = [stage(x, w) for x in reversed(xs)]
                xs = [x * 2 for x in xs]
            return sum(loss(x) for x in xs)

        return jax.value_and_grad(total)

    meshes = slices(3)
    stages = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]
    program = check(step(stages, placed(square, meshes[2], name="loss")), step([layer] * 3, square), schedule)
    follows(program, schedule, 3, 4)


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_comes_before_and_behind_a_pipeline_has_no_label(schedule):
    meshes = slices(3)
    double = [placed(lambda w: w * 2, mesh, name="double") for mesh in meshes]
    update = [placed(lambda w, g: w - 0.1 * g, mesh, name="update") for mesh in meshes]

    def step(one, double, update):
        def run(ws, xs):
            prepared = [f(w) for f, w in zip(double, ws, strict=True)]
            keys, scaled = jax.random.key(3), []
            for x in xs:
                keys, key = jax.random.split(keys)
                scaled.append(x * jax.random.bernoulli(key, 0.5, x.shape))
            loss, grads = inside(one)(prepared, scaled)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
            return loss, norm, [f(w, g) for f, w, g in zip(update, ws, grads, strict=True)]

        return run

    plain = step(PLAIN, [lambda w: w * 2] * 3, [lambda w, g: w - 0.1 * g] * 3)
    program = check(step(placed_network(meshes), double, update), plain, schedule)
    follows(program, schedule, 3, 4)
    assert [node.label for node in program.nodes if node.origin in ("double", "update")] == [None] * 6


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_several_devices_and_puts_by_the_user(schedule):
    meshes = [MeshSpec("a", (("x", 2),)), MeshSpec("b", (("x", 4),)), MeshSpec("c", (("x", 1),))]
    stages = [
        placed(layer, mesh, in_shardings=(P("x"), P()), out_shardings=P("x"), name=f"f{n}")
        for n, mesh in enumerate(meshes[:2])
    ] + [placed(layer, meshes[2], name="f2")]
    loss = placed(square, meshes[2], name="loss")

    def one(ws, x):
        for stage, w, mesh in zip(stages, ws, meshes, strict=True):
            x = stage(device_put(x, mesh, P()), w)
        return loss(x)

    draw = np.random.default_rng(0)
    xs = [draw.normal(size=(4, 4)).astype(np.float32) for _ in range(3)]
    program = check(inside(one), inside(PLAIN), schedule, meshes=meshes, batch=xs, exact=True)
    follows(program, schedule, 3, 3)


def test_forward_only_and_frozen_stages():
    def frozen(one):
        return lambda ws, xs: jax.value_and_grad(lambda w: sum(one([*ws[:2], w], x) for x in xs))(ws[2])

    one = placed_network(slices(3))
    program = check(frozen(one), frozen(PLAIN), "1F1B")
    forward = [f"F{n}" for n in range(4)]
    assert orders(program) == {"s0": forward, "s1": forward, "s2": expected("1F1B", 3, 4)[2]}
    outputs = check(lambda ws, xs: [one(ws, x) for x in xs], lambda ws, xs: [PLAIN(ws, x) for x in xs], "GPipe")
    assert set(map(tuple, orders(outputs).values())) == {tuple(forward)}


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", [around, inside])
def test_gradients_are_added_in_place_right_behind_their_backward_step(form, schedule):
    """MEM-4: each sum donates the sum before it. A gradient waits for nothing but its own addition."""
    program = compiled(form(placed_network(slices(4))), slices(4), 6, schedule)
    sums = nodes(program, Phase.SUM)
    assert [sum(node.label.stage == stage for node in sums) for stage in range(4)] == [5] * 4
    assert all(any(node.donates) for node in sums)
    for stage in range(4):
        mine = [
            (node.label.phase.value, node.label.microbatch)
            for node in program.nodes
            if node.label is not None and node.label.stage == stage and node.label.phase is not Phase.FORWARD
        ]
        want = []
        for unit in expected(schedule, 4, 6)[stage]:
            phase, n = {"F": "", "B": "backward", "W": "weights"}[unit[0]], int(unit[1:])
            want += [(phase, n)] if phase else []
            if n and phase == ("weights" if stage and schedule == "ZeroBubbleH1" else "backward"):
                want += [("sum", n)]
        assert mine == want


def decayed(ws, grads, loss):
    return [g + 0.01 * w for g, w in zip(grads, ws, strict=True)]


def decayed_before(ws, grads, loss):
    return [0.01 * w + g for g, w in zip(grads, ws, strict=True)]


def scaled_by_the_loss(ws, grads, loss):
    return [g + loss * w for g, w in zip(grads, ws, strict=True)]


def rows(program, slice_name):
    """The labels of a slice's computations in their order; a computation without a label is its name."""
    return [
        f"{node.label.phase.name[0]}{node.label.microbatch}" if node.label is not None else node.name
        for node in program.nodes
        if node.kind is NodeKind.CALL and program.meshes[program.computations[node.computation].mesh].name == slice_name
    ]


@pytest.mark.parametrize("then", [decayed, decayed_before, scaled_by_the_loss])
def test_what_is_added_to_a_sum_of_gradients_is_added_last(then):
    def step(one):
        def run(ws, xs):
            loss, grads = inside(one)(ws, xs)
            return then(ws, grads, loss)

        return run

    program = check(step(placed_network(slices(3))), step(PLAIN), "1F1B", exact=then is decayed)
    want = ["B0", "B1", "S1", "B2", "S2", "B3", "S3"]
    for stage in range(3):
        row = [label for label in rows(program, f"s{stage}") if label[0] in "BS"]
        assert [label for n, label in enumerate(row) if label != row[n - 1]][-7:] == want


def test_gradients_that_come_by_a_device_put_are_added_when_they_come():
    meshes = slices(3)
    stages = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]
    loss = placed(square, meshes[2], name="loss")

    def tied_by_hand(ws, x):
        return loss(stages[2](stages[1](stages[0](x, ws[0]), ws[1]), device_put(ws[0], meshes[2], P())))

    program = check(around(tied_by_hand), around(lambda ws, x: PLAIN([ws[0], ws[1], ws[0]], x)), "1F1B")
    row = rows(program, "s0")
    assert row.index("S0") < row.index("B1")
    assert row.index("S1") < row.index("B2")


def test_gpipe_may_have_one_loss_of_all_microbatches():
    def step(stages, loss):
        through = network(stages, lambda y: y)
        return jax.value_and_grad(lambda ws, xs: loss(jnp.concatenate([through(ws, x) for x in xs])))

    meshes = slices(3)
    stages = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]
    program = check(step(stages, placed(square, meshes[2], name="loss")), step([layer] * 3, square), "GPipe")
    follows(program, "GPipe", 3, 4)


@pytest.mark.parametrize("by_hand", [False, True])
def test_sends_stand_behind_the_node_that_makes_the_value(by_hand):
    """jaxlib's compiler moves it there, whether it was added by the compiler or is a `device_put` of the user's."""
    meshes = slices(4)
    stages = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]
    if by_hand:
        stages = [
            lambda x, w, f=f, mesh=mesh: f(device_put(x, mesh, P()), w) for f, mesh in zip(stages, meshes, strict=True)
        ]
    program = compiled(inside(network(stages, placed(square, meshes[3], name="loss"))), meshes, 5, "1F1B")
    follows(program, "1F1B", 4, 5)
    for n, node in enumerate(program.nodes):
        if node.kind is NodeKind.TRANSFER:
            maker = next(k for k, other in enumerate(program.nodes) if node.inputs[0] in other.outputs)
            assert all(other.kind is NodeKind.TRANSFER for other in program.nodes[maker + 1 : n])


def test_the_order_is_followed_on_every_host_of_a_plan():
    program = compiled(inside(placed_network(slices(3))), slices(3), 5, "1F1B")
    text = plan_text(BoundProgram(program, ((0,), (1,), (2,)), 1))
    for stage, order in enumerate(expected("1F1B", 3, 5)):
        calls = re.findall(rf"call f{stage}[.]\d+ [(](forward|backward), microbatch (\d)[)]", text)
        assert [f"{phase[0].upper()}{number}" for phase, number in calls] == order


def test_equal_bodies_are_lowered_once():
    """Labels make no more computations: one forward, one backward and one sum per stage, for any microbatches."""
    few, many = (compiled(around(placed_network(slices(3))), slices(3), m, "1F1B") for m in (4, 8))
    assert len(few.computations) == len(many.computations)


def test_programs_without_a_schedule_have_no_labels():
    program = compiled(inside(placed_network(slices(2))), slices(2), 3, "none")
    assert all(node.label is None for node in program.nodes)
    assert orders(program) == {}
