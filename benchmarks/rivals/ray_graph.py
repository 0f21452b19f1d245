"""Rival: Ray compiled graphs. The actors of `ray_actors`, with calls compiled once into a static graph.

One execution of the graph is one call: OpByOp and Fused have one method per actor in the graph, Chained a chain of
128 methods on each actor. Between methods of one actor Ray passes the token inside the process; the driver talks to
each actor once per execution, through shared memory.
"""

from __future__ import annotations

import collections
from typing import Any

from benchmarks.rivals.ray_actors import start_ray
from pathways.bench.systems.base import Run, System, awaited
from pathways.bench.workloads import CHAIN, Kind, Workload

_IN_FLIGHT = 10  # Ray's own default limit of executions in flight


class RayGraph(System):
    """Ray compiled graphs: see the head of this file."""

    name = "ray-graph"
    packages = ("ray", "jax")

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._graphs: dict[bool, Any] = {}

    def start(self, hosts: int, devices: int) -> None:
        """See `System`."""
        self._actors = start_ray(hosts, devices)

    def _graph(self, workload: Workload, wait: bool) -> Any:
        """The compiled graph of one call; with `wait`, its last method waits for the device.

        An actor in a compiled graph serves nothing else, so the value is reset and read between two graphs.
        """
        import ray
        from ray.dag import InputNode, MultiOutputNode

        self._teardown()
        ray.get([actor.load.remote(workload) for actor in self._actors])
        with InputNode() as token:
            ends = []
            for actor in self._actors:
                end = token
                for _ in range(CHAIN - 1 if workload.kind is Kind.CHAINED else 0):
                    end = actor.step.bind(end)
                ends.append((actor.step_and_wait if wait else actor.step).bind(end))
            output = MultiOutputNode(ends)
        graph = output.experimental_compile(_max_inflight_executions=_IN_FLIGHT)
        self._graphs[wait] = graph
        ray.get(graph.execute(0))
        return graph

    def _teardown(self) -> None:
        for graph in self._graphs.values():
            graph.teardown()
        self._graphs.clear()

    def throughput(self, workload: Workload, steps: int) -> Run:
        """See `System`."""
        import ray

        graph = self._graph(workload, wait=False)
        calls = workload.calls(steps)
        in_flight: collections.deque[Any] = collections.deque()
        with self.stopwatch() as watch:
            for _ in range(calls):
                in_flight.append(graph.execute(0))
                if len(in_flight) == _IN_FLIGHT:
                    ray.get(in_flight.popleft())
            while in_flight:
                ray.get(in_flight.popleft())
        self._teardown()
        with watch:
            ray.get([actor.wait.remote() for actor in self._actors])
        value = min(ray.get([actor.value.remote() for actor in self._actors]))
        warm_up = workload.steps_per_call
        return Run(calls * workload.steps_per_call, watch.seconds, watch.cpu_seconds, value - warm_up)

    def latency(self, workload: Workload, n: int) -> list[int]:
        """See `System`."""
        import ray

        graph = self._graph(workload, wait=True)
        return awaited(lambda: ray.get(graph.execute(0)), n)

    def stop(self) -> None:
        """See `System`."""
        import ray

        self._teardown()
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()
