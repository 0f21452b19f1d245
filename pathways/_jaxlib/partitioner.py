"""jaxlib's MPMD partitioner: its passes, and the operations of its dialect `mpmd`.

The compiler writes a module with `named_computation`, sends it through `partition` and `lower_to_ifrt`, and reads the
result. The extension module is imported at first use, not with the door.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jaxlib
import jaxlib._jax as xla
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import mpmd, sdy

from pathways._jaxlib.compiler_log import quiet


@functools.cache
def mpmd_compiler() -> Any:
    """jaxlib's MPMD compiler. Its extension module imports jaxlib by a name that the wheel lacks: add it."""
    sys.modules.setdefault("jax.jaxlib", jaxlib)
    sys.modules.setdefault("jax.jaxlib._jax", xla)
    import jaxlib._sdy_mpmd as compiler

    return compiler


def partition(
    module: ir.Module,
    *,
    meshes: Sequence[tuple[str, Sequence[tuple[str, int]]]],
    assignment: Mapping[str, Any],
    input_meshes: Sequence[str | None],
    output_meshes: Sequence[str | None],
    options: Mapping[str, Any],
) -> ir.Module:
    """Runs jaxlib's MPMD partitioner and returns the partitioned module.

    The caller must check every argument before: a wrong schedule name or a list of the wrong length aborts the process.
    """
    compiler = mpmd_compiler()
    with quiet():
        return compiler.apply_mpmd_partitioning(
            module,
            "main",
            [(name, list(axes)) for name, axes in meshes],
            dict(assignment),
            list(input_meshes),
            list(output_meshes),
            [],
            partitioning_options=dict(options),
            fragment_merge_rules=[],
            fragment_schedule_rules=[],
            phases=compiler.PartitioningPhase.ALL,
        ).mpmd_module


def lower_to_ifrt(module: ir.Module) -> None:
    """Rewrites a partitioned module to IFRT IR, in place."""
    with quiet():
        mpmd_compiler().lower_to_ifrt(module)


def named_computation(results: Sequence[ir.Type], operands: Sequence[ir.Value], name: str, transposes: int) -> Any:
    """An `mpmd.named_computation` with an empty block of the operands' types; returns (op, block)."""
    origin = ir.Attribute.parse(f'#mpmd.user_origin<"{name}"({transposes})>')
    op = mpmd.NamedComputationOp(list(results), list(operands), origin)
    return op, op.region.blocks.append(*[operand.type for operand in operands])


def forward_barrier(value: ir.Value) -> ir.Value:
    """`value` behind a barrier, past which no sharding is propagated backwards."""
    forward = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1)
    return sdy.PropagationBarrierOp(value, forward).result


def mpmd_return(values: Sequence[ir.Value]) -> None:
    """The terminator of a named computation."""
    mpmd.ReturnOp(list(values))
