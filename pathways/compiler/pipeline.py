"""All steps from a traced program to a `LogicalProgram`: flatten, schedule, emit, partition, lower.

A program with loops or branches around placed functions goes through the last three in parts (`control.assembling`).

`compile_traced` is what the runtime calls; it needs no device and initialises no backend.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from pathways import _jaxlib, errors
from pathways.compiler import schedule
from pathways.compiler.callback_chains import wired
from pathways.compiler.control.assembling import assemble, has_control
from pathways.compiler.flatten import FlatProgram, flatten
from pathways.compiler.ir import LogicalProgram, Loop, MeshSpec, NodeKind, PipelineInfo
from pathways.compiler.memo import Memo, key_of
from pathways.compiler.options import PARALLEL_ITERATIONS, PARALLEL_ITERATIONS_IN_PLACE, Options
from pathways.compiler.partition import emit, lower
from pathways.compiler.trace import Traced
from pathways.compiler.unfolding import NotUnfolded

#: How often to compile at most. After a round in which the compiler cut a value by part of an axis, the shardings of
#: those call sites are pinned to replicated, and the program is compiled again.
_MAX_ROUNDS = 4

_memo = Memo()


def compile_traced(
    traced: Traced, options: Mapping[str, Any] | Options | None = None, *, default_mesh: MeshSpec | None = None
) -> LogicalProgram:
    """Partitions and lowers a traced program.

    `default_mesh` is the mesh of a program that names no slice at all.

    Raises:
        OptionError: an unknown option or schedule, or lengths for another number of stages.
        PlacementError: no slice to run on, or two slices of one name.
        CallbackError, ProgramError: see `flatten`.
        ScheduleError: the program cannot follow its schedule.
        CompileError: jaxlib's compiler refused the program, or changed the order of a schedule.
    """
    _jaxlib.check_versions()
    options = Options.of(options)
    key = key_of(traced)
    if key is not None:
        key = (key, options, default_mesh)
        if (known := _memo.get(key)) is not None:
            return known
    compiled = _compile(traced, options, default_mesh)
    if key is not None:
        _memo.put(key, compiled)
    return compiled


def forget_compiled() -> None:
    """Forgets what it remembers of programs."""
    _memo.clear()


def _compile(traced: Traced, options: Options, default_mesh: MeshSpec | None) -> LogicalProgram:
    program = flatten(traced, options.unroll, options.chunks)
    if program.before is not None:
        traced = traced.in_order()
    order = schedule.Ordering(program, options)
    if has_control(program):
        made = assemble(program, traced, order.apply, functools.partial(_partition, options), default_mesh)
        order.check_followed(traced)
        if not made.loops:
            return made
        default = PARALLEL_ITERATIONS_IN_PLACE if _are_in_place(made.loops) else PARALLEL_ITERATIONS
        return dataclasses.replace(made, parallel_iterations=options.parallel_iterations or default)
    pipelines = order.apply(traced, program)
    order.check_followed(traced)
    return _partition(options, traced, program, default_mesh, pipelines)


def _are_in_place(loops: Sequence[Loop]) -> bool:
    """Whether the loops and those inside them have known counts, and no iteration moves a value to other devices. Then
    none is ordered in vain, and no memory is kept for what an iteration in flight receives."""
    moves = (NodeKind.TRANSFER, NodeKind.EXCHANGE, NodeKind.PERMUTE)
    return all(
        loop.count is not None
        and all(node.kind not in moves for node in loop.body.nodes)
        and _are_in_place(loop.body.loops)
        for loop in loops
    )


def _partition(
    options: Options,
    traced: Traced,
    program: FlatProgram,
    default_mesh: MeshSpec | None,
    pipelines: tuple[PipelineInfo, ...] = (),
) -> LogicalProgram:
    """Partitions and lowers a program without control steps. `pipelines` is from `schedule.Ordering`."""
    program = wired(program, traced.jaxpr.jaxpr)
    meshes = emit.collect_meshes(traced, program, default_mesh)
    pinned: frozenset[str] = frozenset()
    whole = not options.keeps_calls
    for _ in range(_MAX_ROUNDS):
        with _jaxlib.mlir_context():
            emitted = emit.emit(traced, program, meshes, options, pinned, whole)
            try:
                module = _jaxlib.partition(
                    emitted.module,
                    meshes=emit.topology(meshes),
                    assignment=emit.assignment(emitted, options),
                    input_meshes=emitted.input_meshes,
                    output_meshes=emitted.output_meshes,
                    options=options.for_compiler(),
                )
                lowered = lower.read_partitioned(module, emitted)
                _jaxlib.lower_to_ifrt(module)
            except (RuntimeError, ValueError) as error:
                if isinstance(error, errors.PathwaysError):
                    raise
                raise errors.CompileError(f"jaxlib's MPMD compiler refused program {traced.name!r}: {error}") from error
            if lowered.split_axes <= pinned:
                try:
                    return lower.to_logical(traced, program, emitted, lowered, module, pipelines)
                except NotUnfolded:
                    whole = True
            pinned |= lowered.split_axes
    raise errors.ShardingError(
        f"program {traced.name!r}: the compiler keeps cutting values by part of a mesh axis at {sorted(pinned)}; give "
        "those functions out_shardings"
    )
