"""`python -m benchmarks.scale.agents`: what a cluster of many machines costs its controller, on one machine.

The controller and the client are real, and so are the connections between them and the machines: TLS over loopback
addresses. The machines are modelled, all in one process (`modelled_machines.py`). What is measured is the controller's
process alone: its CPU time by the kernel's clock of the process, and its memory by /proc.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from pathways.bench import stats
from pathways.bench.command import Say, as_command, option
from pathways.bench.goals import at_most, judged
from pathways.bench.processes import Child, cpu_seconds
from pathways.bench.report import Report, Table
from pathways.cluster.launcher import Listening, start_local_cluster
from pathways.process.run_directory import authority_folder
from pathways.trust import Role, Tokens

METHOD = (
    "A controller that listens at a loopback address, a client, and a process of modelled machines: each has its own "
    "certificate, a link of two TLS connections, and gRPC sessions of its agent and its hosts through tunnels, but no "
    "process, no compiler and no device. Certificates are made before. join: from the moment at which all machines "
    "dial until the client's wait_for returns. idle, run: CPU time of the controller's process, all threads. memory: "
    "USS of the controller, with the authority and the client there, before and after the join. run: one program with "
    "one computation on the island of each machine, so that a run goes to all hosts; pipelined: all runs are submitted "
    "before one is awaited; one by one: each is awaited on all hosts. What an idle controller takes in that time is "
    "subtracted; the columns `with idle` have it. Medians of the repeats. Machines and client share the cores with the "
    "controller, so wall times are those of a machine with too few cores."
)

#: The longest that the certificates, one answer of the machines, and the join may take, in seconds.
_PREPARE_S, _LONGEST_S, _JOIN_S = 300.0, 60.0, 900.0
_SETTLE_S = 1.0
#: Of so many pipelined runs, one is measured that is awaited by itself: these take so much longer.
_ONE_BY_ONE = 5
_MIB = float(1 << 20)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    agents: int = option(256, "Modelled machines that join from this one.")
    hosts_per_agent: int = option(1, "Hosts of each modelled machine.")
    devices_per_host: int = option(1, "Of each host.")
    relays: int = option(0, "Of the machines, so many carry the links of the others.", least=0)
    runs: int = option(1000, "Pipelined runs of a measurement.")
    repeats: int = option(3, "How often each is measured.")
    idle_seconds: float = option(10.0, "How long the idle controller is watched.", least=0)

    @property
    def hosts(self) -> int:
        """Hosts of all machines."""
        return self.agents * self.hosts_per_agent


@dataclasses.dataclass(frozen=True)
class Memory:
    """The controller's memory in bytes, and its threads."""

    uss: int  # in no other process
    anonymous: int  # of these: its own heap and stacks; the rest are twins of blocks that no other process has mapped
    shared: int  # memory of blocks that lie in descriptors; what is mapped two times counts two times
    threads: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        """That of a process now."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}
        kib = {name: int(status[name][0]) for name in ("RssAnon", "RssShmem")}
        uss = psutil.Process(pid).memory_full_info().uss
        return cls(uss, kib["RssAnon"] << 10, kib["RssShmem"] << 10, int(status["Threads"][0]))

    def since(self, before: Memory, hosts: int) -> dict[str, float]:
        """MiB for each host more than before."""
        names = ("uss", "anonymous", "shared")
        return {f"{name}_mib": (getattr(self, name) - getattr(before, name)) / _MIB / hosts for name in names}


@dataclasses.dataclass(frozen=True)
class Runs:
    """What some runs took. Microseconds are CPU time of the controller for each host and run."""

    how: str
    runs: int
    us: float  # without what it takes when it is idle
    us_with_idle: float
    machines_us: float  # of the process of the machines
    wall_ms: float  # of one run
    bytes_out: float  # to the machines, for each host and run
    bytes_in: float


class _Measured:
    """The parts of one measurement: a cluster, its machines and a client of it."""

    def __init__(self, settings: Settings, say: Say) -> None:
        self._settings = settings
        self._say = say
        self._idle_share = 0.0

    def run(self) -> dict[str, Any]:
        """Measures everything once, in this order."""
        settings = self._settings
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pathways-bench-"))
            listening = Listening("127.0.0.1:0", os.path.join(folder, "authority"))
            handle = start_local_cluster(
                settings.agents, settings.hosts_per_agent, settings.devices_per_host, platform="cpu", listen=listening
            )
            stack.callback(handle.close)
            self._controller = handle.control.controller_pid
            machines = Child("benchmarks.scale.modelled_machines:Machines")
            stack.callback(machines.kill)
            cluster = self._connect(stack, handle)
            token = Tokens(authority_folder(handle.directory)).make(Role.HOST, 3600.0, settings.agents)
            self._say(f"certificates for {settings.agents} machines")
            shape = (settings.agents, settings.hosts_per_agent, settings.devices_per_host)
            machines.ask("prepare", handle.port, token, *shape, timeout=_PREPARE_S)
            measured: dict[str, Any] = {"memory_before": dataclasses.asdict(before := Memory.of(self._controller))}
            self._say("join")
            measured["join"] = self._join(machines, cluster)
            joined = Memory.of(self._controller)
            measured["memory_joined"] = dataclasses.asdict(joined)
            measured["memory_per_host"] = joined.since(before, settings.hosts)
            self._say(f"idle, {settings.idle_seconds:g} s")
            measured["idle"] = self._idle()
            self._say("compile")
            call, measured["compile"] = self._compile(machines)
            self._say("runs")
            measured["runs"] = self._runs(call, cluster, machines)
            after = Memory.of(self._controller)
            measured["memory_after_runs"] = dataclasses.asdict(after)
            measured["memory_per_host_after_runs"] = after.since(before, settings.hosts)
            measured["machines"] = self._check(machines, call.count)
        return measured

    def _connect(self, stack: contextlib.ExitStack, handle: Any) -> Any:
        import pathways as pw

        return stack.enter_context(pw.connect(handle.address))

    def _join(self, machines: Child, cluster: Any) -> dict[str, Any]:
        settings, cpu, theirs = self._settings, self._cpu(), cpu_seconds([machines.pid])
        begin = machines.ask("dial", settings.relays, timeout=_LONGEST_S)
        cluster.wait_for(settings.hosts * settings.devices_per_host, _JOIN_S)
        taken = time.monotonic() - begin
        cpu, theirs = self._cpu() - cpu, cpu_seconds([machines.pid]) - theirs
        again = machines.ask("stats", timeout=_LONGEST_S)["begun_again"]
        why = sorted(set(again))[:8]
        return {"seconds": taken, "cpu_s": cpu, "machines_cpu_s": theirs, "begun_again": len(again), "why": why}

    def _idle(self) -> dict[str, float]:
        time.sleep(_SETTLE_S)
        cpu, begin = self._cpu(), time.monotonic()
        time.sleep(self._settings.idle_seconds)
        seconds = time.monotonic() - begin
        self._idle_share = (self._cpu() - cpu) / seconds
        return {"percent": 100 * self._idle_share, "seconds": seconds}

    def _compile(self, machines: Child) -> tuple[_Call, dict[str, float]]:
        cpu, theirs, begin = self._cpu(), cpu_seconds([machines.pid]), time.monotonic()
        call = _Call(self._settings)
        call.wait(call())
        seconds = time.monotonic() - begin
        used = {"cpu_s": self._cpu() - cpu, "machines_cpu_s": cpu_seconds([machines.pid]) - theirs}
        return call, {"seconds": seconds, **used}

    def _runs(self, call: _Call, cluster: Any, machines: Child) -> list[dict[str, Any]]:
        found: dict[str, list[Runs]] = {}
        for _ in range(self._settings.repeats):
            for how, many, runs in (
                ("pipelined", call.pipelined, self._settings.runs),
                ("one by one", call.one_by_one, max(1, self._settings.runs // _ONE_BY_ONE)),
            ):
                found.setdefault(how, []).append(self._timed(how, many, runs, cluster, machines))
        return [dataclasses.asdict(_median(runs)) for runs in found.values()]

    def _timed(self, how: str, many: Callable[[int], None], runs: int, cluster: Any, machines: Child) -> Runs:
        hosts = self._settings.hosts
        out, back = _link_bytes(cluster)
        theirs = cpu_seconds([machines.pid])
        cpu, begin = self._cpu(), time.monotonic()
        many(runs)
        seconds, spent = time.monotonic() - begin, self._cpu() - cpu
        theirs = cpu_seconds([machines.pid]) - theirs
        now_out, now_back = _link_bytes(cluster)
        each = 1.0 / (runs * hosts)
        busy = max(0.0, spent - self._idle_share * seconds)
        return Runs(
            how,
            runs,
            1e6 * busy * each,
            1e6 * spent * each,
            1e6 * theirs * each,
            1e3 * seconds / runs,
            (now_out - out) * each,
            (now_back - back) * each,
        )

    def _check(self, machines: Child, calls: int) -> dict[str, Any]:
        found = machines.ask("stats", timeout=_LONGEST_S)
        if found["launches"] != (wanted := calls * self._settings.hosts):
            raise ValueError(
                f"after {calls} runs on {self._settings.hosts} hosts expected {wanted} launches, got "
                f"{found['launches']}; machines that were lost: {found['begun_again']}"
            )
        return {"launches": found["launches"]}

    def _cpu(self) -> float:
        return cpu_seconds([self._controller])


class _Call:
    """A program with one computation on each island. Each takes nothing, so that no bytes of a client are in it."""

    def __init__(self, settings: Settings) -> None:
        import jax.numpy

        import pathways as pw

        everything = pw.make_virtual_device_set()
        devices = settings.hosts_per_agent * settings.devices_per_host
        slices = [everything.add_slice(devices=devices, island=island) for island in range(settings.agents)]
        parts = [pw.jit(lambda: jax.numpy.zeros((devices,), "float32"), devices=where) for where in slices]
        self._program = pw.program(lambda: [part() for part in parts])
        self.count = 0

    def __call__(self) -> Any:
        self.count += 1
        return self._program()

    @staticmethod
    def wait(results: Any) -> None:
        """Waits until all hosts have completed their part."""
        for result in results:
            result.block_until_ready()

    def pipelined(self, runs: int) -> None:
        """Submits all runs, then waits: each host does them in their order."""
        for _ in range(runs):
            results = self()
        self.wait(results)

    def one_by_one(self, runs: int) -> None:
        """Waits for each run before the next one."""
        for _ in range(runs):
            self.wait(self())


def _link_bytes(cluster: Any) -> tuple[int, int]:
    machines = cluster.stats()["machines"]
    return sum(each["bytes_out"] for each in machines), sum(each["bytes_in"] for each in machines)


def _median(runs: Sequence[Runs]) -> Runs:
    names = ("us", "us_with_idle", "machines_us", "wall_ms", "bytes_out", "bytes_in")
    medians: dict[str, Any] = {name: stats.quantile([getattr(each, name) for each in runs], 0.5) for name in names}
    return dataclasses.replace(runs[0], **medians)


def judge(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals of a cluster of many machines."""
    found = [
        ("join: all devices are there, s", 20.0, measured["join"]["seconds"]),
        ("idle: controller, percent of a core", 3.0, measured["idle"]["percent"]),
        ("memory: controller, MiB per host", 1.0, measured["memory_per_host"]["uss_mib"]),
    ]
    most_us = {"pipelined": 2.0, "one by one": 5.0}
    found += [
        (f"run: controller, {each['how']}, us per host and run", most_us[each["how"]], each["us"])
        for each in measured["runs"]
    ]
    return [judged(text, at_most(most), value) for text, most, value in found]


