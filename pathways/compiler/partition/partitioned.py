"""Reads what jaxlib's partitioner has made: what each call is, and by which axes each value is cut."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from pathways import _jaxlib, errors
from pathways._jaxlib import ir
from pathways.compiler.flatten import StepKind
from pathways.compiler.partition import types
from pathways.compiler.partition.emit import Emitted, symbol

#: Arrays of more elements are elided in `mpmd_text` and `ifrt_text`.
_TEXT_ELEMENTS = 32


@dataclasses.dataclass
class Op:
    """One operation of the partitioned module's `main`. Values are numbered as they appear, arguments first."""

    callee: str  # "" for a transfer
    sites: list[str]
    inputs: list[int]
    outputs: list[int]
    mesh: str = ""


@dataclasses.dataclass
class Partitioned:
    """What was read from the partitioned module.

    `split_axes` are the call sites that have a value cut in a way that no `Spec` can express: by part of an axis, or by
    the axes of another mesh.
    """

    types: list[types.TensorOnMesh]
    arguments: int
    ops: list[Op]
    results: list[int]
    split_axes: frozenset[str]
    text: str


def _unescaped(text: str) -> str:
    """A name as MLIR prints it: bytes that are not ASCII are escaped, in hexadecimal digits. emit.py leaves no
    backslash in a name.
    """
    return re.sub(rb"\\([0-9A-F]{2})", lambda byte: bytes([int(byte[1], 16)]), text.encode()).decode()


def read_partitioned(module: ir.Module, emitted: Emitted) -> Partitioned:
    """Reads `main` of a partitioned module. Call it before the module is lowered to IFRT IR, which is done in place."""
    main = _jaxlib.main_function(module)
    block = main.regions[0].blocks[0]
    numbers: dict[Any, int] = {}
    read: list[types.TensorOnMesh] = []

    def define(value: ir.Value) -> int:
        numbers[value] = len(read)
        read.append(types.mesh_tensor(str(value.type)))
        return numbers[value]

    for argument in block.arguments:
        define(argument)
    count = len(read)
    axes = {symbol(n): mesh.axes for n, mesh in enumerate(emitted.meshes)}
    twins = {mesh: {other for other in axes if axes[other] == axes[mesh]} for mesh in axes}
    ops: list[Op] = []
    results: list[int] = []
    split: set[str] = set()
    for op in block.operations:
        kind = op.operation.name
        inputs = [numbers[v] for v in op.operation.operands]
        if kind == "mpmd.fragment_call":
            sites = [_unescaped(str(a).split('"')[1]) for a in ir.ArrayAttr(op.attributes["origin"])]
            outputs = [define(v) for v in op.operation.results]
            callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            mesh = ir.StringAttr(op.attributes["mesh_name"]).value
            ops.append(Op(callee, sites, inputs, outputs, mesh))
            transfer = bool(sites) and all(emitted.sites[name].kind is StepKind.TRANSFER for name in sites)
            if any(
                read[n].split or (read[n].of not in twins[read[n].mesh] and not transfer) for n in (*inputs, *outputs)
            ):
                split.update(sites)
        elif kind == "mpmd.transfer":
            ops.append(Op("", [], inputs, [define(op.operation.results[0])]))
        elif kind == "func.return":
            results = inputs
        else:
            raise errors.CompileError(f"unexpected operation {kind} in a partitioned program")
    return Partitioned(read, count, ops, results, frozenset(split), text_of(module))


def text_of(module: ir.Module) -> str:
    """A module as text, without the elements of big constants."""
    return str(module.operation.get_asm(large_elements_limit=_TEXT_ELEMENTS))
