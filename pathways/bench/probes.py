"""The Python probes of `pathways bench micro`.

Each is a function from a number of repeats to values, and has a process of its own: some need many CPU devices in
the client, some a cluster, and none should feel what another left behind.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from pathways.bench import stats
from pathways.bench.stats import Spread, Value
from pathways.bench.transfer_systems import Memcpy, Pathways


@contextlib.contextmanager
def _cluster(target: Any) -> Iterator[Any]:
    import pathways as pw

    with pw.connect(target):
        yield pw.make_virtual_device_set()


def _call_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call until its futures are returned, median of few enough that none waits for a credit."""
    import jax

    taken, held = [], []
    for _ in range(20):
        begin = time.perf_counter_ns()
        held.append(call())
        taken.append(time.perf_counter_ns() - begin)
    jax.block_until_ready(held)
    return stats.quantile(taken, 0.5) / 1000


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def call(repeats: int) -> list[Value]:
    """A Python call to its returned futures, by number of leaves in and out; then the slope per leaf."""
    import numpy

    import pathways as pw

    points: dict[int, list[float]] = {}
    with _cluster(pw.LocalCluster(islands=1, hosts_per_island=1, devices_per_host=1)) as devices:
        where = devices.add_slice(devices=1)
        for leaves in (1, 100, 1000):
            add_one = pw.jit(lambda values: [value + 1 for value in values], devices=where, name=f"add_{leaves}")
            values = [pw.device_put(numpy.float32(0), where) for _ in range(leaves)]
            for result in add_one(values):
                result.block_until_ready()
            points[leaves] = [_call_us(functools.partial(add_one, values)) for _ in range(repeats)]
    slopes = [stats.slope(list(points), list(times))[0] for times in zip(*points.values(), strict=True)]
    by_leaves = [Value(f"call to futures, {n} leaves", Spread.of(times), "us") for n, times in points.items()]
    return [*by_leaves, Value("call to futures, slope per leaf", Spread.of(slopes), "us")]


def plan(repeats: int) -> list[Value]:
    """Trace, partition and lower, without XLA's compilation: a chain of 128, and 16 stages x 64 microbatches."""
    import jax
    import numpy

    import pathways as pw

    stages, microbatches = 16, 64
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", stages)
    with _cluster(None) as devices:
        slices = [devices.add_slice(devices=1) for _ in range(stages)]
        steps = [pw.jit(lambda x: x * 2 + 1, devices=s, name=f"stage{i}") for i, s in enumerate(slices)]

        def chain(x: Any) -> Any:
            for _ in range(128):
                x = steps[0](x)
            return x

        def pipeline(batches: Any) -> Any:
            results = []
            for batch in batches:
                for step in steps:
                    batch = step(batch)
                results.append(batch)
            return results

        one = numpy.zeros(4, numpy.float32)

        def lowering(name: str, fun: Callable[[Any], Any], x: Any) -> Value:
            taken = [_seconds(lambda: pw.program(fun).lower(x).as_text("plan")) * 1000 for _ in range(repeats)]
            return Value(f"plan, {name}", Spread.of(taken), "ms")

        return [lowering("chain of 128", chain, one), lowering("16 stages x 64", pipeline, [one] * microbatches)]


def transfer(repeats: int) -> list[Value]:
    """64 MiB from a host of one island to a host of another, beside memcpy of as much in one process."""
    nbytes = 64 << 20
    ours = Pathways()
    ours.start(1)
    systems = (ours, Memcpy())
    found = [[nbytes / 2**30 / each.measure(nbytes, 1, False, 0.3)["one"] for each in systems] for _ in range(repeats)]
    ours.stop()
    transfers, copies = zip(*found, strict=True)
    return [
        Value("transfer between hosts, 64 MiB", Spread.of(transfers), "GiB/s"),
        Value("memcpy, 64 MiB", Spread.of(copies), "GiB/s"),
        Value("transfer over memcpy", stats.paired_ratio(transfers, copies), "ratio"),
    ]


def read(repeats: int) -> list[Value]:
    """A training step and `float(loss)` after each: JAX in this process, and clusters of one and of two hosts, in turn.

    A batch of steps is one measurement. The last values are medians of ours over 1.3 times JAX's and 60 us more.
    """
    import jax
    import numpy

    import pathways as pw

    batch = 50
    jax.config.update("jax_platforms", "cpu")

    def step(weights: Any, x: Any) -> Any:
        return weights - 0.125 * x, (weights * x).sum()

    def loop(run: Callable[[Any, Any], Any], weights: Any, x: Any) -> float:
        begin = time.perf_counter()
        for _ in range(batch):
            weights, loss = run(weights, x)
            float(loss)
        return (time.perf_counter() - begin) / batch * 1e6

    ones = numpy.ones(16, numpy.float32)
    mine = (jax.jit(step), jax.device_put(ones), jax.device_put(ones))
    values, over = [], []
    jax_times: list[float] = []
    for hosts in (1, 2):
        with _cluster(pw.LocalCluster(islands=1, hosts_per_island=hosts, devices_per_host=1)) as devices:
            where = devices.add_slice(devices=hosts)
            ours = (pw.jit(step, devices=where), pw.device_put(ones, where), pw.device_put(ones, where))
            loop(*mine)
            loop(*ours)
            here = [(loop(*mine), loop(*ours)) for _ in range(repeats)]
        times = [time for _, time in here]
        name = f"step and float(loss), {hosts} x 1"
        values.append(Value(name, Spread.of(times), "us"))
        over.append(Value(f"{name} over goal", Spread.of([b / (1.3 * a + 60) for a, b in here]), "ratio"))
        jax_times += [time for time, _ in here]
    return [Value("step and float(loss), JAX", Spread.of(jax_times), "us"), *values, *over]


def batch(repeats: int) -> list[Value]:
    """A call until its futures are returned, with a batch from NumPy and with one that is there already."""
    import numpy
    from jax.sharding import PartitionSpec

    import pathways as pw

    values = []
    with _cluster(pw.LocalCluster(islands=1, hosts_per_island=1, devices_per_host=2)) as devices:
        where = devices.add_slice(shape=(2,), axis_names=("x",))
        specs = (PartitionSpec(), PartitionSpec("x"))
        step = pw.jit(lambda w, batch: w + batch.sum(), devices=where, in_shardings=specs)
        w = pw.device_put(numpy.float32(0), where)
        for rows in (8, 512):
            data = numpy.ones((rows, 256), numpy.float32)
            there = pw.device_put(data, where, specs[1])
            times: dict[str, list[float]] = {}
            for _ in range(repeats):
                for name, given in (("NumPy", data), ("arrays", there)):
                    times.setdefault(name, []).append(_call_us(functools.partial(step, w, given)))
            for name, points in times.items():
                values.append(Value(f"call with a batch of {rows} KiB, {name}", Spread.of(points), "us"))
    return values


PROBES: dict[str, Callable[[int], list[Value]]] = {
    "call": call,
    "batch": batch,
    "plan": plan,
    "read": read,
    "transfer": transfer,
}


class Probe:
    """A process that measures one of them."""

    def __init__(self, name: str) -> None:
        self._probe = PROBES[name]

    def measure(self, repeats: int) -> list[Value]:
        """Its values."""
        return self._probe(repeats)
