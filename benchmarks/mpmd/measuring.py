"""`python -m benchmarks.mpmd`: the speed of what SPMD cannot say: pipelines, loops over slices, exchanges, mixtures.

The programs that are compared take turns, on clusters of host processes. Two clusters have as many devices: one in four
islands, one in a single island. `programs` has the programs, `client` times them in the process of a cluster's client,
`goals` judges.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.mpmd import goals as mpmd_goals
from benchmarks.mpmd.client import Group, Step
from benchmarks.mpmd.goals import PARTS, Sample
from pathways.bench import machine
from pathways.bench.command import Say, check_names, option
from pathways.bench.processes import Child
from pathways.bench.report import Report
from pathways.bench.turns import Turns

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZeroBubbleH1")
STAGES = 4
#: (islands, hosts of each); each host has one device.
CLUSTERS = {"islands": (STAGES, 1), "island": (1, STAGES)}

METHOD = (
    "All clusters are host processes of one device each, with real transfers. In each repeat the programs of a group "
    "take turns; a ratio is taken in each repeat, and the median of the repeats is compared with the goal. 'of "
    "shortest' is the same value of the shortest times of all repeats. Steps of kind sleep take their time, no core; "
    "compute multiplies matrices for about as long; none only adds one. "
    "Pipeline: a training step of four stages and 8 microbatches, three in a row, on four islands and in one island of "
    "four hosts; forward, input gradient and weight gradient take the length each. 'over bound': the time of one "
    "traced run over that of the schedule's bound: the same order with the median lengths, if transfers took no time. "
    "Hosts: an iteration is a call on each of two hosts, in islands of their own; 4 KiB go there and back. chain: as "
    "many calls and transfers in one plan; calls: the same calls without a transfer; client: the client reads the "
    "predicate after each iteration. 'extra' is the loop less the chain. "
    "Slice: a loop of one call on one slice, against 128 calls in one program, ten of these in flight. "
    "Turns: each iteration has a call on one slice, and one on another slice that reads its result. "
    "Exchange: counted by the core's own protocol between modelled hosts. "
    "Mixture: k sends each row to 2 of 16 experts on four islands; 'all' sends all rows to all slices, where each "
    "expert computes all of them; 'all, by exchange' is k with 16 experts per row. A sleeping expert sleeps per block "
    "of 32 rows."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured. Lengths of steps in microseconds."""

    only: tuple[str, ...] = option(PARTS, "What to measure.")
    pipeline_us: int = option(10_000, "Of a stage's step.", least=100)
    hosts_us: int = option(300, "Of a call on two hosts.")
    turns_us: int = 1_000
    mixture_us: int = 500
    microbatches: int = 8
    iterations: int = 64
    calls: int = 1_280
    rows: int = 512
    max_shards: int = 4_096
    schedules: tuple[str, ...] = SCHEDULES
    repeats: int = option(4, "How often each is measured.")
    seconds: float = option(0.3, "Length of one measurement.", least=0.01)


#: By part: a cluster, the program that is timed there, and its name in tables.
VARIANTS = {
    "pipeline": (("islands", "step", "islands"), ("island", "step", "island")),
    "hosts": tuple(("islands", name, name) for name in ("while", "fori", "scan", "chain", "calls", "client")),
    "slice": tuple(("islands", name, name) for name in ("loop", "loop, 10 in flight", "loop, 100 in flight", "chain")),
    "turns": tuple(("islands", name, name) for name in ("loop, 1 in flight", "loop, 10 in flight")),
    "mixture": tuple(
        ("islands", name, name) for name in ("k", "all", "all, by exchange", "gradients of k", "gradients of all")
    ),
}


# ------------------------------------------------------------------------------------------------------- measuring


def open_cluster(name: str) -> Child:
    """A process for the client of one cluster."""
    return Child("benchmarks.mpmd.client:Client")


class Bench:
    """The clusters that some parts need, which take turns."""

    def __init__(self, parts: Sequence[str], turns: Turns) -> None:
        self.ask = turns.ask
        self._names: dict[tuple[str, Group], list[str]] = {}
        needed = {cluster for part in parts for cluster, _, _ in VARIANTS.get(part, ())}
        for name, (islands, hosts) in CLUSTERS.items():
            if name in needed:
                turns.start(name, islands, hosts)

    def step(self, kind: str, length_us: int) -> Step:
        """A step of a kind; one that computes is calibrated."""
        if kind == "none":
            return Step(kind, 0, 0)
        amount = length_us if kind == "sleep" else self.ask("islands", "calibrate", length_us)
        return Step(kind, length_us, amount)

    def load(self, group: Group) -> None:
        """Compiles the programs of a group on all clusters where they run."""
        for cluster in dict.fromkeys(cluster for cluster, _, _ in VARIANTS[group.part]):
            self._names[cluster, group] = self.ask(cluster, "load", group)

    def sample(self, group: Group, seconds: float) -> Sample:
        """One repeat."""
        us, least_us = {}, {}
        for cluster, program, name in VARIANTS[group.part]:
            if program in self._names[cluster, group]:
                us[name], least_us[name] = self.ask(cluster, "time", group, program, seconds)
        traced = {}
        if group.part == "pipeline" and group.step.kind == "sleep":  # others have no length that does not change
            traced = self.ask("islands", "bubble", group)
        return Sample(group, us, least_us, traced)