def make(settings: Settings, measured: dict[str, Any]) -> Report:
    """The report of one measurement."""
    join, goals = measured["join"], judge(measured)
    phases = [
        (what, each["seconds"], each["cpu_s"], each["machines_cpu_s"])
        for what, each in (("join", join), ("first call, which compiles", measured["compile"]))
    ]
    memory = [
        (when, *(measured[key][name] for name in ("uss_mib", "anonymous_mib", "shared_mib")), measured[of]["threads"])
        for when, key, of in (
            ("after the join", "memory_per_host", "memory_joined"),
            ("after the runs", "memory_per_host_after_runs", "memory_after_runs"),
        )
    ]
    tables = [
        Table(
            "Cluster",
            ("agents", "relays", "hosts", "joined again", "idle %"),
            [(settings.agents, settings.relays, settings.hosts, join["begun_again"], measured["idle"]["percent"])],
        ),
        Table("Once", ("what", "s", "controller's CPU s", "machines' CPU s"), phases),
        Table(
            "Controller's memory, MiB per host",
            ("when", "USS", "of these anonymous", "blocks in shared memory", "threads"),
            memory,
        ),
        Table(
            "Runs on all hosts, controller's CPU time per host and run",
            ("how", "runs", "us", "us with idle", "machines us", "wall ms per run", "bytes out", "bytes in"),
            [tuple(each.values()) for each in measured["runs"]],
        ),
        *Table.of("Goals", goals),
    ]
    notes = [f"joined again: {why}" for why in join["why"]]
    return Report(
        "scale-agents",
        METHOD,
        tables,
        {"settings": dataclasses.asdict(settings), "goals": goals, **measured},
        notes,
    )


def run(settings: Settings, say: Say = lambda words: None) -> Report:
    """What a cluster of many modelled machines costs its controller: to join, when it is idle, per host and run."""
    return make(settings, _Measured(settings, say).run())


command = as_command("agents", Settings, run)

if __name__ == "__main__":
    command()
