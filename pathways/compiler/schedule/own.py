"""Schedules of the user's own: a function that gives the order of a stage.

`order(stage, stages, microbatches, chunks)` returns the units of that stage in their order, each `(phase, microbatch,
chunk)` with phase "F" (forward) or "B" (backward). There is one chunk per stage, so `chunks` is 1 and `chunk` is 0.

Pure.
"""

from __future__ import annotations

from typing import Any

from pathways import errors
from pathways.compiler.ir import Phase
from pathways.compiler.pipeline_spec import OwnSchedule
from pathways.compiler.schedule.orders import Unit

_PHASES = {"F": Phase.FORWARD, "B": Phase.BACKWARD}


def units_of(order: OwnSchedule, stage: int, stages: int, microbatches: int, title: str) -> list[Unit]:
    """The order that the user's function gives to a stage. `title` begins each error.

    Raises:
        ScheduleError: the order is no list of units, or a unit is there twice, or is not there.
    """
    where = f"{title}, stage {stage} of {stages}"
    given: Any = order(stage, stages, microbatches, 1)
    if not isinstance(given, list | tuple):
        raise errors.ScheduleError(f"{where}: expected a list of units (phase, microbatch, chunk), got {given!r}")
    units: list[Unit] = []
    for entry in given:
        if not (
            isinstance(entry, tuple | list)
            and len(entry) == 3
            and isinstance(entry[0], str)
            and entry[0] in _PHASES
            and entry[1] in range(microbatches)
            and entry[2] == 0
        ):
            raise errors.ScheduleError(
                f'{where}: expected units (phase, microbatch, chunk) with phase "F" or "B", microbatch from 0 to '
                f"{microbatches - 1} and chunk 0, got {entry!r}"
            )
        unit = (_PHASES[entry[0]], int(entry[1]))
        if unit in units:
            raise errors.ScheduleError(f"{where}: {tuple(entry)!r} is there twice; expected each unit once")
        units.append(unit)
    for letter, phase in _PHASES.items():
        if missing := [m for m in range(microbatches) if (phase, m) not in units]:
            raise errors.ScheduleError(
                f"{where}: expected each of {microbatches} microbatches once in each phase; {letter!r} lacks "
                f"microbatches {missing[:8]}"
            )
    return units
