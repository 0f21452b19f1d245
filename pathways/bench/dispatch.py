"""`pathways bench dispatch`: the paper's Figure 5, every system interleaved in one run.

For each cluster shape all systems are started; for each workload they take turns (A B C, A B C, ...). Step counts adapt
so that a throughput run lasts about `seconds`. A system that fails or hangs is killed with its tree, said in its row,
and started afresh for the next workload.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pathways.bench import machine, plot, stats, systems
from pathways.bench.command import Say, check_names, option
from pathways.bench.goals import at_least
from pathways.bench.processes import Child, ChildError
from pathways.bench.report import Report, Table
from pathways.bench.systems.base import Run
from pathways.bench.turns import Conversation, Turns
from pathways.bench.workloads import CHAIN, Kind, Workload, check_value, workloads

START_S, ANSWER_S = 120.0, 60.0
_FAILURES_BEFORE_GIVING_UP = 2

METHOD = (
    "Interleaved: for each shape and workload the systems take turns, one busy at a time, the others idle. "
    f"A step is one computation: all-reduce a float32 scalar over all devices and add one, or only add one. OpByOp "
    f"has one step per call, Chained {CHAIN} computations per call, Fused {CHAIN} steps in one computation. "
    "per_second: steps per second of pipelined calls with bounded work in flight, median of the repeats (min, max). "
    "p50_us, p99_us: one call and its wait, all repeats together. cpu_s_per_1000: CPU seconds of all the system's "
    "processes, client included, per 1,000 steps of the pipelined runs. Every run's value is checked."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    hosts: tuple[int, ...] = option((1, 2), "Host processes.")
    devices: tuple[int, ...] = option((1, 2), "CPU devices per host.")
    systems: tuple[str, ...] = option(("pathways",), "What of ours to measure; may be empty.")
    rivals: tuple[str, ...] = option(("jax",), "Whom to measure beside it; may be empty.")
    workloads: tuple[str, ...] = option(tuple(kind.value for kind in Kind), "How steps are called.")
    collective: str = option("both", "Steps with an all-reduce.", choices=("both", "yes", "no"))
    repeats: int = option(5, "How often each is measured.")
    seconds: float = option(1.0, "Length of one run.", least=0.01)


@dataclasses.dataclass(frozen=True)
class Goal:
    """Throughput of Pathways over a rival's, at least `least`, on every shape in `shapes` (hosts, devices)."""

    workload: str
    collective: bool
    rival: str
    least: float
    shapes: tuple[tuple[int, int], ...]


_SMALL = ((1, 1), (1, 2), (2, 1), (2, 2))
GOALS = (
    Goal("OpByOp", True, "jax", 0.9, _SMALL),
    Goal("Chained", True, "jax", 1.0, _SMALL),
    Goal("Fused", True, "jax", 0.99, _SMALL),
    Goal("Chained", False, "jax", 0.8, ((2, 1),)),
)


@dataclasses.dataclass
class Cell:
    """All repeats of one system on one workload and shape. `error` says why they are missing."""

    system: str
    workload: Workload
    hosts: int
    devices: int
    per_second: list[float] = dataclasses.field(default_factory=list)
    cpu_s_per_1000: list[float] = dataclasses.field(default_factory=list)
    latency_us: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None

    def where(self) -> dict[str, Any]:
        """The workload and the shape."""
        kind, collective = self.workload.kind.value, self.workload.collective
        return {"workload": kind, "collective": collective, "hosts": self.hosts, "devices": self.devices}

    def row(self) -> dict[str, Any]:
        """One flat row, units in the names; rates and CPU are per step, latencies per call."""
        values: dict[str, Any] = dict.fromkeys(("per_second", "per_second_min", "per_second_max", "p50_us", "p99_us"))
        values |= {"cpu_s_per_1000": None, "repeats": 0, "error": self.error or "not measured"}
        if self.error is None and self.per_second:
            rate = stats.Spread.of(self.per_second)
            values = {
                "per_second": rate.median,
                "per_second_min": rate.low,
                "per_second_max": rate.high,
                "p50_us": stats.quantile(self.latency_us, 0.50),
                "p99_us": stats.quantile(self.latency_us, 0.99),
                "cpu_s_per_1000": stats.quantile(self.cpu_s_per_1000, 0.5),
                "repeats": rate.n,
                "error": None,
            }
        return {"system": self.system, **self.where(), **values}


# ------------------------------------------------------------------------------------------------------- measuring


