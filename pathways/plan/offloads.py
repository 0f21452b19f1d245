"""Offloads what a run keeps for later: a value leaves its devices for host memory between two of its uses.

A run that needs more memory than its devices have is mended so (MEM-2). Most of what it keeps are the values that a
forward step saves for its backward step. A *gap* of a value lies between two of its uses. An offload behind the first
use copies the value to host memory, and a restore brings it back ahead of the second use. Both are calls of
computations that are moves, so they have their places in the order of the devices like all other calls.

The gaps are chosen one by one: at the point where a device holds most, the gap that frees most for longest.

Pure.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pathways.compiler import donation
from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, Memory, Node, NodeKind
from pathways.plan.binding import BoundProgram
from pathways.plan.memory_profile import Profile

#: The temporary bytes of a computation on one device.
Temporary = Callable[[Computation], int]


def all_at_once(bound: BoundProgram) -> dict[int, int]:
    """By device, the bytes of all values of a program without loops: no less than what it holds at any time."""
    found: collections.Counter[int] = collections.Counter()
    firsts: dict[int, int] = {}  # by the id of a type: the first value of it
    counts: collections.Counter[int] = collections.Counter(map(id, bound.program.values))
    for value, type in enumerate(bound.program.values):
        firsts.setdefault(id(type), value)
    for key, value in firsts.items():
        placed = bound.placed(value)
        share = placed.type.nbytes // math.prod(placed.parts())
        found.update(dict.fromkeys(placed.devices, share * counts[key]))
    return dict(found)


class Curves:
    """What each device of a program holds at each of its nodes, and what can be offloaded to make it less.

    A device stands for all devices of its host that are in the same slices. What a device holds is counted with the
    arguments. It may be more than a run really takes where the program has loops, branches or transfers.
    """

    def __init__(self, bound: BoundProgram, temporary: Temporary, receives_on_host: bool, ahead: int = 1) -> None:
        """`ahead`: so many calls before it is used, a value is brought back."""
        self._bound = bound
        program = bound.program
        classes: dict[tuple[int, frozenset[int]], int] = {}  # by host and slices: a device
        for devices in bound.bindings:
            for device in devices:
                meshes = frozenset(mesh for mesh, others in enumerate(bound.bindings) if device in others)
                classes.setdefault((device // bound.devices_per_host, meshes), device)
        #: A device of each class.
        self.devices = tuple(classes.values())
        profiles = {host: Profile(bound, host, receives_on_host) for host, _ in classes}
        self._gaps = _gaps(bound, ahead)
        self._chosen = [False] * len(self._gaps)
        self._afters = np.array([gap.after for gap in self._gaps], np.int64)
        self._backs = np.array([gap.back for gap in self._gaps], np.int64)
        sizes, curves, ends = [], [], []
        for host, meshes in classes:
            size = [
                profiles[host].device_bytes(v) if type.mesh in meshes else 0 for v, type in enumerate(program.values)
            ]
            curve, early = _curve(bound, profiles[host], size, meshes, temporary, receives_on_host)
            curves.append(curve)
            ends.append(sum(size[v] for v in {*program.arguments, *program.results}))
            sizes.append([0 if gap.value in early else size[gap.value] for gap in self._gaps])
        self._curves = np.array(curves, np.int64).reshape(len(classes), -1)  # by class and node
        #: The bytes of the arguments and the results on each device.
        self.ends = dict(zip(self.devices, ends, strict=True))
        self._sizes = np.array(sizes, np.int64).reshape(len(classes), -1)  # by class and gap

    def needs(self) -> dict[int, int]:
        """The most bytes on each of `devices`."""
        return {device: int(curve.max(initial=0)) for device, curve in zip(self.devices, self._curves, strict=True)}

    def lower(self, room: Mapping[int, int]) -> bool:
        """Chooses gaps until each device of `devices` holds at most `room` of it. False: that is not possible."""
        limits = np.array([room[device] for device in self.devices], np.int64)
        free = np.array([not chosen for chosen in self._chosen], bool)
        while self._curves.size:
            excesses = self._curves.max(axis=1) - limits
            worst = int(excesses.argmax())
            excess = int(excesses[worst])
            if excess <= 0:
                return True
            at = int(self._curves[worst].argmax())
            is_there = free & (self._afters < at) & (self._backs > at) & (self._sizes[worst] > 0)
            if not is_there.any():
                return False
            gains = np.where(is_there, np.minimum(self._sizes[worst], excess) * (self._backs - self._afters), -1)
            best = int(gains.argmax())
            self._chosen[best], free[best] = True, False
            self._curves[:, self._afters[best] + 1 : self._backs[best]] -= self._sizes[:, best, None]
        return True

    def program(self) -> LogicalProgram:
        """The program with the moves that were chosen."""
        return _with_moves(
            self._bound.program, [gap for gap, chosen in zip(self._gaps, self._chosen, strict=True) if chosen]
        )


@dataclasses.dataclass(frozen=True)
class _Gap:
    """Between node `after`, where a value is made or used, and node `back`, before which it is to be there again."""

    value: int
    after: int
    back: int


def _gaps(bound: BoundProgram, ahead: int) -> list[_Gap]:
    """Those in which something is launched on the devices of the value, the last `ahead` calls left out.

    A value that a branch uses, or that shares its memory with another, has none.
    """
    program = bound.program
    barred = {predicate.value for predicate in program.predicates} | {program.decides}
    uses: dict[int, list[int]] = {
        v: [-1]
        for v, donated in zip(program.arguments, program.donated_arguments, strict=True)
        if donated and program.arguments.count(v) == 1
    }
    calls: dict[int, list[int]] = {mesh: [] for mesh in range(len(program.meshes))}  # on each mesh's devices
    sharing = [[n for n, other in enumerate(bound.bindings) if set(other) & set(each)] for each in bound.bindings]
    for number, node in enumerate(program.nodes):
        values = (*node.inputs, *node.outputs)
        if node.kind is NodeKind.SELECT or node.predicate >= 0:
            barred.update(values)
        elif node.kind is NodeKind.TRANSFER:
            source, target = node.inputs[0], node.outputs[0]
            if not set(bound.placed(source).devices).isdisjoint(bound.placed(target).devices):
                barred.update(values)
        for v in dict.fromkeys(values):
            if v in uses or v in node.outputs:
                uses.setdefault(v, []).append(number)
        if node.kind is NodeKind.CALL:
            launched = [program.computations[node.computation].mesh]
        else:
            launched = [program.values[v].mesh for v in values] if node.kind is NodeKind.LOOP else []
        for mesh in {other for each in launched for other in sharing[each]}:
            calls[mesh].append(number)
    for v in program.results:
        if v in uses:
            uses[v].append(len(program.nodes))
    found = []
    for v, numbers in uses.items():
        if v in barred:
            continue
        own = calls[program.values[v].mesh]
        for after, before in itertools.pairwise(numbers):
            end = bisect.bisect_left(own, before)
            if end - bisect.bisect_right(own, after) > ahead:
                found.append(_Gap(v, after, own[end - ahead] if ahead else before))
    return found


def _curve(
    bound: BoundProgram,
    profile: Profile,
    size: Sequence[int],
    meshes: frozenset[int],
    temporary: Temporary,
    receives_on_host: bool,
) -> tuple[list[int], set[int]]:
    """The bytes on a device of `meshes` while each node is run, and the values that may be there at any time.

    `size`: the bytes that a value takes there. A program with loops is admitted with room for its results from its
    start to its end.
    """
    program, donates = bound.program, bound.donations
    given = {v for v, donated in zip(program.arguments, program.donated_arguments, strict=True) if donated}
    made = {v for node in program.nodes for v in node.outputs}
    mortal = (made | given) - set(program.results)
    last_use = {v: number for number, node in enumerate(program.nodes) for v in node.inputs}
    arriving, early = profile.arrivals(meshes)
    if program.loops:
        early |= made.intersection(program.results)
        arriving = {number: [v for v in values if v not in early] for number, values in arriving.items()}
    mortal -= early
    arrived = early.union(*arriving.values())
    live = sum(size[v] for v in {*program.arguments, *early})
    curve = []
    for number, node in enumerate(program.nodes):
        dying = {v for v in node.inputs if last_use[v] == number} & mortal
        gained = sum(size[v] for v in {*node.outputs} - arrived) + sum(size[v] for v in arriving.get(number, ()))
        lost = sum(size[v] for v in dying)
        if node.kind is NodeKind.LOOP:
            loop = program.loops[node.computation]
            inner = _beside(bound, loop.body, meshes, temporary, receives_on_host)
            carried = node.inputs[loop.constants + (loop.count is None) :]
            kept = sum(size[v] for v in dict.fromkeys(carried) if v not in dying)  # beside the new carry
            curve.append(live + inner + kept)
        elif node.kind is NodeKind.CALL:
            called = program.computations[node.computation]
            taken = sum(size[v] for v, gives in zip(node.inputs, donates[number], strict=False) if gives and v in dying)
            curve.append(live + gained - taken + (temporary(called) if called.mesh in meshes else 0))
        else:
            curve.append(live + gained)
        unread = sum(size[v] for v in node.outputs if v not in last_use and v in mortal)
        live += gained - lost - unread
    return curve, early


def _beside(
    bound: BoundProgram, body: LogicalProgram, meshes: frozenset[int], temporary: Temporary, receives_on_host: bool
) -> int:
    """The most that an iteration takes on a device of `meshes` beside its constants and its carry."""
    names = {bound.program.meshes[mesh].name for mesh in meshes}
    devices = dict(zip((mesh.name for mesh in bound.program.meshes), bound.bindings, strict=True))
    inside = BoundProgram(
        body, tuple(devices[mesh.name] for mesh in body.meshes), bound.devices_per_host, bound.islands
    )
    own = frozenset(n for n, mesh in enumerate(body.meshes) if mesh.name in names)
    if not own:
        return 0
    host = next(iter(bound.bindings[next(iter(meshes))])) // bound.devices_per_host
    profile = Profile(inside, host, receives_on_host)
    size = [profile.device_bytes(v) if type.mesh in own else 0 for v, type in enumerate(body.values)]
    curve, _ = _curve(inside, profile, size, own, temporary, receives_on_host)
    return max(0, max(curve, default=0) - sum(size[v] for v in dict.fromkeys(body.arguments)))


def _with_moves(program: LogicalProgram, gaps: Sequence[_Gap]) -> LogicalProgram:
    """The program, whose values are in host memory in these gaps."""
    values, computations = list(program.values), list(program.computations)
    known: dict[tuple[ArrayType, Memory], int] = {}
    behind: dict[int, list[Node]] = {}  # by node: the offloads behind it
    ahead: dict[int, list[Node]] = {}  # by node: the restores before it
    names: dict[int, list[tuple[int, int]]] = {}  # of each value: from which node on it has another name, and this

    def move(name: str, value: int, to: Memory) -> Node:
        type = values[value]
        target = dataclasses.replace(type, memory=to)
        if (type, to) not in known:
            known[type, to] = len(computations)
            computations.append(Computation(name, b"", type.mesh, (type,), (target,), (False,)))
        values.append(target)
        return Node(
            NodeKind.CALL, f"{name}.{len(values)}", known[type, to], (value,), (len(values) - 1,), donates=(False,)
        )

    hosted: dict[int, int] = {}  # of each value: its copy in host memory
    for gap in sorted(gaps, key=lambda gap: gap.after):
        if gap.value not in hosted:
            node = move("offload", gap.value, Memory.HOST)
            behind.setdefault(gap.after, []).append(node)
            (hosted[gap.value],) = node.outputs
        node = move("restore", hosted[gap.value], Memory.DEVICE)
        ahead.setdefault(gap.back, []).append(node)
        names.setdefault(gap.value, []).append((gap.back, node.outputs[0]))

    def name_at(v: int, number: int) -> int:
        for since, name in reversed(names.get(v, ())):
            if number >= since:
                return name
        return v

    nodes: list[Node] = [*behind.get(-1, ())]
    for number, node in enumerate(program.nodes):
        nodes += ahead.get(number, ())
        nodes.append(dataclasses.replace(node, inputs=tuple(name_at(v, number) for v in node.inputs)))
        nodes += behind.get(number, ())
    nodes += ahead.get(len(program.nodes), ())
    results = tuple(name_at(v, len(program.nodes)) for v in program.results)
    moved = dataclasses.replace(
        program, values=tuple(values), computations=tuple(computations), nodes=tuple(nodes), results=results
    )
    return donation.decide(moved)
