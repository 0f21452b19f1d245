"""MOVE-1: hosts and islands of a local cluster are drained: the clients' libraries move their slices, and no buffer is
lost. Slices that cannot move are named, and then nothing is drained."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways.cli.command import main
from pathways.controller import draining
from pathways.controller.resource_manager import ResourceManager
from pathways.plan.topology import Topology
from pathways.protocol import control_pb2 as pb

pytestmark = pytest.mark.slow

X = np.arange(8, dtype=np.float32)

GUEST = """
import sys
import numpy as np, pathways as pw
from jax.sharding import PartitionSpec as P
with pw.connect(sys.argv[1]) as cluster:
    place = pw.make_virtual_device_set(cluster).add_slice(2, island=int(sys.argv[2]))
    x = pw.device_put(np.arange(8, dtype=np.float32), place, P("x")).block_until_ready()
    print("ready", flush=True)
    for line in sys.stdin:
        x.cached = None
        print(*np.asarray(x), *(device.id for device in place.devices), flush=True)
"""


class Guest:
    """A client in a process of its own, with one slice of two devices and an array on it."""

    def __init__(self, address: str, island: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", GUEST, address, str(island)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def look(self) -> tuple[list[float], list[int]]:
        """The array's value, and the devices of its slice."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        words = self.process.stdout.readline().split()
        return [float(word) for word in words[:8]], [int(word) for word in words[8:]]

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def cluster() -> Iterator[pw.Cluster]:
    """2 islands, 2 hosts each, 2 devices each; 16 MiB of each device, and of each host for transfers."""
    sizes = {"device_memory": 16 << 20, "transfer_memory": 16 << 20}
    with pw.connect(pw.LocalCluster(2, 2, 2, platform="cpu", **sizes)) as cluster:
        yield cluster


@pytest.fixture
def guest(cluster: pw.Cluster) -> Iterator[Callable[[int], Guest]]:
    """`guest(island)`: another client."""
    with contextlib.ExitStack() as stack:

        def one(island: int) -> Guest:
            guest = Guest(str(cluster.address), island)
            stack.callback(guest.end)
            return guest

        yield one


def add(cluster: pw.Cluster, devices: int, island: int) -> Any:
    return pw.make_virtual_device_set(cluster).add_slice(devices, island=island)


def hosts_of(slice_: Any) -> set[int]:
    return {device.host for device in slice_.devices}


def drained(cluster: pw.Cluster) -> list[int]:
    return [host["host"] for host in cluster.stats()["hosts"] if host["is_drained"]]


def test_an_island_and_a_host(cluster: pw.Cluster, guest: Callable[[int], Guest]) -> None:
    other = guest(0)
    mine = [add(cluster, 4, 0), add(cluster, 1, 0)]
    arrays = [pw.device_put(X, slice_, P("x") if slice_.size > 1 else P()) for slice_ in mine]
    step = pw.jit(lambda x: x + 1, devices=mine[0], donate_argnums=0)
    arrays[0] = step(arrays[0])
    assert cluster.drain(island=0) == 0
    assert drained(cluster) == [0, 1]
    assert all(slice_.island == 1 for slice_ in mine)
    value, devices = other.look()
    assert (value, min(devices) >= 4) == (list(X), True)
    np.testing.assert_array_equal(np.asarray(step(arrays[0])), X + 2)
    np.testing.assert_array_equal(np.asarray(arrays[1]), X)
    host_stats = cluster.stats()["hosts"]
    assert [host_stats[number]["objects"] for number in (0, 1)] == [0, 0], "nothing lies there"
    assert add(cluster, 2, 1).island == pw.make_virtual_device_set(cluster).add_slice(2).island == 1
    with pytest.raises(pw.errors.SliceError, match="drained"):
        add(cluster, 2, 0)
    with pytest.raises(pw.errors.SliceError, match="drained"):
        cluster.remap(mine[1], [0])
    assert cluster.undrain(host=0) == 0
    assert drained(cluster) == [1]
    cluster.remap(mine[1], [0])
    assert cluster.drain(host=0, timeout=20) == 0
    assert mine[1].island == 1
    cluster.undrain(island=0)
    assert drained(cluster) == []
    assert cluster.drain(host=2, timeout=20) == 1
    assert all(2 not in hosts_of(slice_) for slice_ in mine)
    np.testing.assert_array_equal(np.asarray(arrays[1]), X)
    cluster.undrain(host=2)


