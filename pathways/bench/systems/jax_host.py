"""One host as plain JAX sees it: the `jit` loop that the rivals share.

The multi-controller rival runs it in bare processes, the Ray rivals inside actors, so that what runs on the device
is the same. With the collective the mesh is global (`jax.distributed`, gloo on CPU); without it each host uses its
own devices only, which is the fastest form.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from pathways.bench.systems.base import WINDOW
from pathways.bench.workloads import AXIS, Workload, computation

_WINDOW_OF_MANY = 16
"""Computations in flight on a host of several CPU devices. XLA's CPU client takes 32 per device and then blocks the
caller, whatever device the next is for: with a collective among several processes that is a deadlock. From 8 to 30
the rate is the same."""


def free_address() -> str:
    """A loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class JaxHost:
    """One JAX process. Construct it before anything else in the process touches JAX's devices."""

    def __init__(self, rank: int, hosts: int, devices: int, coordinator: str):
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        if hosts > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(coordinator, hosts, rank, cluster_detection_method="deactivate")
        if len(jax.local_devices()) != devices or len(jax.devices()) != hosts * devices:
            raise RuntimeError(
                f"host {rank}: expected {devices} local and {hosts * devices} global devices, "
                f"got {len(jax.local_devices())} and {len(jax.devices())}"
            )
        self._window = WINDOW if devices == 1 else _WINDOW_OF_MANY
        self._functions: dict[Workload, tuple[Callable[[Any], Any], Callable[[], Any]]] = {}
        self._function: Callable[[Any], Any] | None = None
        self._workload: Workload | None = None
        self._value: Any = None
        self._marker: Any = None
        self._enqueued = 0

    def load(self, workload: Workload) -> None:
        """Makes `workload` the current one, compiled, with its value at zero."""
        if workload not in self._functions:
            self._functions[workload] = self._compile(workload)
        self._workload = workload
        self._function, zeros = self._functions[workload]
        self._function(zeros()).block_until_ready()
        self._value = zeros()
        self._value.block_until_ready()
        self._marker, self._enqueued = self._value, 0

    def _compile(self, workload: Workload) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
        import jax
        import jax.numpy as jnp

        devices = jax.devices() if workload.collective else jax.local_devices()
        mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
        function = jax.jit(computation(workload, mesh), in_shardings=sharding, out_shardings=sharding)
        zeros = jax.jit(lambda: jnp.zeros(mesh.size, jnp.float32), out_shardings=sharding)
        return function, zeros

    def compute(self) -> None:
        """Enqueues one computation on the current value; waits first when the window is full."""
        assert self._function is not None
        self._value = self._function(self._value)
        self._enqueued += 1
        if self._enqueued % (self._window // 2) == 0:
            self._marker.block_until_ready()
            self._marker = self._value

    def wait(self) -> None:
        """Waits for the current value."""
        self._value.block_until_ready()

    def value(self) -> float:
        """The current value as the first local device has it; waits for it."""
        import numpy

        return float(numpy.asarray(self._value.addressable_shards[0].data)[0])

    def _pipeline(self, computations: int) -> None:
        """So many computations in a row; the value of half a window ago is awaited, which bounds the work in flight."""
        assert self._function is not None
        function, value, marker = self._function, self._value, self._value
        half = self._window // 2
        for block in range(0, computations, half):
            for _ in range(min(half, computations - block)):
                value = function(value)
            marker.block_until_ready()
            marker = value
        value.block_until_ready()
        self._value = value

    def loop(self, calls: int) -> tuple[int, int]:
        """The pipelined loop over whole calls: (begin, end) in monotonic nanoseconds, the same clock on all hosts."""
        assert self._workload is not None
        computations = calls * self._workload.computations_per_call
        begin = time.monotonic_ns()
        self._pipeline(computations)
        return begin, time.monotonic_ns()

    def synchronous(self, n: int) -> list[int]:
        """Nanoseconds of `n` calls, each awaited; a call of Chained is 128 computations, pipelined."""
        assert self._workload is not None
        computations = self._workload.computations_per_call
        taken = []
        for _ in range(n):
            begin = time.perf_counter_ns()
            self._pipeline(computations)
            taken.append(time.perf_counter_ns() - begin)
        return taken
