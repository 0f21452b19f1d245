"""From options to the report of `pathways bench tenants`: checks the request, runs the parts, makes tables, judges."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.tenants import measuring as tenants
from pathways.bench import processes
from pathways.bench.report import Report, Table

PARTS = ("rates", "shares", "waits", "dispatch")
RIVALS = ("jax",)
SHARE_WITHIN = 0.02
WAIT_MS = {"share": 10.0, "priority": 3.0}
DISPATCH_WITHIN = 0.02
AGGREGATE = {330: 1.0, 2400: 0.97}
TOGETHER = 16

METHOD = (
    "Clients are processes; steps take their time and no core. Rates (the paper's Figure 8): every client keeps 32 "
    "steps under way, or fewer long ones, on one device, policy share; jax is one process with a thread per "
    "client. The systems take turns in each repeat; figures are medians (min, max), ratios are paired by repeat. One "
    "client is alone on a cluster of its own. cores: processor time of the system's processes over wall time. "
    "Shares (Figure 9): parts of the device time that the controller counted, summed over hosts, in each second; "
    "points are hundredths of all device time. No policy divides a run, so a second is judged by 2 points or by one "
    "run, whichever is more; one run: the longest step as a part of a second. late_ms: how late the controller "
    "answered in the worst second; a host that is as late charges that time to the run that it notices next. nominal: "
    "shares by finished steps and their nominal lengths, over all seconds. Waits: a step of 1 ms at a time, from the "
    "call to the ready result, less 1 ms, beside a client with 150 such steps under way. Dispatch: runs of no length, "
    "two clusters of one client each, in turns. Other programs on the machine only ever lower a rate, so aggregates "
    "and dispatch are judged by their best repeats; the medians stand beside."
)


def _rate_tables(rows: Sequence[dict[str, Any]], cores: int) -> list[Table]:
    columns = (
        "length_ms",
        "clients",
        "system",
        "per_second",
        "min",
        "max",
        "device_busy",
        "cores",
        "of_single",
        "best_of_single",
        "of_jax",
    )
    shown = [
        (
            *(row[key] for key in ("length_ms", "clients", "system", "per_second", "per_second_min", "per_second_max")),
            *(row[key] for key in ("device_busy", "cores", "of_single", "best_of_single", "of_jax")),
            "cores" if row["cores"] > 0.85 * cores and row["device_busy"] < 0.9 else None,
        )
        for row in sorted(rows, key=lambda row: (row["length_ms"], row["clients"], row["system"] != "pathways"))
    ]
    return [Table("Computations per second of all clients (Figure 8)", (*columns, "limited by"), shown)]


def _points(part: float) -> float:
    return 100 * part


def _share_table(rows: Sequence[dict[str, Any]]) -> Table:
    return Table(
        "Shares of device time over each second (Figure 9): distance from the target, in points",
        (
            *("hosts", "weights", "steps", "seconds", "worst", "one run", "late_ms in the worst", "median", "nominal"),
            *("device s per second", "load"),
        ),
        [
            (
                row["hosts"],
                ":".join(map(str, row["weights"])),
                row["mix"],
                len(row["seconds"]),
                _points(row["worst"]),
                _points(row["one_run"]),
                row["worst_late_ms"],
                _points(row["median"]),
                _points(row["nominal_worst"]),
                row["charged"],
                row["load"],
            )
            for row in rows
        ],
    )


def _wait_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = ("policy", "weight", "priority", "runs", "p50_ms", "p99_ms", "max_ms", "alone_p50_ms", "load")
    title = "Wait of a run of 1 ms beside a flood of another client's"
    return Table(title, columns, [tuple(row[column] for column in columns) for row in rows])


def judge(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals of the parts that were measured: what was asked, what was found, met or missed."""
    found: list[tuple[str, str, float, bool]] = []
    for row in data.get("rates", []):
        least = AGGREGATE.get(round(1000 * row["length_ms"]))
        if row["system"] == "pathways" and row["clients"] == TOGETHER and least is not None:
            what = f"{TOGETHER} clients over one, {row['length_ms']:g} ms, best repeats"
            found.append((what, f">= {least:g}", row["best_of_single"], row["best_of_single"] >= least))
    for row in data.get("shares", []):
        what = f"shares {':'.join(map(str, row['weights']))}, {row['hosts']} hosts, {row['mix']}: worst second"
        within = max(SHARE_WITHIN, row["one_run"])  # no policy divides a run
        found.append((what, f"<= {_points(within):g} points", _points(row["worst"]), row["worst"] <= within))
    for row in data.get("waits", []):
        if (most := WAIT_MS.get(row["policy"])) is not None:
            what = f"wait under {row['policy']}, weight {row['weight']:g}: p99"
            found.append((what, f"<= {most:g} ms", row["p99_ms"], row["p99_ms"] <= most))
    if one := data.get("dispatch"):
        least = 1 - DISPATCH_WITHIN
        what = "dispatch of one client, share over fifo, best repeats"
        found.append((what, f">= {least:g}", one["ratio"], one["ratio"] >= least))
    return [
        {"goal": what, "asked": asked, "found": value, "result": "met" if is_met else "missed"}
        for what, asked, value, is_met in found
    ]


def make(data: dict[str, Any], notes: Sequence[str]) -> Report:
    """The report of the parts that were measured."""
    tables = []
    if data.get("rates"):
        tables += _rate_tables(data["rates"], len(os.sched_getaffinity(0)))
    if data.get("shares"):
        tables.append(_share_table(data["shares"]))
    if data.get("waits"):
        tables.append(_wait_table(data["waits"]))
    if one := data.get("dispatch"):
        title = "Dispatch of one client alone, runs of no length per second"
        tables.append(Table(title, tuple(one), [tuple(one.values())]))
    judged = judge(data)
    if judged:
        tables.append(Table("Goals", tuple(judged[0]), [tuple(row.values()) for row in judged]))
    return Report("tenants", METHOD, tables, {"rows": data, "goals": judged}, notes)


def run(
    parts: Sequence[str], settings: tenants.Settings, progress: Callable[[str], None] = lambda text: None
) -> Report:
    """Measures and reports. Raises ValueError for what cannot be measured."""
    for what, given, known in (("part", parts, PARTS), ("rival", settings.rivals, RIVALS)):
        if unknown := [each for each in given if each not in known]:
            raise ValueError(f"unknown {what} {unknown[0]!r}: expected some of {', '.join(known)}")
    if not parts:
        raise ValueError(f"nothing to measure: expected some of {', '.join(PARTS)}")
    if 1 not in settings.clients:
        raise ValueError("the numbers of clients must have 1 among them: the others are compared with it")
    cores = len(os.sched_getaffinity(0))
    notes = [
        f"The clients, the controller and the hosts share {cores} cores. A client that gets no core in time has "
        "nothing to offer, and the others take its part. What is limited by cores says nothing about the devices."
    ]
    if (load := os.getloadavg()[0]) > 0.5:
        notes.append(f"The machine was busy at the start (load {load:.1f}): the figures are rough.")
    data: dict[str, Any] = {}
    with processes.orphans_come_home():
        for part in PARTS:
            if part in parts:
                data[part] = getattr(tenants, part)(settings, progress)
    return make(data, notes)
