"""Pipeline schedules: puts the steps of a flat program into the order that a schedule defines.

`pipeline` calls `apply` before jaxlib's compiler sees the program. The order of the steps is then the order of each
device's queue: `groups`, `emit`, jaxlib's compiler without a schedule of its own, and `lower` keep it, and
`lower.to_logical` checks that they did (SCHED-1).

The parts: `roles` says which calls do the same, `labels` finds microbatches and stages, `doubts` finds what makes them
doubtful, `orders` has the definitions, `search` finds an order for "auto" with the times of `model`, for which `costs`
counts operations, `sums` adds gradients where they are made, `weave` makes one order of all steps.

Pure: works on jaxprs only.
"""

from __future__ import annotations

from collections.abc import Sequence

from pathways import errors
from pathways.compiler.flatten import FlatProgram
from pathways.compiler.groups import plain_slices
from pathways.compiler.lengths import Lengths, per_stage
from pathways.compiler.schedule.costs import counted
from pathways.compiler.schedule.doubts import Doubt, check_plain_stages
from pathways.compiler.schedule.labels import Pipeline, find
from pathways.compiler.schedule.orders import ORDERS, Unit
from pathways.compiler.schedule.search import choose
from pathways.compiler.schedule.sums import sum_where_made
from pathways.compiler.schedule.weave import weave
from pathways.compiler.trace import Traced


def apply(
    program: FlatProgram,
    traced: Traced,
    schedule: str,
    lengths: Sequence[Lengths] = (),
    limits: Sequence[int] = (),
) -> str:
    """Labels the steps of `program` and puts them into the order of the schedule (a key of `orders.ORDERS`, or "auto").

    The step list of `program` is replaced. The results of the program are the same variables as before. For "auto",
    `lengths` are those of the stages; () if they are counted. `limits` is the most microbatches in flight on each
    stage; () if there is no limit.

    Returns:
        The schedule's name; for "auto" with what was chosen.

    Raises:
        OptionError: there are lengths for another number of stages.
        ScheduleError: the program has no pipeline, or cannot follow the schedule; the message says why.
    """
    what = f"schedule {schedule!r} of program {traced.name!r}"
    pipeline = find(program, what)
    name, sequences = _sequences(program, pipeline, schedule, lengths, limits)
    homes = {v: a.mesh for v, a in zip(program.invars, traced.arguments, strict=True) if a.mesh is not None}
    sum_where_made(program, pipeline, sequences, homes)
    slices = plain_slices(program, traced.arguments, next(iter(pipeline.stages)))
    try:
        check_plain_stages(program.steps, pipeline.stages, pipeline.feeds, slices)
    except Doubt as doubt:
        raise errors.ScheduleError(f"{what}: {doubt}") from None
    program.steps = weave(program.steps, pipeline, sequences, slices, what)
    return name


def _sequences(
    program: FlatProgram, pipeline: Pipeline, schedule: str, lengths: Sequence[Lengths], limits: Sequence[int]
) -> tuple[str, Sequence[Sequence[Unit]]]:
    if schedule == "auto":
        each = lengths or counted(program.steps, pipeline.stages, pipeline.microbatches)
        choice = choose(pipeline.depth, pipeline.microbatches, per_stage(each, pipeline.depth), limits)
        return f"auto ({choice.name})", choice.sequences
    order = ORDERS[schedule]
    return schedule, [order(stage, pipeline.depth, pipeline.microbatches) for stage in range(pipeline.depth)]