def test_slices_without_room_are_named_and_nothing_is_drained(cluster: pw.Cluster) -> None:
    whole, full = add(cluster, 4, 0), add(cluster, 2, 1)
    x = pw.device_put(X, whole, P("x"))
    cluster.drain(host=3, timeout=20)
    assert hosts_of(full) == {2}
    with pytest.raises(pw.errors.SliceError, match=r"island 0 has still 1 slice: .*no other host has enough devices"):
        cluster.drain(island=0, timeout=0.5)
    assert drained(cluster) == [3], "and what was drained before still is"
    cluster.undrain(host=3)
    big = [pw.device_put(np.ones(5 << 19, np.float32), add(cluster, 1, 0)) for _ in range(4)]  # 10 MiB each
    with pytest.raises(pw.errors.SliceError, match=r"island 0 has still 2 slices: .*client 1: .*memory for transfers"):
        cluster.drain(island=0, timeout=6)
    assert drained(cluster) == []
    for array in big:
        assert float(jnp.sum(array)) == array.size
    np.testing.assert_array_equal(np.asarray(x), X)
    for array in big[2:]:
        array.delete()
    assert cluster.drain(island=0, timeout=60) == 0
    for array in big[:2]:
        assert float(jnp.sum(array)) == array.size
    np.testing.assert_array_equal(np.asarray(x + 1), X + 1)
    cluster.undrain(island=0)


def test_clients_that_do_not_answer_are_named(cluster: pw.Cluster, guest: Callable[[int], Guest]) -> None:
    mine, stopped, suspended = add(cluster, 2, 0), guest(0), guest(0)
    x = pw.device_put(X, mine, P("x"))
    numbers = {client["pid"]: client["client"] for client in cluster.stats()["clients"]}
    stopped.process.send_signal(signal.SIGSTOP)
    cluster.suspend(numbers[suspended.process.pid])
    with pytest.raises(pw.errors.SliceError) as refusal:
        cluster.drain(island=0, timeout=0.5)
    text = str(refusal.value)
    assert f"client {numbers[stopped.process.pid]}: its client (pid {stopped.process.pid}) does not answer" in text
    assert f"client {numbers[suspended.process.pid]}: suspended; resume it first" in text
    assert "2 slices" in text, "mine has moved"
    assert mine.island == 1
    np.testing.assert_array_equal(np.asarray(x * 2), X * 2)
    assert drained(cluster) == []
    stopped.process.send_signal(signal.SIGCONT)
    cluster.resume(numbers[suspended.process.pid])
    assert cluster.drain(island=0, timeout=30) == 0
    for other in (stopped, suspended):
        value, devices = other.look()
        assert (value, min(devices) >= 4) == (list(X), True)
    cluster.undrain(island=0)


def test_a_client_that_goes_meanwhile_is_no_hindrance(cluster: pw.Cluster, guest: Callable[[int], Guest]) -> None:
    other = guest(0)
    other.process.send_signal(signal.SIGSTOP)
    done: list[Any] = []
    drainer = threading.Thread(target=lambda: done.append(cluster.drain(island=0, timeout=60)))
    drainer.start()
    time.sleep(0.5)
    assert not done
    other.process.kill()
    drainer.join(30)
    assert done == [0]
    cluster.undrain(island=0)


