"""`program.schedule_plot()`: what each device does when, before a run from the plan, or after it from a trace.

Before a run, `pathways/compiler/schedule/model.py` gives the times. After it, the trace's computations are joined with
the program's nodes by their names, and the labels of the nodes say what each one was.
`pathways/api/pipelines/schedule_drawing.py` draws both as text and as SVG.
"""

from __future__ import annotations

import collections
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pathways import errors
from pathways.api.pipelines import schedule_drawing
from pathways.api.pipelines.schedule_data import Arrow, PlotData, Row, Span
from pathways.cluster import trace_file
from pathways.cluster.trace_timeline import Computation, Timeline
from pathways.compiler.ir import Label, LogicalProgram, Node, NodeKind, Phase
from pathways.compiler.lengths import Lengths
from pathways.compiler.schedule import model
from pathways.plan.binding import BoundProgram

if TYPE_CHECKING:
    from pathways.api.programs.lowered import Lowered

#: Lengths of a program of which nothing is known: those of a matrix product.
_ASSUMED = Lengths(1.0, 2.0)
_ASSUMED_DIVIDED = Lengths(1.0, 1.0, 1.0)


class HasPath(Protocol):
    """A `pw.trace`."""

    @property
    def path(self) -> str | os.PathLike[str]:
        """The file that it has written."""


class SchedulePlot(PlotData):
    """What each device does when. Made by `Program.schedule_plot`; `print` shows it, and notebooks draw it.

    `rows`, `transfers`, `bubble`, `bound` and `lengths` are those of `PlotData`.
    """

    def text(self, width: int = 80) -> str:
        """The plot as text: a line per row, a letter and a number per computation.

        Args:
            width: columns of the terminal, at least 40.
        """
        return schedule_drawing.text(self, width)

    def svg(self) -> str:
        """The plot as an SVG picture."""
        return schedule_drawing.svg(self)

    def __str__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()


def make(
    lowered: Lowered,
    lengths: Sequence[Sequence[Lengths]] = (),
    measured: str | os.PathLike[str] | HasPath | None = None,
    path: str | os.PathLike[str] | None = None,
) -> SchedulePlot:
    """The plot of a lowered program; see `Program.schedule_plot`.

    `lengths` has an item for each of its pipelines, () if not known; one item if it has no pipeline.
    """
    if path is not None and not str(path).lower().endswith(".svg"):
        raise errors.OptionError(f"schedule_plot writes SVG: expected path= like 'schedule.svg', got {path!r}")
    plot = from_plan(lowered, lengths) if measured is None else from_trace(lowered.bound, measured)
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(plot.svg())
    return plot


