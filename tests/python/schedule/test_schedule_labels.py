"""SCHED-1: which calls are microbatches. Each program here is followed exactly, or refused; no other order comes out.

Map: programs that prepare their batch or weights; parts that share something; calls that are not parts; custom
derivatives; plain stages.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from pipeline_cases import (
    around,
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

from pathways import errors
from pathways.compiler.ir import NodeKind, Phase
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import Argument, device_put, trace

MESHES = slices(3)
ONE = placed_network(MESHES)
STAGES = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(MESHES)]
LOSS = placed(square, MESHES[2], name="loss")


def cast(ws):
    """Weights as plain operations make them in the loop: each microbatch has variables of its own."""
    return [w.astype(jnp.bfloat16).astype(jnp.float32) for w in ws]


def argument(shape, mesh=MESHES[0]):
    return Argument(shape, "float32", False, mesh, ((),) * len(shape))


def plan(fun, *arguments, schedule="1F1B"):
    """The program of `fun` on weights of three stages and `arguments`."""
    ws = [argument((4, 4), mesh) for mesh in MESHES]
    return compile_traced(trace(fun, [ws, *arguments]), {"schedule": schedule})


def cut(xs):
    return jnp.split(placed(lambda b: b * 2, MESHES[0], name="prepare")(jnp.concatenate(xs)), len(xs))


def prepared(ws):
    return [placed(lambda w: w * 2, mesh, name="prepare_weights")(w) for w, mesh in zip(ws, MESHES, strict=True)]


def parts(xs):
    whole = placed(lambda b: tuple(jnp.split(b, len(xs))), MESHES[0], name="prepare")
    return whole(jnp.concatenate(xs))


PREPARED = {
    "cut with cast weights": lambda ws, xs: inside(lambda ws, x: ONE(cast(ws), x))(ws, cut(xs)),
    "cut": lambda ws, xs: inside(ONE)(ws, cut(xs)),
    "cut with prepared weights": lambda ws, xs: inside(ONE)(prepared(ws), cut(xs)),
    "parts": lambda ws, xs: inside(ONE)(ws, parts(xs)),
}


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("name", PREPARED)
def test_a_batch_or_weights_prepared_by_one_call(name, schedule):
    follows(compiled(PREPARED[name], MESHES, 4, schedule), schedule, 3, 4)


def twice_prepared(ws, xs):
    """Each slice's function prepares two weights, so all microbatches are connected by calls of one function."""
    prepare = [placed(lambda w: w * 2, mesh, name="prepare") for mesh in MESHES]
    pairs = [[f(w), f(w + 1)] for f, w in zip(prepare, ws, strict=True)]

    def loss(pairs, x):
        for stage, pair in zip(STAGES, pairs, strict=True):
            x = stage(stage(x, pair[0]), pair[1])
        return LOSS(x)

    return inside(loss)(pairs, xs)


def samples(ws, xs):
    """Two random samples of each part of the batch: one microbatch or two?"""
    noisy = placed(lambda x, w, key: layer(x * jax.random.bernoulli(key, 0.5, x.shape), w), MESHES[0], name="noisy")

    def loss(ws, sample):
        x, key = sample
        return LOSS(STAGES[2](STAGES[1](noisy(x, ws[0], key), ws[1]), ws[2]))

    keys = iter(jax.random.split(jax.random.key(0), 2 * len(xs)))
    return around(loss)(ws, [(x, next(keys)) for x in xs for _ in range(2)])


def either(ws, xs):
    """Two microbatches of two samples, or the other way round: only the sums say which."""
    return jax.value_and_grad(lambda ws: sum(sum(LOSS(STAGES[0](x, w)) for x in xs) for w in ws))(ws)


def two_models(ws, xs):
    """Two pipelines of the same functions: each reads weights that the other one does not read."""
    return [around(ONE)(some, xs) for some in (ws, [w * 2 for w in ws])]


def evaluated(ws, xs):
    """A step, and the losses once more without derivatives."""
    return inside(ONE)(ws, xs), [ONE(ws, x) for x in xs]


