"""Finds the pipeline in a flat program: the stage, the microbatch and the phase of its steps.

`roles` says which calls do the same for different microbatches.

- Roles with as many calls as there are microbatches are the pipeline. A call belongs to the microbatch of the calls
  whose results it reads; if it reads none, the n-th call of its role belongs to microbatch n.
- Calls that prepare the batch or the weights come before the pipeline, roles with one call behind it (metrics). What
  reads a gradient (an optimizer) comes behind it, too. These calls have no label: they run when their inputs are there.
- A backward step belongs to the microbatch with whose forward steps on its slice it shares most variables (residuals,
  inputs) that no other microbatch has. If there are none, it belongs to the microbatch whose results it reads.
- A plain operation belongs to the one microbatch from which it reads, or, if it reads none, to the one that reads it.

Whatever does not fit is refused (`doubts` has part of the checks). A wrong guess would give a wrong order, silently.

Pure.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pathways import errors
from pathways.compiler.flatten import FlatProgram, Step, StepKind
from pathways.compiler.ir import Label, MeshSpec, Phase, PipelineInfo
from pathways.compiler.lengths import Lengths
from pathways.compiler.schedule import doubts
from pathways.compiler.schedule.chunks import Chunks
from pathways.compiler.schedule.orders import Unit
from pathways.compiler.schedule.roles import BACK, READINGS, Roles, describe, is_forward, names_of

_NAMED = 6  # so many functions are named in an error


@dataclasses.dataclass
class Pipeline:
    """The pipeline of a program.

    `stages` gives the stage of each slice; slices that work side by side have one stage. `depth` is the number of
    stages, `chunks` the number of parts of the model that each stage has. `feeds` has the ids of labelled steps that
    need no result of the pipeline, such as the slicing of a batch into microbatches: they run just before their first
    reader.

    `number` is the pipeline's number on its level, `key` its name; "" if it has no scopes. `title` begins each error.
    `sequences` has the order of the units on each stage; if not `ordered`, it is the order of the text, and the steps
    stay where they are. `schedule`, `is_searched` and `lengths` are those of `PipelineInfo`.
    """

    stages: dict[MeshSpec, int]
    depth: int
    microbatches: int
    chunks: int
    feeds: set[int]
    number: int = 0
    key: str = ""
    title: str = ""
    sequences: list[Sequence[Unit]] = dataclasses.field(default_factory=list)
    ordered: bool = True
    schedule: str = "none"
    is_searched: bool = False
    lengths: tuple[Lengths, ...] = ()

    def info(self) -> PipelineInfo:
        """What the compiled program knows of the pipeline."""
        return PipelineInfo(self.title, self.schedule, self.is_searched, self.lengths, self.key)


def find(program: FlatProgram, title: str, *, chunked: bool = False) -> Pipeline:
    """Finds the pipeline of a program and sets the labels of its steps. `title` begins each error.

    `chunked`: a stage may have several chunks; else a microbatch visits each slice once.

    Raises:
        ScheduleError: there is no pipeline, or a step's microbatch cannot be told for certain.
    """
    names = names_of(program.steps)
    refused: errors.ScheduleError | None = None
    for reading in READINGS:
        for step in program.steps:
            step.label = None
        try:
            return _Finder(program.steps, Roles(program.steps, names, reading), title, chunked).find()
        except errors.ScheduleError as error:
            refused = refused or error
    assert refused is not None
    raise refused


@dataclasses.dataclass
class _Origin:
    """Where a value comes from. `microbatches` is a set as bits, of the nearest labelled steps behind it.

    `late` means that an unlabelled placed call which reads results of the pipeline is behind it.
    """

    microbatches: int = 0
    backward: bool = False
    late: bool = False
    stage: int = 0
    chunk: int = 0

    def merge(self, other: _Origin) -> None:
        if not self.microbatches:
            self.stage, self.chunk = other.stage, other.chunk
        self.microbatches |= other.microbatches
        self.backward |= other.backward
        self.late |= other.late


class _Finder:
    """One search. The steps are read in the order of the text, so what a step reads has been seen before it."""

    def __init__(self, steps: Sequence[Step], roles: Roles, title: str, chunked: bool) -> None:
        self.steps = steps
        self.title = title
        self.roles = roles
        self.chunked = chunked
        self.microbatches = 1
        self.chunks = 1
        self.members: set[int] = set()  # ids of the forward steps of the pipeline
        self.numbers: dict[MeshSpec, int] = {}  # its slices, in order of first appearance
        # The microbatches and the chunks (as bits) whose forward steps on a slice read or make a variable.
        self.owners: dict[tuple[MeshSpec, Any], int] = collections.defaultdict(int)
        self.chunk_owners: dict[tuple[MeshSpec, Any], int] = collections.defaultdict(int)
        self.chunks_of: dict[Any, set[int]] = collections.defaultdict(set)  # those of each function's forward calls
        # How often each function is called that has no forward calls.
        self.custom = collections.Counter(
            step.slice_tag for step in steps if step.kind is StepKind.PLACED and not roles.calls[step.slice_tag]
        )
        self.unbound: set[int] = set()  # ids of backward steps behind which there is no microbatch

    def find(self) -> Pipeline:
        forward = self._choose()
        try:
            doubts.check_calls(forward, self.members, self.steps, self.roles)
            if self.microbatches == 1:
                doubts.check_one_microbatch(self.steps, self.roles)
            self._label_forward()
            doubts.check_microbatches(self.steps, self.roles, self.microbatches)
            stages = self._stages()
        except doubts.Doubt as doubt:
            raise self.refuse(str(doubt)) from None
        self._label_rest(stages)
        if unbound := [step for step in self.steps if id(step) in self.unbound]:
            self._label_unbound(unbound, stages)
            self._label_rest(stages)
        feeds = self._label_feeds()
        self._check_backward()
        return Pipeline(stages, 1 + max(stages.values()), self.microbatches, self.chunks, feeds)

    def refuse(self, why: str) -> errors.ScheduleError:
        return errors.ScheduleError(f"{self.title}: {why}")

    def _choose(self) -> list[Step]:
        """Chooses the roles of the pipeline, and the number of microbatches. Returns all calls that may be of it."""
        forward = [
            step
            for step in self.steps
            if is_forward(step) and self.roles.of[id(step)] != BACK and id(step) not in self.roles.prepared
        ]
        if not forward:
            raise self.refuse("there is no pipeline in it, because it calls no placed function; give no schedule")
        calls: dict[int, list[Step]] = {}
        for step in forward:
            calls.setdefault(self.roles.of[id(step)], []).append(step)
        counts = {len(steps) for steps in calls.values()} - {1}
        if len(counts) > 1:
            totals = collections.Counter(step.slice_tag for step in forward if step.slice_tag is not None)
            named = [f"{tag.name!r} {count} times on slice {tag.mesh.name!r}" for tag, count in totals.items()]
            more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
            raise self.refuse(
                f"placed functions are called {', '.join(named[:_NAMED])}{more}; expected each stage to be "
                "called once per microbatch, on values that are made in the same way for each of them. If a stage "
                "calls a function several times, give each of these calls a function with its own name="
            )
        self.microbatches = max(counts, default=1)
        chosen = [steps for steps in calls.values() if len(steps) == self.microbatches]
        self.members = {id(step) for steps in chosen for step in steps}
        for step in forward:
            if id(step) in self.members:
                assert step.mesh is not None
                self.numbers.setdefault(step.mesh, len(self.numbers))
        return forward

    def _label_forward(self) -> None:
        """Labels the forward steps. Stages and chunks are not known yet: they are set to 0. It fills `owners`."""
        origins: dict[Any, _Origin] = {}
        met: dict[int, set[int]] = {}
        for step in self.steps:
            if self.roles.of[id(step)] == BACK:
                continue
            origin = _origin(step.reads, origins)
            if id(step) in self.members:
                assert step.mesh is not None
                if origin.late or origin.microbatches.bit_count() > 1:
                    raise self.refuse(
                        f"{describe(step)} reads results of several microbatches; expected each microbatch to be "
                        "computed from its own part of the batch"
                    )
                numbers = met.setdefault(self.roles.of[id(step)], set())
                number = origin.microbatches.bit_length() - 1 if origin.microbatches else len(numbers)
                if number in numbers:
                    raise self.refuse(
                        f"{describe(step)} is called twice for microbatch {number}, in calls that look alike; give "
                        "each layer weights of its own, or put them into one placed function"
                    )
                numbers.add(number)
                step.label = Label(0, number, Phase.FORWARD)
                for v in (*step.reads, *step.outputs):
                    self.owners[step.mesh, v] |= 1 << number
                origin = _Origin(1 << number)
            elif step.kind in (StepKind.PLACED, StepKind.CONTROL) and origin.microbatches:
                origin.late = True
            for v in step.outputs:
                origins[v] = origin

    def _stages(self) -> dict[MeshSpec, int]:
        """Finds the stage of each slice, and sets stages and chunks in the labels of the forward steps.

        Raises:
            Doubt: microbatches visit slices more often than the schedule allows, or in another order.
        """
        if self.microbatches == 1 and not self.chunked:  # it may come back to a slice: there is one order only
            chunks, stages = None, dict(self.numbers)
        else:
            chunks = Chunks(self.steps)
            stages = chunks.stages_in_turn() if self.chunked else chunks.stages()
            self.chunks = chunks.count
        for step in self.steps:
            if step.label is not None:
                assert step.mesh is not None
                chunk = chunks.of[id(step)] if chunks else 0
                step.label = dataclasses.replace(step.label, stage=stages[step.mesh], chunk=chunk)
                self.chunks_of[step.slice_tag].add(chunk)
                for v in (*step.reads, *step.outputs):
                    self.chunk_owners[step.mesh, v] |= 1 << chunk
        return stages

    def _label_rest(self, stages: Mapping[MeshSpec, int]) -> None:
        """Labels the backward steps, and the plain steps that read results of one microbatch.

        Labels that are set already stay. It fills `unbound`.
        """
        in_pipeline = {step.slice_tag for step in self.steps if id(step) in self.members}
        reads_gradients = {
            step.slice_tag for step in self.steps if is_forward(step) and self.roles.of[id(step)] == BACK
        }
        origins: dict[Any, _Origin] = {}
        for step in self.steps:
            origin = _origin(step.reads, origins)
            if step.kind is StepKind.PLACED and step.derivatives:
                if step.slice_tag in in_pipeline:
                    step.label = step.label or self._backward(step, stages, origin)
                elif step.slice_tag in reads_gradients:
                    raise self.refuse(
                        f"{describe(step)} differentiates a call that reads a gradient; expected one pipeline, "
                        "forward and then backward"
                    )
                elif step.slice_tag in self.custom and step.mesh in stages:
                    step.label = step.label or self._custom_backward(step, stages, origin)
            elif step.kind is StepKind.PLAIN and origin.microbatches.bit_count() == 1 and not origin.late:
                back = origin.backward or step.derivatives > 0
                phase = Phase.BACKWARD if back else Phase.FORWARD
                step.label = Label(origin.stage, origin.microbatches.bit_length() - 1, phase, origin.chunk)
                origin.backward = back
            if step.label is not None and step.kind is StepKind.PLACED:
                origin = _Origin(
                    1 << step.label.microbatch,
                    backward=step.label.phase is Phase.BACKWARD,
                    stage=step.label.stage,
                    chunk=step.label.chunk,
                )
            elif step.kind in (StepKind.PLACED, StepKind.CONTROL) and origin.microbatches:
                origin.late = True
            for v in step.outputs:
                origins[v] = origin

    def _backward(self, step: Step, stages: Mapping[MeshSpec, int], origin: _Origin) -> Label | None:
        assert step.mesh is not None
        if step.derivatives > 1:
            raise self.refuse(f"{describe(step)} is a second derivative; expected first derivatives only")
        numbers = self._sharing_most(step)
        if not numbers and origin.microbatches.bit_count() == 1:
            numbers = [origin.microbatches.bit_length() - 1]
        if not numbers and not origin.microbatches:
            self.unbound.add(id(step))
            return None
        if len(numbers) != 1:
            raise self.refuse(
                f"{describe(step)} reads what several microbatches have made; expected one backward step per microbatch"
            )
        return Label(stages[step.mesh], numbers[0], Phase.BACKWARD, self._chunk(step))

    def _chunk(self, step: Step) -> int:
        """The chunk of a backward step: that of its function, or that of the forward steps with which it shares
        weights, residuals or inputs.
        """
        if self.chunks == 1:
            return 0
        found = self.chunks_of.get(step.slice_tag, set())
        if len(found) != 1:
            owners = (self.chunk_owners.get((step.mesh, v), 0) for v in step.reads if step.mesh is not None)
            found = {bits.bit_length() - 1 for bits in owners if bits.bit_count() == 1}
        if len(found) != 1:
            raise self.refuse(
                f"{describe(step)} shares nothing with one chunk of its slice alone; expected each chunk to be a "
                "function with a name= of its own"
            )
        return next(iter(found))

    def _custom_backward(self, step: Step, stages: Mapping[MeshSpec, int], origin: _Origin) -> Label | None:
        """The label of a call that a custom derivative makes, of a function that has no forward calls.

        If it is called once, it may be part of the derivative of a call that prepares: it has no label then.
        """
        if self.custom[step.slice_tag] == 1 and not self._sharing_most(step) and origin.microbatches.bit_count() != 1:
            return None
        return self._backward(step, stages, origin)

    def _sharing_most(self, step: Step) -> list[int]:
        """The microbatches with whose forward steps on its slice a step shares most variables that no other has."""
        owners = (self.owners.get((step.mesh, v), 0) for v in dict.fromkeys(step.reads) if step.mesh is not None)
        counts = collections.Counter(bits.bit_length() - 1 for bits in owners if bits.bit_count() == 1)
        return [number for number, count in counts.items() if count == max(counts.values())]

    def _label_unbound(self, unbound: Sequence[Step], stages: Mapping[MeshSpec, int]) -> None:
        """Labels the backward steps that read nothing of any microbatch, such as that of a sum, which is a constant.

        A step belongs to the microbatch that reads its results. If none of a function's steps has such a reader, all
        these steps make the same, so they are numbered in the order of the text.
        """
        readers: dict[Any, int] = collections.defaultdict(int)  # microbatches as bits
        found: dict[int, int] = {}
        for step in reversed(self.steps):
            bits = 0
            for v in step.outputs:
                bits |= readers[v]
            if step.kind is StepKind.PLACED and step.label is not None:
                bits = 1 << step.label.microbatch
            if id(step) in self.unbound:
                found[id(step)] = bits
            for v in step.reads:
                readers[v] |= bits
        met: dict[Any, int] = collections.defaultdict(int)
        known = {step.slice_tag for step in unbound if found[id(step)]}
        for step in unbound:
            assert step.mesh is not None
            bits = found[id(step)]
            if (
                not bits
                and step.slice_tag not in known
                and not any(id(self.roles.made.get(v)) in self.unbound for v in step.reads)
            ):
                bits = 1 << met[step.slice_tag]
                met[step.slice_tag] += 1
            elif not bits:
                continue  # it belongs to the microbatch of the step whose result it reads
            if bits.bit_count() != 1 or bits.bit_length() > self.microbatches:
                raise self.refuse(
                    f"{describe(step)} belongs to no microbatch alone; expected one backward step per microbatch"
                )
            step.label = Label(stages[step.mesh], bits.bit_length() - 1, Phase.BACKWARD, self._chunk(step))

    def _label_feeds(self) -> set[int]:
        """Labels steps that read no result of the pipeline and are read by one microbatch; returns their ids."""
        readers: dict[Any, list[Label | None]] = collections.defaultdict(list)
        feeds = set()
        for step in reversed(self.steps):
            if (
                step.label is None
                and step.kind is not StepKind.PLACED
                and not any(v in self.roles.made for v in step.outputs)
            ):
                labels = [label for v in step.outputs for label in readers[v]]
                known = [label for label in labels if label is not None]
                if known and len(known) == len(labels) and len({label.microbatch for label in known}) == 1:
                    step.label = known[-1]
                    feeds.add(id(step))
            for v in step.reads:
                readers[v].append(step.label)
        return feeds

    def _check_backward(self) -> None:
        """Refuses a slice that has backward steps for some microbatches only, or more of them than are labelled."""
        seen: dict[tuple[MeshSpec, int], set[int]] = {}
        for step in self.steps:
            if step.kind is StepKind.PLACED and step.label is not None and step.label.phase is Phase.BACKWARD:
                assert step.mesh is not None
                seen.setdefault((step.mesh, step.label.chunk), set()).add(step.label.microbatch)
            elif id(step) in self.unbound and step.label is None:
                raise self.refuse(
                    f"{describe(step)} belongs to no microbatch; expected one backward step per microbatch"
                )
        unlabelled = [
            step for step in self.steps if step.kind is StepKind.PLACED and step.derivatives and not step.label
        ]
        counts = collections.Counter(step.slice_tag for step in unlabelled)
        for step in unlabelled:
            if step.mesh in self.numbers and counts[step.slice_tag] > max(1, self.roles.calls[step.slice_tag]):
                raise self.refuse(
                    f"{describe(step)} is called {counts[step.slice_tag]} times, and its forward calls are no part of "
                    "the pipeline; expected a custom derivative to call a placed function with a name= of its own"
                )
        for (mesh, _), numbers in seen.items():
            if len(numbers) != self.microbatches:
                raise self.refuse(
                    f"slice {mesh.name!r} has backward steps for microbatches {sorted(numbers)} only; expected one "
                    f"for each of {self.microbatches}"
                )


def _origin(reads: Iterable[Any], origins: Mapping[Any, _Origin]) -> _Origin:
    origin = _Origin()
    for v in reads:
        if v in origins:
            origin.merge(origins[v])
    return origin
