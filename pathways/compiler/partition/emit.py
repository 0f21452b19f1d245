"""From a flat program to StableHLO + `mpmd`, the input of jaxlib's partitioner.

Every group (a placed call, a transfer, a run of plain operations on one slice) becomes an `mpmd.named_computation`
with a name and a stage of its own, so that the compiler does not merge it with others. Arguments that are only
returned, dead arguments and repeated results do not go to the compiler.

Shardings propagate freely between groups on one slice, with two exceptions. They never propagate backwards into a value
whose sharding the user declared, and never backwards across a transfer. Otherwise one value would get two shardings:
the compiler refuses that or, between slices of different axes, confuses them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pathways import _jaxlib, errors
from pathways._jaxlib import func, ir, sdy
from pathways.compiler import kinds, specs
from pathways.compiler.flatten import FlatProgram, StepKind
from pathways.compiler.ir import Label, MeshSpec, Spec
from pathways.compiler.kinds import Kinds
from pathways.compiler.options import Options
from pathways.compiler.partition.bodies import Bodies, Body
from pathways.compiler.partition.groups import Group, group
from pathways.compiler.parts import Cut
from pathways.compiler.trace import Traced

#: A mesh of another size than all others. It makes the topology heterogeneous: then the compiler reshards by transfers.
_PAD = "pathways_pad"


@dataclasses.dataclass(frozen=True)
class Site:
    """One call site: what a named computation in the module means."""

    name: str
    origin: str
    kind: StepKind
    transposes: int
    mesh: MeshSpec
    spec: Spec | None = None
    label: Label | None = None
    cut: Cut | None = None


@dataclasses.dataclass
class Emitted:
    """A module for the partitioner, with what the module itself cannot say.

    `inputs` and `outputs` are the jaxpr variables of the module's arguments and results. `outvars` are those of the
    program's results. `groups` are all groups of the program, and `group_sites` what they are called; the module has
    the first one of each of the `kinds`, or all if that is None.
    """

    module: ir.Module
    meshes: tuple[MeshSpec, ...]
    sites: dict[str, Site]
    inputs: list[Any]
    outputs: list[Any]
    input_meshes: list[str]
    output_meshes: list[str]
    outvars: list[Any]
    callbacks: dict[int, _jaxlib.Callback]
    groups: list[Group]
    group_sites: list[Site]
    kinds: Kinds | None


def symbol(number: int) -> str:
    """The compiler's name for mesh `number`."""
    return f"m{number}"


def collect_meshes(traced: Traced, program: FlatProgram, default: MeshSpec | None) -> tuple[MeshSpec, ...]:
    """The meshes of a program in order of first appearance; what has no slice of its own goes to the first."""
    meshes: dict[str, MeshSpec] = {}
    named = [demand.home for step in program.steps for demand in step.demands]
    candidates = [*(a.mesh for a in traced.arguments), *(step.mesh for step in program.steps), *named, default]
    for mesh in candidates:
        if mesh is not None and meshes.setdefault(mesh.name, mesh) != mesh:
            raise errors.PlacementError(
                f"program {traced.name!r} uses two different slices named {mesh.name!r}: "
                f"{meshes[mesh.name].axes} and {mesh.axes}"
            )
    if not meshes:
        raise errors.PlacementError(
            f"program {traced.name!r} calls no placed function and none of its arguments lives "
            "on a slice, so it runs nowhere; place a function with pw.jit(..., devices=slice)"
        )
    return tuple(meshes.values())