def recomputed(ws, xs):
    """Each microbatch is cut off the batch where it is computed, and once more where it is computed again."""
    whole = jnp.stack(xs)
    parts = [jax.checkpoint(lambda ws, whole, n=n: ONE(ws, whole[n])) for n in range(len(xs))]
    return jax.value_and_grad(lambda ws: sum(part(ws, whole) for part in parts))(ws)


def uneven(ws, xs):
    """Two microbatches, the second of one row."""
    return inside(lambda ws, x: ONE(cast(ws), x))(ws, [xs[0], xs[1][:1]])


def carried(ws, xs):
    """The weights are parts of one array, so every use of them is another variable."""
    stacked = jnp.stack(ws)

    def loss(w):
        state, total = 0.0, 0.0
        for x in xs:
            state = STAGES[0](x + state, w[0])
            total += LOSS(STAGES[2](STAGES[1](state, w[1]), w[2]))
        return total

    return jax.value_and_grad(loss)(stacked)


def statistics(weights_of, loss):
    """Each microbatch reads a number that the one before has made on its own slice."""
    stages = [
        placed(lambda x, w, s: (jnp.tanh(x @ w) - s, 0.9 * s + 0.1 * jnp.mean(x)), mesh, name=f"f{n}")
        for n, mesh in enumerate(MESHES)
    ]

    def through(ws, states, x):
        new = []
        for stage, w, state in zip(stages, weights_of(ws), states, strict=True):
            x, state = stage(x, w, state)
            new.append(state)
        return loss(x), new

    def step(ws, xs):
        total, grads, states = 0.0, None, [jnp.mean(w) for w in ws]
        for x in xs:
            (part, states), more = jax.value_and_grad(through, has_aux=True)(ws, states, x)
            total += part
            grads = more if grads is None else jax.tree.map(jnp.add, grads, more)
        return total, grads, states

    return step


def embedded(ws, xs):
    """The first stage has microbatches that look alike; the others read a result of the microbatch before."""
    embed = placed(lambda x: x * 2, MESHES[0], name="embed")

    def loss(ws):
        state, total = 0.0, 0.0
        for x in xs:
            state = STAGES[1](embed(x) + state, ws[1])
            total += LOSS(STAGES[2](state, ws[2]))
        return total

    return jax.value_and_grad(loss)(ws)


def layers(ws, xs):
    """One microbatch, whose stages call their function twice: it looks like two that read one another."""

    def one(ws, x):
        for stage, w in zip(STAGES, ws, strict=True):
            x = stage(stage(x, w), w * 2)
        return LOSS(x)

    return inside(one)(ws, xs)


