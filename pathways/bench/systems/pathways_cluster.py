"""Pathways itself, through its public face only: what a user would write.

OpByOp calls a placed function per step, Chained a traced program of 128 of them, Fused one placed function with 128
steps. Calls are asynchronous; at most `WINDOW` are in flight (the runtime has a bound of its own), and the end of a
run waits for the last value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathways.bench.systems.base import Run, System, awaited, pipelined
from pathways.bench.workloads import AXIS, CHAIN, Kind, Workload, computation


class PathwaysCluster(System):
    """One island of `hosts` real host processes."""

    name = "pathways"
    packages = ("pathways", "jax")

    def __init__(self) -> None:
        self._cluster: Any = None
        self._slice: Any = None
        self._functions: dict[Workload, Callable[[Any], Any]] = {}

    def _connected(self, hosts: int, devices: int) -> Any:
        """A context manager of the cluster."""
        import pathways as pw

        return pw.connect(pw.LocalCluster(islands=1, hosts_per_island=hosts, devices_per_host=devices))

    def start(self, hosts: int, devices: int) -> None:
        """See `System`."""
        import pathways as pw

        self._cluster = self._connected(hosts, devices)
        devices_set = pw.make_virtual_device_set(self._cluster.__enter__())
        self._slice = devices_set.add_slice(shape=(hosts * devices,), axis_names=(AXIS,))

    def _load(self, workload: Workload) -> tuple[Callable[[Any], Any], Any]:
        """The call of `workload`, compiled and warm, and a value of zeros."""
        import jax
        import numpy

        import pathways as pw

        spec = jax.sharding.PartitionSpec(AXIS)
        if workload not in self._functions:
            placed = pw.jit(
                computation(workload, self._slice.mesh),
                devices=self._slice,
                in_shardings=spec,
                out_shardings=spec,
                name=f"{workload.kind.value.lower()}_{'psum' if workload.collective else 'add'}",
            )

            def chain(value: Any) -> Any:
                for _ in range(CHAIN):
                    value = placed(value)
                return value

            self._functions[workload] = pw.program(chain) if workload.kind is Kind.CHAINED else placed
        function = self._functions[workload]
        size = self._slice.mesh.size
        zeros = pw.device_put(numpy.zeros(size, numpy.float32), self._slice, spec)
        function(zeros).block_until_ready()
        return function, zeros

    def throughput(self, workload: Workload, steps: int) -> Run:
        """See `System`."""
        import numpy

        function, value = self._load(workload)
        calls = workload.calls(steps)
        with self.stopwatch() as watch:
            value = pipelined(function, value, calls)
        held = float(numpy.min(numpy.asarray(value)))
        return Run(calls * workload.steps_per_call, watch.seconds, watch.cpu_seconds, held)

    def latency(self, workload: Workload, n: int) -> list[int]:
        """See `System`."""
        function, value = self._load(workload)
        return awaited(lambda: function(value).block_until_ready(), n)

    def stop(self) -> None:
        """See `System`."""
        self._slice = None
        self._functions.clear()
        self._cluster.__exit__(None, None, None)


class PathwaysEmbedded(PathwaysCluster):
    """The same in the client's own process: one host only, nothing to start."""

    name = "pathways-embedded"
    max_hosts = 1

    def _connected(self, hosts: int, devices: int) -> Any:
        import jax

        import pathways as pw

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        return pw.connect(None)
