"""Exchanges of rows in a program that is put together from parts: where their operands are to live, and their nodes.

Rows live one part per device of their slice: dimension 0 is cut over all its axes. An operand that lives otherwise is
moved first, within its slice.

Used by `assembling`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathways import _jaxlib, errors
from pathways.compiler.added_primitives.exchange import permute_p
from pathways.compiler.control.splicing import Home, Whole
from pathways.compiler.ir import ArrayType, Exchange, MeshSpec, NodeKind
from pathways.compiler.steps import Step


def add_exchange(whole: Whole, step: Step, value_of: Callable[[Any], int]) -> list[int]:
    """Appends the node of an exchange or a permute; returns its results. `value_of` gives the value of an operand.

    Raises:
        ProgramError: the rows cannot be cut over their slice.
    """
    given = [value_of(v) for v in step.inputs]
    if step.eqn.primitive is permute_p:
        x, to, origins = given
        there, here = _rows_on(whole.home(to)[0]), _rows_on(whole.home(origins)[0])
        inputs = [whole.moved(x, there), whole.moved(to, there), whole.moved(origins, here)]
        return whole.exchange(NodeKind.PERMUTE, inputs, _results(whole, step, [here]), "pw.exchange")
    mesh = whole.home(given[0])[0]
    rows = whole.values[given[0]].shape[0]
    if rows % mesh.size:
        raise errors.ProgramError(
            f"program {whole.name!r}: values of pw.exchange have {rows} rows on the {mesh.size} devices of slice "
            f"{mesh.name!r}; expected a multiple of {mesh.size}. Pad them, with destinations that are `unsent`"
        )
    there, here = _rows_on(mesh), _rows_on(step.eqn.params["mesh"])
    inputs = [whole.moved(v, there) for v in given]
    params = step.eqn.params
    how = Exchange(params["capacity"], params["drops"], params["unsent"])
    results = _results(whole, step, [here, here, here, here, there])
    return whole.exchange(NodeKind.EXCHANGE, inputs, results, "pw.exchange", how)


def _rows_on(mesh: MeshSpec) -> Home:
    return mesh, (tuple(name for name, _ in mesh.axes),)


def _results(whole: Whole, step: Step, homes: list[Home]) -> list[int]:
    types = [ArrayType(*_jaxlib.physical(v.aval), 0, ()) for v in step.outputs]
    return [whole.value(type, home) for type, home in zip(types, homes, strict=True)]
