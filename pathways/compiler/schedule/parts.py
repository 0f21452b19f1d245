"""Finds the microbatches of a loop that does not name them: each connected part of the forward calls is one.

A call and those that read its results, also through plain operations, are in one part. Weights and a batch, which
several calls read, connect nothing. A function that is called once is in no part: it prepares for all of them, or reads
all of them. If no function is called twice, all calls are one microbatch. This is certain only if all parts call the
same functions, and if no two of them share what the others do not have. Other programs are refused (SCHED-1).

A backward step belongs to the part that has what it reads (residuals, inputs), else to the one whose results are behind
what it reads, else to the one whose steps read its results.

`labels` takes what is found here as if the text had named it. Pure.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pathways.compiler.flatten import Step, StepKind
from pathways.compiler.ir import MeshSpec
from pathways.compiler.pipeline_spec import scope_name
from pathways.compiler.schedule.chunks import Chunks
from pathways.compiler.schedule.doubts import Doubt, describe

_NAMED = 6  # so many functions of a part are named in an error

_ADVICE = (
    "so it is not certain which calls are one microbatch. Expected each microbatch to call the same functions, on its "
    "own part of the batch. Name the microbatches: put the calls of the first one into "
    f'`with jax.named_scope("{scope_name("p0", 0)}"):`, those of the next one into "{scope_name("p0", 1)}" and so on, '
    "or use pw.pipeline or pw.accumulate_gradients; else give no schedule"
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """What is found: the microbatch and the chunk of each placed call of the pipeline, by the step's id.

    A slice has so many `chunks`. `stages` has the stage of each slice if it may have several; else it is empty.
    """

    units: Mapping[int, tuple[int, int]]
    chunks: int
    stages: Mapping[MeshSpec, int]


def find(steps: Sequence[Step], *, chunked: bool) -> Parts:
    """Finds the microbatches of the one pipeline that the steps are. `chunked`: a slice may have several chunks.

    Raises:
        Doubt: a call's microbatch is not certain, or microbatches do not visit the slices in turn.
    """
    forward, again = _forward(steps)
    if not forward:
        raise Doubt(f"all placed calls of a loop's body are backward steps, {_ADVICE}")
    counts = collections.Counter(step.slice_tag for step in forward)
    several = max(counts.values()) > 1
    members = [step for step in forward if not several or counts[step.slice_tag] > 1]
    tags = {step.slice_tag for step in members}
    for step in again:
        if step.slice_tag in tags:
            raise Doubt(f"{describe(step)} is called again with a result of a backward step, {_ADVICE}")
    parts = _connected(steps, members) if several else [members]
    if several:
        _check_alike(parts)
    microbatches = {id(step): n for n, part in enumerate(parts) for step in part}
    if not chunked:
        return Parts(_Backward(steps, members, microbatches, {}).find(), 1, {})
    chunks = Chunks(steps, microbatches)
    stages = chunks.stages_in_turn()
    return Parts(_Backward(steps, members, microbatches, chunks.of).find(), chunks.count, stages)


def _forward(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """The placed calls that differentiation did not make: those without a gradient behind them, and the others."""
    gradients: set[Any] = set()
    forward: list[Step] = []
    again: list[Step] = []
    for step in steps:
        is_behind = step.derivatives > 0 or not gradients.isdisjoint(step.reads)
        if is_behind:
            gradients.update(step.outputs)
        if step.kind is StepKind.PLACED and not step.derivatives:
            (again if is_behind else forward).append(step)
    return forward, again


def _connected(steps: Sequence[Step], members: Sequence[Step]) -> list[list[Step]]:
    """The connected parts of the calls `members`, each in the order of the text, as its first call is."""
    numbers = {id(step): n for n, step in enumerate(members)}
    roots = list(range(len(members)))

    def root(n: int) -> int:
        while roots[n] != n:
            roots[n] = n = roots[roots[n]]
        return n

    behind: dict[Any, int] = {}  # by variable: the calls from whose results plain operations made it, as bits
    for step in steps:
        bits = _union(step.reads, behind)
        if id(step) in numbers:
            here = numbers[id(step)]
            for n in _numbers(bits):
                first, second = sorted((root(n), root(here)))
                roots[second] = first
            bits = 1 << here
        elif step.kind in (StepKind.PLACED, StepKind.CONTROL):
            bits = 0
        if bits:
            behind.update((v, bits) for v in step.outputs)
    parts: dict[int, list[Step]] = {}
    for n, step in enumerate(members):
        parts.setdefault(root(n), []).append(step)
    return list(parts.values())


def _check_alike(parts: Sequence[Sequence[Step]]) -> None:
    """Raises:
    Doubt: the parts do not call the same functions, or some of them share what the others do not have.
    """
    first = parts[0]
    if len(parts) == 1:
        counts = collections.Counter(step.slice_tag for step in first)
        again = next(step for step in first if counts[step.slice_tag] > 1)
        raise Doubt(
            f"{describe(again)} is called {counts[again.slice_tag]} times, and its calls are connected: they read one "
            f"another's results, or a call reads results of several of them, {_ADVICE}"
        )
    for part in parts:
        if [step.slice_tag for step in part] != [step.slice_tag for step in first]:
            raise Doubt(
                f"of {len(parts)} parts of the calls that read nothing of one another, one calls {_functions(first)}, "
                f"and one calls {_functions(part)}, {_ADVICE}"
            )
        for one, other in zip(first, part, strict=True):
            if _types(one) != _types(other):
                raise Doubt(
                    f"{describe(one)} has results of the types {_types(one)} in one microbatch, and {_types(other)} in "
                    f"another, {_ADVICE}"
                )
    readers: dict[Any, dict[int, Step]] = {}
    for n, part in enumerate(parts):
        for step in part:
            for v in step.reads:
                readers.setdefault(v, {})[n] = step
    for v, some in readers.items():
        if 1 < len(some) < len(parts):
            raise Doubt(
                f"{len(some)} of {len(parts)} parts of the calls that read nothing of one another share an input "
                f"({v.aval.str_short()}) of {describe(next(iter(some.values())))}, {_ADVICE}"
            )


def _functions(part: Sequence[Step]) -> str:
    names = [f"{step.slice_tag.name!r} on slice {step.slice_tag.mesh.name!r}" for step in part if step.slice_tag]
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _types(step: Step) -> list[str]:
    return [v.aval.str_short() for v in step.outputs]


class _Backward:
    """Finds the microbatches of backward steps. A unit is a microbatch in a chunk of a slice; sets of them are bits."""

    def __init__(
        self, steps: Sequence[Step], members: Sequence[Step], microbatches: Mapping[int, int], chunks: Mapping[int, int]
    ) -> None:
        self.steps = steps
        self.width = 1 + max(chunks.values(), default=0)
        self.units = {step: 1 << (n * self.width + chunks.get(step, 0)) for step, n in microbatches.items()}
        self.of: dict[Any, int] = collections.defaultdict(int)  # the units of a function, and those of a slice
        self.own: dict[Any, int] = collections.defaultdict(int)  # those whose steps on a slice read or make a variable
        for step in members:
            self.of[step.slice_tag] |= self.units[id(step)]
            self.of[step.mesh] |= self.units[id(step)]
            for v in (*step.reads, *step.outputs):
                self.own[step.mesh, v] |= self.units[id(step)]
        derived = collections.Counter(step.slice_tag for step in steps if _is_backward(step))
        several = max(microbatches.values()) > 0
        # A function that is no member and has one backward step is as one that is called once: of no microbatch.
        self.outside = {tag for tag, count in derived.items() if tag not in self.of and several and count == 1}

    def find(self) -> dict[int, tuple[int, int]]:
        """The microbatch and the chunk of forward and backward steps, by the step's id.

        Raises:
            Doubt: a backward step on a slice of the pipeline is of no microbatch alone.
        """
        left: dict[int, int] = {}  # the units that a step may be of
        behind: dict[Any, int] = {}
        for step in self.steps:
            bits = _union(step.reads, behind)
            if _is_backward(step) and step.slice_tag not in self.outside:
                self._settle(step, self._sharing(step), bits, left)
            if id(step) in self.units:
                bits = self._whole(self.units[id(step)])
            elif step.kind in (StepKind.PLACED, StepKind.CONTROL):
                bits = 0
            if bits:
                behind.update((v, bits) for v in step.outputs)
        before: dict[Any, int] = collections.defaultdict(int)
        for step in reversed(self.steps):
            bits = 0
            for v in step.outputs:
                bits |= before[v]
            if id(step) in left:
                self._settle(step, left.pop(id(step)), bits, left)
            if id(step) in self.units:
                bits = self._whole(self.units[id(step)])
            for v in step.reads:
                before[v] |= bits
        for step in self.steps:
            if id(step) in left:
                raise Doubt(
                    f"{describe(step)} shares nothing with one microbatch in one chunk alone, nor do those that read "
                    f"its results, {_ADVICE}"
                )
        return {step: divmod(bits.bit_length() - 1, self.width) for step, bits in self.units.items()}

    def _sharing(self, step: Step) -> int:
        """The units with which a backward step shares all that it has of them."""
        bits = self.of.get(step.slice_tag) or self.of.get(step.mesh, 0)
        for v in step.reads:
            bits &= self.own.get((step.mesh, v), bits)
        return bits

    def _settle(self, step: Step, units: int, near: int, left: dict[int, int]) -> None:
        """Takes the one unit of `units`, else the one of them in `near`."""
        if units.bit_count() > 1 and near:
            units &= near
        if units.bit_count() == 1:
            self.units[id(step)] = units
        elif step.mesh in self.of:
            left[id(step)] = units

    def _whole(self, unit: int) -> int:
        """All units of a unit's microbatch."""
        first = (unit.bit_length() - 1) // self.width * self.width
        return ((1 << self.width) - 1) << first


def _is_backward(step: Step) -> bool:
    return step.kind is StepKind.PLACED and step.derivatives > 0


def _union(reads: Iterable[Any], sets: Mapping[Any, int]) -> int:
    bits = 0
    for v in reads:
        bits |= sets.get(v, 0)
    return bits


def _numbers(bits: int) -> Iterable[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1
