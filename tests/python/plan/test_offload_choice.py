"""What a run offloads between two uses, on random programs: values stay right, and each device holds what it may.

Map: MEM-2 `test_any_program`, `test_a_chain_...`, `test_a_donated_argument_...`, `test_beside_a_loop_...`; TRUST-1
`test_a_damaged_move_...`. No devices.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways import errors
from pathways.api.pipelines.auto_schedule import needed_bytes
from pathways.compiler import donation
from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, Loop, Memory, MeshSpec, Node, NodeKind
from pathways.plan.binding import BoundProgram
from pathways.plan.offloads import Curves
from pathways.protocol.serialization import dump_program, load_program

X = (("x",),)


def array(mesh: int, size: int) -> ArrayType:
    return ArrayType((size,), np.dtype(np.uint8), mesh, X)


def chain(depth: int, size: int = 64) -> LogicalProgram:
    """A forward chain, and a backward chain that reads each value of the forward chain again. One device."""
    values = [array(0, size)] * (2 * depth + 1)
    nodes = [((n,), n + 1) for n in range(depth)]
    nodes += [((depth + n, depth - 1 - n), depth + 1 + n) for n in range(depth)]
    return program([1], values, nodes, [0], [2 * depth])


def program(
    meshes: list[int],
    values: list[ArrayType],
    nodes: list[tuple[tuple[int, ...], int]],
    arguments: list[int],
    results: list[int],
    donated: tuple[int, ...] = (),
) -> LogicalProgram:
    """Nodes are (inputs, output) of a call on the output's slice. An input of another slice is transferred first."""
    values, computations, made = [*values], [], []
    for inputs, output in nodes:
        read = []
        for v in inputs:
            if values[v].mesh != values[output].mesh:
                values.append(dataclasses.replace(values[v], mesh=values[output].mesh))
                made.append(Node(NodeKind.TRANSFER, f"transfer.{len(made)}", -1, (v,), (len(values) - 1,)))
                v = len(values) - 1
            read.append(v)
        ins = tuple(values[v] for v in read)
        number = len(computations)
        computations.append(
            Computation(f"f{number}", b"%d" % number, values[output].mesh, ins, (values[output],), (True,) * len(ins))
        )
        made.append(Node(NodeKind.CALL, f"f.{len(made)}", number, tuple(read), (output,), "f"))
    return donation.decide(
        LogicalProgram(
            "p",
            tuple(MeshSpec(f"m{n}", (("x", size),)) for n, size in enumerate(meshes)),
            tuple(values),
            tuple(computations),
            tuple(made),
            tuple(arguments),
            tuple(results),
            tuple(v in donated for v in arguments),
        )
    )


def lowered(bound: BoundProgram, room: int, ahead: int = 1) -> LogicalProgram | None:
    curves = Curves(bound, lambda _: 0, True, ahead)
    return curves.program() if curves.lower(dict.fromkeys(curves.devices, room)) else None


def meaning(of: LogicalProgram) -> list[str]:
    """What each result is, as a formula of the arguments; moves and transfers change nothing."""
    known: dict[int, str] = {v: f"a{n}" for n, v in enumerate(of.arguments)}
    for node in of.nodes:
        inputs = [known[v] for v in node.inputs]  # a value that is not there yet fails here
        called = of.computations[node.computation] if node.kind is NodeKind.CALL else None
        for v in node.outputs:
            assert v not in known
            known[v] = inputs[0] if called is None or called.is_move else f"{called.name}({','.join(inputs)})"
        if called is not None:
            assert tuple(of.values[v] for v in node.inputs) == called.inputs
            assert tuple(of.values[v] for v in node.outputs) == called.outputs
    return [known[v] for v in of.results]


def moves(of: LogicalProgram) -> list[str]:
    return [node.name.partition(".")[0] for node in of.nodes if of.computations[node.computation].is_move]


