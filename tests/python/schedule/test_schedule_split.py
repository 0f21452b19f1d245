"""SCHED-1: the zero-bubble schedule divides backward steps. Its order is in `test_schedules.py`.

Map: a jaxpr in two halves; values of divided stages, and the order on their plan; what is divided; refusals.
"""

from __future__ import annotations

import functools

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
    inside,
    layer,
    network,
    orders,
    placed_network,
    slices,
    square,
)

from pathways import _jaxlib, errors
from pathways.compiler.ir import NodeKind, Phase
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.schedule.halves import halves

ZB = "ZeroBubbleH1"
DRAW = np.random.default_rng(5)


def array(*shape):
    return DRAW.normal(size=shape).astype(np.float32) * 0.5


def over_layers(step, **options):
    """A stage that scans over layers: their weights are stacked."""
    return lambda x, w: jax.lax.scan(step, x, w, **options)[0]


def one_layer(x, w):
    return layer(x, w), None


def scan_of_scans(x, w):
    return jax.lax.scan(lambda x, ws: (over_layers(one_layer)(x, ws), None), x, w)[0]


def one_weight(x, w):
    """The gradient of a weight that all steps of a loop read is a sum in the loop's carry."""
    return jax.lax.scan(lambda x, k: (jnp.tanh(x @ w * k), None), x, jnp.arange(1.0, 4.0))[0]


def with_results(x, w):
    """The loop stacks results, which go on; it has two carries, one of which no gradient goes through."""

    def step(carry, w):
        x, n = carry
        return (layer(x, w), n + 1), jnp.sin(x) * n

    (x, _), rows = jax.lax.scan(step, (x, 1.0), w)
    return x + rows.sum(0)


@jax.custom_vjp
def custom(x, w):
    return x @ w


custom.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
DOTS = jax.checkpoint_policies.dots_saveable

LAYERS = {
    "tanh": (layer, (4, 4)),
    "linear": (lambda x, w: x @ w, (4, 4)),
    "remat": (jax.checkpoint(lambda x, w: layer(layer(x, w[0]), w[1])), (2, 4, 4)),
    "remat of dots": (jax.checkpoint(lambda x, w: layer(layer(x, w[0]), w[1]), policy=DOTS), (2, 4, 4)),
    "jit": (jax.jit(lambda x, w: jax.jit(layer)(jax.jit(layer)(x, w[0]), w[1])), (2, 4, 4)),
    "scan": (over_layers(one_layer), (3, 4, 4)),
    "scan of remat": (over_layers(jax.checkpoint(one_layer)), (3, 4, 4)),
    "remat of scan": (jax.checkpoint(over_layers(one_layer)), (3, 4, 4)),
    "reverse scan": (over_layers(one_layer, reverse=True), (3, 4, 4)),
    "unrolled scan": (over_layers(one_layer, unroll=2), (3, 4, 4)),
    "scan of scans": (scan_of_scans, (2, 3, 4, 4)),
    "one weight": (one_weight, (4, 4)),
    "with results": (with_results, (3, 4, 4)),
    "custom": (custom, (4, 4)),
    "branch": (lambda x, w: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x @ w), (4, 4)),
}


