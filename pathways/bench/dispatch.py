"""`pathways bench dispatch`: the paper's Figure 5, every system interleaved in one run.

For each cluster shape all systems are started; for each workload the systems take turns (A B C, A B C, ...), one awake
at a time, so that what the machine does meanwhile falls on all alike. Who is not on turn is stopped by signal with its
whole tree: some systems use a core even when nobody asks anything of them. Step counts adapt so that a throughput run
lasts about `seconds`. A system that fails or hangs is killed with its tree, said in its row, and
started afresh for the next workload.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from pathways.bench import processes, stats
from pathways.bench.systems.base import Run
from pathways.bench.workloads import Workload

START_TIMEOUT = 120.0
_FAILURES_BEFORE_GIVING_UP = 2


class Conversation(Protocol):
    """What the harness needs of a system's process: a `processes.Child`, or a test's double."""

    def ask(self, *request: Any, timeout: float) -> Any:
        """Sends a request and returns its answer, or raises ChildError."""
        ...

    def freeze(self) -> None:
        """Stops the system's processes until `thaw`."""
        ...

    def thaw(self) -> None:
        """Lets them go on."""
        ...

    def end(self) -> None:
        """Ends the system in good order."""
        ...

    def kill(self) -> None:
        """Ends it at once, with its tree."""
        ...


Open = Callable[[str], Conversation]


def open_child(system: str) -> Conversation:
    """The real thing: a process for the system."""
    return processes.Child("pathways.bench.driver", [system])


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    systems: Sequence[str]
    workloads: Sequence[Workload]
    shapes: Sequence[tuple[int, int]]
    repeats: int = 5
    seconds: float = 1.0
    watchdog: float = 60.0
    settle: float = 0.1
    """Seconds between a system's waking and its measurement, in which timers that ran out meanwhile have their say."""
    fits: Callable[[str, int], bool] = lambda system, hosts: True


@dataclasses.dataclass
class Cell:
    """All repeats of one system on one workload and shape. `error` says why they are missing."""

    system: str
    workload: Workload
    hosts: int
    devices: int
    per_second: list[float] = dataclasses.field(default_factory=list)
    cpu_s_per_1000: list[float] = dataclasses.field(default_factory=list)
    latency_us: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None

    def row(self) -> dict[str, Any]:
        """One flat row, units in the names; rates and CPU are per step, latencies per call."""
        row: dict[str, Any] = {
            "system": self.system,
            "workload": self.workload.kind.value,
            "collective": self.workload.collective,
            "hosts": self.hosts,
            "devices": self.devices,
        }
        if self.error is not None or not self.per_second:
            nothing = dict.fromkeys(("per_second", "per_second_min", "per_second_max", "p50_us", "p99_us"))
            return {**row, **nothing, "cpu_s_per_1000": None, "repeats": 0, "error": self.error or "not measured"}
        rate = stats.Spread.of(self.per_second)
        return {
            **row,
            "per_second": rate.median,
            "per_second_min": rate.low,
            "per_second_max": rate.high,
            "p50_us": stats.quantile(self.latency_us, 0.50),
            "p99_us": stats.quantile(self.latency_us, 0.99),
            "cpu_s_per_1000": stats.quantile(self.cpu_s_per_1000, 0.5),
            "repeats": rate.n,
            "error": None,
        }


