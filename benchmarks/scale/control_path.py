"""`python -m benchmarks.scale`: what the control path costs over modelled devices, from 4 shards to 65,536.

The devices take no time and there is no JAX: what is left is the client, the sequencer, the messages and the plan.
The measuring is native (`pathways._native.simulate`); this file chooses the points, repeats them and judges the laws
COST-1 (client), COST-2 (plan) and COST-3 (sequencer).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pathways import _native
from pathways.bench import stats
from pathways.bench.command import Say, option
from pathways.bench.goals import at_most, judged
from pathways.bench.report import Report, Table

METHOD = (
    "A chain of two calls over all shards of a cluster of modelled hosts, in one process. Each part is timed alone on "
    "one thread: the client's calls; the controller's passes (sequencer and messages, out and back), per host and run; "
    "the hosts' steps, per host and run. All hosts share one machine's caches, so per-host figures of big clusters "
    "hold cache misses that a real host would not have. Times are medians. The table of policies has the "
    "controller's time alone, with memory in the ledger and the policy's choice between two clients."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    max_shards: int = option(65536, "Of the biggest cluster.", least=4)
    devices_per_host: int = option(4, "Of each host.")
    repeats: int = option(3, "How often each is measured.")


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
SimulatePolicy = Callable[[str, int, int, int], PolicyPoint]


def native_point(hosts: int, shards: int) -> Point:
    """One measurement by the native simulation."""
    measured = _native.simulate(hosts=hosts, shards=shards)
    return Point(**{name: measured[name] for name in _FIELDS})


def native_policy(policy: str, clients: int, hosts: int, devices: int) -> PolicyPoint:
    """One measurement of the controller."""
    found = _native.simulate_policy(hosts, devices, clients, policy, runs=_RUNS_TOGETHER // clients)
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
    found = [
        (f"COST-1: client cost of a call, {span}", 1.1, many.client_call_ns / few.client_call_ns),
        (f"COST-1: client bytes per buffer, {span}", 1.0, many.bytes_per_buffer / few.bytes_per_buffer),
        (f"COST-2: plan bytes per host, {span}", 1.0, many.plan_bytes_per_host / few.plan_bytes_per_host),
        (f"COST-2: plan nodes, {span}", 1.0, many.plan_nodes / few.plan_nodes),
        ("COST-3: sequencer and message per host and run, worst, us", 2.0, worst / 1000),
    ]
    for each in policies:
        what = f"COST-3: {each.policy}, {each.clients} clients, admission, order and message per host and run"
        found.append((f"{what}, {each.shards:,} shards, us", 2.0, each.controller_ns / 1000))
    return [judged(text, at_most(most), value) for text, most, value in found]


def make(points: Sequence[Point], all_points: Sequence[Point], policies: Sequence[PolicyPoint] = ()) -> Report:
    """The report of the medians `points`, the single measurements they come from, and the medians by policy."""
    rows, samples, by_policy = (
        [dataclasses.asdict(each) for each in found] for found in (points, all_points, policies)
    )
    goals = judge(points, policies)
    tables = [*Table.of("Scale", rows), *Table.of("Policies", by_policy), *Table.of("Goals", goals)]
    data = {"rows": rows, "goals": goals, "samples": samples, "policies": by_policy}
    return Report("scale", METHOD, tables, data)


def run(
    settings: Settings,
    say: Say = lambda words: None,
    simulate: Simulate = native_point,
    simulate_policy: SimulatePolicy = native_policy,
) -> Report:
    """The control path over modelled devices: cost per call, per host and run, bytes per buffer and plan."""
    devices = settings.devices_per_host
    hosts = hosts_to_measure(settings.max_shards, devices)
    by_hosts: dict[int, list[Point]] = {count: [] for count in hosts}
    by_policy: dict[tuple[str, int], list[PolicyPoint]] = {each: [] for each in POLICIES}
    for turn in range(settings.repeats):  # sizes interleaved; and the policies on the biggest
        for count in hosts:
            by_hosts[count].append(simulate(count, count * devices))
        for policy, clients in POLICIES:
            by_policy[policy, clients].append(simulate_policy(policy, clients, hosts[-1], devices))
        say(f"repeat {turn + 1} of {settings.repeats}")
    samples = [point for points in by_hosts.values() for point in points]
    policies = [
        dataclasses.replace(found[0], controller_ns=stats.quantile([each.controller_ns for each in found], 0.5))
        for found in by_policy.values()
    ]
    return make([_median(points) for points in by_hosts.values()], samples, policies)
