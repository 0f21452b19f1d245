"""Who moves bytes in `pathways bench transfer`, each in a process tree of its own (`processes.Child`).

Each answers "start" with the number of devices per host, then "measure" requests. A measurement gives seconds per
transfer: `one` of a transfer awaited alone, `many` of transfers with several in flight.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

from pathways.bench import processes, stats

_IN_FLIGHT_BYTES = 256 << 20
_MOST_IN_FLIGHT = 32
_PATIENCE = 120.0


def in_flight(nbytes: int) -> int:
    """How many transfers of so many bytes are under way at a time."""
    return max(2, min(_MOST_IN_FLIGHT, _IN_FLIGHT_BYTES // nbytes))


def timed(one: Callable[[], Any], many: Callable[[int], Any], nbytes: int, seconds: float) -> dict[str, float]:
    """Medians of `one` for half of the time, and a run of `many` that takes the other half."""
    taken: list[float] = []
    end = time.perf_counter() + seconds / 2
    while time.perf_counter() < end or len(taken) < 3:
        begin = time.perf_counter()
        one()
        taken.append(time.perf_counter() - begin)
    count = max(in_flight(nbytes), int(seconds / 2 / stats.quantile(taken, 0.5)))
    begin = time.perf_counter()
    many(count)
    return {"one": stats.quantile(taken, 0.5), "many": (time.perf_counter() - begin) / count}


class Pathways:
    """Two islands of one host each; from a slice of one to a slice of the other, inside a program."""

    machines = 1

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._programs: dict[Any, Any] = {}

    def start(self, devices: int) -> None:
        """Starts the cluster."""
        import pathways as pw

        self._stack.enter_context(self._connect(devices))
        both = pw.make_virtual_device_set()
        self._here, self._there = (both.add_slice(devices=devices, island=island) for island in (0, 1))

    def _connect(self, devices: int) -> Any:
        import pathways as pw

        return pw.connect(
            pw.LocalCluster(islands=2, hosts_per_island=1, devices_per_host=devices, machines=self.machines)
        )

    def _source(self, nbytes: int, devices: int) -> Any:
        import jax
        import numpy

        import pathways as pw

        side = _side(nbytes, devices)
        data = numpy.random.default_rng(0).random(side, numpy.float32)
        return data, pw.device_put(data, self._here, jax.sharding.PartitionSpec("x"))

    def measure(self, nbytes: int, devices: int, reshards: bool, seconds: float) -> dict[str, float]:
        """Transfers of `nbytes` per device, rows to rows or rows to columns."""
        import numpy
        from jax.sharding import PartitionSpec

        import pathways as pw

        data, source = self._source(nbytes, devices)
        spec = PartitionSpec(None, "x") if reshards else PartitionSpec("x")
        move = self._programs.setdefault(reshards, pw.program(lambda x: pw.device_put(x, self._there, spec)))
        if not numpy.array_equal(numpy.asarray(move(source)), data):
            raise ValueError("the transferred array differs from its source")
        window = in_flight(nbytes * devices)

        def many(count: int) -> None:
            values: list[Any] = []
            for _ in range(count):
                if len(values) == window:
                    values.pop(0).block_until_ready()
                values.append(move(source))
            for value in values:
                value.block_until_ready()

        many(window)  # the arena's pages are touched
        return timed(lambda: move(source).block_until_ready(), many, nbytes * devices, seconds)

    def dispatch(self, nbytes: int, devices: int, seconds: float) -> dict[str, float]:
        """Seconds per call of a small computation, and of the same with a transfer behind it, many in flight; and the
        processor time that all processes took for it."""
        from jax.sharding import PartitionSpec

        import pathways as pw

        _, source = self._source(nbytes, devices)
        spec = PartitionSpec("x")
        step = pw.jit(lambda x: x + 1, devices=self._here, in_shardings=spec, out_shardings=spec)
        alone = self._programs.setdefault("alone", pw.program(lambda x: step(x)))
        moved = self._programs.setdefault("moved", pw.program(lambda x: pw.device_put(step(x), self._there, spec)))
        out = {}
        for name, program in (("alone", alone), ("moved", moved)):

            def many(count: int, program: Any = program) -> tuple[float, float]:
                everybody = processes.tree(os.getpid())
                begin, used = time.perf_counter(), processes.cpu_seconds(everybody)
                value = source
                for _ in range(count):
                    value = program(source)
                value.block_until_ready()
                taken = time.perf_counter() - begin
                return taken / count, (processes.cpu_seconds(everybody) - used) / count

            each, _ = many(200)
            out[name], out[f"{name}_cpu"] = many(max(200, int(seconds / 2 / each)))
        return out

    def stop(self) -> None:
        """Ends the cluster."""
        self._stack.close()


class Machines(Pathways):
    """The same as if each host were on a machine of its own."""

    machines = 2


class Memcpy:
    """NumPy's copy of as many bytes within one process, into memory that is mapped, and into memory that is not."""

    def start(self, devices: int) -> None:
        """Nothing to start."""

    def measure(self, nbytes: int, devices: int, reshards: bool, seconds: float) -> dict[str, float]:
        """As `Pathways.measure`; `fresh` is of memory never touched. Resharded, each half of the columns by itself."""
        import numpy

        data = numpy.random.default_rng(0).random(_side(nbytes, devices), numpy.float32)
        target = numpy.zeros_like(data)
        columns = data.shape[1] // devices
        parts = [numpy.zeros((data.shape[0], columns), numpy.float32) for _ in range(devices)]

        def copy() -> None:
            if not reshards:
                numpy.copyto(target, data)
                return
            for number, part in enumerate(parts):
                numpy.copyto(part, data[:, number * columns : (number + 1) * columns])

        def many(count: int) -> None:
            for _ in range(count):
                copy()

        out = timed(copy, many, nbytes * devices, seconds)
        fresh = []
        for _ in range(5):
            memory = mmap.mmap(-1, data.nbytes)  # unmapped with the last array on it
            begin = time.perf_counter()
            numpy.copyto(numpy.frombuffer(memory, numpy.float32).reshape(data.shape), data)
            fresh.append(time.perf_counter() - begin)
        return {**out, "fresh": stats.quantile(fresh, 0.5)}