CONNECTED = "'f0' on slice 's0' is called 4 times, and its calls are connected"
REFUSED = {
    "twice prepared": (twice_prepared, 4, "'prepare' on slice 's0' is called 2 times, and its calls are connected"),
    "samples": (samples, 4, "2 of 8 parts .* share an input .* of forward of 'noisy' on slice 's0'"),
    "either": (either, 2, "of 6 parts .* share an input .* of forward of 'f0'"),
    "two models": (two_models, 4, "of 8 parts .* share an input .* of forward of 'f.'"),
    "evaluated": (evaluated, 4, "'f0' .* results of the types .* in one microbatch, and .* in another"),
    "recomputed": (recomputed, 4, "backward of '.*' shares nothing with one microbatch"),
    "uneven": (uneven, 2, r"'f0' .* types \['float32\[2,4\]'.* in one microbatch, and \['float32\[1,4\]'"),
    "carried": (carried, 4, CONNECTED),
    "statistics": (statistics(list, square), 4, CONNECTED),
    "cast statistics": (statistics(cast, LOSS), 4, CONNECTED),
    "plain loss": (statistics(cast, square), 4, CONNECTED),
    "embedded": (embedded, 4, "'embed' on slice 's0' is called 4 times, and its calls are connected"),
    "layers of one": (layers, 1, "'f0' on slice 's0' is called 2 times, and its calls are connected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_certain_is_refused(name):
    step, microbatches, message = REFUSED[name]
    with pytest.raises(errors.ScheduleError, match=rf"{message}.*Name the microbatches: .*pw\.p0\.mb0.* no schedule"):
        compiled(step, MESHES, microbatches, "1F1B")


def test_a_call_for_all_microbatches_in_the_middle_of_them_is_refused():
    middle = placed(lambda ys: jnp.mean(ys), MESHES[1], name="middle")

    def step(ws, xs):
        ys = [STAGES[0](x, ws[0]) for x in xs]
        center = middle(jnp.concatenate(ys))
        return [STAGES[1](y - center, ws[1]) for y in ys]

    with pytest.raises(errors.ScheduleError, match=r"'middle' .* reads a result of a microbatch .*\"pw.p0.mb0\""):
        compiled(step, MESHES, 4, "GPipe")


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("form", [inside, around])
def test_custom_derivatives_that_call_placed_functions(form, schedule):
    def stage(n):
        forward = placed(layer, MESHES[n], name=f"forward{n}")
        backward = placed(lambda x, w, g: jax.vjp(layer, x, w)[1](g), MESHES[n], name=f"backward{n}")
        f = jax.custom_vjp(forward)
        f.defvjp(lambda x, w: (forward(x, w), (x, w)), lambda kept, g: backward(*kept, g))
        return f

    one = network([stage(n) for n in range(3)], LOSS)
    assert list(orders(compiled(form(one), MESHES, 4, schedule)).values()) == expected(schedule, 3, 4)


def middle(ws, x):
    return LOSS(STAGES[2](jnp.tanh(device_put(STAGES[0](x, ws[0]), MESHES[1], P()) @ ws[1]), ws[2]))


def last(ws, x):
    return square(device_put(STAGES[1](STAGES[0](x, ws[0]), ws[1]), MESHES[2], P()) @ ws[2])


@pytest.mark.parametrize(("one", "mesh"), [(middle, "s1"), (last, "s2")])
def test_a_stage_of_plain_operations_only_is_refused(one, mesh):
    with pytest.raises(errors.ScheduleError, match=f"on slice '{mesh}' into a placed function"):
        compiled(inside(one), MESHES, 4, "1F1B")


def test_metrics_may_be_plain_operations_on_another_slice():
    def step(ws, xs):
        def one(ws, x):
            y = STAGES[1](STAGES[0](x, ws[0]), ws[1])
            return square(y), y

        results = [jax.value_and_grad(one, has_aux=True)(ws, x) for x in xs]
        return results, [jnp.mean(device_put(y, MESHES[2], P())) for (_, y), _ in results]

    follows(compiled(step, MESHES, 4, "1F1B"), "1F1B", 2, 4)


@pytest.mark.parametrize("operation", [lambda x: x * 2, jnp.sin])
def test_plain_operations_in_front_of_a_stage_wait_for_its_turn(operation):
    """A queue never waits for an operation of a later microbatch than that of the unit that follows."""
    meshes = slices(6)
    stages = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]

    def one(ws, x):
        for stage, w in zip(stages, ws, strict=True):
            x = jnp.tanh(stage(operation(x), w))
        return jnp.mean(x**2)

    program = compiled(inside(one), meshes, 8, "1F1B")
    follows(program, "1F1B", 6, 8)
    calls = [node for node in program.nodes if node.kind is NodeKind.CALL and node.label is not None]
    for mesh in range(1, 6):
        queue = [node for node in calls if program.meshes[program.computations[node.computation].mesh] == meshes[mesh]]
        done = -1  # the last forward step of the stage
        for node, following in itertools.pairwise(queue):
            if node.label.phase is Phase.FORWARD and not node.origin and node.label.microbatch > done:
                assert following.label.phase is not Phase.BACKWARD
            elif node.label.phase is Phase.FORWARD and node.origin:
                done = node.label.microbatch


def test_a_custom_derivative_of_which_a_call_reads_weights_only_is_refused():
    scale = placed(lambda x: x * 2, MESHES[1], name="scale")
    f = jax.custom_vjp(STAGES[1])
    f.defvjp(lambda x, w: (STAGES[1](x, w), w), lambda w, g: (scale(g), scale(w)))

    def step(ws, xs):
        one = lambda ws, x: LOSS(STAGES[2](f(STAGES[0](x, ws[0]), ws[1]), ws[2]))
        return inside(one)([ws[0], scale(ws[1]), ws[2]], xs)

    with pytest.raises(errors.ScheduleError, match=r"backward of 'scale' on slice 's1' shares nothing with one"):
        compiled(step, MESHES, 4, "1F1B")
