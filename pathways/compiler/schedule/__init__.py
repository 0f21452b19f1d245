"""Pipeline schedules: puts the steps of a flat program into the order that a schedule defines.

`pipeline` and `control.assembling` call `Ordering.apply` before jaxlib's compiler sees the program, or the body of a
loop or branch: each of them is a *level*, and is put in order alone. The order of the steps is then the order of each
device's queue: `groups`, `emit`, jaxlib's compiler without a schedule of its own, and `lower` keep it, and
`lower.to_logical` checks that they did (SCHED-1).

With `jax.grad` around a loop, the forward steps of a pipeline are in the body of one loop and its backward steps in
that of another. Each of the two follows the schedule. A loop or branch inside a microbatch has no place in a schedule;
it is refused.

The parts: `labels` reads microbatches from the names of scopes. Without scopes, `parts` finds them, and `chunks` the
parts of the model that a slice has. `doubts` has what refusals share. `orders` has the definitions, `own` reads an
order of the user's, `search` finds an order for "auto" with the times of `model`, for which `costs` counts operations.
`split` divides backward steps, by `halves`. `sums` adds gradients where they are made, `weave` makes one order of all
steps.

Pure: works on jaxprs only.
"""

from __future__ import annotations

from collections.abc import Sequence

from pathways import errors
from pathways.compiler import pipeline_spec
from pathways.compiler.flatten import FlatProgram, Step, StepKind
from pathways.compiler.ir import Phase, PipelineInfo
from pathways.compiler.lengths import Lengths, per_stage
from pathways.compiler.options import Options
from pathways.compiler.orders import CHUNKED, ORDERS, Unit
from pathways.compiler.partition.groups import plain_slices
from pathways.compiler.pipeline_spec import OwnSchedule, PipelineSpec
from pathways.compiler.schedule.costs import counted
from pathways.compiler.schedule.doubts import Doubt
from pathways.compiler.schedule.labels import Pipeline, check_plain_stages, label
from pathways.compiler.schedule.own import units_of
from pathways.compiler.schedule.parts import find
from pathways.compiler.schedule.search import choose
from pathways.compiler.schedule.split import split
from pathways.compiler.schedule.sums import sum_where_made
from pathways.compiler.schedule.weave import in_turn, weave
from pathways.compiler.trace import Traced


class Ordering:
    """Puts the levels of one program in order. `program` is the whole, as `flatten` gives it."""

    def __init__(self, program: FlatProgram, options: Options) -> None:
        self._options = options
        self._differentiated = _differentiated(program)
        self._is_followed = options.schedule == "none"

    def apply(self, traced: Traced, program: FlatProgram) -> tuple[PipelineInfo, ...]:
        """Labels the steps of a level and puts them into the order of their pipelines' schedules.

        A pipeline is found by its scopes (`pw.pipeline`, `pw.accumulate_gradients`, the user's own), or, if there are
        none and the program has a schedule, by what its calls read. The step list of `program` is replaced. The results
        are the same variables as before. `traced` has the arguments of the level.

        Returns:
            The pipelines of the level, by the numbers in the labels.

        Raises:
            ScheduleError: the level cannot follow the schedule; the message says why.
            OptionError: an option that makes other computations than the schedule puts in order, or lengths for another
                number of stages.
        """
        pipelines = self._pipelines(program, traced)
        if not pipelines:
            return ()
        self._is_followed = True
        homes = {v: a.mesh for v, a in zip(program.invars, traced.arguments, strict=True) if a.mesh is not None}
        ordered = [pipeline for pipeline in pipelines if pipeline.ordered]
        sum_where_made(program, pipelines, homes, at_once=not ordered)
        if ordered:
            slices = plain_slices(program, traced.arguments, next(iter(pipelines[0].stages)))
            for pipeline in ordered:
                check_plain_stages(program.steps, pipeline, slices)
            program.steps = weave(program.steps, pipelines, slices)
        return tuple(pipeline.info() for pipeline in pipelines)

    def check_followed(self, traced: Traced) -> None:
        """Raises:
        ScheduleError: the program has a schedule, and no level of it has a pipeline.
        """
        if not self._is_followed:
            raise errors.ScheduleError(
                f"schedule {self._options.schedule!r} of program {traced.name!r}: there is no pipeline in it, because "
                "it calls no placed function; give no schedule"
            )

    def _pipelines(self, program: FlatProgram, traced: Traced) -> list[Pipeline]:
        """The pipelines of a level, with their sequences; the labels are set."""
        options = self._options
        scoped = label(program.steps, f"program {traced.name!r}", _torn(program.steps, traced.name, options.schedule))
        for pipeline in scoped:
            schedule, whose = _schedule(pipeline.key, traced.name, options.schedule)
            pipeline.title = f"schedule {pipeline_spec.schedule_name(schedule)!r} of {whose}"
            spec = pipeline_spec.find(pipeline.key)
            pipeline.lengths = spec.stage_lengths() if spec is not None else ()
            if schedule != "none":
                options.check_keeps_calls(pipeline_spec.schedule_name(schedule))
            self._set_order(program, pipeline, schedule)
        if scoped or options.schedule == "none" or not any(step.kind is StepKind.PLACED for step in program.steps):
            return scoped
        title = f"schedule {options.schedule!r} of program {traced.name!r}"
        try:
            parts = find(program.steps, chunked=options.schedule in CHUNKED)
        except Doubt as doubt:
            raise errors.ScheduleError(f"{title}: {doubt}") from None
        (pipeline,) = label(program.steps, title, parts=parts)
        pipeline.title = title
        self._set_order(program, pipeline, options.schedule)
        return [pipeline]

    def _set_order(self, program: FlatProgram, pipeline: Pipeline, schedule: str | OwnSchedule) -> None:
        """Sets the order of the units on each stage, and what it is called. It divides backward steps if the order
        does.
        """
        size = pipeline.depth, pipeline.microbatches, pipeline.chunks
        pipeline.schedule = pipeline_spec.schedule_name(schedule)
        pipeline.ordered = schedule != "none"
        try:
            if schedule == "none":
                program.steps = in_turn(program.steps, pipeline.number)
                pipeline.sequences = _text_order(program.steps, pipeline)
            elif not isinstance(schedule, str):
                stages = range(pipeline.depth)
                pipeline.sequences = [units_of(schedule, stage, *size, pipeline.title) for stage in stages]
            else:
                _check_chunks(pipeline, schedule)
                if schedule == "auto":
                    _search(program, pipeline, self._options)
                else:
                    pipeline.sequences = [ORDERS[schedule].order(stage, *size) for stage in range(pipeline.depth)]
            named = ORDERS.get(schedule) if isinstance(schedule, str) else None
            if (named and named.has_weight_steps) or (pipeline.ordered and _has_weight_steps(pipeline)):
                # The level of the forward steps of a loop's gradient has nothing to divide, nor has an evaluation.
                may_lack = _whose(pipeline.key) in self._differentiated
                split(program, pipeline.stages, pipeline.number, may_lack=may_lack)
        except Doubt as doubt:
            raise errors.ScheduleError(f"{pipeline.title}: {doubt}") from None


