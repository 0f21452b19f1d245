"""SCHED-1: forms of programs under the schedules that divide backward steps or have several chunks per slice.

Each form is compiled and run in the reference interpreter. Its values are plain JAX's, its order is the schedule's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from pipeline_cases import (
    around,
    batches,
    check,
    follows,
    inside,
    layer,
    network,
    placed_network,
    sliced,
    slices,
    square,
)

from pathways.compiler.ir import MeshSpec
from pathways.compiler.placed import TaggedFunction as placed

SCHEDULES = [("ZeroBubbleH1", 1), ("Interleaved1F1B", 2)]  # with the number of chunks
pytestmark = pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)


def plain(meshes):
    return network([layer] * len(meshes), square)


def derivative(make, n):
    """A layer with a derivative of its own, which is a placed call, too."""
    forward = make(layer, n, f"forward{n}")
    backward = make(lambda x, w, g: jax.vjp(layer, x, w)[1](g), n, f"backward{n}")
    f = jax.custom_vjp(forward)
    f.defvjp(lambda x, w: (forward(x, w), (x, w)), lambda kept, g: backward(*kept, g))
    return f


@pytest.mark.parametrize("form", [inside, around])
def test_custom_derivatives(form, schedule, chunks):
    meshes = slices(2) * chunks
    make = lambda f, n, name: placed(f, meshes[n], name=name)
    stages = [derivative(make, n) for n in range(len(meshes))]
    one = network(stages, placed(square, meshes[-1], name="loss"))
    follows(check(form(one), form(plain(meshes)), schedule, meshes=meshes), schedule, 2, 4, chunks)


def test_microbatches_of_one_array(schedule, chunks):
    meshes = slices(2) * chunks
    whole = np.stack(batches(4))
    program = check(sliced(placed_network(meshes)), sliced(plain(meshes)), schedule, meshes=meshes, batch=whole)
    follows(program, schedule, 2, 4, chunks)


def clipped(one):
    """The gradients of each microbatch are divided by their norm over all stages before they are added."""

    def step(ws, xs):
        total = None
        for x in xs:
            grads = jax.grad(one)(ws, x)
            norm = 1 + jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
            grads = [g / norm for g in grads]
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        return total

    return step


def one_by_one(one):
    """The gradients of the microbatches are not added."""
    return lambda ws, xs: [jax.value_and_grad(lambda ws, x: (one(ws, x), x * 2), has_aux=True)(ws, x) for x in xs]


def of_the_batch(one):
    """The gradients of the microbatches are results, too."""
    return jax.grad(lambda ws, xs: sum(one(ws, x) for x in xs), (0, 1))


@pytest.mark.parametrize("form", [clipped, one_by_one, of_the_batch])
def test_what_happens_to_the_gradients(form, schedule, chunks):
    meshes = slices(2) * chunks
    program = check(form(placed_network(meshes)), form(plain(meshes)), schedule, meshes=meshes)
    follows(program, schedule, 2, 4, chunks)


def test_stages_of_several_devices(schedule, chunks):
    meshes = [MeshSpec(name, (("x", 2),)) for name in "ab"] * chunks
    options = {"in_shardings": (P("x"), P(None, "x")), "out_shardings": P("x")}
    stages = [placed(layer, mesh, name=f"f{n}", **options) for n, mesh in enumerate(meshes)]
    one = network(stages, placed(square, meshes[-1], name="loss"))
    follows(check(inside(one), inside(plain(meshes)), schedule, meshes=meshes), schedule, 2, 4, chunks)
