"""What a client has: arrays, executables, futures, host buffers, and the devices behind the door.

Handlers of requests work on it. The session's thread alone uses it, but for `post` and `wake`.
"""

from __future__ import annotations

from collections.abc import Callable

from pathways.proxy.arrays import Array
from pathways.proxy.behind import Devices, Machine
from pathways.proxy.futures import Future
from pathways.proxy.handles import HandleTable, own_handles
from pathways.proxy.host_buffers import HostBuffers
from pathways.proxy.limits import Limits
from pathways.proxy.loaded import Loaded
from pathways.proxy.module_reader import ModuleReader


class State:
    """All that one session holds. `number` names the session towards the client."""

    def __init__(
        self,
        number: int,
        devices: Devices,
        limits: Limits,
        reader: ModuleReader,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """`post` lets the session's thread do something before its next request. Any thread may call it."""
        self.number = number
        self.devices, self.reader = devices, reader
        self.machine: Machine = devices.describe()
        self.device_ids = frozenset(device.id for device in self.machine.devices)
        own = own_handles()
        self.arrays: HandleTable[Array] = HandleTable("array", limits.handles, own)
        self.executables: HandleTable[Loaded] = HandleTable("loaded executable", limits.handles, own)
        self.futures: HandleTable[Future] = HandleTable("future", limits.handles, own)
        self.buffers = HostBuffers(limits.host_bytes)
        self.post = post

    def wake(self) -> None:
        """The request that waits may be able to begin. Any thread may call."""
        self.post(_nothing)

    def free(self) -> None:
        """The client is gone."""
        self.buffers.close()
        for table in (self.arrays, self.executables, self.futures):
            table.clear()
        self.devices.close()


def _nothing() -> None:
    """The session's thread looks at its requests after whatever is posted."""
