"""The role of each step of a flat program: calls that do the same for different microbatches have one role.

A pipeline is written as a Python loop over microbatches, so each stage's function is called once per microbatch. These
calls have one role: the same function on the same slice, which reads values of the same roles.

- An argument that many calls of the function read at the same position is a weight, and counts by identity. Any other
  argument may be a microbatch's data, and all of them look alike.
- What plain operations make of arguments counts as an argument: a part of the batch, a random key.
- So does a result of a prepared call: a placed call that reads arguments only and prepares the batch or the weights.

Which arguments are weights and which calls prepare is not always certain, so there are several readings (`READINGS`).
`labels` takes the first one in which everything fits.

Pure.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from pathways import _jaxlib
from pathways.compiler.flatten import Step, StepKind

#: The role of whatever reads a result of a backward step.
BACK = -1


@dataclasses.dataclass(frozen=True)
class Reading:
    """One way to tell weights from data.

    `most_used`: an argument is a weight only if no other argument has more calls of the function; else two calls are
    enough. `shared`: a call prepares weights if many calls of a function read its result; else only if its function is
    called once.
    """

    most_used: bool
    shared: bool


READINGS = (Reading(False, False), Reading(True, False), Reading(False, True), Reading(True, True))


def is_forward(step: Step) -> bool:
    """True for a placed call that differentiation did not make."""
    return step.kind is StepKind.PLACED and not step.derivatives


def describe(step: Step) -> str:
    """A step for an error's text."""
    if step.control is not None:
        return step.control.construct
    if step.kind is not StepKind.PLACED:
        return f"a device_put to slice {step.mesh.name!r}" if step.mesh is not None else f"{step.eqn.primitive.name}"
    assert step.slice_tag is not None
    phase = "backward" if step.derivatives else "forward"
    label = f" {step.label.microbatch}" if step.label is not None else ""
    return f"{phase}{label} of {step.slice_tag.name!r} on slice {step.slice_tag.mesh.name!r}"


