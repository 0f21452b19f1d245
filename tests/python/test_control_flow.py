"""Loops and branches with placed calls inside: values and gradients are plain JAX's, in the reference interpreter.

Map: the cases of `control_cases`; what is unrolled and what is not; bad input.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import CASES, HOMES, Case, Placed
from reference import run

from pathways import errors
from pathways.compiler.ir import MeshSpec, NodeKind
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction
from pathways.compiler.trace import device_put, trace

SLICES = {name: MeshSpec(name, (("x", 1),)) for name in "abc"}
PLACED = Placed.by(
    lambda fun, where, name: TaggedFunction(fun, SLICES[where], name=name),
    lambda x, where: device_put(x, SLICES[where]),
)
KNOWN = [case for case in CASES.values() if case.known]


def check(case: Case, make: str, **options: Any) -> Any:
    """Runs a case in the reference interpreter and compares with plain JAX; returns the program."""
    at = [(SLICES[HOMES[name]], None) for name in case.names]
    got, program = run(getattr(case, make)(PLACED), *case.values(), at=at, options=options)
    expected = getattr(case, make)(Placed())(*map(jnp.asarray, case.values()))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-5, atol=2e-5)
    return program


@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.name)
def test_short_loops_are_unrolled(case: Case) -> None:
    check(case, "forward")


@pytest.mark.parametrize("case", [case for case in KNOWN if case.argnames], ids=lambda case: case.name)
def test_gradients_of_short_loops(case: Case) -> None:
    check(case, "backward")


def body(c: Any, y: Any) -> Any:
    return PLACED.f(y, c), PLACED.g(y, c)


def test_a_loop_is_unrolled_up_to_the_option() -> None:
    x, xs = np.eye(3, dtype=np.float32), np.ones((17, 3, 3), np.float32)
    for length, options in ((16, {}), (17, {"unroll": 17}), (2, {"unroll": 2}), (0, {"unroll": 0})):
        at = [(SLICES["a"], None), None]
        _, program = run(lambda x, xs: jax.lax.scan(body, x, xs), x, xs[:length], at=at, options=options)
        assert [node.origin for node in program.nodes].count("f") == length
    for length, options, limit in ((17, {}, 16), (2, {"unroll": 1}, 1), (1, {"unroll": 0}, 0)):
        with pytest.raises(errors.ProgramError, match=rf"jax.lax.scan.* {length} .* at most {limit} .*unroll={length}"):
            run(lambda x, xs: jax.lax.scan(body, x, xs), x, xs[:length], options=options)
    for wrong in (-1, True, 1.5, "all", None):
        with pytest.raises(errors.OptionError, match=f"'unroll'.*got {wrong!r}"):
            compile_traced(trace(lambda x: x, [x]), {"unroll": wrong})


def test_a_scan_without_placed_calls_stays_one_computation() -> None:
    f = PLACED.f
    _, program = run(
        lambda x: f(x, jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0]), np.eye(3, dtype=np.float32)
    )
    assert len([node for node in program.nodes if node.kind is NodeKind.CALL]) == 2


def test_the_counter_of_a_loop_is_never_sent() -> None:
    x = np.eye(3, dtype=np.float32)
    _, program = run(
        lambda x: jax.lax.fori_loop(0, 16, lambda i, c: PLACED.g(c, PLACED.f(c, c) + i), x), x, at=[(SLICES["a"], None)]
    )
    sent = [program.values[node.inputs[0]] for node in program.nodes if node.kind is NodeKind.TRANSFER]
    assert len(sent) >= 16 and {value.shape for value in sent} == {(3, 3)}


def test_what_a_scan_stacks_is_read_by_the_backward_scan_row_by_row() -> None:
    """Nothing is made one array for the backward pass."""
    program = check(CASES["scan_without_ys"], "backward")
    shapes = [program.values[v].shape for node in program.nodes for v in node.outputs]
    assert shapes.count((4, 3, 3)) == 1  # the gradient of `xs`