class JaxTransfer:
    """`jax.experimental.transfer` from another process; resharded by `jax.device_put` once it is here."""

    def __init__(self) -> None:
        self._peer: processes.Child | None = None
        self._numbers = itertools.count(1)

    def start(self, devices: int) -> None:
        """Starts the sender, and connects to it."""
        self._server = _transfer_server(devices)
        self._peer = processes.Child("pathways.bench.transfer_systems:JaxSender")
        self._link = self._server.connect(self._peer.ask("start", devices, timeout=_PATIENCE))

    def offer(self, count: int, nbytes: int, devices: int) -> list[int]:
        """The numbers by which `count` arrays can be pulled now."""
        assert self._peer is not None
        numbers = [next(self._numbers) for _ in range(count)]
        self._peer.ask("offer", numbers, nbytes, devices, timeout=_PATIENCE)
        return numbers

    def puller(self, nbytes: int, devices: int, reshards: bool) -> Callable[[int], Any]:
        """Pulls the array of a number."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        columns = NamedSharding(mesh, PartitionSpec(None, "x"))
        spec = jax.ShapeDtypeStruct(_side(nbytes, devices), "float32", sharding=sharding)

        def pull(number: int) -> Any:
            (value,) = self._link.pull(number, [spec])
            return jax.device_put(value, columns) if reshards else value

        return pull

    def measure(self, nbytes: int, devices: int, reshards: bool, seconds: float) -> dict[str, float]:
        """As `Pathways.measure`."""
        pull = self.puller(nbytes, devices, reshards)
        window = in_flight(nbytes * devices)
        taken: list[float] = []
        runs: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not runs:
            for number in self.offer(3, nbytes, devices):
                begin = time.perf_counter()
                pull(number).block_until_ready()
                taken.append(time.perf_counter() - begin)
            numbers = self.offer(window, nbytes, devices)
            begin = time.perf_counter()
            for value in [pull(number) for number in numbers]:
                value.block_until_ready()
            runs.append((time.perf_counter() - begin) / window)
        return {"one": stats.quantile(taken, 0.5), "many": stats.quantile(runs, 0.5)}

    def stop(self) -> None:
        """Ends the sender."""
        if self._peer is not None:
            self._peer.kill()


class JaxSender:
    """The other end of `JaxTransfer`: offers one array again and again."""

    def start(self, devices: int) -> str:
        """Where to connect."""
        self._server = _transfer_server(devices)
        self._arrays: dict[Any, Any] = {}
        return str(self._server.address())

    def offer(self, numbers: list[int], nbytes: int, devices: int) -> None:
        """Lets each number be pulled once."""
        import jax
        import numpy
        from jax.sharding import NamedSharding, PartitionSpec

        if (nbytes, devices) not in self._arrays:
            mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
            data = numpy.random.default_rng(0).random(_side(nbytes, devices), numpy.float32)
            self._arrays[nbytes, devices] = jax.block_until_ready(
                jax.device_put(data, NamedSharding(mesh, PartitionSpec("x")))
            )
        for number in numbers:
            self._server.await_pull(number, [self._arrays[nbytes, devices]])


def _transfer_server(devices: int) -> Any:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    from jax.experimental import transfer

    return transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])


def _side(nbytes: int, devices: int) -> tuple[int, int]:
    """Rows and columns of an array of floats with `nbytes` per device, both divisible by the devices."""
    columns = 32 if nbytes < 1 << 20 else 2048
    return nbytes * devices // 4 // columns, columns
