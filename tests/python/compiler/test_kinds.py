"""Groups of one kind: jaxlib's compiler sees one of each, and the program is the one that it makes of all of them.

Map: forms of the loop, schedules and slices give the same program; what the compiler sees does not grow with the
microbatches; a program that it changes in another way is compiled whole; an array in many parts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from pipeline_cases import around, fori_inside, inside, layer, network, scan_around, sliced, slices, square
from reference import Reference

from pathways.compiler import kinds, parts
from pathways.compiler.ir import LogicalProgram, MeshSpec, NodeKind
from pathways.compiler.partition import lower
from pathways.compiler.pipeline import compile_traced, forget_compiled
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import device_put, trace
from pathways.compiler.unfolding import NotUnfolded


def wide(count: int) -> list[MeshSpec]:
    """Slices of two devices."""
    return [MeshSpec(f"s{n}", (("x", 2),)) for n in range(count)]


def compiled(fun: Any, args: Any, **options: Any) -> LogicalProgram:
    forget_compiled()
    return compile_traced(trace(fun, args, name="step"), options)


def whole(monkeypatch: pytest.MonkeyPatch, fun: Any, args: Any, **options: Any) -> LogicalProgram:
    with monkeypatch.context() as patch:
        patch.setattr(kinds, "_FEWEST", 1 << 30)
        return compiled(fun, args, **options)


def described(program: LogicalProgram) -> tuple[Any, Any]:
    """The nodes by what they read, compute and make, without the numbers of values."""
    made: dict[int, Any] = {v: ("argument", n) for n, v in enumerate(program.arguments)}
    rows = []
    for number, node in enumerate(program.nodes):
        made.update((v, (number, n)) for n, v in enumerate(node.outputs))
        computation = program.computations[node.computation].fingerprint if node.computation >= 0 else ""
        types = tuple(program.values[v] for v in node.outputs)
        reads = tuple(made[v] for v in node.inputs)
        name = node.name if node.kind is NodeKind.CALL else ""
        rows.append((name, node.kind, computation, reads, types, node.donates, node.label, node.origin))
    return rows, [made[v] for v in program.results]


def pipeline(meshes: list[MeshSpec], **sharding: Any) -> Any:
    stages = [placed(layer, mesh, name=f"f{n}", **sharding) for n, mesh in enumerate(meshes)]
    return network(stages, placed(square, meshes[-1], name="loss"))


def arguments(stages: int, microbatches: int) -> list[Any]:
    rng = np.random.default_rng(0)
    ws = [rng.standard_normal((4, 4), np.float32) for _ in range(stages)]
    return [ws, list(rng.standard_normal((microbatches, 4, 4), np.float32))]


@pytest.mark.parametrize("schedule", ["none", "GPipe", "1F1B", "ZeroBubbleH1", "auto"])
@pytest.mark.parametrize("form", [around, inside])
@pytest.mark.parametrize("stages", [2, 3])
def test_the_program_is_that_of_all_groups(monkeypatch, schedule, form, stages):
    step, args = form(pipeline(slices(stages))), arguments(stages, 12)
    program, other = compiled(step, args, schedule=schedule), whole(monkeypatch, step, args, schedule=schedule)
    assert len(program.mpmd_text) < 0.8 * len(other.mpmd_text)
    assert described(program) == described(other)


@pytest.mark.parametrize("schedule", ["none", "1F1B"])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_slices_of_several_devices(monkeypatch, schedule, spec):
    step, args = inside(pipeline(wide(2), out_shardings=spec)), arguments(2, 12)
    program, other = compiled(step, args, schedule=schedule), whole(monkeypatch, step, args, schedule=schedule)
    assert len(program.mpmd_text) < 0.8 * len(other.mpmd_text)
    assert described(program) == described(other)


@pytest.mark.parametrize("form", [sliced, scan_around, fori_inside])
def test_other_forms_of_the_loop(monkeypatch, form):
    ws, xs = arguments(2, 12)
    step, args = form(pipeline(slices(2))), [ws, np.stack(xs)]
    assert described(compiled(step, args, unroll=16)) == described(whole(monkeypatch, step, args, unroll=16))


def test_what_the_compiler_sees_does_not_grow():
    sizes = [
        len(compiled(inside(pipeline(slices(2))), arguments(2, count), schedule="1F1B").mpmd_text) for count in (16, 64)
    ]
    assert sizes[1] < 1.05 * sizes[0]


def test_equal_groups_with_other_readers_are_other_kinds(monkeypatch):
    """One microbatch's result is returned as well; another one's goes to a third slice."""
    one, meshes = pipeline(slices(2)), slices(3)

    def step(ws: Any, xs: Any) -> Any:
        losses = [one(ws, x) for x in xs]
        return sum(losses), losses[3], device_put(losses[5], meshes[2], P())

    args = arguments(2, 16)
    program = compiled(step, args)
    assert described(program) == described(whole(monkeypatch, step, args))
    np.testing.assert_array_equal(
        Reference(program)(*jax.tree.leaves(args))[1], square(layer(layer(args[1][3], args[0][0]), args[0][1]))
    )


def test_a_program_that_cannot_be_unfolded_is_compiled_whole(monkeypatch):
    step, args = inside(pipeline(slices(2))), arguments(2, 12)
    expected = described(compiled(step, args))

    def refuse(self: Any) -> Any:
        raise NotUnfolded

    monkeypatch.setattr(lower.Unfolding, "append", refuse)
    assert described(compiled(step, args)) == expected


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_, jnp.bfloat16])
def test_an_array_in_many_parts(axis, spec, dtype):
    """Each part has its values, whether it is read in turn, late, or only returned; all parts have one computation."""
    (mesh,) = wide(1)
    x = np.arange(32 * 32).reshape(32, 32).astype(dtype)

    def step(x: Any) -> Any:
        cut = jnp.split(device_put(x, mesh, spec), 16, axis)
        same = placed(lambda x: ~x if dtype == np.bool_ else -x, mesh, name="minus")
        return [same(cut[9]), same(cut[2]), *cut[3:]]

    program = compiled(step, [x])
    expected = np.split(x, 16, axis)
    results = Reference(program)(x)
    minus = (lambda x: ~x) if dtype == np.bool_ else (lambda x: -x)
    for result, value in zip(results, [minus(expected[9]), minus(expected[2]), *expected[3:]], strict=True):
        np.testing.assert_array_equal(np.asarray(result), value)
    assert len(program.computations) <= 5
    calls = [node for node in program.nodes if node.kind is NodeKind.CALL and node.name.startswith("plain")]
    assert len(calls) >= 15


def test_few_parts_are_one_computation():
    (mesh,) = slices(1)
    program = compiled(
        lambda x: jnp.split(device_put(x, mesh, P()), parts.MOST_TOGETHER), [np.zeros((8, 2), np.float32)]
    )
    assert len([node for node in program.nodes if node.kind is NodeKind.CALL]) == 1
