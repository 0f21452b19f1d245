"""Clients leave in every way, in every state, while another client computes on the same devices without a break.

{exit, close(), kill -9, Ctrl-C in a wait, a crash inside a callback, forked children that exit} x {idle, runs queued,
runs granted, a gang half entered, a transfer, a put, a fetch, a checkpoint under way, suspended} x {one host, a gang of
two hosts, two islands}. Of each cell: the other client gets no wrong value and no error, no host is lost, and all that
the one who left had is back: programs, accounts, mappings of its memory; then, at a quiet point, buffers, bytes of each
ledger and arena, runs and open files are as they were before. How long that took is told, not judged.

  OWN-1    what a client owned goes with it, and nothing else
  GANG-1   gangs of a client that leaves are entered by all of their hosts or by none: else nobody gets on

The default is a sample drawn by chance, in which each way and each state occurs; PATHWAYS_LEAVING=all plays all 162
cells. The seed is printed, and taken from PATHWAYS_SEED. PATHWAYS_POLICY is the clusters' policy, "share" if not given.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec as P
from leaving_client import LEAVES, STATES, Cell

import pathways as pw

CLIENT = pathlib.Path(__file__).parent / "leaving_client.py"
POLICY = os.environ.get("PATHWAYS_POLICY", "share")
SHAPES = {
    "one host": pw.LocalCluster(islands=1, hosts_per_island=1, devices_per_host=2, policy=POLICY),
    "a gang of two hosts": pw.LocalCluster(islands=1, hosts_per_island=2, devices_per_host=1, policy=POLICY),
    "two islands": pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1, policy=POLICY),
}
IS_WHOLE = os.environ.get("PATHWAYS_LEAVING") == "all"
LIMIT_S = 60.0
RUN_AHEAD = 4
#: How a client may end: by its exit status, or the negative number of a signal.
ENDS = {
    "exit": {0},
    "close": {0},
    "kill": {-signal.SIGKILL},
    "interrupt": {1, 130, -signal.SIGINT},
    "crash": {1, -signal.SIGABRT, -signal.SIGSEGV},
    "fork": {0},
}


class Steady(threading.Thread):
    """The other client: computes on every device, checks every value, and stops for `paused` only."""

    def __init__(self, cluster: Any) -> None:
        super().__init__(name="steady", daemon=True)
        self.cluster = cluster
        devices = pw.make_virtual_device_set(cluster)
        islands = range(len(cluster.islands))
        self.whole = [devices.add_slice(shape=(2,), axis_names=("x",), island=i) for i in islands]
        self.single = [devices.add_slice(shape=(1,), axis_names=("x",), island=i) for i in (*islands, *islands)]
        self.gangs = [pw.jit(lambda x: x + jnp.sum(x), devices=each, name="steady_gang") for each in self.whole]
        self.adds = [pw.jit(lambda x: x + 1, devices=each, name="steady_add") for each in self.single]
        target = self.single[-1]
        self.across = pw.program(lambda x: pw.device_put(x, target))
        self.due: collections.deque[tuple[float, Any]] = collections.deque()
        self.count = 0
        self.values = 0
        self.wrong: list[str] = []
        self.errors: list[str] = []
        self._gate = threading.Event()
        self._gate.set()
        self._is_quiet = threading.Event()
        self._is_over = False

    def run(self) -> None:
        try:
            while not self._is_over:
                if not self._gate.is_set():
                    self._settle(0)
                    self._is_quiet.set()
                    self._gate.wait()
                    self._is_quiet.clear()
                self._turn()
        except BaseException:
            self.errors.append(traceback.format_exc())
            self._is_quiet.set()

    def _turn(self) -> None:
        n = self.count % 1000
        self.count += 1
        full = np.full(64, n, np.float32)
        for slice_, gang in zip(self.whole, self.gangs, strict=True):
            self.due.append((65.0 * n, gang(pw.device_put(full, slice_, P("x")))))
        for slice_, add in zip(self.single, self.adds, strict=True):
            self.due.append((n + 1.0, add(pw.device_put(full, slice_))))
        self.due.append((n + 1.0, self.across(self.due[-len(self.adds)][1])))
        self._settle(RUN_AHEAD * (len(self.gangs) + len(self.adds) + 1))

    def _settle(self, left: int) -> None:
        while len(self.due) > left:
            want, array = self.due.popleft()
            got = np.asarray(array)
            self.values += got.size
            if not (got == want).all():
                self.wrong.append(f"turn {self.count}: expected {want}, got {got}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing of its is under way, and it holds nothing but its programs."""
        self._gate.clear()
        assert self._is_quiet.wait(LIMIT_S), "the other client does not get on"
        yield
        self._gate.set()

    def stop(self) -> None:
        self._is_over = True
        self._gate.set()
        self.join(LIMIT_S)
        assert not self.is_alive(), "the other client does not get on"


