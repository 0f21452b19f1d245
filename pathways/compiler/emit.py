"""From a flat program to StableHLO + `mpmd`, and through jaxlib's partitioner to IFRT IR.

Every placed call and every transfer becomes an `mpmd.named_computation` with a name and a stage of its own, so that
the compiler keeps it apart; plain operations stay outside, and the compiler infers their mesh. Arguments that are
results, dead arguments and repeated results never reach the compiler.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy

from pathways import _jaxlib, errors
from pathways.compiler.bodies import Bodies, Body
from pathways.compiler.flatten import FlatProgram, Step, StepKind
from pathways.compiler.ir import MeshSpec, Spec
from pathways.compiler.options import Options
from pathways.compiler.trace import Traced

#: A mesh unlike any other: it makes the topology heterogeneous, so that the compiler leaves reshards to transfers.
_PAD = "pathways_pad"


@dataclasses.dataclass(frozen=True)
class Site:
    """One call site: what a named computation in the module stands for."""

    name: str
    origin: str
    kind: StepKind
    transposes: int
    mesh: MeshSpec
    spec: Spec | None = None


@dataclasses.dataclass
class Emitted:
    """A module for the partitioner, with all that it does not say.

    `inputs` and `outputs` are the jaxpr variables that are the module's arguments and results.
    """

    module: ir.Module
    meshes: tuple[MeshSpec, ...]
    sites: dict[str, Site]
    inputs: list[Any]
    outputs: list[Any]
    input_meshes: list[str | None]
    output_meshes: list[str | None]


def symbol(number: int) -> str:
    """The compiler's name for mesh `number`."""
    return f"m{number}"


def collect_meshes(traced: Traced, program: FlatProgram, default: MeshSpec | None) -> tuple[MeshSpec, ...]:
    """The meshes of a program in order of first appearance; the first is where unplaced things go."""
    meshes: dict[str, MeshSpec] = {}
    candidates = [a.mesh for a in traced.arguments] + [step.mesh for step in program.steps] + [default]
    for mesh in candidates:
        if mesh is not None and meshes.setdefault(mesh.name, mesh) != mesh:
            raise errors.PlacementError(f"program {traced.name!r} uses two different slices named {mesh.name!r}: "
                                        f"{meshes[mesh.name].axes} and {mesh.axes}")
    if not meshes:
        raise errors.PlacementError(f"program {traced.name!r} calls no placed function and none of its arguments lives "
                                    "on a slice, so it runs nowhere; place a function with pw.jit(..., devices=slice)")
    return tuple(meshes.values())


def emit(traced: Traced, program: FlatProgram, meshes: tuple[MeshSpec, ...], options: Options,
         closed_sites: frozenset[str] = frozenset()) -> Emitted:
    """The module of a program, in the MLIR context that is entered.

    `closed_sites` names call sites whose undeclared shardings are pinned to replicated (see `pipeline`).
    """
    bodies = Bodies(program.constants, options.platforms)
    bodies.borrow_debug_info(traced.jaxpr.jaxpr)
    numbers = {mesh: symbol(n) for n, mesh in enumerate(meshes)}
    groups = _group(program)
    readers = _readers(groups, program)
    argument_of = dict(zip(program.invars, traced.arguments, strict=True))
    read = {v for group in groups for v in _reads(group, program.constants)}
    inputs = [v for v in program.invars if v in read]
    invars = set(program.invars)
    results: list[Any] = []
    for v in program.outvars:
        key = v if not isinstance(v, _jaxlib.Literal) else None
        if key is None or (key not in invars and key not in results):
            results.append(v)

    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        for mesh in meshes:
            axes = [sdy.MeshAxisAttr.get(name, size) for name, size in mesh.axes]
            sdy.MeshOp(numbers[mesh], sdy.MeshAttr.get(axes))
    types = [_jaxlib.tensor_type(*_jaxlib.physical(v.aval)) for v in inputs]
    out_types = [_jaxlib.tensor_type(*_jaxlib.physical(v.aval)) for v in results]
    with ir.InsertionPoint(module.body):
        main = func.FuncOp("main", ir.FunctionType.get(types, out_types), visibility="public")
    block = main.add_entry_block()
    values: dict[Any, ir.Value] = dict(zip(inputs, block.arguments, strict=True))
    sites: dict[str, Site] = {}
    writer = _Writer(values, sites, numbers, bodies, closed_sites)
    with ir.InsertionPoint(block):
        for number, group in enumerate(groups):
            if group[0].kind is StepKind.PLAIN:
                writer.plain(group, [v for step in group for v in step.outputs if readers.get(v, set()) - {number}])
            elif group[0].kind is StepKind.PLACED:
                writer.placed(group[0])
            else:
                writer.transfer(group[0])
        outs = [values[v] if not isinstance(v, _jaxlib.Literal) and v in values
                else writer.constant(v, program, meshes[0], traced) for v in results]
        func.ReturnOp(outs)
    arg_attrs = []
    for v in inputs:
        argument = argument_of[v]
        attrs = {}
        if argument.mesh is not None and argument.spec is not None:
            rank = len(_jaxlib.physical(v.aval)[0])
            attrs["sdy.sharding"] = sharding_attr(numbers[argument.mesh], argument.spec, rank)
        arg_attrs.append(ir.DictAttr.get(attrs))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(arg_attrs)
    link(module, bodies.all, numbers)
    floating = _floating(program, argument_of)
    return Emitted(
        module, meshes, sites, inputs, results,
        [numbers[argument_of[v].mesh] if argument_of[v].mesh is not None else None for v in inputs],  # type: ignore
        [numbers[meshes[0]] if isinstance(v, _jaxlib.Literal) or v in floating else None for v in results])


