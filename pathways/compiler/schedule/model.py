"""A model of time: when each step of a pipeline starts and ends, and how long the devices have no work meanwhile.

A task is one computation. It takes its rows (devices that work alike) for its length. Each row does its tasks in the
order in which they are listed, as the queue of a device does (ORD-1). A task starts when its rows are free, and when
what it reads has come. So the model has no choice: an order and lengths give all times.

There are two ways to tasks: `tasks_of` takes the sequences of a schedule, and knows the dataflow of a pipeline;
`tasks_of_program` takes a compiled program, and reads the dataflow off its nodes.

`search` compares schedules with it, and `pathways/api/pipelines/schedule_plot.py` draws what it says. Lengths have
any unit; all times have the same one. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pathways.compiler.ir import LogicalProgram, NodeKind, Phase
from pathways.compiler.lengths import Lengths, per_stage


@dataclasses.dataclass(frozen=True)
class Task:
    """One computation. `after`: the places, in the list of tasks, of those whose results it reads, all before its own,
    and how long each result is on its way.
    """

    rows: tuple[int, ...]
    length: float
    after: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The times of tasks: `starts[n]` and `ends[n]` are those of task n."""

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(self.ends, default=0.0) - min(self.starts, default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the makespan, from 0 to 1, in which a row has no work, on average over the rows with tasks."""
        rows = {row for task in self.tasks for row in task.rows}
        whole = len(rows) * self.makespan
        return 1 - sum(task.length * len(task.rows) for task in self.tasks) / whole if whole else 0.0


def run(tasks: Sequence[Task]) -> Timeline:
    """The times of tasks when each one starts as early as it can."""
    free: dict[int, float] = {}
    starts: list[float] = []
    ends: list[float] = []
    for task in tasks:
        start = max((free.get(row, 0.0) for row in task.rows), default=0.0)
        for before, way in task.after:
            start = max(start, ends[before] + way)
        starts.append(start)
        ends.append(start + task.length)
        for row in task.rows:
            free[row] = ends[-1]
    return Timeline(tuple(tasks), tuple(starts), tuple(ends))


def tasks_of(sequences: Sequence[Sequence[Any]], lengths: Sequence[Lengths]) -> list[Task] | None:
    """The tasks of a pipeline whose stages follow these sequences; None: a stage would wait for itself.

    Args:
        sequences: for each slice of the pipeline, its units in order: (phase, microbatch), or (phase, microbatch,
            chunk) if the microbatches visit the slices in turn several times.
        lengths: one item per chunk and slice; chunk c of slice s has item c * len(sequences) + s.
    """
    slices = len(sequences)
    divided = {
        (stage, unit[1], *unit[2:])
        for stage, each in enumerate(sequences)
        for unit in each
        if unit[0].name == "WEIGHTS"
    }
    places: dict[tuple[str, int, int], int] = {}  # of the tasks so far: by phase, microbatch and stage of all chunks
    tasks: list[Task] = []
    at = [0] * slices
    known = {(unit[0].name, unit[1], _stage(unit, s, slices)) for s, each in enumerate(sequences) for unit in each}
    progress = True
    while progress:
        progress = False
        for s, sequence in enumerate(sequences):
            while at[s] < len(sequence):
                unit = sequence[at[s]]
                stage = _stage(unit, s, slices)
                needs = [need for need in _needs(unit[0].name, unit[1], stage) if need in known]
                if not all(need in places for need in needs):
                    break
                after = tuple(
                    (places[need], lengths[need[2]].transfer if need[2] % slices != s else 0.0) for need in needs
                )
                places[unit[0].name, unit[1], stage] = len(tasks)
                is_whole = (s, unit[1], *unit[2:]) not in divided
                tasks.append(Task((s,), _length(unit[0].name, lengths[stage], is_whole), after))
                at[s] += 1
                progress = True
    return tasks if len(tasks) == sum(map(len, sequences)) else None


def _stage(unit: Sequence[Any], slice_: int, slices: int) -> int:
    return (unit[2] if len(unit) > 2 else 0) * slices + slice_


def _needs(phase: str, microbatch: int, stage: int) -> list[tuple[str, int, int]]:
    """What a unit reads, if the pipeline has it."""
    if phase == "FORWARD":
        return [("FORWARD", microbatch, stage - 1)]
    if phase == "BACKWARD":
        return [("FORWARD", microbatch, stage), ("BACKWARD", microbatch, stage + 1)]
    return [("BACKWARD", microbatch, stage)]


def _length(phase: str, lengths: Lengths, is_whole: bool) -> float:
    if phase == "FORWARD":
        return lengths.forward
    if phase == "BACKWARD":
        return lengths.backward + (lengths.weights if is_whole else 0.0)
    return lengths.weights


def in_flight(sequence: Sequence[Sequence[Any]]) -> int:
    """The most microbatches (of chunks, if there are several) whose activations a slice keeps at one time: those with a
    forward step done, or being done, and a later step to come.
    """
    last = {tuple(unit[1:]): n for n, unit in enumerate(sequence)}
    live: set[tuple[int, ...]] = set()
    most = 0
    for n, unit in enumerate(sequence):
        key = tuple(unit[1:])
        live.add(key)
        most = max(most, len(live))
        if last[key] == n:
            live.remove(key)
    return most


def stages_in_flight(program: LogicalProgram) -> list[list[int]]:
    """For each pipeline of a program, what `in_flight` says of its stages; of several slices in one stage, the most."""
    sequences: dict[tuple[int, int, int], dict[tuple[Phase, int, int], None]] = {}
    for node in program.nodes:
        if node.label is not None and node.kind is NodeKind.CALL and node.origin:
            key = (node.label.pipeline, node.label.stage, program.computations[node.computation].mesh)
            sequences.setdefault(key, {})[node.label.phase, node.label.microbatch, node.label.chunk] = None
    found: list[list[int]] = [[] for _ in program.pipelines]
    for (pipeline, stage, _), sequence in sequences.items():
        most = found[pipeline]
        most += [0] * (stage + 1 - len(most))
        most[stage] = max(most[stage], in_flight(list(sequence)))
    return found


def tasks_of_program(
    program: LogicalProgram,
    rows: Sequence[Sequence[int]],
    length: Callable[[int], float],
    transfer: Callable[[int], float],
    keep: Callable[[int], bool] = lambda node: True,
) -> tuple[list[Task], list[int], list[tuple[int, int]]]:
    """The tasks of a program's calls, in the order of its nodes; those of all cases of a branch.

    Args:
        program: `rows[m]` are the rows on which calls of its mesh m run.
        rows: see `program`.
        length: how long the call with this number among the nodes takes.
        transfer: how long the transfer with this number takes.
        keep: whether a call counts; other calls take no time and no row.

    Returns:
        The tasks; the node of each; and for each transfer of what one of them makes, its node and the task's place.
    """
    behind: dict[int, dict[int, float]] = {}  # by value: the tasks that it comes from, and how long it is on its way
    tasks: list[Task] = []
    nodes: list[int] = []
    sent: list[tuple[int, int]] = []
    for number, node in enumerate(program.nodes):
        if node.kind is NodeKind.TRANSFER:
            sources = behind.get(node.inputs[0], {})
            behind[node.outputs[0]] = {place: way + transfer(number) for place, way in sources.items()}
            sent += [(number, place) for place in sources]
            continue
        after: dict[int, float] = {}
        decides = [program.predicates[node.predicate].value] if node.predicate >= 0 else []
        for value in (*node.inputs, *decides):
            for place, way in behind.get(value, {}).items():
                after[place] = max(way, after.get(place, 0.0))
        if node.kind is NodeKind.CALL and keep(number):
            mesh = program.computations[node.computation].mesh
            tasks.append(Task(tuple(rows[mesh]), length(number), tuple(after.items())))
            nodes.append(number)
            after = {len(tasks) - 1: 0.0}
        behind.update(dict.fromkeys(node.outputs, after))
    return tasks, nodes, sent


def unit_lengths(program: LogicalProgram, lengths: Sequence[Sequence[Lengths]]) -> dict[int, float]:
    """The length of each call of a program with labels, from those of its stages.

    The placed calls of a unit share its length equally. Sums of gradients, and calls without a label, take no time.
    `lengths` has for each pipeline of the program one item for all stages, or one for each chunk and slice.

    Raises:
        OptionError: `lengths` is for another number of stages.
    """
    units: dict[tuple[Any, ...], list[int]] = {}
    for number, node in enumerate(program.nodes):
        label = node.label
        if label is not None and node.kind is NodeKind.CALL and node.origin and label.phase is not Phase.SUM:
            mesh = program.computations[node.computation].mesh
            units.setdefault((label.pipeline, mesh, label.chunk, label.microbatch, label.phase), []).append(number)
    sizes = sizes_of(program)
    each = [
        per_stage(mine, depth * chunks, "lengths" if len(lengths) == 1 else f"lengths of {info.title}")
        for mine, (depth, chunks), info in zip(lengths, sizes, program.pipelines, strict=True)
    ]
    divided = {key[:4] for key in units if key[4] is Phase.WEIGHTS}
    found: dict[int, float] = {}
    for (pipeline, mesh, chunk, microbatch, phase), members in units.items():
        label = program.nodes[members[0]].label
        assert label is not None
        is_whole = (pipeline, mesh, chunk, microbatch) not in divided
        whole = _length(phase.name, each[pipeline][chunk * sizes[pipeline][0] + label.stage], is_whole)
        found.update((number, whole / len(members)) for number in members)
    return found


def sizes_of(program: LogicalProgram) -> list[tuple[int, int]]:
    """For each pipeline of a program, how many stages it has, and how many chunks each of them has."""
    sizes = [(1, 1)] * len(program.pipelines)
    for node in program.nodes:
        if node.label is not None:
            depth, chunks = sizes[node.label.pipeline]
            sizes[node.label.pipeline] = max(depth, node.label.stage + 1), max(chunks, node.label.chunk + 1)
    return sizes
