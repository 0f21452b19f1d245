"""A program with loops as a chain of segments: programs without loops, and the loops between them.

It is the form in which loops are to be ordered: a `Run` is one run of a plan on its hosts; a `Turns` is a run of its
body's plan per iteration. A body that has loops itself is a chain again.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pathways.compiler.ir import LogicalProgram, Loop, Node, NodeKind, Predicate


@dataclasses.dataclass(frozen=True)
class Run:
    """A program without loops. It takes and gives values of the whole, which may be dead if they are of a branch."""

    program: LogicalProgram
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Turns:
    """A loop. Its node in the whole has these inputs, outputs and predicate."""

    loop: Loop
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    predicate: int


def segments(program: LogicalProgram) -> list[Run | Turns]:
    """The segments of a program, in their order. No segment is empty."""
    chain: list[Run | Turns] = []
    start = 0
    for n, node in enumerate(program.nodes):
        if node.kind is NodeKind.LOOP:
            chain += _run(program, start, n)
            chain.append(Turns(program.loops[node.computation], node.inputs, node.outputs, node.predicate))
            start = n + 1
    return chain + _run(program, start, len(program.nodes))


def _reads(program: LogicalProgram, nodes: Sequence[Node]) -> set[int]:
    """The values that nodes read, those that decide whether they are run included."""
    found = {v for node in nodes for v in node.inputs}
    for number in _predicates(program, nodes):
        found.add(program.predicates[number].value)
    return found


def _predicates(program: LogicalProgram, nodes: Sequence[Node]) -> list[int]:
    """The predicates of nodes and those around them, outer ones first."""
    found: set[int] = set()
    for node in nodes:
        number = node.predicate
        while number >= 0:
            found.add(number)
            number = program.predicates[number].parent
    return sorted(found)


def _run(program: LogicalProgram, start: int, end: int) -> list[Run | Turns]:
    nodes = program.nodes[start:end]
    if not nodes:
        return []
    made = {v for node in nodes for v in node.outputs}
    reads = _reads(program, nodes)
    needed = _reads(program, program.nodes[end:]) | set(program.results)
    inputs, outputs = sorted(reads - made), sorted(made & needed)
    number = {v: n for n, v in enumerate(sorted(reads | made))}
    predicates = {old: new for new, old in enumerate(_predicates(program, nodes))}
    donated = {v for node in nodes for v, gone in zip(node.inputs, node.donates, strict=False) if gone}
    part = dataclasses.replace(
        program,
        values=tuple(program.values[v] for v in number),
        nodes=tuple(
            dataclasses.replace(
                node,
                inputs=tuple(number[v] for v in node.inputs),
                outputs=tuple(number[v] for v in node.outputs),
                predicate=predicates.get(node.predicate, -1),
            )
            for node in nodes
        ),
        arguments=tuple(number[v] for v in inputs),
        results=tuple(number[v] for v in outputs),
        donated_arguments=tuple(v in donated for v in inputs),
        predicates=tuple(
            Predicate(number[p.value], p.case, predicates.get(p.parent, -1))
            for p in (program.predicates[old] for old in predicates)
        ),
        loops=(),
        mpmd_text="",
        ifrt_text="",
    )
    return [Run(part, tuple(inputs), tuple(outputs))]
