"""Rival of `python -m benchmarks.tenants`: one JAX process in which each tenant is a thread, on one CPU device.

That is what multi-controller JAX offers to programs that share devices. XLA lets computations of several threads
overlap on one CPU device, which no accelerator does. So these steps hold the device while they take their time, as
those of our hosts do, which launch from one thread.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.tenants.client import ELEMENTS

MOST_AHEAD = 32
"""XLA's CPU client blocks its caller beyond this, counting the steps of all threads."""


class Process:
    """The threads' process."""

    def __init__(self) -> None:
        self._steps: dict[int, Callable[[Any], Any]] = {}

    def load(self, lengths_us: Sequence[int]) -> None:
        """Compiles the steps."""
        import jax

        from pathways.testing import stand_in

        jax.config.update("jax_platforms", "cpu")
        stand_in.register()
        for us in lengths_us:
            self._steps[us] = jax.jit(lambda x, us=us: stand_in.step(x + 1, us, holds_device=True))
            self._steps[us](self._zeros()).block_until_ready()

    def _zeros(self) -> Any:
        import jax.numpy as jnp

        return jnp.zeros(ELEMENTS, jnp.float32)

    def flood(self, threads: int, begin: float, end: float, us: int, ahead: int) -> list[list[float]]:
        """Each thread keeps up to `ahead` steps under way. When each of them was over, by thread."""
        over: list[list[float]] = [[] for _ in range(threads)]
        failures: list[str] = []
        most = max(1, min(ahead, MOST_AHEAD // threads))

        def tenant(times: list[float]) -> None:
            step, value = self._steps[us], self._zeros()
            pending: collections.deque[Any] = collections.deque()
            count = 0
            time.sleep(max(0.0, begin - time.monotonic()))
            while pending or time.monotonic() < end:
                if time.monotonic() < end:
                    value = step(value)
                    count += 1
                    pending.append(value)
                    if len(pending) < most:
                        continue
                pending.popleft().block_until_ready()
                times.append(time.monotonic())
            if not (value == count).all():
                failures.append(f"after {count} steps: {value}")

        started = [threading.Thread(target=tenant, args=(times,)) for times in over]
        for each in started:
            each.start()
        for each in started:
            each.join()
        if failures:
            raise RuntimeError(failures[0])
        return over
