"""What `networks.py` and `network_cuts.py` share: a head with a controller, a machine and an innocent client; and far
clients and machines behind slow, long, lossy or cut lines (`lines.py`). Every value is compared with NumPy.

The innocent client is at the head, and computes on the head's machine all the time. Each client is a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import numpy as np
from lines import ADDRESS, Line, Lines, move_to

LARGE = int(float(os.environ.get("PATHWAYS_NETWORK_MIB", "16")) * (1 << 20))  # bytes
CALLS = 1000
IDLE_S = 20.0
SIDES = ("machine", "far")
START_S = 400.0  # on a busy machine


@dataclasses.dataclass(frozen=True)
class Cell:
    """A line, and what is at its end."""

    name: str
    side: str
    rate: float
    delay_s: float
    loss: float
    island: int  # that its client uses; 0 is the head's machine

    def __str__(self) -> str:
        rate = f"{self.rate / 1e3:g} kbit/s" if self.rate < 1e6 else f"{self.rate / 1e6:g} Mbit/s"
        return f"{rate}, {self.delay_s * 1e3:g} ms, {self.loss * 100:g} %, {self.side}"


class Work:
    """What a client does on one device, each with its value known exactly."""

    def __init__(self, cluster: Any, island: int) -> None:
        import jax.numpy as jnp

        import pathways as pw

        self.cluster = cluster
        where = pw.make_virtual_device_set(cluster).add_slice(devices=1, island=island)
        count = LARGE // 4
        self._where, self._put = where, pw.device_put
        self._step = pw.jit(lambda x, n: x * 3 + n, devices=where)
        self._make = pw.jit(lambda n: jnp.arange(count, dtype=jnp.uint32) * n, devices=where)
        self._digest = pw.jit(lambda x: jnp.sum(x * (jnp.arange(count, dtype=jnp.uint32) * 2 + 1)), devices=where)
        near = pw.make_virtual_device_set(cluster).add_slice(devices=1, island=0)
        self._make_near = pw.jit(lambda n: jnp.arange(count, dtype=jnp.uint32) * n, devices=near)
        self._x = np.arange(8, dtype=np.uint32)
        self.calls(3)
        assert np.asarray(self._digest(self._make(np.uint32(3)))) == digest(made(3))

    def idle(self) -> None:
        time.sleep(IDLE_S)

    def calls(self, count: int = CALLS) -> None:
        """Each call needs the one before it, and none waits for a round trip."""
        value, expected = self._x, self._x
        for n in range(count):
            value, expected = self._step(value, np.uint32(n)), expected * 3 + np.uint32(n)
        np.testing.assert_array_equal(np.asarray(value), expected)

    def put(self) -> None:
        x = np.random.default_rng(7).integers(0, 2**32, LARGE // 4, dtype=np.uint32)
        assert np.asarray(self._digest(self._put(x, self._where))) == digest(x), "what was put is wrong"

    def hop(self) -> None:
        """The head's machine sends what it has made."""
        assert np.asarray(self._digest(self._make_near(np.uint32(9)))) == digest(made(9)), "what was sent is wrong"

    def fetch(self) -> None:
        np.testing.assert_array_equal(np.asarray(self._make(np.uint32(5))), made(5))


