"""An operation that cuts an array into many equal parts, as calls of one small computation, one call per part.

XLA compiles such an operation to one function with a result per part, and it takes as long for each part as for a small
program of its own. So the time to compile would grow with the number of microbatches. Here a call takes the array and
where the part starts, and gives the part and where the next part starts. All calls run one executable.

jaxlib's partitioner sees the operation as it is, and chooses the shardings. `groups` keeps it apart from other
operations, and `lower` puts the calls into the place of its fragment.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pathways import _jaxlib
from pathways.compiler.ir import ArrayType, MeshSpec
from pathways.compiler.steps import Step, StepKind

#: An operation with so many parts is one computation, because one launch takes less time than several.
MOST_TOGETHER = 4
#: Where parts start is a number of 32 bits.
_MOST_ROWS = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Cut:
    """Into how many parts the operation cuts, along which dimension, and the numbers of the parts that are read."""

    axis: int
    parts: int
    read: tuple[int, ...]


def is_cut(step: Step) -> bool:
    """Whether a step cuts an array into more than `MOST_TOGETHER` equal parts."""
    if step.kind is not StepKind.PLAIN or step.eqn.primitive.name != "split":
        return False
    sizes = step.eqn.params["sizes"]
    return len(sizes) > MOST_TOGETHER and len(set(sizes)) == 1 and sum(sizes) <= _MOST_ROWS


def cut_of(steps: Sequence[Step], outputs: Sequence[Any]) -> Cut | None:
    """The cut that steps make, if they make nothing else, and if `outputs`, the parts that are read, are many."""
    if len(steps) != 1 or not is_cut(steps[0]) or len(outputs) <= MOST_TOGETHER:
        return None
    numbers = {v: n for n, v in enumerate(steps[0].outputs)}
    return Cut(steps[0].eqn.params["axis"], len(numbers), tuple(numbers[v] for v in outputs))


def rows_type(cut: Cut, array: ArrayType, part: ArrayType) -> ArrayType | None:
    """The type of the array with the parts as a dimension of their own, which no mesh axis cuts, if it must be brought
    to that form first; else None.

    If a mesh axis cuts the array along the dimension, each call would move the array between devices.
    """
    if not array.spec[cut.axis] and not part.spec[cut.axis]:
        return None
    at = cut.axis
    shape = (*part.shape[:at], cut.parts, *part.shape[at:])
    return dataclasses.replace(part, shape=shape, spec=(*part.spec[:at], (), *part.spec[at:]))


def rows_module(mesh: MeshSpec, array: ArrayType, rows: ArrayType) -> str:
    """StableHLO that gives an array the form of `rows_type`. Needs the context that `mlir_context` enters."""
    before, after = _tensor(array), _tensor(rows)
    return f"""{_axes(mesh)}
    func.func public @main(%array: {before}) -> {after} {{
      %rows = stablehlo.reshape %array : ({before}) -> {after}
      return %rows : {after}
    }}"""


def part_module(mesh: MeshSpec, cut: Cut, array: ArrayType, part: ArrayType) -> str:
    """StableHLO from an array, or its form of `rows_type`, and a start to a part and the next start.

    Needs the context that `mlir_context` enters.
    """
    step = array.shape[cut.axis] // cut.parts
    sizes = (*array.shape[: cut.axis], step, *array.shape[cut.axis + 1 :])
    starts = ", ".join("%start" if axis == cut.axis else "%zero" for axis in range(len(sizes)))
    given, found = _tensor(array), _tensor(part)
    taken = _tensor(dataclasses.replace(array, shape=sizes))
    types = ", ".join([given, *["tensor<i32>"] * len(sizes)])
    return f"""{_axes(mesh)}
    func.func public @main(%array: {given}, %start: tensor<i32>) -> ({found}, tensor<i32>) {{
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %step = stablehlo.constant dense<{step}> : tensor<i32>
      %next = stablehlo.add %start, %step : tensor<i32>
      %taken = stablehlo.dynamic_slice %array, {starts}, sizes = [{", ".join(map(str, sizes))}] : ({types}) -> {taken}
      %part = stablehlo.reshape %taken : ({taken}) -> {found}
      return %part, %next : {found}, tensor<i32>
    }}"""


#: StableHLO that gives where the first part starts.
FIRST = """
    func.func public @main() -> tensor<i32> {
      %zero = stablehlo.constant dense<0> : tensor<i32>
      return %zero : tensor<i32>
    }"""


def _axes(mesh: MeshSpec) -> str:
    """The axes that types may name, as in all modules."""
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.axes)
    return f"sdy.mesh @mesh = <[{axes}]>"


def _tensor(type: ArrayType) -> str:
    return str(_jaxlib.tensor_type(type.shape, type.dtype))