class Stage:
    """A cluster, the client that works there without a break, and the nursery of those who leave."""

    def __init__(self, shape: str, folder: pathlib.Path) -> None:
        self.folder = folder
        self.cluster = pw.connect(SHAPES[shape])
        self.steady = Steady(self.cluster)
        environ = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
        self.nursery = subprocess.Popen(
            [sys.executable, str(CLIENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: bool(self.events), "the nursery is there")
        self.pids = [host["pid"] for host in self.stats()["hosts"]]
        self.base: dict[str, Any] = {}  # the books as they must be when nobody else is there
        self.files: dict[int, collections.Counter[str]] = {}  # then open, by process and kind
        self.resident = 0
        self.worst = (0.0, "")
        self.cells = 0

    def _read(self) -> None:
        assert self.nursery.stdout is not None
        for line in self.nursery.stdout:
            self.events.append(json.loads(line))

    def stats(self) -> dict[str, Any]:
        return dict(self.cluster.stats())

    def begin(self, generator: random.Random) -> None:
        """The other client works from now on. A first one comes and goes and is not judged: it makes
        hosts load libraries, start threads and open files for good."""
        self.steady.start()
        play(self, "checkpoint", "exit", generator)
        with self.steady.paused():
            last: dict[str, Any] = {}

            def is_still() -> bool:
                nonlocal last
                last, self.base = self.base, self.books()
                alone = {"clients": 1, "segments": 1, "borrowed": 0, "tasks": 0, "checkpoint_jobs": 0}
                is_alone = all(alone.get(name.split()[-1], value) == value for name, value in self.base.items())
                return last == self.base and is_alone

            until(is_still, "nothing moves any more", 0.1)
        self.files = {pid: open_files(pid) for pid in self.processes()}
        self.resident = self.resident_bytes()

    def processes(self) -> list[int]:
        return [self.stats()["controller"]["pid"], *self.pids]

    def fork(self, cell: Cell) -> int:
        """The process of a new client."""
        known = len(self.events)
        assert self.nursery.stdin is not None
        self.nursery.stdin.write(json.dumps(dataclasses.asdict(cell)) + "\n")
        self.nursery.stdin.flush()
        started: list[int] = []

        def look() -> bool:
            started[:] = [each["pid"] for each in self.events[known:] if each["event"] == "started"]
            return bool(started)

        until(look, "a client is started")
        return started[0]

    def status(self, pid: int) -> int | None:
        """How a client ended: its exit status, or the negative number of a signal; None: it lives."""
        for each in reversed(self.events):
            if each["event"] == "ended" and each["pid"] == pid:
                return int(each["status"])
        return None

    def left_of(self, client: int) -> list[str]:
        """What is still there of a client, while the other one works."""
        stats = self.stats()
        left = [f"client {each['client']} of the controller" for each in stats["clients"] if each["client"] == client]
        for host in stats["hosts"]:
            left += [
                f"{account['bytes']} bytes of {account['program'] or 'puts'} on host {host['host']}"
                for account in host["memory"]["accounts"]
                if account["client"] == client
            ]
            if host["programs"] != (count := self.base[f"host {host['host']} programs"]):
                left.append(f"{host['programs']} programs on host {host['host']}, {count} before")
        for who, pid in {"the controller": stats["controller"]["pid"], **dict(enumerate(self.pids))}.items():
            if (count := mappings(pid)) > self.base[f"process {pid} clients' segments"]:
                left.append(f"{count} clients' segments mapped by {who if isinstance(who, str) else f'host {who}'}")
        return left

    def resident_bytes(self) -> int:
        stats = self.stats()
        return sum(int(each["resident_bytes"]) for each in (stats["controller"], *stats["hosts"]))

    def books(self) -> dict[str, Any]:
        """All that must come back to where it was; at a quiet point."""
        gc.collect()
        self.cluster.native.flush()
        stats = self.stats()
        found: dict[str, Any] = {"futures": stats["futures"], "clients": len(stats["clients"])}
        for name in ("waiting", "held", "live_bytes", "clients"):
            found[f"controller {name}"] = stats["controller"][name]
        for host in stats["hosts"]:
            for name in ("objects", "live_runs", "waiting", "tasks", "borrowed", "arena_bytes", "programs",
                         "checkpoint_jobs"):  # fmt: skip
                found[f"host {host['host']} {name}"] = host[name]
            found[f"host {host['host']} device bytes"] = [each["bytes"] for each in host["memory"]["devices"]]
        for pid in (stats["controller"]["pid"], *self.pids):
            found[f"process {pid} clients' segments"] = mappings(pid)
            found[f"process {pid} files"] = psutil.Process(pid).num_fds()
        return found

    def check(self) -> None:
        """Nothing happened to the other client or a host, and the books are as they were; it pauses for that."""
        assert not self.steady.errors, self.steady.errors[0]
        assert not self.steady.wrong, self.steady.wrong[:4]
        with self.steady.paused():
            changed: dict[str, Any] = {}

            def is_same() -> bool:
                nonlocal changed
                pairs = {name: (self.base[name], value) for name, value in self.books().items()}
                changed = {
                    name: (before, after)
                    for name, (before, after) in pairs.items()
                    if after != before and not (name.endswith(("files", "segments")) and after < before)
                }
                return not changed

            try:
                until(is_same, "the books are as they were")
            except AssertionError:
                files = {pid: (self.files[pid], open_files(pid)) for pid in self.processes()}
                raise AssertionError(f"before and after: {changed}; files: {files}") from None
        assert [host["pid"] for host in self.stats()["hosts"]] == self.pids, "a host was lost"

    def close(self) -> None:
        if self.steady.is_alive():
            self.steady.stop()
        assert self.nursery.stdin is not None
        self.nursery.stdin.close()
        self.nursery.wait(LIMIT_S)
        self._reader.join()
        assert self.nursery.stdout is not None
        self.nursery.stdout.close()
        self.cluster.close()


def mappings(pid: int) -> int:
    """Clients' segments that a process has mapped."""
    return pathlib.Path(f"/proc/{pid}/maps").read_text().count("pathways-client")


def open_files(pid: int) -> collections.Counter[str]:
    """How many files of each kind a process has open: paths, or what else it is without its number."""
    found: collections.Counter[str] = collections.Counter()
    for each in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found[re.sub(r"[0-9]+", "N", os.readlink(each))] += 1
    return found


def until(is_so: Callable[[], bool], what: str, pause_s: float = 0.002) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {LIMIT_S:g} s: {what}"
        time.sleep(pause_s)


class Player:
    """One client that leaves, as the test sees it."""

    def __init__(self, stage: Stage, state: str, leave: str, seed: int) -> None:
        self.stage = stage
        self.folder = stage.folder / f"{stage.cells}"
        self.folder.mkdir()
        path = str(self.folder / "link")
        listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(LIMIT_S)
        listener.bind(path)
        listener.listen()
        islands = len(stage.cluster.islands)
        address = stage.cluster.address
        assert address is not None
        self.pid = stage.fork(Cell(address, path, state, leave, islands, seed, str(self.folder)))
        try:
            self.link, _ = listener.accept()
        except TimeoutError:
            raise AssertionError(
                f"not so after {LIMIT_S:g} s: a client connects to its link; {self.stacks()}"
            ) from None
        finally:
            listener.close()
        self.link.settimeout(LIMIT_S)
        self.lines = self.link.makefile("r")

    def hear(self, event: str) -> dict[str, Any]:
        """The next that it says, which must be this."""
        try:
            line = self.lines.readline()
        except TimeoutError:
            words = f"not so after {LIMIT_S:g} s: the client is {event}; where it stands, after what it wrote"
            raise AssertionError(f"{words}:\n{self.stacks()}") from None
        assert line, f"it ended before it was {event}: {self.stage.status(self.pid)}; it wrote:\n{self.log()}"
        said: dict[str, Any] = json.loads(line)
        assert said["event"] == event, f"{said} instead of {event}"
        return said

    def say(self, text: str) -> None:
        self.link.sendall(text.encode() + b"\n")

    def log(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "log").read_text()[-8000:]
        return ""

    def ended(self) -> bool:
        return self.stage.status(self.pid) is not None

    def wait_for_end(self, how: str) -> None:
        """Fails with the stacks of the client's threads if it does not end."""
        try:
            until(self.ended, f"the client ends by {how}")
        except AssertionError as late:
            raise AssertionError(f"{late}; where it stands, after what it wrote:\n{self.stacks()}") from None

    def stacks(self) -> str:
        """What the client has written, with the stacks of its threads behind it."""
        path = self.folder / "log"
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended; or it has not begun
            before = path.stat().st_size
            os.kill(self.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 5.0
            while path.stat().st_size == before and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.1)  # to the end of what it writes
        return self.log()

    def close(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            until(self.ended, "a client is ended")
        self.lines.close()
        self.link.close()


def play(stage: Stage, state: str, leave: str, generator: random.Random) -> None:
    """One cell of the matrix."""
    values = stage.steady.values
    player = Player(stage, state, leave, generator.getrandbits(16))
    stage.cells += 1
    try:
        if state == "suspended":
            stage.cluster.suspend(player.hear("to be suspended")["client"])
            player.say("suspended")
        client = player.hear("ready")["client"]
        player.say("leave")
        how = player.hear("leaving")["by"]
        time.sleep(generator.choice((0.0, 0.0, generator.uniform(0.0, 0.05))))
        if leave == "kill":
            os.kill(player.pid, signal.SIGKILL)
        elif leave == "interrupt":
            os.kill(player.pid, signal.SIGINT)
        if leave == "close":
            player.hear("left")
        else:
            player.wait_for_end(how)
        if not stage.base:
            return
        gone = time.monotonic()
        left: list[str] = []

        def is_back() -> bool:
            left[:] = stage.left_of(client)
            return not left or bool(stage.steady.errors)

        try:
            until(is_back, "what the client had is back")
        except AssertionError as late:
            raise AssertionError(f"{late}: {left}") from None
        took = time.monotonic() - gone
        if leave == "close":
            player.say("end")
            player.wait_for_end(f"{how} and then by exit")
        status = stage.status(player.pid)
        # CPython before 3.13, interrupted in `Thread.join`, takes that thread for ended. Here it is orbax's, and may be
        # in jaxlib when the interpreter goes: then the process aborts with these words, after all it had to say.
        is_cpythons = status == -signal.SIGABRT and leave == "interrupt" and "exception not rethrown" in player.log()
        assert status in ENDS[leave] or is_cpythons, f"ended with {status} by {how}; it wrote:\n{player.log()}"
    finally:
        player.close()
    stage.check()
    stage.worst = max(stage.worst, (took, f"{state} by {how}"))
    print(f"{state}, {how}: back after {took:.3f} s, {stage.steady.values - values} values of the other's meanwhile")


def cells(generator: random.Random) -> dict[str, list[tuple[str, str]]]:
    """By shape, the states and ways to play: all, or so many that each state comes once and each way once or twice."""
    if IS_WHOLE:
        return {shape: [(state, leave) for leave in LEAVES for state in STATES] for shape in SHAPES}
    states, leaves = generator.sample(STATES, len(STATES)), generator.sample(LEAVES, len(LEAVES))
    leaves += leaves[: len(states) - len(leaves)]
    drawn = list(zip(states, leaves, strict=True))
    each = len(drawn) // len(SHAPES)
    return {shape: drawn[n * each : (n + 1) * each] for n, shape in enumerate(SHAPES)}


@pytest.fixture(scope="module")
def generator() -> random.Random:
    seed = int(os.environ.get("PATHWAYS_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"PATHWAYS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def drawn(generator: random.Random) -> dict[str, list[tuple[str, str]]]:
    return cells(generator)


@pytest.mark.slow
@pytest.mark.watchdog(1800 if IS_WHOLE else 400)
@pytest.mark.parametrize("shape", SHAPES)
def test_who_leaves_takes_what_was_its_own(
    shape: str, drawn: dict[str, list[tuple[str, str]]], generator: random.Random, tmp_path: pathlib.Path
) -> None:
    stage = Stage(shape, tmp_path)
    try:
        stage.begin(generator)
        for state, leave in drawn[shape]:
            play(stage, state, leave, generator)
        grown = stage.resident_bytes() - stage.resident
    finally:
        stage.close()
    print(
        f"{shape}: {stage.cells} cells, {stage.steady.values} values of the other's, {len(stage.steady.wrong)} wrong, "
        f"{len(stage.steady.errors)} errors; all was back after {stage.worst[0]:.3f} s at most ({stage.worst[1]}); "
        f"the cluster's processes grew by {grown / 2**20:.0f} MiB"
    )


@pytest.mark.slow
@pytest.mark.watchdog(900)
def test_killed_at_any_moment(generator: random.Random, tmp_path: pathlib.Path) -> None:
    """While it joins, while its programs are compiled, at its work."""
    stage = Stage("a gang of two hosts", tmp_path)
    try:
        stage.begin(generator)
        for _ in range(100 if IS_WHOLE else 5):
            player = Player(stage, generator.choice(STATES[:-2]), "kill", 0)
            stage.cells += 1
            time.sleep(generator.expovariate(3.0))
            player.close()
            stage.check()
    finally:
        stage.close()
    print(f"{stage.cells - 1} killed, {stage.steady.values} values of the other's, {len(stage.steady.wrong)} wrong")
