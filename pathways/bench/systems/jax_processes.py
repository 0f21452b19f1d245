"""Rival: multi-controller JAX. One bare process per host, each running its own `jit` loop.

Nobody dispatches to anybody: with the collective, the all-reduce itself keeps the hosts together; without it the
rate is that of "the hosts' own jit loop". Chained means the same loop, 128 calls at a time.
"""

from __future__ import annotations

from typing import Any

from pathways.bench import processes
from pathways.bench.systems.base import Run, System
from pathways.bench.systems.jax_host import free_address
from pathways.bench.workloads import Workload
from pathways.process.environment import cpu_threads

_HOST = "pathways.bench.systems.jax_host:JaxHost"
_PATIENCE = 300.0  # the harness's own watchdog is shorter


class JaxProcesses(System):
    """Multi-controller JAX: see the head of this file."""

    name = "jax"
    packages = ("jax",)

    def __init__(self) -> None:
        self._hosts: list[processes.Child] = []

    def start(self, hosts: int, devices: int) -> None:
        """See `System`."""
        # With XLA's default this rival deadlocks on hosts of two devices; it gets the threads that our hosts have.
        threads = {"NPROC": str(cpu_threads(devices))}
        self._hosts = [
            processes.Child("pathways.bench.systems.jax_host:JaxHost", environment=threads) for _ in range(hosts)
        ]
        coordinator = free_address()
        for rank, host in enumerate(self._hosts):
            host.send("start", rank, hosts, devices, coordinator)
        for host in self._hosts:
            host.receive(_PATIENCE)

    def _all(self, *request: Any) -> list[Any]:
        for host in self._hosts:
            host.send(*request)
        return [host.receive(_PATIENCE) for host in self._hosts]

    def throughput(self, workload: Workload, steps: int) -> Run:
        """See `System`."""
        calls = workload.calls(steps)
        self._all("load", workload)
        with self.stopwatch() as watch:
            times = self._all("loop", calls)
        seconds = (max(end for _, end in times) - min(begin for begin, _ in times)) / 1e9
        return Run(calls * workload.steps_per_call, seconds, watch.cpu_seconds, min(self._all("value")))

    def latency(self, workload: Workload, n: int) -> list[int]:
        """See `System`."""
        self._all("load", workload)
        first: list[int] = self._all("synchronous", n)[0]
        return first

    def stop(self) -> None:
        """See `System`."""
        for host in self._hosts:
            host.kill()  # jax.distributed's own shutdown waits for its peers; there is nothing to save
