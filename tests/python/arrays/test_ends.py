"""END-1: whatever waits for a value ends with it, in every order of waiting and of what ends it.

{a read, several threads that read, a read begun before, device_get, a wait, a float, a repr, a save, the call of the
next function} x {cancel, deadline, lost host, stopped host, close, Ctrl-C} x {computing, queued, transferring,
compiling}, on an embedded cluster, on host processes of this machine, and on hosts that agents bring, for a client of
the controller's machine and for one of another machine. PATHWAYS_KIND plays one of these alone, or all cells over
machines that are network namespaces. Each cell ends with the right error, soon after its cause; how soon is printed.
Cells that cannot be are left out: `cells` says why.

  END-1    all cells
  PULSE-1  those with a stopped host
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
from machines import MachineCluster
from namespaces import pid_on

import pathways as pw
from pathways.testing import faults

WAITERS = ["read", "threads", "begun", "device_get", "wait", "float", "repr", "save", "call"]
CAUSES = ["cancel", "deadline", "lost", "stopped", "close", "interrupt"]
STATES = ["computing", "queued", "transferring", "compiling"]
ERRORS: dict[str, type[BaseException]] = {
    "cancel": pw.errors.CancelledError,
    "deadline": pw.errors.DeadlineExceededError,
    "lost": pw.errors.HostLostError,
    "stopped": pw.errors.HostLostError,
    "close": pw.errors.ClusterClosedError,
    "interrupt": KeyboardInterrupt,
}
#: Seconds: until the cause comes, and until a value comes that nothing ends. A cell that takes `HANGS_S` hangs.
BEFORE_S, SLOW_S, HANGS_S = 0.7, 20, 10.0
#: Seconds that a copy to another host takes: few, as an island comes back only when the copies from it are over.
COPY_S = 4
X = np.float32(3)

pytestmark = [pytest.mark.slow, pytest.mark.watchdog(400)]


class Gate:
    """What a computation waits for, so that it lasts as long as a test wants."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def close(self) -> None:
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def __call__(self, x: Any) -> Any:
        self._opened.wait(SLOW_S)
        return x


class World:
    """A cluster, and a client of it that a cell may close."""

    def __init__(self, kind: str, bases: Bases) -> None:
        self.kind = kind
        self.gate = Gate()
        self._bases = bases
        self.cluster: Any = None

    def client(self) -> Any:
        """A client whose functions are compiled and whose hosts are all there."""
        if self.cluster is None or not self.cluster.is_alive():
            self.cluster = self._connect()
            self._place()
        deadline = time.monotonic() + 120
        while self.kind != "embedded" and any(each["state"] != "up" for each in self.cluster.stats()["hosts"]):
            assert time.monotonic() < deadline, "an island does not come back"
            time.sleep(0.05)
        self.cluster.native.max_in_flight = 1024
        self.x = pw.device_put(X, self.here).block_until_ready()
        return self.cluster

    def _connect(self) -> Any:
        if self.kind == "embedded":
            cluster = pw.connect()
            faults.slow_compile(cluster.driver, "slowly", SLOW_S)
            return cluster
        if self.kind == "local":
            return pw.connect(self._bases.local.address)
        if self.kind == "namespaces":
            return self._bases.namespaces.connect()
        return self._bases.machines.connect_far() if self.kind == "far" else self._bases.machines.connect()

    def _place(self) -> None:
        devices = pw.make_virtual_device_set(self.cluster)
        self.here = devices.add_slice(devices=1)
        self.there = there = devices.add_slice(devices=1)
        gate = self.gate

        def wait_at_the_gate(x: Any) -> Any:
            return jax.pure_callback(gate, jax.ShapeDtypeStruct((), np.float32), x)

        self.gated = pw.jit(wait_at_the_gate, devices=self.here, name="gated")
        self.plain = pw.jit(lambda x: x + 1, devices=self.here, name="plain")
        self.moved = pw.program(lambda x: pw.device_put(x, there), name="moved")
        gate.open()
        assert (float(self.gated(X)), float(self.plain(X)), float(self.plain(self.plain(X)))) == (3, 4, 5)
        assert float(self.moved(X)) == 3

    def pid(self) -> int:
        """Of the host where arrays are made."""
        host = self.here.devices[0].host
        pid = int(self.cluster.stats()["hosts"][host]["pid"])
        return pid if self.kind != "namespaces" else pid_on(self._bases.network.file_of(f"m{host}"), pid)

    def close(self) -> None:
        self.gate.open()
        if self.cluster is not None:
            self.cluster.close()


