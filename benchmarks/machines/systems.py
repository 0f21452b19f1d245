"""Who moves bytes and makes calls in a bench between machines, each in a process of its own.

For transfers a system answers as those of `transfer_systems` do. For calls it answers "round_trips", nanoseconds of one
call each, and ours "calls", seconds per pipelined call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.machines.agents import AgentsCluster
from benchmarks.rivals import bare
from pathways.bench.processes import Child
from pathways.bench.systems.pathways_cluster import PathwaysCluster
from pathways.bench.transfer_systems import JaxTransfer, Pathways, timed
from pathways.bench.turns import Turns

STREAMS = (1, 2, 3, 4)
#: Calls before those that are timed.
WARM_UP = 20
#: Calls in flight at most on each machine, as in `pathways.bench.systems.base`.
_WINDOW = 64


def _cluster(kind: str, machines: int, devices: int) -> Any:
    """A context manager of the cluster: "one": all hosts on one machine; "tls" and "tcp": brought by agents."""
    import pathways as pw

    if kind == "one":
        return pw.connect(pw.LocalCluster(islands=machines, hosts_per_island=1, devices_per_host=devices))
    return AgentsCluster(machines, devices, is_encrypted=kind == "tls")


class OverMachines(PathwaysCluster):
    """One island, each of its hosts on a machine of its own."""

    name = "pathways-machines"

    def _connected(self, hosts: int, devices: int) -> Any:
        return AgentsCluster(hosts, devices, is_one_island=True)


class Transfers(Pathways):
    """Transfers from the first machine to the second one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def _connect(self, devices: int) -> Any:
        return _cluster(self._kind, 2, devices)


class BareTransfers:
    """The same bytes over bare streams."""

    def __init__(self, kind: str, streams: str) -> None:
        self._bare = bare.Bare(kind)
        self._streams = int(streams)

    def start(self, devices: int) -> None:
        """Starts the other end."""
        self._bare.start()

    def measure(self, nbytes: int, devices: int, reshards: bool, seconds: float) -> dict[str, float]:
        """As `Pathways.measure`; every transfer is answered with one byte per stream."""
        with self._bare.streams(self._streams, nbytes * devices, 1) as move:
            move(2)
            return timed(lambda: move(1), move, nbytes * devices, seconds)

    def stop(self) -> None:
        """Ends the other end."""
        self._bare.stop()


