"""Arrays of strings that a function on hosts makes: there they are bytes, and here strings when somebody reads them.

The session's thread calls, and what it tells comes from any thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from pathways.proxy.arrays import StringBuffer
from pathways.proxy.behind import Buffer, Devices, Done, Executable, ExecutableMetadata, Shard
from pathways.proxy.host_arrays import Strings
from pathways.proxy.packed_strings import MOST_BYTES, unpack


class LateStrings(StringBuffer):
    """A buffer of strings. `packed` has their bytes; `shape` is that of a shard."""

    def __init__(self, devices: Devices, packed: Buffer, shape: tuple[int, ...], memory_kind: str) -> None:
        super().__init__((), shape, packed.devices, memory_kind)
        self._fetch, self._packed = devices.fetch, packed

    def most_bytes(self, number: int) -> int:
        """See `StringBuffer`."""
        return MOST_BYTES

    def read(self, number: int, then: Callable[[Strings | BaseException], None]) -> None:
        """See `StringBuffer`."""

        lock = threading.Lock()
        found: list[np.ndarray[Any, Any] | BaseException | None] = []

        def came(outcome: np.ndarray[Any, Any] | BaseException | None) -> None:
            with lock:
                found.append(outcome)
                if len(found) < 2:
                    return
            failures = [each for each in found if isinstance(each, BaseException)]
            try:
                if failures:
                    raise failures[0]
                (values,) = (each for each in found if isinstance(each, np.ndarray))
                strings = unpack(values, math.prod(self.shape))
            except BaseException as error:
                then(error)
            else:
                then(strings)

        # A function has failed when it has failed on one host, whatever this shard's host has made.
        self._packed.when_ready(came)
        self._fetch(Shard(self._packed, number), came)

    def when_ready(self, then: Done) -> None:
        """See `Buffer`."""
        self._packed.when_ready(then)

    def delete(self) -> None:
        """See `Buffer`."""
        self._packed.delete()


class MakesStrings:
    """An executable whose results are bytes of strings, where `shapes` has the shape of their shards instead of None.
    See `pathways.proxy.behind.Executable`.
    """

    def __init__(self, devices: Devices, executable: Executable, shapes: Sequence[tuple[int, ...] | None]) -> None:
        self._devices, self._executable, self._shapes = devices, executable, shapes

    @property
    def metadata(self) -> ExecutableMetadata:
        """See `Executable`."""
        return self._executable.metadata

    def execute(self, arguments: Sequence[Sequence[Shard]], kept: Collection[int]) -> Sequence[Buffer]:
        """See `Executable`."""
        return [
            buffer if shape is None else LateStrings(self._devices, buffer, shape, "")
            for buffer, shape in zip(self._executable.execute(arguments, kept), self._shapes, strict=True)
        ]

    def run_again(self, arguments: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """See `Executable`."""
        return None