class Bases:
    """The clusters that the clients join, started when one is needed: two islands of one host each."""

    def __init__(self, stack: contextlib.ExitStack, network: Any) -> None:
        """`network`: of the machines that are namespaces, if there are any."""
        self._stack = stack
        self.network = network

    @functools.cached_property
    def local(self) -> Any:
        """Host processes of this machine."""
        return self._start(lambda: pw.connect(pw.LocalCluster(2, 1, 1)))

    @functools.cached_property
    def machines(self) -> Any:
        """Hosts that agents bring."""
        return self._start(lambda: MachineCluster(2, 1, 1))

    @functools.cached_property
    def namespaces(self) -> Any:
        """The same, each machine with a network and processes of its own, and this process on another one."""
        from namespace_cluster import NamespaceCluster

        return self._start(lambda: contextlib.closing(NamespaceCluster(self.network, 2, 1, 1)))

    def _start(self, start: Callable[[], Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATHWAYS_TEST_SLOW_COMPILE", f"slowly:{SLOW_S}")
            patch.setenv("PATHWAYS_TEST_SLOW_COPIES", str(COPY_S))
            return self._stack.enter_context(start())


KINDS = ["embedded", "local", "agents", "far"]
if os.environ.get("PATHWAYS_KIND") in [*KINDS, "namespaces"]:
    KINDS = [os.environ["PATHWAYS_KIND"]]


def cells() -> Iterator[Any]:
    for kind, state, cause, waiter in itertools.product(KINDS, STATES, CAUSES, WAITERS):
        if kind == "embedded" and (cause in ("lost", "stopped") or state == "transferring"):
            continue  # its host is this process; between its devices nothing is slow
        if state == "compiling" and (waiter != "call" or cause == "cancel"):
            continue  # there is no array yet, so nothing to read and nothing to cancel
        if waiter == "call" and cause == "cancel":
            continue  # a call waits for room, and no array of it is there to be cancelled
        if waiter in ("threads", "repr") and cause == "interrupt":
            continue  # Ctrl-C comes to the main thread, and a repr never waits
        yield pytest.param(kind, state, cause, waiter, id=f"{kind}-{state}-{cause}-{waiter}")


@pytest.fixture(scope="module")
def worlds(network: Any) -> Iterator[Callable[[str], World]]:
    known: dict[str, World] = {}
    logging.disable()  # orbax logs errors, whose tracebacks know the arrays
    with contextlib.ExitStack() as stack:
        bases = Bases(stack, network)
        yield lambda kind: known.setdefault(kind, World(kind, bases))
        logging.disable(logging.NOTSET)
        for world in known.values():
            world.close()


def read_in_threads(array: Any) -> None:
    """Several readers of one array: all of them end alike."""
    found: list[BaseException | None] = []

    def read() -> None:
        try:
            np.asarray(array)
            found.append(None)
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert len(found) == 3, "a reader hangs"
    assert len(set(map(type, found))) == 1
    if found[0] is not None:
        raise found[0]


def look_until_it_failed(array: Any) -> None:
    while "failed" not in (text := repr(array)) and array.client.closed is False:
        assert text
        time.sleep(0.01)
    np.asarray(array)


def save(array: Any, folder: pathlib.Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", {"array": array})


def waits(waiter: str, array: Any, folder: pathlib.Path) -> Any:
    return {
        "read": np.asarray,
        "threads": read_in_threads,
        "begun": np.asarray,
        "device_get": lambda array: jax.device_get({"a": [array], "b": array}),
        "wait": jax.block_until_ready,
        "float": float,
        "repr": look_until_it_failed,
        "save": lambda array: save(array, folder),
    }[waiter](array)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize(("kind", "state", "cause", "waiter"), [*cells()])
def test_what_waits_ends(
    worlds: Callable[[str], World], tmp_path: pathlib.Path, kind: str, state: str, cause: str, waiter: str
) -> None:
    world = worlds(kind)
    cluster = world.client()
    world.gate.close()
    at: list[float] = []
    timeout = BEFORE_S if cause == "deadline" else None

    def timed(function: Any) -> Any:
        return function if timeout is None or waiter == "call" else function.with_timeout(timeout)

    began = time.monotonic()
    y: Any = None
    first: Any = None
    if state == "computing":
        y = timed(world.gated)(world.x)
    elif state == "queued":
        first = world.gated(world.x)
        y = timed(world.plain)(world.x)
    elif state == "transferring":
        y = timed(world.moved)(world.x)
    if waiter == "begun":
        y.copy_to_host_async()
    if waiter == "call":
        cluster.native.max_in_flight = 1

    def act() -> None:
        at.append(time.monotonic())
        if cause == "cancel":
            pw.cancel(y)
        elif cause == "lost":
            os.kill(pid, signal.SIGKILL)
        elif cause == "stopped":
            os.kill(pid, signal.SIGSTOP)
        elif cause == "close":
            cluster.close()
        elif cause == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)

    def wait() -> Any:
        if waiter == "call":
            function = world.plain
            if state == "compiling":
                function = pw.jit(lambda x: x - 1, devices=world.here, name="slowly")
            return (function if timeout is None else function.with_timeout(timeout))(X)
        return waits(waiter, y, tmp_path)

    pid = world.pid() if cause in ("lost", "stopped") else 0
    timer = threading.Timer(BEFORE_S, act)
    if cause != "deadline":
        timer.start()
    result: Any = None
    try:
        result = wait()
        failure = None
    except BaseException as error:
        failure = error
    ended = time.monotonic()
    timer.cancel()
    took = ended - (at[0] if at else began + BEFORE_S)
    world.gate.open()
    print(f"{kind} {state} {cause} {waiter}: ended {took:.2f} s after its cause, by {failure!r}")
    try:
        if waiter == "call" and state != "compiling" and cause in ("lost", "stopped"):
            assert failure is None, "there is room when the run is lost"
            with contextlib.suppress(pw.errors.HostLostError):  # the argument may have come to the host before
                assert float(result) == 4, "it waits for the island"
        elif waiter == "save" and cause == "deadline":  # orbax takes a TimeoutError for one of its own bounds
            assert isinstance(failure, pw.errors.CheckpointError) and "its deadline" in str(failure)
        else:
            assert isinstance(failure, ERRORS[cause]), failure
        assert took < HANGS_S
        if cause not in ("close", "lost", "stopped"):
            assert float(world.plain(world.x)) == 4, "an innocent call goes on"
    finally:
        failure = y = result = None
        del first


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "embedded"])
def test_a_call_that_its_deadline_left_compiling_goes_on_later(worlds: Callable[[str], World], kind: str) -> None:
    """What the hosts compile for a call that was late, a later call finds."""
    world = worlds(kind)
    cluster = world.client()
    world.gate.open()
    for function in (world.gated, world.plain):  # a host that is new compiles them first
        np.asarray(function(world.x))
    traced = []

    def slowly(x: Any) -> Any:
        traced.append(1)
        return x * 3

    function = pw.jit(slowly, devices=world.here, name="slowly")
    with pytest.raises(pw.errors.DeadlineExceededError, match=r"'slowly' was not over 0\.3 s .* being compiled"):
        function.with_timeout(0.3)(world.x)
    with pytest.raises(pw.errors.DeadlineExceededError):
        function.with_timeout(0.1)(world.x)
    compiles = sum(cluster.stats()["compiles"])
    assert float(function(world.x)) == 9
    assert len(traced) == 1 and sum(cluster.stats()["compiles"]) <= compiles + 1


