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
    "A chain of two calls over all shards of a cluster of modelled hosts, in one process. Each part is timed alone on "
    "one thread: the client's calls; the controller's passes (sequencer and messages, out and back), per host and run; "
    "the hosts' steps, per host and run. All hosts share one machine's caches, so per-host figures of big clusters "
    "hold cache misses that a real host would not have. Times are medians. The table of policies has the "
    "controller's time alone, with memory in the ledger and the policy's choice between two clients."
)


class NoSimulation(RuntimeError):
    """The native library has no simulation to measure with."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement, as the native side reports it; times in nanoseconds. See csrc/simulate/scale.h."""

    shards: int
    hosts: int
    client_call_ns: float
    client_release_ns: float
    controller_ns: float
    """Sequencer and message, per host and run."""
    controller_out_ns: float
    controller_in_ns: float
    host_ns: float
    bytes_per_buffer: int
    plan_nodes: int
    plan_bytes_per_host: int
    run_bytes_per_host: int
    run_bytes_controller: int
    messages_per_host_run: int


@dataclasses.dataclass(frozen=True)
class PolicyPoint:
    """The controller's time per host and run under a policy, at one size. See csrc/simulate/controller_cost.h."""

    policy: str
    clients: int
    hosts: int
    shards: int
    controller_ns: float
    """Policy, admission, order and messages."""
    runs: int
    charged: int
    """Runs that the policy chose and charged; 0: no policy chose."""


POLICIES = (("fifo", 1), ("share", 1), ("fifo", 2), ("share", 2))
_RUNS_TOGETHER = 32

_FIELDS = tuple(field.name for field in dataclasses.fields(Point))
_TIMES = tuple(name for name in _FIELDS if name.endswith("_ns"))

Simulate = Callable[[int, int], Point]


def native_point(hosts: int, shards: int) -> Point:
    """The call point: one measurement by the native simulation. Raises NoSimulation where it is not built in."""
    try:
        native: Any = importlib.import_module("pathways._native")
    except ImportError as error:
        raise NoSimulation(f"pathways._native cannot be imported: {error}; build the package first") from None
    if not hasattr(native, "simulate"):
        raise NoSimulation("this build of pathways._native has no `simulate`; rebuild it from a newer source")
    measured = native.simulate(hosts=hosts, shards=shards)
    found = measured if isinstance(measured, dict) else {name: getattr(measured, name, None) for name in _FIELDS}
    if absent := [name for name in _FIELDS if found.get(name) is None]:
        raise NoSimulation(f"pathways._native.simulate: expected {', '.join(_FIELDS)}; without {', '.join(absent)}")
    values: dict[str, Any] = {name: found[name] for name in _FIELDS}
    return Point(**values)


SimulatePolicy = Callable[[str, int, int, int], PolicyPoint]


def native_policy(policy: str, clients: int, hosts: int, devices: int) -> PolicyPoint:
    """One measurement of the controller. Raises NoSimulation where it is not built in."""
    native: Any = importlib.import_module("pathways._native")
    if not hasattr(native, "simulate_policy"):
        raise NoSimulation("this build of pathways._native has no `simulate_policy`; rebuild it from a newer source")
    found = native.simulate_policy(hosts, devices, clients, policy, runs=_RUNS_TOGETHER // clients)
    return PolicyPoint(policy, clients, hosts, hosts * devices, found["ns"], found["runs"], found["charged"])


def hosts_to_measure(max_shards: int, devices_per_host: int) -> list[int]:
    """Powers of four from one host up, so that the last has `max_shards` shards or fewer."""
    hosts = [1]
    while hosts[-1] * 4 * devices_per_host <= max_shards:
        hosts.append(hosts[-1] * 4)
    return hosts


def _median(points: Sequence[Point]) -> Point:
    times: dict[str, Any] = {name: stats.quantile([getattr(p, name) for p in points], 0.5) for name in _TIMES}
    return dataclasses.replace(points[0], **times)


def judge(points: Sequence[Point], policies: Sequence[PolicyPoint] = ()) -> list[dict[str, Any]]:
    """The goals of this instrument over points in order of shards, and over those of the policies."""
    few, many = points[0], points[-1]
    worst = max(point.controller_ns for point in points)
    span = f"{many.shards:,} shards over {few.shards:,}"
    judged: list[tuple[str, float, float]] = [
        (f"COST-1: client cost of a call, {span}", 1.1, many.client_call_ns / few.client_call_ns),
        (f"COST-1: client bytes per buffer, {span}", 1.0, many.bytes_per_buffer / few.bytes_per_buffer),
        (f"COST-2: plan bytes per host, {span}", 1.0, many.plan_bytes_per_host / few.plan_bytes_per_host),
        (f"COST-2: plan nodes, {span}", 1.0, many.plan_nodes / few.plan_nodes),
        ("COST-3: sequencer and message per host and run, worst, us", 2.0, worst / 1000),
    ]
    judged += [
        (
            f"COST-3: {each.policy}, {each.clients} clients, admission, order and message per host and run, "
            f"{each.shards:,} shards, us",
            2.0,
            each.controller_ns / 1000,
        )
        for each in policies
    ]
    return [{"goal": text, "at_most": most, "value": value, "reached": value <= most} for text, most, value in judged]


def make(points: Sequence[Point], all_points: Sequence[Point], policies: Sequence[PolicyPoint] = ()) -> Report:
    """The report of the medians `points`, the single measurements they come from, and the medians by policy."""
    judged = judge(points, policies)
    tables = [
        Table("Scale", _FIELDS, [dataclasses.astuple(point) for point in points]),
        Table("Goals", ("goal", "at most", "value", "reached"), [tuple(row.values()) for row in judged]),
    ]
    if policies:
        names = tuple(field.name for field in dataclasses.fields(PolicyPoint))
        tables.insert(1, Table("Policies", names, [dataclasses.astuple(each) for each in policies]))
    rows = [dataclasses.asdict(point) for point in points]
    samples = [dataclasses.asdict(point) for point in all_points]
    return Report(
        "scale",
        METHOD,
        tables,
        {
            "rows": rows,
            "goals": judged,
            "samples": samples,
            "policies": [dataclasses.asdict(each) for each in policies],
        },
    )


def run(
    max_shards: int,
    devices_per_host: int,
    repeats: int,
    simulate: Simulate = native_point,
    simulate_policy: SimulatePolicy = native_policy,
) -> Report:
    """Measures every size `repeats` times, sizes interleaved; and the policies on the biggest, interleaved, too."""
    hosts = hosts_to_measure(max_shards, devices_per_host)
    by_hosts: dict[int, list[Point]] = {count: [] for count in hosts}
    by_policy: dict[tuple[str, int], list[PolicyPoint]] = {each: [] for each in POLICIES}
    for _ in range(repeats):
        for count in hosts:
            by_hosts[count].append(simulate(count, count * devices_per_host))
        for policy, clients in POLICIES:
            by_policy[policy, clients].append(simulate_policy(policy, clients, hosts[-1], devices_per_host))
    samples = [point for points in by_hosts.values() for point in points]
    policies = [
        dataclasses.replace(found[0], controller_ns=stats.quantile([each.controller_ns for each in found], 0.5))
        for found in by_policy.values()
    ]
    return make([_median(points) for points in by_hosts.values()], samples, policies)
