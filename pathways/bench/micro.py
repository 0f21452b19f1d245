"""`pathways bench micro`: single costs, native ones from the C++ benchmarks and the others from `probes`.

A cost that cannot be measured here (not built, failed) is a note with its reason, never a missing line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pathways.bench import google_benchmark, processes
from pathways.bench.probes import PROBES
from pathways.bench.report import Report, Table
from pathways.bench.stats import Spread, Value

METHOD = (
    "C++ costs: real time per iteration of Google Benchmark programs, median of the repetitions. Python costs: each "
    "probe in a process of its own, median of the repeats; a call's cost is the time until its futures are returned, "
    "with fewer calls in flight than there are credits; transfers and memcpy take turns, and so do "
    "steps whose loss is read on JAX and on a cluster; their goal is 1.3 times JAX and 60 us more."
)
NATIVE = "native"
_TIMEOUT = 300.0


@dataclasses.dataclass(frozen=True)
class Limit:
    """A goal for one value: at most, or at least when `least`."""

    bound: float
    least: bool = False

    def reached(self, value: float) -> bool:
        """Whether `value` is within the goal."""
        return value >= self.bound if self.least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.least else '<='} {self.bound:g}"


GOALS = {
    "future_create_resolve_release": Limit(50),
    "byte_ring_hop_without_doorbell hop_p50_ns": Limit(100),
    "call to futures, 1 leaves": Limit(5),
    "call to futures, slope per leaf": Limit(0.1),
    "step and float(loss), 1 x 1 over goal": Limit(1),
    "step and float(loss), 2 x 1 over goal": Limit(1),
    "transfer over memcpy": Limit(0.7, least=True),
}
"""By the name of a value; C++ benchmarks under their own names."""


def _native(binaries: Path | None, repeats: int) -> list[Value]:
    paths = google_benchmark.programs(binaries)
    if not paths:
        where = binaries or "build/*/benchmarks/cpp"
        raise RuntimeError(f"no C++ benchmark in {where}: build with -DPATHWAYS_BUILD_BENCHMARKS=ON")
    measured = google_benchmark.run(paths, repeats)
    return [Value(name, spread, "ns") for name, spread in measured.items()]


def _probe(name: str, repeats: int) -> list[Value]:
    child = processes.Child("pathways.bench.probes", [name])
    try:
        values: list[Value] = child.ask("measure", repeats, timeout=_TIMEOUT)
    except processes.ChildError:
        child.kill()
        raise
    child.end()
    return values


def make(values: Sequence[Value], notes: Sequence[str]) -> Report:
    """The report of measured values."""
    rows = []
    for value in values:
        goal = GOALS.get(value.name)
        spread: Spread = value.spread
        reached = None if goal is None else goal.reached(spread.median)
        goal_text = None if goal is None else str(goal)
        rows.append((value.name, spread.median, spread.low, spread.high, spread.n, value.unit, goal_text, reached))
    columns = ("what", "median", "min", "max", "repeats", "unit", "goal", "reached")
    data = {"rows": [dict(zip(columns, row, strict=True)) for row in rows]}
    return Report("micro", METHOD, [Table("Micro", columns, rows)], data, notes)


def run(only: Sequence[str], binaries: Path | None, repeats: int) -> Report:
    """Measures everything, or `only` some. Raises ValueError for an unknown name."""
    known = [NATIVE, *PROBES]
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"unknown probe {unknown[0]!r}: expected some of {', '.join(known)}")
    values: list[Value] = []
    notes: list[str] = []
    with processes.orphans_come_home():
        for name in only or known:
            try:
                values += _native(binaries, repeats) if name == NATIVE else _probe(name, repeats)
            except (RuntimeError, OSError) as error:  # ChildError is one
                notes.append(f"{name} is not measured: {error}")
    return make(values, notes)
