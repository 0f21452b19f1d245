"""From a partitioned module and its IFRT IR to a `LogicalProgram`.

The partitioned module says what each call is and by which axes each value is cut. Its IFRT IR has one StableHLO module
per distinct fragment. A fragment that only passes values through becomes transfers. A transfer that changes nothing is
left out. If the module has one group of each kind only, `unfolding` makes the nodes of the others.
"""

from __future__ import annotations

from pathways import _jaxlib, errors
from pathways._jaxlib import ir
from pathways.compiler import donation
from pathways.compiler.building import Builder
from pathways.compiler.flatten import FlatProgram, StepKind
from pathways.compiler.ir import ArrayType, HostFunction, LogicalProgram, PipelineInfo
from pathways.compiler.partition.emit import Emitted
from pathways.compiler.partition.partitioned import Partitioned, text_of
from pathways.compiler.partition.partitioned import read_partitioned as read_partitioned
from pathways.compiler.trace import Traced
from pathways.compiler.unfolding import NotUnfolded, Unfolding


def to_logical(
    traced: Traced,
    program: FlatProgram,
    emitted: Emitted,
    partitioned: Partitioned,
    ifrt: ir.Module,
    pipelines: tuple[PipelineInfo, ...] = (),
) -> LogicalProgram:
    """Makes the logical program; `ifrt` is the partitioned module after lowering. `pipelines` are those of labels.

    Raises:
        CompileError: the partitioner changed the order that a schedule has made.
        NotUnfolded: the module must be a whole one.
    """
    builder = Builder(emitted, partitioned, ifrt)
    positions = {v: n for n, v in enumerate(emitted.inputs)}
    arguments: list[int] = []
    for v, argument in zip(program.invars, traced.arguments, strict=True):
        first = v if emitted.kinds is None else emitted.kinds.same[v]
        if v in positions:
            arguments.append(builder.argument(positions[v]))
        elif first in positions:
            arguments.append(builder.value(builder.type(positions[first])))
            builder.known[v] = arguments[-1]
        else:  # this argument never went to the compiler: it is dead, or only returned
            shape, dtype = _jaxlib.physical(v.aval)
            mesh = emitted.meshes.index(argument.mesh) if argument.mesh is not None else 0
            spec = argument.spec if argument.mesh is not None and argument.spec is not None else ()
            arguments.append(builder.value(ArrayType(shape, dtype, mesh, (*spec, *((),) * (len(shape) - len(spec))))))
    others = partitioned.ops
    if emitted.kinds is not None:
        others = Unfolding(builder, emitted, partitioned).append()
    for op in others:
        builder.op(op)
    ordered = [each.title for each in pipelines if each.schedule != "none"]
    if ordered and emitted.kinds is None:
        _check_order(emitted, partitioned, " and ".join(ordered))
    by_var = dict(zip(program.invars, arguments, strict=True))
    outputs = iter(partitioned.results)
    results: list[int] = []
    for v in emitted.outvars:
        if isinstance(v, _jaxlib.Literal):
            results.append(builder.read(next(outputs)))
        else:
            if v not in by_var:
                number = next(outputs)
                name = v if builder.knows(v) else number
                if not builder.knows(name):
                    raise NotUnfolded
                by_var[v] = builder.read(name)
            results.append(by_var[v])
    return donation.finish(
        LogicalProgram(
            traced.name,
            emitted.meshes,
            tuple(builder.values),
            tuple(builder.computations),
            tuple(builder.nodes),
            tuple(arguments),
            tuple(results),
            traced.donated,
            partitioned.text,
            text_of(ifrt),
            program.calls,
            {number: each for number, each in emitted.callbacks.items() if each.host is None},
            pipelines,
            host_functions=tuple(
                HostFunction(number, each.host.what, each.host.data, each.host.deadline_s, each.host.path)
                for number, each in emitted.callbacks.items()
                if each.host is not None
            ),
        )
    )


def _check_order(emitted: Emitted, partitioned: Partitioned, schedules: str) -> None:
    """Refuses a program in which the calls of a slice are in another order than the schedule's (SCHED-1)."""
    places = {name: n for n, name in enumerate(emitted.sites)}
    last: dict[str, str] = {}
    seen: set[str] = set()
    for op in partitioned.ops:
        for name in op.sites:
            site = emitted.sites[name]
            if site.kind is StepKind.PLACED and site.label is not None:
                before = last.get(op.mesh, name)
                if name in seen or len(op.sites) > 1 or places[before] > places[name]:
                    raise errors.CompileError(
                        f"jaxlib's compiler did not keep the order of {schedules}: {name} ({site.label}) "
                        f"comes behind {before} or is one computation with {op.sites}; give no schedule"
                    )
                last[op.mesh] = name
                seen.add(name)