class Roles:
    """The roles in one reading. It keeps the steps, so their ids stay theirs.

    `of` has the role of each step by the step's id. `made` has each variable behind which there is a placed call that
    does not prepare, with the step that makes it. `prepared` has the ids of the calls that prepare.
    """

    def __init__(self, steps: Sequence[Step], names: dict[int, int], reading: Reading) -> None:
        self.steps = steps
        self.names = names
        self.reading = reading
        self.calls = collections.Counter(step.slice_tag for step in steps if is_forward(step))
        self.positions = {v: n for step in steps for n, v in enumerate(step.outputs)}
        self.prepared: set[int] = set()
        self.made = self._made(self._shared() if reading.shared else set())
        self.uses = collections.Counter(
            (names[id(step)], position, v)
            for step in steps
            for position, v in enumerate(step.inputs)
            if step.kind is StepKind.PLACED and not isinstance(v, _jaxlib.Literal) and v not in self.made
        )
        self.most: dict[int, int] = {}
        for (name, _, _), count in self.uses.items():
            self.most[name] = max(self.most.get(name, 2), count)
        self.of: dict[int, int] = {}
        numbers: dict[Hashable, int] = {}
        for step in steps:
            makers = (self.made.get(v) for v in step.reads)
            back = step.derivatives > 0 or any(maker is not None and self.of[id(maker)] == BACK for maker in makers)
            key = (names[id(step)], tuple(self._part(step, position) for position in range(len(step.inputs))))
            self.of[id(step)] = BACK if back else numbers.setdefault(key, len(numbers))

    def reads_arguments_only(self, step: Step) -> bool:
        """True if no placed call is behind a step, except calls that prepare."""
        return _reads_none(step, self.made)

    def difference(self, one: Step, other: Step) -> str:
        """The first input in which two calls of one function differ, or in which the calls differ that made it."""
        if self.names[id(one)] != self.names[id(other)]:
            return "their results have different types"
        for position, (a, b) in enumerate(zip(one.inputs, other.inputs, strict=False)):
            if self._part(one, position) != self._part(other, position):
                makers = [None if isinstance(v, _jaxlib.Literal) else self.made.get(v) for v in (a, b)]
                if makers[0] and makers[1] and self.names[id(makers[0])] == self.names[id(makers[1])]:
                    return self.difference(makers[0], makers[1])
                was, now = self._source(one, position), self._source(other, position)
                also = f"{now} in another" if was != now else "another one in another"
                return f"input {position} ({a.aval.str_short()}) of {describe(one)} is {was} in one call, and {also}"
        return "they read different results of one call"

    def _part(self, step: Step, position: int) -> Hashable:
        """What an input looks like."""
        v = step.inputs[position]
        if isinstance(v, _jaxlib.Literal):
            return "literal"
        maker = self.made.get(v)
        if maker is not None:
            return (self.of[id(maker)], self.positions[v])
        name = self.names[id(step)]
        enough = self.most.get(name, 2) if self.reading.most_used else 2
        return v if self.uses[name, position, v] >= enough else "argument"

    def _source(self, step: Step, position: int) -> str:
        v = step.inputs[position]
        if isinstance(v, _jaxlib.Literal):
            return "a number"
        maker = self.made.get(v)
        if maker is None:
            return "an argument"
        while maker.kind is not StepKind.PLACED:
            v = next(v for v in maker.reads if v in self.made)
            maker = self.made[v]
        return f"made of result {self.positions[v]} of {describe(maker)}"

    def _made(self, shared: set[int]) -> dict[Any, Step]:
        several = max(self.calls.values(), default=1) > 1
        made: dict[Any, Step] = {}
        for step in self.steps:
            if _reads_none(step, made):
                if step.kind is not StepKind.PLACED:
                    continue
                if is_forward(step) and (id(step) in shared or (several and self.calls[step.slice_tag] == 1)):
                    self.prepared.add(id(step))
                    continue
            made.update((v, step) for v in step.outputs)
        return made

    def _shared(self) -> set[int]:
        """The calls whose results are read like weights: by as many calls of a function as its most-used argument."""
        sources: dict[Any, set[int]] = {}  # per variable: the ids of the placed calls from which plain steps made it
        readers: collections.Counter[tuple[int, int, int]] = collections.Counter()
        most: dict[int, int] = {}
        arguments: collections.Counter[tuple[int, int, Any]] = collections.Counter()
        for step in self.steps:
            if step.kind is StepKind.PLACED:
                name = self.names[id(step)]
                for position, v in enumerate(step.inputs):
                    if isinstance(v, _jaxlib.Literal):
                        continue
                    readers.update((maker, name, position) for maker in sources.get(v, ()))
                    if v not in sources:
                        arguments[name, position, v] += 1
                        most[name] = max(most.get(name, 2), arguments[name, position, v])
                behind = {id(step)} if is_forward(step) else set()
            else:
                behind = set().union(*(sources.get(v, ()) for v in step.reads))
            if behind:
                sources.update((v, behind) for v in step.outputs)
        return {maker for (maker, name, _), count in readers.items() if count >= most.get(name, 2)}


def names_of(steps: Sequence[Step]) -> dict[int, int]:
    """What each step does, without what it reads, as a number by the step's id: the function or operation, its slice,
    the types of its results.

    An operation's parameters do not count: those of `xs[i]` are different for each i.
    """
    numbers: dict[Hashable, int] = {}
    names: dict[int, int] = {}
    for step in steps:
        key = (
            step.slice_tag or step.eqn.primitive.name,
            step.mesh,
            tuple((v.aval.shape, v.aval.dtype) for v in step.outputs),
        )
        names[id(step)] = numbers.setdefault(key, len(numbers))
    return names


def _reads_none(step: Step, made: Mapping[Any, Step]) -> bool:
    return not any(v in made for v in step.reads)
