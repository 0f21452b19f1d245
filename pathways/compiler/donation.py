"""Decides which inputs each call may donate to its outputs (MEM-4), by liveness in the program. Pure.

jaxlib's partitioner marks the result of every transfer as donatable. It cannot know that the runtime may bind two
slices to one device, where a transfer makes no copy. So here a value and all its transferred copies form one class. A
node donates an input only if three things are true: the node is the last reader of the whole class, no member of the
class is a result, and no member is an argument that the user keeps.

Branches keep this rule. The result of a select is the buffer of one of the values that it selects from, so it is of
their class: none of them is donated before the last reader of the result. If several cases read a value, only the last
of these readers in the program's order may donate it, whichever case is taken. When that reader is not run, it lets go
of the value at its turn, and nobody donates it. The scalar that decides counts as read by all that it decides.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, Node, NodeKind

#: If a call site can donate so many bytes more than the other sites of its module, it gets an executable of its own.
WORTH_A_COMPILE_BYTES = 1 << 20


def may_alias(inputs: Sequence[ArrayType], outputs: Sequence[ArrayType]) -> tuple[bool, ...]:
    """For each input, whether some output has exactly its type."""
    return tuple(type in outputs for type in inputs)


def finish(program: LogicalProgram) -> LogicalProgram:
    """Drops a program's dead transfers and unused meshes, and fills in each node's `donates`."""
    nodes, same = _shorten(program.nodes, program.values)
    results = [same.get(v, v) for v in program.results]
    nodes = _donate(program, _drop_dead(nodes, results), results)
    used = sorted({node.computation for node in nodes if node.kind is NodeKind.CALL})
    renumber = {old: new for new, old in enumerate(used)}
    live = sorted({*program.arguments, *results, *(v for node in nodes for v in (*node.inputs, *node.outputs))})
    number = {old: new for new, old in enumerate(live)}
    nodes = [
        dataclasses.replace(
            node,
            computation=renumber.get(node.computation, -1),
            inputs=tuple([number[v] for v in node.inputs]),
            outputs=tuple([number[v] for v in node.outputs]),
        )
        for node in nodes
    ]
    kept = [program.values[v] for v in live]
    called = [program.computations[n] for n in used]
    # Drop unused meshes, so that the program does not go to hosts that have no part in it. A program without any values
    # keeps mesh 0, because it must be bound to something.
    inhabited = sorted({value.mesh for value in kept} | {each.mesh for each in called}) or [0]
    mesh = {old: new for new, old in enumerate(inhabited)}

    @functools.cache
    def on(type: ArrayType) -> ArrayType:
        return dataclasses.replace(type, mesh=mesh[type.mesh])

    def place(types: Sequence[ArrayType]) -> tuple[ArrayType, ...]:
        return tuple(map(on, types))

    return dataclasses.replace(
        program,
        meshes=tuple(program.meshes[n] for n in inhabited),
        values=place(kept),
        computations=tuple(
            dataclasses.replace(each, mesh=mesh[each.mesh], inputs=place(each.inputs), outputs=place(each.outputs))
            for each in called
        ),
        nodes=tuple(nodes),
        arguments=tuple(number[v] for v in program.arguments),
        results=tuple(number[v] for v in results),
    )


def decide(program: LogicalProgram) -> LogicalProgram:
    """`program` with each node's `donates` filled in; it may have loops and branches."""
    return dataclasses.replace(program, nodes=tuple(_donate(program, list(program.nodes), program.results)))


def own_results(program: LogicalProgram) -> list[bool]:
    """Of each result: whether its buffer is a new one, which is no argument's and no other result's."""
    source: dict[int, set[int]] = {v: {v} for v in program.arguments}
    for node in program.nodes:
        for v in node.outputs:
            if node.kind in (NodeKind.CALL, NodeKind.EXCHANGE, NodeKind.PERMUTE):
                source[v] = {v}
            else:  # perhaps the buffer of one of the inputs
                source[v] = set().union(*(source[i] for i in node.inputs))
    counts = collections.Counter(s for v in program.results for s in source[v])
    counts.update(program.arguments)
    return [all(counts[s] == 1 and s not in program.arguments for s in source[v]) for v in program.results]