def emit(
    traced: Traced,
    program: FlatProgram,
    meshes: tuple[MeshSpec, ...],
    options: Options,
    pinned: frozenset[str] = frozenset(),
    whole: bool = True,
) -> Emitted:
    """Makes the module of a program, in the MLIR context that is entered.

    `pinned` names call sites whose undeclared shardings are set to replicated (see `pipeline`). Unless the module is
    to be `whole`, it has one group of each kind only, if there are few kinds.
    """
    bodies = Bodies(program, options.platforms, traced.jaxpr.jaxpr)
    grouped = group(program, traced.arguments, meshes[0])
    groups, homes = grouped.groups, grouped.homes
    numbers = {mesh: symbol(n) for n, mesh in enumerate(meshes)}
    argument_of = dict(zip(program.invars, traced.arguments, strict=True))
    on = {v: (numbers[a.mesh], a.spec) for v, a in argument_of.items() if a.mesh is not None and a.spec is not None}
    declared = {*on, *program.declared}
    found = None
    if not whole:
        places = {v: (bodies.type_key(v.aval), homes.get(v), on.get(v)) for v in program.invars}
        found = kinds.find(groups, lambda g: _key(g, bodies, declared, program.declared), places, grouped.outvars)
    if found is None:
        read = {v for g in groups for v in g.reads}
    else:
        read = {found.same.get(v, v) for n in {*found.first} for v in groups[n].reads}
    inputs = [v for v in program.invars if v in read]
    results: list[Any] = []
    for v in grouped.outvars:
        if isinstance(v, _jaxlib.Literal) or (v not in argument_of and v not in results):
            results.append(v)
    results += found.kept if found is not None else ()

    module = ir.Module.create()
    types = [_tensor(v) for v in inputs]
    with ir.InsertionPoint(module.body):
        for name, axes in topology(meshes)[: len(meshes)]:
            sdy.MeshOp(name, sdy.MeshAttr.get([sdy.MeshAxisAttr.get(axis, size) for axis, size in axes]))
        main = func.FuncOp("main", ir.FunctionType.get(types, [_tensor(v) for v in results]), visibility="public")
    block = main.add_entry_block()
    writer = _Writer(dict(zip(inputs, block.arguments, strict=True)), numbers, bodies, pinned, declared)
    with ir.InsertionPoint(block):
        sites = [
            writer.group(g)
            if found is None
            else writer.group(found.alone(g))
            if found.first[n] == n
            else writer.group(g, is_written=False)
            for n, g in enumerate(groups)
        ]
        func.ReturnOp([writer.result(v, meshes[0]) for v in results])
    main.attributes["arg_attrs"] = _attributes(inputs, on)
    made_on = {v: numbers[g.mesh] for g in groups for v in g.outputs}
    main.attributes["res_attrs"] = _attributes(
        results, {v: (made_on[v], spec) for v, spec in program.declared.items() if v in made_on}
    )
    link(module, bodies.all, numbers)
    return Emitted(
        module,
        meshes,
        writer.sites,
        inputs,
        results,
        [numbers[homes[v]] for v in inputs],
        [
            numbers[homes[v]] if not isinstance(v, _jaxlib.Literal) and v in homes else numbers[meshes[0]]
            for v in results
        ],
        grouped.outvars,
        bodies.callbacks,
        groups,
        sites,
        found,
    )


def assignment(emitted: Emitted, options: Options) -> dict[str, Any]:
    """Name of each named computation -> its mesh, with a stage of its own unless the options ask for merging."""
    numbers = {mesh: symbol(n) for n, mesh in enumerate(emitted.meshes)}
    return {
        key: (numbers[site.mesh], stage) if options.keeps_calls else numbers[site.mesh]
        for stage, (key, site) in enumerate(emitted.sites.items())
    }


def topology(meshes: Sequence[MeshSpec]) -> list[tuple[str, list[tuple[str, int]]]]:
    """The meshes as the partitioner wants them and, if there are several, the pad."""
    named = [(symbol(n), list(specs.axes_of(mesh))) for n, mesh in enumerate(meshes)]
    return named if len(named) == 1 else [*named, (_PAD, [(_PAD, 1 + sum(mesh.size for mesh in meshes))])]


def sharding_attr(mesh: str, spec: Spec, rank: int, open_dims: bool = False) -> ir.Attribute:
    """`#sdy.sharding` of a spec over mesh symbol `mesh`; dimensions beyond the spec (a key's words) are not cut."""
    dims = [
        sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in axes], is_closed=not open_dims)
        for axes in (*spec, *((),) * (rank - len(spec)))
    ]
    return sdy.TensorShardingAttr.get(ir.FlatSymbolRefAttr.get(mesh), dims)


def link(module: ir.Module, bodies: Sequence[Body], numbers: dict[MeshSpec, str]) -> None:
    """Moves the bodies' functions into `module`: renames each `main` to `body_<number>`, its mesh to the slice's."""
    for body in bodies:
        source = _jaxlib.parse(body.module)
        table = ir.SymbolTable(source.operation)
        renames: dict[str, str] = {}
        for op in list(source.body.operations):
            name = op.attributes["sym_name"].value
            if op.operation.name == "sdy.mesh":
                renames[name] = numbers[body.mesh]
                op.operation.erase()
            else:
                new = f"body_{body.number}" if name == "main" else f"body_{body.number}_{name}"
                renames[name] = new
        # Two passes, so that a new name is never mistaken for an old one.
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


def _attributes(variables: Sequence[Any], placed: Mapping[Any, tuple[str, Spec]]) -> ir.Attribute:
    """One dictionary per variable, with its sharding where it is known."""
    dicts = []
    for v in variables:
        attrs = {}
        if not isinstance(v, _jaxlib.Literal) and v in placed:
            mesh, spec = placed[v]
            attrs["sdy.sharding"] = sharding_attr(mesh, spec, len(_jaxlib.physical(v.aval)[0]))
        dicts.append(ir.DictAttr.get(attrs))
    return ir.ArrayAttr.get(dicts)


def _tensor(v: Any) -> ir.Type:
    shape, dtype = _jaxlib.physical(v.aval)
    return _jaxlib.tensor_type(shape, dtype)


