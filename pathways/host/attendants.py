"""Launches beside the enqueue thread: computations that call functions of their client, which may wait for long.

The enqueue thread calls `attend`, the compiler's thread calls `asker`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways.host.callbacks import Asker, Questions
from pathways.host.devices import HostDevices
from pathways.host.executables import Attended
from pathways.host.own_settings import own_settings
from pathways.process.worker_threads import WorkerThreads


class Attendants:
    """The threads of one host that launch computations with callbacks, and wait for their ends."""

    def __init__(
        self,
        core: Any,
        devices: HostDevices,
        questions: Questions,
        describe: Callable[[str, BaseException | None, int, int], str],
        give_up: Callable[[str], None],
    ) -> None:
        """`describe` makes the error text of a failed launch. `give_up`: see `Asker`."""
        self._core = core
        self._devices = devices
        self._questions = questions
        self._describe = describe
        self._give_up = give_up
        #: Takes back whether the launch of a node is on stand-ins for what failed. Then it is for the peers only
        #: (GANG-1), and calls nobody.
        self.take_stand_ins: Callable[[int, int], bool] = lambda plan, node: False
        self._threads = WorkerThreads("pw-attend", is_foreign=True)
        self._fence: Fence | None = None  # GANG-3; made when gangs may be launched by two threads

    def asker(self, client: int, devices: int) -> Asker:
        """Makes the `Asker` by which a computation on so many devices calls its client."""
        if self._fence is None and self._devices.quirks.gangs_block and self._devices.has_peers:
            self._fence = Fence(self._devices.local)
        return Asker(functools.partial(self._questions.ask, client), devices, self._give_up)

    def attend(self, order: int, plan: int, node: int, launch: Attended) -> None:
        """Launches on another thread a computation that calls its client back; calls `core.launched` at its end."""
        has_stand_ins = self.take_stand_ins(plan, node)
        earlier = self._fence.now(launch.gang_devices) if self._fence is not None and launch.gang_devices else None

        @own_settings
        def see_to_it() -> None:
            made: tuple[jax.Array, ...] = ()
            error = None
            try:
                if earlier is not None:
                    jax.block_until_ready(earlier)
                made = launch.run(has_stand_ins)
            except BaseException as problem:
                error = self._describe("run", problem, plan, node)
            self._core.launched(order, node, made, error)

        self._threads.do(see_to_it)

    def stop(self) -> None:
        """Ends each thread when its launch is over."""
        self._threads.stop()


class Fence:
    """Lets a gang that another thread launches wait for the gangs that the enqueue thread launched before it (GANG-3).

    XLA's CPU client runs the single-device launches of one thread in their order. It does not order those of two
    threads, so their collectives could be paired wrongly. A fence is a tiny computation that the enqueue thread
    launches: when it has run, all earlier single-device launches of that thread have run. One gang with callbacks runs
    at a time, so a device has one fence at most, within the bound of `Quirks.in_flight`.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._ones = {device: jax.device_put(np.int32(1), device) for device in devices}
        self._step = jax.jit(lambda x: x + 1)
        jax.block_until_ready(self.now(devices))  # compiled

    def now(self, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Launches a fence on each of `devices`; ready when the earlier launches of the calling thread have run."""
        return [self._step(self._ones[device]) for device in devices]