def made(n: int) -> Any:
    """What `Work._make` makes."""
    return np.arange(LARGE // 4, dtype=np.uint32) * np.uint32(n)


def digest(x: Any) -> Any:
    """What `Work._digest` finds."""
    return np.sum(x * (np.arange(LARGE // 4, dtype=np.uint32) * np.uint32(2) + np.uint32(1)), dtype=np.uint32)


@dataclasses.dataclass
class Place:
    """Where a client's process is, and how it comes in."""

    namespace: str
    address: str
    token: str
    state: str


def connected(cell: Cell, place: Place) -> Work:
    """A client, when its island is there."""
    import pathways as pw

    os.environ["PATHWAYS_TOKEN"], os.environ["XDG_STATE_HOME"] = place.token, place.state
    until = time.monotonic() + START_S
    while True:
        try:
            cluster = pw.connect(place.address, name=cell.name)
            break
        except pw.errors.ConnectError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
    while cluster.stats()["hosts"][cell.island]["state"] != "up":
        assert time.monotonic() < until, "its island does not come"
        time.sleep(0.5)
    return Work(cluster, cell.island)


def client(cell: Cell, place: Place, says: Any, begin: Any, play: Callable[..., None], *what: Any) -> None:
    """The process of a client: connects, and plays when it is told to begin."""
    os.setsid()
    try:
        if place.namespace:
            move_to(place.namespace)
        sys.stderr = open(f"{place.state}.client.log", "w", buffering=1)  # noqa: SIM115
        work = connected(cell, place)
        says.put((cell.name, "ready", 0.0, ""))
        begin.wait()
        play(cell, place, work, lambda *said: says.put((cell.name, *said)), *what)
        with contextlib.suppress(Exception):
            work.cluster.close()
    except BaseException:
        says.put((cell.name, "failed", 0.0, " / ".join(traceback.format_exc().split("\n")[-6:])))
    says.put((cell.name, "over", 0.0, ""))
    says.close()
    says.join_thread()
    os._exit(0)


def timed(do: Callable[[], object], say: Callable[..., None], what: str) -> None:
    """Does something, and says how long it took and what went wrong."""
    began = time.monotonic()
    try:
        do()
        fault = ""
    except BaseException as error:
        fault = f"{type(error).__name__}: {str(error)[:300]}"
    say(what, time.monotonic() - began, fault)


def at_once(say: Callable[..., None], **works: Callable[[], object]) -> None:
    """Does several things at the same time."""
    threads = [threading.Thread(target=timed, args=(do, say, what)) for what, do in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def play_innocent(cell: Cell, place: Place, work: Work, say: Callable[..., None], over: Any) -> None:
    """Calls until it is over; says how many calls, and how long the longest took."""
    count, longest, fault = 0, 0.0, ""
    while not over.wait(0.05):
        began = time.monotonic()
        try:
            work.calls(1)
        except BaseException as error:
            fault = fault or f"{type(error).__name__}: {error}"
        count, longest = count + 1, max(longest, time.monotonic() - began)
    say(f"innocent: {count} calls", longest, fault)


class World:
    """The head with its controller, machine and innocent client; cells, as they are started."""

    def __init__(self, lines: Lines, islands: int) -> None:
        from pathways.cluster.launcher import Listening, start_local_cluster
        from pathways.process.run_directory import authority_folder
        from pathways.trust import Role, Tokens

        self.lines = lines
        self.folder = tempfile.mkdtemp(prefix="pl", dir="/tmp")
        self._stack = contextlib.ExitStack()
        listening = Listening(f"{ADDRESS}:0", f"{self.folder}/authority")
        self.handle = start_local_cluster(islands, 1, 1, platform="cpu", listen=listening)
        self._stack.callback(self.handle.close)
        tokens = Tokens(authority_folder(self.handle.directory))
        self._host_token = lambda: tokens.make(Role.HOST, 6000.0)
        self._client_token = lambda: tokens.make(Role.CLIENT, 6000.0)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["jax", "jax.numpy", "numpy", "pathways"])
        self.says = self._processes.Queue()
        self._events: list[Any] = []  # a process that starts late finds them still there

    def close(self) -> None:
        self._stack.close()

    def event(self) -> Any:
        """An event that clients' processes share."""
        self._events.append(self._processes.Event())
        return self._events[-1]

    def agent(self, name: str, island: int, line: Line | None) -> None:
        """Starts a machine."""
        command = [sys.executable, "-m", "pathways", "agent", self.handle.port, "--name", name, "--island", str(island)]
        folder = pathlib.Path(self.folder, name)
        folder.mkdir()
        env = {**os.environ, "PATHWAYS_TOKEN": self._host_token(), "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder)}
        with open(folder / "agent.out", "w") as log:
            process = subprocess.Popen(
                [*(line.command(command) if line else command), "--devices-per-host", "1"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(end, process)

    def start(self, cell: Cell, line: Line | None, play: Callable[..., None], *what: Any) -> Any:
        """Starts a cell's client; returns the event that lets it begin."""
        begin = self.event()
        state = f"{self.folder}/{cell.name}-client"
        is_far = cell.side == "far" and line is not None
        address = self.handle.port if is_far else self.handle.address.removesuffix("/control.sock")
        place = Place(line.machine if is_far and line else "", address, self._client_token() if is_far else "", state)
        process = self._processes.Process(target=client, args=(cell, place, self.says, begin, play, *what), daemon=True)
        process.start()
        self._stack.callback(process.kill)
        return begin

    def log(self) -> list[str]:
        """The controller's log."""
        return pathlib.Path(self.handle.directory, "logs/controller.log").read_text(errors="replace").splitlines()

    def agent_log(self, name: str) -> str:
        """What a machine's agent has said."""
        logs = pathlib.Path(self.folder, name).glob("**/*agent*.log")
        return "".join(path.read_text(errors="replace") for path in logs)

    def losses(self) -> list[str]:
        """What the controller's log says of links that were lost; clients that have closed theirs do not count."""
        return [line for line in self.log() if re.search(r"is lost|nothing was heard", line)]


def end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


def told(say: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {say}", flush=True)


@contextlib.contextmanager
def running(lines: Lines, cells: list[Cell]) -> Iterator[tuple[World, Any]]:
    """The head with its machine and innocent client."""
    world = World(lines, 1 + sum(cell.side == "machine" for cell in cells))
    try:
        told(f"the controller listens; {world.folder}, {world.handle.directory}")
        world.agent("near", 0, None)
        over = world.event()
        world.start(Cell("innocent", "machine", 0, 0, 0, 0), None, play_innocent, over).set()
        wait_for(world, {"innocent"}, lambda *_: None, "ready")
        yield world, over
        over.set()
        wait_for(world, {"innocent"}, lambda name, *said: told(f"{name}: {said}"), "over", 60)
        for line in world.losses():
            told(f"    {line}")
    finally:
        world.close()


def wait_for(world: World, names: set[str], hear: Callable[..., None], what: str, seconds: float = START_S) -> set[str]:
    """Hears what clients say until all have said it. Returns those that have not in time."""
    left, until = set(names), time.monotonic() + seconds
    while left and time.monotonic() < until:
        try:
            name, said, took, fault = world.says.get(timeout=1)
        except queue.Empty:
            continue
        hear(name, said, took, fault)
        if said in (what, "over"):
            left.discard(name)
    return left


def batches(items: list[Any], count: int) -> Iterator[list[Any]]:
    """So many at a time."""
    for first in range(0, len(items), count):
        yield items[first : first + count]
