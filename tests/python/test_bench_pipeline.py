"""`pathways bench pipeline`: its prediction, its turns with doubles for clusters, and a tiny run of the real thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click.testing
import pytest

from pathways.bench import cli, pipeline
from pathways.bench.pipeline import Point, Sample, Step


def test_hops_are_hidden_behind_the_computation() -> None:
    assert pipeline.extra_us(hop_us=40, prepare_us=30, compute_us=0) == 150
    assert pipeline.extra_us(hop_us=40, prepare_us=30, compute_us=100) == 50
    assert pipeline.extra_us(hop_us=40, prepare_us=30, compute_us=1000) == 0


def test_every_stage_but_the_first_is_delayed() -> None:
    # Nothing but hops: 1 in parallel dispatch, 3 more in sequential dispatch; of a long pipeline, four times as slow.
    assert pipeline.predicted_ratio(2, 100, 10, 0, 0) == pytest.approx(1.3)
    assert pipeline.predicted_ratio(1001, 10_000, 10, 0, 0) == pytest.approx(4.0)
    assert pipeline.predicted_ratio(16, 100, 10, 0, 500) == 1.0


def sample(parallel: float, sequential: float, hop: float = 10, prepare: float = 0, compute: float = 0) -> Sample:
    return Sample(parallel, sequential, hop, prepare, compute)


def test_rows_are_medians_of_paired_repeats() -> None:
    point = Point(4, Step.sleep(100), 0, [sample(1000, 2000), sample(2000, 2000), sample(1000, 3000)])
    row = point.row()
    assert (row["stages"], row["kind"], row["length_us"], row["repeats"]) == (4, "sleep", 100, 3)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (2.0, 1.0, 3.0)
    assert row["parallel_per_second"] == pytest.approx(4000)
    assert row["parallel_per_second_min"] == pytest.approx(2000)
    assert row["parallel_overhead_us"] == pytest.approx(150)
    assert row["sequential_overhead_us"] == pytest.approx(400)
    assert row["predicted"] == pytest.approx(1.09)
    assert row["over_predicted"] == pytest.approx(2 / 1.09)
    assert not row["as_predicted"]


def row(kind: str, ratio: float, predicted: float) -> dict[str, Any]:
    over = ratio / predicted
    fits = abs(over - 1) <= pipeline.WITHIN
    return {"kind": kind, "ratio": ratio, "predicted": predicted, "over_predicted": over, "as_predicted": fits}


def test_goals_speak_of_steps_that_sleep() -> None:
    close, far = pipeline.judge([row("sleep", 1.05, 1.0), row("sleep", 3.2, 3.1), row("matmul", 9.0, 1.0)])
    assert (close["points"], close["missed"], close["reached"]) == (2, 0, True)
    assert close["worst"] == pytest.approx(1.05)
    assert (far["points"], far["worst"], far["reached"]) == (1, 3.2, True)
    close, far = pipeline.judge([row("sleep", 2.0, 3.1)])
    assert (close["reached"], far["missed"], far["reached"]) == (False, 1, False)
    close, far = pipeline.judge([row("sleep", 1.0, 1.0)])
    assert (far["points"], far["reached"]) == (0, None)  # nothing was predicted: nothing is claimed
    assert pipeline.judge([])[0]["reached"] is None


class FakeCluster:
    """A cluster of fixed times. `log` collects who was asked what."""

    def __init__(self, log: list[tuple[str, str]], others: list[FakeCluster]) -> None:
        self.log, self.others, self.mode, self.awake = log, others, "", True
        others.append(self)

    def ask(self, *request: Any, timeout: float) -> Any:
        assert self.awake
        assert not any(other.awake for other in self.others if other is not self)
        verb = request[0]
        if verb == "start":
            self.mode = request[2]
            assert request[3] == 500
        self.log.append((self.mode, verb))
        if verb == "run":
            stages, _, amount, *rest = request[1:]
            each = amount + (100 if self.mode == "parallel" else 220)
            return {"run_us": float(stages * each - (50 if rest[1:] == [True] else 0)), "prepare_us": 20.0}
        return {"calibrate": 77, "compute_us": 5.0}.get(verb)

    def freeze(self) -> None:
        self.awake = False

    def thaw(self) -> None:
        self.awake = True

    def end(self) -> None:
        self.log.append((self.mode, "end"))
        self.awake = False

    def kill(self) -> None:
        self.awake = False


def test_clusters_take_turns_and_hops_are_measured_with_a_stage_between() -> None:
    log: list[tuple[str, str]] = []
    clusters: list[FakeCluster] = []
    pauses: list[tuple[float, float]] = []

    def hop(sleep_us: float, work_us: float) -> float:
        assert not any(cluster.awake for cluster in clusters)
        pauses.append((sleep_us, work_us))
        return 40.0

    bench = pipeline.Bench(4, 0.1, 500, lambda: FakeCluster(log, clusters), hop, settle=0.0)
    assert bench.transfer_adds_us() == 50.0
    points = list(pipeline.measure(bench, [2, 4], [0, 300], ["sleep", "matmul"], repeats=2))
    bench.end()
    assert [(p.stages, p.step) for p in points] == [
        (count, step) for count in (2, 4) for step in (Step.sleep(0), Step.sleep(300), Step("matmul", 300, 77))
    ]
    assert all(len(point.samples) == 2 for point in points)
    assert points[3].samples[0] == Sample(400.0, 880.0, 40.0, 20.0, 5.0)
    assert pauses[:4] == [(0, 100.0)] * 2 + [(300, 100.0)] * 2
    turn = [("parallel", "run"), ("sequential", "run"), ("parallel", "compute_us")]
    assert log[-8:] == [*turn, *turn, ("parallel", "end"), ("sequential", "end")]
    report = pipeline.make(points, [50.0, 60.0], ["a note"])
    assert [table.title.split(":")[0] for table in report.tables] == [
        "Computations per second, and overhead per stage",
        "Sequential over parallel",
        "Goals",
        "A transfer of 4 KiB between hosts",
    ]
    assert "predicted" in report.as_markdown()
    assert json.loads(report.as_json())["rows"][0]["samples"][0]["parallel_us"] == 200.0


def test_a_cluster_that_does_not_start_leaves_none_behind() -> None:
    clusters: list[FakeCluster] = []

    class Broken(FakeCluster):
        def ask(self, *request: Any, timeout: float) -> Any:
            if request[2] == "sequential":
                raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        pipeline.Bench(2, 0.1, 0, lambda: Broken([], clusters), lambda *_: 1.0, settle=0.0)
    assert len(clusters) == 2
    assert not any(cluster.awake for cluster in clusters)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--stages", "1,2"], "from 2 on"),
        (["--us", "-5"], "from 0 on"),
        (["--kinds", "nap"], "unknown kind of step 'nap'"),
    ],
)
def test_command_refuses(arguments: list[str], text: str) -> None:
    result = click.testing.CliRunner().invoke(cli.bench, ["pipeline", *arguments])
    assert result.exit_code == 2
    assert text in result.output


@pytest.mark.slow
def test_tiny_run(tmp_path: Path) -> None:
    options = [
        "--stages",
        "2",
        "--us",
        "0,200",
        "--distances",
        "300",
        "--repeats",
        "1",
        "--seconds",
        "0.05",
        "--results",
        str(tmp_path),
    ]
    result = click.testing.CliRunner().invoke(cli.bench, ["pipeline", *options])
    assert result.exit_code == 0, result.output
    (page,) = tmp_path.glob("pipeline-*.md")
    assert "as the hops predict" in page.read_text()
    (data,) = tmp_path.glob("pipeline-*.json")
    rows = json.loads(data.read_text())["rows"]
    assert [(row["kind"], row["length_us"]) for row in rows] == [("sleep", 0), ("sleep", 200), ("matmul", 200)]
    for found in rows:
        assert found["parallel_per_second"] > 0
        assert found["hop_us"] > 300
        assert found["prepare_us"] > 0
    assert rows[1]["parallel_per_second"] < 1e6 / 200  # the stages did take their time
