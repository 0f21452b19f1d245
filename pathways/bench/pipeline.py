"""`pathways bench pipeline`: parallel dispatch beside sequential dispatch, in the manner of the paper's Figure 7.

A pipeline has a stage on each of 2 to 16 hosts; a stage takes the 4 KiB that the one before it sends, computes for a
given time and adds one. Two clusters run it, one for each way of dispatch, taking turns; one run at a time, from the
call to its ready result. Beside them, in the same round, what the prediction needs is measured: what a hop costs.

The prediction. In parallel dispatch all stages are prepared while the first still runs, so between one stage and the
next there is what the data needs: the value is computed, sent (one hop), and its reader is launched. In sequential
dispatch the work for the next stage begins when a stage has been enqueued, and goes on beside its computation:

    report (one hop) -> the controller says go (one hop) -> the host prepares its stage -> where to write (one hop)

The data leaves when both have come to an end. So each stage but the first takes longer by

    extra = max(0, 3 hops + preparing - computing)

and the ratio of the two is 1 + (stages - 1) x extra / (time of a run in parallel dispatch). `preparing` is counted by
the hosts of the sequential cluster, `computing` (from launch to value, by XLA alone) in the client's process, the hop
between two processes that wait as ours do.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from pathways.bench import processes, stats
from pathways.bench.report import Report, Table

MODES = ("parallel", "sequential")
START_TIMEOUT = 300.0
ANSWER_TIMEOUT = 120.0
HOPS = 40
HOPS_ON_THE_WAY = 3  # of sequential dispatch, from one stage's launch to when the next could be sent to
WITHIN = 0.10
AT_LEAST = 3.0

METHOD = (
    "One stage per host, each an island of one CPU device; 4 KiB go from stage to stage. One run at a time, from the "
    "call to the ready result; the clusters take turns, the other stopped by signal. Figures are medians of the "
    "repeats' medians. overhead: time per stage less the step's own. hop: a record to another process that waits as "
    "ours do, sent after a pause like a stage; preparing: a host's work on a go, from sequential dispatch; computing: "
    "from launch to value in a process alone. predicted: 1 + (stages - 1) x max(0, 3 hops + preparing - computing) / "
    "(run in parallel dispatch). distance: what each message between controller and hosts is made to take longer, as "
    "between machines; hop holds it. Steps of kind sleep take their time and no core; matmul computes as long. "
    "All processes share the machine's cores."
)


@dataclasses.dataclass(frozen=True)
class Step:
    """What a stage computes. `amount` is what `kind` counts in: microseconds of sleep, turns of a loop of products."""

    kind: str
    length_us: int
    amount: int

    @classmethod
    def sleep(cls, length_us: int) -> Step:
        """Takes so long, and no core."""
        return cls("sleep", length_us, length_us)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One repeat of one point; all in microseconds."""

    parallel_us: float
    """A run, median."""
    sequential_us: float
    hop_us: float
    prepare_us: float
    compute_us: float
    """From launch to value."""

    def ratio(self) -> float:
        """How many times faster parallel dispatch is."""
        return self.sequential_us / self.parallel_us

    def predicted(self, stages: int) -> float:
        """What the hops say that `ratio` should be."""
        return predicted_ratio(stages, self.parallel_us, self.hop_us, self.prepare_us, self.compute_us)


def extra_us(hop_us: float, prepare_us: float, compute_us: float) -> float:
    """By how much sequential dispatch delays a stage, beside the computation of the stage before it."""
    return max(0.0, HOPS_ON_THE_WAY * hop_us + prepare_us - compute_us)


def predicted_ratio(stages: int, parallel_us: float, hop_us: float, prepare_us: float, compute_us: float) -> float:
    """Time of a run in sequential dispatch over that in parallel dispatch."""
    return 1.0 + (stages - 1) * extra_us(hop_us, prepare_us, compute_us) / parallel_us


