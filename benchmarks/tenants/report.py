"""The report of `python -m benchmarks.tenants`: checks the request, runs the parts, makes tables, judges."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.tenants import measuring as tenants
from benchmarks.tenants.measuring import PARTS
from pathways.bench import machine
from pathways.bench.command import Say, check_names
from pathways.bench.goals import at_least, at_most, judged
from pathways.bench.report import Report, Table

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


def _points(part: float) -> float:
    return 100 * part


def _share_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "hosts": row["hosts"],
            "weights": ":".join(map(str, row["weights"])),
            "steps": row["mix"],
            "seconds": len(row["seconds"]),
            "worst": _points(row["worst"]),
            "one run": _points(row["one_run"]),
            "late_ms in the worst": row["worst_late_ms"],
            "median": _points(row["median"]),
            "nominal": _points(row["nominal_worst"]),
            "device s per second": row["charged"],
            "load": row["load"],
        }
        for row in rows
    ]


def judge(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals of the parts that were measured."""
    found: list[dict[str, Any]] = []
    for row in data.get("rates", []):
        least = AGGREGATE.get(round(1000 * row["length_ms"]))
        if row["system"] == "pathways" and row["clients"] == TOGETHER and least is not None:
            what = f"{TOGETHER} clients over one, {row['length_ms']:g} ms, best repeats"
            found.append(judged(what, at_least(least), row["best_of_single"]))
    for row in data.get("shares", []):
        what = f"shares {':'.join(map(str, row['weights']))}, {row['hosts']} hosts, {row['mix']}: worst second, points"
        within = max(SHARE_WITHIN, row["one_run"])  # no policy divides a run
        found.append(judged(what, at_most(_points(within)), _points(row["worst"])))
    for row in data.get("waits", []):
        if (most := WAIT_MS.get(row["policy"])) is not None:
            what = f"wait under {row['policy']}, weight {row['weight']:g}: p99, ms"
            found.append(judged(what, at_most(most), row["p99_ms"]))
    if one := data.get("dispatch"):
        what = "dispatch of one client, share over fifo, best repeats"
        found.append(judged(what, at_least(1 - DISPATCH_WITHIN), one["ratio"]))
    return found


def make(data: dict[str, Any], notes: Sequence[str]) -> Report:
    """The report of the parts that were measured."""
    goals, rates, cores = judge(data), data.get("rates", []), len(os.sched_getaffinity(0))
    one = data.get("dispatch")
    tables = [
        *Table.of(
            "Computations per second of all clients (Figure 8)",
            [
                {**row, "limited": "cores" if row["cores"] > 0.85 * cores and row["device_busy"] < 0.9 else None}
                for row in sorted(
                    rates, key=lambda row: (row["length_ms"], row["clients"], row["system"] != "pathways")
                )
            ],
            "length_ms, clients, system, per_second, min=per_second_min, max=per_second_max, device_busy, cores, "
            "of_single, best_of_single, of_jax, limited by=limited",
        ),
        *Table.of(
            "Shares of device time over each second (Figure 9): distance from the target, in points",
            _share_rows(data.get("shares", [])),
        ),
        *Table.of("Wait of a run of 1 ms beside a flood of another client's", data.get("waits", [])),
        *Table.of("Dispatch of one client alone, runs of no length per second", [one] if one else []),
        *Table.of("Goals", goals),
    ]
    return Report("tenants", METHOD, tables, {"rows": data, "goals": goals}, notes)


def run(settings: tenants.Settings, say: Say = lambda words: None) -> Report:
    """Figures 8 and 9 of the paper: what many clients get of one cluster, together and each; and how long they wait."""
    check_names("part", settings.only, PARTS)
    check_names("rival", settings.rivals, RIVALS)
    if not settings.only:
        raise ValueError(f"nothing to measure: expected some of {', '.join(PARTS)}")
    if 1 not in settings.clients:
        raise ValueError("the numbers of clients must have 1 among them: the others are compared with it")
    notes = [
        f"The clients, the controller and the hosts share {len(os.sched_getaffinity(0))} cores. A client that gets no "
        "core in time has nothing to offer, and the others take its part. What is limited by cores says nothing about "
        "the devices.",
        *machine.busy(),
    ]
    return make({part: getattr(tenants, part)(settings, say) for part in PARTS if part in settings.only}, notes)
