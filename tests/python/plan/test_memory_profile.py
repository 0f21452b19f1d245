"""What a bound program takes where, against another way to find it: by the lifetime of each buffer, device by device.

Map: MEM-1 sizes (`test_sizes`, `test_what_lands`); MEM-2 peaks (`test_a_chain`, `test_donation`, `test_any_program`,
`test_a_traced_pipeline`, `test_a_pipeline_within_one_host`), results (`test_results`); MEM-3 names
(`test_the_biggest_buffers_are_named`). And the work: `test_the_work_is_linear_in_the_nodes`,
`test_a_host_walks_through_its_own_nodes`. No devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, MeshSpec, Node, NodeKind
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import Argument, trace
from pathways.plan.binding import BoundProgram, Launch, host_plan
from pathways.plan.device_walk import Walk
from pathways.plan.memory_profile import Profile, ProgramMemory, check_budget

BLOCK = 128  # what a receive takes beside its bytes, at most
X, WHOLE = (("x",),), ((),)


def program(
    meshes: Sequence[int],
    values: Sequence[ArrayType],
    nodes: Sequence[tuple[Any, ...]],
    arguments: Sequence[int],
    results: Sequence[int],
    donated: Sequence[int] = (),
) -> LogicalProgram:
    """Nodes are (inputs, outputs, donated inputs) of a call on its output's mesh, or (source, target) of a transfer."""
    computations, made = [], []
    for number, node in enumerate(nodes):
        if len(node) == 2:
            made.append(Node(NodeKind.TRANSFER, "transfer", -1, (node[0],), (node[1],)))
            continue
        inputs, outputs, gives = node
        ins, outs = (tuple(values[v] for v in each) for each in (inputs, outputs))
        mesh = outs[0].mesh
        computations.append(
            Computation(f"f{number}", b"%d" % number, mesh, ins, outs, tuple(each in outs for each in ins))
        )
        donates = tuple(v in gives for v in inputs)
        made.append(
            Node(
                NodeKind.CALL, f"f{number}", len(computations) - 1, tuple(inputs), tuple(outputs), "f", donates=donates
            )
        )
    return LogicalProgram(
        "p",
        tuple(MeshSpec(f"m{n}", (("x", size),)) for n, size in enumerate(meshes)),
        tuple(values),
        tuple(computations),
        tuple(made),
        tuple(arguments),
        tuple(results),
        tuple(v in donated for v in arguments),
    )


def array(mesh: int, spec: Any = X, size: int = 1024) -> ArrayType:
    return ArrayType((size,), np.dtype(np.uint8), mesh, spec)


def memory(bound: BoundProgram, host: int, temporaries: dict[int, int] | None = None, cpu: bool = True) -> Any:
    """`Profile.memory`; temporaries by computation."""
    plan = host_plan(bound, host, cpu)
    sizes = [(temporaries or {}).get(launch.computation, 0) for launch in plan.launches]
    return Profile(bound, host, cpu).memory(plan, sizes)


# --------------------------------------------------------------------------------------------------- the other way


