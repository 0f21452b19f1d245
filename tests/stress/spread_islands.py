"""Islands over machines, at their worst: gangs of several clients, crossed at random, while lines are slow, lossy and
cut, and machines are killed and stopped. Every value is compared with NumPy.

    python tests/stress/spread_islands.py [--seconds 120] [--faults 100] [--seed 1]

Four machines, each behind a line of its own (`lines.py`), are one island of four hosts; the fabric goes over the same
lines. A fifth machine, at the head, is an island of its own, where an innocent client computes all the time. First the
lines change at random, and are cut for less than an end may be silent: no value may be lost. Then come faults: who
depends on the island gets `HostLostError`, and a right value when it is back. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import queue
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import numpy as np
import psutil
from lines import ADDRESS, Line, Lines
from network_world import end, told

MACHINES, CLIENTS = 4, 4
START_S = 300.0
#: An error comes within this time after its cause; silence is noticed after 4.5 s.
HUNG_S = 10.0
FAULTS = ("kill machine", "stop machine", "kill host", "stop host", "cut", "cut to the head", "cut from the head")


def play_client(address: str, name: str, seed: int, says: Any, over: Any, island: int) -> None:
    """A client's process: gangs on slices of an island until it is over; says counts, and what went wrong."""
    os.setsid()
    counts: collections.Counter[str] = collections.Counter()
    fault = ""
    try:
        import pathways as pw

        with pw.connect(address, name=name) as cluster:
            cluster.wait_for(2 * MACHINES, START_S)
            says.put((name, "ready", {}, ""))
            _Player(cluster, random.Random(seed), island, counts).play(over)
    except BaseException:
        fault = " / ".join(traceback.format_exc().split("\n")[-5:])
    says.put((name, "over", dict(counts), fault))
    says.close()
    says.join_thread()
    os._exit(0)


class _Player:
    """Values on slices, with what they must be."""

    def __init__(self, cluster: Any, draw: random.Random, island: int, counts: collections.Counter[str]) -> None:
        import jax.numpy as jnp

        import pathways as pw

        self._draw, self._counts, self._lost = draw, counts, pw.errors.HostLostError
        devices = pw.make_virtual_device_set(cluster)
        sizes = [MACHINES, *(draw.randint(2, MACHINES) for _ in range(3))]
        self._slices = [devices.add_slice(devices=size, island=island) for size in sizes]
        self._gangs = [pw.jit(lambda x, n: x * 3 + jnp.sum(x) + n, devices=each) for each in self._slices]
        self._put = pw.device_put
        self._values: list[tuple[Any, np.ndarray] | None] = [None] * len(sizes)
        self._settled: list[tuple[Any, np.ndarray]] = []

    def play(self, over: Any) -> None:
        while not over.is_set():
            at = self._draw.randrange(len(self._slices))
            began = time.monotonic()
            try:
                self._step(at)
            except self._lost:
                self._counts["lost"] += 1
                self._values = [None] * len(self._slices)
                time.sleep(0.05)
            took_ms = int((time.monotonic() - began) * 1e3)
            self._counts["longest ms"] = max(self._counts["longest ms"], took_ms)

    def _step(self, at: int) -> None:
        known = self._values[at]
        if known is None:
            x = np.arange(24, dtype=np.uint32)
            known = self._put(x, self._slices[at]), x
        array, expected = known
        n = np.uint32(self._draw.randrange(1 << 30))
        for _ in range(self._draw.randint(1, 8)):
            array, expected = self._gangs[at](array, n), expected * np.uint32(3) + expected.sum(dtype=np.uint32) + n
            self._counts["gangs"] += 1
        self._values[at] = array, expected
        if self._draw.random() < 0.2:  # on to another slice
            to = self._draw.randrange(len(self._slices))
            self._values[to] = self._put(array, self._slices[to]), expected
        if self._draw.random() < 0.3:
            found = np.asarray(array)
            self._counts["values"] += found.size
            if not np.array_equal(found, expected):
                self._counts["wrong"] += 1
                raise AssertionError(f"slice {at}: {found[:4]} instead of {expected[:4]}")


