"""`pathways bench scale`: what the control path costs over modelled devices, from 4 shards to 65,536.

The devices take no time and there is no JAX: what is left is the client, the sequencer, the messages and the plan.
The measuring is native (`pathways._native.simulate`); this file chooses the points, repeats them and judges the laws
COST-1 (client), COST-2 (plan) and COST-3 (sequencer).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from pathways.bench import stats
from pathways.bench.report import Report, Table

METHOD = (
    "One program of two computations over all shards, on modelled devices that take no time, in one process; the "
    "hosts' own work is left out of the figures of client and sequencer. Client: CPU time of a call. Sequencer and "
    "message: CPU time of the controller for one run on one host, with its messages. Medians over the repeats."
)


class NoSimulation(RuntimeError):
    """The native library has no simulation to measure with."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement. Times are CPU nanoseconds; `_bytes` what is held per logical buffer, and each plan's size."""

    shards: int
    hosts: int
    client_ns_per_call: float
    sequencer_ns_per_host_run: float
    buffer_bytes: int
    client_plan_bytes: int
    host_plan_bytes: int
    plan_nodes: int


Simulate = Callable[[int, int], Point]


def native_point(hosts: int, devices: int) -> Point:
    """The call point: one measurement by the native simulation. Raises NoSimulation where it is not built in."""
    try:
        _native = importlib.import_module("pathways._native")
    except ImportError as error:
        raise NoSimulation(f"pathways._native cannot be imported: {error}; build the package first") from None
    simulate: Any = getattr(_native, "simulate", None)
    if simulate is None:
        raise NoSimulation("this build of pathways._native has no `simulate`; rebuild it from a newer source")
    measured = simulate(hosts=hosts, devices=devices)
    fields = {field.name for field in dataclasses.fields(Point)} - {"shards", "hosts"}
    if absent := fields - set(measured):
        raise NoSimulation(f"pathways._native.simulate: expected the keys {sorted(fields)}, without {sorted(absent)}")
    return Point(hosts * devices, hosts, **{name: measured[name] for name in fields})


def hosts_to_measure(max_shards: int, devices_per_host: int) -> list[int]:
    """Powers of four from one host up, so that the last has `max_shards` shards or fewer."""
    hosts = [1]
    while hosts[-1] * 4 * devices_per_host <= max_shards:
        hosts.append(hosts[-1] * 4)
    return hosts


def _median(points: Sequence[Point]) -> Point:
    return dataclasses.replace(
        points[0],
        client_ns_per_call=stats.quantile([point.client_ns_per_call for point in points], 0.5),
        sequencer_ns_per_host_run=stats.quantile([point.sequencer_ns_per_host_run for point in points], 0.5),
    )


def judge(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The goals of this instrument over points in order of shards."""
    few, many = points[0], points[-1]
    worst = max(point.sequencer_ns_per_host_run for point in points)
    growth = many.client_ns_per_call / few.client_ns_per_call
    span = f"{many.shards:,} shards over {few.shards:,}"
    judged: list[tuple[str, float, float]] = [
        (f"COST-1: client cost of a call, {span}", 1.1, growth),
        (f"COST-1: client bytes per buffer, {span}", 1.0, many.buffer_bytes / few.buffer_bytes),
        (f"COST-2: client plan bytes, {span}", 1.0, many.client_plan_bytes / few.client_plan_bytes),
        (f"COST-2: plan nodes, {span}", 1.0, many.plan_nodes / few.plan_nodes),
        ("COST-3: sequencer and message per host and run, worst, us", 2.0, worst / 1000),
    ]
    return [{"goal": text, "at_most": most, "value": value, "reached": value <= most} for text, most, value in judged]


def make(points: Sequence[Point], all_points: Sequence[Point]) -> Report:
    """The report of the medians `points` and the single measurements they come from."""
    columns = tuple(field.name for field in dataclasses.fields(Point))
    judged = judge(points)
    tables = [
        Table("Scale", columns, [dataclasses.astuple(point) for point in points]),
        Table("Goals", ("goal", "at most", "value", "reached"), [tuple(row.values()) for row in judged]),
    ]
    rows = [dataclasses.asdict(point) for point in points]
    samples = [dataclasses.asdict(point) for point in all_points]
    return Report("scale", METHOD, tables, {"rows": rows, "goals": judged, "samples": samples})


def run(max_shards: int, devices_per_host: int, repeats: int, simulate: Simulate = native_point) -> Report:
    """Measures every size `repeats` times, sizes interleaved."""
    hosts = hosts_to_measure(max_shards, devices_per_host)
    by_hosts: dict[int, list[Point]] = {count: [] for count in hosts}
    for _ in range(repeats):
        for count in hosts:
            by_hosts[count].append(simulate(count, devices_per_host))
    samples = [point for points in by_hosts.values() for point in points]
    return make([_median(points) for points in by_hosts.values()], samples)
