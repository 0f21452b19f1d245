"""`python -m benchmarks.scale.agents`: arguments, the judged goals, and a small run with modelled machines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click.testing
import pytest

from benchmarks.scale import agents
from benchmarks.scale.agents import Memory, Runs, Settings


def bench(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(agents.command, arguments)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--agents", "0"), "0 is not in the range x>=1"),
        (("--agents", "many"), "not a valid integer"),
        (("--agents", "2", "--runs", "0"), "0 is not in the range x>=1"),
        (("--agents", "2", "--idle-seconds", "0"), "0.0 is not in the range x>0"),
    ],
)
def test_arguments(arguments: tuple[str, ...], why: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())


def test_memory_is_that_of_each_host_since_before() -> None:
    mib = 1 << 20
    before, after = Memory(100 * mib, 80 * mib, 10 * mib, 20), Memory(116 * mib, 84 * mib, 18 * mib, 70)
    assert after.since(before, 8) == {"uss_mib": 2.0, "anonymous_mib": 0.5, "shared_mib": 1.0}


def test_goals() -> None:
    one = dataclasses.asdict(Runs("pipelined", 9, 2.5, 3.0, 4.0, 1.0, 80.0, 90.0))
    memory = {"uss_mib": 1.0, "anonymous_mib": 0.9, "shared_mib": 3.0}
    report = agents.make(
        Settings(256),
        {
            "join": {"seconds": 19.0, "cpu_s": 8.0, "machines_cpu_s": 4.0, "begun_again": 2, "why": ["a reason"]},
            "idle": {"percent": 3.5, "seconds": 10.0},
            "memory_per_host": memory,
            "memory_per_host_after_runs": memory,
            "memory_joined": {"threads": 40},
            "memory_after_runs": {"threads": 41},
            "compile": {"seconds": 4.0, "cpu_s": 2.0, "machines_cpu_s": 1.0},
            "runs": [one, {**one, "how": "one by one", "us": 4.5}],
        },
    )
    assert [goal["reached"] for goal in report.data["goals"]] == [True, False, True, False, True]
    assert [goal["bound"] for goal in report.data["goals"]] == ["<= 20", "<= 3", "<= 1", "<= 2", "<= 5"]
    assert "joined again: a reason" in report.as_markdown()


def test_medians_are_of_each_number() -> None:
    runs = [Runs("pipelined", 9, *(float(each),) * 6) for each in (3, 1, 2)]
    assert agents._median(runs) == Runs("pipelined", 9, *(2.0,) * 6)


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "hosts"), [(4, 1), (2, 2)])
def test_a_small_cluster(tmp_path: Path, machines: int, hosts: int) -> None:
    """All hosts of all machines do all runs: `_check` compares the launches."""
    path = tmp_path / "found.json"
    shape = ("--agents", str(machines), "--hosts-per-agent", str(hosts), "--devices-per-host", "2")
    result = bench(*shape, "--runs", "10", "--repeats", "1", "--idle-seconds", "0.5", "--json", str(path))
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["what"] == "scale-agents"
    assert found["join"]["begun_again"] == 0
    assert found["machines"]["launches"] == (1 + 10 + 2) * machines * hosts
    assert [runs["how"] for runs in found["runs"]] == ["pipelined", "one by one"]
    assert all(runs["us_with_idle"] > 0 and runs["bytes_out"] > 0 and runs["bytes_in"] > 0 for runs in found["runs"])
    assert found["memory_joined"]["threads"] > 0
    assert len(found["goals"]) == 5
