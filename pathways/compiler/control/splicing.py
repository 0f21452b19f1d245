"""Puts a logical program together from parts that were compiled one by one.

Each part has values, meshes and computations of its own; here they get numbers in the whole. A part may be spliced
under a predicate: then all its nodes have it.

Used by `assembling`. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pathways import errors
from pathways.compiler import donation
from pathways.compiler.ir import (
    ArrayType,
    Computation,
    Exchange,
    HostFunction,
    LogicalProgram,
    Loop,
    MeshSpec,
    Node,
    NodeKind,
    PipelineInfo,
    Predicate,
    Spec,
)

#: Where a value lives: its slice, and how it is cut. Dimensions beyond the spec (a key's words) are not cut.
Home = tuple[MeshSpec, Spec]


def home_of(program: LogicalProgram, value: int) -> Home:
    """Where a value of a program lives."""
    type = program.values[value]
    return program.meshes[type.mesh], type.spec


def padded(spec: Spec, rank: int) -> Spec:
    """A spec of `rank` entries."""
    return (*spec, *((),) * rank)[:rank]


def sent_before(body: LogicalProgram, constants: int) -> tuple[LogicalProgram, list[int]]:
    """A loop's body without the transfers of its first `constants` arguments, which are the same in each iteration.

    It takes what they made as further arguments, behind the constants. Returns the body, and for each of the further
    arguments the number of the constant of which it is a copy.
    """
    position = {v: n for n, v in enumerate(body.arguments[:constants])}
    sends = [
        node
        for node in body.nodes
        if node.kind is NodeKind.TRANSFER and node.predicate < 0 and node.inputs[0] in position
    ]
    copies = tuple(node.outputs[0] for node in sends)
    arguments = (*body.arguments[:constants], *copies, *body.arguments[constants:])
    nodes = tuple(node for node in body.nodes if node not in sends)
    body = dataclasses.replace(body, nodes=nodes, arguments=arguments, donated_arguments=(False,) * len(arguments))
    return body, [position[node.inputs[0]] for node in sends]


class Whole:
    """A logical program in the making."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.meshes: list[MeshSpec] = []
        self.values: list[ArrayType] = []
        self.nodes: list[Node] = []
        self.predicates: list[Predicate] = []
        self.loops: list[Loop] = []
        self.exchanges: list[Exchange] = []
        self.callbacks: dict[int, Any] = {}
        self.host_functions: dict[int, HostFunction] = {}
        self.pipelines: list[PipelineInfo] = []
        self._computations: dict[Any, tuple[int, Computation]] = {}
        self._texts: list[tuple[str, str]] = []

    def mesh(self, mesh: MeshSpec) -> int:
        """The number of a mesh."""
        if mesh not in self.meshes:
            if any(other.name == mesh.name for other in self.meshes):
                raise errors.PlacementError(f"program {self.name!r} uses two different slices named {mesh.name!r}")
            self.meshes.append(mesh)
        return self.meshes.index(mesh)

    def value(self, type: ArrayType, home: Home) -> int:
        """A new value of the shape and dtype of `type`."""
        spec = padded(home[1], len(type.shape))
        self.values.append(dataclasses.replace(type, mesh=self.mesh(home[0]), spec=spec))
        return len(self.values) - 1

    def home(self, value: int) -> Home:
        """Where a value lives."""
        return self.meshes[self.values[value].mesh], self.values[value].spec

    def moved(self, value: int, home: Home, predicate: int = -1) -> int:
        """The value, or a copy of it, at that home."""
        spec = padded(home[1], len(self.values[value].shape))
        if self.home(value) == (home[0], spec):
            return value
        there = self.value(self.values[value], home)
        self._add(Node(NodeKind.TRANSFER, "transfer.", -1, (value,), (there,), predicate=predicate))
        return there

    def splice(self, part: LogicalProgram, inputs: Sequence[int], predicate: int = -1) -> list[int]:
        """Appends the nodes of a part, which takes `inputs`; returns its results.

        An input that the part reads, and that lives elsewhere than the part's argument, is moved.
        """
        read = {*part.results, *(v for node in part.nodes for v in node.inputs), *(p.value for p in part.predicates)}
        number: dict[int, int] = {}
        for v, given in zip(part.arguments, inputs, strict=True):
            number[v] = self.moved(given, home_of(part, v), predicate) if v in read else given
        first = len(self.predicates)
        for v, type in enumerate(part.values):
            if v not in number:
                number[v] = self.value(type, home_of(part, v))
        for p in part.predicates:
            parent = predicate if p.parent < 0 else first + p.parent
            self.predicates.append(Predicate(number[p.value], p.case, parent))
        pipelines = [self._pipeline(info) for info in part.pipelines]
        for node in part.nodes:
            computation, label = node.computation, node.label
            if node.kind is NodeKind.CALL:
                computation = self._computation(part, part.computations[computation])
            elif node.kind is NodeKind.LOOP:
                self.loops.append(part.loops[computation])
                computation = len(self.loops) - 1
            elif node.kind is NodeKind.EXCHANGE:
                self.exchanges.append(part.exchanges[computation])
                computation = len(self.exchanges) - 1
            if label is not None:
                label = dataclasses.replace(label, pipeline=pipelines[label.pipeline])
            self._add(
                dataclasses.replace(
                    node,
                    computation=computation,
                    inputs=tuple(number[v] for v in node.inputs),
                    outputs=tuple(number[v] for v in node.outputs),
                    predicate=predicate if node.predicate < 0 else first + node.predicate,
                    label=label,
                )
            )
        self._adopt(part)
        return [number[v] for v in part.results]

    def select(self, which: int, cases: Sequence[int], construct: str) -> int:
        """The value of the case that was taken; all cases live in one place."""
        result = self.value(self.values[cases[0]], self.home(cases[0]))
        self._add(Node(NodeKind.SELECT, "select.", -1, (which, *cases), (result,), construct))
        return result

    def exchange(
        self, kind: NodeKind, inputs: Sequence[int], results: list[int], construct: str, how: Exchange | None = None
    ) -> list[int]:
        """Appends an exchange, or a permute, that makes `results`; returns them."""
        if how is not None:
            self.exchanges.append(how)
        number = len(self.exchanges) - 1 if how is not None else -1
        self._add(Node(kind, f"{kind.value}.", number, tuple(inputs), tuple(results), construct))
        return results

    def loop(self, loop: Loop, inputs: Sequence[int], construct: str) -> list[int]:
        """Appends a loop; returns the last carry."""
        for mesh in loop.body.meshes:
            self.mesh(mesh)
        carry = inputs[loop.constants + (loop.count is None) :]
        results = [self.value(self.values[v], self.home(v)) for v in carry]
        self.loops.append(loop)
        self._add(Node(NodeKind.LOOP, "loop.", len(self.loops) - 1, tuple(inputs), tuple(results), construct))
        self._adopt(loop.body)
        return results

    def _adopt(self, part: LogicalProgram) -> None:
        """The whole has the callbacks and the texts of a part."""
        self.callbacks.update(part.callbacks)
        self.host_functions.update((function.number, function) for function in part.host_functions)
        self._texts.append((part.mpmd_text, part.ifrt_text))

    def finish(self, arguments: Sequence[int], results: Sequence[int], donated: Sequence[bool]) -> LogicalProgram:
        """The program."""
        program = LogicalProgram(
            self.name,
            tuple(self.meshes),
            tuple(self.values),
            tuple(computation for _, computation in self._computations.values()),
            tuple(self.nodes),
            tuple(arguments),
            tuple(results),
            tuple(donated),
            "\n".join(mpmd for mpmd, _ in self._texts),
            "\n".join(ifrt for _, ifrt in self._texts),
            predicates=tuple(self.predicates),
            loops=tuple(self.loops),
            exchanges=tuple(self.exchanges),
            callbacks=self.callbacks,
            host_functions=tuple(self.host_functions.values()),
            pipelines=tuple(self.pipelines),
        )
        return donation.decide(program)

    def _pipeline(self, info: PipelineInfo) -> int:
        """The number of a pipeline here. Parts of one level have the same ones; equal ones of two bodies are two."""
        known = next((n for n, other in enumerate(self.pipelines) if other is info), None)
        if known is None:
            self.pipelines.append(info)
        return len(self.pipelines) - 1 if known is None else known

    def _computation(self, part: LogicalProgram, computation: Computation) -> int:
        def place(types: Sequence[ArrayType]) -> tuple[ArrayType, ...]:
            return tuple(dataclasses.replace(type, mesh=self.mesh(part.meshes[type.mesh])) for type in types)

        mine = dataclasses.replace(
            computation,
            mesh=self.mesh(part.meshes[computation.mesh]),
            inputs=place(computation.inputs),
            outputs=place(computation.outputs),
        )
        key = (mine.fingerprint, mine.mesh, mine.inputs, mine.outputs)
        return self._computations.setdefault(key, (len(self._computations), mine))[0]

    def _add(self, node: Node) -> None:
        """Appends a node under a name that no other node has."""
        same = node.name.rpartition(".")[0]
        donates = (False,) * len(node.inputs) if node.kind is NodeKind.CALL else ()
        self.nodes.append(dataclasses.replace(node, name=f"{same}.{len(self.nodes)}", donates=donates))
