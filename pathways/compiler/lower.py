"""From a partitioned module and its IFRT IR to a `LogicalProgram`.

The partitioned module says what each call is and by which axes each value is cut. Its IFRT IR has one StableHLO module
per distinct fragment. A fragment that only passes values through becomes transfers. A transfer that changes nothing is
left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any

from pathways import _jaxlib, errors
from pathways._jaxlib import ir
from pathways.compiler import donation, types
from pathways.compiler.emit import Emitted, Site, symbol
from pathways.compiler.flatten import FlatProgram, StepKind
from pathways.compiler.ir import ArrayType, Computation, HostFunction, LogicalProgram, Node, NodeKind, PipelineInfo
from pathways.compiler.trace import Traced

#: Arrays of more elements are elided in `mpmd_text` and `ifrt_text`.
_TEXT_ELEMENTS = 32


@dataclasses.dataclass
class _Op:
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
    ops: list[_Op]
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
    ops: list[_Op] = []
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
            ops.append(_Op(callee, sites, inputs, outputs, mesh))
            transfer = bool(sites) and all(emitted.sites[name].kind is StepKind.TRANSFER for name in sites)
            if any(
                read[n].split or (read[n].of not in twins[read[n].mesh] and not transfer) for n in (*inputs, *outputs)
            ):
                split.update(sites)
        elif kind == "mpmd.transfer":
            ops.append(_Op("", [], inputs, [define(op.operation.results[0])]))
        elif kind == "func.return":
            results = inputs
        else:
            raise errors.CompileError(f"unexpected operation {kind} in a partitioned program")
    return Partitioned(read, count, ops, results, frozenset(split), _text(module))


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
    """
    builder = _Builder(emitted, partitioned, ifrt)
    positions = {v: n for n, v in enumerate(emitted.inputs)}
    arguments: list[int] = []
    for v, argument in zip(program.invars, traced.arguments, strict=True):
        if v in positions:
            arguments.append(builder.argument(positions[v]))
        else:  # this argument never went to the compiler: it is dead, or only returned
            shape, dtype = _jaxlib.physical(v.aval)
            mesh = emitted.meshes.index(argument.mesh) if argument.mesh is not None else 0
            spec = argument.spec if argument.mesh is not None and argument.spec is not None else ()
            arguments.append(builder.value(ArrayType(shape, dtype, mesh, (*spec, *((),) * (len(shape) - len(spec))))))
    for op in partitioned.ops:
        builder.op(op)
    if ordered := [each.title for each in pipelines if each.schedule != "none"]:
        _check_order(emitted, partitioned, " and ".join(ordered))
    by_var = dict(zip(program.invars, arguments, strict=True))
    outputs = iter(partitioned.results)
    results: list[int] = []
    for v in emitted.outvars:
        if isinstance(v, _jaxlib.Literal):
            results.append(builder.known[next(outputs)])
        else:
            if v not in by_var:
                by_var[v] = builder.known[next(outputs)]
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
            _text(ifrt),
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