def test_forced(cluster: pw.Cluster, guest: Callable[[int], Guest]) -> None:
    other = guest(0)
    other.process.send_signal(signal.SIGSTOP)
    assert cluster.drain(island=0, timeout=0.2, force=True) == 0
    assert drained(cluster) == [0, 1]
    other.process.send_signal(signal.SIGCONT)
    cluster.undrain(island=0)


def test_work_that_was_submitted_before_comes_to_its_end(cluster: pw.Cluster) -> None:
    """Results that lie elsewhere, and are still to be computed on the drained hosts; and calls of another thread."""
    there, here = add(cluster, 2, 0), add(cluster, 2, 1)

    def heavy(x: Any) -> Any:
        square = jnp.full((256, 256), 0.001) + x[0] * 0
        return x + 1 + jax.lax.fori_loop(0, 30, lambda _, m: jnp.tanh(m @ m), square)[0, 0] * 0

    slow, plus = pw.jit(heavy, devices=there), pw.jit(lambda x: x + 1, devices=here)
    both = pw.program(lambda x: plus(slow(slow(x))))
    x = pw.device_put(X, there, P("x"))
    np.testing.assert_array_equal(np.asarray(both(x)), X + 3)
    results = [both(x) for _ in range(5)]
    stop, seen, failures = threading.Event(), [0], []

    def go_on() -> None:
        try:
            while not stop.is_set():
                np.testing.assert_array_equal(np.asarray(both(x)), X + 3)
                seen[0] += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    assert cluster.drain(island=0, timeout=60) == 0
    for host in cluster.stats()["hosts"][:2]:
        os.kill(host["pid"], signal.SIGKILL)  # nothing is lost with them
    for result in results:
        np.testing.assert_array_equal(np.asarray(result), X + 3)
    before = seen[0]
    np.testing.assert_array_equal(np.asarray(both(x)), X + 3)
    stop.set()
    thread.join()
    assert not failures, failures
    assert seen[0] >= before
    deadline = time.monotonic() + 60
    while any(host["state"] != "up" for host in cluster.stats()["hosts"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert drained(cluster) == [0, 1], "also after they have been started again"
    cluster.undrain(island=0)


def test_a_host_that_still_works_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without slices, but with runs or tasks of before: with doubles, because moves come behind most of that work."""
    monkeypatch.setattr(draining, "IDLE_S", 0.3)
    answers: list[pb.HostCounts | None] = []
    ready = asyncio.Event()
    ready.set()

    class Requests:
        async def counts(self, host: Any) -> pb.HostCounts | None:
            return answers.pop(0) if len(answers) > 1 else answers[0]

    topology = Topology.grid(1, 1, 1)
    host = types.SimpleNamespace(ready=ready, is_lost=False)
    resources = ResourceManager(topology)
    parts = {"topology": topology, "resources": resources, "hosts": [host], "agents": None}
    double: Any = types.SimpleNamespace(**parts, unless_ended=lambda future: future)
    requests: Any = Requests()
    moves: Any = None
    drainer = draining.Draining(double, {}, requests, moves)

    def drain(*said: pb.HostCounts | None, force: bool = False) -> int:
        answers[:] = said
        return asyncio.run(drainer.drain(pb.DrainRequest(host=0, force=force)))

    idle = pb.HostCounts()
    assert drain(*(pb.HostCounts(**{what: 1}) for what in ("live_runs", "tasks", "objects")), None, idle) == 0
    assert answers == [idle], "it has looked until nothing was left"
    assert resources.drained == {0}
    resources.set_drained([0], False)
    for busy, words in ((pb.HostCounts(live_runs=2, tasks=1), "2 runs, 1 tasks"), (None, "does not answer")):
        with pytest.raises(pw.errors.SliceError, match=f"host 0 still works .*{words}"):
            drain(busy)
        assert resources.drained == set()
    assert drain(None, force=True) == 0
    host.is_lost = True
    assert drain(None) == 0, "a lost host does nothing"


@pytest.mark.parametrize("what", [{"island": 0}, {"host": 1}])
def test_two_drains_at_once(monkeypatch: pytest.MonkeyPatch, what: dict[str, int]) -> None:
    """What one of them has drained stays so when the other one gives up; what nobody has drained opens again."""
    monkeypatch.setattr(draining, "IDLE_S", 0.2)
    topology = Topology.grid(2, 2, 1)
    ready = asyncio.Event()
    ready.set()
    hosts = [types.SimpleNamespace(ready=ready, is_lost=False) for _ in range(4)]
    resources = ResourceManager(topology)
    parts = {"topology": topology, "resources": resources, "hosts": hosts, "agents": None}
    double: Any = types.SimpleNamespace(**parts, unless_ended=lambda future: future)
    busy = pb.HostCounts(live_runs=1)
    answers: dict[str, pb.HostCounts] = {}
    whose = contextvars.ContextVar[str]("whose")

    class Requests:
        async def counts(self, host: Any) -> pb.HostCounts:
            return answers[whose.get()]

    requests: Any = Requests()
    moves: Any = None
    drainer = draining.Draining(double, {}, requests, moves)
    own = {0, 1} if "island" in what else {1}

    async def drain(name: str, end_s: float, **which: int) -> int | str:
        whose.set(name)
        answers[name] = busy
        try:
            return await drainer.drain(pb.DrainRequest(**which, timeout_s=end_s))
        except pw.errors.SliceError as error:
            return str(error)

    async def play(*ends: str) -> list[int | str]:
        first, second = (
            asyncio.ensure_future(drain(name, 0.2 + n, **which))
            for n, (name, which) in enumerate((("first", {"island": 0}), ("second", what)))
        )
        await asyncio.sleep(0.05)
        assert resources.drained == {0, 1}
        for name in ends:
            answers[name] = pb.HostCounts()
        return [await first, await second]

    said = asyncio.run(play("second"))
    assert "still works" in str(said[0]) and said[1] == 0
    assert resources.drained == own
    resources.set_drained(own, False)
    said = asyncio.run(play("first"))
    assert said[0] == 0 and "still works" in str(said[1])
    assert resources.drained == {0, 1}
    resources.set_drained([0, 1], False)
    assert all("still works" in str(each) for each in asyncio.run(play()))
    assert resources.drained == set()

    async def undrained() -> int | str:
        draining_it = asyncio.ensure_future(drain("first", 5, island=0))
        await asyncio.sleep(0.05)
        drainer.undrain(pb.DrainRequest(island=0))
        answers["first"] = pb.HostCounts()
        return await draining_it

    assert "somebody has let slices lie on island 0 again" in str(asyncio.run(undrained()))
    assert resources.drained == set()


def test_a_machine_that_leaves_a_drained_island(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drained by its number stays so until somebody undrains it."""
    topology = Topology.grid(2, 2, 1)
    resources = ResourceManager(topology)
    is_lost = asyncio.Event()
    machine = types.SimpleNamespace(island=1, is_lost=is_lost, let_go=is_lost.set)
    agents = types.SimpleNamespace(called=lambda name: machine)
    parts = {"topology": topology, "resources": resources, "agents": agents}
    double: Any = types.SimpleNamespace(**parts, unless_ended=lambda future, timeout_s=None: future)
    nothing: Any = None
    drainer = draining.Draining(double, {}, nothing, nothing)

    async def not_busy(hosts: Any) -> str:
        return ""

    monkeypatch.setattr(drainer, "_busy", not_busy)
    for before in ([], [2], [2, 3], [0]):
        resources.set_drained(range(4), False)
        resources.set_drained(before, True)
        assert asyncio.run(drainer.drain(pb.DrainRequest(machine="m1", timeout_s=1))) == 1
        assert resources.drained == set(before)


def test_what_makes_no_sense(cluster: pw.Cluster) -> None:
    for wrong in ({}, {"host": 1, "island": 0}, {"host": "1"}, {"island": True}, {"machine": 3}, {"host": -1}):
        with pytest.raises(pw.errors.OptionError):
            cluster.drain(**wrong)  # type: ignore[arg-type]
    for what, words in (
        ({"host": 4}, r"hosts 0\.\.3"),
        ({"island": 2}, r"islands 0\.\.1"),
        ({"machine": "m0"}, "are all on the controller"),
    ):
        for call in (cluster.drain, cluster.undrain):
            with pytest.raises(pw.errors.ConnectError, match=words):
                call(**what)  # type: ignore[operator]
    for timeout in (float("nan"), -1.0, float("inf")):
        with pytest.raises(pw.errors.OptionError, match="seconds"):
            cluster.drain(host=0, timeout=timeout)
    with pw.connect() as embedded, pytest.raises(pw.errors.ConnectError, match="this process itself"):
        embedded.drain(host=0)
    assert drained(cluster) == []


def test_the_command(cluster: pw.Cluster) -> None:
    slice_ = add(cluster, 2, 0)
    x = pw.device_put(X, slice_, P("x"))

    def run(*words: str) -> Any:
        return CliRunner().invoke(main, [*words])

    address = str(cluster.address)
    done = run("drain", "island", "0", address)
    assert (done.exit_code, done.output) == (
        0,
        "island 0 is drained; `pathways undrain island 0` lets slices lie there again\n",
    )
    assert slice_.island == 1
    assert ", drained" in run("status", address).output
    assert "host 1 takes slices again" in run("undrain", "host", "1", address).output
    assert drained(cluster) == [0]
    assert run("undrain", "island", "0", address).exit_code == 0
    for words in (("host", "one"), ("island", "-1"), ("host",), ("host", "1", address, "more")):
        assert run("drain", *words).exit_code == 2, words
    for words in (("m7", address), ("machine", "m7", address)):
        refused = run("drain", *words)
        assert refused.exit_code != 0
        assert "no machine 'm7'" in str(refused.output) + str(refused.exception)
    np.testing.assert_array_equal(np.asarray(x), X)


def test_a_guest_may_not(cluster: pw.Cluster) -> None:
    code = (
        "import sys, pathways as pw\n"
        "cluster = pw.connect(sys.argv[1])\n"
        "for call in (cluster.drain, cluster.undrain):\n"
        "    try: call(host=0)\n"
        "    except pw.errors.PermissionDeniedError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(cluster.address)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    assert len(lines) == 2
    assert all("may not" in line for line in lines)


def test_a_client_lets_a_slice_go_while_another_one_moves() -> None:
    """With doubles. The drain does not fail for a slice that is not there any more."""
    resources = ResourceManager(Topology.grid(2, 1, 2))
    first, second = (resources.allocate((1,), island=0).slice_id for _ in range(2))
    client: Any = types.SimpleNamespace(number=1, slices={first, second}, suspended=False)
    ready = asyncio.Event()
    ready.set()
    hosts = [types.SimpleNamespace(ready=ready, is_lost=False) for _ in range(2)]
    parts = {"topology": resources.topology, "resources": resources, "hosts": hosts, "agents": None}
    double: Any = types.SimpleNamespace(**parts, unless_ended=lambda future: future)

    class Doubles:
        async def counts(self, host: Any) -> pb.HostCounts:
            return pb.HostCounts()

        async def move(self, client: Any, slice_id: int, devices: tuple[int, ...], left_s: float) -> None:
            resources.release(second)
            resources.remap(slice_id, devices)
            resources.settle(slice_id)

    doubles: Any = Doubles()
    drainer = draining.Draining(double, {1: client}, doubles, doubles)
    assert asyncio.run(drainer.drain(pb.DrainRequest(island=0, timeout_s=5.0))) == 0
    assert resources.slices_on([0]) == () and resources.drained == {0}