class _Seat:
    """One system in the round: its process, started when needed, and what it has learnt about its own pace."""

    def __init__(self, system: str, hosts: int, devices: int, settings: Settings, open_system: Open):
        self.system = system
        self._shape = (hosts, devices)
        self._settings = settings
        self._open = open_system
        self._child: Conversation | None = None
        self._failures = 0

    def ready(self) -> Conversation:
        if self._child is None:
            if self._failures >= _FAILURES_BEFORE_GIVING_UP:
                raise processes.ChildError(f"{self.system} failed {self._failures} times with this shape; given up")
            self._child = self._open(self.system)
            self._child.ask("start", *self._shape, timeout=START_TIMEOUT)
        return self._child

    def calibrate(self, workload: Workload) -> tuple[int, int]:
        """Warms up; returns the steps of a throughput run and the calls of a latency run."""
        target, watchdog = self._settings.seconds, self._settings.watchdog
        steps, run = workload.steps_per_call * 4, None
        while run is None or run.seconds < target / 4:
            run = self._run(workload, steps)
            steps = stats.next_steps(run.steps, run.seconds, target)
        taken = self.ready().ask("latency", workload, 10, timeout=watchdog)
        calls = target / 2 / (stats.quantile(taken, 0.5) / 1e9)
        return steps, int(min(5000.0, max(10.0, calls)))

    def _run(self, workload: Workload, steps: int) -> Run:
        run: Run = self.ready().ask("throughput", workload, steps, timeout=self._settings.watchdog)
        return run

    def measure(self, cell: Cell, steps: int, calls: int) -> None:
        """One repeat: a throughput run, then a latency run."""
        run = self._run(cell.workload, steps)
        taken = self.ready().ask("latency", cell.workload, calls, timeout=self._settings.watchdog)
        cell.per_second.append(run.steps / run.seconds)
        cell.cpu_s_per_1000.append(run.cpu_seconds * 1000 / run.steps)
        cell.latency_us.extend(ns / 1000 for ns in taken)

    def failed(self) -> None:
        if self._child is not None:
            self._failures += 1
            self._child.kill()
            self._child = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The system runs inside, and is stopped outside."""
        if self._child is not None:
            self._child.thaw()
            time.sleep(self._settings.settle)
        yield
        if self._child is not None:
            self._child.freeze()

    def close(self) -> None:
        if self._child is not None:
            self._child.thaw()
            self._child.end()
            self._child = None


@contextlib.contextmanager
def _said_in(cell: Cell, seat: _Seat) -> Iterator[None]:
    """A failure inside ends the system's process and stands in the cell; the round goes on."""
    try:
        yield
    except processes.ChildError as error:
        cell.error = str(error)
        seat.failed()


def _measure_workload(seats: Sequence[_Seat], workload: Workload, shape: tuple[int, int], repeats: int) -> list[Cell]:
    cells = [Cell(seat.system, workload, *shape) for seat in seats]
    paces: dict[str, tuple[int, int]] = {}
    for seat, cell in zip(seats, cells, strict=True):
        with seat.turn(), _said_in(cell, seat):
            paces[seat.system] = seat.calibrate(workload)
    for _ in range(repeats):
        for seat, cell in zip(seats, cells, strict=True):
            if cell.error is None:
                with seat.turn(), _said_in(cell, seat):
                    seat.measure(cell, *paces[seat.system])
    return cells


def measure(settings: Settings, open_system: Open = open_child) -> Iterator[list[Cell]]:
    """Yields the cells of one workload at a time, all systems together."""
    for hosts, devices in settings.shapes:
        present = [system for system in settings.systems if settings.fits(system, hosts)]
        seats = [_Seat(system, hosts, devices, settings, open_system) for system in present]
        try:
            for workload in settings.workloads:
                yield _measure_workload(seats, workload, (hosts, devices), settings.repeats)
        except BaseException:
            for seat in seats:
                seat.failed()
            raise
        for seat in seats:
            seat.close()


def ratios(cells: Iterable[Cell], ours: str = "pathways") -> list[dict[str, Any]]:
    """Throughput of `ours` over each rival's, repeat by repeat, where both were measured."""
    found: dict[tuple[Workload, int, int], dict[str, Cell]] = {}
    for cell in cells:
        if cell.error is None and cell.per_second:
            found.setdefault((cell.workload, cell.hosts, cell.devices), {})[cell.system] = cell
    rows = []
    for (workload, hosts, devices), by_system in found.items():
        own = by_system.pop(ours, None)
        for rival, cell in by_system.items() if own is not None else ():
            assert own is not None
            ratio = stats.paired_ratio(own.per_second, cell.per_second)
            rows.append(
                {
                    "workload": workload.kind.value,
                    "collective": workload.collective,
                    "hosts": hosts,
                    "devices": devices,
                    "rival": rival,
                    "ratio": ratio.median,
                    "ratio_min": ratio.low,
                    "ratio_max": ratio.high,
                }
            )
    return rows
