"""A program with loops and branches as one logical program.

jaxlib's compiler knows no loops and branches over slices. So the steps between control steps, and each body, are
compiled alone, and `splicing` puts the parts together: a branch's nodes get a predicate, and a select node gives each
result; a loop becomes one node with its body as a program of its own.

Each value between parts has a home: a slice, and how it is cut on it.
- What a body takes is where it is outside. A cheap constant is made again inside. What is the same in each iteration
  and read on another slice is sent before the loop.
- The steps of each level (the program, a body) are put into the order of its pipelines' schedules before they are cut
  into parts. A schedule orders the calls of one level (SCHED-1).
- A carried value lives where it starts. If that is free (a constant), it lives where the body leaves it. At the end of
  the body it is moved back, if the body leaves it elsewhere.
- A result of a branch lives where all cases make it. If they make it on several slices, it lives where the operand is
  that a case hands on as the result, or an operand of the result's type; else where it is read first; else where the
  first case makes it. A case that makes it elsewhere sends it. A case that hands on an argument which the user put
  nowhere makes nothing: there the argument is sent.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways import _jaxlib, errors
from pathways.compiler import donation
from pathways.compiler.added_primitives.transfers import transfer
from pathways.compiler.control.counting import counted_body, renamed
from pathways.compiler.control.exchanging import add_exchange
from pathways.compiler.control.splicing import Home, Whole, home_of, padded, sent_before
from pathways.compiler.control.unrolling import operations, stack
from pathways.compiler.inlining import Inliner
from pathways.compiler.ir import (
    MOST_CASES,
    MOST_NESTED,
    ArrayType,
    LogicalProgram,
    Loop,
    MeshSpec,
    PipelineInfo,
    Predicate,
)
from pathways.compiler.partition.groups import ancestors, cheap_constants
from pathways.compiler.steps import Control, ControlKind, FlatProgram, Step, StepKind
from pathways.compiler.trace import Argument, Traced

#: Puts the steps of a program, or of a body, into the order of its pipelines' schedules; returns these.
Order = Callable[[Traced, FlatProgram], tuple[PipelineInfo, ...]]

#: Compiles a program without control steps, with the pipelines of its level. The given slice is for what may be
#: anywhere.
Partition = Callable[[Traced, FlatProgram, MeshSpec, tuple[PipelineInfo, ...]], LogicalProgram]


def has_control(program: FlatProgram) -> bool:
    """Whether a program has loops, branches or exchanges."""
    return any(step.beyond for step in program.steps)


def assemble(
    program: FlatProgram, traced: Traced, order: Order, partition: Partition, default: MeshSpec | None
) -> LogicalProgram:
    """The logical program of a program with control steps.

    Raises:
        ScheduleError: a pipeline in it, or in a body, cannot follow its schedule.
        ProgramError: a branch has too many cases, or is nested too deep.
        PlacementError: two slices have one name, or there is no slice at all.
    """
    meshes = [*(a.mesh for a in traced.arguments), *_meshes(program), default]
    first = next((mesh for mesh in meshes if mesh is not None), None)
    if first is None:
        raise errors.PlacementError(
            f"program {traced.name!r} calls no placed function and none of its arguments lives on a slice, so it runs "
            "nowhere; place a function with pw.jit(..., devices=slice)"
        )
    compiler = _Compiler(traced, order, partition, first)
    assembled = compiler.compile(program, traced.arguments, [None] * len(program.outvars))
    return donation.decide(dataclasses.replace(assembled, donated_arguments=traced.donated, calls=program.calls))


def _meshes(program: FlatProgram) -> list[MeshSpec | None]:
    found: list[MeshSpec | None] = []
    for step in program.steps:
        found.append(step.mesh)
        for body in step.control.bodies if step.control is not None else ():
            found += _meshes(body)
    return found


@dataclasses.dataclass
class _Compiler:
    """Compiles a program and the bodies in it. `default` is the slice of what may be anywhere."""

    traced: Traced
    order: Order
    partition: Partition
    default: MeshSpec
    depth: int = 0  # of the branches around what is compiled now

    def compile(
        self, program: FlatProgram, arguments: Sequence[Argument], wanted: Sequence[Home | None]
    ) -> LogicalProgram:
        """A program, or a body, whose results are moved to the homes that are wanted."""
        program = dataclasses.replace(  # a body is perhaps compiled twice: each time its steps get labels and an order
            program,
            steps=[dataclasses.replace(step) for step in program.steps],
            outvars=[*program.outvars],
            declared=dict(program.declared),
        )
        for n, home in enumerate(wanted):
            if home is not None:
                program.outvars[n] = _put(program, program.outvars[n], home)
        pipelines = self.order(self._as_traced(arguments), program)
        if has_control(program):
            return _Level(self, program, arguments, pipelines).build()
        return self.part(program, arguments, pipelines)

    def part(
        self, program: FlatProgram, arguments: Sequence[Argument], pipelines: tuple[PipelineInfo, ...] = ()
    ) -> LogicalProgram:
        """Steps without control, in the order in which they are."""
        return self.partition(self._as_traced(arguments), program, self.default, pipelines)

    def constants(self, program: FlatProgram, homes: Sequence[Home]) -> LogicalProgram:
        """What takes nothing and makes constants, at their homes."""
        for n, home in enumerate(homes):
            program.outvars[n] = _put(program, program.outvars[n], home)
        return self.part(program, [])

    def _as_traced(self, arguments: Sequence[Argument]) -> Traced:
        return dataclasses.replace(self.traced, arguments=tuple(arguments), donated=(False,) * len(arguments))


def _put(program: FlatProgram, v: Any, home: Home) -> Any:
    """Appends the step that puts a variable or a literal to a home."""
    mesh, spec = home[0], padded(home[1], len(v.aval.shape))
    (eqn,) = _jaxlib.opened(operations(lambda x: transfer(x, mesh, spec), [v.aval]))[0].eqns
    there = _jaxlib.new_var(v.aval)
    program.steps.append(Step(StepKind.TRANSFER, eqn, [v], [there], mesh=mesh, spec=spec))
    program.declared[there] = spec
    return there


class _Level:
    """One program with control steps, in the making: the whole, or a body.

    `numbers` has the value of each variable that has a home. What is free has none yet: an argument that may live
    anywhere, and whatever is made of constants cheaply.
    """

    def __init__(
        self,
        compiler: _Compiler,
        program: FlatProgram,
        arguments: Sequence[Argument],
        pipelines: tuple[PipelineInfo, ...],
    ) -> None:
        self.compiler = compiler
        self.program = program
        self.pipelines = pipelines
        self.whole = Whole(compiler.traced.name)
        self.cheap = cheap_constants(program)
        self.arguments = dict(zip(program.invars, arguments, strict=True))
        self.numbers: dict[Any, int] = {}
        self._unplaced = {v for v, argument in self.arguments.items() if argument.mesh is None}
        self._readers: Sequence[Step] = ()  # the steps behind the control step at hand
        for v, argument in self.arguments.items():
            if argument.mesh is not None:
                self._settle(v, (argument.mesh, argument.spec or ()))

    def build(self) -> LogicalProgram:
        """The program."""
        pending: list[Step] = []
        for n, step in enumerate(self.program.steps):
            if step.beyond:
                self._straight(pending, self.program.steps[n:])
                pending = []
                self._readers = self.program.steps[n + 1 :]
                if step.control is None:
                    results = add_exchange(self.whole, step, lambda v: self._at_home(v, (self.compiler.default, ())))
                    self.numbers.update(zip(step.outputs, results, strict=True))
                elif step.control.kind is ControlKind.BRANCH:
                    self._branch(step, step.control)
                else:
                    self._loop(step, step.control)
            elif not all(v in self.cheap for v in step.gives):
                pending.append(step)
        self._straight(pending, ())
        default = (self.compiler.default, ())
        results = [self._at_home(v, default) for v in self.program.outvars]
        for v in self.arguments:
            self._at_home(v, default)
        arguments = [self.numbers[v] for v in self.program.invars]
        return self.whole.finish(arguments, results, [False] * len(arguments))

    def _settle(self, v: Any, home: Home) -> int:
        """A free argument gets a home."""
        shape, dtype = _jaxlib.physical(v.aval)
        self.numbers[v] = self.whole.value(ArrayType(shape, dtype, 0, ()), home)
        return self.numbers[v]

    def _is_constant(self, v: Any) -> bool:
        return isinstance(v, _jaxlib.Literal) or v in self.cheap or v in self.program.constants

    def _argument(self, v: Any) -> Argument:
        """What a variable is to a part that takes it."""
        return _argument(v.aval, self._where(v))

    def _at_home(self, v: Any, home: Home) -> int:
        """The value of a variable; if it is free, it is put to `home` first."""
        if not self._is_constant(v):
            return self.numbers[v] if v in self.numbers else self._settle(v, home)
        return self._make([v], [home])[0]

    def _make(self, constants: Sequence[Any], homes: Sequence[Home]) -> list[int]:
        """New values of constants, at homes."""
        if not constants:
            return []
        part = FlatProgram([], self.program.constants, self._behind(constants), list(constants))
        return self.whole.splice(self.compiler.constants(part, homes), [])

    def _behind(self, constants: Sequence[Any]) -> list[Step]:
        """The steps that make constants."""
        return ancestors([v for v in constants if not _is_literal(v)], self.cheap)

    def _straight(self, steps: Sequence[Step], later: Sequence[Step]) -> None:
        """Compiles steps without control; `later` are all steps behind them."""
        made = {v for step in steps for v in step.gives}
        if not made:
            return
        needed = {v for step in later for v in step.needs} | {v for v in self.program.outvars if not _is_literal(v)}
        read = [v for step in steps for v in step.needs]
        invars = [v for v in dict.fromkeys(read) if v not in made and not self._is_constant(v)]
        outvars = [v for step in steps for v in step.gives if v in needed]
        part = FlatProgram(
            invars, self.program.constants, [*ancestors(read, self.cheap), *steps], outvars, self.program.declared
        )
        compiled = self.compiler.part(part, [self._argument(v) for v in invars], self.pipelines)
        self._adopt(invars, compiled)
        self.numbers.update(zip(outvars, self._splice(compiled, invars), strict=True))

    def _splice(self, part: LogicalProgram, inputs: Sequence[Any], predicate: int = -1) -> list[int]:
        return self.whole.splice(part, [self._at_home(v, (self.compiler.default, ())) for v in inputs], predicate)

    def _adopt(self, inputs: Sequence[Any], part: LogicalProgram, handed_on: bool = True) -> None:
        """A free argument lives where the first part that reads it takes it. `handed_on`: a result reads it, too."""
        read = {*(part.results if handed_on else ()), *(v for node in part.nodes for v in node.inputs)}
        for v, value in zip(inputs, part.arguments, strict=False):  # a body also takes its carry
            if v not in self.numbers and not self._is_constant(v) and value in read:
                self._settle(v, home_of(part, value))

    def _filled(self, body: FlatProgram, operands: Sequence[Any]) -> tuple[FlatProgram, list[int]]:
        """The body without the operands that are constants, which it makes itself; and which operands are left.

        The body may have more arguments than there are operands.
        """
        constant = {inner: v for inner, v in zip(body.invars, operands, strict=False) if self._is_constant(v)}
        left = [n for n, inner in enumerate(body.invars) if inner not in constant]
        if not constant:
            return body, left
        made = ancestors(constant.values(), self.cheap)
        steps = [*made, *renamed(body.steps, constant)]
        outvars = [constant.get(v, v) if not _is_literal(v) else v for v in body.outvars]
        constants = {**self.program.constants, **body.constants}
        return FlatProgram([body.invars[n] for n in left], constants, steps, outvars, body.declared), left

    def _branch(self, step: Step, control: Control) -> None:
        if len(control.bodies) > MOST_CASES:
            raise errors.ProgramError(
                f"program {self.compiler.traced.name!r}: {control.construct} has {len(control.bodies)} branches with "
                f"placed functions inside; expected at most {MOST_CASES}. Nest two jax.lax.switch"
            )
        if self.compiler.depth == MOST_NESTED:
            raise errors.ProgramError(
                f"program {self.compiler.traced.name!r}: {control.construct} with placed functions inside is nested in "
                f"{MOST_NESTED} others; expected at most {MOST_NESTED} around each other"
            )
        self.compiler.depth += 1
        compile_ = self.compiler.compile
        default = (self.compiler.default, ())
        which = self._at_home(step.inputs[0], default)
        bodies, parts, given = [], [], []
        for branch in control.bodies:
            body, left = self._filled(branch, step.inputs[1:])
            operands = [step.inputs[1 + n] for n in left]
            part = compile_(body, [self._argument(v) for v in operands], [None] * len(step.outputs))
            self._adopt(operands, part, handed_on=False)
            bodies.append(body)
            parts.append(part)
            given.append(operands)
        homes = [self._home_of_result(n, step, bodies, parts, given) for n in range(len(step.outputs))]
        for body, operands in zip(bodies, given, strict=True):
            for v, home in zip(body.outvars, homes, strict=True):
                if (handed_on := _handed_on(body, v, operands)) is not None:
                    self._at_home(handed_on, home)
        cases = []
        for n, (body, part, operands) in enumerate(zip(bodies, parts, given, strict=True)):
            if any(home_of(part, v) != _physical(part, v, home) for v, home in zip(part.results, homes, strict=True)):
                part = compile_(body, [self._argument(v) for v in operands], homes)
            self.whole.predicates.append(Predicate(which, n))
            predicate = len(self.whole.predicates) - 1
            results = self._splice(part, operands, predicate)
            cases.append([self.whole.moved(v, home, predicate) for v, home in zip(results, homes, strict=True)])
        for v, values in zip(step.outputs, zip(*cases, strict=True), strict=True):
            self.numbers[v] = self.whole.select(which, values, control.construct)
        self.compiler.depth -= 1

    def _home_of_result(
        self,
        n: int,
        step: Step,
        bodies: Sequence[FlatProgram],
        parts: Sequence[LogicalProgram],
        given: Sequence[Sequence[Any]],
    ) -> Home:
        """Where result `n` of a branch lives. The bodies were compiled to `parts`, and take the `given` operands."""
        result = step.outputs[n]
        made, handed_on = [], []  # homes, in the order of the cases
        for body, part, operands in zip(bodies, parts, given, strict=True):
            operand = _handed_on(body, body.outvars[n], operands)
            if not _is_free(body, body.outvars[n]) and operand not in self._unplaced:
                made.append(home_of(part, part.results[n]))
                handed_on += made[-1:] if operand is not None else []
        readers = [reader.mesh for reader in self._readers if result in reader.needs and reader.mesh is not None]
        if not made:
            return (readers[0] if readers else self.compiler.default), ()
        slices = {home[0] for home in made}
        if len(slices) == 1:
            return made[0]
        kind = _jaxlib.physical(result.aval)
        alike = [v for v in step.inputs[1:] if _jaxlib.physical(v.aval) == kind and not _is_literal(v)]
        where = [self._where(v) for v in alike if v not in self._unplaced]
        operands = [*handed_on, *(home for home in where if home is not None and home[0] in slices)]
        if operands:
            return operands[0]
        if readers:
            return next((home for home in made if home[0] == readers[0]), (readers[0], ()))
        return made[0]

    def _loop(self, step: Step, control: Control) -> None:
        counting = control.kind is ControlKind.FOR
        at = control.constants if counting else control.constants + 1
        carry, arrays = step.inputs[at : at + control.carry], step.inputs[at + control.carry :]
        constants = [*step.inputs[at - control.constants : at], *arrays]
        stacks = [v.aval for v in step.outputs[control.carry :]] if counting else []
        decides = 0 if counting else 1  # how many results of the body say whether to go on

        def make(counters: Sequence[int]) -> tuple[FlatProgram, list[Any]]:
            body = control.bodies[0]
            if counting:
                body = counted_body(control, [v.aval for v in arrays], stacks, counters)
            body, left = self._filled(body, constants)
            return body, [constants[n] for n in left if n < len(constants)]

        # The body is compiled twice if need be: first to see where it leaves what it carries, and then with homes.
        users = len(arrays) + len(stacks)
        body, fixed = make([0] * users)
        known = [*[None] * min(users, 1), *map(self._where, carry), *[None] * len(stacks)]
        part, homes = self._tried(body, fixed, known, decides)
        if users:
            of_arrays = [self._where(v) or homes[0] for v in arrays]
            slices = [home[0] for home in (*of_arrays, *homes[1 + control.carry :])]
            distinct = list(dict.fromkeys(slices))
            homes = [*((mesh, ()) for mesh in distinct), *homes[1:]]
            if len(distinct) > 1:
                body, fixed = make([distinct.index(mesh) for mesh in slices])
        if not _lives_at(part, len(fixed), decides, homes):
            given = [_argument(v.aval, home) for v, home in zip(body.invars[len(fixed) :], homes, strict=True)]
            arguments = [*map(self._argument, fixed), *given]
            part = self.compiler.compile(body, arguments, [*[None] * decides, *homes])
        inputs = [self._at_home(v, (self.compiler.default, ())) for v in fixed]
        part, copied = sent_before(part, len(fixed))
        inputs += [inputs[n] for n in copied]
        donated = (*[False] * len(inputs), *donation.own_results(part)[decides:])
        part = donation.decide(dataclasses.replace(part, donated_arguments=donated))

        first = body.invars[len(fixed) : len(fixed) + len(homes) - control.carry - len(stacks)]
        counters = [_jaxlib.new_literal(np.int32(0), v.aval) for v in first]
        starts = self._starts([*counters, *carry], stacks, homes)
        inputs = [self.whole.moved(v, home_of(part, there)) for v, there in zip(inputs, part.arguments, strict=False)]
        if decides:
            home = home_of(part, part.results[0])
            inputs.insert(0, self.whole.moved(self._at_home(step.inputs[0], home), home))
        loop = Loop(part, len(fixed) + len(copied), control.length if counting else None)
        results = self.whole.loop(loop, [*inputs, *starts], control.construct)
        self.numbers.update(zip(step.outputs, results[len(counters) :], strict=True))

    def _where(self, v: Any) -> Home | None:
        """Where a variable lives; None: it is free."""
        return None if self._is_constant(v) or v not in self.numbers else self.whole.home(self.numbers[v])

    def _tried(
        self, body: FlatProgram, fixed: Sequence[Any], known: Sequence[Home | None], decides: int
    ) -> tuple[LogicalProgram, list[Home]]:
        """The body, compiled with what is known of the homes of its carry; and where its whole carry is to live."""
        given = [_argument(v.aval, home) for v, home in zip(body.invars[len(fixed) :], known, strict=True)]
        part = self.compiler.compile(body, [*map(self._argument, fixed), *given], [None] * len(body.outvars))
        self._adopt(fixed, part)
        homes = []
        for n, home in enumerate(known):
            left = _is_free(body, body.outvars[decides + n])
            value = part.arguments[len(fixed) + n] if left else part.results[decides + n]
            homes.append(home or home_of(part, value))
        return part, homes

    def _starts(self, begin: Sequence[Any], stacks: Sequence[Any], homes: Sequence[Home]) -> list[int]:
        """The first carry: `begin`, then empty stacks of these types, at their homes."""
        part = FlatProgram([], self.program.constants, [], [])
        inliner = Inliner(part, "", 0)
        begin = [*begin, *(inliner.operate(stack([], aval), [])[0] for aval in stacks)]
        made = {v for step in part.steps for v in step.outputs}
        fresh = [n for n, v in enumerate(begin) if self._is_constant(v) or v in made]
        part.steps = [*self._behind([begin[n] for n in fresh]), *part.steps]
        part.outvars = [begin[n] for n in fresh]
        values: dict[int, int] = {}
        if fresh:
            compiled = self.compiler.constants(part, [homes[n] for n in fresh])
            values = dict(zip(fresh, self.whole.splice(compiled, []), strict=True))
        return [
            self.whole.moved(values[n] if n in values else self._at_home(v, homes[n]), homes[n])
            for n, v in enumerate(begin)
        ]


def _is_literal(v: Any) -> bool:
    return isinstance(v, _jaxlib.Literal)


def _is_free(program: FlatProgram, v: Any) -> bool:
    """Whether a result of a program is a constant, which may be made anywhere."""
    return _is_literal(v) or v in program.constants or v in cheap_constants(program)


def _handed_on(body: FlatProgram, v: Any, operands: Sequence[Any]) -> Any:
    """The operand that a body gives as its result `v`, if it is one."""
    return None if _is_literal(v) or v not in body.invars else operands[body.invars.index(v)]


def _argument(aval: Any, home: Home | None) -> Argument:
    mesh, spec = home or (None, None)
    spec = None if spec is None else padded(spec, len(aval.shape))
    return Argument(tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)), mesh, spec)


def _lives_at(part: LogicalProgram, fixed: int, decides: int, homes: Sequence[Home]) -> bool:
    """Whether the carry of a compiled body lives at those homes, when it is taken and when it is given."""
    values = [part.arguments[fixed:], part.results[decides:]]
    return all(
        len(side) == len(homes)
        and all(home_of(part, v) == _physical(part, v, home) for v, home in zip(side, homes, strict=True))
        for side in values
    )


def _physical(part: LogicalProgram, value: int, home: Home) -> Home:
    """A home with a spec of as many entries as the value has dimensions."""
    return home[0], padded(home[1], len(part.values[value].shape))