class _Round:
    """The systems of one shape: started when needed, given up when they keep failing."""

    def __init__(self, turns: Turns, shape: tuple[int, int], seconds: float) -> None:
        self._turns = turns
        self._shape = shape
        self._seconds = seconds
        self._failures: collections.Counter[str] = collections.Counter()

    def _ask(self, system: str, *request: Any) -> Any:
        if system not in self._turns:
            if (failures := self._failures[system]) >= _FAILURES_BEFORE_GIVING_UP:
                raise ChildError(f"{system} failed {failures} times with this shape; given up")
            self._turns.start(system, *self._shape, timeout=START_S)
        return self._turns.ask(system, *request, timeout=ANSWER_S)

    def _run(self, system: str, workload: Workload, steps: int) -> Run:
        run: Run = self._ask(system, "throughput", workload, steps)
        check_value(system, workload, run.steps, run.value)
        return run

    def calibrate(self, cell: Cell) -> tuple[int, int]:
        """Warms up; returns the steps of a throughput run and the calls of a latency run."""
        steps, run = cell.workload.steps_per_call * 4, None
        while run is None or run.seconds < self._seconds / 4:
            run = self._run(cell.system, cell.workload, steps)
            steps = stats.next_steps(run.steps, run.seconds, self._seconds)
        taken = self._ask(cell.system, "latency", cell.workload, 10)
        calls = self._seconds / 2 / (stats.quantile(taken, 0.5) / 1e9)
        return steps, int(min(5000.0, max(10.0, calls)))

    def repeat(self, cell: Cell, steps: int, calls: int) -> None:
        """A throughput run, then a latency run."""
        run = self._run(cell.system, cell.workload, steps)
        taken = self._ask(cell.system, "latency", cell.workload, calls)
        cell.per_second.append(run.steps / run.seconds)
        cell.cpu_s_per_1000.append(run.cpu_seconds * 1000 / run.steps)
        cell.latency_us.extend(ns / 1000 for ns in taken)

    @contextlib.contextmanager
    def _said_in(self, cell: Cell) -> Iterator[None]:
        """A failure inside stands in the cell, and ends the system's process; the round goes on."""
        try:
            yield
        except (ChildError, ValueError) as error:
            cell.error = str(error)
            self._failures[cell.system] += "given up" not in cell.error
            if cell.system in self._turns:
                self._turns.drop(cell.system)

    def measure(self, cells: Sequence[Cell], repeats: int) -> None:
        """All repeats of one workload, the systems in turn."""
        paces: dict[str, tuple[int, int]] = {}
        for cell in cells:
            with self._said_in(cell):
                paces[cell.system] = self.calibrate(cell)
        for _ in range(repeats):
            for cell in cells:
                if cell.error is None:
                    with self._said_in(cell):
                        self.repeat(cell, *paces[cell.system])


def measure(
    names: Sequence[str],
    loads: Sequence[Workload],
    shapes: Sequence[tuple[int, int]],
    repeats: int,
    seconds: float,
    open_system: Callable[[str], Conversation],
    settle: float = 0.1,
    most_hosts: Mapping[str, int] | None = None,
) -> Iterator[list[Cell]]:
    """Yields the cells of one workload at a time, all systems together. A system may have no more than some hosts."""
    for shape in shapes:
        present = [name for name in names if shape[0] <= (most_hosts or {}).get(name, shape[0])]
        with Turns(open_system, settle) as turns:
            one = _Round(turns, shape, seconds)
            for workload in loads:
                cells = [Cell(name, workload, *shape) for name in present]
                one.measure(cells, repeats)
                yield cells


# ------------------------------------------------------------------------------------------------------- reporting


def ratios(cells: Iterable[Cell], ours: str = "pathways") -> list[dict[str, Any]]:
    """Throughput of `ours` over each rival's, repeat by repeat, where both were measured."""
    found: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for cell in cells:
        if cell.error is None and cell.per_second:
            found.setdefault(tuple(cell.where().values()), {})[cell.system] = cell
    rows = []
    for by_system in found.values():
        own = by_system.pop(ours, None)
        for rival, cell in by_system.items() if own is not None else ():
            assert own is not None
            ratio = stats.paired_ratio(own.per_second, cell.per_second)
            ends = {"ratio": ratio.median, "ratio_min": ratio.low, "ratio_max": ratio.high}
            rows.append({**cell.where(), "rival": rival, **ends})
    return rows