def _shorten(nodes: Sequence[Node], values: Sequence[ArrayType]) -> tuple[list[Node], dict[int, int]]:
    """Makes a transfer of a transferred value read the original; drops a transfer that gives the original's type.

    Returns the nodes and, for each value that is dropped, the value that replaces it.
    """
    source: dict[int, int] = {}
    same: dict[int, int] = {}
    kept = []
    for node in nodes:
        if not same.keys().isdisjoint(node.inputs):
            node = dataclasses.replace(node, inputs=tuple(same.get(v, v) for v in node.inputs))
        if node.kind is NodeKind.TRANSFER:
            origin = source.get(node.inputs[0], node.inputs[0])
            if values[origin] == values[node.outputs[0]]:
                same[node.outputs[0]] = origin
                continue
            source[node.outputs[0]] = origin
            node = dataclasses.replace(node, inputs=(origin,))
        kept.append(node)
    return kept, same


def _drop_dead(nodes: list[Node], results: Sequence[int]) -> list[Node]:
    live = set(results)
    kept = []
    for node in reversed(nodes):
        if node.kind is NodeKind.TRANSFER and node.outputs[0] not in live:
            continue
        live.update(node.inputs)
        kept.append(node)
    return kept[::-1]


def _donate(program: LogicalProgram, nodes: list[Node], results: Sequence[int]) -> list[Node]:
    """`nodes` with what each donates, when the program gives `results`."""
    values, computations = program.values, program.computations
    family: dict[int, int] = {}

    def head(v: int) -> int:
        while v in family:
            v = family[v]
        return v

    def join(v: int, other: int) -> None:
        if head(v) != head(other):
            family[head(other)] = head(v)

    for node in nodes:
        if node.kind is NodeKind.TRANSFER:
            join(node.inputs[0], node.outputs[0])
        elif node.kind is NodeKind.SELECT:  # its result is the buffer of one of its inputs
            for v in node.inputs[1:]:
                join(v, node.outputs[0])
        elif node.kind is NodeKind.LOOP:  # so may each result of a loop be
            for v in (*node.inputs, *node.outputs):
                join(node.inputs[0], v)
    last_read: dict[int, int] = {}
    for number, node in enumerate(nodes):
        for v in node.inputs:
            last_read[head(v)] = number
        predicate = node.predicate
        while predicate >= 0:
            last_read[head(program.predicates[predicate].value)] = number
            predicate = program.predicates[predicate].parent
    kept = {head(v) for v in results}
    kept.update(head(v) for v, donated in zip(program.arguments, program.donated_arguments, strict=True) if not donated)
    wanted: list[tuple[bool, ...]] = []
    for number, node in enumerate(nodes):
        if node.kind is not NodeKind.CALL:
            wanted.append(())
            continue
        # A computation with callbacks donates nothing: a thread beside the enqueue thread launches it later, and its
        # inputs must still exist then.
        outputs = () if computations[node.computation].callbacks else node.outputs
        free = collections.Counter(values[v] for v in outputs)
        heads = [head(v) for v in node.inputs]
        uses = collections.Counter(heads)
        chosen = []
        for v, buffer in zip(node.inputs, heads, strict=True):
            dies = buffer not in kept and last_read[buffer] == number
            chosen.append(dies and uses[buffer] == 1 and free[values[v]] > 0)
            if chosen[-1]:
                free[values[v]] -= 1
        wanted.append(tuple(chosen))
    donates = agree(nodes, wanted, computations)
    return [
        node if node.donates == given or node.kind is not NodeKind.CALL else dataclasses.replace(node, donates=given)
        for node, given in zip(nodes, donates, strict=True)
    ]


def agree(
    nodes: Sequence[Node], wanted: Sequence[tuple[bool, ...]], computations: Sequence[Computation]
) -> list[tuple[bool, ...]]:
    """What each node donates, so that call sites of one module donate the same inputs, and it compiles once.

    A site that would lose `WORTH_A_COMPILE_BYTES` of donations keeps its own.
    """
    numbers: dict[Any, int] = {}
    module = [numbers.setdefault((each.fingerprint, each.inputs, each.outputs), len(numbers)) for each in computations]
    common: dict[int, tuple[bool, ...]] = {}
    for node, donates in zip(nodes, wanted, strict=True):
        if node.kind is NodeKind.CALL:
            before = common.setdefault(module[node.computation], donates)
            if before != donates:
                both = tuple(a and b for a, b in zip(before, donates, strict=True))
                common[module[node.computation]] = both
    out = []
    for node, donates in zip(nodes, wanted, strict=True):
        agreed = common[module[node.computation]] if node.kind is NodeKind.CALL else donates
        if agreed != donates:
            inputs = zip(computations[node.computation].inputs, donates, agreed, strict=True)
            if sum(type.nbytes for type, mine, all_ in inputs if mine and not all_) >= WORTH_A_COMPILE_BYTES:
                agreed = donates
        out.append(agreed)
    return out
