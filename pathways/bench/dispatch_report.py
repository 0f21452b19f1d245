"""From options to the report of `dispatch`: checks the request, runs it with progress on the terminal, makes tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.progress

from pathways.bench import dispatch, goals, processes, systems
from pathways.bench.report import Report, Table
from pathways.bench.workloads import CHAIN, Kind, workloads

METHOD = (
    "Interleaved: for each shape and workload the systems take turns, one busy at a time, the others idle. "
    f"A step is one computation: all-reduce a float32 scalar over all devices and add one, or only add one. OpByOp "
    f"has one step per call, Chained {CHAIN} computations per call, Fused {CHAIN} steps in one computation. "
    "per_second: steps per second of pipelined calls with bounded work in flight, median of the repeats (min, max). "
    "p50_us, p99_us: one call and its wait, all repeats together. cpu_s_per_1000: CPU seconds of all the system's "
    "processes, client included, per 1,000 steps of the pipelined runs. Every run's value is checked."
)

_COLUMNS = ("workload", "step", "hosts", "devices", "system", "per_second", "min", "max", "p50_us", "p99_us")


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = [
        (
            row["workload"],
            "AllReduce + add" if row["collective"] else "add",
            row["hosts"],
            row["devices"],
            row["system"],
            *(row[key] for key in ("per_second", "per_second_min", "per_second_max", "p50_us", "p99_us")),
            row["cpu_s_per_1000"],
            "not measured" if row["error"] else None,
        )
        for row in rows
    ]
    columns = (*_COLUMNS, "cpu_s_per_1000", "remark")
    if not any(row["error"] for row in rows):
        return Table("Dispatch", columns[:-1], [line[:-1] for line in shown])
    return Table("Dispatch", columns, shown)


def _goal_table(rows: Sequence[dict[str, Any]]) -> Table:
    return Table(
        "Goals: throughput over the rival's, paired by repeat",
        ("workload", "step", "hosts", "devices", "rival", "goal", "ratio", "min", "max", "reached"),
        [
            (
                row["workload"],
                "AllReduce + add" if row["collective"] else "add",
                row["hosts"],
                row["devices"],
                row["rival"],
                row["goal"],
                *(row[key] for key in ("ratio", "ratio_min", "ratio_max", "reached")),
            )
            for row in rows
        ],
    )


def make(cells: Sequence[dispatch.Cell], notes: Sequence[str]) -> Report:
    """The report of finished cells."""
    rows = [cell.row() for cell in cells]
    ratios = dispatch.ratios(cells)
    judged = goals.judge(ratios)
    tables = [_table(rows), *([_goal_table(judged)] if judged else [])]
    errors = [
        f"{row['system']} {row['workload']} {row['hosts']}x{row['devices']}: {row['error']}"
        for row in rows
        if row["error"]
    ]
    samples = [
        {**row, "samples_per_second": cell.per_second, "samples_cpu_s_per_1000": cell.cpu_s_per_1000}
        for row, cell in zip(rows, cells, strict=True)
    ]
    return Report("dispatch", METHOD, tables, {"rows": samples, "ratios": ratios, "goals": judged}, [*notes, *errors])


def run(
    shapes: Sequence[tuple[int, int]],
    names: Sequence[str],
    kinds: Sequence[str],
    collective: Sequence[bool],
    repeats: int,
    seconds: float,
) -> Report:
    """Runs and reports. Raises ValueError for unknown names, or when no system asked for is installed."""
    known = {kind.value.lower(): kind for kind in Kind}
    if unknown := [kind for kind in kinds if kind.lower() not in known]:
        raise ValueError(f"unknown workload {unknown[0]!r}: expected some of {', '.join(k.value for k in Kind)}")
    notes = [text for name in names if (text := systems.missing(name)) is not None]
    present = [name for name in names if systems.missing(name) is None]
    if not present:
        raise ValueError("; ".join(notes) or "expected at least one system, got none")
    if (load := os.getloadavg()[0]) > 0.5:
        notes.append(f"The machine was busy at the start (load {load:.1f}): the figures are rough.")
    settings = dispatch.Settings(
        systems=present,
        workloads=workloads([known[kind.lower()] for kind in kinds], collective),
        shapes=shapes,
        repeats=repeats,
        seconds=seconds,
        fits=systems.fits,
    )
    console = rich.console.Console(stderr=True)
    for note in notes:
        console.print(note, markup=False)
    cells: list[dispatch.Cell] = []
    total = len(shapes) * len(settings.workloads)
    with processes.orphans_come_home(), rich.progress.Progress(console=console, transient=True) as progress:
        task = progress.add_task("dispatch", total=total)
        for finished in dispatch.measure(settings):
            cells.extend(finished)
            last = finished[-1]
            done = f"{last.hosts} x {last.devices}: {last.workload.kind.value}, {last.workload.step_text}"
            progress.update(task, advance=1, description=done)
            for cell in finished:
                rate = cell.error.splitlines()[0] if cell.error else f"{cell.row()['per_second']:,.0f} per s"
                progress.console.print(f"{done}: {cell.system} {rate}", markup=False, highlight=False)
    return make(cells, notes)
