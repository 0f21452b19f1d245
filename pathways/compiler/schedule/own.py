"""Schedules of the user's own: a function that gives the order of a stage.

`order(stage, stages, microbatches, chunks)` returns the units of that stage in their order, each `(phase, microbatch,
chunk)` with phase "F" (forward), "B" (backward) or "W" (gradients of weights). With "W", a backward step is divided as
under ZeroBubbleH1, and "B" is the part that the stage before waits for.

Pure.
"""

from __future__ import annotations

from typing import Any

from pathways import errors
from pathways.compiler.ir import Phase
from pathways.compiler.orders import Unit
from pathways.compiler.pipeline_spec import OwnSchedule

_PHASES = {"F": Phase.FORWARD, "B": Phase.BACKWARD, "W": Phase.WEIGHTS}


def units_of(order: OwnSchedule, stage: int, stages: int, microbatches: int, chunks: int, title: str) -> list[Unit]:
    """The order that the user's function gives to a stage. `title` begins each error.

    Raises:
        ScheduleError: the order is no list of units, or a unit is there twice, or is not there.
    """
    where = f"{title}, stage {stage} of {stages}"
    given: Any = order(stage, stages, microbatches, chunks)
    if not isinstance(given, list | tuple):
        raise errors.ScheduleError(f"{where}: expected a list of units (phase, microbatch, chunk), got {given!r}")
    units: dict[Unit, None] = {}
    for entry in given:
        if not (
            isinstance(entry, tuple | list)
            and len(entry) == 3
            and isinstance(entry[0], str)
            and entry[0] in _PHASES
            and entry[1] in range(microbatches)
            and entry[2] in range(chunks)
        ):
            raise errors.ScheduleError(
                f'{where}: expected units (phase, microbatch, chunk) with phase "F", "B" or "W", microbatch from 0 to '
                f"{microbatches - 1} and chunk {f'from 0 to {chunks - 1}' if chunks > 1 else 0}, got {entry!r}"
            )
        unit = Unit(_PHASES[entry[0]], int(entry[1]), int(entry[2]))
        if unit in units:
            raise errors.ScheduleError(f"{where}: {tuple(entry)!r} is there twice; expected each unit once")
        units[unit] = None
    used = {unit.phase for unit in units} | {Phase.FORWARD, Phase.BACKWARD}
    for letter, phase in _PHASES.items():
        for chunk in range(chunks):
            missing = [m for m in range(microbatches) if Unit(phase, m, chunk) not in units]
            if phase in used and missing:
                raise errors.ScheduleError(
                    f"{where}: expected each of {microbatches} microbatches once in each phase; {letter!r} lacks "
                    f"microbatches {missing[:8]}" + (f" of chunk {chunk}" if chunks > 1 else "")
                )
    return list(units)
