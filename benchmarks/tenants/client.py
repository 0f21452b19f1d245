"""One client of `python -m benchmarks.tenants`, and of the stress tests, in a process of its own.

It keeps a flood of steps under way for a time that the harness gives, or runs one step at a time. A step takes its
time and no core (`pathways.testing.stand_in`), and adds one to each of 1,024 numbers. The client checks what comes out.
Times are those of `time.monotonic`, which all processes of one machine share.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

ELEMENTS = 1024  # of float32: 4 KiB; and enough for XLA not to compute within the call that enqueues
CHECK_EVERY = 100


def ahead_of(lengths_us: Sequence[int]) -> int:
    """How many runs a flood keeps under way: about 150 ms of them, from 8 to 600.

    A client that gets no core for a while must not run dry.
    """
    return max(8, min(600, round(150_000 * len(lengths_us) / max(1, sum(lengths_us)))))


class Client:
    """One client of one cluster, and its programs."""

    def start(self, target: Any, name: str, weight: float = 1, priority: int | None = None) -> str:
        """Connects to a running cluster by its address, or starts the one that a `pw.LocalCluster` describes.

        The programs will run on all devices. Returns the cluster's address.
        """
        import jax
        import numpy

        import pathways as pw

        jax.config.update("jax_platforms", "cpu")
        terms: dict[str, Any] = {} if priority is None else {"priority": priority}
        if not (isinstance(target, pw.LocalCluster) and target.policy == "fifo"):
            terms["weight"] = weight
        self._cluster = pw.connect(target, name=name, **terms)
        self._slice = pw.make_virtual_device_set(self._cluster).add_slice(devices=len(self._cluster.devices))
        self._steps: dict[int, Callable[[Any], Any]] = {}
        self._value = pw.device_put(numpy.zeros(ELEMENTS, numpy.float32), self._slice)
        self._count = 0
        return str(self._cluster.address)

    def load(self, lengths_us: Sequence[int]) -> None:
        """Compiles the steps and runs each of them once."""
        import pathways as pw
        from pathways.testing import stand_in

        for us in lengths_us:
            if us not in self._steps:
                self._steps[us] = pw.jit(
                    lambda x, us=us: stand_in.step(x + 1, us) if us else x + 1, devices=self._slice, name=f"step_{us}us"
                )
            self._value = self._steps[us](self._value)
            self._count += 1
        self._check(self._count, self._value)

    def _check(self, count: int, value: Any) -> None:
        import numpy

        found = numpy.asarray(value)
        if not (found == count % (1 << 24)).all():
            raise RuntimeError(f"after {count} steps expected {count} everywhere, got {found[:4]}...")

    def flood(self, begin: float, end: float, lengths_us: Sequence[int], ahead: int) -> list[tuple[float, int]]:
        """Keeps `ahead` runs under way from `begin` to `end`: steps of these lengths in turn.

        Each run takes the result of the one before it. Returns for each run when it was over, and its length.
        """
        pending: collections.deque[tuple[int, int, Any]] = collections.deque()
        over: list[tuple[float, int]] = []

        def settle() -> None:
            number, us, value = pending.popleft()
            if number % CHECK_EVERY == 0:
                self._check(number, value)
            value.block_until_ready()
            over.append((time.monotonic(), us))

        turns = itertools.cycle([(us, self._steps[us]) for us in lengths_us])
        time.sleep(max(0.0, begin - time.monotonic()))
        while time.monotonic() < end:
            us, step = next(turns)
            self._value = step(self._value)
            self._count += 1
            pending.append((self._count, us, self._value))
            if len(pending) >= ahead:
                settle()
        while pending:
            settle()
        self._check(self._count, self._value)
        return over

    def single(self, begin: float, end: float, us: int, pause: float = 0.0) -> list[float]:
        """One run at a time. Seconds of each, from the call to the ready result."""
        taken = []
        step = self._steps[us]
        time.sleep(max(0.0, begin - time.monotonic()))
        while (now := time.monotonic()) < end:
            self._value = step(self._value)
            self._count += 1
            self._value.block_until_ready()
            taken.append(time.monotonic() - now)
            if pause:
                time.sleep(pause)
        self._check(self._count, self._value)
        return taken

    def close(self) -> None:
        """Leaves the cluster; a cluster that this client started ends."""
        cluster = getattr(self, "_cluster", None)
        if cluster is not None:
            del self._cluster, self._slice, self._value, self._steps
            cluster.close()

    stop = close
