"""Which islands of a cluster are down, as far as one session needs to know it.

In the cluster's order, work for a lost island waits until the island is back, which may be never. Programs of plain JAX
expect an error of the code DATA_LOSS instead, and ask again, as `pathwaysutils.elastic` does. So the door starts
nothing on an island that is down, and what was started just before fails (ERR-2).

The native client hears of each loss. Only then, and before anything is refused, the controller is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from pathways import errors
from pathways.api.session import Session


class Islands:
    """The islands of a session. Any thread may call."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._losses = 0  # that were heard of before the last look
        self._looked_s = 0.0
        self._down: frozenset[int] = frozenset()
        self._look()

    def check(self, devices: Iterable[int]) -> None:
        """Refuses devices of islands that are down.

        Raises:
            HostLostError: it names the islands.
        """
        self._session.native.pause(0.0)  # hears of losses
        if (loss := self.loss_of(devices)) is not None:
            raise loss

    def loss_of(self, devices: Iterable[int], age_s: float = 0.0) -> errors.HostLostError | None:
        """Why nothing can be done on these devices; None: their islands are up. That they are down was seen not longer
        than `age_s` seconds ago."""
        if self._session.native.losses == self._losses and not self._down:
            return None
        topology = self._session.control().topology
        concerned = {topology.island_of(device // topology.devices_per_host) for device in devices}
        with self._lock:
            is_old = time.monotonic() - self._looked_s >= age_s and not self._down.isdisjoint(concerned)
            if is_old or self._session.native.losses != self._losses:
                self._look()
            down = sorted(concerned & self._down)
        if not down:
            return None
        hosts = [list(topology.islands[island]) for island in down]
        return errors.HostLostError(
            f"island {', '.join(map(str, down))} is down: its hosts {', '.join(map(str, hosts))} are lost, or have not "
            "started yet. Ask again when it is back, and put the data that you need there again"
        )

    def stand_in(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """The devices, if their island is up; else as many of another island with equal devices.

        Raises:
            HostLostError: there are none.
        """
        if (loss := self.loss_of(devices)) is None:
            return devices
        topology = self._session.control().topology
        island = topology.island_of(devices[0] // topology.devices_per_host)
        for other in range(len(topology.islands)):
            found = topology.island_devices(other)[: len(devices)]
            is_like = len(found) == len(devices) and topology.platform_of(other) == topology.platform_of(island)
            if is_like and self.loss_of(found) is None:
                return found
        raise loss

    def _look(self) -> None:
        control, self._losses = self._session.control(), self._session.native.losses
        there = set(control.hosts_there())
        self._looked_s = time.monotonic()
        self._down = frozenset(n for n, hosts in enumerate(control.topology.islands) if not there.issuperset(hosts))
