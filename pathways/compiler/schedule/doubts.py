"""Finds what makes it doubtful which calls of a program are microbatches of its pipeline.

A call without a label runs when its inputs are there, so a call of a stage that is taken for something else would break
the schedule silently (SCHED-1). `labels` refuses the program for each doubt.

Pure.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from pathways import _jaxlib
from pathways.compiler.flatten import Step, StepKind
from pathways.compiler.ir import MeshSpec, Phase
from pathways.compiler.schedule.roles import BACK, Roles, describe, is_forward

_ADVICE = (
    "Expected each microbatch to be computed in the same way, from its own part of the batch. If these calls are parts "
    "of one microbatch, give each of them a function with its own name=; else give no schedule"
)


class Doubt(Exception):
    """Why it cannot be told which calls are microbatches."""


def check_calls(forward: Sequence[Step], members: set[int], steps: Sequence[Step], roles: Roles) -> None:
    """Finds calls outside the pipeline that look like parts of it. `members` has the ids of the calls of the pipeline,
    `forward` also those of other calls that may be of it.

    Raises:
        Doubt: such a call.
    """
    inside: dict[Any, Step] = {}
    outside: dict[Any, list[Step]] = {}
    for step in forward:
        if id(step) in members:
            inside.setdefault(step.slice_tag, step)
        else:
            outside.setdefault(step.slice_tag, []).append(step)
    for tag, calls in outside.items():
        if tag in inside:
            raise Doubt(
                f"{describe(calls[0])} is called {roles.calls[tag] - len(calls)} times in calls that look alike, and "
                f"{len(calls)} more on values that are made in another way: "
                f"{roles.difference(inside[tag], calls[0])}. {_ADVICE}"
            )
    for step in steps:
        if is_forward(step) and roles.of[id(step)] == BACK and step.slice_tag in inside:
            raise Doubt(
                f"{describe(step)} is called again with a result of a backward step; expected one pipeline, "
                "forward and then backward. Make a program of each step"
            )
    differentiated = {step.slice_tag for step in steps if step.kind is StepKind.PLACED and step.derivatives}
    for tag, calls in outside.items():
        if len(calls) > 1 and tag in differentiated and not all(map(roles.reads_arguments_only, calls)):
            raise _not_alike(calls[0], calls[1], roles)


def check_one_microbatch(steps: Sequence[Step], roles: Roles) -> None:
    """Finds calls of a program with one microbatch that may be several microbatches which do not look alike.

    If a function is called more than once, its calls must be layers, one behind the other: each of them is before or
    behind every other call that reads a result. Else calls could overlap, and a schedule would say how.

    Raises:
        Doubt: calls that could overlap, or that have the same weights.
    """
    calls: list[Step] = []
    before: list[int] = []  # per call: the calls whose results it reads, at any distance, as bits
    behind: dict[Any, int] = {}
    for step in steps:
        if roles.of[id(step)] == BACK:
            continue
        bits = 0
        for v in step.reads:
            bits |= behind.get(v, 0)
        if is_forward(step) and id(step) not in roles.prepared:
            before.append(bits)
            bits |= 1 << len(calls)
            calls.append(step)
        if bits:
            behind.update((v, bits) for v in step.outputs)
    after = [0] * len(calls)
    for n in reversed(range(len(calls))):
        after[n] |= 1 << n
        for earlier in range(n):
            if before[n] >> earlier & 1:
                after[earlier] |= after[n]
    counts = collections.Counter(step.slice_tag for step in calls)
    first: dict[tuple[Any, int, Any], Step] = {}
    for n, step in enumerate(calls):
        if counts[step.slice_tag] == 1:
            continue
        for position, v in enumerate(step.inputs):
            if isinstance(v, _jaxlib.Literal) or v in roles.made:
                continue
            other = first.setdefault((step.slice_tag, position, v), step)
            if other is not step:
                raise _not_alike(other, step, roles)
        for k, other in enumerate(calls):
            if before[n] >> k & 1 or after[n] >> k & 1:
                continue
            if step.slice_tag == other.slice_tag:
                if before[n] or before[k] or not (after[n] & after[k]):
                    raise _not_alike(other, step, roles)
            elif before[n] and before[k]:
                same = next(c for c in calls if c is not step and c.slice_tag == step.slice_tag)
                raise _not_alike(same, step, roles)


def check_microbatches(steps: Sequence[Step], roles: Roles, microbatches: int) -> None:
    """Finds microbatches that may be several: their calls of one function have nothing to do with each other.

    It also finds a call that prepares for some microbatches only. The forward steps have their labels.

    Raises:
        Doubt: such a call.
    """
    parts = _Parts()
    seen: dict[tuple[int, int], Step] = {}
    for step in steps:
        if roles.of[id(step)] == BACK:
            continue
        # Losses are numbers. They are added over microbatches, too, so they tie nothing together.
        tied = [v for v in step.reads if v in parts.of and (step.kind is StepKind.PLACED or v.aval.size > 1)]
        numbers = {parts.microbatch[v] for v in tied}
        if step.label is not None:
            numbers = {step.label.microbatch}
        if len(numbers) == 1:
            parts.join(tied, step.outputs, next(iter(numbers)))
    for step in steps:
        if step.label is None or not step.outputs:
            continue
        key = (step.label.microbatch, roles.names[id(step)])
        other = seen.setdefault(key, step)
        if parts.root(other.outputs[0]) != parts.root(step.outputs[0]):
            raise Doubt(
                f"{describe(step)} is called more than once for microbatch {step.label.microbatch} of {microbatches}, "
                "and no later call reads the results of both: perhaps they are microbatches of their own. " + _ADVICE
            )
    reach: dict[Any, int] = collections.defaultdict(int)
    for step in reversed(steps):
        if roles.of[id(step)] == BACK:
            continue
        bits = 0 if step.label is None else 1 << step.label.microbatch
        for v in step.outputs:
            bits |= reach[v]
        for v in step.reads:
            reach[v] |= bits
        some = bits not in (0, (1 << microbatches) - 1)
        if is_forward(step) and step.label is None and some and roles.calls[step.slice_tag] > 1:
            readers = [n for n in range(microbatches) if bits >> n & 1]
            raise Doubt(
                f"{describe(step)} is called {roles.calls[step.slice_tag]} times, and microbatches {readers} of "
                f"{microbatches} read a result of one of these calls. {_ADVICE}"
            )


def check_plain_stages(
    steps: Sequence[Step],
    stages: Mapping[MeshSpec, int],
    feeds: set[int],
    slices: Mapping[int, MeshSpec],
    pipeline: int = 0,
) -> None:
    """Finds plain operations of the pipeline on a slice that has no placed function of it. All labels are set.

    They would be a stage that follows no schedule. Operations behind which there is no placed call of the pipeline,
    such as metrics, may run anywhere. `slices` has the slices of plain operations, by the step's id; `pipeline` is the
    number of the pipeline.

    Raises:
        Doubt: such an operation.
    """
    needed: set[Any] = set()
    for step in reversed(steps):
        mine = step.label is not None and step.label.pipeline == pipeline
        if (step.kind is StepKind.PLACED and mine) or not needed.isdisjoint(step.outputs):
            needed.update(step.reads)
            mesh = slices.get(id(step))
            if mesh is None or mesh in stages or step.label is None or not mine or id(step) in feeds:
                continue
            if step.kind is StepKind.PLAIN and step.label.phase is Phase.FORWARD:
                raise Doubt(
                    f"microbatch {step.label.microbatch} has the operation {step.eqn.primitive.name} on slice "
                    f"{mesh.name!r}, which calls no placed function for each microbatch; expected each stage to be "
                    f"made of placed functions. Put the operations on slice {mesh.name!r} into a placed function"
                )


class _Parts:
    """Sets of variables of one microbatch that calls have tied together."""

    def __init__(self) -> None:
        self.of: dict[Any, Any] = {}
        self.microbatch: dict[Any, int] = {}

    def join(self, tied: Sequence[Any], outputs: Sequence[Any], microbatch: int) -> None:
        for v in outputs:
            self.of[v] = v
            self.microbatch[v] = microbatch
        for v in (*tied, *outputs[1:]):
            self.of[self.root(v)] = self.root(outputs[0])

    def root(self, v: Any) -> Any:
        while self.of[v] is not v:
            self.of[v] = v = self.of[self.of[v]]
        return v


def _not_alike(one: Step, other: Step, roles: Roles) -> Doubt:
    return Doubt(
        f"{describe(other)} is called {roles.calls[other.slice_tag]} times, in calls that do not look alike: "
        f"{roles.difference(one, other)}. {_ADVICE}"
    )
