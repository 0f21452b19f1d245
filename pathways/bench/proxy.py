"""`pathways bench proxy`: what a program of plain JAX pays for the proxy, beside its own devices."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pathways.bench import processes
from pathways.bench.command import Say, option
from pathways.bench.goals import Bound, at_least, at_most, judged
from pathways.bench.report import Report, Table
from pathways.bench.stats import Spread

METHOD = (
    "A program of stock JAX adds one to eight numbers on one device: by its own CPU device, and by a proxy of a "
    "cluster of one host on this machine. Both take turns. A chained step takes the result of the one before, and the "
    "last one is waited for; a synchronous one is waited for itself; a step that is read is read as an array. A put is "
    "a device_put that is waited for; a get reads an array that was just computed."
)
_TIMEOUT = 300.0
_LARGE = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION"
_TURN_S = 0.5
_IDLE_S = 3.0
_WARM_STEPS = 2000

#: By what is measured; of the proxy.
GOALS: dict[str, Bound] = {
    "chained step, us": at_most(40),
    "synchronous step, us": at_most(150),
    "step that is read, us": at_most(400),
    "put, GB/s": at_least(1),
    "put by a shared directory, GB/s": at_least(2.5),
    "get, GB/s": at_least(1),
    "idle sessions, % of a core": at_most(1),
    "growth of the proxy in the last half of the steps, MB": at_most(1),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    repeats: int = option(5, "How often each is measured.")
    megabytes: int = option(64, "The size of what is put and got.")
    sessions: int = option(50, "How many clients are idle.")
    steps: int = option(100_000, "After how many steps the proxy's memory is looked at.", least=10_000)


class Cluster:
    """The process that has a cluster, and two proxies of it: the second one has a shared directory."""

    def __init__(self) -> None:
        import pathways as pw
        from pathways.cluster.proxy_process import ProxyProcess

        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(
                pw.connect(pw.LocalCluster(islands=1, hosts_per_island=1, devices_per_host=1))
            )
            self._plain = stack.enter_context(ProxyProcess(cluster.address))
            self._shared = stack.enter_context(ProxyProcess(cluster.address, shared_directory=self._folder.name))
            self._open = stack.pop_all()

    def variables(self) -> tuple[dict[str, str], dict[str, str]]:
        """Those of a client of each proxy."""
        shared = {f"{_LARGE}_DIRECTORY": self._folder.name, f"{_LARGE}_THRESHOLD_BYTES": "1000000"}
        return self._plain.variables, self._shared.variables | shared

    def memory(self) -> float:
        """Megabytes that the first proxy has."""
        status = Path(f"/proc/{self._plain.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1000

    def cpu_seconds(self) -> float:
        """That the first proxy has used."""
        return processes.cpu_seconds([self._plain.pid])

    def stop(self) -> None:
        """Ends all."""
        self._open.close()
        self._folder.cleanup()


class Program:
    """The process of a program of JAX: by a proxy, or by its own device, as its variables say."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        self._jax, self._numpy = jax, np
        self._step = jax.jit(lambda x: x + 1)
        self._value = jnp.zeros(8)
        self._clients: list[Any] = []
        self._chain(200)

    def times(self, nbytes: int) -> dict[str, float]:
        """One turn of each: microseconds, or GB/s."""
        found = {
            "chained step, us": self._timed(self._chain, 200),
            "synchronous step, us": self._timed(self._synchronous, 20),
            "step that is read, us": self._timed(self._read, 20),
        }
        return found | {"put, GB/s": self.put(nbytes), "get, GB/s": self._get(nbytes)}

    def put(self, nbytes: int) -> float:
        """GB/s."""
        values = self._numpy.ones(nbytes // 4, self._numpy.float32)
        start = time.perf_counter()
        self._jax.block_until_ready(self._jax.device_put(values))
        return nbytes / (time.perf_counter() - start) / 1e9

    def run_steps(self, steps: int) -> None:
        """So many chained steps."""
        for _ in range(steps // _WARM_STEPS):
            self._chain(_WARM_STEPS)

    def begin_sessions(self, count: int) -> None:
        """So many more clients of the proxy, which do nothing."""
        from pathways._jaxlib import proxy_platform

        self._clients = [proxy_platform.new_client() for _ in range(count)]

    def end_sessions(self) -> None:
        """Ends them."""
        self._clients.clear()

    def _chain(self, steps: int) -> None:
        for _ in range(steps):
            self._value = self._step(self._value)
        self._value.block_until_ready()

    def _synchronous(self, steps: int) -> None:
        for _ in range(steps):
            self._value = self._step(self._value)
            self._value.block_until_ready()

    def _read(self, steps: int) -> None:
        for _ in range(steps):
            self._value = self._step(self._value)
            self._numpy.asarray(self._value)

    def _get(self, nbytes: int) -> float:
        made = self._step(self._jax.numpy.zeros(nbytes // 4, self._numpy.float32)).block_until_ready()
        start = time.perf_counter()
        self._numpy.asarray(made)
        return nbytes / (time.perf_counter() - start) / 1e9

    def _timed(self, work: Callable[[int], None], steps: int) -> float:
        """Microseconds per step."""
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < _TURN_S:
            work(steps)
            count += steps
        return (time.perf_counter() - start) / count * 1e6


def run(settings: Settings, say: Say = lambda words: None) -> Report:
    """The proxy for unmodified JAX: steps, puts, gets, idle sessions, memory."""
    nbytes = settings.megabytes << 20
    found: dict[str, dict[str, list[float]]] = {"JAX": {}, "proxy": {}}

    def note(system: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            found[system].setdefault(name, []).append(value)

    with contextlib.ExitStack() as stack:

        def child(target: str, environment: dict[str, str]) -> processes.Child:
            return stack.enter_context(processes.Child(f"pathways.bench.proxy:{target}", environment=environment))

        own = {"JAX_PLATFORMS": "cpu"}
        cluster = child("Cluster", own)
        plain, shared = cluster.ask("variables", timeout=_TIMEOUT)
        programs = {"JAX": child("Program", own), "proxy": child("Program", plain)}
        by_directory = child("Program", shared)
        for turn in range(settings.repeats):
            say(f"turn {turn + 1} of {settings.repeats}")
            for name, program in programs.items():
                note(name, program.ask("times", nbytes, timeout=_TIMEOUT))
            rate = by_directory.ask("put", nbytes, timeout=_TIMEOUT)
            note("proxy", {"put by a shared directory, GB/s": rate})
        say(f"{settings.sessions} idle sessions")
        programs["proxy"].ask("begin_sessions", settings.sessions, timeout=_TIMEOUT)
        for _ in range(settings.repeats):
            before, start = cluster.ask("cpu_seconds", timeout=_TIMEOUT), time.perf_counter()
            time.sleep(_IDLE_S)
            used = cluster.ask("cpu_seconds", timeout=_TIMEOUT) - before
            note("proxy", {"idle sessions, % of a core": 100 * used / (time.perf_counter() - start)})
        programs["proxy"].ask("end_sessions", timeout=_TIMEOUT)
        say(f"{settings.steps} steps")
        half = settings.steps // 2
        programs["proxy"].ask("run_steps", half, timeout=_TIMEOUT)
        before = cluster.ask("memory", timeout=_TIMEOUT)
        programs["proxy"].ask("run_steps", half, timeout=_TIMEOUT)
        growth = cluster.ask("memory", timeout=_TIMEOUT) - before
        note("proxy", {"growth of the proxy in the last half of the steps, MB": growth})
    return _report(found)


def _report(found: dict[str, dict[str, list[float]]]) -> Report:
    rows = []
    for name, bound in GOALS.items():
        by_jax = found["JAX"].get(name)
        plain = Spread.of(by_jax).median if by_jax else None
        rows.append(judged(name, bound, Spread.of(found["proxy"][name]), JAX=plain))
    table = Table.of("Proxy", rows, "what=goal, JAX, proxy=value, min, max, goal=bound, reached")
    return Report("proxy", METHOD, table, {"rows": rows, "found": found})
