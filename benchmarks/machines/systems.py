"""Who moves bytes and makes calls in a bench between machines: ``python -m benchmarks.machines.systems <fd> <system>``.

For transfers a system answers as those of `transfer_systems` do. For calls it answers "round_trips", nanoseconds of one
call each, and ours "calls", seconds per pipelined call.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.machines.agents import AgentsCluster
from benchmarks.rivals import bare
from pathways.bench import processes
from pathways.bench.transfer_systems import JaxSender, JaxTransfer, Pathways, timed

STREAMS = (1, 2, 3, 4)
#: Calls before those that are timed.
WARM_UP = 20
_START_TIMEOUT = 300.0
#: Calls in flight at most on each machine, as in `systems.base`.
_WINDOW = 64


def _cluster(kind: str, machines: int, devices: int) -> Any:
    """A context manager of the cluster: "one": all hosts on one machine; "tls" and "tcp": brought by agents."""
    import pathways as pw

    if kind == "one":
        return pw.connect(pw.LocalCluster(islands=machines, hosts_per_island=1, devices_per_host=devices))
    return AgentsCluster(machines, devices, is_encrypted=kind == "tls")


class Transfers(Pathways):
    """Transfers from the first machine to the second one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def _connect(self, devices: int) -> Any:
        return _cluster(self._kind, 2, devices)


class BareTransfers:
    """The same bytes over bare streams."""

    def __init__(self, kind: str, streams: int) -> None:
        self._bare = bare.Bare(kind)
        self._streams = streams

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


#: Transfers: "<kind> <streams>" are the bare ones.
TRANSFERS: dict[str, Callable[[], Any]] = {
    "one machine": functools.partial(Transfers, "one"),
    "machines tls": functools.partial(Transfers, "tls"),
    "machines tcp": functools.partial(Transfers, "tcp"),
    **{f"{kind} {n}": functools.partial(BareTransfers, kind, n) for kind in bare.SOCKETS for n in STREAMS},
    "grpc 1": functools.partial(BareTransfers, "grpc", 1),
    "jax_transfer": JaxTransfer,
}
CALLS: dict[str, Callable[[], Any]] = {
    "one machine": functools.partial(Calls, "one"),
    "machines tls": functools.partial(Calls, "tls"),
    "machines tcp": functools.partial(Calls, "tcp"),
    **{kind: functools.partial(BareCalls, kind) for kind in bare.KINDS},
    "jax_transfer": JaxPulls,
}
SYSTEMS: dict[str, Callable[[], Any]] = {
    **{f"transfer: {name}": system for name, system in TRANSFERS.items()},
    **{f"call: {name}": system for name, system in CALLS.items()},
    "peer": bare.Peer,
    "jax_sender": JaxSender,
}


@contextlib.contextmanager
def started(what: str, names: Sequence[str], size: int, notes: list[str]) -> Iterator[dict[str, processes.Child]]:
    """A child per system of `what` ("transfer" or "call") that starts; why others do not is a note."""
    children: dict[str, processes.Child] = {}
    try:
        for name in names:
            child = processes.Child("benchmarks.machines.systems", [f"{what}: {name}"])
            try:
                child.ask("start", size, timeout=_START_TIMEOUT)
            except processes.ChildError as error:
                child.kill()
                notes.append(f"{name} is not measured: {error}")
                continue
            children[name] = child
        yield children
    finally:
        for child in children.values():
            child.end()


def main() -> None:
    """One system's process."""
    system = SYSTEMS[sys.argv[2]]()
    processes.serve(lambda verb, *arguments: getattr(system, verb)(*arguments))


if __name__ == "__main__":
    main()
