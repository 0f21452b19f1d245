"""`pathways bench mpmd`: the speed of what SPMD cannot say: pipelines, loops over slices, exchanges, mixtures.

The programs that are compared take turns, on clusters of host processes. Two clusters have as many devices: one in four
islands, one in a single island. The cluster that is not asked is stopped by signal. `mpmd_programs` has the programs,
`mpmd_client` times them in the process of a cluster's client, `mpmd_goals` judges.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.mpmd import goals as mpmd_goals
from benchmarks.mpmd.client import Group, Step
from benchmarks.mpmd.goals import PARTS, Sample
from pathways.bench import processes
from pathways.bench.report import Report

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZeroBubbleH1")
STAGES = 4
#: (islands, hosts of each); each host has one device.
CLUSTERS = {"islands": (STAGES, 1), "island": (1, STAGES)}
START_TIMEOUT, ANSWER_TIMEOUT = 300.0, 180.0

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

    pipeline_us: int = 10_000
    hosts_us: int = 300
    turns_us: int = 1_000
    mixture_us: int = 500
    microbatches: int = 8
    iterations: int = 64
    calls: int = 1_280
    rows: int = 512
    max_shards: int = 4_096
    schedules: tuple[str, ...] = SCHEDULES
    repeats: int = 4
    seconds: float = 0.3


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


class Cluster(Protocol):
    """What the harness needs of a cluster's client: a `processes.Child`, or a test's double."""

    def ask(self, *request: Any, timeout: float) -> Any:
        """Sends a request and returns its answer, or raises ChildError."""
        ...

    def freeze(self) -> None:
        """Stops its processes until `thaw`."""
        ...

    def thaw(self) -> None:
        """Lets them go on."""
        ...

    def end(self) -> None:
        """Ends it in good order."""
        ...

    def kill(self) -> None:
        """Ends it at once, with its tree."""
        ...


def open_cluster() -> Cluster:
    """The real thing: a process for the client of one cluster."""
    return processes.Child("benchmarks.mpmd.client")


class Bench:
    """The clusters that some parts need. One of them works at a time."""

    def __init__(
        self, parts: Sequence[str], open_cluster: Callable[[], Cluster] = open_cluster, settle: float = 0.1
    ) -> None:
        self._settle = settle
        self._clusters: dict[str, Cluster] = {}
        self._awake: str | None = None
        self._names: dict[tuple[str, Group], list[str]] = {}
        needed = {cluster for part in parts for cluster, _, _ in VARIANTS.get(part, ())}
        try:
            for name, (islands, hosts) in CLUSTERS.items():
                if name in needed:
                    self._clusters[name] = open_cluster()
                    self._clusters[name].ask("start", islands, hosts, timeout=START_TIMEOUT)
                    self._clusters[name].freeze()
        except BaseException:
            self.kill()
            raise

    def ask(self, name: str, *request: Any) -> Any:
        """One request to one of the clusters, the other one stopped."""
        if self._awake != name:
            if self._awake is not None:
                self._clusters[self._awake].freeze()
            self._clusters[name].thaw()
            self._awake = name
            time.sleep(self._settle)
        return self._clusters[name].ask(*request, timeout=ANSWER_TIMEOUT)

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

    def end(self) -> None:
        """Ends everything in good order."""
        for cluster in self._clusters.values():
            cluster.thaw()
            cluster.end()

    def kill(self) -> None:
        """Ends everything now."""
        for cluster in self._clusters.values():
            cluster.kill()


def groups(bench: Bench, parts: Sequence[str], settings: Settings) -> Iterator[Group]:
    """What is compared, in the order of `PARTS`."""
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


def measure(bench: Bench, parts: Sequence[str], settings: Settings, progress: Callable[[str], None]) -> list[Sample]:
    """All repeats of all groups. A program that is slow once is not slow in each repeat: a part's groups take turns."""
    samples: list[Sample] = []
    by_part: dict[str, list[Group]] = {}
    for group in groups(bench, parts, settings):
        by_part.setdefault(group.part, []).append(group)
    for members in by_part.values():
        for group in members:
            bench.load(group)
        for _ in range(settings.repeats):
            samples += [bench.sample(group, settings.seconds) for group in members]
        for row in mpmd_goals.ratios_of([sample for sample in samples if sample.group in members]):
            head = " ".join(filter(None, (row["part"], row["schedule"], row["steps"])))
            progress(f"{head}: {row['value']} {row['median']:.3g} ({row['min']:.3g} to {row['max']:.3g})")
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


def run(parts: Sequence[str], settings: Settings, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Measures and reports. Raises ValueError for what cannot be measured."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"unknown part {unknown[0]!r}: expected some of {', '.join(PARTS)}")
    if not parts:
        raise ValueError(f"nothing to measure: expected some of {', '.join(PARTS)}")
    cores = len(os.sched_getaffinity(0))
    notes = [
        f"The hosts, a controller and a client share {cores} cores: each message wakes a sleeping process, and steps "
        "that compute compete with the runtime and with each other."
    ]
    if (load := os.getloadavg()[0]) > 0.5:
        notes.append(f"The machine was busy at the start (load {load:.1f}): the figures are rough.")
    samples: list[Sample] = []
    counted = exchanges(settings.max_shards) if "exchange" in parts else []
    if any(part in VARIANTS for part in parts):
        with processes.orphans_come_home():
            bench = Bench(parts)
            try:
                samples = measure(bench, parts, settings, progress)
            except BaseException:
                bench.kill()
                raise
            bench.end()
    return make(samples, counted, notes)
