"""Pipeline schedules: puts the steps of a flat program into the order that a schedule defines.

`pipeline` calls `apply` before jaxlib's compiler sees the program. The order of the steps is then the order of each
device's queue: `groups`, `emit`, jaxlib's compiler without a schedule of its own, and `lower` keep it, and
`lower.to_logical` checks that they did (SCHED-1).

The parts: `scopes` reads microbatches from the names of scopes. Without scopes, `roles` says which calls do the same,
`labels` finds microbatches and stages, `chunks` the parts of the model that stages have, and `doubts` finds what makes
them doubtful. `orders` has the definitions, `own` reads an order of the user's, `search` finds an order for "auto" with
the times of `model`, for which `costs` counts operations. `split` divides backward steps, by `halves`. `sums` adds
gradients where they are made, `weave` makes one order of all steps.

Pure: works on jaxprs only.
"""

from __future__ import annotations

from collections.abc import Sequence

from pathways import errors
from pathways.compiler import pipeline_spec
from pathways.compiler.flatten import FlatProgram, Step, StepKind
from pathways.compiler.groups import plain_slices
from pathways.compiler.ir import Phase, PipelineInfo
from pathways.compiler.lengths import Lengths, per_stage
from pathways.compiler.options import Options
from pathways.compiler.pipeline_spec import OwnSchedule
from pathways.compiler.schedule.costs import counted
from pathways.compiler.schedule.doubts import Doubt, check_plain_stages
from pathways.compiler.schedule.labels import Pipeline, find
from pathways.compiler.schedule.orders import CHUNKED, ORDERS, SPLIT, Unit
from pathways.compiler.schedule.own import units_of
from pathways.compiler.schedule.scopes import Scoped, label
from pathways.compiler.schedule.search import choose
from pathways.compiler.schedule.split import split
from pathways.compiler.schedule.sums import sum_where_made
from pathways.compiler.schedule.weave import weave
from pathways.compiler.trace import Traced


def apply(program: FlatProgram, traced: Traced, options: Options) -> tuple[PipelineInfo, ...]:
    """Labels the steps of `program` and puts them into the order of their pipelines' schedules.

    A pipeline is found by its scopes (`pw.pipeline`, `pw.accumulate_gradients`, the user's own), or, if there are none
    and the program has a schedule, by what the calls read. The step list of `program` is replaced. The results of the
    program are the same variables as before.

    Returns:
        The pipelines of the program, by the numbers in the labels.

    Raises:
        ScheduleError: the program has no pipeline, or cannot follow the schedule; the message says why.
        OptionError: an option that makes other computations than the schedule puts in order, or lengths for another
            number of stages.
    """
    pipelines = _pipelines(program, traced, options)
    if not pipelines:
        return ()
    homes = {v: a.mesh for v, a in zip(program.invars, traced.arguments, strict=True) if a.mesh is not None}
    ordered = [pipeline for pipeline in pipelines if pipeline.ordered]
    sum_where_made(program, pipelines, homes, at_once=not ordered)
    if ordered:
        slices = plain_slices(program, traced.arguments, next(iter(pipelines[0].stages)))
        for pipeline in ordered:
            try:
                check_plain_stages(program.steps, pipeline.stages, pipeline.feeds, slices, pipeline.number)
            except Doubt as doubt:
                raise errors.ScheduleError(f"{pipeline.title}: {doubt}") from None
        program.steps = weave(program.steps, pipelines, slices)
    return tuple(pipeline.info() for pipeline in pipelines)


def title_of(program: FlatProgram, traced: Traced, options: Options) -> str | None:
    """What the first schedule that a program asks for is called, in errors, also in bodies of its loops; None: none."""
    if options.schedule != "none":
        return f"schedule {options.schedule!r} of program {traced.name!r}"
    for step in program.steps:
        spec = pipeline_spec.find(step.scope.pipeline) if step.scope is not None else None
        if spec is not None and spec.schedule not in (None, "none"):
            assert spec.schedule is not None
            name = pipeline_spec.schedule_name(spec.schedule)
            return f"schedule {name!r} of pipeline {spec.name!r} of program {traced.name!r}"
        for body in step.control.bodies if step.control is not None else ():
            if (title := title_of(body, traced, options)) is not None:
                return title
    return None


