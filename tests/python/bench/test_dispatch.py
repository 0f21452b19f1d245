"""The interleaved run with doubles for systems, and the processes under it with real children."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

from benchmarks import dispatch as all_rivals
from pathways.bench import cli, dispatch, processes, systems
from pathways.bench.systems.base import Run
from pathways.bench.systems.pathways_cluster import PathwaysEmbedded
from pathways.bench.turns import Conversation
from pathways.bench.workloads import Kind, Workload, workloads

ADD = Workload(Kind.OP_BY_OP, False)
CHAINED = Workload(Kind.CHAINED, True)


class FakeSystem:
    """A conversation with a system of a fixed rate, in no time. `log` collects who did what, in order."""

    def __init__(self, name: str, log: list[tuple[str, str]], rate: float, fails_on: Workload | None = None):
        self.name, self.log, self.rate, self.fails_on = name, log, rate, fails_on
        self.awake = True
        self.others: list[FakeSystem] = []

    def ask(self, *request: Any, timeout: float) -> Any:
        verb = request[0]
        assert self.awake
        assert not any(other.awake for other in self.others)
        self.log.append((self.name, verb))
        if verb != "start" and request[1] == self.fails_on:
            raise processes.ChildError(f"{self.name} broke")
        if verb == "throughput":
            steps = request[2]
            return Run(steps, steps / self.rate, 0.5 * steps / self.rate, float(steps))
        return [int(1e9 / self.rate)] * request[2] if verb == "latency" else None

    def freeze(self) -> None:
        self.awake = False

    def thaw(self) -> None:
        self.awake = True

    def end(self) -> None:
        assert self.awake
        self.log.append((self.name, "end"))
        self.awake = False

    def kill(self) -> None:
        self.awake = False
        self.log.append((self.name, "kill"))


def measure(open_system: Callable[[str], Conversation], **changes: Any) -> Iterator[list[dispatch.Cell]]:
    defaults: dict[str, Any] = {"names": ["pathways", "jax"], "loads": [ADD], "shapes": [(2, 1)]}
    timing: dict[str, Any] = {"repeats": 3, "seconds": 1.0, "settle": 0.0}
    return dispatch.measure(**{**defaults, **timing, **changes}, open_system=open_system)


def run_fake(log: list[tuple[str, str]], fails_on: Workload | None = None, **changes: Any) -> list[dispatch.Cell]:
    opened: list[FakeSystem] = []

    def open_system(name: str) -> Conversation:
        broken = fails_on if name == "jax" else None
        system = FakeSystem(name, log, rate=2000.0 if name == "pathways" else 1000.0, fails_on=broken)
        system.others = [other for other in opened if other.name != name]
        opened.append(system)
        return system

    return [cell for cells in measure(open_system, **changes) for cell in cells]


def test_systems_take_turns() -> None:
    log: list[tuple[str, str]] = []
    cells = run_fake(log)
    assert [cell.system for cell in cells] == ["pathways", "jax"]
    turn = [("pathways", "throughput"), ("pathways", "latency"), ("jax", "throughput"), ("jax", "latency")]
    assert log[-14:] == [*turn * 3, ("pathways", "end"), ("jax", "end")]
    assert [verb for _, verb in log].count("start") == 2


def test_rows_and_ratios() -> None:
    ours, theirs = (cell.row() for cell in run_fake([]))
    assert (ours["per_second"], ours["repeats"], ours["error"]) == (pytest.approx(2000), 3, None)
    assert ours["p50_us"] == ours["p99_us"] == 500.0
    assert ours["cpu_s_per_1000"] == pytest.approx(0.25)
    assert theirs["per_second_min"] == theirs["per_second_max"] == pytest.approx(1000)
    (ratio,) = dispatch.ratios(run_fake([]))
    assert (ratio["rival"], ratio["ratio"]) == ("jax", pytest.approx(2.0))


def test_step_count_adapts_to_the_rate() -> None:
    steps: list[int] = []

    class Counting(FakeSystem):
        def ask(self, *request: Any, timeout: float) -> Any:
            if request[0] == "throughput":
                steps.append(request[2])
            return super().ask(*request, timeout=timeout)

    list(measure(lambda name: Counting(name, [], 1000.0), names=["jax"], seconds=2.0))
    assert steps[0] == 4
    assert steps[-3:] == [2000] * 3


def test_a_failure_is_said_in_its_row_and_the_round_goes_on() -> None:
    log: list[tuple[str, str]] = []
    cells = run_fake(log, fails_on=ADD, loads=[ADD, CHAINED])
    by_name = {(cell.system, cell.workload.kind): cell.row() for cell in cells}
    assert by_name["jax", Kind.OP_BY_OP]["error"] == "jax broke"
    assert by_name["jax", Kind.OP_BY_OP]["per_second"] is None
    assert by_name["pathways", Kind.OP_BY_OP]["per_second"] == pytest.approx(2000)
    assert by_name["jax", Kind.CHAINED]["error"] is None  # started afresh
    assert log.count(("jax", "kill")) == 1
    assert log.count(("jax", "start")) == 2


def test_a_system_that_keeps_failing_is_given_up() -> None:
    log: list[tuple[str, str]] = []

    class Dead(FakeSystem):
        def ask(self, *request: Any, timeout: float) -> Any:
            self.log.append((self.name, request[0]))
            raise processes.ChildError("no start")

    found = measure(lambda name: Dead(name, log, 1.0), names=["jax"], loads=workloads())
    errors = [cell.error for cells in found for cell in cells]
    assert log.count(("jax", "start")) == 2
    assert errors[:2] == ["no start"] * 2
    assert all("given up" in str(error) for error in errors[2:])


def test_stopping_early_kills_everybody() -> None:
    log: list[tuple[str, str]] = []
    run = measure(lambda name: FakeSystem(name, log, 1000.0), loads=workloads())
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert log[-2:] == [("pathways", "kill"), ("jax", "kill")]


def test_report_has_goals_errors_and_samples() -> None:
    cells = run_fake([], fails_on=CHAINED, loads=[Workload(Kind.CHAINED, False), CHAINED])
    report = dispatch.make(cells, ["a note"])
    data = json.loads(report.as_json())
    assert [(goal["rival"], goal["reached"]) for goal in data["goals"]] == [("jax", True)]
    assert len(data["rows"][0]["samples_per_second"]) == 3
    assert any("jax broke" in note for note in data["notes"])
    wanted = "system workload collective hosts devices per_second p50_us p99_us cpu_s_per_1000"
    assert set(wanted.split()) <= set(data["rows"][0])
    assert "AllReduce + add" in report.as_markdown()


def test_missing_packages_are_said_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems.importlib.util, "find_spec", lambda name: None if name == "ray" else object())
    assert systems.missing(systems.load("jax")) is None
    graph = systems.load("ray-graph", all_rivals.RAY)
    assert "pip install ray" in str(systems.missing(graph))


def test_a_value_that_lost_a_step_is_an_error_in_its_row() -> None:
    class Lossy(FakeSystem):
        def ask(self, *request: Any, timeout: float) -> Any:
            answer = super().ask(*request, timeout=timeout)
            return dataclasses.replace(answer, value=answer.value - 1) if isinstance(answer, Run) else answer

    log: list[tuple[str, str]] = []
    ((cell,),) = measure(lambda name: Lossy(name, log, 1000.0), names=["jax"])
    assert "after 4 steps expected 4, got 3" in str(cell.error)
    assert log[-1] == ("jax", "kill")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown system 'tf'"):
        systems.load("tf")
    runner = click.testing.CliRunner()
    for arguments, text in (
        (["--rivals", "tf"], "unknown system 'tf'"),
        (["--rivals", "ray"], "unknown system 'ray'"),
        (["--workloads", "Nothing"], "unknown workload 'Nothing'"),
        (["--hosts", "1,zero"], "expected positive integers"),
    ):
        result = runner.invoke(cli.bench, ["dispatch", *arguments])
        assert result.exit_code == 2
        assert text in result.output


def test_embedded_is_one_host() -> None:
    assert PathwaysEmbedded.max_hosts == 1
    shapes = [(1, 1), (2, 1)]
    cells = run_fake([], shapes=shapes, most_hosts={"pathways": 1})
    assert [(cell.system, cell.hosts) for cell in cells] == [("pathways", 1), ("jax", 1), ("jax", 2)]


CHILD = """
import os, subprocess, time

