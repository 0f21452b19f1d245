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
from typing import ClassVar

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


class Stopwatch:
    """Wall and CPU seconds of a stretch, as `with system.stopwatch() as watch`; several stretches add up."""

    def __init__(self, cpu_seconds: Callable[[], float]):
        self._clock = cpu_seconds
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._cpu_begin = self._clock()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begin
        self.cpu_seconds += self._clock() - self._cpu_begin


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

    def cpu_seconds(self) -> float:
        """CPU seconds used so far by all of the system's processes, its client included."""
        return processes.cpu_seconds(processes.tree(os.getpid()))

    def stopwatch(self) -> Stopwatch:
        """Counts wall time, and CPU time of all of the system's processes."""
        return Stopwatch(self.cpu_seconds)
