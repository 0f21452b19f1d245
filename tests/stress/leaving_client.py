"""Clients of the leaving matrix (`test_leaving.py`): each brings itself into a state, says so, and leaves as told.

    python leaving_client.py

A nursery (`nursery.py`): each line of its input has the fields of `Cell`. A client connects, works, and ends as any
interpreter does, with its threads, finalizers and exit handlers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import nursery
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways.testing import stand_in

LEAVES = ("exit", "close", "kill", "interrupt", "crash", "fork")
STATES = ("idle", "queued", "granted", "half-entered", "transfer", "put", "fetch", "checkpoint", "suspended")
CRASHES = (
    "abort in a finalizer",
    "abort in a signal handler",
    "fault in a signal handler",
    "raise in a signal handler",
    "abort in a callback of a computation",
)
BIG = 1 << 20  # elements of float32
CHILD_S = 20.0  # for a forked child to end
QUEUED = 400  # more than the controller grants to a host at once


@dataclasses.dataclass
class Cell:
    """What a client is to do."""

    address: str  # of the cluster
    link: str  # a Unix socket, where who plays the cell listens
    state: str
    leave: str
    islands: int
    seed: int
    folder: str  # for its files


class Link:
    """Says how far the client is, and hears what it is to do."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("r")

    def say(self, event: str, **fields: Any) -> None:
        self._socket.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")

    def hear(self) -> str:
        return self._lines.readline().strip()


def slow(slice_: Any, microseconds: int) -> Any:
    """A computation that takes its time and no core, and adds one."""
    return pw.jit(lambda x: stand_in.step(x, microseconds) + 1.0, devices=slice_)