class _Builder:
    """Collects values, computations and nodes. `known` maps the partitioned module's values to ours."""

    def __init__(self, emitted: Emitted, partitioned: Partitioned, ifrt: ir.Module) -> None:
        self.emitted = emitted
        self.partitioned = partitioned
        self.mesh_numbers = {symbol(n): n for n in range(len(emitted.meshes))}
        self.fragments = {
            ir.StringAttr(op.attributes["sym_name"]).value: op
            for op in ifrt.body.operations
            if op.operation.name == "builtin.module"
        }
        self.values: list[ArrayType] = []
        self.known: dict[int, int] = {}
        self.computations: list[Computation] = []
        self.nodes: list[Node] = []
        self._by_content: dict[Any, int] = {}
        self._loaded: dict[tuple[str, str], tuple[bytes, str, tuple[int, ...]]] = {}
        self._transfers = 0
        self._inferred = 0

    def value(self, type: ArrayType) -> int:
        self.values.append(type)
        return len(self.values) - 1

    def type(self, number: int) -> ArrayType:
        read = self.partitioned.types[number]
        return ArrayType(read.shape, read.dtype, self.mesh_numbers[read.mesh], read.spec)

    def argument(self, number: int) -> int:
        self.known[number] = self.value(self.type(number))
        return self.known[number]

    def op(self, op: _Op) -> None:
        if not op.callee:
            self._transfer(op.inputs[0], op.outputs[0])
            return
        sites = [self.emitted.sites[name] for name in op.sites]
        if all(site.kind is StepKind.TRANSFER for site in sites):
            passes = _passes(_jaxlib.parse(_jaxlib.standalone(self.fragments[op.callee])))
            if passes is not None:
                for number, source in enumerate(passes):
                    self._transfer(op.inputs[source], op.outputs[number])
                return
        module, fingerprint, callbacks = self._fragment(op)
        inputs = tuple(self.known[n] for n in op.inputs)
        for number in op.outputs:
            self.known[number] = self.value(self.type(number))
        outputs = tuple(self.known[n] for n in op.outputs)
        in_types = tuple(self.values[n] for n in inputs)
        out_types = tuple(self.values[n] for n in outputs)
        mesh = self.mesh_numbers[op.mesh]
        name, origin, transposes = self._names(sites)
        key = (fingerprint, mesh, in_types, out_types)
        computation = self._by_content.get(key)
        if computation is None:
            computation = self._by_content[key] = len(self.computations)
            self.computations.append(
                Computation(
                    origin or name,
                    module,
                    fingerprint,
                    mesh,
                    in_types,
                    out_types,
                    donation.may_alias(in_types, out_types),
                    callbacks,
                )
            )
        label = next((site.label for site in sites if site.label is not None), None)
        self.nodes.append(
            Node(NodeKind.CALL, name, computation, inputs, outputs, origin, transposes, (False,) * len(inputs), label)
        )

    def _names(self, sites: list[Site]) -> tuple[str, str, int]:
        if not sites:
            self._inferred += 1
            return f"inferred.{self._inferred - 1}", "", 0
        placed = [site for site in sites if site.kind is StepKind.PLACED]
        return (
            "+".join(site.name for site in placed or sites),
            "+".join(dict.fromkeys(s.origin for s in placed)),
            min((site.transposes for site in placed), default=0),
        )

    def _transfer(self, source: int, target: int) -> None:
        before = self.known[source]
        wanted = self.type(target)
        if self.values[before] == wanted:  # changes nothing: the same value
            self.known[target] = before
            return
        self.known[target] = self.value(wanted)
        self.nodes.append(Node(NodeKind.TRANSFER, f"transfer.{self._transfers}", -1, (before,), (self.known[target],)))
        self._transfers += 1

    def _fragment(self, op: _Op) -> tuple[bytes, str, tuple[int, ...]]:
        """The portable module that a call runs, its fingerprint, and the numbers of its callbacks."""
        key = (op.callee, op.mesh)
        loaded = self._loaded.get(key)
        if loaded is None:
            module = _jaxlib.parse(_jaxlib.standalone(self.fragments[op.callee]))
            canonicalize(module)
            portable = _jaxlib.portable_bytecode(module)
            callbacks = tuple(_jaxlib.callbacks_of(module)) if self.emitted.callbacks else ()
            loaded = self._loaded[key] = (portable, hashlib.sha256(portable).hexdigest()[:32], callbacks)
        return loaded


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


def canonicalize(module: ir.Module) -> None:
    """Makes the bytes of equal computations equal: one mesh name, no module name, no donation, no locations."""
    table = ir.SymbolTable(module.operation)
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            old = ir.StringAttr(op.attributes["sym_name"]).value
            table.replace_all_symbol_uses(old, "mesh", module.operation)
            op.attributes["sym_name"] = ir.StringAttr.get("mesh")
    main = _jaxlib.main_function(module)
    for op in list(main.regions[0].blocks[0].operations):
        if op.operation.name == "sdy.propagation_barrier":  # the partitioner has used it; no more needed
            op.operation.results[0].replace_all_uses_with(op.operation.operands[0])
            op.operation.erase()
    if "arg_attrs" in main.attributes:
        kept = []
        for attrs in ir.ArrayAttr(main.attributes["arg_attrs"]):
            attrs = ir.DictAttr(attrs)
            kept.append(ir.DictAttr.get({"sdy.sharding": attrs["sdy.sharding"]} if "sdy.sharding" in attrs else {}))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(kept)
    if "reserved_hbm_bytes" in main.attributes:
        del main.attributes["reserved_hbm_bytes"]
    for name in ("sym_name", "sym_visibility"):
        if name in module.operation.attributes:
            del module.operation.attributes[name]
    _jaxlib.strip_locations(module)


def _passes(module: ir.Module) -> list[int] | None:
    """Which argument each result is, if every result is an argument, perhaps resharded; else None."""
    block = _jaxlib.main_function(module).regions[0].blocks[0]
    origin: dict[Any, int] = {argument: n for n, argument in enumerate(block.arguments)}
    for op in block.operations:
        if op.operation.name in ("sdy.sharding_constraint", "sdy.propagation_barrier"):
            origin[op.operation.results[0]] = origin[op.operation.operands[0]]
        elif op.operation.name == "func.return":
            return [origin[v] for v in op.operation.operands]
        else:
            return None
    return None


def _text(module: ir.Module) -> str:
    return str(module.operation.get_asm(large_elements_limit=_TEXT_ELEMENTS))
