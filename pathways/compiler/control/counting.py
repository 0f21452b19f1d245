"""The body of a loop with a known count: what JAX's scan does around its own body is written out as plain steps.

The body reads a row of each array and writes a row of each result that is stacked, in place. The number of the
iteration is carried, once per slice that reads or writes rows, so it is never sent.

Pure: works on jaxprs only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pathways import _jaxlib
from pathways.compiler.control.unrolling import operations
from pathways.compiler.inlining import Inliner
from pathways.compiler.steps import Control, FlatProgram, Step

_COUNTER = jax.ShapeDtypeStruct((), jnp.int32)


def counted_body(
    control: Control, arrays: Sequence[Any], stacks: Sequence[Any], counters: Sequence[int]
) -> FlatProgram:
    """The body of a FOR as the body of a loop that only carries.

    It takes the constants, the arrays, the counters, the carry and the stacks; it gives the counters, the carry and the
    stacks. `arrays` and `stacks` have the types of these. `counters` has the number of the counter of each array, then
    of each stack.
    """
    (body,) = control.bodies
    inner = body.invars
    given, carried = inner[: control.constants], inner[control.constants : control.constants + control.carry]
    array_vars = [_jaxlib.new_var(aval) for aval in arrays]
    stack_vars = [_jaxlib.new_var(aval) for aval in stacks]
    zero = operations(lambda i: i + 1, [_COUNTER])
    counter = _jaxlib.opened(zero)[0].invars[0].aval
    counter_vars = [_jaxlib.new_var(counter) for _ in range(1 + max(counters, default=-1))]
    program = FlatProgram(
        [*given, *array_vars, *counter_vars, *carried, *stack_vars], dict(body.constants), [], [], dict(body.declared)
    )
    inliner = Inliner(program, "", 0)
    last = control.length - 1

    def place(i: Any) -> Any:
        return last - i if control.reverse else i

    def read(x: Any, i: Any) -> Any:
        return jax.lax.dynamic_index_in_dim(x, place(i), keepdims=False)

    def write(x: Any, y: Any, i: Any) -> Any:
        return jax.lax.dynamic_update_index_in_dim(x, y, place(i), 0)

    rows: dict[Any, Any] = {}
    for row, array, number in zip(inner[control.constants + control.carry :], array_vars, counters, strict=False):
        (rows[row],) = inliner.operate(operations(read, [array.aval, counter]), [array, counter_vars[number]])
    program.steps += renamed(body.steps, rows)
    results = [rows.get(v, v) if not isinstance(v, _jaxlib.Literal) else v for v in body.outvars]
    after = [inliner.operate(zero, [v])[0] for v in counter_vars]
    stacked = [
        inliner.operate(operations(write, [s.aval, s_row.aval, counter]), [s, s_row, counter_vars[number]])[0]
        for s, s_row, number in zip(stack_vars, results[control.carry :], counters[len(arrays) :], strict=True)
    ]
    program.outvars = [*after, *results[: control.carry], *stacked]
    return program


def renamed(steps: Sequence[Step], names: Mapping[Any, Any]) -> list[Step]:
    """The steps, which read other variables for some."""

    def name(v: Any) -> Any:
        return v if v is None or isinstance(v, _jaxlib.Literal) else names.get(v, v)

    return [
        dataclasses.replace(step, inputs=[name(v) for v in step.inputs], before=name(step.before)) for step in steps
    ]