@dataclasses.dataclass
class Machine:
    """A machine with a host of the island."""

    name: str
    line: Line
    process: subprocess.Popen[Any] | None = None

    def processes(self) -> list[psutil.Process]:
        """All that runs on it, below what started it."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []


class World:
    """The head, the machines, the clients."""

    def __init__(self, lines: Lines, draw: random.Random) -> None:
        from pathways.cluster.launcher import Listening, start_local_cluster
        from pathways.process.run_directory import authority_folder
        from pathways.trust import Role, Tokens

        self.draw = draw
        self.folder = tempfile.mkdtemp(prefix="ps", dir="/tmp")
        self._stack = contextlib.ExitStack()
        subprocess.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)  # of the head's network, where we are
        self.handle = start_local_cluster(
            2, MACHINES, 1, platform="cpu", listen=Listening(f"{ADDRESS}:0", f"{self.folder}/authority")
        )
        self._stack.callback(self.handle.close)
        tokens = Tokens(authority_folder(self.handle.directory))
        self._token = lambda: tokens.make(Role.HOST, 60000.0)
        self.machines = [Machine(f"m{number}", lines.add(f"m{number}")) for number in range(MACHINES)]
        self._near = self._agent("near", ["--island", "near", "--hosts", str(MACHINES)], [])
        for machine in self.machines:
            self.start(machine)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["jax", "jax.numpy", "numpy", "pathways"])
        self.says, self.over = context.Queue(), context.Event()
        self._context = context

    def _agent(self, name: str, options: list[str], prefix: list[str]) -> subprocess.Popen[Any]:
        folder = pathlib.Path(self.folder, name)
        folder.mkdir(exist_ok=True)
        env = {**os.environ, "PATHWAYS_TOKEN": self._token(), "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder)}
        command = [sys.executable, "-m", "pathways", "agent", self.handle.port, "--name", name, *options]
        with open(folder / "agent.out", "a") as log:
            process = subprocess.Popen([*prefix, *command], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._stack.callback(end, process)
        return process

    def start(self, machine: Machine) -> None:
        """Starts the agent of a machine."""
        address = machine.line.address
        machine.process = self._agent(machine.name, ["--island", "pod", "--fabric", address], machine.line.command([]))

    def client(self, name: str, island: int) -> None:
        """Starts a client."""
        address = self.handle.address.removesuffix("/control.sock")
        arguments = (address, name, self.draw.randrange(1 << 30), self.says, self.over, island)
        process = self._context.Process(target=play_client, args=arguments, daemon=True)
        process.start()
        self._stack.callback(process.kill)

    def hear(self, names: set[str], what: str, seconds: float) -> dict[str, tuple[dict[str, int], str]]:
        """What clients say, when each has said it."""
        found: dict[str, tuple[dict[str, int], str]] = {}
        until = time.monotonic() + seconds
        while names - found.keys() and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                name, said, counts, fault = self.says.get(timeout=1)
                if said in (what, "over"):
                    found[name] = counts, fault
        return found

    def states(self) -> list[str]:
        """Of the island's hosts, and of the others."""
        return [host["state"] for host in self.handle.control.cluster_stats()["hosts"]]

    def wait_up(self, seconds: float = START_S) -> float:
        """Waits until all hosts are up. Returns how long that took."""
        began = time.monotonic()
        while set(self.states()) != {"up"}:
            assert time.monotonic() - began < seconds, f"after {seconds:g} s: {self.states()}; {self.folder}"
            time.sleep(0.1)
        return time.monotonic() - began

    @property
    def island(self) -> int:
        """The number of the island that is spread."""
        return next(
            int(each["island"]) for each in self.handle.control.cluster_stats()["machines"] if each["name"] == "m0"
        )

    def close(self) -> None:
        self._stack.close()


def shake(world: World, seconds: float) -> int:
    """Changes lines at random, for so long, and cuts them for at most 2 s. Returns how many cuts there were."""
    until, cuts = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        line = world.draw.choice(world.machines).line
        line.change(delay_s=world.draw.choice([0, 0.001, 0.01, 0.05]), loss=world.draw.choice([0, 0, 0.005, 0.02]))
        if world.draw.random() < 0.2:
            line.change(cut=world.draw.choice([[True, True], [True, False], [False, True]]))
            time.sleep(world.draw.uniform(0.1, 2.0))
            line.change(cut=[False, False])
            cuts += 1
        time.sleep(world.draw.uniform(0.05, 0.5))
    for machine in world.machines:
        machine.line.change(delay_s=0, loss=0)
    return cuts


