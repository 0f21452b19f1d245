"""A `LogicalProgram` as text that people read. Pure."""

from __future__ import annotations

from pathways.compiler.ir import ArrayType, LogicalProgram, Node, NodeKind, Spec


def spec_text(spec: Spec) -> str:
    """`P('x', None)` for (("x",), ())."""
    parts = [repr(axes[0]) if len(axes) == 1 else str(axes) if axes else "None" for axes in spec]
    return f"P({', '.join(parts)})"


def type_text(program: LogicalProgram, type: ArrayType) -> str:
    """`float32[8,4]@left P('x', None)`."""
    return f"{type.dtype}[{','.join(map(str, type.shape))}]@{program.meshes[type.mesh].name} {spec_text(type.spec)}"


def logical_text(program: LogicalProgram) -> str:
    """The program: its slices, then one line per argument, node and result."""
    lines = [f"program {program.name}"]
    for mesh in program.meshes:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.axes)
        lines.append(f"  slice {mesh.name} [{axes}] of {mesh.size} devices")
    for number, donated in zip(program.arguments, program.donated_arguments, strict=True):
        lines.append(
            f"  %{number} = argument : {type_text(program, program.values[number])}{' donated' if donated else ''}"
        )
    for node in program.nodes:
        lines.append("  " + _node_text(program, node))
        if node.kind is NodeKind.LOOP:
            lines += ["    | " + line for line in logical_text(program.loops[node.computation].body).splitlines()]
    lines.append(f"  return {', '.join(f'%{n}' for n in program.results)}")
    return "\n".join(lines)


def _node_text(program: LogicalProgram, node: Node) -> str:
    outputs = ", ".join(f"%{n}" for n in node.outputs)
    inputs = ", ".join(
        f"%{n}{' donated' if donated else ''}"
        for n, donated in zip(node.inputs, node.donates or (False,) * len(node.inputs), strict=True)
    )
    types = ", ".join(type_text(program, program.values[n]) for n in node.outputs)
    when = when_text(program, node)
    if node.kind is NodeKind.SELECT:
        return f"{outputs} = select {node.name} of {node.origin}({inputs}) : {types}{when}"
    if node.kind is NodeKind.LOOP:
        loop = program.loops[node.computation]
        often = "while its first result is true" if loop.count is None else f"{loop.count} times"
        return f"{outputs} = {node.name} of {node.origin}({inputs}), {often} : {types}{when}"
    if node.kind in (NodeKind.EXCHANGE, NodeKind.PERMUTE):
        source, target = (program.meshes[program.values[n].mesh].name for n in (node.inputs[0], node.outputs[0]))
        how = program.exchanges[node.computation] if node.kind is NodeKind.EXCHANGE else None
        room = f", {how.capacity} rows per shard, {'dropping' if how.drops else 'failing with'} more" if how else ""
        return f"{outputs} = {node.name}({inputs}) from {source} to {target}{room} : {types}{when}"
    if node.kind is NodeKind.TRANSFER:
        source = program.meshes[program.values[node.inputs[0]].mesh].name
        return f"{outputs} = transfer {node.name}({inputs}) from {source} : {types}{when}"
    computation = program.computations[node.computation]
    backward = f" {node.label}" if node.label is not None else " backward" if node.transposes else ""
    return (
        f"{outputs} = call {node.name}({inputs}) on {program.meshes[computation.mesh].name}{backward} "
        f"#{computation.fingerprint[:8]} : {types}{when}"
    )


def when_text(program: LogicalProgram, node: Node) -> str:
    """` if %3 is 1` for a node that is run only then; "" for one that is always run."""
    return "" if node.predicate < 0 else f" if {_predicate_text(program, node.predicate)}"


def _predicate_text(program: LogicalProgram, number: int) -> str:
    predicate = program.predicates[number]
    outer = f" and {_predicate_text(program, predicate.parent)}" if predicate.parent >= 0 else ""
    return f"%{predicate.value} is {predicate.case}{outer}"
