"""The client of one cluster of `pathways bench pipeline`: ``python -m pathways.bench.pipeline_client <fd>``.

Through Pathways' public face, but for the stand-in that sleeps. Also the other end of the measured hops, which needs a
process of its own and no cluster.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from pathways.bench import processes, stats

ELEMENTS = 1024  # of float32: 4 KiB; and enough for XLA not to compute within the call that enqueues
FEWEST = 5  # runs of one measurement
WIDTH = 128


def body(kind: str, amount: int) -> Callable[[Any], Any]:
    """What a stage computes: adds one to float32 [1024], in some time."""
    import jax
    import jax.numpy as jnp

    from pathways.testing import stand_in

    def sleep(x: Any) -> Any:
        return stand_in.step(x + 1, amount) if amount else x + 1

    def matmul(x: Any) -> Any:
        same = jnp.eye(WIDTH, dtype=jnp.float32)
        turned = jax.lax.fori_loop(0, amount, lambda _, value: value @ same, x.reshape(-1, WIDTH))
        return turned.reshape(x.shape) + 1

    return {"sleep": sleep, "matmul": matmul}[kind]


class Client:
    """One cluster, and the programs that ran on it."""

    def start(self, hosts: int, mode: str, distance_us: int) -> None:
        """Starts a cluster of `hosts` islands of one host of one device."""
        import jax

        import pathways as pw

        jax.config.update("jax_platforms", "cpu")
        self._cluster = pw.connect(pw.LocalCluster(islands=hosts, dispatch=mode, distance_us=distance_us))
        devices = pw.make_virtual_device_set()
        self._slices = [devices.add_slice(shape=(1,), axis_names=("x",), island=host) for host in range(hosts)]
        self._load = functools.lru_cache(self._make)

    def _make(self, stages: int, kind: str, amount: int, is_together: bool) -> Callable[[], float]:
        import numpy

        import pathways as pw

        where = [self._slices[0 if is_together else stage] for stage in range(stages)]
        steps = [pw.jit(body(kind, amount), devices=at, name=f"stage{stage}") for stage, at in enumerate(where)]

        def pipeline(x: Any) -> Any:
            for step in steps:
                x = step(x)
            return x

        program = pw.program(pipeline)
        zeros = pw.device_put(numpy.zeros(ELEMENTS, numpy.float32), where[0])

        def once() -> float:
            begin = time.perf_counter()
            result = program(zeros)
            result.block_until_ready()
            return time.perf_counter() - begin

        for _ in range(FEWEST):
            once()
        found = numpy.asarray(program(zeros))
        if not (found == stages).all():
            raise RuntimeError(f"a pipeline of {stages} stages gave {found[:4]}..., expected {stages} everywhere")
        return once

    def load(self, stages: int, kind: str, amount: int) -> None:
        """Compiles a pipeline and runs it warm."""
        self._load(stages, kind, amount, False)

    def run(self, stages: int, kind: str, amount: int, seconds: float, is_together: bool = False) -> dict[str, float]:
        """`run_us`: median time of a run; `prepare_us`: hosts' work on goes, per stage."""
        once = self._load(stages, kind, amount, is_together)
        once()
        before = self._go_ns()
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while len(taken) < FEWEST or time.perf_counter() < end:
            taken.append(once())
        prepared = (self._go_ns() - before) / len(taken) / stages
        return {"run_us": stats.quantile(taken, 0.5) * 1e6, "prepare_us": prepared / 1000}

    def _go_ns(self) -> int:
        return sum(int(host.get("go_ns", 0)) for host in self._cluster.stats()["hosts"])

    def compute_us(self, kind: str, amount: int) -> float:
        """From the end of an asynchronous call to its value, by plain JAX in this process."""
        call, x = self._compiled(kind, amount)
        taken = []
        for _ in range(15):
            value = call(x)
            begin = time.perf_counter()
            while not value.is_ready():
                time.sleep(0)
            taken.append(time.perf_counter() - begin)
        return stats.quantile(taken, 0.5) * 1e6

    def calibrate(self, length_us: int) -> int:
        """Turns of the loop of products that take about so long."""
        few, many = 100, 500
        slope = (self.compute_us("matmul", many) - self.compute_us("matmul", few)) / (many - few)
        return max(1, round(length_us / slope))

    @functools.lru_cache  # noqa: B019 -- there is one client in the process
    def _compiled(self, kind: str, amount: int) -> tuple[Callable[[Any], Any], Any]:
        import jax
        import jax.numpy as jnp

        from pathways.testing import stand_in

        stand_in.register()
        x = jnp.zeros(ELEMENTS, jnp.float32)
        call = jax.jit(body(kind, amount))
        call(x).block_until_ready()
        return call, x

    def stop(self) -> None:
        """Ends the cluster, if there is one."""
        cluster = getattr(self, "_cluster", None)
        if cluster is not None:
            cluster.close()

    def echo_hops(self, controller: str, host: str, count: int) -> None:
        """The other end of `_native.ask_hops`; the segments are given by path."""
        from pathways import _native

        blocks = [_native.Segment.attach(os.open(path, os.O_RDWR | os.O_CLOEXEC)) for path in (controller, host)]
        _native.echo_hops(blocks[0], blocks[1], count)


def main() -> None:
    """Answers the harness until it says stop."""
    client = Client()
    processes.serve(lambda verb, *arguments: getattr(client, verb)(*arguments))


if __name__ == "__main__":
    main()