class Calls:
    """A computation of nothing, x + 1, on an island of one device per machine."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._stack = contextlib.ExitStack()

    def start(self, machines: int) -> None:
        """Starts the cluster and compiles."""
        import numpy

        import pathways as pw

        self._cluster = self._stack.enter_context(_cluster(self._kind, machines, 1))
        everything = pw.make_virtual_device_set()
        slices = [everything.add_slice(devices=1, island=island) for island in range(machines)]
        self._steps = [pw.jit(lambda x: x + 1, devices=where) for where in slices]
        self._zeros = [pw.device_put(numpy.float32(0), where) for where in slices]
        for step, zero in zip(self._steps, self._zeros, strict=True):
            step(zero).block_until_ready()

    def link_bytes(self) -> tuple[int, int]:
        """Bytes that the links have carried so far, from the controller's machine and to it."""
        machines = self._cluster.stats()["machines"]
        return sum(each["bytes_out"] for each in machines), sum(each["bytes_in"] for each in machines)

    def round_trips(self, out: int, back: int, seconds: float) -> list[int]:
        """Nanoseconds of calls on the first machine, each awaited. How many bytes they take is ours to decide."""
        step, value = self._steps[0], self._zeros[0]
        return _timed_one_by_one(lambda: step(value).block_until_ready(), seconds)

    def calls(self, seconds: float) -> float:
        """Seconds per call when calls go to the machines in turn, each machine's on the result of its last one."""
        count = _WINDOW * 4
        while (taken := self._pipelined(count)) < seconds / 2:
            count = max(count * 2, int(count * seconds / max(taken, 1e-4)))
        return taken / count

    def _pipelined(self, count: int) -> float:
        """Seconds of `count` calls."""
        import numpy

        machines = len(self._steps)
        values, markers = list(self._zeros), list(self._zeros)
        rounds, half = -(-count // machines), _WINDOW // 2
        begin = time.perf_counter()
        for at in range(rounds):
            for number, step in enumerate(self._steps):
                values[number] = step(values[number])
            if at % half == half - 1:
                for marker in markers:
                    marker.block_until_ready()  # half a window ago: bounds what is in flight
                markers = list(values)
        for value in values:
            value.block_until_ready()
        taken = time.perf_counter() - begin
        for value in values:
            if (held := float(numpy.asarray(value))) != float(min(rounds, 2**24)):
                raise ValueError(f"after {rounds} calls expected {rounds}, got {held}")
        return taken * count / (rounds * machines)

    def stop(self) -> None:
        """Ends the cluster."""
        self._stack.close()


class BareCalls:
    """A message and its answer, on one bare stream."""

    def __init__(self, kind: str) -> None:
        self._bare = bare.Bare(kind)

    def start(self, machines: int) -> None:
        """Starts the other end."""
        self._bare.start()

    def round_trips(self, out: int, back: int, seconds: float) -> list[int]:
        """Nanoseconds of a message of `out` bytes and its answer of `back` bytes."""
        with self._bare.streams(1, out, back) as move:
            return _timed_one_by_one(lambda: move(1), seconds)

    def stop(self) -> None:
        """Ends the other end."""
        self._bare.stop()


class JaxPulls(JaxTransfer):
    """The pull of one number by `jax.experimental.transfer`; that it is offered is not counted."""

    def start(self, machines: int) -> None:
        """Starts the sender."""
        super().start(1)

    def round_trips(self, out: int, back: int, seconds: float) -> list[int]:
        """Nanoseconds of pulls, each awaited."""
        pull = self.puller(128, 1, False)
        for number in self.offer(3, 128, 1):
            pull(number).block_until_ready()
        taken: list[int] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for number in self.offer(32, 128, 1):
                begin = time.perf_counter_ns()
                pull(number).block_until_ready()
                taken.append(time.perf_counter_ns() - begin)
        return taken


def _timed_one_by_one(one: Callable[[], Any], seconds: float) -> list[int]:
    for _ in range(WARM_UP):
        one()
    taken: list[int] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < WARM_UP:
        begin = time.perf_counter_ns()
        one()
        taken.append(time.perf_counter_ns() - begin)
    return taken


_HERE = "benchmarks.machines.systems"
OURS = {"one machine": "one", "machines tls": "tls", "machines tcp": "tcp"}
#: What a `processes.Child` makes of each system: ``module:Class``, and its arguments. "<kind> <streams>" are bare ones.
TRANSFERS: dict[str, tuple[str, ...]] = {
    **{name: (f"{_HERE}:Transfers", kind) for name, kind in OURS.items()},
    **{f"{kind} {n}": (f"{_HERE}:BareTransfers", kind, str(n)) for kind in bare.SOCKETS for n in STREAMS},
    "grpc 1": (f"{_HERE}:BareTransfers", "grpc", "1"),
    "jax_transfer": ("pathways.bench.transfer_systems:JaxTransfer",),
}
CALLS: dict[str, tuple[str, ...]] = {
    **{name: (f"{_HERE}:Calls", kind) for name, kind in OURS.items()},
    **{kind: (f"{_HERE}:BareCalls", kind) for kind in bare.KINDS},
    "jax_transfer": (f"{_HERE}:JaxPulls",),
}


def turns_of(systems: Mapping[str, tuple[str, ...]]) -> Turns:
    """Turns in which nobody is stopped: a stopped agent would be taken for lost, and who has no work takes no core."""
    return Turns(lambda name: Child(*systems[name]), is_stopped=lambda name: False)
