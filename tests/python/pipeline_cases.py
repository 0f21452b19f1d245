"""Pipelines for tests: placed stages on slices of their own, loops over microbatches in several forms, plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from reference import Reference

from pathways.compiler.ir import LogicalProgram, MeshSpec, NodeKind, Phase
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


def unit_name(phase: Phase, microbatch: int, chunk: int = 0) -> str:
    """A unit in short: `F0`, `B0`, `W0`; `F0.1` for chunk 1."""
    return f"{phase.name[0]}{microbatch}" + (f".{chunk}" if chunk else "")


def orders(program: LogicalProgram) -> dict[str, list[str]]:
    """Per slice, the units in the order of the program: `F0` for forward of microbatch 0, `B0` for backward.

    A placed call's phase and microbatch are read off its label; a unit of several calls counts once.
    """
    found: dict[str, list[str]] = {}
    for node in program.nodes:
        if node.kind is NodeKind.CALL and node.origin and node.label is not None:
            unit = unit_name(node.label.phase, node.label.microbatch, node.label.chunk)
            row = found.setdefault(program.meshes[program.computations[node.computation].mesh].name, [])
            if not row or row[-1] != unit:
                row.append(unit)
    return found


def expected(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> list[list[str]]:
    """The order on each stage, by the rule that each stage follows when all stages step in turn.

    GPipe and Circular: backward only when every microbatch went forward. 1F1B: a backward step as soon as there is one;
    else a forward step, if fewer microbatches than there are stages from here on are on the way. Interleaved1F1B: a
    forward step if fewer chunks of microbatches than the limit are on the way, else a backward step. ZeroBubbleH1: the
    weights, if more microbatches than there are stages before this one have them to come; else a forward step, if
    fewer microbatches than in 1F1B are on the way; else a backward step. The first stage has its weights within its
    backward step.

    Steps of chunks come in groups of as many microbatches as there are stages. Each step waits for its input.
    """
    every = [(m, c) for m in range(microbatches) for c in range(chunks)]
    forward = sorted(every, key=lambda unit: (unit[0] // stages if chunks > 1 else 0, unit[1], unit[0]))
    backward = sorted(every, key=lambda unit: (unit[0] // stages if chunks > 1 else 0, -unit[1], unit[0]))
    done = [{"F": 0, "B": 0, "W": 0} for _ in range(stages)]
    order: list[list[str]] = [[] for _ in range(stages)]
    finished: set[tuple[str, int, int]] = set()  # phase, microbatch, part of the model
    splits = schedule == "ZeroBubbleH1"
    while any(stage["B"] < len(every) or (splits and stage["W"] < len(every)) for stage in done):
        now = []
        for s, stage in enumerate(done):
            going = stage["F"] < len(every)
            m, c = forward[stage["F"]] if going else (0, 0)
            forth = going and (c * stages + s == 0 or ("F", m, c * stages + s - 1) in finished)
            returning = stage["B"] < len(every)
            n, d = backward[stage["B"]] if returning else (0, 0)
            back = returning and ("F", n, d * stages + s) in finished
            back = back and (d * stages + s == chunks * stages - 1 or ("B", n, d * stages + s + 1) in finished)
            flying, held = stage["F"] - stage["B"], stage["B"] - stage["W"]
            limit = 2 * (stages - s - 1) + (chunks - 1) * stages + 1 if chunks > 1 else stages - s
            if schedule in ("GPipe", "Circular"):
                what = "F" if forth else "B" if back and not going else ""
            elif splits and (held > s or not returning):
                what = "W" if held else ""
            elif schedule == "1F1B":
                what = "B" if back else "F" if forth and flying < limit else ""
            else:
                what = ("F" if forth else "") if going and flying < limit else ("B" if back else "")
            if what:
                m, c = {"F": (m, c), "B": (n, d), "W": (stage["W"], 0)}[what]
                now.append((s, what, m, c))
        assert now, f"{schedule} with {stages} stages and {microbatches} microbatches waits for ever"
        for s, what, m, c in now:
            if what != "W" or s:
                order[s].append(f"{what}{m}" + (f".{c}" if c else ""))
            done[s][what] += 1
            finished.add((what, m, c * stages + s))
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


def follows(program: LogicalProgram, schedule: str, stages: int, microbatches: int, chunks: int = 1) -> None:
    """Asserts that the program has the order of a schedule on each stage."""
    assert list(orders(program).values()) == expected(schedule, stages, microbatches, chunks)


def check(
    fun: Callable[..., Any],
    plain: Callable[..., Any],
    schedule: str,
    stages: int = 3,
    microbatches: int = 4,
    *,
    exact: bool = False,
    batch: Any = None,
    meshes: Sequence[MeshSpec] | None = None,
    params: Sequence[Any] | None = None,
    tolerance: float = 2e-5,
) -> LogicalProgram:
    """Compiles and runs a step in the reference interpreter; its results are plain JAX's. Returns the program.

    `params` has the weights of the stages, each a tree; `meshes` has the slice of each.
    """
    meshes = meshes or slices(stages)
    ws, xs = weights(len(meshes)) if params is None else params, batches(microbatches) if batch is None else batch
    traced = trace(
        fun,
        [
            [jax.tree.map(lambda w, m=m: place(w, m), tree) for tree, m in zip(ws, meshes, strict=True)],
            jax.tree.map(lambda x: place(x, meshes[0]), xs),
        ],
    )
    program = compile_traced(traced, {"schedule": schedule})
    got = Reference(program)(*jax.tree.leaves((ws, xs)))
    for a, b in zip(got, jax.tree.leaves(plain(ws, xs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    if exact:
        for a, b in zip(got, Reference(compile_traced(traced))(*jax.tree.leaves((ws, xs))), strict=True):
            np.testing.assert_array_equal(a, b)
    return program


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
