"""Loops and branches with placed calls inside: values and gradients are plain JAX's, in the reference interpreter.

A run plays a sample of the cases (`@pytest.mark.sampled`).

Map: the cases of `control_cases`; what is unrolled and what is not; bad input.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import CASES, HOMES, Case, Placed
from jax.sharding import PartitionSpec as P
from reference import run

from pathways import errors
from pathways.compiler.control.segments import Run, Turns, segments
from pathways.compiler.ir import LogicalProgram, MeshSpec, NodeKind
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction
from pathways.compiler.printing import logical_text
from pathways.compiler.trace import Argument, device_put, trace

SLICES = {name: MeshSpec(name, (("x", 1),)) for name in "abc"}


def placed_on(slices: dict[str, MeshSpec]) -> Placed:
    """The functions of the cases on these slices."""
    return Placed.by(
        lambda fun, where, name: TaggedFunction(fun, slices[where], name=name),
        lambda x, where: device_put(x, slices[where]),
    )


PLACED = placed_on(SLICES)
KNOWN = [case for case in CASES.values() if case.known]


def check(
    case: Case, make: str, slices: dict[str, MeshSpec] = SLICES, in_segments: bool = False, **options: Any
) -> Any:
    """Runs a case in the reference interpreter and compares with plain JAX; returns the program.

    An argument with dimensions is cut over its slice by the first of them.
    """
    meshes = [slices[HOMES[name]] for name in case.names]
    at = [
        (mesh, P(mesh.axes[0][0]) if np.ndim(value) else None)
        for mesh, value in zip(meshes, case.values(), strict=True)
    ]
    got, program = run(
        getattr(case, make)(placed_on(slices)), *case.values(), at=at, options=options, in_segments=in_segments
    )
    expected = getattr(case, make)(Placed())(*map(jnp.asarray, case.values()))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-5, atol=2e-5)
    return program


def check_both(case: Case, **options: Any) -> None:
    """Checks the values of a case and, if it has some, its gradients."""
    for make in ("forward", "backward") if case.argnames else ("forward",):
        check(case, make, **options)


@pytest.mark.sampled(0.28)
@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.name)
def test_short_loops_are_unrolled(case: Case) -> None:
    check_both(case)


@pytest.mark.sampled(0.28)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_loops_and_branches(case: Case) -> None:
    """All loops stay loops, of any length but 0."""
    check_both(case, unroll=0)


CUT = {"a": MeshSpec("a", (("x", 2),)), "b": MeshSpec("b", (("y", 2),)), "c": MeshSpec("c", (("z", 1),))}


@pytest.mark.sampled(0.09)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_loops_and_branches_on_slices_of_two_devices(case: Case) -> None:
    """The arguments are cut over the devices of their slices, which have different axes."""
    check_both(case, slices=CUT, unroll=0)


def body(c: Any, y: Any) -> Any:
    return PLACED.f(y, c), PLACED.g(y, c)


def test_a_loop_is_unrolled_up_to_the_option() -> None:
    x, xs = np.eye(4, dtype=np.float32), np.ones((17, 4, 4), np.float32)
    for length, options in ((16, {}), (17, {"unroll": 17}), (2, {"unroll": 2}), (0, {"unroll": 0})):
        at = [(SLICES["a"], None), None]
        _, program = run(lambda x, xs: jax.lax.scan(body, x, xs), x, xs[:length], at=at, options=options)
        assert [node.origin for node in program.nodes].count("f") == length
    for length, options in ((17, {}), (2, {"unroll": 1}), (1, {"unroll": 0})):
        _, program = run(lambda x, xs: jax.lax.scan(body, x, xs), x, xs[:length], options=options)
        (loop,) = program.loops
        assert loop.count == length and [node.origin for node in loop.body.nodes].count("f") == 1
    for wrong in (-1, True, 1.5, "all", None):
        with pytest.raises(errors.OptionError, match=f"'unroll'.*got {wrong!r}"):
            compile_traced(trace(lambda x: x, [x]), {"unroll": wrong})
    for wrong in (0, 257, True, 1.5, "all", None):
        with pytest.raises(errors.OptionError, match=f"'parallel_iterations'.*1 to 256, got {wrong!r}"):
            compile_traced(trace(lambda x: x, [x]), {"parallel_iterations": wrong})


def test_a_scan_without_placed_calls_stays_one_computation() -> None:
    f = PLACED.f
    _, program = run(
        lambda x: f(x, jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0]), np.eye(4, dtype=np.float32)
    )
    assert len([node for node in program.nodes if node.kind is NodeKind.CALL]) == 2


def test_the_counter_of_a_loop_is_never_sent() -> None:
    x = np.eye(4, dtype=np.float32)
    _, program = run(
        lambda x: jax.lax.fori_loop(0, 16, lambda i, c: PLACED.g(c, PLACED.f(c, c) + i), x), x, at=[(SLICES["a"], None)]
    )
    sent = [program.values[node.inputs[0]] for node in program.nodes if node.kind is NodeKind.TRANSFER]
    assert len(sent) >= 16 and {value.shape for value in sent} == {(4, 4)}


def test_what_a_scan_stacks_is_read_by_the_backward_scan_row_by_row() -> None:
    """Nothing is made one array for the backward pass."""
    program = check(CASES["scan_without_ys"], "backward")
    shapes = [program.values[v].shape for node in program.nodes for v in node.outputs]
    assert shapes.count((4, 4, 4)) == 1  # the gradient of `xs`


X = np.eye(4, dtype=np.float32)
AT_A = [(SLICES["a"], None)]


def scalars_sent(program: LogicalProgram) -> int:
    """How many numbers a program sends, without those of its loops' bodies."""
    sent = [node.inputs[0] for node in program.nodes if node.kind is NodeKind.TRANSFER]
    return sum(program.values[v].shape == () for v in sent)


