"""Pipelines for tests: placed stages on slices of their own, loops over microbatches in several forms, plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pathways.compiler.ir import LogicalProgram, MeshSpec, NodeKind
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import Argument, trace

SIZE = 4


def slices(count: int) -> list[MeshSpec]:
    """`count` slices of one device."""
    return [MeshSpec(f"s{n}", (("x", 1),)) for n in range(count)]


def layer(x: Any, w: Any) -> Any:
    """What a stage computes."""
    return jnp.tanh(x @ w)


def square(y: Any) -> Any:
    """The loss of a microbatch."""
    return jnp.sum(y**2)


def network(stages: Sequence[Callable[..., Any]], loss: Callable[..., Any]) -> Callable[..., Any]:
    """(weights, microbatch) -> loss, stage after stage."""

    def run(ws: Sequence[Any], x: Any) -> Any:
        for stage, w in zip(stages, ws, strict=True):
            x = stage(x, w)
        return loss(x)

    return run


def placed_network(
    meshes: Sequence[MeshSpec], stage: Callable[..., Any] = layer, name: str = "f"
) -> Callable[..., Any]:
    """A stage per slice, and the loss on the last slice."""
    stages = [placed(stage, mesh, name=f"{name}{n}") for n, mesh in enumerate(meshes)]
    return network(stages, placed(square, meshes[-1], name="loss"))


def around(one: Callable[..., Any]) -> Callable[..., Any]:
    """The loop inside of the differentiation."""
    return jax.value_and_grad(lambda ws, xs: sum(one(ws, x) for x in xs))


def inside(one: Callable[..., Any]) -> Callable[..., Any]:
    """The differentiation inside of the loop."""

    def step(ws: Any, xs: Any) -> Any:
        total, grads = 0.0, None
        for x in xs:
            loss, more = jax.value_and_grad(one)(ws, x)
            total += loss
            grads = more if grads is None else jax.tree.map(jnp.add, grads, more)
        return total, grads

    return step


def sliced(one: Callable[..., Any]) -> Callable[..., Any]:
    """The microbatches are slices of one array, and the sums start from zeros."""

    def step(ws: Any, batch: Any) -> Any:
        total, grads = 0.0, jax.tree.map(jnp.zeros_like, ws)
        for n in range(batch.shape[0]):
            loss, more = jax.value_and_grad(one)(ws, batch[n])
            total += loss
            grads = jax.tree.map(jnp.add, grads, more)
        return total, grads

    return step


def weights(count: int) -> list[np.ndarray]:
    """Weights of `count` stages."""
    draw = np.random.default_rng(count)
    return [draw.normal(size=(SIZE, SIZE)).astype(np.float32) for _ in range(count)]


def batches(count: int) -> list[np.ndarray]:
    """`count` microbatches."""
    draw = np.random.default_rng(100 + count)
    return [draw.normal(size=(2, SIZE)).astype(np.float32) for _ in range(count)]


def orders(program: LogicalProgram) -> dict[str, list[str]]:
    """Per slice, the units in the order of the program: `F0` for forward of microbatch 0, `B0` for backward.

    A placed call's phase and microbatch are read off its label; a unit of several calls counts once.
    """
    found: dict[str, list[str]] = {}
    for node in program.nodes:
        if node.kind is NodeKind.CALL and node.origin and node.label is not None:
            unit = f"{node.label.phase.name[0]}{node.label.microbatch}"
            row = found.setdefault(program.meshes[program.computations[node.computation].mesh].name, [])
            if not row or row[-1] != unit:
                row.append(unit)
    return found


def expected(schedule: str, stages: int, microbatches: int) -> list[list[str]]:
    """The order on each stage, by the rule that each stage follows when all stages step in turn.

    GPipe: backward only when every microbatch went forward. 1F1B: a backward step as soon as there is one; else a
    forward step, if fewer microbatches than there are stages from here on are on the way.
    """
    done = [{"F": 0, "B": 0} for _ in range(stages)]
    order: list[list[str]] = [[] for _ in range(stages)]
    while any(stage["B"] < microbatches for stage in done):
        before = [dict(stage) for stage in done]
        for s, stage in enumerate(before):
            came = before[s - 1]["F"] if s else microbatches
            returned = before[s + 1]["B"] if s + 1 < stages else stage["F"]
            backward = stage["B"] < min(returned, stage["F"])
            forward = stage["F"] < came
            if schedule == "GPipe":
                backward &= stage["F"] == microbatches
            else:
                forward &= stage["F"] - stage["B"] < stages - s
            what = "B" if backward else "F" if forward else ""
            if what:
                order[s].append(f"{what}{stage[what]}")
                done[s][what] += 1
    return order


def compiled(
    fun: Callable[..., Any], meshes: Sequence[MeshSpec], microbatches: int, schedule: str, **options: Any
) -> LogicalProgram:
    """The logical program of a loop over `microbatches`; weights are on their slices, the batch is on the first one."""
    ws = [Argument((4, 4), np.float32, False, mesh, ((), ())) for mesh in meshes]
    xs = [Argument((2, 4), np.float32, False, meshes[0], ((), ())) for _ in range(microbatches)]
    return compile_traced(trace(fun, [ws, xs]), {"schedule": schedule, **options})


def place(x: Any, mesh: MeshSpec) -> Argument:
    """An array as a traced argument on a slice."""
    return Argument(x.shape, x.dtype, False, mesh, ((),) * x.ndim)


def follows(program: LogicalProgram, schedule: str, stages: int, microbatches: int) -> None:
    """Asserts that the program has the order of a schedule on each stage."""
    assert list(orders(program).values()) == expected(schedule, stages, microbatches)


def scan_around(one: Callable[..., Any]) -> Callable[..., Any]:
    """A scan over the microbatches of one array, inside of the differentiation."""
    return jax.value_and_grad(lambda ws, xs: jax.lax.scan(lambda c, x: (c + one(ws, x), None), 0.0, xs)[0])


def map_around(one: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.lax.map` over the microbatches, inside of the differentiation."""
    return jax.value_and_grad(lambda ws, xs: jnp.sum(jax.lax.map(lambda x: one(ws, x), xs)))


def _step(one: Callable[..., Any], ws: Any, x: Any, carry: Any) -> Any:
    loss, grads = jax.value_and_grad(one)(ws, x)
    return carry[0] + loss, jax.tree.map(jnp.add, carry[1], grads)


def scan_inside(one: Callable[..., Any]) -> Callable[..., Any]:
    """The differentiation inside of a scan."""
    return lambda ws, xs: jax.lax.scan(
        lambda c, x: (_step(one, ws, x, c), None), (0.0, jax.tree.map(jnp.zeros_like, ws)), xs
    )[0]


def fori_inside(one: Callable[..., Any]) -> Callable[..., Any]:
    """The differentiation inside of a loop that reads its microbatch by number."""
    return lambda ws, xs: jax.lax.fori_loop(
        0,
        xs.shape[0],
        lambda i, c: _step(one, ws, jnp.asarray(xs)[i], c),
        (0.0, jax.tree.map(jnp.zeros_like, ws)),
    )
