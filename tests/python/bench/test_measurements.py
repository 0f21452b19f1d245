"""The arithmetic of the benchmarks, and their tables and files: pure, no process started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import instructions, native
from benchmarks.scale import control_path as scale
from pathways.bench import command, dispatch, machine, micro, stats, transfer
from pathways.bench.report import Report, Table, number
from pathways.bench.stats import Spread, Value
from pathways.bench.workloads import COUNTING_LIMIT, Kind, Workload, check_value, workloads

MACHINE: dict[str, Any] = {
    "cpu": "A CPU (R) 9000",
    "cores": 2,
    "system": "Linux 6",
    "python": "3.11",
    "versions": {"jax": "0.10"},
    "commit": "abc123",
    "time": "now",
    "load_average": 0.0,
}


def test_quantile_interpolates() -> None:
    assert stats.quantile([4, 1, 3, 2], 0.5) == 2.5
    assert stats.quantile([1, 2, 3], 0.0) == 1
    assert stats.quantile([1, 2, 3], 1.0) == 3
    assert stats.quantile(range(101), 0.99) == pytest.approx(99)
    assert stats.quantile([7], 0.99) == 7


@pytest.mark.parametrize(("values", "q"), [([], 0.5), ([1], 1.5), ([1], -0.1)])
def test_quantile_refuses(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        stats.quantile(values, q)


def test_ratio_is_paired_by_repeat() -> None:
    """A machine that slows down for one repeat slows both sides; the ratio does not see it."""
    assert stats.paired_ratio([100, 10, 200], [50, 5, 100]) == Spread(2, 2, 2, 3)
    with pytest.raises(ValueError, match="equal numbers"):
        stats.paired_ratio([1], [1, 2])


def test_slope() -> None:
    assert stats.slope([1, 100, 1000], [5.1, 15, 105]) == pytest.approx((0.1, 5.0))
    with pytest.raises(ValueError, match="different x"):
        stats.slope([1, 1], [2, 3])


@pytest.mark.parametrize(
    ("steps", "seconds", "wanted"),
    [(100, 0.5, 200), (100, 2.0, 50), (100, 0.0, 1600), (100, 1e-6, 1600), (1, 100.0, 1)],
)
def test_next_steps(steps: int, seconds: float, wanted: int) -> None:
    assert stats.next_steps(steps, seconds, target=1.0) == wanted


def test_workloads_count_steps() -> None:
    assert len(workloads()) == 6
    assert Workload(Kind.OP_BY_OP, True).calls(1000) == 1000
    fused = Workload(Kind.FUSED, False)
    assert (fused.calls(1), fused.calls(129), fused.computations_per_call) == (1, 2, 1)
    assert Workload(Kind.CHAINED, False).computations_per_call == 128


def test_check_value_sees_a_lost_step() -> None:
    chained = Workload(Kind.CHAINED, True)
    check_value("x", chained, 1280, 1280.0)
    check_value("x", chained, COUNTING_LIMIT * 2, float(COUNTING_LIMIT))
    with pytest.raises(ValueError, match=r"expected 1280, got 1279"):
        check_value("x", chained, 1280, 1279.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (True, "yes"), (1234567, "1,234,567"), (1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"),
     (0.0123, "0.0123"), (0.0000123, "1.23e-05"), (0.0, "0"), (0.9, "0.900"), ("a", "a")],
)  # fmt: skip
def test_number(value: Any, text: str) -> None:
    assert number(value) == text


def test_table_refuses_uneven_rows() -> None:
    with pytest.raises(ValueError, match="expected 2 values"):
        Table("t", ("a", "b"), [(1,)])


def test_report_files(tmp_path: Path) -> None:
    table = Table("Things", ("what", "n"), [("a|b", 1000), ("c", None)])
    report = Report("micro", "As ever.", [table], {"rows": [1]}, ["careful"], MACHINE)
    paths = report.save(tmp_path / "results")
    assert [path.name for path in paths] == ["micro-abc123-a-cpu-r-9000.json", "micro-abc123-a-cpu-r-9000.md"]
    data = json.loads(paths[0].read_text())
    assert (data["rows"], data["notes"], data["machine"]["cores"]) == ([1], ["careful"], 2)
    page = paths[1].read_text()
    assert "| a/b | 1,000 |" in page
    assert "- careful" in page


def test_machine_describes_itself() -> None:
    described = machine.describe()
    assert described["cores"] >= 1
    assert "numpy" in described["versions"]
    assert json.dumps(described)


def test_goals_are_judged_on_their_shapes_only() -> None:
    row = {"workload": "Chained", "collective": True, "rival": "jax", "devices": 1, "ratio": 1.5}
    judged = dispatch.judge(
        [{**row, "hosts": 2}, {**row, "hosts": 4}, {**row, "hosts": 2, "ratio": 0.99, "devices": 2}]
    )
    assert [(r["hosts"], r["devices"], r["reached"]) for r in judged] == [(2, 1, True), (2, 2, False)]


def test_google_benchmark_output() -> None:
    def entry(time: float, unit: str = "ns", run_type: str = "iteration", **counters: float) -> dict[str, Any]:
        name = "BM_hop/8/real_time"
        return {"name": name, "run_name": name, "run_type": run_type, "real_time": time, "time_unit": unit, **counters}

    output = {"benchmarks": [entry(10, hop_p50_ns=4), entry(0.03, "us"), entry(20), entry(99, run_type="aggregate")]}
    assert native.parse(output) == {"hop/8": Spread(20, 10, 30, 3), "hop/8 hop_p50_ns": Spread(4, 4, 4, 1)}


def test_micro_judges_by_name() -> None:
    report = micro.make(
        [
            Value("call to futures, 1 leaves", Spread(4, 3.9, 4.1, 3), "us"),
            Value("transfer over memcpy", Spread(0.5, 0.4, 0.6, 3), "ratio"),
            Value("something new", Spread(1, 1, 1, 1), "ns"),
        ],
        [],
    )
    assert [row["reached"] for row in report.data["rows"]] == [True, False, None]


def test_micro_refuses_unknown_probes() -> None:
    with pytest.raises(ValueError, match="unknown probe 'nothing'"):
        micro.run(micro.Settings(only=("nothing",)))


def test_native_programs_that_are_not_built(tmp_path: Path) -> None:
    with pytest.raises(command.NotHere, match=r"bench_\* is not in .*: build it with"):
        native.run(native.Settings(str(tmp_path)))
    with pytest.raises(command.NotHere, match="count_control is not in"):
        instructions.run(instructions.Settings(str(tmp_path)))


def fake_point(hosts: int, shards: int) -> scale.Point:
    return scale.Point(shards, hosts, 1000.0 + hosts, 9.0, 500.0, 300.0, 200.0, 800.0, 64, 4, 512, 96, 96, 2)


def fake_policy(policy: str, clients: int, hosts: int, devices: int) -> scale.PolicyPoint:
    return scale.PolicyPoint(policy, clients, hosts, hosts * devices, 1000.0, 32, 0)


def test_scale_measures_every_size() -> None:
    assert scale.hosts_to_measure(65536, 4) == [1, 4, 16, 64, 256, 1024, 4096, 16384]
    report = scale.run(scale.Settings(64, 4, 3), simulate=fake_point, simulate_policy=fake_policy)
    assert [row["shards"] for row in report.data["rows"]] == [4, 16, 64]
    assert len(report.data["samples"]) == 9
    assert all(row["reached"] for row in report.data["goals"])


def test_scale_sees_a_client_that_grows() -> None:
    points = [fake_point(1, 4), scale.dataclasses.replace(fake_point(4, 16), client_call_ns=1200.0)]
    assert [row["reached"] for row in scale.judge(points)] == [False, True, True, True, True]


def test_the_core_measures_a_point() -> None:
    point, policy = scale.native_point(2, 8), scale.native_policy("share", 2, 2, 4)
    assert (point.hosts, point.shards, policy.shards) == (2, 8, 8)
    assert point.controller_ns > 0 and policy.controller_ns > 0 and policy.charged > 0


def test_transfers_are_compared_repeat_by_repeat_and_judged() -> None:
    def sample(system: str, many: float, **more: float) -> dict[str, Any]:
        point = {"system": system, "devices": 2, "columns": False, "bytes": 64 << 20}
        return {**point, "one": many, "many": many, **more}

    samples = [
        *(sample("pathways", many) for many in (0.01, 0.02, 0.01)),
        *(sample("machines", many) for many in (0.02, 0.04, 0.03)),
        *(sample("memcpy", many, fresh=0.04) for many in (0.008, 0.016, 0.009)),
        *(sample("jax_transfer", 0.03) for _ in range(2)),  # one repeat is missing: not compared
    ]
    dispatch = [
        {"devices": 2, "bytes": 4096, "alone": 1e-5, "moved": 2.5e-5, "alone_cpu": 0, "moved_cpu": 1e-6},
        {"devices": 2, "bytes": 4096, "alone": 1e-5, "moved": 4e-5, "alone_cpu": 0, "moved_cpu": 3e-6},
    ]
    report = transfer.make(samples, dispatch, ["a note"])
    by_system = {row["system"]: row for row in report.data["rows"]}
    assert by_system["memcpy"]["pathways over it"] == pytest.approx(0.8)
    assert by_system["memcpy"]["machines over it"] == pytest.approx(0.4)
    assert by_system["jax_transfer"]["pathways over it"] is by_system["machines"]["pathways over it"] is None
    assert by_system["memcpy"]["GB/s"] == pytest.approx((128 << 20) / 0.009 / 1e9)
    assert by_system["memcpy"]["fresh GB/s"] == pytest.approx((128 << 20) / 0.04 / 1e9)
    goals = {row["goal"]: row["reached"] for row in report.data["goals"]}
    assert goals == {
        "64 MiB to rows, 2 devices per host, over memcpy": True,
        "4 KiB transfer, added to the dispatch, 2 devices per host, us": False,
    }
    assert "a note" in report.as_markdown()
    with pytest.raises(ValueError, match="unknown rival 'scp'"):
        transfer.run(transfer.Settings(rivals=("scp",)))


def test_instructions_are_a_difference() -> None:
    """The set-up of a case does not count, whatever it takes."""

    def count(case: instructions.Case, turns: int) -> int:
        setup = 10**9 if "100000" in case.args else 5_000
        return setup + turns * (104 if case.args[:2] == ("dispatch", "share") else 100)

    report = instructions.measure(count)
    assert {row["case"]: row["instructions"] for row in report.data["rows"]}["a run, share"] == 104
    reached = {row["goal"]: (round(row["value"], 4), row["reached"]) for row in report.data["goals"]}
    assert reached["one client: share over fifo"] == (1.04, False)
    assert reached["a run beside 100,000 live buffers over 100"] == (1.0, True)


def test_what_callgrind_says() -> None:
    assert instructions.collected("==7== Events    : Ir\n==7== Collected : 188408443\n") == 188408443
    with pytest.raises(RuntimeError, match="did not say"):
        instructions.collected("==7== Killed\n")


def test_policies_of_scale_are_judged() -> None:
    points = [scale.PolicyPoint("share", 2, 16384, 65536, ns, 64, 1) for ns in (1900.0, 2100.0)]
    one = fake_point(1, 4)
    judged = [row for row in scale.judge([one, one], points) if "share" in row["goal"]]
    assert [row["reached"] for row in judged] == [True, False]
    assert any(table.title == "Policies" for table in scale.make([one, one], [], points).tables)
