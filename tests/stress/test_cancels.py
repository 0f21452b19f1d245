"""Cancels and deadlines at random moments, beside work that must not notice them.

    FUT-3   what a dropped run leaves behind meets no other array: one thread puts, computes and reads without a break
            while another one cancels, of the same client, whose handles' indices they share; and so does a second
            client of the cluster. Every value that is read is right.
    DEAD-1  a run that is dropped or late fails as that, and whatever else is read is right.

The seed is printed, and taken from PATHWAYS_SEED; the size from PATHWAYS_CANCELS.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter, deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw

FEW, MANY = 150, 300
#: Floats of the arrays: inside the command, in shared memory, and big enough that a release goes out at once.
SIZES = (8, 200, 1 << 12, 1 << 18)


@pytest.fixture
def seed() -> int:
    value = int(os.environ.get("PATHWAYS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"PATHWAYS_SEED={value}")
    return value


def beside(cluster: Any, generator: random.Random, over: threading.Event, counts: Counter[str]) -> None:
    """Puts, computes and reads until `over`; in random order, holding on to some."""
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    f = pw.jit(lambda x: (x + 1, x * 2), devices=slice_)
    kept: deque[tuple[Any, float]] = deque()
    while not over.is_set():
        value = float(generator.randrange(1 << 20))
        x = pw.device_put(np.full(generator.choice(SIZES), value, np.float32), slice_)
        one, two = f(x)
        kept.extend([(x, value), (one, value + 1), (two, value * 2)])
        del x, one, two
        while len(kept) > generator.randrange(24):
            kept.rotate(generator.randrange(len(kept)))
            array, want = kept.popleft()
            counts["read" if (np.asarray(array) == want).all() else "WRONG"] += 1
            del array


class Canceller:
    """Calls programs, and drops some of their runs at random moments."""

    def __init__(self, cluster: Any, generator: random.Random) -> None:
        slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
        self._generator = generator
        self._two = pw.jit(lambda x: (x + 1, x - 1), devices=slice_)
        self._sum = pw.jit(lambda a, b: a + b, devices=slice_)
        self._slow = pw.jit(lambda m: jax.lax.fori_loop(0, 20, lambda _, a: jnp.tanh(a @ a), m), devices=slice_)
        self._inputs = [pw.device_put(np.full(size, 7, np.float32), slice_) for size in SIZES]
        self._square = pw.device_put(np.full((128, 128), 0.01, np.float32), slice_)
        for x in self._inputs:
            self._sum(*self._two(x)).block_until_ready()
        self._slow(self._square).block_until_ready()
        self._pending: deque[tuple[Any, float]] = deque()
        self.counts: Counter[str] = Counter()
        self.drops = 0

    def step(self) -> None:
        """One call or more, and perhaps a cancel or a deadline, now or of an earlier run."""
        draw = self._generator
        if draw.random() < 0.2:  # a host is granted 256 runs at a time: behind them the others wait in the order
            for _ in range(draw.randrange(300)):
                self._pending.append((self._slow(self._square), -1.0))
        two = self._two
        if draw.random() < 0.4:
            two = two.with_timeout(10 ** draw.uniform(-6, -1))
            self.drops += 1
        try:
            plus, minus = two(draw.choice(self._inputs))
        except pw.errors.DeadlineExceededError:  # there was no room for it in time
            return
        if draw.random() < 0.3:
            self._pending.append((self._sum(plus, minus), 14.0))
        named = [(plus, 8.0), (minus, 6.0)]
        draw.shuffle(named)
        del plus, minus
        while named and draw.random() < 0.5:  # its handle goes, and its index means something else at once
            named.pop()
        if named and draw.random() < 0.6:
            pw.cancel(named[0][0])
            self.drops += 1
        self._pending.extend(named)
        named.clear()
        if self._pending and draw.random() < 0.3:
            pw.cancel(draw.choice(self._pending)[0])
            self.drops += 1
        if draw.random() < 0.1:
            time.sleep(draw.random() * 2e-3)
        self.settle(draw.randrange(700))

    def settle(self, most: int) -> None:
        """Reads, or forgets, until so few are left."""
        while len(self._pending) > most:
            self._pending.rotate(self._generator.randrange(4))
            array, want = self._pending.popleft()
            if want < 0 or self._generator.random() < 0.5:
                continue
            try:
                self.counts["read" if (np.asarray(array) == want).all() else "WRONG"] += 1
            except (pw.errors.CancelledError, pw.errors.DeadlineExceededError) as error:
                self.counts[type(error).__name__] += 1


def run(cluster: Any, seed: int, count: int) -> None:
    generator = random.Random(seed)
    over = threading.Event()
    clusters = [cluster]
    with contextlib.ExitStack() as stack:
        if cluster.address is not None:
            clusters.append(stack.enter_context(pw.connect(cluster.address)))  # a client of its own
        counts: list[Counter[str]] = [Counter() for _ in clusters]
        problems: list[BaseException] = []

        def guarded(*args: Any) -> None:
            try:
                beside(*args)
            except BaseException as problem:  # the main thread tells
                problems.append(problem)
                over.set()

        canceller = Canceller(cluster, random.Random(generator.random()))
        dropped = cluster.stats()["controller"]["dropped"]
        threads = [
            threading.Thread(target=guarded, args=(each, random.Random(generator.random()), over, count))
            for each, count in zip(clusters, counts, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            while canceller.drops < count and not over.is_set():
                canceller.step()
            canceller.settle(0)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        dropped = cluster.stats()["controller"]["dropped"] - dropped
    print(f"{canceller.drops} cancels and deadlines, {dropped} runs dropped; read: {canceller.counts}, beside {counts}")
    assert not problems, problems
    for each in (*counts, canceller.counts):
        assert each["WRONG"] == 0
        assert each["read"] > 0
    assert dropped > 0


def test_few(embedded_cluster: Any, seed: int) -> None:
    run(embedded_cluster, seed, FEW)


@pytest.mark.slow
@pytest.mark.watchdog(1500)
@pytest.mark.parametrize("kind", ["embedded", "local"])
def test_many(request: pytest.FixtureRequest, kind: str, seed: int) -> None:
    run(request.getfixturevalue(f"{kind}_cluster"), seed, int(os.environ.get("PATHWAYS_CANCELS", MANY)))