def groups(bench: Bench, settings: Settings) -> Iterator[Group]:
    """What is compared, in the order of `PARTS`."""
    parts = settings.only
    if "pipeline" in parts:
        for schedule in settings.schedules:
            step = bench.step("sleep", settings.pipeline_us)
            yield Group("pipeline", step, settings.microbatches, schedule)
        yield Group("pipeline", bench.step("compute", settings.pipeline_us // 4), settings.microbatches, "1F1B")
    if "hosts" in parts:
        for kind in ("none", "sleep", "compute"):
            yield Group("hosts", bench.step(kind, settings.hosts_us), settings.iterations)
    if "slice" in parts:
        yield Group("slice", bench.step("none", 0), settings.calls)
    if "turns" in parts:
        for kind in ("sleep", "compute"):
            yield Group("turns", bench.step(kind, settings.turns_us), settings.iterations)
    if "mixture" in parts:
        yield Group("mixture", bench.step("sleep", settings.mixture_us), settings.rows)
        yield Group("mixture", Step("compute", 0, 0), settings.rows)


def measure(bench: Bench, settings: Settings, say: Say) -> list[Sample]:
    """All repeats of all groups. A program that is slow once is not slow in each repeat: a part's groups take turns."""
    samples: list[Sample] = []
    by_part: dict[str, list[Group]] = {}
    for group in groups(bench, settings):
        by_part.setdefault(group.part, []).append(group)
    for members in by_part.values():
        for group in members:
            bench.load(group)
        for _ in range(settings.repeats):
            samples += [bench.sample(group, settings.seconds) for group in members]
        for row in mpmd_goals.ratios_of([sample for sample in samples if sample.group in members]):
            head = " ".join(filter(None, (row["part"], row["schedule"], row["steps"])))
            say(f"{head}: {row['value']} {row['median']:.3g} ({row['min']:.3g} to {row['max']:.3g})")
    return samples


Count = Callable[[int, int], Mapping[str, int]]


def count_exchange(shards: int, shards_per_host: int) -> Mapping[str, int]:
    """Records of one exchange, counted by the core: see csrc/simulate/exchange_count.h."""
    from pathways import _native

    return _native.count_exchange(shards, shards_per_host)


def exchanges(max_shards: int, count: Count = count_exchange) -> list[dict[str, Any]]:
    """The records of exchanges from 4 shards on, by shards of a host."""
    rows = []
    for shards_per_host in (1, 8):
        shards = 4 * shards_per_host
        while shards <= max_shards:
            rows.append(mpmd_goals.exchange_row(shards, shards_per_host, count(shards, shards_per_host)))
            shards *= 4
    return rows


def make(samples: Sequence[Sample], counted: Sequence[dict[str, Any]], notes: Sequence[str]) -> Report:
    """The report of finished samples."""
    times, ratios = mpmd_goals.times_of(samples), mpmd_goals.ratios_of(samples)
    judged = mpmd_goals.judge(ratios, counted)
    rows = {"times": times, "ratios": ratios, "exchanges": list(counted)}
    raw = [dataclasses.asdict(sample) for sample in samples]
    tables = mpmd_goals.tables_of(times, ratios, counted, judged)
    return Report("mpmd", METHOD, tables, {"rows": rows, "goals": judged, "samples": raw}, notes)


def run(settings: Settings, say: Say = lambda words: None) -> Report:
    """Pipelines, loops over slices, exchanges of rows, mixtures of experts: what SPMD cannot say, and what it costs."""
    check_names("part", settings.only, PARTS)
    if not settings.only:
        raise ValueError(f"nothing to measure: expected some of {', '.join(PARTS)}")
    notes = [
        f"The hosts, a controller and a client share {len(os.sched_getaffinity(0))} cores: each message wakes a "
        "sleeping process, and steps that compute compete with the runtime and with each other.",
        *machine.busy(),
    ]
    counted = exchanges(settings.max_shards) if "exchange" in settings.only else []
    with Turns(open_cluster) as turns:
        samples = measure(Bench(settings.only, turns), settings, say)
    return make(samples, counted, notes)