def from_plan(lowered: Lowered, lengths: Sequence[Sequence[Lengths]] = ()) -> SchedulePlot:
    """Before a run: the times that the model gives. If a pipeline lacks lengths, those of the others do not count."""
    bound = lowered.bound
    program = bound.program
    unit, source = "s", "plan, from given lengths"
    known: Mapping[int, float]
    is_given = bool(lengths) and all(lengths)
    if is_given:
        known = _given(program, lengths)
    else:
        found = lowered.compile().flops()
        known = {n: found[node.computation] for n, node in enumerate(program.nodes) if node.kind is NodeKind.CALL}
        unit, source = "flops", "plan, from the flops of its computations"
        if not any(known[n] for n in [n for n in known if _is_step(program.nodes[n])] or known):
            is_divided = any(node.label and node.label.phase is Phase.WEIGHTS for node in program.nodes)
            assumed = [_ASSUMED_DIVIDED if is_divided else _ASSUMED]
            known = _given(program, [assumed] * max(len(program.pipelines), 1))
            unit, source = "forward steps", "plan; forward = 1, backward = " + ("1, weights = 1" if is_divided else "2")

    def on_its_way(node: int) -> float:
        maker = makers.get(program.nodes[node].inputs[0])
        if maker is None or maker.label is None or not is_given:
            return 0.0
        mine = lengths[maker.label.pipeline]
        return mine[min(_stage(sizes, maker.label), len(mine) - 1)].transfer

    makers = _makers(program)
    sizes = model.sizes_of(program)
    devices = bound.bindings
    tasks, nodes, sent = model.tasks_of_program(program, devices, lambda n: known.get(n, 0.0), on_its_way)
    times = model.run(tasks)
    first = min(times.starts, default=0.0)
    spans = {
        node: _span(program.nodes[node], start - first, end - first)
        for node, start, end in zip(nodes, times.starts, times.ends, strict=True)
    }
    groups = _groups(bound)
    rows = []
    for meshes, members in groups.items():
        mine = [spans[n] for n in nodes if program.computations[program.nodes[n].computation].mesh in meshes]
        rows.append(_row(bound, members, mine))
    place = {mesh: n for n, meshes in enumerate(groups) for mesh in sorted(meshes, reverse=True)}
    arrows = []
    for number, task in sent:
        node = program.nodes[number]
        source_row, target_row = (place[program.values[v].mesh] for v in (node.inputs[0], node.outputs[0]))
        if source_row != target_row:
            end = times.ends[task] - first
            arrows.append(Arrow(node.name, source_row, target_row, end, end + on_its_way(number)))
    kept = _lengths(program, {(node, 0): known.get(node, 0.0) for node in nodes})
    return SchedulePlot(
        program.name,
        program.schedule,
        source,
        unit,
        tuple(rows),
        tuple(arrows),
        _bubble(rows),
        _bound(bound, known),
        tuple(lengths[0]) if is_given and kept else kept,
    )


