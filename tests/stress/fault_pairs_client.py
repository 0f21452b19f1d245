"""Programs of fault_pairs.py, which take commands on standard input, a line each, and answer with a line of JSON.

    fault_pairs_client.py home ADDRESS FOLDER    the cluster; ADDRESS is where it listens
        start        starts a controller, or another one at the same address; answers with its address and port
    fault_pairs_client.py ROLE ADDRESS           a client that works all the time: innocent, victim or far
        ops A,B      what it does from now on
        report       what it did since the last report; see `Client.report`

ADDRESS of a client is `pathways://...`, or a file that names the address of a controller on this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways import errors
from pathways.cluster.launcher import Listening, start_local_cluster

ISLANDS = 3
LARGE = {"victim": 16 << 20, "far": 4 << 20}  # elements of 4 bytes
#: What a client may be told because of a fault.
LOST = (errors.HostLostError, errors.SliceError)
OVER = (errors.ControllerLostError, errors.ClusterClosedError, errors.ConnectError)


class Home:
    """Starts the controller, and another one when that was killed."""

    def __init__(self, address: str, folder: str) -> None:
        self._listening = Listening(address, f"{folder}/authority")
        self._handle: Any = None

    def do_start(self) -> dict[str, Any]:
        if self._handle is not None:
            self._handle.close()
        self._handle = start_local_cluster(ISLANDS, 1, 2, platform="cpu", listen=self._listening)
        pids = [self._handle.supervisor_pid, self._handle.control.controller_pid]
        return {"address": self._handle.address, "port": self._handle.port, "pids": pids}

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()


class Client:
    """Works in a thread of its own, for as long as the process is there."""

    def __init__(self, role: str, address: str) -> None:
        self._role = role
        self._address = address
        self._lock = threading.Lock()
        self._begun: tuple[str, float] = ("connect", time.monotonic())
        self._ops = ["train"] if role == "innocent" else ["step"]
        self._right: dict[str, int] = {}
        self._errors: list[tuple[str, str, float, float, str]] = []
        self._bad: list[str] = []
        threading.Thread(target=self._work, daemon=True).start()

    def do_ops(self, ops: str) -> bool:
        with self._lock:
            self._ops = ops.split(",")
        return True

    def do_report(self) -> dict[str, Any]:
        """`right`: how often each operation was right. `errors`: [operation, error, seconds after the operation began,
        time, first line]. `bad`: wrong values, and errors that no fault explains. `now`: what it does, and since how
        long.
        """
        with self._lock:
            name, since = self._begun
            report = {
                "right": self._right,
                "errors": self._errors,
                "bad": self._bad,
                "now": [name, time.monotonic() - since],
            }
            self._right, self._errors, self._bad = {}, [], []
        return report

    def close(self) -> None:
        os._exit(0)

    def _work(self) -> None:
        while True:
            work: Any = None
            with contextlib.suppress(*OVER):
                self._begin("connect")
                try:
                    work = self._connected()
                    self._repeat(work)
                except OVER as error:
                    self._failed(error)
                except Exception:  # whatever it is, the report tells it
                    self._failed_badly()
            if work is not None:
                with contextlib.suppress(errors.PathwaysError):
                    work.cluster.close()
            time.sleep(0.2)

    def _connected(self) -> Any:
        address = self._address
        if not address.startswith("pathways://"):
            address = pathlib.Path(address).read_text()
        cluster = pw.connect(address, name=self._role)
        cluster.wait_for(2 * ISLANDS, 120)
        return Training(cluster) if self._role == "innocent" else Work(cluster, LARGE[self._role])

    def _repeat(self, work: Any) -> None:
        for number in itertools.count():
            with self._lock:
                op = self._ops[number % len(self._ops)]
            self._begin(op)
            try:
                getattr(work, op)()
            except LOST as error:
                self._failed(error)
                work.lost()
                time.sleep(0.05)
            except AssertionError:
                self._failed_badly()
                work.lost()
            else:
                with self._lock:
                    self._right[op] = self._right.get(op, 0) + 1

    def _begin(self, what: str) -> None:
        with self._lock:
            self._begun = (what, time.monotonic())

    def _failed(self, error: Exception) -> None:
        with self._lock:
            what, since = self._begun
            line = str(error).splitlines()[0]
            self._errors.append((what, type(error).__name__, time.monotonic() - since, time.time(), line))

    def _failed_badly(self) -> None:
        with self._lock:
            self._bad.append(f"{self._begun[0]}: {traceback.format_exc()}")


class Training:
    """A small model on island 0, step by step beside the same one in plain JAX."""

    def __init__(self, cluster: pw.Cluster) -> None:
        self.cluster = cluster
        where = pw.make_virtual_device_set(cluster).add_slice(devices=1, island=0)
        self._step = pw.jit(train_step, devices=where)
        self._plain = jax.jit(train_step)
        self.lost()

    def lost(self) -> None:
        """Begins again."""
        self._params = np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)
        self._expected: Any = self._params
        self._number = 0

    def train(self) -> None:
        x = np.random.default_rng(self._number % 8).normal(size=(32, 16)).astype(np.float32)
        self._number += 1
        self._params, loss = self._step(self._params, x)
        self._expected, expected = self._plain(self._expected, x)
        assert np.asarray(loss).tobytes() == np.asarray(expected).tobytes(), "the losses differ"
        if self._number % 10 == 0:
            assert np.asarray(self._params).tobytes() == np.asarray(self._expected).tobytes(), "the parameters differ"
            time.sleep(0.02)


def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of gradient descent."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(w)
    return w - 0.1 * gradient, loss


class Work:
    """What is hit: work on islands 1 and 2, and between them. Integers, so that each value is known exactly."""

    def __init__(self, cluster: pw.Cluster, large: int) -> None:
        self.cluster = cluster
        devices = pw.make_virtual_device_set(cluster)
        self._one, self._two = devices.add_slice(devices=2, island=1), devices.add_slice(devices=2, island=2)
        self._resized = devices.add_slice(devices=1, axis_names=("x",), island=2)
        self._twice = pw.jit(lambda x: x * 2 + 1, devices=self._one, out_shardings=P("x"))
        self._add = pw.jit(lambda x: x + 3, devices=self._two, out_shardings=P("x"))
        self._count = pw.jit(lambda x: jnp.sum(x), devices=self._one)
        self._large = np.arange(large, dtype=np.uint32)
        self._sum = np.sum(self._large, dtype=np.uint32)
        self._number = 0
        self.lost()

    def lost(self) -> None:
        """What lay on a lost island is put again when it is needed."""
        self._there: Any = None
        self._kept: Any = None

    def step(self) -> None:
        self._number += 1
        x = np.arange(8, dtype=np.uint32) + np.uint32(self._number)
        np.testing.assert_array_equal(np.asarray(self._add(self._twice(x))), x * 2 + 4)

    def transfer(self) -> None:
        if self._there is None:
            self._there = pw.device_put(self._large, self._one, P("x"))
        there = self._add(self._there)
        np.testing.assert_array_equal(np.asarray(there), self._large + 3)

    def put(self) -> None:
        total = self._count(pw.device_put(self._large, self._one, P("x")))
        assert np.uint32(np.asarray(total)) == self._sum

    def fetch(self) -> None:
        if self._kept is None:
            self._kept = pw.device_put(self._large, self._two, P("x"))
        np.testing.assert_array_equal(np.asarray(self._add(self._kept)), self._large + 3)

    def resize(self) -> None:
        kept = pw.device_put(self._large[: 1 << 20], self._resized, P("x"))
        self.cluster.resize(self._resized, (3 - self._resized.size,))
        np.testing.assert_array_equal(np.asarray(kept), self._large[: 1 << 20])


def main() -> None:
    """Reads commands until the end of standard input."""
    role, *arguments = sys.argv[1:]
    program: Any = Home(*arguments) if role == "home" else Client(role, *arguments)
    for line in sys.stdin:
        name, *words = line.split()
        do: Callable[..., Any] = getattr(program, f"do_{name}")
        print(json.dumps(do(*words)), flush=True)
    program.close()


if __name__ == "__main__":
    main()
