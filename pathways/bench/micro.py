"""`pathways bench micro`: single costs, each a probe of `probes`.

A cost that cannot be measured here is a note with its reason, never a missing line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pathways.bench import processes
from pathways.bench.command import Say, check_names, option
from pathways.bench.goals import Bound, at_least, at_most
from pathways.bench.probes import PROBES
from pathways.bench.report import Report, Table
from pathways.bench.stats import Spread, Value

METHOD = (
    "Each probe in a process of its own, median of the repeats; a call's cost is the time until its futures are "
    "returned, with fewer calls in flight than there are credits; transfers and memcpy take turns, and so do "
    "steps whose loss is read on JAX and on a cluster; their goal is 1.3 times JAX and 60 us more."
)
_TIMEOUT = 300.0

GOALS = {
    "call to futures, 1 leaves": at_most(5),
    "call to futures, slope per leaf": at_most(0.1),
    "step and float(loss), 1 x 1 over goal": at_most(1),
    "step and float(loss), 2 x 1 over goal": at_most(1),
    "transfer over memcpy": at_least(0.7),
}
"""By the name of a value."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    only: tuple[str, ...] = option((), f"Any of {', '.join(PROBES)}; all by default.")
    repeats: int = option(5, "How often each is measured.")


def make(
    values: Sequence[Value],
    notes: Sequence[str],
    what: str = "micro",
    method: str = METHOD,
    goals: Mapping[str, Bound] = GOALS,
) -> Report:
    """The report of measured values."""
    rows = []
    for value in values:
        bound = goals.get(value.name)
        spread: Spread = value.spread
        rows.append(
            {
                "what": value.name,
                "median": spread.median,
                "min": spread.low,
                "max": spread.high,
                "repeats": spread.n,
                "unit": value.unit,
                "goal": str(bound) if bound else None,
                "reached": bound.is_met(spread.median) if bound else None,
            }
        )
    return Report(what, method, Table.of(what.capitalize(), rows), {"rows": rows}, notes)


def run(settings: Settings, say: Say = lambda words: None) -> Report:
    """Single costs: a call, a plan, a read, a transfer."""
    check_names("probe", settings.only, PROBES)
    values: list[Value] = []
    notes: list[str] = []
    for name in settings.only or PROBES:
        say(name)
        try:
            with processes.Child("pathways.bench.probes:Probe", name) as child:
                values += child.ask("measure", settings.repeats, timeout=_TIMEOUT)
        except (processes.ChildError, OSError) as error:
            notes.append(f"{name} is not measured: {error}")
    return make(values, notes)
