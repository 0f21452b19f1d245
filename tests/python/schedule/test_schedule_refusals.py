"""SCHED-1: a program that cannot follow its schedule is refused, with the reason."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import pytest
from pipeline_cases import around, compiled, follows, inside, layer, network, placed_network, slices, square

from pathways import errors
from pathways.compiler.partition import lower
from pathways.compiler.placed import TaggedFunction as placed


def carried(one):
    first, rest = placed(layer, slices(3)[0], name="f0"), placed_network(slices(3)[1:], name="g")

    def loss(ws, xs):
        state, total = 0.0, 0.0
        for x in xs:
            state = first(x + state, ws[0])
            total += rest(ws[1:], state)
        return total

    return jax.value_and_grad(loss)


def of_all(one):
    meshes = slices(3)
    stages = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(meshes)]
    through, loss = network(stages, lambda y: y), placed(square, meshes[2], name="loss")
    return jax.value_and_grad(lambda ws, xs: loss(jnp.concatenate([through(ws, x) for x in xs])))


def visits_twice(one):
    stages = [placed(layer, mesh, name=f"f{n}") for n, mesh in enumerate(slices(2))]
    return around(lambda ws, x: jnp.sum(stages[1](stages[0](stages[1](stages[0](x, ws[0]), ws[1]), ws[2]), ws[2])))


def one_more(one):
    again = placed(layer, slices(3)[0], name="f0")
    return jax.value_and_grad(lambda ws, xs: sum(one(ws, x) for x in xs) + jnp.sum(again(xs[0], ws[0])))


def one_on_another_way(one):
    return jax.value_and_grad(lambda ws, xs: sum(one(ws, x) for x in xs) + one(ws, again(ws, xs)))


def again(ws, xs):
    other = placed(lambda x: x + 1, slices(3)[0], name="other")
    return other(other(xs[0]))


def twice(one):
    return lambda ws, xs: inside(one)(inside(one)(ws, xs)[1], xs)


@pytest.mark.parametrize(
    ("make", "schedule", "message"),
    [
        (carried, "1F1B", "'f0' on slice 's0' is called 4 times, and its calls are connected.* Name the microbatches"),
        (of_all, "1F1B", "cannot be followed: backward . of 'f2' .* comes before forward . .* by the schedule, that"),
        (visits_twice, "GPipe", r"visit slices \['s0', 's1'\] more than once.* use Interleaved1F1B or Circular"),
        (one_more, "1F1B", r"of 5 parts .* one calls 'f0' on slice 's0', 'f1' .*, and one calls 'f0' on .*, so"),
        (one_on_another_way, "GPipe", r"of 5 parts .* and one calls 'other' .*, 'other' .*, 'f0' "),
        (twice, "1F1B", "'f0' on slice 's0' is called again with a result of a backward step.* Name the microbatches"),
        (lambda one: lambda ws, xs: ws[0] @ ws[1], "1F1B", "calls no placed function"),
    ],
)
def test_what_cannot_be_followed_is_refused(make, schedule, message):
    meshes = slices(3)
    with pytest.raises(errors.ScheduleError, match=rf"schedule '{schedule}' of program '.*'.*{message}"):
        compiled(make(placed_network(meshes)), meshes, 4, schedule)


def test_ordered_callbacks_keep_their_order_or_the_schedule_is_refused():
    meshes = slices(2)

    def told(x, w):
        jax.debug.callback(lambda: None, ordered=True)
        return layer(x, w)

    follows(compiled(inside(placed_network(meshes, told)), meshes, 4, "GPipe"), "GPipe", 2, 4)
    first, second = (placed(told, mesh, name=f"f{n}") for n, mesh in enumerate(meshes))

    def backwards(ws, xs):
        return [second(y, ws[1]) for y in reversed([first(x, ws[0]) for x in xs])]

    with pytest.raises(errors.ScheduleError, match=r"cannot be followed: .* by its data"):
        compiled(backwards, meshes, 4, "GPipe")


@pytest.mark.parametrize("option", ["merge", "mpmd_split_bwd_fragments", "mpmd_fragment_remat"])
def test_options_that_contradict_a_schedule(option):
    with pytest.raises(errors.OptionError, match=f"'{option}' makes other computations than schedule 'GPipe'"):
        compiled(lambda ws, xs: ws, slices(2), 1, "GPipe", **{option: True})


def test_a_compiler_that_changes_the_order_is_found(monkeypatch):
    read = lower.read_partitioned

    def swapped(module, emitted):
        partitioned = read(module, emitted)
        partitioned.ops.reverse()
        return partitioned

    monkeypatch.setattr(lower, "Builder", lambda *args: _Ignoring())
    monkeypatch.setattr(lower, "read_partitioned", swapped)
    with pytest.raises(errors.CompileError, match="did not keep the order of schedule '1F1B'"):
        compiled(inside(placed_network(slices(2))), slices(2), 2, "1F1B")


class _Ignoring:
    """Stands for the builder, which cannot read operations in a wrong order."""

    def __init__(self):
        self.known = collections.defaultdict(int)
        self.nodes = []

    def argument(self, number):
        return number

    def op(self, op):
        pass