def _whose(name: str) -> PipelineSpec | str:
    """What the calls of one `pw.pipeline` share; the name of a pipeline of the user's own."""
    return pipeline_spec.find(name) or name


def _differentiated(program: FlatProgram) -> set[PipelineSpec | str]:
    """The pipelines that have backward steps on some level."""
    found: set[PipelineSpec | str] = set()
    for step in program.steps:
        if step.kind is StepKind.PLACED and step.derivatives and step.scope is not None:
            found.add(_whose(step.scope.pipeline))
        for body in step.control.bodies if step.control is not None else ():
            found |= _differentiated(body)
    return found


def _torn(steps: Sequence[Step], program: str, option: str) -> set[str]:
    """The names of the pipelines without a schedule that have a loop or a branch inside a microbatch.

    Raises:
        ScheduleError: such a pipeline has a schedule.
    """
    found: set[str] = set()
    for step in steps:
        if step.control is not None and step.scope is not None:
            schedule, whose = _schedule(step.scope.pipeline, program, option)
            if schedule != "none":
                raise errors.ScheduleError(
                    f"schedule {pipeline_spec.schedule_name(schedule)!r} of {whose}: microbatch "
                    f"{step.scope.microbatch} has placed functions inside {step.control.construct}; expected placed "
                    "calls that the program's text makes, because a schedule gives each of them a place. Give the "
                    "program a larger unroll= if it is a loop of a known count, put the whole of it into one placed "
                    "function, or give no schedule"
                )
            found.add(step.scope.pipeline)
    return found


def _schedule(name: str, program: str, option: str) -> tuple[str | OwnSchedule, str]:
    """The schedule of the pipeline of this name, and whose it is."""
    spec = pipeline_spec.find(name)
    if spec is None:
        return option, f"pipeline {name!r} of program {program!r}"
    own, whose = spec.schedule, f"pipeline {spec.name!r} of program {program!r}"
    if own is None:
        return option, whose
    if option not in ("none", own):
        raise errors.ScheduleError(
            f"program {program!r} has schedule {option!r}, and pipeline {spec.name!r} in it has schedule "
            f"{pipeline_spec.schedule_name(own)!r}; expected one of the two. Give it to the pipeline: "
            "pw.pipeline(..., schedule=...)"
        )
    return own, whose


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
    limits = dict(options.limits).get(pipeline.key, ())
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