def judge(found: Sequence[dict[str, Any]], goals: Sequence[Goal] = GOALS) -> list[dict[str, Any]]:
    """One row per goal and shape that was measured, of `ratios`."""
    return [
        {**row, "goal": goal.least, "reached": at_least(goal.least).is_met(row["ratio"])}
        for goal in goals
        for row in found
        if (row["workload"], row["collective"], row["rival"]) == (goal.workload, goal.collective, goal.rival)
        and (row["hosts"], row["devices"]) in goal.shapes
    ]


_WHERE = "workload, step, hosts, devices"


def _with_step(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "step": "AllReduce + add" if row["collective"] else "add"} for row in rows]


def make(cells: Sequence[Cell], notes: Sequence[str], goals: Sequence[Goal] = GOALS) -> Report:
    """The report of finished cells."""
    rows = [cell.row() for cell in cells]
    found = ratios(cells)
    judged = judge(found, goals)
    shown = [{**row, "remark": "not measured" if row["error"] else None} for row in _with_step(rows)]
    columns = f"{_WHERE}, system, per_second, min=per_second_min, max=per_second_max, p50_us, p99_us, cpu_s_per_1000"
    tables = [
        *Table.of("Dispatch", shown, columns + (", remark" if any(row["error"] for row in rows) else "")),
        *Table.of(
            "Goals: throughput over the rival's, paired by repeat",
            _with_step(judged),
            f"{_WHERE}, rival, goal, ratio, min=ratio_min, max=ratio_max, reached",
        ),
    ]
    errors = [
        f"{row['system']} {row['workload']} {row['hosts']}x{row['devices']}: {row['error']}"
        for row in rows
        if row["error"]
    ]
    samples = [
        {**row, "samples_per_second": cell.per_second, "samples_cpu_s_per_1000": cell.cpu_s_per_1000}
        for row, cell in zip(rows, cells, strict=True)
    ]
    return Report("dispatch", METHOD, tables, {"rows": samples, "ratios": found, "goals": judged}, [*notes, *errors])


def run(
    settings: Settings,
    say: Say = lambda words: None,
    known: Mapping[str, str] = systems.SYSTEMS,
    goals: Sequence[Goal] = GOALS,
) -> Report:
    """Figure 5 of the paper: dispatches per second of every system, interleaved."""
    kinds = {kind.value.lower(): kind for kind in Kind}
    if unknown := [name for name in settings.workloads if name.lower() not in kinds]:
        check_names("workload", unknown, [kind.value for kind in Kind])
    loaded = {name: systems.load(name, known) for name in (*settings.systems, *settings.rivals)}
    notes = [text for system in loaded.values() if (text := systems.missing(system)) is not None]
    present = {name: system for name, system in loaded.items() if systems.missing(system) is None}
    if not present:
        raise ValueError("; ".join(notes) or "expected at least one system, got none")
    notes += machine.busy()
    for note in notes:
        say(note)
    collective = {"both": (True, False), "yes": (True,), "no": (False,)}[settings.collective]
    loads = workloads([kinds[name.lower()] for name in settings.workloads], collective)
    shapes = [(hosts, devices) for hosts in settings.hosts for devices in settings.devices]
    most = {name: system.max_hosts for name, system in present.items()}
    cells: list[Cell] = []
    for finished in measure(
        list(present), loads, shapes, settings.repeats, settings.seconds, lambda name: Child(known[name]), 0.1, most
    ):
        cells += finished
        for cell in finished:
            rate = cell.error.splitlines()[0] if cell.error else f"{cell.row()['per_second']:,.0f} per s"
            done = f"{cell.hosts} x {cell.devices}: {cell.workload.kind.value}, {cell.workload.step_text}"
            say(f"{done}: {cell.system} {rate}")
    return make(cells, notes, goals)


_DASHES = ("-", "--", ":", "-.")


def picture(data: dict[str, Any], path: Path) -> list[Path]:
    """Draws Figure 5: one panel per step and workload, one line per system and devices of a host."""
    rows = [row for row in _with_step(data["rows"]) if row["per_second"]]
    names = list(dict.fromkeys(row["system"] for row in rows))
    devices = sorted({row["devices"] for row in rows})

    def line(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        dash = _DASHES[devices.index(row["devices"]) % len(_DASHES)]
        style = {"color": f"C{names.index(row['system'])}", "linestyle": dash}
        return f"{row['system']}, {row['devices']} device{'s' * (row['devices'] > 1)}", style

    order = sorted(rows, key=lambda row: not row["collective"])
    return plot.panels(
        path,
        order,
        lambda row: f"{row['workload']}: {row['step']}",
        line,
        ("hosts", "per_second", "per_second_min", "per_second_max"),
        ("hosts", "computations per second"),
    )