def test_a_chain_keeps_a_quarter_and_the_rest_leaves_the_device() -> None:
    before = chain(32)
    bound = BoundProgram(before, ((0,),), 1)
    need = needed_bytes(bound, {}, True)[0]
    assert need >= 32 * 64
    after = lowered(bound, need // 4)
    assert after is not None
    assert meaning(after) == meaning(before)
    assert needed_bytes(dataclasses.replace(bound, program=after), {}, True)[0] <= need // 4
    assert 20 <= moves(after).count("offload") == moves(after).count("restore") <= 31
    # The oldest values are read last, so they leave first; the newest stay.
    first = next(node for node in after.nodes if node.name.startswith("offload"))
    assert first.inputs == (1,)
    assert lowered(bound, need) == before and lowered(bound, 64) is None
    # A value is there a call before it is used; without that there is room for less.
    place = {node.name: n for n, node in enumerate(after.nodes)}
    for node in after.nodes:
        if node.name.startswith("restore"):
            reader = next(n for n, each in enumerate(after.nodes) if node.outputs[0] in each.inputs)
            between = [each for each in after.nodes[place[node.name] : reader] if each.origin == "f"]
            assert len(between) >= 1
    smallest = min(room for room in range(64, need, 64) if lowered(bound, room, ahead=0) is not None)
    assert smallest < min(room for room in range(64, need, 64) if lowered(bound, room, ahead=2) is not None)


def test_beside_a_loop_there_is_room_for_all_results() -> None:
    """A program with loops is admitted as a whole, so a result counts before it is made, and cannot leave."""
    straight = program([1], [array(0, 64)] * 3 + [array(0, 640)], [((0,), 1), ((1,), 2), ((2,), 3)], [0], [3])
    sizes = [array(0, 64), array(0, 512), array(0, 64)]
    body = program([1], sizes, [((0,), 1), ((1,), 2)], [0], [2], donated=(0,))
    first, second, last = straight.nodes
    loop = dataclasses.replace(second, kind=NodeKind.LOOP, computation=0)
    looped = dataclasses.replace(straight, nodes=(first, loop, last), loops=(Loop(body, 0, 20),))
    for each, most in ((straight, 64 + 64 + 640), (looped, 64 + 64 + 640 + 512)):
        curves = Curves(BoundProgram(each, ((0,),), 1), lambda _: 0, True)
        assert curves.needs() == {0: most}
    assert lowered(BoundProgram(looped, ((0,),), 1), 640) is None


def test_a_donated_argument_leaves_until_it_is_read() -> None:
    """Moments of an optimizer, which a step reads at its end: only if the step may take them."""
    values = [array(0, 128 if 2 <= v <= 7 else 64) for v in range(10)]
    nodes = [((n,), n + 1) for n in range(1, 8)] + [((0, 8), 9)]
    for donated, can in (((0,), True), ((), False)):
        bound = BoundProgram(program([1], values, nodes, [0, 1], [9], donated), ((0,),), 1)
        after = lowered(bound, 256, ahead=0)
        assert (after is not None) == can
        if after is not None:
            assert after.nodes[0].name.startswith("offload") and after.nodes[0].inputs == (0,)
            assert meaning(after) == meaning(bound.program)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_program(seed: int) -> None:
    """Whatever is chosen, results mean the same, and no device holds more than it may."""
    chance = random.Random(seed)
    meshes = [1] * chance.randint(1, 3)
    count = chance.randint(2, 25)
    arguments = list(range(chance.randint(1, 3)))
    values = [array(chance.randrange(len(meshes)), 64 * chance.randint(0, 8)) for _ in range(len(arguments) + count)]
    nodes = [
        (tuple(chance.sample(range(n), min(n, chance.randint(1, 3)))), n) for n in range(len(arguments), len(values))
    ]
    results = chance.sample(range(len(values)), chance.randint(1, 2))
    donated = tuple(v for v in arguments if v not in results and chance.random() < 0.5)
    devices = tuple((chance.randrange(len(meshes)),) for _ in meshes)
    bound = BoundProgram(program(meshes, values, nodes, arguments, results, donated), devices, chance.choice((1, 3)))
    needs = Curves(bound, lambda _: 0, True).needs()
    exact = needed_bytes(bound, {}, True)
    assert all(needs[device] >= exact[device] for device in needs), (seed, needs, exact)
    room = max(1, int(max(needs.values()) * chance.uniform(0.3, 1.0)))
    after = lowered(bound, room, chance.randint(0, 2))
    if after is None:
        return
    assert meaning(after) == meaning(bound.program), seed
    moved = dataclasses.replace(bound, program=after)
    assert max(needed_bytes(moved, {}, True).values()) <= room, seed
    assert load_program(dump_program(after)).nodes == after.nodes


def test_a_damaged_move_is_refused() -> None:
    bound = BoundProgram(chain(16), ((0,),), 1)
    good = lowered(bound, 512)
    assert good is not None and load_program(dump_program(good)).values == good.values
    number = next(n for n, each in enumerate(good.computations) if each.is_move)
    (hosted,) = {each for each in good.values if each.memory is Memory.HOST}

    def refused(words: str, **changes: object) -> None:
        bad = dataclasses.replace(good, **changes)  # type: ignore[arg-type]
        with pytest.raises(errors.PlanError, match=words):
            load_program(dump_program(bad))

    def computed(**changes: object) -> tuple[Computation, ...]:
        bad = dataclasses.replace(good.computations[number], **changes)  # type: ignore[arg-type]
        return tuple(bad if n == number else each for n, each in enumerate(good.computations))

    refused("has a module", computations=computed(module=b"x"))
    refused("has a module", computations=computed(callbacks=(1,)))
    refused("its type changes", computations=computed(outputs=(dataclasses.replace(hosted, shape=(1 << 20,)),)))
    refused("its type changes", computations=computed(inputs=(hosted, hosted)))
    # A call that makes an array of a device would not count it there.
    refused("is no move", values=tuple(dataclasses.replace(each, memory=Memory.HOST) for each in good.values))
    refused("other types", values=tuple(dataclasses.replace(each, memory=Memory.DEVICE) for each in good.values))
