"""The client of one cluster of `python -m benchmarks.mpmd`, in a process of its own.

It loads groups of programs (`programs`), checks what they compute, and times one of them when it is asked to.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from pathways.bench import stats

FEWEST = 3  # runs of one measurement
AHEAD = 3  # runs of a training step or a mixture that are under way together
CHAINED = 128  # calls of one chain on one slice


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step does beside adding one: see `programs.pad`. `length_us` is what it takes."""

    kind: str
    length_us: int
    amount: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Programs that are compared with each other, and what their steps do."""

    part: str
    """One of `goals.PARTS`."""
    step: Step
    size: int
    """Of a pipeline its microbatches, of a loop its iterations, of a mixture its rows."""
    schedule: str = ""
    """Of a pipeline."""

    def __str__(self) -> str:
        length = f" {self.step.length_us} us" if self.step.length_us else ""
        return " ".join(filter(None, (self.part, self.schedule, self.step.kind))) + length


#: Runs once and waits; returns how many units of work that were.
Once = Callable[[], int]


def _length_of(plot: Any) -> float:
    """From the first step of a pipeline to its last, in seconds."""
    spans = [span for row in plot.rows for span in row.spans if span.kind in ("forward", "backward", "weights")]
    return float(max(span.end for span in spans) - min(span.start for span in spans))


class Client:
    """One cluster, and the programs that ran on it."""

    def start(self, islands: int, hosts: int) -> None:
        """Starts a cluster of `islands` islands of `hosts` hosts of one device. One slice lies on each device."""
        import jax

        import pathways as pw

        jax.config.update("jax_platforms", "cpu")
        self._cluster = pw.connect(pw.LocalCluster(islands=islands, hosts_per_island=hosts))
        devices = pw.make_virtual_device_set()
        self._slices = [
            devices.add_slice(shape=(1,), axis_names=("x",), island=island)
            for island in range(islands)
            for _ in range(hosts)
        ]
        taken = [each.devices[0].id for each in self._slices]
        if len(set(taken)) != len(taken):
            raise RuntimeError(f"expected each slice on a device of its own, got devices {taken}")
        self._load = functools.lru_cache(self._make)
        self._bubbles: dict[Group, Callable[[], dict[str, float]]] = {}

    def calibrate(self, length_us: int) -> int:
        """Turns of the loop of products that take about so long."""
        few, many = 100, 500
        slope = (self._compute_us(many) - self._compute_us(few)) / (many - few)
        return max(1, round(length_us / slope))

    def _compute_us(self, amount: int) -> float:
        import jax
        import jax.numpy as jnp

        from benchmarks.mpmd import programs

        x = jnp.zeros((programs.SIZE, programs.SIZE), jnp.float32)
        call = jax.jit(programs.pad("compute", amount))
        call(x).block_until_ready()
        taken = []
        for _ in range(15):
            begin = time.perf_counter()
            call(x).block_until_ready()
            taken.append(time.perf_counter() - begin)
        return stats.quantile(taken, 0.5) * 1e6

    # --------------------------------------------------------------------------------------------------- asked

    def load(self, group: Group) -> list[str]:
        """Compiles the programs of a group, runs each of them warm, and checks what it gives. Returns their names."""
        return list(self._load(group))

    def time(self, group: Group, name: str, seconds: float) -> tuple[float, float]:
        """Microseconds per unit of work of one program, of runs of about `seconds`: the median, and the shortest."""
        once = self._load(group)[name]
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while len(taken) < FEWEST or time.perf_counter() < end:
            begin = time.perf_counter()
            units = once()
            taken.append((time.perf_counter() - begin) / units)
            if taken[-1] * units > seconds:
                break
        return stats.quantile(taken, 0.5) * 1e6, min(taken) * 1e6

    def bubble(self, group: Group) -> dict[str, float]:
        """Of a traced run of a pipeline: its bubble and its schedule's bound, of 1; and its time over the bound's.

        The bound of its own steps has the steps as long as they were in this run, also those that something delayed.
        The other one has all steps of a stage as long as the median.
        """
        return self._bubbles[group]()

    # ---------------------------------------------------------------------------------------------------- made

    def _make(self, group: Group) -> dict[str, Once]:
        made: dict[str, Once] = getattr(self, f"_make_{group.part}")(group)
        return made

    def _make_pipeline(self, group: Group) -> dict[str, Once]:
        import jax
        import numpy

        import pathways as pw
        from benchmarks.mpmd import programs

        schedule = group.schedule
        chunks = 2 if schedule in ("Interleaved1F1B", "Circular") else 1
        length = programs.pad(group.step.kind, group.step.amount // chunks)
        program, params, data = programs.training(self._slices, schedule, group.size, chunks, (length, length, length))
        state = [params]
        losses: list[Any] = []

        def step() -> None:
            state[0], loss = program(state[0], *data)
            losses.append(loss)

        def once() -> int:
            """The period of a step, in a row of them: a step needs the parameters that the one before it makes."""
            for _ in range(AHEAD):
                step()
            jax.block_until_ready(state[0])
            return AHEAD

        def traced() -> dict[str, float]:
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "trace.json.gz")
                with pw.trace(path):
                    step()
                    jax.block_until_ready(state[0])
                found = program.schedule_plot(state[0], *data, measured=path)
            lengths = [{"F": each.forward, "B": each.backward, "W": each.weights} for each in found.lengths]
            usual = program.schedule_plot(state[0], *data, lengths=lengths)
            assert found.bound is not None
            return {
                "bubble": found.bubble / 100,
                "bound": found.bound / 100,
                "over bound of its own steps": (100 - found.bound) / (100 - found.bubble),
                "over bound": _length_of(found) / _length_of(usual),
            }

        once()
        found = [float(numpy.asarray(loss)) for loss in losses]
        if not found[-1] < found[0]:
            raise RuntimeError(f"{group}: expected losses that fall, got {found}")
        losses.clear()
        self._bubbles[group] = traced
        return {"step": once}

    def _checked(
        self, group: Group, runs: Mapping[str, Callable[[], Any]], units: int, expected: float
    ) -> dict[str, Once]:
        """The runs, each of so many units of work, after what they give has been seen to be `expected` everywhere."""
        import jax
        import numpy

        for name, run in runs.items():
            for value in map(numpy.asarray, jax.tree.leaves(run())):
                if not (value == expected).all():
                    got = value.reshape(-1)[:4]
                    raise RuntimeError(f"{group}, {name}: expected {expected:g} everywhere, got {got}...")

        def once(run: Callable[[], Any]) -> int:
            jax.block_until_ready(run())
            return units

        return {name: functools.partial(once, run) for name, run in runs.items()}

    def _make_hosts(self, group: Group) -> dict[str, Once]:
        from benchmarks.mpmd import programs

        how, count = programs.pad(group.step.kind, group.step.amount), group.size
        made = programs.two_hosts(self._slices[0], self._slices[1], how, count)
        zeros = programs.zeros(self._slices[0])
        body = made.pop("body")

        def asked() -> Any:
            x, more = zeros, True
            while more:
                x, flag = body(x)
                more = bool(flag)
            return x

        runs = {name: functools.partial(program, zeros) for name, program in made.items()}
        return self._checked(group, {**runs, "client": asked}, count, 2.0 * count)

    def _make_slice(self, group: Group) -> dict[str, Once]:
        from benchmarks.mpmd import programs

        how, times = programs.pad(group.step.kind, group.step.amount), max(1, group.size // CHAINED)
        made = programs.one_slice(self._slices[0], how, times * CHAINED, CHAINED, (10, 100))
        zeros = programs.zeros(self._slices[0])
        chain = made.pop("chain")

        def chained() -> Any:
            x = zeros
            for _ in range(times):
                x = chain(x)
            return x

        runs = {name: functools.partial(program, zeros) for name, program in made.items()}
        return self._checked(group, {**runs, "chain": chained}, times * CHAINED, times * CHAINED)

    def _make_turns(self, group: Group) -> dict[str, Once]:
        from benchmarks.mpmd import programs

        how = programs.pad(group.step.kind, group.step.amount)
        made = programs.alternating(self._slices[0], self._slices[1], how, group.size, (1, 10))
        zeros = (programs.zeros(self._slices[0]), programs.zeros(self._slices[1]))
        runs = {name: functools.partial(program, zeros) for name, program in made.items()}
        return self._checked(group, runs, group.size, group.size)

    def _make_mixture(self, group: Group) -> dict[str, Once]:
        import jax
        import numpy

        from benchmarks.mpmd import programs

        how, is_sleep = programs.pad(group.step.kind, group.step.amount), group.step.kind == "sleep"
        # The copies of rows grow with the width, the products with its square: experts are larger than these.
        width, hidden = (32, 32) if is_sleep else (256, 1024)
        made, params, x = programs.mixture(self._slices[0], self._slices, how, group.size, width, hidden)
        if is_sleep:  # which has no gradient
            made = {name: program for name, program in made.items() if not name.startswith("gradients")}
        runs: dict[str, Once] = {}
        found: dict[str, Any] = {}
        for name, program in made.items():

            def once(program: Any = program) -> int:
                results = [program(params, x) for _ in range(AHEAD)]
                jax.block_until_ready(results)
                return AHEAD

            found[name] = jax.tree.map(numpy.asarray, program(params, x))
            runs[name] = once
        results, dropped = found["k"]
        if dropped or not numpy.allclose(results, found["all"], rtol=1e-3, atol=1e-4):
            raise RuntimeError(f"{group}: {dropped} rows were dropped, or the results are not the dense ones")
        if not is_sleep:
            for a, b in zip(*(jax.tree.leaves(found[f"gradients of {which}"]) for which in ("k", "all")), strict=True):
                if not numpy.allclose(a, b, rtol=1e-2, atol=1e-3):
                    raise RuntimeError(f"{group}: the gradients are not the dense ones")
        return runs

    def stop(self) -> None:
        """Ends the cluster, if there is one."""
        cluster = getattr(self, "_cluster", None)
        if cluster is not None:
            cluster.close()