class _Writer:
    """Writes groups into the body of `main`; `values` maps jaxpr variables to MLIR values."""

    def __init__(
        self,
        values: dict[Any, ir.Value],
        numbers: dict[MeshSpec, str],
        bodies: Bodies,
        pinned: frozenset[str],
        declared: set[Any],
    ) -> None:
        self.values = values
        self.declared = declared
        self.numbers_given = {False: 0, True: 0}  # names given so far: "transfer" (True), all else (False)
        self.sites: dict[str, Site] = {}
        self.numbers = numbers
        self.bodies = bodies
        self.pinned = pinned

    def group(self, g: Group, is_written: bool = True) -> Site:
        """Names a group, and writes it if it is to be written."""
        step = g.steps[-1] if g.steps else None
        body: Callable[[], Body] | None = functools.partial(self.bodies.of, g)
        transposes, spec = 0, None
        if step is None:
            origin, body = "transfer", None
        elif g.kind is StepKind.PLACED:
            assert step.slice_tag is not None
            origin, transposes = step.slice_tag.name, step.transposes
        elif g.kind is StepKind.PLAIN:
            origin = "plain"
        elif g.inputs:
            origin, body, spec = "transfer", None, step.spec
        else:  # a constant put on a slice
            origin, spec = "constant", step.spec
            body = functools.partial(self.bodies.constant, step.inputs[0], g.mesh)
        site = self._named(origin, g, transposes, spec)
        if is_written:
            self._write(site, g, body() if body is not None else None)
        return site

    def result(self, v: Any, default: MeshSpec) -> ir.Value:
        """A result of the program; a constant becomes a computation without inputs on the first mesh."""
        if isinstance(v, _jaxlib.Literal) or v not in self.values:
            key = v if not isinstance(v, _jaxlib.Literal) else _jaxlib.new_var(v.aval)
            g = Group(StepKind.PLAIN, [], default, [], [key], [])
            self._write(self._named("constant", g), g, self.bodies.constant(v, default))
            return self.values[key]
        return self.values[v]

    def _named(self, origin: str, g: Group, transposes: int = 0, spec: Spec | None = None) -> Site:
        origin = re.sub(r"[^\w.<>-]", "_", origin)
        is_transfer = origin == "transfer"  # by name: no two groups may have one name and one number
        key = f"{origin}.{self.numbers_given[is_transfer]}"
        self.numbers_given[is_transfer] += 1
        by = origin if g.kind is StepKind.PLACED else ""
        return Site(key, by, g.kind, transposes, g.mesh, spec, _label(g), g.cut)

    def _write(self, site: Site, g: Group, body: Body | None) -> None:
        key, spec = site.name, site.spec
        self.sites[key] = site
        op, block = _jaxlib.named_computation(
            [_tensor(v) for v in g.outputs], [self.values[v] for v in g.reads], key, site.transposes
        )
        with ir.InsertionPoint(block):
            arguments = [
                _jaxlib.forward_barrier(a) if g.kind is StepKind.TRANSFER or v in self.declared else a
                for v, a in zip(g.reads, block.arguments, strict=True)
            ]
            pin = key in self.pinned and spec is None
            if pin:
                arguments = [self._constrain(a, (), g.mesh) for a in arguments]
            results = arguments
            if body is not None:
                callee = ir.FlatSymbolRefAttr.get(f"body_{body.number}")
                results = list(func.CallOp([_tensor(v) for v in g.outputs], callee, arguments).results)
            if pin or spec is not None:
                results = [self._constrain(r, spec or (), g.mesh) for r in results]
            _jaxlib.mpmd_return(results)
        self.values.update(zip(g.outputs, op.results, strict=True))

    def _constrain(self, value: ir.Value, spec: Spec, mesh: MeshSpec) -> ir.Value:
        rank = len(ir.RankedTensorType(value.type).shape)
        return sdy.ShardingConstraintOp(value, sharding_attr(self.numbers[mesh], spec, rank)).result


def _key(g: Group, bodies: Bodies, declared: set[Any], specs: Mapping[Any, Spec]) -> Any:
    """What a group shares with all that are written alike, but for what they read."""
    reads, results = tuple([v in declared for v in g.reads]), tuple([specs.get(v) for v in g.outputs])
    if g.kind is StepKind.TRANSFER:
        if not g.inputs:
            return id(g)
        step = g.steps[-1] if g.steps else None
        return (g.mesh, bodies.type_key(g.inputs[0].aval), step and step.spec, reads, results)
    transposes = g.steps[-1].transposes if g.kind is StepKind.PLACED else 0
    return (bodies.key(g), transposes, reads, results)


def _label(g: Group) -> Label | None:
    """The label of a group: that of its last step, because cheap constants stand before the step itself."""
    return g.steps[-1].label if g.steps else None