def from_trace(bound: BoundProgram, measured: str | os.PathLike[str] | HasPath) -> SchedulePlot:
    """After a run: the last whole run of the program in a trace."""
    program = bound.program
    path: Any = measured if isinstance(measured, str | os.PathLike) else getattr(measured, "path", None)
    if path is None:
        raise errors.OptionError(f"measured: expected a file of pw.trace, or a pw.trace, got {measured!r:.100}")
    timeline = trace_file.read(path)
    nodes = {node.name: node for node in program.nodes if node.kind is NodeKind.CALL}
    makers = _makers(program)
    mine: dict[int, list[Computation]] = collections.defaultdict(list)  # by the run's place in the order
    for call in timeline.computations:
        if call.program == program.name:
            mine[call.order].append(call)
    always = {name for name, node in nodes.items() if node.predicate < 0}  # the others are in branches
    whole = [
        calls
        for _, calls in sorted(mine.items())
        if all(call.is_over and not call.has_failed for call in calls)
        and always <= {call.name for call in calls} <= nodes.keys()
    ]
    if not whole:
        what = f"no run of program {program.name!r}; it has {_programs_of(timeline)}"
        if mine:
            what = (
                f"no whole run of program {program.name!r} for these arguments and this schedule, only {len(mine)} "
                "others; wait for the results within the trace, and give the arguments of that call"
            )
        raise errors.TraceFileError(f"the trace {os.fspath(path)} has {what}")
    calls = whole[-1]
    first = min(call.start_ns for call in calls)
    by_device: dict[int, list[Span]] = collections.defaultdict(list)
    durations: dict[tuple[str, int], float] = {}  # by call and device, in seconds
    ends: dict[tuple[str, int], float] = {}
    for call in calls:
        start, end = ((at - first) / 1e9 for at in (call.start_ns, call.end_ns))
        for device in call.devices:
            by_device[device].append(_span(nodes[call.name], start, end))
            durations[call.name, device], ends[call.name, device] = end - start, end
    # The devices of one host that lie in the same slices do the same at the same times.
    each = bound.devices_per_host
    groups: dict[tuple[Any, int], list[int]] = {}
    for meshes, devices in _groups(bound).items():
        for device in devices:
            groups.setdefault((meshes, device // each), []).append(device)
    rows = [_row(bound, devices, by_device[devices[0]]) for devices in groups.values()]
    place = {device: n for n, devices in enumerate(groups.values()) for device in devices}
    made = {
        (node.name, device): ends[maker.name, device]
        for node in program.nodes
        if node.kind is NodeKind.TRANSFER and (maker := makers.get(node.inputs[0])) is not None
        for device in bound.bindings[program.values[node.inputs[0]].mesh]
        if (maker.name, device) in ends
    }
    arrows = {
        (transfer.name, place[source], place[target]): Arrow(
            transfer.name,
            place[source],
            place[target],
            # A host may launch a transfer within it before its source is computed.
            max((transfer.start_ns - first) / 1e9, min(made.get((transfer.name, source), 0.0), end)),
            end,
        )
        for transfer in timeline.transfers
        if transfer.order == calls[0].order
        for end in [(transfer.end_ns - first) / 1e9]
        for source in transfer.devices
        for target in transfer.peer_devices
        if source in place and target in place and place[source] != place[target]
    }
    numbers = {node.name: n for n, node in enumerate(program.nodes)}
    lengths = _lengths(
        program,
        {
            (numbers[call.name], device): call.usual_ns / 1e9
            if call.is_estimated and call.usual_ns
            else durations[call.name, device]
            for call in calls
            for device in call.devices
        },
    )
    longest: dict[int, float] = {}
    for (name, _), length in durations.items():
        longest[numbers[name]] = max(length, longest.get(numbers[name], 0.0))
    guessed = sum(len(call.devices) for call in calls if call.is_estimated)
    source = f"measured, run {len(whole)} of {len(whole)} in {os.path.basename(os.fspath(path))}"
    if guessed:
        source += f"; {guessed} of {len(durations)} ends are estimated"
    return SchedulePlot(
        program.name,
        program.schedule,
        source,
        "s",
        tuple(rows),
        tuple(arrows.values()),
        _bubble(rows),
        _bound(bound, longest),
        lengths,
    )


def _programs_of(timeline: Timeline) -> str:
    """The programs of a trace, for an error's text."""
    names = {each.order: each.program for each in timeline.computations}
    counts = collections.Counter(names.values())
    return ", ".join(f"{name!r} ({count} runs)" for name, count in counts.items()) or "no run at all"


def _makers(program: LogicalProgram) -> dict[int, Node]:
    """The call that makes each value; transfers hand it on, and of a select the last case."""
    makers: dict[int, Node] = {}
    for node in program.nodes:
        maker = node if node.kind is NodeKind.CALL else makers.get(node.inputs[-1])
        if maker is not None:
            makers.update(dict.fromkeys(node.outputs, maker))
    return makers


def _is_step(node: Node) -> bool:
    """True for a call of a placed function that is part of a pipeline; of any, if the program has no labels."""
    return bool(node.origin) and (node.label is None or node.label.phase is not Phase.SUM)


def _span(node: Node, start: float, end: float) -> Span:
    label = node.label
    if label is not None:
        kind = label.phase.value if node.origin or label.phase is Phase.SUM else "other"
        return Span(kind, node.name, label.microbatch, label.chunk, start, end)
    kind = "other" if not node.origin else "backward" if node.transposes else "forward"
    return Span(kind, node.name, -1, 0, start, end)


def _groups(bound: BoundProgram) -> dict[frozenset[int], list[int]]:
    """The devices of a program by the slices in which they lie, in the order of the stages and then of the slices."""
    stages: dict[int, int] = {}
    for node in bound.program.nodes:
        if node.kind is NodeKind.CALL and node.label is not None:
            mesh = bound.program.computations[node.computation].mesh
            stages[mesh] = min(node.label.stage, stages.get(mesh, node.label.stage))
    found: dict[int, set[int]] = {}
    for mesh, devices in enumerate(bound.bindings):
        for device in devices:
            found.setdefault(device, set()).add(mesh)
    groups: dict[frozenset[int], list[int]] = {}
    for device, meshes in found.items():
        groups.setdefault(frozenset(meshes), []).append(device)
    last = len(bound.bindings)
    return dict(sorted(groups.items(), key=lambda item: min(stages.get(mesh, last) for mesh in item[0])))


def _row(bound: BoundProgram, devices: Sequence[int], spans: Sequence[Span]) -> Row:
    names = tuple(
        mesh.name for mesh, members in zip(bound.program.meshes, bound.bindings, strict=True) if devices[0] in members
    )
    return Row(tuple(devices), names, tuple(sorted(spans, key=lambda span: (span.start, span.end))))


def _given(program: LogicalProgram, lengths: Sequence[Sequence[Lengths]]) -> dict[int, float]:
    """The length of each call, from those of the stages."""
    if program.pipelines:
        return model.unit_lengths(program, lengths)
    if len(lengths[0]) != 1:
        raise errors.OptionError(
            f"lengths: expected one item for program {program.name!r}, which has no schedule and so no stages, got "
            f"{len(lengths[0])} items"
        )
    each = lengths[0][0]
    return {
        n: each.backward + each.weights if node.transposes else each.forward
        for n, node in enumerate(program.nodes)
        if node.origin
    }


def _stage(sizes: Sequence[tuple[int, int]], label: Label) -> int:
    """The number of a stage, counting the chunks of all slices, as `Lengths` of several stages do."""
    return label.chunk * sizes[label.pipeline][0] + label.stage


def _lengths(program: LogicalProgram, durations: Mapping[tuple[int, int], float]) -> tuple[Lengths, ...]:
    """The lengths of each stage: of its microbatches the median, of its slices and devices the longest.

    Empty if the program has several pipelines. `durations`: of calls, by node and device.
    """
    sizes = model.sizes_of(program)
    if len(sizes) != 1:
        return ()
    units: dict[tuple[int, Phase, int, int, int], float] = collections.defaultdict(float)
    for (number, device), length in durations.items():
        node = program.nodes[number]
        if node.label is not None and _is_step(node):
            mesh = program.computations[node.computation].mesh
            units[_stage(sizes, node.label), node.label.phase, mesh, device, node.label.microbatch] += length
    medians: dict[tuple[int, Phase], float] = collections.defaultdict(float)
    groups: dict[tuple[int, Phase, int, int], list[float]] = {}
    for (stage, phase, mesh, device, _), length in units.items():
        groups.setdefault((stage, phase, mesh, device), []).append(length)
    for (stage, phase, _, _), found in groups.items():
        medians[stage, phase] = max(medians[stage, phase], statistics.median(found))
    stages = 1 + max((stage for stage, _ in medians), default=-1)
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS)
    return tuple(Lengths(*(medians[stage, phase] for phase in phases)) for stage in range(stages))


def _bubble(rows: Sequence[Row]) -> float:
    """In percent, of the time from the first step of the pipeline to its last. Without labels every placed call is a
    step of it.
    """
    is_labelled = any(span.microbatch >= 0 for row in rows for span in row.spans)
    steps = [
        (
            len(row.devices),
            [span for span in row.spans if (span.microbatch >= 0 if is_labelled else span.kind != "other")],
        )
        for row in rows
    ]
    steps = [(devices, mine) for devices, mine in steps if mine]
    if not steps:
        return 0.0
    start = min(span.start for _, mine in steps for span in mine)
    end = max(span.end for _, mine in steps for span in mine)
    whole = sum(devices for devices, _ in steps) * (end - start)
    busy = sum(devices * (span.end - span.start) for devices, mine in steps for span in mine)
    return 100 * max(0.0, 1 - busy / whole) if whole else 0.0


def _bound(bound: BoundProgram, lengths: Mapping[int, float]) -> float | None:
    """In percent: the bubble of the labelled calls alone, in their order, without transfer times."""
    program = bound.program
    if program.schedule == "none":
        return None
    tasks, _, _ = model.tasks_of_program(
        program,
        bound.bindings,
        length=lambda n: lengths.get(n, 0.0),
        transfer=lambda n: 0.0,
        keep=lambda n: program.nodes[n].label is not None,
    )
    return 100 * model.run(tasks).bubble
