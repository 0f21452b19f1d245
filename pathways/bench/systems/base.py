"""The interface of a system under test. One system per file in this folder; each runs in a process of its own.

Threading: one caller. Life: start -> (throughput | latency)* -> stop. Between calls a system is idle: its
processes wait and use no CPU that they can avoid.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, ClassVar

from pathways.bench import processes
from pathways.bench.workloads import Workload

WINDOW = 64
"""Calls in flight at most in a throughput run, where the system itself sets no lower limit."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One throughput run: `value` is what a device held at the end, for the check."""

    steps: int
    seconds: float
    cpu_seconds: float
    value: float


def pipelined(function: Callable[[Any], Any], value: Any, calls: int, window: int = WINDOW) -> Any:
    """The value after so many calls in a row, awaited; that of half a window ago is awaited, too, which bounds what is
    in flight."""
    marker, half = value, window // 2
    for block in range(0, calls, half):
        for _ in range(min(half, calls - block)):
            value = function(value)
        marker.block_until_ready()
        marker = value
    value.block_until_ready()
    return value


def awaited(call: Callable[[], Any], n: int) -> list[int]:
    """Nanoseconds of each of `n` calls, which wait themselves."""
    taken = []
    for _ in range(n):
        begin = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - begin)
    return taken


class Stopwatch:
    """Wall and CPU seconds of a stretch, as `with system.stopwatch() as watch`; several stretches add up."""

    seconds = cpu_seconds = 0.0

    def _clocks(self) -> tuple[float, float]:
        return time.perf_counter(), processes.cpu_seconds(processes.tree(os.getpid()))

    def __enter__(self) -> Stopwatch:
        self._begin = self._clocks()
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._clocks()
        self.seconds += wall - self._begin[0]
        self.cpu_seconds += cpu - self._begin[1]


class System(abc.ABC):
    """One way to run the workloads on `hosts` processes with `devices` CPU devices each."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    """What must be importable, by the name that pip knows it by."""
    max_hosts: ClassVar[int] = 1_000_000
    """Shapes with more hosts are left out for this system."""

    @abc.abstractmethod
    def start(self, hosts: int, devices: int) -> None:
        """Starts the processes. Called once."""

    @abc.abstractmethod
    def throughput(self, workload: Workload, steps: int) -> Run:
        """Runs at least `steps` steps from zero, pipelined with bounded work in flight, and waits at the end."""

    @abc.abstractmethod
    def latency(self, workload: Workload, n: int) -> list[int]:
        """Nanoseconds of each of `n` synchronous calls: call and wait."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Ends every process that `start` began."""

    def stopwatch(self) -> Stopwatch:
        """Counts wall time, and CPU time of all of the system's processes, its client included."""
        return Stopwatch()