class Lifetimes:
    """The same of one host: each buffer has a birth and a death, and each device is looked at alone at every moment."""

    def __init__(self, bound: BoundProgram, host: int, temporaries: dict[int, int], cpu: bool) -> None:
        self.bound, self.host, self.temporaries, self.cpu = bound, host, temporaries, cpu
        self.program = bound.program
        self.end = len(bound.program.nodes)

    def local(self, mesh: int) -> set[int]:
        return {device for device in self.bound.bindings[mesh] if device // self.bound.devices_per_host == self.host}

    def share(self, value: int) -> int:
        kind = self.program.values[value]
        axes = dict(self.program.meshes[kind.mesh].axes)
        return kind.nbytes // math.prod(axes[axis] for cut in kind.spec for axis in cut)

    def regions(self, value: int) -> dict[int, Any]:
        """By device of all hosts, its part of the value."""
        at = self.bound.placed(value)
        return {device: at.region(cell) for device, cell in zip(at.devices, at.cells, strict=True)}

    def lands(self, source: int, target: int) -> int:
        """Bytes of this host's memory for transfers that a transfer takes."""
        mine = self.local(self.program.values[target].mesh)
        here, there = self.regions(source), self.regions(target)
        between = {device // self.bound.devices_per_host for device in (*here, *there)} != {self.host}
        known = {region for device, region in here.items() if device // self.bound.devices_per_host == self.host}
        assembled = self.cpu and any(there[device] not in known for device in mine)
        if not mine or not (between or assembled):
            return 0
        return len({there[device] for device in mine}) * (-(-self.share(target) // 64) * 64 + BLOCK)

    def last(self, value: int) -> int:
        readers = [number for number, node in enumerate(self.program.nodes) if value in node.inputs]
        return self.end if value in self.program.results else max(readers, default=-1)

    def lives(self) -> list[tuple[int, int, int, str]]:
        """(value, birth, death, kind) of everything that a run makes; at its death it is still there."""
        out = []
        for number, node in enumerate(self.program.nodes):
            for value in node.outputs:
                kind = "made"
                if node.kind is NodeKind.TRANSFER:
                    kind = "landed" if self.lands(node.inputs[0], value) else "eager"
                    # In the order of the slice's devices, too: an array knows them in that order.
                    same = list(self.regions(node.inputs[0]).items()) == list(self.regions(value).items())
                    kind = "nothing" if kind == "eager" and same else kind
                out.append((value, number, max(number, self.last(value)), kind))
        return out

    def windowed(self, device: int, life: tuple[int, int, int, str]) -> tuple[int, int, int, str]:
        """A transferred value that a call of the device reads, and that cannot exist before another call of the device
        is launched, lives from that call on, as what the device makes itself."""
        value, _, death, kind = life
        if kind not in ("eager", "landed") or (kind == "landed" and self.cpu):
            return life
        nodes = self.program.nodes
        if not any(value in node.inputs for node in nodes if self.runs_on(node, device, alone=False)):
            return life
        calls = [n for n, node in enumerate(nodes) if self.runs_on(node, device)]
        for before, call in zip([-1, *calls], [*calls, self.end], strict=True):
            if value in self.exist_when_stopped(device, call):
                return life if before == -1 else (value, before, death, "made")
        raise AssertionError("a call reads what comes after it")

    def runs_on(self, node: Node, device: int, alone: bool = True) -> bool:
        """Whether a call runs on the device; `alone`: and all of it on the device's host."""
        if node.kind is not NodeKind.CALL:
            return False
        mesh = self.program.computations[node.computation].mesh
        return device in self.bound.bindings[mesh] and not (alone and len(self.bound.hosts_of_mesh(mesh)) > 1)

    def exist_when_stopped(self, device: int, at: int) -> set[int]:
        """What exists when a device does not launch its calls from node `at` on, and everything else goes as far as it
        can: each device of the cluster launches its calls in their order. But the parts of a call of several hosts are
        launched at different times: such a call runs as soon as its inputs exist, which is before any of them."""
        fifos = {
            each: [n for n, node in enumerate(self.program.nodes) if self.runs_on(node, each)]
            for mesh in self.bound.bindings
            for each in mesh
        }
        there, waiting = set(self.program.arguments), set(range(self.end))
        while True:
            ready = {
                n
                for n in waiting
                if there.issuperset((node := self.program.nodes[n]).inputs)
                and all(fifo[0] == n for each, fifo in fifos.items() if self.runs_on(node, each))
                and not (self.runs_on(node, device) and n >= at)
            }
            if not ready:
                return there
            waiting -= ready
            for n in ready:
                there.update(self.program.nodes[n].outputs)
                for each, fifo in fifos.items():
                    if self.runs_on(self.program.nodes[n], each):
                        fifo.pop(0)

    def device(self, device: int) -> tuple[int, int]:
        def size(value: int) -> int:
            return self.share(value) * (device in self.local(self.program.values[value].mesh))

        lives, given = [self.windowed(device, life) for life in self.lives()], self.bound.donations
        eager = sum(
            size(value) for value, _, _, kind in lives if kind == "eager" or (kind == "landed" and not self.cpu)
        )
        arguments = [
            v for v, gives in zip(self.program.arguments, self.program.donated_arguments, strict=True) if gives
        ]
        most = 0
        for now, node in enumerate(self.program.nodes):
            there = sum(size(v) for v, birth, death, kind in lives if kind == "made" and birth <= now <= death)
            there -= sum(size(v) for v in arguments if 0 <= self.last(v) < now)
            if node.kind is NodeKind.CALL:
                if device in self.local(self.program.computations[node.computation].mesh):
                    there += self.temporaries.get(node.computation, 0)
                mortal = {v for v, _, _, kind in lives if kind == "made"} | set(arguments)
                there -= sum(
                    size(v)
                    for v, gives in zip(node.inputs, given[now], strict=True)
                    if gives and v in mortal and self.last(v) == now
                )
            most = max(most, there)
        return most, eager

    def receive(self) -> int:
        most = 0
        sizes = {
            node.outputs[0]: self.lands(node.inputs[0], node.outputs[0])
            for node in self.program.nodes
            if node.kind is NodeKind.TRANSFER
        }
        for now in range(self.end):
            most = max(
                most,
                sum(
                    sizes[value]
                    for value, birth, death, kind in self.lives()
                    if kind == "landed" and birth <= now <= (death if self.cpu else birth)
                ),
            )
        return most


def assert_alike(bound: BoundProgram, temporaries: dict[int, int], cpu: bool = True) -> list[ProgramMemory]:
    parts = []
    for host in bound.hosts():
        other = Lifetimes(bound, host, temporaries, cpu)
        part = memory(bound, host, temporaries, cpu)
        parts.append(part)
        for need in part.devices:
            assert (need.peak, need.eager) == other.device(need.device), (host, need)
        assert part.receive_peak == other.receive()
        assert {need.device for need in part.devices} == set().union(
            *(other.local(mesh) for mesh in range(len(bound.bindings)))
        )
    whole, *others = [(part.results, part.donated, part.arguments, part.biggest) for part in parts]
    assert len(whole[0]) == len(bound.program.results) and whole[2] == tuple(
        bound.program.values[v].mesh for v in bound.program.arguments
    )
    assert set(others) <= {((), (), (), "")}, "only the first host tells what is of the whole program"
    return parts


# ------------------------------------------------------------------------------------------------------------ by hand


def test_sizes() -> None:
    """MEM-1: a part on each device, all of it where it is not cut; what moves nothing takes nothing."""
    values = [array(0), array(0, WHOLE), array(1), array(2)]
    bound = BoundProgram(
        program([2, 2, 2], values, [([0], [1], []), (0, 2), (0, 3)], [0], [1, 2, 3]), ((0, 1), (0, 1), (2, 3)), 2
    )
    here, there = Profile(bound, 0, True), Profile(bound, 1, True)
    assert [here.device_bytes(v) for v in range(3)] == [512, 1024, 0]
    assert there.device_bytes(3) == 0 and Profile(bound, 1, False).device_bytes(3) == 512


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_chain(length: int) -> None:
    """MEM-2: an output beside its input, whatever the length; a temporary on top; nothing for the argument."""
    nodes: list[Any] = [([n], [n + 1], []) for n in range(length)]
    bound = BoundProgram(program([2], [array(0)] * (length + 1), nodes, [0], [length]), ((0, 1),), 2)
    beside = 512 if length == 1 else 1024
    assert [(need.peak, need.eager) for need in memory(bound, 0).devices] == [(beside, 0)] * 2
    last = {length - 1: 100}
    assert {need.peak for need in assert_alike(bound, last)[0].devices} == {beside + 100}


def test_the_work_is_linear_in_the_nodes() -> None:
    """Sixteen times as many calls and results take about sixteen times as long, and not 256 times."""

    def seconds(length: int) -> float:
        # Each call reads what the one before has made: a value that is a result, and ten that die.
        made = [list(range(11 * n + 1, 11 * n + 12)) for n in range(length)]
        nodes = [(made[n - 1] if n else [0], made[n], []) for n in range(length)]
        values, results = [array(0)] * (11 * length + 1), [each[0] for each in made]
        bound = BoundProgram(program([2], values, nodes, [0], results), ((0, 1),), 2)
        plan = host_plan(bound, 0)
        began = time.thread_time()
        Profile(bound, 0, True).memory(plan, [0] * len(plan.launches))
        return time.thread_time() - began

    few, many = (min(seconds(length) for _ in range(4)) for length in (200, 3200))
    assert many < 40 * few


def test_a_host_walks_through_its_own_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not through the calls of other hosts."""
    steps: list[int] = []
    monkeypatch.setattr(Walk, "_step", lambda _, number, live: steps.append(number) or (live, live))
    nodes: list[Any] = [([0], [1], []), (1, 2), *(([n], [n + 1], []) for n in range(2, 9)), (9, 10), ([10], [11], [])]
    values = [array(int(2 <= n <= 9)) for n in range(12)]
    bound = BoundProgram(program([2, 2], values, nodes, [0], [11]), ((0, 1), (2, 3)), 2)
    memory(bound, 0)
    assert steps == [0, 1, 9, 10]


def test_donation() -> None:
    """A state that is given away and comes back anew needs nothing; one that is kept needs its size again."""
    for gives in (True, False):
        donated = [0] if gives else []
        bound = BoundProgram(program([2], [array(0)] * 2, [([0], [1], donated)], [0], [1], donated), ((0, 1),), 2)
        (part,) = assert_alike(bound, {})
        assert [need.peak for need in part.devices] == [0 if gives else 512] * 2
        assert part.donated == ((0,) if gives else ())


def test_what_lands() -> None:
    """Between hosts, and where a host puts an array together itself: by block, with its header, as long as it lives."""
    values = [array(0), array(1, WHOLE), array(1, WHOLE), array(0, WHOLE), array(0, WHOLE)]
    nodes = [(0, 1), ([1], [2], []), (0, 3), ([3], [4], [])]
    bound = BoundProgram(program([2, 2], values, nodes, [0], [2, 4]), ((0, 1), (2, 3)), 2)
    first, second = assert_alike(bound, {})
    assert (first.receive_peak, second.receive_peak) == (1024 + BLOCK, 1024 + BLOCK)
    assert [need.eager for need in first.devices] == [0, 0]
    first, second = assert_alike(bound, {}, cpu=False)
    assert (first.receive_peak, second.receive_peak) == (0, 1024 + BLOCK)
    assert [need.eager for need in first.devices] == [1024, 1024]


def test_results() -> None:
    """What each result keeps: a new buffer, one where it landed, the argument's, or the one before."""
    values = [array(0), array(0), array(1), array(0)]
    bound = BoundProgram(
        program([2, 2], values, [([0], [1], []), (1, 2), ([1], [3], [])], [0], [0, 1, 2, 1]), ((0, 1), (2, 3)), 2
    )
    given, made, landed, again = assert_alike(bound, {})[0].results
    assert given.argument == 0 and (made.bytes, made.on_host, made.argument) == (512, False, -1)
    assert landed.on_host and landed.bytes == 2 * (512 + BLOCK) and again.same_as == 1


def test_the_biggest_buffers_are_named() -> None:
    """MEM-3."""
    values = [array(0), array(0, size=4096), array(0, WHOLE, size=8192), array(0, size=64)]
    bound = BoundProgram(program([2], values, [([0], [1], []), ([1], [2], []), ([2], [3], [])], [0], [3]), ((0, 1),), 2)
    words = memory(bound, 0).biggest.split(", ")
    assert [word.split(" ")[0] for word in words] == ["uint8[8192]", "uint8[4096]", "uint8[1024]"]
    assert "made by 'f" in words[0] and "8192 bytes on each device" in words[0] and "an argument" in words[2]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_a_budget_is_a_positive_number_of_bytes(value: Any) -> None:
    with pytest.raises(ValueError, match="device_memory must be a positive number of bytes"):
        check_budget("device_memory", value)


# ------------------------------------------------------------------------------------------------------------ at random


@st.composite
def bounds(draw: Any) -> tuple[BoundProgram, dict[int, int], bool]:
    """Programs over up to three slices of two hosts of two devices, that share devices or not."""
    each = 2
    choices = [(0, 1), (2, 3), (0, 2), (1, 0), (0,), (3,), (0, 1, 2, 3), (1, 3)]
    bindings = draw(st.lists(st.sampled_from(choices), min_size=1, max_size=3))
    kinds = st.builds(
        array,
        st.integers(0, len(bindings) - 1),
        st.sampled_from([X, WHOLE]),
        st.sampled_from([64, 256, 260, 1024]),
    )
    values = draw(st.lists(kinds, min_size=1, max_size=3))
    arguments = list(range(len(values)))
    nodes: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(0, 10))):
        source = draw(st.integers(0, len(values) - 1))
        kind = values[source]
        if draw(st.booleans()):
            values.append(
                array(draw(st.integers(0, len(bindings) - 1)), draw(st.sampled_from([X, WHOLE])), kind.shape[0])
            )
            nodes.append((source, len(values) - 1))
            continue
        beside = [v for v in range(len(values)) if values[v].mesh == kind.mesh]
        inputs = [source, *draw(st.lists(st.sampled_from(beside), max_size=2))]
        outputs = []
        for _ in range(draw(st.integers(1, 2))):
            values.append(draw(st.sampled_from([kind, array(kind.mesh, WHOLE, 512)])))
            outputs.append(len(values) - 1)
        nodes.append((inputs, outputs, draw(st.lists(st.sampled_from(inputs), max_size=2))))
    results = draw(st.lists(st.integers(0, len(values) - 1), max_size=3))
    donated = [v for v in arguments if draw(st.booleans())]
    later = [
        {v for node in nodes[n + 1 :] for v in (node[0] if len(node) == 3 else [node[0]])} for n in range(len(nodes))
    ]
    nodes = [  # MEM-4: only to the last reader, never what is kept
        node
        if len(node) == 2
        else (
            node[0],
            node[1],
            [v for v in node[2] if v not in later[n] and v not in results and (v not in arguments or v in donated)],
        )
        for n, node in enumerate(nodes)
    ]
    made = program([len(b) for b in bindings], values, nodes, arguments, results, donated)
    temporaries = {n: draw(st.integers(0, 3)) * 100 for n in range(len(made.computations))}
    return BoundProgram(made, tuple(bindings), each), temporaries, draw(st.booleans())


@settings(max_examples=150)
@given(made=bounds())
def test_any_program(made: tuple[BoundProgram, dict[int, int], bool]) -> None:
    assert_alike(*made)


def test_a_traced_pipeline() -> None:
    """The compiler's order of a pipeline frees each microbatch before the next: the peak does not grow with them."""
    left, right = MeshSpec("left", (("x", 2),)), MeshSpec("right", (("x", 2),))
    first = placed(lambda x: x * 2, left, in_shardings=P("x"), out_shardings=P("x"), name="first")
    second = placed(lambda x: x + 1, right, in_shardings=P("x"), out_shardings=P("x"), name="second")
    total = placed(lambda t, x: t + x, left, in_shardings=P("x"), out_shardings=P("x"), name="total")

    def pipeline(microbatches: int, remember: bool) -> BoundProgram:
        def run(x: Any) -> Any:
            kept, out = [], x
            for _ in range(microbatches):
                kept.append(second(first(out if remember else x)))
                out = total(out, kept[-1])
            return (out, kept) if remember else out

        traced = trace(run, [Argument((4096,), np.float32, False, left, (("x",),))])
        return BoundProgram(compile_traced(traced), ((0, 1), (2, 3)), 2)

    peaks, growing = [], []
    for microbatches in (4, 32):
        for remember, out in ((False, peaks), (True, growing)):
            parts = assert_alike(pipeline(microbatches, remember), {0: 64})
            out.append([*(need.peak for part in parts for need in part.devices), *(p.receive_peak for p in parts)])
    assert peaks[0] == peaks[1] and max(peaks[0]) <= 4 * 8192
    assert growing[1][2] > 4 * growing[0][2], growing  # what is kept on the right grows


def test_a_pipeline_within_one_host() -> None:
    """1F1B of two stages on two devices of a host: what is sent ahead depends on the stages, not on the microbatches.

    Stage 0 launches its forward step i + 2 after its backward step i, which needs a value of stage 1. Only the FIFO of
    stage 0 says so: forward steps do not read what backward steps make.
    """

    def needs(microbatches: int) -> list[tuple[int, int]]:
        values, nodes = [array(0) for _ in range(microbatches)], []

        def add(mesh: int) -> int:
            values.append(array(mesh))
            return len(values) - 1

        def backward(i: int) -> None:
            nodes.append(([sent[i]], [gradient := add(1)], []))
            nodes.append((gradient, back := add(0)))
            nodes.append(([back, i], [add(0)], []))

        sent = []
        for i in range(microbatches):
            nodes.append(([i], [forward := add(0)], []))
            sent.append(add(1))
            nodes.append((forward, sent[i]))
            if i >= 1:
                backward(i - 1)
        backward(microbatches - 1)
        bound = BoundProgram(program([1, 1], values, nodes, range(microbatches), []), ((0,), (1,)), 2)
        assert_alike(bound, {}, cpu=False)
        return [(need.peak, need.eager) for need in memory(bound, 0, cpu=False).devices]

    assert needs(8) == needs(16)
    assert max(eager for _, eager in needs(16)) <= 2 * 1024


def test_a_launch_has_its_own_temporaries() -> None:
    """A temporary counts at its own call only."""
    nodes = [([0], [1], [0]), ([1], [2], []), ([1], [3], [])]
    made = program([2], [array(0)] * 4, nodes, [0], [2, 3], [0])
    bound = BoundProgram(made, ((0, 1),), 2)
    plan = host_plan(bound, 0)
    assert plan.launches == (Launch(0, (True,)), Launch(1, (False,)), Launch(2, (False,)))
    # The first takes its argument over, which is counted elsewhere; then the argument is gone, and two results come.
    for first, peak in ((1000, 512 + 512 + 20), (1100, 1100)):
        assert Profile(bound, 0, True).memory(plan, [first, 10, 20]).devices[0].peak == peak