@dataclasses.dataclass
class Point:
    """A number of stages and a step, with all repeats."""

    stages: int
    step: Step
    distance_us: int = 0
    samples: list[Sample] = dataclasses.field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """One flat row, units in the names."""
        row: dict[str, Any] = {
            "distance_us": self.distance_us,
            "stages": self.stages,
            "kind": self.step.kind,
            "length_us": self.step.length_us,
        }
        for mode in MODES:
            runs = [getattr(sample, f"{mode}_us") for sample in self.samples]
            rates = stats.Spread.of([self.stages / us * 1e6 for us in runs])
            row[f"{mode}_per_second"] = rates.median
            row[f"{mode}_per_second_min"] = rates.low
            row[f"{mode}_per_second_max"] = rates.high
            row[f"{mode}_overhead_us"] = stats.quantile(runs, 0.5) / self.stages - self.step.length_us
        for name in ("hop_us", "prepare_us", "compute_us"):
            row[name] = stats.quantile([getattr(sample, name) for sample in self.samples], 0.5)
        ratio = stats.Spread.of([sample.ratio() for sample in self.samples])
        predicted = stats.quantile([sample.predicted(self.stages) for sample in self.samples], 0.5)
        return {
            **row,
            "ratio": ratio.median,
            "ratio_min": ratio.low,
            "ratio_max": ratio.high,
            "predicted": predicted,
            "over_predicted": ratio.median / predicted,
            "as_predicted": abs(ratio.median / predicted - 1.0) <= WITHIN,
            "repeats": ratio.n,
        }


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals over the rows of sleeping steps; real computation competes with the runtime for the cores."""
    sleeping = [row for row in rows if row["kind"] == "sleep"]
    far = [row for row in sleeping if row["predicted"] >= AT_LEAST]
    off = [row for row in sleeping if not row["as_predicted"]]
    worst = max(sleeping, key=lambda row: abs(row["over_predicted"] - 1.0), default=None)
    return [
        {
            "goal": f"sequential over parallel as the hops predict, within {WITHIN:.0%}",
            "points": len(sleeping),
            "missed": len(off),
            "worst": worst["over_predicted"] if worst else None,
            "reached": not off if sleeping else None,
        },
        {
            "goal": f"at least {AT_LEAST:g}x where the hops predict it",
            "points": len(far),
            "missed": sum(row["ratio"] < AT_LEAST for row in far),
            "worst": min((row["ratio"] for row in far), default=None),
            "reached": all(row["ratio"] >= AT_LEAST for row in far) if far else None,
        },
    ]


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
    return processes.Child("pathways.bench.pipeline_client")


class HopMeter:
    """Measures hops between this process and a child of it."""

    def __init__(self, distance_us: int) -> None:
        from pathways import _native

        self._distance_us = distance_us
        self._native: Any = _native
        self._child = processes.Child("pathways.bench.pipeline_client")

    def __call__(self, sleep_us: float, work_us: float) -> float:
        """Microseconds of one hop, median, each after a pause of that much sleep and work."""
        controller = self._native.controller_segment()
        host = self._native.host_segment(0, 1, 1 << 16, 0)
        self._native.set_distance(controller, self._distance_us)
        paths = [f"/proc/{os.getpid()}/fd/{segment.fd}" for segment in (controller, host)]
        self._child.send("echo_hops", *paths, HOPS)
        taken = self._native.ask_hops(controller, host, HOPS, round(sleep_us), max(0, round(work_us)))
        self._child.receive(ANSWER_TIMEOUT)
        return stats.quantile(taken, 0.5) / 1000

    def end(self) -> None:
        """Ends the child."""
        self._child.end()


class Bench:
    """Two clusters of `hosts` hosts, which take turns. `distance_us`: see `pw.LocalCluster`."""

    def __init__(
        self,
        hosts: int,
        seconds: float,
        distance_us: int = 0,
        open_cluster: Callable[[], Cluster] = open_cluster,
        measure_hop: Callable[[float, float], float] | None = None,
        settle: float = 0.1,
    ) -> None:
        self.distance_us = distance_us
        self._seconds = seconds
        self._settle = settle
        self._clusters: dict[str, Cluster] = {}
        self._own_meter = HopMeter(distance_us) if measure_hop is None else None
        self._measure_hop: Callable[[float, float], float] = measure_hop or self._own_meter  # type: ignore[assignment]
        try:
            for mode in MODES:
                self._clusters[mode] = open_cluster()
                self._clusters[mode].ask("start", hosts, mode, distance_us, timeout=START_TIMEOUT)
                self._clusters[mode].freeze()
        except BaseException:
            self.kill()
            raise

    def ask(self, mode: str, *request: Any) -> Any:
        """One request to one of the clusters, the other one stopped."""
        cluster = self._clusters[mode]
        cluster.thaw()
        time.sleep(self._settle)
        answer = cluster.ask(*request, timeout=ANSWER_TIMEOUT)
        cluster.freeze()
        return answer

    def matmul(self, length_us: int) -> Step:
        """A step that computes for about so long."""
        return Step("matmul", length_us, self.ask("parallel", "calibrate", length_us))

    def sample(self, stages: int, step: Step) -> Sample:
        """One repeat."""
        asked = (stages, step.kind, step.amount, self._seconds)
        parallel = self.ask("parallel", "run", *asked)
        sequential = self.ask("sequential", "run", *asked)
        overhead = parallel["run_us"] / stages - step.length_us
        is_sleep = step.kind == "sleep"
        hop = self._measure_hop(step.length_us if is_sleep else 0, overhead + (0 if is_sleep else step.length_us))
        compute = self.ask("parallel", "compute_us", step.kind, step.amount)
        return Sample(parallel["run_us"], sequential["run_us"], hop, sequential["prepare_us"], compute)

    def transfer_adds_us(self) -> float:
        """What a run of two stages of no length takes longer on two hosts than on one."""
        apart = self.ask("parallel", "run", 2, "sleep", 0, self._seconds)["run_us"]
        together = self.ask("parallel", "run", 2, "sleep", 0, self._seconds, True)["run_us"]
        return float(apart - together)

    def end(self) -> None:
        """Ends everything in good order."""
        for cluster in self._clusters.values():
            cluster.thaw()
            cluster.end()
        if self._own_meter is not None:
            self._own_meter.end()

    def kill(self) -> None:
        """Ends everything now."""
        for cluster in self._clusters.values():
            cluster.kill()
        if self._own_meter is not None:
            self._own_meter.end()


def measure(
    bench: Bench, stages: Sequence[int], lengths_us: Sequence[int], kinds: Sequence[str], repeats: int
) -> Iterator[Point]:
    """Yields one point after the other; within a point the two ways of dispatch take turns."""
    steps = [Step.sleep(us) for us in lengths_us] if "sleep" in kinds else []
    if "matmul" in kinds:
        steps += [bench.matmul(us) for us in lengths_us if us]
    for count in stages:
        for step in steps:
            point = Point(count, step, bench.distance_us)
            for mode in MODES:
                bench.ask(mode, "load", count, step.kind, step.amount)
            for _ in range(repeats):
                point.samples.append(bench.sample(count, step))
            yield point


def _table(title: str, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    columns = ("distance_us", "stages", "kind", "length_us", *names)
    return Table(title, columns, [tuple(row[name] for name in columns) for row in rows])


def make(points: Sequence[Point], transfers_us: Sequence[float], notes: Sequence[str]) -> Report:
    """The report of finished points."""
    rows = [point.row() for point in points]
    rates = [f"{mode}_per_second{end}" for mode in MODES for end in ("", "_min", "_max")]
    overheads = [f"{mode}_overhead_us" for mode in MODES]
    judged = judge(rows)
    tables = [
        _table("Computations per second, and overhead per stage", rows, [*rates, *overheads]),
        _table(
            "Sequential over parallel: measured, and as the hops predict",
            rows,
            ["hop_us", "prepare_us", "compute_us", "ratio", "ratio_min", "ratio_max", "predicted", "over_predicted"],
        ),
        Table("Goals", tuple(judged[0]), [tuple(row.values()) for row in judged]),
    ]
    if transfers_us:
        adds = stats.Spread.of(transfers_us)
        tables.append(
            Table(
                "A transfer of 4 KiB between hosts: what it adds to a run",
                ("us", "min", "max", "goal", "reached"),
                [(adds.median, adds.low, adds.high, 20.0, adds.median <= 20.0)],
            )
        )
    samples = [
        {**row, "samples": [dataclasses.asdict(sample) for sample in point.samples]}
        for row, point in zip(rows, points, strict=True)
    ]
    data = {"rows": samples, "goals": judged, "transfer_adds_us": list(transfers_us)}
    return Report("pipeline", METHOD, tables, data, notes)


def _told(point: Point) -> str:
    row = point.row()
    far = f"{point.distance_us} us apart, " if point.distance_us else ""
    return (
        f"{far}{point.stages} stages, {point.step.kind} {point.step.length_us} us: "
        f"{row['parallel_per_second']:,.0f} and {row['sequential_per_second']:,.0f} per s, "
        f"ratio {row['ratio']:.2f}, predicted {row['predicted']:.2f}"
    )


def run(
    stages: Sequence[int],
    lengths_us: Sequence[int],
    kinds: Sequence[str],
    repeats: int,
    seconds: float,
    distances_us: Sequence[int] = (0,),
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measures and reports. Raises ValueError for what cannot be measured."""
    if unknown := [kind for kind in kinds if kind not in ("sleep", "matmul")]:
        raise ValueError(f"unknown kind of step {unknown[0]!r}: expected sleep or matmul")
    if min(stages) < 2:
        raise ValueError(f"a pipeline has at least 2 stages, got {min(stages)}")
    cores = len(os.sched_getaffinity(0))
    notes = [
        f"{max(stages)} hosts, a controller and a client share {cores} cores: a hop wakes a sleeping process, and what "
        "one process does beside the way of the data may delay another that is on it."
    ]
    if (load := os.getloadavg()[0]) > 0.5:
        notes.append(f"The machine was busy at the start (load {load:.1f}): the figures are rough.")
    points: list[Point] = []
    transfers: list[float] = []
    with processes.orphans_come_home():
        for distance_us in distances_us:
            bench = Bench(max(stages), seconds, distance_us)
            try:
                if distance_us == 0:
                    transfers = [bench.transfer_adds_us() for _ in range(repeats)]
                for point in measure(bench, stages, lengths_us, kinds, repeats):
                    points.append(point)
                    progress(_told(point))
            except BaseException:
                bench.kill()
                raise
            bench.end()
    return make(points, transfers, notes)
