"""A client of Pathways beside stock JAX clients that flood, that are killed in the midst of work, and whose island is
lost: it goes on, and every value of it is right. What the others had is freed (PROXY-3, OWN-1, ERR-2).

PATHWAYS_SEED repeats what is drawn; PATHWAYS_MIX_S is for how long collectives of several clients cross, in seconds.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from control_clusters import eventually
from jax.sharding import PartitionSpec as P
from stock_clients import StockClient

import pathways as pw
from pathways.cluster.operator import look

pytestmark = pytest.mark.slow

#: On both devices of each island: a program with a collective, and one that takes its argument over.
BEGIN = """
d = jax.devices()
islands = [on([each for each in d if each.slice_index == island]) for island in (0, 1)]
f = jax.jit(lambda v: v * 3 + v.sum())
g = jax.jit(lambda v: v + 1, donate_argnums=0)
x = np.arange(4096, dtype=np.uint32)
made = [f(jax.device_put(x, where)) for where in islands]
jax.block_until_ready([g(each) for each in made])
"""
#: Nothing is read, and all is kept.
FLOOD = """
kept = []
for _ in range(400):
    v = jax.device_put(x, islands[0])
    for _ in range(10):
        v = f(v)
        kept.append(v)
out = len(kept)
"""
#: Until it is killed.
WORK = """
import itertools
print(json.dumps({"out": "it works"}), file=answers, flush=True)
made = []
for n in itertools.count():
    v, w = (f(jax.device_put(x + n, where)) for where in islands)
    made.append(f(jax.device_put(g(g(v)), islands[1])))
    if n % 5 == 4:
        [np.asarray(each) for each in made]  # all, because an island that is lost is soon back
        made.clear()
"""
#: Chains of collectives on one island or both, as long as they are drawn, compared with NumPy's values.
MIX = """
import random, time
draw, right, end = random.Random({seed}), 0, time.monotonic() + {seconds}
h = jax.jit(lambda v, w: (v * 5 + w.sum(), w + v.sum()))
while time.monotonic() < end:
    where = islands[draw.randrange(2)]
    v, w = (jax.device_put(x + draw.randrange(99), where) for _ in range(2))
    a, b = np.asarray(v), np.asarray(w)
    for _ in range(draw.randrange(1, 30)):
        v, w = h(v, w)
        a, b = a * np.uint32(5) + b.sum(dtype=np.uint32), b + a.sum(dtype=np.uint32)
        if draw.random() < 0.1:
            where = islands[draw.randrange(2)]
            v, w = (jax.device_put(each, where) for each in (v, w))
    assert (np.asarray(v) == a).all() and (np.asarray(w) == b).all(), "a wrong value"
    right += 1
out = right
"""
MIX_S = float(os.environ.get("PATHWAYS_MIX_S", "3"))


class Neighbour:
    """A client of Pathways that computes on island 0, on a thread of its own, and compares each value with NumPy's."""

    def __init__(self, cluster: Any) -> None:
        where = pw.make_virtual_device_set(cluster).add_slice(shape=(2,), axis_names=("x",), island=0)
        self._step = pw.jit(lambda v: v * 3 + v.sum(), devices=where, in_shardings=P("x"), out_shardings=P("x"))
        self._start = np.arange(8, dtype=np.uint32)
        self._where, self._is_over = where, threading.Event()
        self.right = 0
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        self.goes_on()
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_over.set()
        self._thread.join()
        if self._raised is not None:
            raise self._raised

    def goes_on(self, more: int = 5) -> None:
        """Waits until it has compared so many values more."""
        aim = self.right + more
        eventually(lambda: self.right >= aim or self._raised is not None, "the neighbour goes on")
        assert self._raised is None, self._raised

    def _run(self) -> None:
        want = self._start
        try:
            value = pw.device_put(want, self._where, P("x"))
            while not self._is_over.is_set():
                for _ in range(4):
                    value, want = self._step(value), want * np.uint32(3) + want.sum(dtype=np.uint32)
                np.testing.assert_array_equal(np.asarray(value), want)
                self.right += 1
        except BaseException as error:
            self._raised = error


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=2, hosts_per_island=1, devices_per_host=2)) as made:
        yield made


@pytest.fixture
def neighbour(cluster: Any) -> Iterator[Neighbour]:
    with Neighbour(cluster) as made:
        yield made
        made.goes_on()


def all_freed(address: str) -> bool:
    """Nothing of stock clients is left."""
    stats = look(address)
    return len(stats.clients) == 1 and sum(stats.controller.live_bytes) < 4096


def test_one_that_floods(cluster: Any, variables: dict[str, str], neighbour: Neighbour) -> None:
    with StockClient(variables) as client:
        client.out(BEGIN)
        for _ in range(3):
            client.send(FLOOD)
            neighbour.goes_on(10)
            assert client.answer_out() == 4000
        assert client.out("out = int(np.asarray(kept[10]).sum(dtype=np.uint32))") == client.out(
            "v = x\nfor _ in range(1): v = v * np.uint32(3) + v.sum(dtype=np.uint32)\nout = int(v.sum(dtype=np.uint32))"
        )
        neighbour.goes_on()
    eventually(lambda: all_freed(cluster.address), "all is freed")


def test_one_that_is_killed(cluster: Any, variables: dict[str, str], neighbour: Neighbour) -> None:
    seed = int(os.environ.get("PATHWAYS_SEED", random.randrange(1 << 32)))
    print(f"PATHWAYS_SEED={seed}")
    draw = random.Random(seed)
    for _ in range(3):
        with StockClient(variables) as client:
            client.out(BEGIN)
            client.out(WORK)
            time.sleep(draw.random())
        neighbour.goes_on()
        eventually(lambda: all_freed(cluster.address), "all is freed")


def test_one_whose_island_is_lost(cluster: Any, variables: dict[str, str], neighbour: Neighbour) -> None:
    with StockClient(variables) as client:
        client.out(BEGIN)
        for _ in range(2):
            client.out(WORK)
            neighbour.goes_on()
            os.kill(look(cluster.address).hosts[1].pid, signal.SIGKILL)
            assert "DATA_LOSS" in client.answer_error()
            neighbour.goes_on()
            eventually(lambda: all(host.state == "up" for host in look(cluster.address).hosts), "island 1 is back")
    eventually(lambda: all_freed(cluster.address), "all is freed")


@pytest.mark.watchdog(MIX_S + 150)
def test_two_whose_collectives_cross_with_others(cluster: Any, variables: dict[str, str], neighbour: Neighbour) -> None:
    seed = int(os.environ.get("PATHWAYS_SEED", random.randrange(1 << 32)))
    print(f"PATHWAYS_SEED={seed}")
    with StockClient(variables) as one, StockClient(variables) as other:
        for client in (one, other):
            client.out(BEGIN)
        before = neighbour.right
        for number, client in enumerate((one, other)):
            client.send(MIX.format(seed=seed + number, seconds=MIX_S))
        right = [client.answer_out() for client in (one, other)]
        print(f"chains that were right: {right}, and {neighbour.right - before} of a client of Pathways")
        assert min(right) > 0
    eventually(lambda: all_freed(cluster.address), "all is freed")