class Guest:
    """One client at its work."""

    def __init__(self, cell: Cell, link: Link) -> None:
        self.cell = cell
        self.link = link
        self.cluster = pw.connect(cell.address)
        devices = pw.make_virtual_device_set(self.cluster)
        self.whole = [devices.add_slice(shape=(2,), axis_names=("x",), island=i) for i in range(cell.islands)]
        self.single = [devices.add_slice(shape=(1,), axis_names=("x",), island=i) for i in range(cell.islands)]
        self.single += [devices.add_slice(shape=(1,), axis_names=("x",), island=i) for i in range(cell.islands)]
        self.single.sort(key=lambda each: each.devices[0].id)
        self.gangs = [pw.jit(lambda x: x + jnp.sum(x), devices=each, name="gang") for each in self.whole]
        self.ones = [pw.device_put(np.ones(64, np.float32), each, P("x")) for each in self.whole]
        self.kept: list[Any] = []
        #: Waits for something of this client's; again and again.
        self.wait: Callable[[], Any] = self.check

    def check(self) -> None:
        """A computation of each gang, which must be right."""
        for gang, ones in zip(self.gangs, self.ones, strict=True):
            assert (np.asarray(gang(ones)) == 65).all()

    def enter(self) -> None:
        """Brings this client into its state."""
        self.check()
        getattr(self, "_" + self.cell.state.replace("-", "_"))()

    def _ones(self, slice_: Any, count: int = 64) -> Any:
        return pw.device_put(np.ones(count, np.float32), slice_)

    def _occupy(self, microseconds: int, slices: Any = None) -> None:
        """Keeps devices busy for so long."""
        self.kept += [slow(each, microseconds)(self._ones(each)) for each in slices or self.single]

    def _idle(self) -> None:
        self.kept += [self._ones(each) for each in self.single]

    def _queued(self) -> None:
        steps = [(slow(each, 300), self._ones(each)) for each in self.single[:1] + self.whole[-1:]]
        for step, ones in steps:
            step(ones).block_until_ready()  # compiled
        for _ in range(QUEUED):
            self.kept += [step(ones) for step, ones in steps]
        self.wait = self.kept[-1].block_until_ready

    def _granted(self) -> None:
        for each in self.single:
            step, ones = slow(each, 10_000), self._ones(each)
            self.kept += [step(ones) for _ in range(20)]
        self.wait = self.kept[-1].block_until_ready

    def _half_entered(self) -> None:
        self._occupy(300_000, self.single[1::2])  # one host, or one device, of each gang
        for gang, ones in zip(self.gangs, self.ones, strict=True):
            for _ in range(3):
                ones = gang(ones)
                self.kept.append(ones)
        self.wait = self.kept[-1].block_until_ready

    def _transfer(self) -> None:
        source, target = self.single[0], self.single[-1]
        full = [pw.device_put(np.full(BIG, n, np.float32), source) for n in range(6)]
        jax.block_until_ready(full)

        @pw.program
        def across(x: Any) -> Any:
            return pw.device_put(x, target)

        across(full[0]).block_until_ready()
        self.kept += [across(each) for each in full]
        self.kept += [across(each) for each in full]
        self.wait = self.kept[-1].block_until_ready

    def _put(self) -> None:
        step = slow(self.whole[0], 10_000)
        step(pw.device_put(np.ones(BIG, np.float32), self.whole[0], P("x"))).block_until_ready()
        self._occupy(50_000)
        for n in range(6):
            self.kept.append(pw.device_put(np.full(BIG, n, np.float32), self.whole[0], P("x")))
            self.kept.append(step(self.kept[-1]))
        self.wait = self.kept[-1].block_until_ready

    def _fetch(self) -> None:
        step = slow(self.whole[-1], 20_000)
        for n in range(6):
            self.kept.append(step(pw.device_put(np.full(BIG, n, np.float32), self.whole[-1], P("x"))))
            self.kept[-1].copy_to_host_async()
        self.wait = lambda: np.asarray(self.kept[-1])

    def _checkpoint(self) -> None:
        import orbax.checkpoint as ocp

        pw.checkpoint.register()
        state = {
            f"a{n}": pw.device_put(np.full(BIG, n, np.float32), self.whole[n % len(self.whole)], P("x"))
            for n in range(6)
        }
        self.kept.append(state)
        self.saver = ocp.StandardCheckpointer()
        target = pathlib.Path(self.cell.folder) / "checkpoint"
        self.saver.save(target, state)  # goes on in the background
        # orbax makes its folders on threads that Python refuses to a program at its end: a program that ends before the
        # folders are there waits for them for ten minutes, with plain JAX too. So hosts must write, which they do in
        # folders of their own in orbax's. That hosts have the job says nothing: they have it from the staging on.
        while not target.exists() and not any(target.parent.rglob("ocdbt.process_*")):
            time.sleep(0.001)
        self.wait = self.saver.wait_until_finished

    def _suspended(self) -> None:
        self._granted()
        self.link.say("to be suspended", client=self.cluster.client_id)
        assert self.link.hear() == "suspended"
        for each in self.single:
            self.kept += [slow(each, 10_000)(self._ones(each)) for _ in range(4)]
        self.wait = self.kept[-1].block_until_ready

    # ---- leaving

    def leave(self) -> None:
        """As it is told; who leaves by the end of the program just returns."""
        getattr(self, "_leave_by_" + self.cell.leave)()

    def _leave_by_exit(self) -> None:
        self.link.say("leaving", by="exit")

    def _leave_by_close(self) -> None:
        self.link.say("leaving", by="close")
        self.cluster.close()
        self.link.say("left")
        self.link.hear()  # until everything is back, this process lives

    def _leave_by_kill(self) -> None:
        self.link.say("leaving", by="kill -9")
        self._wait_for_ever()

    def _leave_by_interrupt(self) -> None:
        self.link.say("leaving", by="SIGINT")
        self._wait_for_ever()

    def _leave_by_crash(self) -> None:
        how = CRASHES[self.cell.seed % len(CRASHES)]
        self.link.say("leaving", by=how)
        sys.stderr.flush()
        faulthandler.disable()
        if how == "abort in a finalizer":
            extra = self._ones(self.single[0])
            weakref.finalize(extra, os.abort)
            del extra
        delay_s = 0.005
        if how == "abort in a callback of a computation":
            shape = jax.ShapeDtypeStruct((64,), np.float32)
            calls_back = pw.jit(lambda x: jax.pure_callback(_abort, shape, x), devices=self.single[0])
            self.kept.append(calls_back(self._ones(self.single[0])))
            delay_s = 5.0  # in case it is never called: the client is suspended
        signal.signal(signal.SIGALRM, {"abort": _abort, "fault": _fault, "raise": _raise}[how.split()[0]])
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        self._wait_for_ever()

    def _leave_by_fork(self) -> None:
        """Children that end in each way there is; this client goes on, and is right, and then leaves itself.

        In a save, a thread of tensorstore may hold the lock that tensorstore's exit handler takes. A child inherits the
        lock, not the thread, and only `os._exit` passes by that handler.
        """
        ways = ("os._exit",) if self.cell.state == "checkpoint" else ("os._exit", "sys.exit", "the end")
        for way in ways:
            child = os.fork()
            if child == 0:
                self.kept.clear()
                if way == "os._exit":
                    os._exit(0)
                if way == "sys.exit":
                    sys.exit(0)
                return
            status = _status_of(child)
            assert status == 0, f"a child that ended by {way} ended with {status}"
        if self.cell.state != "suspended":
            self.check()
        self.link.say("leaving", by="fork")

    def _wait_for_ever(self) -> None:
        while True:
            self.wait()
            if self.cell.state == "idle":
                time.sleep(0.0005)


def _status_of(child: int) -> int:
    """How it ended. One that hangs says where it stands (SIGUSR1, as for `Player.stacks`), and is killed."""
    deadline = time.monotonic() + CHILD_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGUSR1)
            time.sleep(1)
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(0.001)


def _abort(*_: Any) -> Any:
    os.abort()


def _fault(*_: Any) -> None:
    ctypes.string_at(0)


def _raise(*_: Any) -> None:
    raise RuntimeError("this program has a defect")


def play(cell: Cell) -> None:
    """The life of one client."""
    timer = threading.Timer(120.0, os._exit, (99,))  # bounded, whatever happens
    timer.daemon = True
    timer.start()
    link = Link(cell.link)
    guest = Guest(cell, link)
    guest.enter()
    link.say("ready", client=guest.cluster.client_id)
    assert link.hear() == "leave"
    globals()["guest"] = guest  # what it holds lives until the interpreter goes
    guest.leave()


def enter(fields: dict[str, Any]) -> None:
    """A client from its fork on."""
    cell = Cell(**fields)
    os.close(0)
    log = os.open(os.path.join(cell.folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    play(cell)


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # a client that does not end is asked where it stands: `Player.stacks`
    nursery.serve(enter)