def assignment(emitted: Emitted, options: Options) -> dict[str, Any]:
    """Name of each named computation -> its mesh, with a stage of its own unless merging is asked for."""
    numbers = {mesh: symbol(n) for n, mesh in enumerate(emitted.meshes)}
    return {key: (numbers[site.mesh], stage) if options.keeps_calls else numbers[site.mesh]
            for stage, (key, site) in enumerate(emitted.sites.items())}


def topology(meshes: Sequence[MeshSpec]) -> list[tuple[str, list[tuple[str, int]]]]:
    """The meshes as the partitioner wants them, and the pad."""
    named = [(symbol(n), list(mesh.axes)) for n, mesh in enumerate(meshes)]
    return named if len(named) == 1 else [*named, (_PAD, [(_PAD, 1 + sum(mesh.size for mesh in meshes))])]


def sharding_attr(mesh: str, spec: Spec, rank: int, open_dims: bool = False) -> ir.Attribute:
    """`#sdy.sharding` of a spec over mesh symbol `mesh`; dimensions beyond the spec (a key's words) are not cut."""
    dims = [sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in axes], is_closed=not open_dims)
            for axes in (*spec, *((),) * (rank - len(spec)))]
    return sdy.TensorShardingAttr.get(ir.FlatSymbolRefAttr.get(mesh), dims)


def link(module: ir.Module, bodies: Sequence[Body], numbers: dict[MeshSpec, str]) -> None:
    """Moves the bodies' functions into `module`, each body's `main` as `body_<number>`, on its slice's mesh symbol."""
    for body in bodies:
        source = _jaxlib.parse(body.module)
        table = ir.SymbolTable(source.operation)
        renames: dict[str, str] = {}
        for op in list(source.body.operations):
            name = op.attributes["sym_name"].value
            if op.operation.name == "sdy.mesh":
                renames[name] = numbers[body.mesh] if body.mesh is not None else symbol(0)
                op.operation.erase()
            else:
                new = f"body_{body.number}" if name == "main" else f"body_{body.number}_{name}"
                renames[name] = new
        # Two passes, so that no new name is taken for an old one.
        for prefix in ("tmp$", ""):
            for old, new in renames.items():
                before = old if prefix else "tmp$" + old
                after = "tmp$" + old if prefix else new
                table.replace_all_symbol_uses(before, after, source.operation)
                for op in source.body.operations:
                    if op.operation.name == "func.func" and op.attributes["sym_name"].value == before:
                        op.attributes["sym_name"] = ir.StringAttr.get(after)
        for op in list(source.body.operations):
            op.attributes["sym_visibility"] = ir.StringAttr.get("private")
            module.body.append(op)