def play_fault(world: World, fault: str) -> tuple[float, float]:
    """One fault of one machine. Returns after how long it was known, and how long the island then took to come back."""
    machine = world.draw.choice(world.machines)
    processes = machine.processes()
    hosts = [each for each in processes if each.name().startswith("pathways-host")]
    assert hosts, f"{machine.name} has no host"
    heals_s = world.draw.uniform(6.0, 9.0)
    began = time.monotonic()
    if fault == "kill machine":
        _signal(processes, signal.SIGKILL)
    elif fault == "stop machine":
        _signal(processes, signal.SIGSTOP)
    elif fault.endswith("host"):
        _signal(hosts, signal.SIGKILL if fault == "kill host" else signal.SIGSTOP)
    else:
        machine.line.change(cut=[fault != "cut from the head", fault != "cut to the head"])
    while set(world.states()) == {"up"}:
        assert time.monotonic() - began < HUNG_S, f"{fault} of {machine.name} is not known after {HUNG_S:g} s"
        time.sleep(0.02)
    known_s = time.monotonic() - began
    if fault == "stop machine" or fault.startswith("cut"):
        time.sleep(max(0.0, heals_s - known_s))
    machine.line.change(cut=[False, False])
    _signal(processes, signal.SIGCONT)
    if fault == "kill machine":
        assert machine.process is not None
        machine.process.wait(60)
        world.start(machine)
    return known_s, world.wait_up()


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextlib.contextmanager
def running(draw: random.Random) -> Iterator[World]:
    """The world, with its clients at work."""
    with Lines() as lines:
        for_whom = World(lines, draw)
        try:
            yield for_whom
        finally:
            for_whom.close()


def campaign(seconds: float, faults: int, seed: int) -> list[str]:
    """Plays it. Returns what went wrong."""
    wrong: list[str] = []
    with running(random.Random(seed)) as world:
        told(f"seed {seed}; {world.folder}, {world.handle.directory}")
        told(f"all hosts are up after {world.wait_up():.1f} s")
        pod = world.island
        files = psutil.Process(world.handle.control.cluster_stats()["controller"]["pid"]).num_fds()
        for phase in ("lines", "faults"):
            names = {f"{phase}-{number}" for number in range(CLIENTS)}
            world.over.clear()
            for name in sorted(names):
                world.client(name, pod)
            world.client("innocent", 1 - pod)
            ready = world.hear({*names, "innocent"}, "ready", START_S)
            wrong += [f"{name}: {fault}" for name, (_, fault) in ready.items() if fault]
            try:
                if phase == "lines":
                    told(f"{shake(world, seconds)} cuts of less than 2 s")
                else:
                    for number in range(faults):
                        fault = world.draw.choice(FAULTS)
                        known_s, back_s = play_fault(world, fault)
                        told(f"{number + 1}: {fault}: known after {known_s:.2f} s, back {back_s:.1f} s later")
            except AssertionError as error:
                wrong.append(str(error))
            world.over.set()
            found = world.hear({*names, "innocent"}, "over", 120)
            wrong += [f"{name} does not end" for name in {*names, "innocent"} - found.keys()]
            for name, (counts, fault) in sorted(found.items()):
                told(f"{name}: {counts} {fault}")
                if fault or counts.get("wrong") or (counts.get("lost") and (phase == "lines" or name == "innocent")):
                    wrong.append(f"{name}: {counts} {fault}")
                if name == "innocent" and counts.get("longest ms", 0) > HUNG_S * 1e3:
                    wrong.append(f"{name} waited for {counts['longest ms']} ms")
            if wrong:
                break
        until = time.monotonic() + 30
        while time.monotonic() < until:
            stats = world.handle.control.cluster_stats()
            kept = [host["objects"] + host["live_runs"] for host in stats["hosts"]]
            left = psutil.Process(stats["controller"]["pid"]).num_fds() - files
            if not any(kept) and left <= 0:
                break
            time.sleep(0.5)
        else:
            wrong.append(f"left: objects and runs of hosts {kept}, {left} descriptors of the controller")
    return wrong


def main() -> int:
    """Plays what the command line says."""
    parser = argparse.ArgumentParser(description="Gangs over machines with bad lines, and faults of the machines.")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    wrong = campaign(options.seconds, options.faults, options.seed)
    for each in wrong:
        told(f"WRONG: {each}")
    told(f"{len(wrong)} faults of ours")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
