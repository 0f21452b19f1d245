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

from pathways.bench.systems.base import WINDOW, awaited, pipelined
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
    """One JAX process."""

    def start(self, rank: int, hosts: int, devices: int, coordinator: str) -> None:
        """Makes it one of so many hosts. Before anything else in the process touches JAX's devices."""
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

    def load(self, workload: Workload) -> None:
        """Makes `workload` the current one, compiled, with its value at zero."""
        if workload not in self._functions:
            self._functions[workload] = self._compile(workload)
        self._workload = workload
        self._function, zeros = self._functions[workload]
        self._function(zeros()).block_until_ready()
        self._value = zeros()
        self._value.block_until_ready()

    def _compile(self, workload: Workload) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
        import jax
        import jax.numpy as jnp

        devices = jax.devices() if workload.collective else jax.local_devices()
        mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
        function = jax.jit(computation(workload, mesh), in_shardings=sharding, out_shardings=sharding)
        zeros = jax.jit(lambda: jnp.zeros(mesh.size, jnp.float32), out_shardings=sharding)
        return function, zeros

    def value(self) -> float:
        """The current value as the first local device has it; waits for it."""
        import numpy

        return float(numpy.asarray(self._value.addressable_shards[0].data)[0])

    def _pipeline(self, computations: int) -> None:
        assert self._function is not None
        self._value = pipelined(self._function, self._value, computations, self._window)

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
        return awaited(lambda: self._pipeline(computations), n)