def _pipelines(program: FlatProgram, traced: Traced, options: Options) -> list[Pipeline]:
    """The pipelines of a program, with their sequences; the labels are set."""
    scoped = label(program.steps, f"program {traced.name!r}")
    for one in scoped:
        schedule, whose = _schedule(one, traced.name, options.schedule)
        one.pipeline.title = f"schedule {pipeline_spec.schedule_name(schedule)!r} of {whose}"
        one.pipeline.lengths = one.spec.stage_lengths() if one.spec is not None else ()
        if schedule != "none":
            options.check_keeps_calls(pipeline_spec.schedule_name(schedule))
        _set_order(program, one.pipeline, schedule, options)
    if scoped or options.schedule == "none":
        return [one.pipeline for one in scoped]
    title = f"schedule {options.schedule!r} of program {traced.name!r}"
    pipeline = find(program, title, chunked=options.schedule in CHUNKED)
    pipeline.title = title
    _set_order(program, pipeline, options.schedule, options)
    return [pipeline]


def _schedule(scoped: Scoped, program: str, option: str) -> tuple[str | OwnSchedule, str]:
    """The schedule of a pipeline, and whose it is."""
    if scoped.spec is None:
        return option, f"pipeline {scoped.name!r} of program {program!r}"
    own, whose = scoped.spec.schedule, f"pipeline {scoped.spec.name!r} of program {program!r}"
    if own is None:
        return option, whose
    if option not in ("none", own):
        raise errors.ScheduleError(
            f"program {program!r} has schedule {option!r}, and pipeline {scoped.spec.name!r} in it has schedule "
            f"{pipeline_spec.schedule_name(own)!r}; expected one of the two. Give it to the pipeline: "
            "pw.pipeline(..., schedule=...)"
        )
    return own, whose


def _set_order(program: FlatProgram, pipeline: Pipeline, schedule: str | OwnSchedule, options: Options) -> None:
    """Sets the order of the units on each stage, and what it is called. It divides backward steps if the order does."""
    size = pipeline.depth, pipeline.microbatches, pipeline.chunks
    pipeline.schedule = pipeline_spec.schedule_name(schedule)
    pipeline.ordered = schedule != "none"
    try:
        if schedule == "none":
            pipeline.sequences = _text_order(program.steps, pipeline)
        elif not isinstance(schedule, str):
            pipeline.sequences = [units_of(schedule, stage, *size, pipeline.title) for stage in range(pipeline.depth)]
        else:
            _check_chunks(pipeline, schedule)
            if schedule == "auto":
                _search(program, pipeline, options)
            else:
                pipeline.sequences = [ORDERS[schedule](stage, *size) for stage in range(pipeline.depth)]
        if schedule in SPLIT or (pipeline.ordered and _has_weight_steps(pipeline)):
            split(program, pipeline.stages, pipeline.number)
    except Doubt as doubt:
        raise errors.ScheduleError(f"{pipeline.title}: {doubt}") from None


def _has_weight_steps(pipeline: Pipeline) -> bool:
    return any(unit.phase is Phase.WEIGHTS for sequence in pipeline.sequences for unit in sequence)


def _check_chunks(pipeline: Pipeline, schedule: str) -> None:
    """Raises:
    Doubt: the pipeline has a number of chunks or of microbatches for which the schedule is not defined.
    """
    if pipeline.chunks > 1 and schedule not in CHUNKED:
        raise Doubt(
            f"each slice has {pipeline.chunks} chunks of the model, but the schedule has one stage per slice. Give "
            "'Interleaved1F1B' or 'Circular', or give each stage a slice"
        )
    if schedule != "Interleaved1F1B":
        return
    if pipeline.chunks == 1:
        raise Doubt(
            "each slice has one chunk of the model; expected microbatches to visit all slices in turn, twice or more. "
            "With one chunk per slice give '1F1B'"
        )
    if pipeline.microbatches % pipeline.depth:
        raise Doubt(
            f"{pipeline.microbatches} microbatches do not divide by {pipeline.depth} slices; expected a multiple of "
            f"{pipeline.depth}. 'Circular' takes any number"
        )


def _search(program: FlatProgram, pipeline: Pipeline, options: Options) -> None:
    """Sets the order that "auto" finds."""
    each: Sequence[Lengths] = pipeline.lengths or options.lengths or counted(program.steps, pipeline)
    limits = options.limits[pipeline.number] if options.limits else ()
    lengths = per_stage(each, pipeline.depth, f"lengths of {pipeline.title}")
    choice = choose(pipeline.depth, pipeline.microbatches, lengths, limits)
    pipeline.schedule, pipeline.is_searched = f"auto ({choice.name})", True
    pipeline.sequences = list(choice.sequences)


def _text_order(steps: Sequence[Step], pipeline: Pipeline) -> list[Sequence[Unit]]:
    """The units on each stage as they appear in the text."""
    units: list[dict[Unit, None]] = [{} for _ in range(pipeline.depth)]
    for step in steps:
        if step.kind is StepKind.PLACED and step.label is not None and step.label.pipeline == pipeline.number:
            unit = Unit(step.label.phase, step.label.microbatch, step.label.chunk)
            units[step.label.stage].setdefault(unit)
    return [list(each) for each in units]
