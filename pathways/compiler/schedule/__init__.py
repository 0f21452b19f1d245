"""Pipeline schedules: puts the steps of a flat program into the order that a schedule defines.

`pipeline` calls `apply` before jaxlib's compiler sees the program. The order of the steps is then the order of each
device's queue: `groups`, `emit`, jaxlib's compiler without a schedule of its own, and `lower` keep it, and
`lower.to_logical` checks that they did (SCHED-1).

The parts: `roles` says which calls do the same, `labels` finds microbatches and stages, `chunks` the parts of the model
that stages have, `doubts` finds what makes them doubtful. `orders` has the definitions. `split` divides backward steps,
by `halves`. `sums` adds gradients where they are made, `weave` makes one order of all steps.

Pure: works on jaxprs only.
"""

from __future__ import annotations

from pathways import errors
from pathways.compiler.flatten import FlatProgram
from pathways.compiler.groups import plain_slices
from pathways.compiler.schedule.doubts import Doubt, check_plain_stages
from pathways.compiler.schedule.labels import Pipeline, find
from pathways.compiler.schedule.orders import CHUNKED, ORDERS, SPLIT
from pathways.compiler.schedule.split import split
from pathways.compiler.schedule.sums import sum_where_made
from pathways.compiler.schedule.weave import weave
from pathways.compiler.trace import Traced


def apply(program: FlatProgram, traced: Traced, schedule: str) -> None:
    """Labels the steps of `program` and puts them into the order of the schedule (a key of `orders.ORDERS`).

    The step list of `program` is replaced. The results of the program are the same variables as before.

    Raises:
        ScheduleError: the program has no pipeline, or cannot follow the schedule; the message says why.
    """
    what = f"schedule {schedule!r} of program {traced.name!r}"
    pipeline = find(program, what, chunked=schedule in CHUNKED)
    order, count = ORDERS[schedule], (pipeline.depth, pipeline.microbatches, pipeline.chunks)
    try:
        if schedule == "Interleaved1F1B":
            _check_interleaved(pipeline)
        if schedule in SPLIT:
            split(program, pipeline.stages)
    except Doubt as doubt:
        raise errors.ScheduleError(f"{what}: {doubt}") from None
    sequences = [order(stage, *count) for stage in range(pipeline.depth)]
    homes = {v: a.mesh for v, a in zip(program.invars, traced.arguments, strict=True) if a.mesh is not None}
    sum_where_made(program, pipeline, sequences, homes)
    slices = plain_slices(program, traced.arguments, next(iter(pipeline.stages)))
    try:
        check_plain_stages(program.steps, pipeline.stages, pipeline.feeds, slices)
    except Doubt as doubt:
        raise errors.ScheduleError(f"{what}: {doubt}") from None
    program.steps = weave(program.steps, pipeline, sequences, slices, what)


def _check_interleaved(pipeline: Pipeline) -> None:
    """Raises:
    Doubt: the pipeline has one chunk per slice, or a number of microbatches for which the schedule is not defined.
    """
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
