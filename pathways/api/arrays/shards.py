"""The parts of an array, one per device of its slice: `array.addressable_shards`."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

from pathways.api.slices.virtual_devices import Device, Index


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """One part of an array; the counterpart of `jax.Shard`.

    `index` says which part of the whole it is, `replica_id` numbers the devices that hold the same part.
    """

    device: Device
    index: Index
    replica_id: int
    _array: Any

    @functools.cached_property
    def data(self) -> Any:
        """The part as an array of the same slice, replicated there; all of an array is the array itself."""
        is_all = all(part == slice(None) for part in self.index)
        return self._array if is_all else self._array[self.index]

    def __repr__(self) -> str:
        return f"Shard(device={self.device!r}, index={self.index}, replica_id={self.replica_id})"


def shards_of(array: Any) -> list[Shard]:
    """The parts of a `pw.Array`, in C order of its slice's shape."""
    seen: collections.Counter[Any] = collections.Counter()
    out = []
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        key = tuple((part.start, part.stop) for part in index)
        out.append(Shard(device, index, seen[key], array))
        seen[key] += 1
    return out
