"""Collects the values, computations and nodes of a logical program; used by `lower` and `unfolding`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways import _jaxlib
from pathways._jaxlib import ir
from pathways.compiler import donation, parts
from pathways.compiler.flatten import StepKind
from pathways.compiler.ir import ArrayType, Computation, Label, Node, NodeKind
from pathways.compiler.partition.emit import Emitted, Site, symbol
from pathways.compiler.partition.partitioned import Op, Partitioned
from pathways.compiler.parts import Cut

#: A module as portable bytecode, and the numbers of its callbacks.
Loaded = tuple[bytes, tuple[int, ...]]


class Builder:
    """Collects values, computations and nodes.

    `known` maps values to ours. They are named by the numbers of the partitioned module or, if that has not all groups,
    by variables.
    """

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
        self.known: dict[Any, int] = {}
        self.computations: list[Computation] = []
        self.nodes: list[Node] = []
        self._by_content: dict[Any, int] = {}
        self._make_part: dict[Any, Callable[[], None]] = {}
        self._loaded: dict[tuple[str, str], Loaded] = {}
        self._transfers = 0
        self._inferred = 0

    def value(self, type: ArrayType) -> int:
        """A new value of ours."""
        self.values.append(type)
        return len(self.values) - 1

    def type(self, number: int) -> ArrayType:
        """The type of a value of the partitioned module."""
        read = self.partitioned.types[number]
        return ArrayType(read.shape, read.dtype, self.mesh_numbers[read.mesh], read.spec)

    def argument(self, number: int) -> int:
        """Our value for an argument of the partitioned module."""
        self.known[number] = self.value(self.type(number))
        return self.known[number]

    def op(self, op: Op) -> None:
        """Appends the nodes of an operation of the partitioned module."""
        if not op.callee:
            self._transfer(op.inputs[0], op.outputs[0])
            return
        passes = self.passes(op)
        if passes is not None:
            for number, source in enumerate(passes):
                self._transfer(op.inputs[source], op.outputs[number])
            return
        sites = [self.emitted.sites[name] for name in op.sites]
        name, origin, transposes = self._names(sites)
        types = [self.type(number) for number in op.outputs]
        if len(sites) == 1 and (cut := sites[0].cut) and len(types) == len(cut.read) and len(set(types)) == 1:
            self.cut(name, cut, self.read(op.inputs[0]), types[0], op.outputs)
            return
        inputs = [self.read(n) for n in op.inputs]
        given = [self.values[n] for n in inputs]
        computation = self.computation(origin or name, self.fragment(op), self.mesh_numbers[op.mesh], given, types)
        label = next((site.label for site in sites if site.label is not None), None)
        outputs = self.call(name, computation, inputs, types, origin, transposes, label)
        self.known.update(zip(op.outputs, outputs, strict=True))

    def passes(self, op: Op) -> list[int] | None:
        """Which input each result of a call is, if the call only moves its inputs; else None."""
        if not all(self.emitted.sites[name].kind is StepKind.TRANSFER for name in op.sites):
            return None
        return _passes(_jaxlib.parse(_jaxlib.standalone(self.fragments[op.callee])))

    def knows(self, name: Any) -> bool:
        """Whether a value can be read."""
        return name in self.known or name in self._make_part

    def read(self, name: Any) -> int:
        """Our number of a value that is read now. If it is a part of an array, calls make it and the parts before."""
        while name not in self.known:
            self._make_part[name]()
        return self.known[name]

    def cut(self, name: str, cut: Cut, array: int, part: ArrayType, outputs: Sequence[Any]) -> None:
        """Calls make the parts of an array, each before its first reader. `part`: the type of each part."""
        given, mesh = self.values[array], part.mesh
        axes = self.emitted.meshes[mesh]
        rows = parts.rows_type(cut, given, part)
        if rows is not None:
            computation = self.computation(
                name, _read_text(parts.rows_module(axes, given, rows)), mesh, [given], [rows]
            )
            (array,), given = self.call(name, computation, [array], [rows]), rows
        types = [part, ArrayType((), np.dtype(np.int32), mesh, ())]
        start = self.call(name, self.computation(name, _read_text(parts.FIRST), mesh, [], types[1:]), [], types[1:])
        module = _read_text(parts.part_module(axes, cut, given, part))
        computation = self.computation(name, module, mesh, [given, types[1]], types)
        named = dict(zip(cut.read, outputs, strict=True))
        left = iter(range(cut.parts))

        def make() -> None:
            number = next(left)
            made, start[0] = self.call(name, computation, [array, start[0]], types)
            if number in named:
                self.known[named[number]] = made

        self._make_part.update(dict.fromkeys(outputs, make))

    def computation(
        self, name: str, loaded: Loaded, mesh: int, inputs: Sequence[ArrayType], outputs: Sequence[ArrayType]
    ) -> int:
        """The number of a computation, from its module and the types of its inputs and results."""
        module, callbacks = loaded
        in_types, out_types = tuple(inputs), tuple(outputs)
        key = (module, mesh, in_types, out_types)
        known = self._by_content.get(key)
        if known is None:
            known = self._by_content[key] = len(self.computations)
            may_alias = donation.may_alias(in_types, out_types)
            self.computations.append(Computation(name, module, mesh, in_types, out_types, may_alias, callbacks))
        return known

    def call(
        self,
        name: str,
        computation: int,
        inputs: Sequence[int],
        types: Sequence[ArrayType],
        origin: str = "",
        transposes: int = 0,
        label: Label | None = None,
    ) -> list[int]:
        """Appends a call; returns its results, of the given types."""
        first = len(self.values)
        self.values += types
        outputs = list(range(first, len(self.values)))
        donates = (False,) * len(inputs)
        self.nodes.append(
            Node(NodeKind.CALL, name, computation, tuple(inputs), tuple(outputs), origin, transposes, donates, label)
        )
        return outputs

    def moved(self, value: int, wanted: ArrayType) -> int:
        """Our value as one of another type, behind a transfer; the same if it has that type: nothing changes."""
        if self.values[value] == wanted:
            return value
        target = self.value(wanted)
        self.nodes.append(Node(NodeKind.TRANSFER, f"transfer.{self._transfers}", -1, (value,), (target,)))
        self._transfers += 1
        return target

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
        self.known[target] = self.moved(self.read(source), self.type(target))

    def fragment(self, op: Op) -> Loaded:
        """The portable module that a call runs, and the numbers of its callbacks."""
        key = (op.callee, op.mesh)
        loaded = self._loaded.get(key)
        if loaded is None:
            module = _jaxlib.parse(_jaxlib.standalone(self.fragments[op.callee]))
            callbacks = tuple(_jaxlib.callbacks_of(module)) if self.emitted.callbacks else ()
            loaded = self._loaded[key] = (_portable(module), callbacks)
        return loaded


def _read_text(text: str) -> Loaded:
    """As `Builder.fragment`, of StableHLO without callbacks."""
    return _portable(_jaxlib.parse(text)), ()


def _portable(module: ir.Module) -> bytes:
    """The bytes of a module, the same for equal computations."""
    canonicalize(module)
    return _jaxlib.portable_bytecode(module)


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
