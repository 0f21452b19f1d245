"""`python -m benchmarks.mpmd`: its arithmetic, its turns with doubles for clusters, its picture, and a tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click.testing
import pytest

from benchmarks.mpmd import __main__ as main
from benchmarks.mpmd import goals as mpmd_goals
from benchmarks.mpmd import measuring as mpmd
from benchmarks.mpmd.client import Group, Step
from benchmarks.mpmd.goals import Sample
from pathways.bench import goals
from pathways.bench.turns import Turns

SLEEP = Step("sleep", 300, 300)
PIPELINE = Group("pipeline", SLEEP, 8, "1F1B")
HOSTS = Group("hosts", Step("none", 0, 0), 64)
HOSTS_US = {"while": 140.0, "fori": 110.0, "scan": 90.0, "chain": 100.0, "calls": 20.0, "client": 1100.0}


def test_values_compare_what_ran_next_to_each_other() -> None:
    values = mpmd_goals.values_of
    assert values(PIPELINE, {"islands": 50.0, "island": 40.0}) == {"islands over island": 0.8}
    found = values(HOSTS, HOSTS_US)
    assert (found["while extra us"], found["fori extra us"], found["scan extra us"]) == (40, 10, -10)
    assert (found["fori over client"], found["transfers us"]) == (10, 80)
    one = values(Group("slice", HOSTS.step, 128), {"loop": 20.0, "loop, 20 in flight": 10.0, "chain": 10.0})
    assert one == {"loop over chain": 0.5, "loop, 20 in flight over chain": 1.0}
    turns = values(Group("turns", SLEEP, 64), {"loop, 1 in flight": 20.0, "loop, 10 in flight": 10.0})
    assert turns == {"10 over 1": 2.0}
    assert values(Group("mixture", SLEEP, 64), {"k": 2.0, "all": 8.0}) == {"k over all": 0.25}


def sample(us: float, least: float, over: float) -> Sample:
    return Sample(PIPELINE, {"islands": us, "island": 100.0}, {"islands": least, "island": 90.0}, {"over bound": over})


def test_rows_are_medians_of_repeats_and_of_the_shortest() -> None:
    samples = [sample(100, 80, 1.02), sample(200, 100, 1.01), sample(50, 50, 1.2)]
    ratio, over = mpmd_goals.ratios_of(samples)
    assert (ratio["value"], ratio["median"], ratio["min"], ratio["max"]) == ("islands over island", 1.0, 0.5, 2.0)
    assert (ratio["of shortest"], ratio["repeats"]) == (1.8, 3)
    assert (over["median"], over["of shortest"]) == (1.02, 1.01)
    first, _ = mpmd_goals.times_of(samples)
    assert (first["program"], first["us"], first["min"], first["max"], first["shortest"]) == (
        "islands",
        100,
        50,
        200,
        50,
    )
    judged = mpmd_goals.judge([ratio, over])
    assert [row["reached"] for row in judged] == [True, True]
    missed = mpmd_goals.judge([{**ratio, "median": 0.98}, {**over, "median": 1.04}])
    assert [row["reached"] for row in missed] == [False, False]
    assert mpmd_goals.judge([{**ratio, "steps": "compute"}]) == []  # the goal speaks of steps that sleep


def test_margins() -> None:
    least, most = goals.at_least(10), goals.at_most(30)
    margin = mpmd_goals.margin
    assert (margin(least, 5), margin(least, 20), str(least)) == (0.5, 2, ">= 10")
    assert (margin(most, 60), margin(most, 15), str(most)) == (0.5, 2, "<= 30")
    assert margin(most, -3) == margin(most, 0) == margin(least, 1e9) == mpmd_goals.MOST_MARGIN
    assert most.is_met(-3) and not most.is_met(31)


def test_the_worst_exchange_is_judged() -> None:
    rows = mpmd.exchanges(64, lambda shards, per_host: {"hosts": 8, "pairs": shards, "records": 2 * shards + per_host})
    assert [(row["shards"], row["shards per host"]) for row in rows] == [(4, 1), (16, 1), (64, 1), (32, 8)]
    assert rows[0]["limit"] == 24 and rows[0]["of limit"] == 9 / 24
    (goal,) = mpmd_goals.judge([], rows)
    assert goal["value"] == max(row["of limit"] for row in rows)
    assert goal["reached"]


def test_the_core_counts_records() -> None:
    for row in mpmd.exchanges(256):
        assert row["records"] == row["pairs that send"] + 2 * (row["hosts"] - 1)
    with pytest.raises(ValueError, match="a multiple of those on a host"):
        mpmd.count_exchange(6, 4)


class FakeCluster:
    """A cluster of fixed times. `log` collects who was asked what."""

    def __init__(self, log: list[tuple[str, ...]], others: list[FakeCluster]) -> None:
        self.log, self.others, self.awake, self.name = log, others, True, ""
        others.append(self)

    def ask(self, *request: Any, timeout: float) -> Any:
        assert self.awake
        assert not any(other.awake for other in self.others if other is not self)
        verb = request[0]
        if verb == "start":
            self.name = {(4, 1): "islands", (1, 4): "island"}[request[1:]]
        self.log.append((self.name, verb, *(str(each) for each in request[1:3])))
        if verb == "load":
            return [name for _, name, _ in mpmd.VARIANTS[request[1].part] if "gradients" not in name]
        answers = {"time": (20.0, 10.0), "calibrate": 77, "bubble": {"bubble": 0.3, "over bound": 1.03}}
        return answers.get(verb)

    def freeze(self) -> None:
        self.awake = False

    def thaw(self) -> None:
        self.awake = True

    def end(self) -> None:
        self.log.append((self.name, "end"))
        self.awake = False

    def kill(self) -> None:
        self.awake = False


def test_clusters_and_programs_take_turns(tmp_path: Path) -> None:
    log: list[tuple[str, ...]] = []
    clusters: list[FakeCluster] = []
    told: list[str] = []
    with Turns(lambda name: FakeCluster(log, clusters), 0.0) as turns:
        samples = mpmd.measure(mpmd.Bench(mpmd.PARTS, turns), mpmd.Settings(repeats=2), told.append)
    assert len(samples) == 2 * (len(mpmd.SCHEDULES) + 1 + 3 + 1 + 2 + 2)
    timed = [entry for entry in log if entry[1] == "time"]
    first = "pipeline GPipe sleep 10000 us"
    assert timed[:2] == [("islands", "time", first, "step"), ("island", "time", first, "step")]
    assert timed[2][2].startswith("pipeline 1F1B")  # the groups of a part take turns
    assert [entry[3] for entry in timed if entry[2] == "hosts none"][:6] == [*HOSTS_US]
    assert not any(entry[3].startswith("gradients") for entry in timed)  # a cluster has what it says that it has
    assert {sample.group.step.amount for sample in samples if sample.group.step.kind == "compute"} == {77, 0}
    assert any("10 over 1 1 (1 to 1)" in text for text in told)
    report = mpmd.make(samples, mpmd.exchanges(64), ["a note"])
    assert [table.title.split(",")[0] for table in report.tables] == [
        "Time of a training step",
        "Ratios and differences",
        "Records of an exchange of rows",
        "Goals",
    ]
    data = json.loads(report.as_json())
    assert data["samples"][0]["group"]["schedule"] == "GPipe"
    parts = {row["part"] for row in data["goals"]}
    assert parts == set(mpmd.PARTS) == {goal.part for goal in mpmd_goals.GOALS}
    pytest.importorskip("matplotlib")
    assert main.picture(report.data, tmp_path / "goals.png")
    assert (tmp_path / "goals.png").stat().st_size > 10_000
    assert not main.picture({"goals": []}, tmp_path / "none.png")


def test_only_the_clusters_of_a_part_are_started() -> None:
    clusters: list[FakeCluster] = []
    with Turns(lambda name: FakeCluster([], clusters), 0.0) as turns:
        mpmd.Bench(["slice"], turns)
    assert [cluster.name for cluster in clusters] == ["islands"]


def test_a_cluster_that_does_not_start_leaves_none_behind() -> None:
    clusters: list[FakeCluster] = []

    class Broken(FakeCluster):
        def ask(self, *request: Any, timeout: float) -> Any:
            if request[1:] == (1, 4):
                raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), Turns(lambda name: Broken([], clusters), 0.0) as turns:
        mpmd.Bench(["pipeline"], turns)
    assert len(clusters) == 2
    assert not any(cluster.awake for cluster in clusters)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "loops"], "unknown part 'loops'"),
        (["--only", ""], "nothing to measure"),
        (["--pipeline-us", "1"], "x>=100"),
    ],
)
def test_command_refuses(arguments: list[str], text: str) -> None:
    result = click.testing.CliRunner().invoke(main.command, arguments)
    assert result.exit_code == 2
    assert text in result.output


@pytest.mark.slow
def test_tiny_run(tmp_path: Path) -> None:
    options = ["--only", "slice,turns,exchange", "--repeats", "1", "--seconds", "0.05", "--results", str(tmp_path)]
    result = click.testing.CliRunner().invoke(main.command, options)
    assert result.exit_code == 0, result.output
    (page,) = tmp_path.glob("mpmd-*.md")
    assert "10 iterations in flight over 1" in page.read_text()
    (data,) = tmp_path.glob("mpmd-*.json")
    found = json.loads(data.read_text())
    assert {row["part"] for row in found["goals"]} == {"slice", "turns", "exchange"}
    for row in found["rows"]["times"]:
        assert (
            row["us"] > row["length_us"] / 10
        )  # the lengths were calibrated on a machine that may have been busy then
    assert list(tmp_path.glob("mpmd-*.png"))


@pytest.mark.slow
@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("part", ["pipeline", "hosts", "mixture"])
def test_tiny_run_of_a_part(part: str) -> None:
    sizes: dict[str, int] = {"microbatches": 4, "iterations": 4, "rows": 64, "repeats": 1}
    lengths = {"pipeline_us": 500, "hosts_us": 100, "mixture_us": 50}
    settings = mpmd.Settings((part,), **sizes, **lengths, seconds=0.05, schedules=("ZeroBubbleH1",))
    report = mpmd.run(settings)
    assert {row["part"] for row in report.data["goals"]} == {part}
    assert {row["steps"] for row in report.data["rows"]["times"]} >= {"sleep", "compute"}