class Child:
    def pid(self):
        return os.getpid()

    def spin(self, seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def fail(self):
        raise KeyError("inside")

    def spawn(self):
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def sleep(self):
        print("last words", flush=True)
        time.sleep(600)

    def stop(self):
        pass
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "bench_test_child.py").write_text(CHILD)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with processes.orphans_come_home():
        started = processes.Child("bench_test_child:Child")
        yield started
        started.kill()


def is_alive(pid: int) -> bool:
    return pid in processes.tree(os.getpid())


def test_child_answers_fails_and_counts_its_cpu(child: processes.Child) -> None:
    assert child.ask("pid", timeout=30) == child.pid
    with pytest.raises(processes.ChildError, match="KeyError: 'inside'"):
        child.ask("fail", timeout=30)
    before = processes.cpu_seconds([child.pid])
    child.ask("spin", 0.05, timeout=30)
    assert processes.cpu_seconds([child.pid]) - before >= 0.05
    child.end()
    assert not is_alive(child.pid)


def test_a_frozen_tree_stands_still(child: processes.Child) -> None:
    grandchild = child.ask("spawn", timeout=30)
    child.freeze()
    child.send("pid")
    with pytest.raises(processes.ChildError, match="no answer within"):
        child.receive(0.3)
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in (child.pid, grandchild)]
    assert states == ["T", "T"]
    child.thaw()
    assert child.receive(30) == child.pid


def test_watchdog_says_the_last_words_and_kills_the_tree(child: processes.Child) -> None:
    grandchild = child.ask("spawn", timeout=30)
    assert is_alive(grandchild)
    child.send("sleep")
    with pytest.raises(processes.ChildError, match="no answer within") as caught:
        child.receive(2.0)
    assert "last words" in str(caught.value)
    child.kill()
    assert not is_alive(child.pid)
    assert not is_alive(grandchild)


def test_a_dead_child_is_an_error(child: processes.Child) -> None:
    child.ask("pid", timeout=30)
    os.kill(child.pid, 9)
    with pytest.raises(processes.ChildError, match="the process"):
        child.ask("pid", timeout=30)


def test_orphans_are_ended() -> None:
    with processes.orphans_come_home():
        sleeper = "['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL"
        launcher = f"import subprocess; print(subprocess.Popen({sleeper}).pid)"
        orphan = int(processes.subprocess.check_output([sys.executable, "-c", launcher]))
        deadline = time.monotonic() + 10
        while not is_alive(orphan) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_alive(orphan)
    assert not os.path.exists(f"/proc/{orphan}")