def test_a_counter_is_carried_on_each_slice_that_reads_or_writes_rows() -> None:
    f, g = PLACED.f, PLACED.g
    _, program = run(
        lambda x, xs: jax.lax.scan(lambda c, y: (f(c, c + y), g(y, y)), x, xs),
        X,
        np.stack([X] * 3),
        at=[*AT_A, (SLICES["a"], None)],
        options={"unroll": 0},
    )
    (loop,) = program.loops
    carried = [loop.body.values[v] for v in loop.body.arguments[loop.constants :]]
    counters = {loop.body.meshes[value.mesh].name for value in carried if value.shape == ()}
    assert counters == {"a", "b"} and scalars_sent(loop.body) == 0


def test_a_carry_lives_where_it_starts() -> None:
    _, program = run(
        lambda x: jax.lax.while_loop(
            lambda c: c[1] < 3, lambda c: (PLACED.g(c[0], PLACED.f(X, c[0])), c[1] + 1), (x, 0)
        ),
        X,
        at=AT_A,
    )
    (loop,) = program.loops
    slices = {
        value.shape: loop.body.meshes[value.mesh].name for value in map(loop.body.values.__getitem__, loop.body.results)
    }
    assert slices[4, 4] == "a"
    assert [node.kind for node in loop.body.nodes].count(NodeKind.TRANSFER) == 3  # the carry twice, and back


def test_what_no_iteration_changes_is_sent_before_the_loop() -> None:
    """Here it crosses two loops. What a branch alone reads is sent if the branch is taken."""

    def inner(c: Any, x: Any) -> Any:
        return jax.lax.scan(lambda d, _: (PLACED.g(x, d), None), c, None, length=2)[0]

    _, program = run(
        lambda x: jax.lax.scan(lambda c, _: (inner(c, x), None), device_put(x, SLICES["b"]), None, length=3)[0],
        X,
        at=AT_A,
        options={"unroll": 0},
    )
    (loop,) = program.loops
    (nested,) = loop.body.loops
    assert not any(node.kind is NodeKind.TRANSFER for body in (loop.body, nested.body) for node in body.nodes)
    assert [node.kind for node in program.nodes].count(NodeKind.TRANSFER) == 2


def test_a_cotangent_goes_back_to_where_its_iteration_took_the_value_from() -> None:
    """The first iteration takes the carry from slice a, the others from slice b."""
    w = Argument((4, 4), np.float32, False, SLICES["b"], ((), ()))
    x = Argument((4, 4), np.float32, False, SLICES["a"], ((), ()))

    def loss(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (PLACED.g(w, device_put(c, SLICES["b"])), None), x, None, length=3)[0].sum()

    program = compile_traced(trace(jax.grad(loss), [x, w]))
    (gradient,) = program.results
    assert program.meshes[program.values[gradient].mesh].name == "a"
    assert [node.kind for node in program.nodes].count(NodeKind.TRANSFER) == 2


def test_a_stack_and_a_carry_are_overwritten_in_place() -> None:
    _, program = run(
        lambda x: jax.lax.scan(lambda c, _: (PLACED.f(X, c), c), x, None, length=3), X, at=AT_A, options={"unroll": 0}
    )
    (loop,) = program.loops
    assert loop.body.donated_arguments[loop.constants :] == (True, True, True)
    assert any(any(node.donates) for node in loop.body.nodes)


