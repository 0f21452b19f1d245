"""`python -m benchmarks.tenants`: shares from samples, the goals, the picture, and a tiny run of the real thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click.testing
import pytest

from benchmarks.tenants import __main__ as main
from benchmarks.tenants import report as tenants_report
from benchmarks.tenants import shares as tenants_shares
from benchmarks.tenants.client import ahead_of
from benchmarks.tenants.shares import Sample

MS = 1_000_000


def samples(*rows: tuple[float, int, int]) -> list[Sample]:
    return [Sample(at, {"a": first * MS, "b": second * MS}) for at, first, second in rows]


def test_shares_are_of_what_was_charged_in_the_window() -> None:
    taken = samples((0.0, 0, 0), (0.5, 100, 400), (1.0, 250, 750), (1.5, 1000, 0), (2.0, 1150, 850))
    first, second = tenants_shares.windows(taken, 0.0, 2.0, ["a", "b"], 1.0)
    assert (first.begin, first.end, first.busy) == (0.0, 1.0, pytest.approx(1.0))
    assert first.shares == {"a": pytest.approx(0.25), "b": pytest.approx(0.75)}
    assert second.shares == {"a": pytest.approx(0.9), "b": pytest.approx(0.1)}
    assert tenants_shares.worst_error([first], {"a": 1, "b": 3}) == pytest.approx(0.0)
    assert tenants_shares.worst_error([first, second], {"a": 1, "b": 3}) == pytest.approx(0.65)


def test_a_window_says_how_late_its_samples_were() -> None:
    rows = zip(samples((0.0, 0, 0), (0.5, 5, 5), (1.0, 9, 9), (2.0, 20, 20)), (0.9, 0.2, 0.1, 0.0), strict=True)
    taken = [Sample(each.time, each.device_ns, late) for each, late in rows]
    assert [window.late for window in tenants_shares.windows(taken, 0.0, 2.0, ["a", "b"], 1.0)] == [0.2, 0.0]


def test_windows_have_all_clients_and_lie_inside() -> None:
    alone = [Sample(0.0, {"a": 5 * MS})]
    taken = alone + samples((1.0, 10, 10), (2.0, 20, 10), (3.0, 30, 10))
    (window,) = tenants_shares.windows(taken, 0.0, 2.5, ["a", "b"], 1.0)
    assert (window.begin, window.end, window.shares["a"]) == (1.0, 2.0, 1.0)
    assert tenants_shares.windows(taken, 5.0, 9.0, ["a"], 1.0) == []


def test_a_flood_is_as_long_in_time_whatever_its_steps() -> None:
    assert [ahead_of((us,)) for us in (0, 100, 1000, 10_000, 100_000)] == [600, 600, 150, 15, 8]
    assert ahead_of((100, 1000, 10_000)) == 41


def data(
    of_single: float = 1.0, worst: float = 0.01, p99_ms: float = 2.0, ratio: float = 1.0, one_run: float = 0.01
) -> dict[str, Any]:
    def rate(length_ms: float, clients: int, system: str) -> dict[str, Any]:
        names = ("per_second", "per_second_min", "per_second_max", "device_busy", "cores", "of_jax")
        return {
            "system": system,
            "length_ms": length_ms,
            "clients": clients,
            "of_single": 0.5,
            "best_of_single": of_single,
            **dict.fromkeys(names, 1.0),
        }

    share = {"hosts": 2, "weights": [1, 3], "targets": [0.25, 0.75], "mix": "each its own", "load": 0.0}
    wait = dict.fromkeys(("runs", "p50_ms", "max_ms", "alone_p50_ms", "load"), 1.0)
    return {
        "rates": [rate(ms, n, system) for ms in (0.33, 2.4) for n in (1, 16) for system in ("pathways", "jax")],
        "shares": [
            {
                **share,
                **dict.fromkeys(("median", "nominal_worst", "charged"), 0.01),
                "worst": worst,
                "one_run": one_run,
                "worst_late_ms": 3.0,
                "seconds": [{"at": 1.0, "shares": [0.2, 0.8]}, {"at": 2.0, "shares": [0.3, 0.7]}],
            }
        ],
        "waits": [
            {"policy": policy, "weight": 1.0, "priority": 0, "p99_ms": p99_ms, **wait}
            for policy in ("fifo", "share", "priority")
        ],
        "dispatch": {"ratio": ratio},
    }


def results(**found: float) -> list[str]:
    return ["met" if row["reached"] else "missed" for row in tenants_report.judge(data(**found))]


def test_goals_are_met_or_missed() -> None:
    assert results() == ["met"] * 6
    assert results(of_single=0.98) == ["missed", "met", "met", "met", "met", "met"]
    assert results(worst=0.021) == ["met", "met", "missed", "met", "met", "met"]
    assert results(worst=0.021, one_run=0.03) == ["met"] * 6
    assert results(worst=0.031, one_run=0.03) == ["met", "met", "missed", "met", "met", "met"]
    assert results(p99_ms=5.0) == ["met", "met", "met", "met", "missed", "met"]
    assert results(ratio=0.97) == ["met", "met", "met", "met", "met", "missed"]
    assert "| no |" in tenants_report.make(data(ratio=0.97), []).as_markdown()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main.picture({"rows": data()}, tmp_path / "tenants.png")
    assert (tmp_path / "tenants.png").stat().st_size > 10_000
    assert not main.picture({"rows": {"dispatch": {}}}, tmp_path / "none.png")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "rates,speed"], "unknown part 'speed'"),
        (["--rivals", "ray"], "unknown rival 'ray'"),
        (["--only", ""], "nothing to measure"),
        (["--clients", "2,4"], "must have 1 among them"),
        (["--clients", "0"], "positive integers"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], words: str) -> None:
    found = click.testing.CliRunner().invoke(main.command, options)
    assert found.exit_code == 2
    assert words in found.output


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    options = ["--only", "rates", "--clients", "1", "--us", "1000", "--repeats", "1", "--seconds", "0.3"]
    found = click.testing.CliRunner().invoke(main.command, [*options, "--json", str(path)])
    assert found.exit_code == 0, found.output
    rows = json.loads(path.read_text())["rows"]["rates"]
    assert [(row["system"], row["clients"]) for row in rows] == [
        ("pathways", 1),
        ("jax", 1),
    ]
    assert all(0 < row["per_second"] <= 1100 for row in rows)