@pytest.mark.skipif("local" not in KINDS, reason="stops the controller of this machine")
def test_deadlines_pass_while_the_controller_is_stopped(worlds: Callable[[str], World], tmp_path: pathlib.Path) -> None:
    """Also those of first calls, which ask it; and when it goes on, so does all else."""
    world = worlds("local")
    cluster = world.client()
    world.gate.close()
    controller = psutil.Process(cluster._control.controller_pid)
    array = world.gated.with_timeout(BEFORE_S)(world.x)
    controller.suspend()
    try:
        for waiter in ("read", "threads", "device_get", "wait", "float", "repr"):
            with pytest.raises(pw.errors.DeadlineExceededError):
                waits(waiter, array, tmp_path)
            array = world.plain.with_timeout(BEFORE_S)(world.x)
            if waiter == "wait":
                array.copy_to_host_async()
        fresh = pw.jit(lambda x: x - 2, devices=world.here)
        for function in (fresh, pw.program(lambda x: fresh(world.plain(x)))):
            began = time.monotonic()
            with pytest.raises(pw.errors.DeadlineExceededError, match="still waiting for the controller"):
                function.with_timeout(BEFORE_S)(world.x)
            assert time.monotonic() - began < HANGS_S
    finally:
        controller.resume()
        world.gate.open()
    assert float(fresh(world.x)) == 1 and float(world.plain(world.x)) == 4