class _Writer:
    """Writes steps into the body of `main`; `values` maps jaxpr variables to what holds them."""

    def __init__(self, values: dict[Any, ir.Value], sites: dict[str, Site], numbers: dict[MeshSpec, str],
                 bodies: Bodies, closed_sites: frozenset[str]) -> None:
        self.values = values
        self.sites = sites
        self.numbers = numbers
        self.bodies = bodies
        self.closed_sites = closed_sites

    def placed(self, step: Step) -> None:
        assert step.placement is not None
        body, free = self.bodies.placed(step)
        self._named(step.placement.name, StepKind.PLACED, step, [step.inputs[n] for n in free], body)

    def transfer(self, step: Step) -> None:
        (source,) = step.inputs
        if isinstance(source, _jaxlib.Literal) or source in self.bodies.constants:
            body = self.bodies.constant(source, step.mesh)
            self._named("constant", StepKind.PLACED, step, [], body)
        else:
            self._named("transfer", StepKind.TRANSFER, step, [source], None)

    def constant(self, v: Any, program: FlatProgram, mesh: MeshSpec, traced: Traced) -> ir.Value:
        """A result that is a constant of the program: a computation without inputs on the first mesh."""
        body = self.bodies.constant(v, mesh)
        step = Step(StepKind.PLACED, None, [], [v], mesh=mesh)
        return self._named("constant", StepKind.PLACED, step, [], body)[0]

    def plain(self, group: list[Step], outputs: list[Any]) -> None:
        constants = self.bodies.constants
        inputs = list(dict.fromkeys(v for v in _reads(group, constants)))
        body = self.bodies.plain(group, inputs, outputs)
        results = self._call(body, [self.values[v] for v in inputs], outputs)
        self.values.update(zip(outputs, results, strict=True))

    def _call(self, body: Body, operands: Sequence[ir.Value], outputs: Sequence[Any]) -> list[ir.Value]:
        types = [_jaxlib.tensor_type(*_jaxlib.physical(v.aval)) for v in outputs]
        return list(func.CallOp(types, ir.FlatSymbolRefAttr.get(f"body_{body.number}"), list(operands)).results)

    def _named(self, origin: str, kind: StepKind, step: Step, inputs: Sequence[Any], body: Body | None,
               ) -> list[ir.Value]:
        assert step.mesh is not None
        origin = re.sub(r"[^\w.<>-]", "_", origin)
        key = f"{origin}.{len(self.sites)}"
        self.sites[key] = Site(key, origin, kind, step.transposes, step.mesh, step.spec)
        operands = [self.values[v] for v in inputs]
        types = [_jaxlib.tensor_type(*_jaxlib.physical(v.aval)) for v in step.outputs]
        op, block = _jaxlib.named_computation(types, operands, key, step.transposes)
        with ir.InsertionPoint(block):
            arguments = list(block.arguments)
            pin = key in self.closed_sites
            if pin and step.spec is None:
                arguments = [self._constrain(a, (), step.mesh) for a in arguments]
            results = arguments if body is None else self._call(body, arguments, step.outputs)
            if step.spec is not None:
                results = [self._constrain(results[0], step.spec, step.mesh)]
            elif pin:
                results = [self._constrain(r, (), step.mesh) for r in results]
            _jaxlib.mpmd_return(results)
        self.values.update(zip(step.outputs, op.results, strict=True))
        return list(op.results)

    def _constrain(self, value: ir.Value, spec: Spec, mesh: MeshSpec) -> ir.Value:
        rank = len(ir.RankedTensorType(value.type).shape)
        return sdy.ShardingConstraintOp(value, sharding_attr(self.numbers[mesh], spec, rank)).result


def _group(program: FlatProgram) -> list[list[Step]]:
    """The steps, with runs of neighbouring plain operations taken together."""
    groups: list[list[Step]] = []
    for step in program.steps:
        if step.kind is StepKind.PLAIN and groups and groups[-1][0].kind is StepKind.PLAIN:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _reads(group: Sequence[Step], constants: dict[Any, Any]) -> list[Any]:
    """The variables a group reads from outside of it."""
    written = {v for step in group for v in step.outputs}
    return [v for step in group for v in step.inputs
            if not isinstance(v, _jaxlib.Literal) and v not in written and v not in constants]


def _readers(groups: list[list[Step]], program: FlatProgram) -> dict[Any, set[int]]:
    """For each variable, the numbers of the groups that read it; -1 stands for the program's results."""
    readers: dict[Any, set[int]] = {}
    for number, group in enumerate(groups):
        for step in group:
            for v in step.inputs:
                if not isinstance(v, _jaxlib.Literal):
                    readers.setdefault(v, set()).add(number)
    for v in program.outvars:
        if not isinstance(v, _jaxlib.Literal):
            readers.setdefault(v, set()).add(-1)
    return readers


def _floating(program: FlatProgram, argument_of: dict[Any, Any]) -> set[Any]:
    """Variables that depend on nothing that is placed: the compiler cannot infer their mesh."""
    anchored = {v for v, argument in argument_of.items() if argument.mesh is not None}
    floating = set(program.constants)
    for step in program.steps:
        reads = [v for v in step.inputs if not isinstance(v, _jaxlib.Literal)]
        if step.kind is not StepKind.PLAIN or any(v in anchored for v in reads):
            anchored.update(step.outputs)
        else:
            floating.update(step.outputs)
    return floating
