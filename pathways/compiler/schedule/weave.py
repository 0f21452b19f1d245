"""Makes one order of all steps: the dataflow's, the schedule's on each slice, and by modelled time where both are free.

The order is topological, so every order that comes out here is safe for the runtime: each wait of a host is for
something earlier in it (ORD-2, GANG-2). What is earlier in modelled time is earlier in the order, because a host sends
values in this order, and the send of a slow stage must not stand before a fast stage's.

Pure.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pathways import _jaxlib, errors
from pathways.compiler.flatten import Step, StepKind
from pathways.compiler.ir import MeshSpec, Phase
from pathways.compiler.orders import Unit
from pathways.compiler.schedule.doubts import describe
from pathways.compiler.schedule.labels import Pipeline

#: How long a unit takes in the model; a backward step that makes weight gradients, too, takes the sum. Only what orders
#: steps that the schedule leaves free depends on it.
_LENGTHS = {Phase.FORWARD: 1.0, Phase.BACKWARD: 1.0, Phase.WEIGHTS: 1.0}

#: From how many steps a shortest cycle is searched.
_SEARCHED = 64

Edges = list[dict[int, str]]  # per step: the later steps, each with the reason
_Units = dict[tuple[int, str, Unit], list[int]]  # the steps of each unit, by pipeline and slice
_Sequence = list[list[int]]


def weave(steps: Sequence[Step], pipelines: Sequence[Pipeline], slices: Mapping[int, MeshSpec]) -> list[Step]:
    """The steps in an order that follows `sequences[stage]` on each slice of each pipeline (SCHED-1).

    The calls of a pipeline without a schedule stay in the order of the text on each slice. Pipelines that the text
    calls one after the other, each as a whole, have their turns on a slice one after the other: else all of them would
    keep their activations at the same time.

    `slices` has the slices of plain steps, by the step's id.

    Raises:
        ScheduleError: the dataflow contradicts the sequences; the message has the cycle.
    """
    units: _Units = {}
    for number, step in enumerate(steps):
        if step.kind is StepKind.PLACED and step.label is not None:
            assert step.mesh is not None
            unit = Unit(step.label.phase, step.label.microbatch, step.label.chunk)
            units.setdefault((step.label.pipeline, step.mesh.name, unit), []).append(number)
    edges = _dataflow(steps)
    for sequence in _sequences(pipelines, units):
        for earlier, later in itertools.pairwise(sequence):
            for a in earlier:
                for b in later:
                    edges[a].setdefault(b, "by the schedule")
    lengths = [0.0] * len(steps)
    for (number, name, unit), members in units.items():
        length = _LENGTHS[unit.phase]
        if unit.phase is Phase.BACKWARD and (number, name, unit._replace(phase=Phase.WEIGHTS)) not in units:
            length += _LENGTHS[Phase.WEIGHTS]
        for n in members:
            lengths[n] = length / len(members)
    starts = _starts(edges, lengths)
    if starts is None:
        titles = " and ".join(pipeline.title for pipeline in pipelines if pipeline.ordered)
        raise errors.ScheduleError(f"{titles} cannot be followed: {_circle(steps, edges)}{_advice(steps)}")
    first = {key: min(starts[n] for n in members) for key, members in units.items()}
    _delay(steps, pipelines, first, slices, edges, starts)
    # At one time, what takes no time goes first: it frees memory, and makes what a transfer waits for.
    return [steps[n] for n in _in_order(edges, [(starts[n], lengths[n] > 0, n) for n in range(len(steps))])]


def in_turn(steps: Sequence[Step], pipeline: int) -> list[Step]:
    """The steps, with the backward steps of a pipeline without a schedule in the order of its microbatches.

    JAX writes the backward steps of a loop the other way round. So without a schedule, gradients would be added in
    another order than under each schedule, and have other bits.
    """
    turns: list[int | None] = []  # the microbatch of a backward step, and of what reads those of one microbatch only
    known: dict[Any, int] = {}
    for step in steps:
        label, turn = step.label, None
        if label is None:
            behind = {known[v] for v in step.reads if v in known}
            turn = behind.pop() if len(behind) == 1 else None
        elif label.pipeline == pipeline and label.phase is Phase.BACKWARD:
            turn = label.microbatch
        turns.append(turn)
        if turn is not None:
            known.update((v, turn) for v in step.outputs)
    order = list(dict.fromkeys(turn for turn in turns if turn is not None))
    if order == sorted(order):
        return list(steps)
    first = next(n for n, turn in enumerate(turns) if turn is not None)
    keys = [(n, 0, 0) if turn is None else (first, turn, n) for n, turn in enumerate(turns)]
    return [steps[n] for n in _in_order(_dataflow(steps), keys)]


def _sequences(pipelines: Sequence[Pipeline], units: Mapping[tuple[int, str, Unit], list[int]]) -> list[_Sequence]:
    """What follows one another on a slice: the steps of each unit.

    Raises:
        ScheduleError: the order of a stage lacks a unit.
    """
    rows: dict[str, list[_Sequence]] = {}
    for pipeline in pipelines:
        for mesh, stage in pipeline.stages.items():
            mine = {key[2] for key in units if key[:2] == (pipeline.number, mesh.name)}
            order = [unit for unit in pipeline.sequences[stage] if unit in mine]
            if len(order) != len(mine) or set(order) != mine:
                raise errors.ScheduleError(
                    f"{pipeline.title}: the order of stage {stage} has not each step of slice {mesh.name!r} once; it "
                    f"misses {[str(unit) for unit in mine - set(order)]} and has {len(order)} of {len(mine)} steps"
                )
            present = [units[pipeline.number, mesh.name, unit] for unit in order]
            if not pipeline.ordered:
                present = [[n] for n in sorted(itertools.chain.from_iterable(present))]
            rows.setdefault(mesh.name, []).append(present)
    spans: dict[int, list[int]] = {}  # the places of each pipeline's steps in the text
    for (number, _, _), members in units.items():
        spans.setdefault(number, []).extend(members)
    if all(max(spans[a]) < min(spans[b]) for a, b in itertools.pairwise(sorted(spans, key=lambda n: min(spans[n])))):
        return [list(itertools.chain.from_iterable(row)) for row in rows.values()]
    return [sequence for row in rows.values() for sequence in row]


def _advice(steps: Sequence[Step]) -> str:
    """What to do if a program calls one `pw.pipeline` several times through one `jax.jit`: all calls share a trace."""
    calls = collections.Counter(
        step.scope
        for step in steps
        if step.kind is StepKind.PLACED
        and not step.derivatives
        and step.scope is not None
        and step.scope.stage is not None
    )
    if max(calls.values(), default=0) < 2:
        return ""
    return ". If it is called several times through one jax.jit, call it without jax.jit: each call is a pipeline then"


def _delay(
    steps: Sequence[Step],
    pipelines: Sequence[Pipeline],
    units: Mapping[tuple[int, str, Unit], float],
    slices: Mapping[int, MeshSpec],
    edges: Edges,
    starts: list[float],
) -> None:
    """Sets the start of steps that take no time to when they are needed. `units` has the starts of units.

    A feed starts with its first reader. A plain step of a microbatch starts no earlier than the unit of its microbatch
    on its slice, or its first reader elsewhere: what it reads comes from another slice, and whatever stands behind it
    in the queue of its device waits for that, too.
    """
    feeds = set().union(*(pipeline.feeds for pipeline in pipelines))
    count = {pipeline.number: pipeline.chunks for pipeline in pipelines}
    for n in reversed(_in_order(edges, range(len(steps)))):
        step = steps[n]
        needed = min((starts[reader] for reader in edges[n]), default=starts[n])
        if id(step) in feeds:
            starts[n] = needed
        elif step.kind is StepKind.PLAIN and step.label is not None and id(step) in slices:
            number, name, chunks = step.label.pipeline, slices[id(step)].name, range(count[step.label.pipeline])
            mine = (Unit(step.label.phase, step.label.microbatch, chunk) for chunk in chunks)
            turns = (units.get((number, name, unit), starts[n]) for unit in mine)
            turn = min((start for start in turns if start >= starts[n]), default=starts[n])
            starts[n] = max(starts[n], min(turn, needed))


def _dataflow(steps: Sequence[Step]) -> Edges:
    """From each step to those that read its results, and from each ordered callback to the next.

    Copies of one callback, of unrolled iterations inside a loop, are in order, too (`callback_chains`).
    """
    edges: Edges = [{} for _ in steps]
    made = {v: n for n, step in enumerate(steps) for v in step.gives}
    calling: int | None = None
    for n, step in enumerate(steps):
        for v in step.needs:
            if v in made:
                edges[made[v]][n] = "by its data"
        if step.calls is _jaxlib.CallsBack.IN_ORDER:
            if calling is not None:
                edges[calling].setdefault(n, "by the order of their callbacks")
            calling = n
    return edges


def _in_order(edges: Edges, keys: Sequence[Any]) -> list[int]:
    """A topological order; of the steps that are free, the one with the smallest key comes first. Shorter if there is
    a cycle.
    """
    waits = _waits(edges)
    heap = [(keys[n], n) for n, count in enumerate(waits) if not count]
    heapq.heapify(heap)
    order = []
    while heap:
        _, n = heapq.heappop(heap)
        order.append(n)
        for later in edges[n]:
            waits[later] -= 1
            if not waits[later]:
                heapq.heappush(heap, (keys[later], later))
    return order


def _waits(edges: Edges) -> list[int]:
    waits = [0] * len(edges)
    for after in edges:
        for n in after:
            waits[n] += 1
    return waits


def _starts(edges: Edges, lengths: Sequence[float]) -> list[float] | None:
    """When each step starts at the earliest, if transfers take no time; None if there is a cycle."""
    starts = [0.0] * len(edges)
    order = _in_order(edges, range(len(edges)))
    if len(order) < len(edges):
        return None
    for n in order:
        for later in edges[n]:
            starts[later] = max(starts[later], starts[n] + lengths[n])
    return starts


def _circle(steps: Sequence[Step], edges: Edges) -> str:
    """The shortest cycle, as text."""
    left = set(range(len(steps))) - set(_in_order(edges, range(len(steps))))
    while dead := {n for n in left if left.isdisjoint(edges[n])}:  # behind a cycle, not on one
        left -= dead
    shortest: list[int] = []
    for first in sorted(n for n in left if "by the schedule" in edges[n].values())[:_SEARCHED]:
        came: dict[int, int] = {}
        front: Iterable[int] = [first]
        while front and first not in came:
            reached = []
            for n in front:
                for later in edges[n]:
                    if later in left and later not in came:
                        came[later] = n
                        reached.append(later)
            front = reached
        if first in came:
            path = [first, came[first]]
            while path[-1] != first:
                path.append(came[path[-1]])
            if not shortest or len(path) < len(shortest):
                shortest = path[::-1]
    return _path_text(steps, edges, shortest)


def _path_text(steps: Sequence[Step], edges: Sequence[Mapping[int, str]], path: Sequence[int]) -> str:
    text = describe(steps[path[0]])
    for n, (a, b) in enumerate(itertools.pairwise(path)):
        verb = ", that before" if n else " comes before"
        text += f"{verb} {describe(steps[b])} {edges[a][b]}"
    return text
