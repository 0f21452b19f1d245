"""What `python -m benchmarks.mpmd` finds: its goals, its arithmetic and its tables. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.mpmd.client import Group
from pathways.bench import stats
from pathways.bench.goals import Bound, at_least, at_most, judged
from pathways.bench.report import Table

#: What is measured, in this order.
PARTS = ("pipeline", "hosts", "slice", "turns", "exchange", "mixture")
LOOPS = ("while", "fori", "scan")
KINDS = ("none", "sleep", "compute")
MOST_MARGIN = 10.0


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound for a value of a part, with steps of these kinds."""

    part: str
    value: str
    text: str
    bound: Bound
    kinds: tuple[str, ...] = ("sleep",)


_SLEEP_AND_COMPUTE = ("sleep", "compute")
GOALS = (
    Goal("pipeline", "islands over island", "throughput on four islands over that within one", at_least(0.99)),
    Goal("pipeline", "over bound", "time over that of the schedule's own bound", at_most(1.03)),
    *(
        Goal("hosts", f"{each} extra us", f"{each}: us beyond calls and transfers", at_most(30), KINDS)
        for each in LOOPS
    ),
    *(Goal("hosts", f"{each} over client", f"{each}: rate over a client's", at_least(10), ("none",)) for each in LOOPS),
    Goal("slice", "loop over chain", "a loop of one call on a slice over Chained", at_least(0.8), ("none",)),
    Goal("turns", "10 over 1", "10 iterations in flight over 1", at_least(1.8)),
    Goal("exchange", "of limit", "records over 2 x (pairs that send + hosts)", at_most(1.0), ("none",)),
    Goal("mixture", "k over all", "time with 2 of 16 experts over that with all 16", at_most(0.35), _SLEEP_AND_COMPUTE),
    Goal("mixture", "gradients of k over gradients of all", "the same, with gradients", at_most(0.35), ("compute",)),
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One repeat of a group: what its programs took, in microseconds per unit of work."""

    group: Group
    us: Mapping[str, float]
    """Medians of the repeat's runs."""
    least_us: Mapping[str, float]
    """The shortest of them."""
    traced: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What a trace says of a run of a pipeline; else empty."""


def values_of(group: Group, us: Mapping[str, float]) -> dict[str, float]:
    """What the goals speak of, and more of its kind: of what ran next to each other."""
    if group.part == "pipeline":
        return {"islands over island": us["island"] / us["islands"]}
    if group.part == "hosts":
        return {
            **{f"{name} extra us": us[name] - us["chain"] for name in LOOPS},
            **{f"{name} over client": us["client"] / us[name] for name in LOOPS},
            "transfers us": us["chain"] - us["calls"],
        }
    if group.part == "slice":
        loops = [name for name in us if name.startswith("loop")]
        return {f"{name} over chain": us["chain"] / us[name] for name in loops}
    if group.part == "turns":
        return {"10 over 1": us["loop, 1 in flight"] / us["loop, 10 in flight"]}
    pairs = [("k", "all"), ("k", "all, by exchange"), ("gradients of k", "gradients of all")]
    return {f"{over} over {under}": us[over] / us[under] for over, under in pairs if over in us and under in us}


def _groups(samples: Sequence[Sample]) -> dict[Group, list[Sample]]:
    found: dict[Group, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.group, []).append(sample)
    return found


def _head(group: Group) -> dict[str, Any]:
    return {
        "part": group.part,
        "schedule": group.schedule,
        "steps": group.step.kind,
        "length_us": group.step.length_us,
    }


def times_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row per group and program: microseconds per unit of work."""
    rows = []
    for group, repeats in _groups(samples).items():
        for name in repeats[0].us:
            spread = stats.Spread.of([sample.us[name] for sample in repeats])
            row = {**_head(group), "program": name, "us": spread.median, "min": spread.low, "max": spread.high}
            rows.append({**row, "shortest": min(sample.least_us[name] for sample in repeats)})
    return rows


def ratios_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row per group and value: the median of the repeats; and the value of the shortest times of all repeats.

    What else the machine does only makes times longer. So on a busy machine the value of the shortest times says more.
    """
    rows = []
    for group, repeats in _groups(samples).items():
        found = [{**values_of(group, sample.us), **sample.traced} for sample in repeats]
        shortest = {name: min(sample.least_us[name] for sample in repeats) for name in repeats[0].us}
        traced = {name: min(sample.traced[name] for sample in repeats) for name in repeats[0].traced}
        best = {**values_of(group, shortest), **traced}
        for name in found[0]:
            spread = stats.Spread.of([each[name] for each in found])
            rows.append(
                {
                    **_head(group),
                    "value": name,
                    "median": spread.median,
                    "min": spread.low,
                    "max": spread.high,
                    "of shortest": best[name],
                    "repeats": spread.n,
                }
            )
    return rows


def exchange_row(shards: int, shards_per_host: int, count: Mapping[str, int]) -> dict[str, Any]:
    """One size of an exchange: its records, and how many it may have."""
    limit = 2 * (count["pairs"] + count["hosts"])
    return {
        "shards": shards,
        "shards per host": shards_per_host,
        "hosts": count["hosts"],
        "pairs that send": count["pairs"],
        "records": count["records"],
        "limit": limit,
        "of limit": count["records"] / limit,
    }


def margin(bound: Bound, value: float) -> float:
    """How many times better than asked; 10 at most. Below 1 the goal is missed."""
    over, under = (value, bound.limit) if bound.is_least else (bound.limit, value)
    return MOST_MARGIN if over >= MOST_MARGIN * max(under, 0.0) else over / under


def judge(ratios: Sequence[dict[str, Any]], exchanges: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """A row per goal and group that was measured. The median decides."""
    found = [*ratios]
    if exchanges:
        worst = max(row["of limit"] for row in exchanges)
        head = {"part": "exchange", "schedule": "", "steps": "none", "length_us": 0}
        found.append({**head, "value": "of limit", "median": worst, "of shortest": worst})
    return [
        {
            **judged(
                goal.text, goal.bound, row["median"], part=goal.part, schedule=row["schedule"], steps=row["steps"]
            ),
            "of shortest": row["of shortest"],
            "margin": margin(goal.bound, row["median"]),
        }
        for goal in GOALS
        for row in found
        if (row["part"], row["value"]) == (goal.part, goal.value) and row["steps"] in goal.kinds
    ]


def tables_of(
    times: Sequence[dict[str, Any]],
    ratios: Sequence[dict[str, Any]],
    exchanges: Sequence[dict[str, Any]],
    goals: Sequence[dict[str, Any]],
) -> list[Table]:
    """Tables of what was measured, the goals last."""
    return [
        *Table.of("Time of a training step, a loop's iteration, a mixture's step", times),
        *Table.of("Ratios and differences, of what ran next to each other", ratios),
        *Table.of("Records of an exchange of rows, two rows per shard to drawn shards", exchanges),
        *Table.of("Goals", goals),
    ]