def test_a_value_that_is_carried_twice_is_overwritten_by_nobody() -> None:
    case = CASES["one_value_carried_twice"]
    program = check(case, "forward", unroll=0)
    (loop,) = program.loops
    donated = dict(zip(loop.body.arguments, loop.body.donated_arguments, strict=True))
    twice = [v for v in loop.body.arguments[loop.constants :] if loop.body.values[v].shape == (4, 4)]
    assert len(twice) == 2 and not any(donated[v] for v in twice)


def test_donated_arguments_go_into_a_loop_and_a_branch() -> None:
    def step(x: Any, n: Any) -> Any:
        y = jax.lax.while_loop(lambda c: c[1] < n, lambda c: (PLACED.f(c[0], c[0]), c[1] + 1), (x, 0))[0]
        return jax.lax.cond(n > 2, lambda: PLACED.f(X, y), lambda: y * 2)

    plain = X
    for _ in range(3):
        plain = np.tanh(plain @ plain)
    got, program = run(step, X, np.int32(3), at=AT_A, donate_argnums=(0,))
    assert program.donated_arguments == (True, False)
    np.testing.assert_allclose(got, np.tanh(plain @ X), rtol=1e-5)


def test_the_text_of_a_program_shows_loops_and_branches() -> None:
    text = logical_text(check(CASES["scan_of_cond"], "forward", unroll=0))
    for pattern in (
        r"%\d+, .* = loop\.\d+ of jax\.lax\.scan \(or map, fori_loop\) of 4 iterations\(.*\), 4 times : ",
        r"    \|   %\d+ = call f\.\d+\(.*\) on a #\w+ : .* if %\d+ is 1",
        r"    \|   %\d+ = select select\.\d+ of jax\.lax\.cond\(%\d+, %\d+, %\d+\) : ",
    ):
        assert re.search(pattern, text), text


LOOPS_IN = ("scan", "nested_scan", "cond_of_scan", "while_of_cond", "while_of_while", "scan_of_cond")


@pytest.mark.parametrize("name", LOOPS_IN)
def test_a_program_is_a_chain_of_segments(name: str) -> None:
    program = check(CASES[name], "forward", in_segments=True, unroll=0)
    chain = segments(program)
    assert sum(isinstance(segment, Turns) for segment in chain) == len(program.loops) > 0
    known = set(program.arguments)
    for segment in chain:
        assert known >= set(segment.inputs) and known.isdisjoint(segment.outputs)
        known |= set(segment.outputs)
        if isinstance(segment, Run):
            assert segment.program.nodes and not segment.program.loops
    assert known >= set(program.results)


# Bad input.


def refused(fun: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(errors.PathwaysError) as caught:
        run(fun, *args, at=AT_A, options=options)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("handed_on_first", [True, False])
def test_a_branch_hands_on_an_argument_that_lies_nowhere(handed_on_first: bool) -> None:
    """It goes where the other branch gives its result, wherever the truth value and an earlier reader are."""
    f, total = PLACED.f, PLACED.total  # on a and on b

    def branch(x: Any, yes: Any) -> Any:
        branches = [lambda x: x, lambda x: f(x, x)]
        return jax.lax.switch((yes > 0) + 0, branches if handed_on_first else branches[::-1], x)

    def nested(x: Any, yes: Any) -> Any:
        return jax.lax.cond(yes > 0, lambda x: branch(x, yes), lambda x: x, x)

    for yes in (np.float32(1), np.float32(-1)):
        is_made = (yes > 0) == handed_on_first
        for fun in (branch, nested, lambda x, yes: branch(x, total(x) * 0 + yes)):
            got, program = run(fun, X, yes, at=[None, (SLICES["b"], None)])
            is_made_there = is_made and (fun is not nested or yes > 0)
            np.testing.assert_allclose(got, np.tanh(X @ X) if is_made_there else X, rtol=1e-5)
            assert program.meshes[program.values[program.results[0]].mesh] == SLICES["a"]


def test_jax_refuses_bodies_that_change_types_and_tests_that_are_no_truth_value() -> None:
    f = PLACED.f
    for fun in (
        lambda x: jax.lax.scan(lambda c, _: (f(c, c)[:2], None), x, None, length=20),
        lambda x: jax.lax.scan(lambda c, _: ((f(c, c), c), None), x, None, length=20),
        lambda x: jax.lax.while_loop(lambda c: c > 0, lambda c: f(c, c), x),
        lambda x: jax.lax.cond(x > 0, lambda: f(x, x), lambda: x),
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda: f(x, x), lambda: x[0]),
    ):
        with pytest.raises(TypeError):
            run(fun, X, at=AT_A)
