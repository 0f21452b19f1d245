"""Rival: Ray actors. One actor per host; one method call on every actor per computation.

The value stays on the actor's device, and a call returns a small token at once, without waiting for the device:
the fastest form an actor can have. As in the paper, OpByOp calls a method per step, Chained passes each call's
future to the next one of the same actor, Fused calls one method that runs 128 steps. At most `WINDOW` calls are in
flight; the end of a run waits for every device.
"""

from __future__ import annotations

import collections
import os
from typing import Any

from pathways.bench.systems.base import WINDOW, Run, System, awaited
from pathways.bench.systems.jax_host import JaxHost, free_address
from pathways.bench.workloads import CHAIN, Kind, Workload


class RayHost(JaxHost):
    """The actor. Every method is one computation or one question."""

    def load(self, workload: Workload) -> None:
        """See `JaxHost`."""
        super().load(workload)
        self._marker, self._enqueued = self._value, 0

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

    def step(self, token: Any = None) -> int:
        """Enqueues one computation. `token` is what the call before returned: it orders, and carries nothing."""
        self.compute()
        return 0

    def step_and_wait(self, token: Any = None) -> int:
        """One computation, awaited."""
        self.compute()
        self.wait()
        return 0


def start_ray(hosts: int, devices: int) -> list[Any]:
    """A Ray instance of its own, on loopback only, with one actor per host."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the switch that lets a node be 127.0.0.1
    import ray

    ray.init(
        address="local",
        num_cpus=hosts,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=256 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    actor_class: Any = ray.remote(num_cpus=1)(RayHost)
    coordinator = free_address()
    actors = [actor_class.remote() for _ in range(hosts)]
    ray.get([actor.start.remote(rank, hosts, devices, coordinator) for rank, actor in enumerate(actors)])
    return actors


class RayActors(System):
    """Ray actors: see the head of this file."""

    name = "ray"
    packages = ("ray", "jax")

    def __init__(self) -> None:
        self._actors: list[Any] = []

    def start(self, hosts: int, devices: int) -> None:
        """See `System`."""
        self._actors = start_ray(hosts, devices)

    def _load(self, workload: Workload) -> None:
        import ray

        ray.get([actor.load.remote(workload) for actor in self._actors])

    def throughput(self, workload: Workload, steps: int) -> Run:
        """See `System`."""
        import ray

        self._load(workload)
        calls = workload.calls(steps)
        computations = calls * workload.computations_per_call
        chained = workload.kind is Kind.CHAINED
        window = CHAIN if chained else WINDOW
        in_flight: collections.deque[list[Any]] = collections.deque()
        tokens = [None] * len(self._actors)
        with self.stopwatch() as watch:
            for _ in range(computations):
                refs = [actor.step.remote(token) for actor, token in zip(self._actors, tokens, strict=True)]
                if chained:
                    tokens = refs
                in_flight.append(refs)
                if len(in_flight) == window:  # drain half, so that one wait serves many calls
                    ray.get([ref for _ in range(window // 2) for ref in in_flight.popleft()])
            ray.get([ref for refs in in_flight for ref in refs])
            ray.get([actor.wait.remote() for actor in self._actors])
        value = min(ray.get([actor.value.remote() for actor in self._actors]))
        return Run(calls * workload.steps_per_call, watch.seconds, watch.cpu_seconds, value)

    def latency(self, workload: Workload, n: int) -> list[int]:
        """See `System`."""
        import ray

        self._load(workload)
        steps_before = CHAIN - 1 if workload.kind is Kind.CHAINED else 0

        def call() -> None:
            last: list[Any] = [None] * len(self._actors)
            for _ in range(steps_before):
                last = [actor.step.remote(token) for actor, token in zip(self._actors, last, strict=True)]
            ray.get([actor.step_and_wait.remote(token) for actor, token in zip(self._actors, last, strict=True)])

        return awaited(call, n)

    def stop(self) -> None:
        """See `System`."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()