def products(closed):
    """How many matrix products a jaxpr makes; those of a loop count as often as it runs."""

    def count(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            inner = sum(map(count, _jaxlib.sub_jaxprs(eqn.params)))
            total += eqn.params["length"] * inner if eqn.primitive.name == "scan" else inner
            total += eqn.primitive.name == "dot_general"
        return total

    return count(_jaxlib.opened(closed)[0])


@pytest.mark.parametrize("name", LAYERS)
def test_two_halves_make_what_the_whole_makes(name):
    """The first half makes the gradient of the input and not those of the weights; nothing is multiplied twice."""
    stage, shape = LAYERS[name]
    x, w, g = array(2, 4), array(*shape), array(2, 4)
    whole = jax.make_jaxpr(lambda x, w, g: jax.vjp(stage, x, w)[1](g))(x, w, g)
    cut = halves(whole, [True, False])
    assert (cut.first_outputs, cut.second_outputs) == ((0,), (1,))
    first = _jaxlib.as_function(cut.first)(*([x, w, g][n] for n in cut.first_inputs))
    handed = [first[n] for n in cut.handed]
    second = _jaxlib.as_function(cut.second)(*([x, w, g][n] for n in cut.second_inputs), *handed)
    for a, b in zip((first[0], second[0]), _jaxlib.as_function(whole)(x, w, g), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    layers = int(np.prod(shape[:-2])) * (3 if name == "one weight" else 1)
    assert products(cut.second) == layers
    assert products(cut.first) + layers == products(halves(whole, [True, True]).first)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("form", [inside, around])
def test_stages(name, form):
    stage, shape = LAYERS[name]
    params = [array(*shape) for _ in range(3)]
    program = check(form(placed_network(slices(3), stage)), form(network([stage] * 3, square)), ZB, params=params)
    follows(program, ZB, 3, 4)


def test_slices_side_by_side():
    def towers(make):
        first, left, right = (make(layer, n, f"f{n}") for n in range(3))
        join, loss = make(lambda a, b, w: layer(a + b, w), 3, "join"), make(square, 3, "loss")

        def one(ws, x):
            y = first(x, ws[0])
            return loss(join(left(y, ws[1]), right(y, ws[2]), ws[3]))

        return around(one)

    meshes = slices(4)
    made = towers(lambda f, n, name: placed(f, meshes[n], name=name))
    program = check(made, towers(lambda f, n, name: f), ZB, meshes=meshes)
    first, middle, last = expected(ZB, 3, 4)
    assert orders(program) == {"s0": first, "s1": middle, "s2": middle, "s3": last}


def test_bfloat16():
    cast = lambda x, w: layer(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    loss = lambda y: square(y.astype(jnp.float32))
    meshes = slices(3)
    stages = [placed(cast, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]
    one = network(stages, placed(loss, meshes[2], name="loss"))
    follows(check(inside(one), inside(network([cast] * 3, loss)), ZB, tolerance=0.05), ZB, 3, 4)


def test_dropout_with_keys():
    def drop(x, w, key):
        return jax.checkpoint(lambda x, w: layer(x, w) * jax.random.bernoulli(key, 0.5, x.shape))(x, w)

    def step(stages, loss):
        def one(ws, sample):
            x, key = sample
            for n, (stage, w) in enumerate(zip(stages, ws, strict=True)):
                x = stage(x, w, jax.random.fold_in(key, n))
            return loss(x)

        return lambda ws, xs: inside(one)(ws, list(zip(xs, jax.random.split(jax.random.key(0), len(xs)), strict=True)))

    meshes = slices(3)
    stages = [placed(drop, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]
    follows(check(step(stages, placed(square, meshes[2], name="loss")), step([drop] * 3, square), ZB), ZB, 3, 4)


def phases_of(program):
    """The phases of the backward calls of each function."""
    phases = {}
    for node in program.nodes:
        if node.transposes and node.origin and node.label is not None:
            phases.setdefault(node.origin, set()).add(node.label.phase)
    return phases


def test_stages_of_several_functions_and_weights_that_are_trees():
    """Each function of a stage is divided. One whose gradient goes to no other stage is a weight step as a whole."""
    meshes = slices(3)

    def one(make):
        first = [make(lambda x, w: layer(x, w["a"]) + w["b"], n, f"first{n}") for n in range(3)]
        second = [make(lambda x, w: layer(x, w["c"]), n, f"second{n}") for n in range(3)]
        side = [make(lambda w: jnp.sin(w["d"]), n, f"side{n}") for n in range(3)]

        def run(ws, x):
            for f, g, h, w in zip(first, second, side, ws, strict=True):
                x = g(f(x, w) * h(w), w)
            return make(square, 2, "loss")(x)

        return run

    trees = [{"a": array(4, 4), "b": array(4), "c": array(4, 4), "d": array(4)} for _ in range(3)]
    plain = one(lambda f, n, name: f)
    program = check(around(one(lambda f, n, name: placed(f, meshes[n], name=name))), around(plain), ZB, params=trees)
    follows(program, ZB, 3, 4)
    phases = phases_of(program)
    both = {Phase.BACKWARD, Phase.WEIGHTS}
    assert (phases["first1"], phases["second2"]) == (both, both)
    assert (phases["side1"], phases["side0"]) == ({Phase.WEIGHTS}, {Phase.BACKWARD})


def test_weights_that_each_microbatch_prepares():
    """The gradient of a prepared weight goes on to a call of the same stage only, so it can wait."""
    meshes = slices(3)

    def one(make):
        stages = [make(layer, n, f"f{n}") for n in range(3)]
        prepare = [make(lambda w: jnp.sin(w), n, f"prepare{n}") for n in range(3)]
        loss = make(square, 2, "loss")

        def run(ws, x):
            for f, g, w in zip(stages, prepare, ws, strict=True):
                x = f(x, g(w))
            return loss(x)

        return run

    made = one(lambda f, n, name: placed(f, meshes[n], name=name))
    program = check(inside(made), inside(one(lambda f, n, name: f)), ZB)
    follows(program, ZB, 3, 4)
    phases = phases_of(program)
    assert (phases["f1"], phases["prepare1"]) == ({Phase.BACKWARD, Phase.WEIGHTS}, {Phase.WEIGHTS})


def test_a_frozen_stage_has_no_weight_steps():
    def step(one):
        def loss(first, last, ws, xs):
            return sum(one([first, ws[1], last], x) for x in xs)

        return lambda ws, xs: jax.value_and_grad(loss, (0, 1))(ws[0], ws[2], ws, xs)

    program = check(step(placed_network(slices(3))), step(network([layer] * 3, square)), ZB)
    want = expected(ZB, 3, 4)
    assert list(orders(program).values()) == [want[0], [unit for unit in want[1] if unit[0] != "W"], want[2]]


def test_all_microbatches_have_the_same_two_computations():
    few, many = (compiled(around(placed_network(slices(3))), slices(3), m, ZB) for m in (4, 8))
    assert len(few.computations) == len(many.computations)
    whole = compiled(around(placed_network(slices(3))), slices(3), 4, "1F1B")
    assert len(few.computations) == len(whole.computations) + 2  # the second and the third stage


def test_nobody_waits_for_a_weight_step():
    """What a weight step makes is sent nowhere, and only sums of gradients read it."""
    program = compiled(inside(placed_network(slices(4))), slices(4), 6, ZB)
    made = {v for node in program.nodes if node.label and node.label.phase is Phase.WEIGHTS for v in node.outputs}
    assert len(made) == 3 * 6
    for node in program.nodes:
        if not made.isdisjoint(node.inputs):
            assert node.kind is NodeKind.CALL
            assert node.label is not None
            assert node.label.phase is Phase.SUM


def test_plain_operations_on_gradients_of_weights_are_of_the_weight_step():
    def step(one):
        def run(ws, xs):
            grads = [[jnp.sin(g) for g in jax.grad(one)(ws, x)] for x in xs]
            return [sum(each) for each in zip(*grads, strict=True)]

        return run

    program = check(step(placed_network(slices(3))), step(network([layer] * 3, square)), ZB)
    follows(program, ZB, 3, 4)
    made = {v: node for node in program.nodes for v in node.outputs}
    of_weights = [
        (node.label, made[v].label)
        for node in program.nodes
        for v in node.inputs
        if node.label is not None and v in made and made[v].label is not None and not node.origin and made[v].transposes
    ]
    assert len(of_weights) == 3 * 4
    assert all(plain == maker for plain, maker in of_weights)


def loop_of_stage(x, w):
    """A loop whose length only the data knows has no gradient of JAX's, so its derivative is written by hand."""

    @jax.custom_vjp
    def f(x, w):
        return x @ w

    def back(kept, g):
        x, w = kept
        start = (0, jnp.zeros_like(x), jnp.zeros_like(w))
        body = lambda s: (s[0] + 1, g @ w.T, x.T @ g)
        return jax.lax.while_loop(lambda s: s[0] < jnp.int32(1 + 0 * x[0, 0]), body, start)[1:]

    f.defvjp(lambda x, w: (x @ w, (x, w)), back)
    return f(x, w)


def few_weights(x, w, frozen):
    for _ in range(4):
        x = jnp.tanh(x @ frozen)
    return x + w


def sharded(x, w):
    return jax.shard_map(layer, in_specs=(P("x"), P()), out_specs=P("x"))(x, w)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (sharded, "are 0.0% of its operations: one shard_map makes them together with the gradient of its input"),
        (
            loop_of_stage,
            r"backward 0 of 'f.' on slice 's.' cannot be .* are 0.0% .*: one while makes them together with",
        ),
        (
            functools.partial(few_weights, frozen=np.ones((64, 64), np.float32)),
            r"are [0-4][.]\d% of its operations; expected at least 5%. Give schedule '1F1B'",
        ),
    ],
)
def test_a_stage_whose_weights_cannot_wait_is_refused(stage, message):
    meshes = slices(3)
    params = [array(4, 4) for _ in meshes] if stage in (loop_of_stage, sharded) else [array(64) for _ in meshes]
    xs = batches(4) if stage in (loop_of_stage, sharded) else [array(2, 64) for _ in range(4)]
    plain = network([layer if stage is sharded else stage] * 3, square)
    check(inside(placed_network(meshes, stage)), inside(plain), "1F1B", params=params, batch=xs)
    with pytest.raises(errors.ScheduleError, match=rf"schedule 'ZeroBubbleH1' of program '.*'.*{message}"):
        check(inside(placed_network(meshes, stage)), inside(plain), ZB, params=params, batch=xs)


def test_a_pipeline_without_backward_steps_is_refused():
    one = placed_network(slices(3))
    with pytest.raises(errors.ScheduleError, match="splits backward steps, and the program has none"):
        compiled(lambda ws, xs: [one(ws, x) for x in xs], slices(3), 4, ZB)


def test_a_pipeline_without_gradients_of_weights_is_refused():
    one = placed_network(slices(3))
    for step in (
        lambda ws, xs: jax.grad(lambda xs: sum(one(ws, x) for x in xs))(xs),
        lambda ws, xs: jax.grad(lambda w: sum(one([w, *ws[1:]], x) for x in xs))(ws[0]),
    ):
        with pytest.raises(errors.ScheduleError, match="no stage but the first one has gradients of weights"):
            compiled(step, slices(3), 4, ZB)
