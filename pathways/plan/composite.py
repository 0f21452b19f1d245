"""A bound program with loops as a composite: runs of plans, and loops around them (csrc/loops/composite.h).

The controller orders one run after the other. What runs give to each other lies in buffers without a future. A run
takes such a buffer (its plan donates the argument) when it is the last that reads it; so nothing is left behind.

The first iteration of a loop is a run of a plan of its own if the first carry may not be taken: the user keeps it,
something reads it later, or a transfer may still read it. So no carry is ever copied.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from pathways._native import StepKind
from pathways.compiler.control.segments import Run, Turns, segments
from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, Node, NodeKind
from pathways.plan.binding import BoundProgram, owners_of, pinned
from pathways.plan.guarding import guarded


@dataclasses.dataclass(frozen=True)
class Step:
    """One step. `number`: of a run, its plan among the composite's; of a loop, its count; of an end, 0; of a loop that
    is decided, the most iterations that it may have, or 0, as it is for one that runs ahead.
    """

    kind: StepKind
    number: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Composite:
    """A program with loops. Its values are numbered, the arguments first. `plans` are programs without loops, which are
    sent one by one.

    `parallel`: how many runs of one call may be ordered and not over.
    """

    arguments: int
    values: int
    donated: tuple[int, ...]
    results: tuple[int, ...]
    steps: tuple[Step, ...]
    parallel: int
    plans: tuple[LogicalProgram, ...] = ()


def composite_of(bound: BoundProgram) -> Composite:
    """The composite of a program with loops, and without branches around them."""
    return _Builder(bound).build()


def shared_values(bound: BoundProgram) -> frozenset[int]:
    """The values that no later launch may take over (MEM-4): see `pinned`. In a program with loops these are also what
    is pinned in a body, and what a loop may pass through.
    """
    if not bound.program.loops:
        return pinned(bound)
    return _Builder(bound).kept(bound.program)


class _Builder:
    def __init__(self, bound: BoundProgram) -> None:
        self._bound = bound
        self._devices = dict(zip((mesh.name for mesh in bound.program.meshes), bound.bindings, strict=True))
        self._kept: dict[int, frozenset[int]] = {}  # by identity of a program
        self._bodies: list[LogicalProgram] = []  # keeps them alive, for `_kept`
        self._parts: dict[int, LogicalProgram] = {}  # by step that is a run
        self._steps: list[Step] = []
        self._values = 0

    def build(self) -> Composite:
        program = self._bound.program
        numbers = dict(zip(program.arguments, self._new(len(program.arguments)), strict=True))
        donated = [n for n, given in enumerate(program.donated_arguments) if given]
        owned = {program.arguments[n] for n in donated}
        results = list(self._emit(program, numbers, owned, frozenset()))
        # The controller gives the client's handle to the run that makes a result. Any other result goes through one
        # more run, which computes nothing.
        passed = [n for n, v in enumerate(program.results) if not _is_made(program, program.results, v)]
        if passed:
            found = self._new(len(passed))
            read = list(dict.fromkeys(program.results[n] for n in passed))
            part = _passing(program, read, [read.index(program.results[n]) for n in passed])
            self._append(part, [numbers[v] for v in read], found)
            for n, number in zip(passed, found, strict=True):
                results[n] = number
        plans = {part: n for n, part in enumerate(dict.fromkeys(self._parts.values()))}
        for at, part in self._parts.items():
            self._steps[at] = dataclasses.replace(self._steps[at], number=plans[part])
        return Composite(
            len(program.arguments),
            self._values,
            tuple(donated),
            tuple(results),
            tuple(self._steps),
            program.parallel_iterations,
            tuple(plans),
        )

    def kept(self, program: LogicalProgram) -> frozenset[int]:
        """See `shared_values`."""
        if id(program) not in self._kept:
            out = set(pinned(self._bind(program)))
            # The result of a select is the buffer of one of its owners, under a second name.
            for value, owners in owners_of(program).items():
                out |= {value, *owners}
            for node in program.nodes:
                if node.kind is NodeKind.LOOP:
                    out |= self._kept_of_loop(program, node)
            self._kept[id(program)] = frozenset(out)
        return self._kept[id(program)]

    def _kept_of_loop(self, program: LogicalProgram, node: Node) -> set[int]:
        loop = program.loops[node.computation]
        decided = int(loop.count is None)
        inner = self.kept(loop.body)
        inputs, results = node.inputs[decided:], loop.body.results[decided:]
        out = {v for v, argument in zip(inputs, loop.body.arguments, strict=True) if argument in inner}
        out |= {v for v, result in zip(node.outputs, results, strict=True) if result in inner}
        if decided:  # what it gives may be what it was given, which others may still read
            others = {v for other in program.nodes if other is not node for v in other.inputs}
            out |= {*node.outputs, *(v for v in inputs if v in others or v in program.results)}
        own = loop.body.donated_arguments[loop.constants :]
        passed = [v for v, is_own in zip(node.outputs, own, strict=True) if not is_own]
        return out | {*passed, *node.inputs} if passed else out

    def _bind(self, program: LogicalProgram) -> BoundProgram:
        bindings = tuple(self._devices[mesh.name] for mesh in program.meshes)
        return BoundProgram(program, bindings, self._bound.devices_per_host, self._bound.islands)

    def _new(self, count: int) -> tuple[int, ...]:
        self._values += count
        return tuple(range(self._values - count, self._values))

    def _emit(
        self, program: LogicalProgram, numbers: dict[int, int], owned: Collection[int], kept: frozenset[int]
    ) -> tuple[int, ...]:
        """Appends the steps of a program. Returns the numbers of its results.

        `numbers`: those of its arguments. `owned`: the arguments that it may take. `kept`: those of them whose memory
        no launch of it may take over.
        """
        chain = segments(program)
        kept |= self.kept(program)
        last = {v: n for n, segment in enumerate(chain) for v in segment.inputs} | dict.fromkeys(program.results, -1)
        mine = set(owned)
        for n, segment in enumerate(chain):
            mine |= _own_outputs(segment, mine)
            taken = {v for v in segment.inputs if v in mine and last[v] == n and segment.inputs.count(v) == 1}
            if isinstance(segment, Run):
                self._run(segment, numbers, taken, kept)
            else:
                used = [v in last for v in segment.outputs]
                if segment.loop.count is not None:
                    segment = _live(segment, used)
                self._loop(program, segment, used, numbers, taken, kept)
        return tuple(numbers[v] for v in program.results)

    def _guarded(
        self,
        ahead: LogicalProgram,
        body: LogicalProgram,
        numbers: dict[int, int],
        owned: Collection[int],
        kept: frozenset[int],
    ) -> tuple[int, ...]:
        """As `_emit`, of a guarded body. What it hands on keeps its one buffer, so `kept` is as without the guard."""
        (run,) = segments(ahead)
        assert isinstance(run, Run)
        taken = {v for v in run.inputs if v in owned and v not in ahead.results}
        self._run(run, numbers, taken, kept | self.kept(body))
        last = len(self._steps) - 1
        part = self._parts[last]
        self._parts[last] = dataclasses.replace(part, decides=part.predicates[0].value)
        return tuple(numbers[v] for v in ahead.results)

    def _run(self, run: Run, numbers: dict[int, int], taken: set[int], kept: frozenset[int]) -> None:
        part = run.program
        barred = {a for v, a in zip(run.inputs, part.arguments, strict=True) if v not in taken or v in kept}
        nodes = tuple(
            dataclasses.replace(
                node, donates=tuple(d and v not in barred for v, d in zip(node.inputs, node.donates, strict=False))
            )
            for node in part.nodes
        )
        part = dataclasses.replace(part, nodes=nodes, donated_arguments=tuple(v in taken for v in run.inputs))
        outputs = self._new(len(run.outputs))
        self._append(part, [numbers[v] for v in run.inputs], outputs)
        numbers.update(zip(run.outputs, outputs, strict=True))

    def _append(self, part: LogicalProgram, inputs: Sequence[int], outputs: tuple[int, ...]) -> None:
        self._parts[len(self._steps)] = trimmed(part)
        self._steps.append(Step(StepKind.RUN, -1, tuple(inputs), outputs))

    def _decide(self, program: LogicalProgram, value: int, number: int) -> None:
        """Sees to it that the last step is a run that decides by a value of `program`, whose number is `number`."""
        last = len(self._steps) - 1
        part = self._parts.get(last)
        if part is None or part.decides >= 0 or number not in self._steps[last].outputs:
            self._append(_passing(program, [value], []), [number], ())
            last += 1
            part = self._parts[last]
            decides = part.arguments[0]
        else:
            decides = part.results[self._steps[last].outputs.index(number)]
        self._parts[last] = dataclasses.replace(part, decides=decides)

    def _begin(self, kind: StepKind, count: int, carry: Sequence[int]) -> tuple[int, ...]:
        """Returns the numbers by which the body reads the carry."""
        read = self._new(len(carry))
        self._steps.append(Step(kind, count, tuple(carry), read))
        return read

    def _end(self, carry: Sequence[int]) -> tuple[int, ...]:
        """Returns the numbers by which the carry is read behind the loop."""
        read = self._new(len(carry))
        self._steps.append(Step(StepKind.END, 0, tuple(carry), read))
        return read

    def _loop(
        self,
        program: LogicalProgram,
        turns: Turns,
        used: Sequence[bool],
        numbers: dict[int, int],
        taken: set[int],
        kept: frozenset[int],
    ) -> None:
        """Appends a loop of a program. `used`: which of its results are read."""
        loop, body = turns.loop, turns.loop.body
        assert turns.predicate < 0
        self._bodies.append(body)
        decided = int(loop.count is None)
        constants, carry = turns.inputs[decided : decided + loop.constants], turns.inputs[decided + loop.constants :]
        inner = self.kept(body)
        fixed = body.arguments[: loop.constants]
        carried = body.arguments[loop.constants :]
        # What an iteration makes, the next one may take; but not what may be another buffer under a second name.
        own = {a for a, is_own in zip(carried, body.donated_arguments[loop.constants :], strict=True) if is_own}
        late = frozenset(a for a, result in zip(carried, body.results[decided:], strict=True) if result in inner)
        given = dict(zip(fixed, (numbers[v] for v in constants), strict=True))
        first = {a for a, v in zip(carried, carry, strict=True) if v in taken}
        unsafe = {a for a, v in zip(carried, carry, strict=True) if v in kept}
        is_first_apart = not own <= first - unsafe
        ahead = guarded(program, turns.inputs[0], loop) if decided else None
        # What a guarded body hands on has a handle of its own, so the next run may take that. It overwrites only `own`.
        passed: set[int] = set()
        if ahead is not None:
            late |= frozenset(carried) - own
            passed = {a for a, result in zip(carried, ahead.results[1:], strict=True) if a != result}
            passed.add(ahead.arguments[0])
            first |= {ahead.arguments[0]} if turns.inputs[0] in taken else set()
            is_first_apart |= not passed <= first
            own |= passed

        def iteration(read: Sequence[int], may: set[int], barred: frozenset[int]) -> tuple[int, ...]:
            """The body; `read`: the carry, behind the scalar that decides, if one does. Returns the new ones."""
            if ahead is not None:
                carry_there = dict(zip((ahead.arguments[0], *carried), read, strict=True))
                return self._guarded(ahead, body, given | carry_there, may, barred)
            after = self._emit(body, given | dict(zip(carried, read[decided:], strict=True)), may, barred)
            if decided:
                self._decide(body, body.results[0], after[0])
            return after

        now: Sequence[int] = [numbers[v] for v in (*turns.inputs[:decided], *carry)]
        if not decided:
            assert loop.count is not None
            if is_first_apart:
                now = iteration(now, own & first, late | unsafe)
            if loop.count > is_first_apart:
                begun = len(self._steps)
                now = iteration(self._begin(StepKind.LOOP, loop.count - is_first_apart, now), own, late)
                if all(step.kind is not StepKind.RUN for step in self._steps[begun:]):  # the body hands on what it gets
                    self._append(_passing(body, body.results[:1], []), now[:1], ())
                now = self._end(now)
            numbers.update(zip(turns.outputs, now, strict=True))
            return
        if ahead is not None:
            if is_first_apart:
                now = iteration(now, own & first, late | unsafe)
            now = self._end(iteration(self._begin(StepKind.AHEAD, 0, now), own, late))
        else:
            self._decide(program, turns.inputs[0], now[0])
            if is_first_apart:  # the others are in a branch behind it
                now = iteration(self._begin(StepKind.DECIDED, 1, now), own & first, late | unsafe)
            now = self._end(iteration(self._begin(StepKind.DECIDED, 0, now), own, late))
            if is_first_apart:
                now = self._end(now)
        # Nobody knows beforehand which iteration is the last. And if the scalar has failed, so must what is behind.
        behind = [n for n, is_used in enumerate(used) if is_used]
        found = self._new(len(behind))
        if behind:
            mine = passed if ahead is not None else set() if is_first_apart else own
            takes = [carried[n] in mine for n in behind]
            part = _chosen(program, turns.inputs[0], [carry[n] for n in behind], takes)
            self._append(part, [now[0], *(now[1 + n] for n in behind)], found)
        numbers.update(zip((turns.outputs[n] for n in behind), found, strict=True))


def _passing(program: LogicalProgram, read: Sequence[int], results: Sequence[int]) -> LogicalProgram:
    """A program that computes nothing. It reads these values of another, and gives those at these places of `read`."""
    return dataclasses.replace(
        program,
        values=tuple(program.values[v] for v in read),
        nodes=(),
        arguments=tuple(range(len(read))),
        results=tuple(results),
        donated_arguments=(False,) * len(read),
        predicates=(),
        loops=(),
    )


def _chosen(program: LogicalProgram, scalar: int, values: Sequence[int], takes: Sequence[bool]) -> LogicalProgram:
    """A program that reads a scalar and some values, and gives the values. They fail if the scalar has failed."""
    part = _passing(program, [scalar, *values, *values], range(1 + len(values), 1 + 2 * len(values)))
    there = len(values)
    nodes = (
        Node(NodeKind.SELECT, "select.", -1, (0, n, n), (n + there,), "jax.lax.while_loop") for n in range(1, 1 + there)
    )
    return dataclasses.replace(
        part, nodes=tuple(nodes), arguments=part.arguments[: 1 + there], donated_arguments=(False, *takes)
    )


def _own_outputs(segment: Run | Turns, owned: Collection[int]) -> set[int]:
    """The outputs whose buffer may be taken. What a loop only hands on may be any of its inputs under a second name."""
    if isinstance(segment, Run) or segment.loop.count is None or set(segment.inputs) <= set(owned):
        return set(segment.outputs)
    body = segment.loop.body
    return {v for v, result in zip(segment.outputs, body.results, strict=True) if _is_made(body, body.results, result)}


def _is_made(program: LogicalProgram, values: Sequence[int], value: int) -> bool:
    """Whether one run makes the buffer of a value that is one of `values`, and only for this one of them."""
    if value in program.arguments or list(values).count(value) != 1:
        return False
    (node,) = [node for node in program.nodes if value in node.outputs]
    if node.kind is not NodeKind.LOOP:
        return True
    if program.loops[node.computation].count is None:
        return True  # by the run behind the loop
    body = program.loops[node.computation].body
    return _is_made(body, body.results, body.results[node.outputs.index(value)])


def _live(turns: Turns, used: Sequence[bool]) -> Turns:
    """The loop without what it carries for nobody, as a counter that the body does not read. `used`: of its results.

    The body keeps a run, because the controller refuses a loop without one.
    """
    loop, body = turns.loop, turns.loop.body
    carried, needed = body.arguments[loop.constants :], {n for n, is_used in enumerate(used) if is_used}
    while True:
        values = {body.results[n] for n in needed}
        nodes = []
        for node in reversed(body.nodes):
            if not values.isdisjoint(node.outputs):
                values.update(node.inputs)
                nodes.append(node)
        read = {n for n, a in enumerate(carried) if a in values}
        if read <= needed:
            break
        needed |= read
    if not needed or not nodes or len(needed) == len(carried) or body.predicates:
        return turns
    stays = sorted(needed)

    def of_carry(items: Sequence[Any]) -> tuple[Any, ...]:
        return (*items[: loop.constants], *(items[loop.constants + n] for n in stays))

    body = dataclasses.replace(
        body,
        nodes=tuple(nodes[::-1]),
        arguments=of_carry(body.arguments),
        donated_arguments=of_carry(body.donated_arguments),
        results=tuple(body.results[n] for n in stays),
    )
    return Turns(
        dataclasses.replace(loop, body=body),
        of_carry(turns.inputs),
        tuple(turns.outputs[n] for n in stays),
        turns.predicate,
    )


def trimmed(program: LogicalProgram) -> LogicalProgram:
    """A part of a program without the computations, exchanges, meshes and host functions of the other parts."""

    def used(kind: NodeKind) -> list[int]:
        return sorted({node.computation for node in program.nodes if node.kind is kind})

    tables = {kind: used(kind) for kind in (NodeKind.CALL, NodeKind.EXCHANGE)}
    number = {(kind, old): new for kind, table in tables.items() for new, old in enumerate(table)}
    called = [program.computations[n] for n in tables[NodeKind.CALL]]
    inhabited = sorted({value.mesh for value in program.values} | {each.mesh for each in called}) or [0]
    mesh = {old: new for new, old in enumerate(inhabited)}
    functions = {number for each in called for number in each.callbacks}

    def place(types: Sequence[ArrayType]) -> tuple[ArrayType, ...]:
        return tuple(dataclasses.replace(type, mesh=mesh[type.mesh]) for type in types)

    def placed(each: Computation) -> Computation:
        return dataclasses.replace(each, mesh=mesh[each.mesh], inputs=place(each.inputs), outputs=place(each.outputs))

    return dataclasses.replace(
        program,
        meshes=tuple(program.meshes[n] for n in inhabited),
        values=place(program.values),
        computations=tuple(placed(each) for each in called),
        nodes=tuple(
            dataclasses.replace(node, computation=number.get((node.kind, node.computation), -1), label=None)
            for node in program.nodes
        ),
        exchanges=tuple(program.exchanges[n] for n in tables[NodeKind.EXCHANGE]),
        host_functions=tuple(each for each in program.host_functions if each.number in functions),
        mpmd_text="",
        ifrt_text="",
        pipelines=(),
    )
