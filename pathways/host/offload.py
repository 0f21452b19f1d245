"""Offloads buffers from their devices to host memory or to a file without a name, and restores them bit by bit.

An offloaded value holds each distinct shard of this host once, and knows on which devices the shard was. It needs no
cleanup: memory is freed with the object, and a file is unlinked before its first byte is written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding


class _Store(Protocol):
    def write(self, data: np.ndarray) -> Any:
        """Keeps the bytes; returns a key for `read`."""

    def read(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns what was written under `key`."""


class _Memory:
    """Bytes in host memory."""

    def write(self, data: np.ndarray) -> Any:
        return np.array(data, copy=True, order="C")

    def read(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.asarray(key)


class _File:
    """Bytes in a file that has no name."""

    _fd = -1

    def __init__(self, directory: str | None) -> None:
        self._fd, name = tempfile.mkstemp(prefix="offloaded-", dir=directory)
        os.unlink(name)
        self._end = 0

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def write(self, data: np.ndarray) -> Any:
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        at = self._end
        while len(view):
            written = write_at(self._fd, view, self._end)
            view, self._end = view[written:], self._end + written
        return at

    def read(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        out = np.empty(shape, dtype)
        view = out.reshape(-1).view(np.uint8).data
        at = int(key)
        while len(view):
            count = os.preadv(self._fd, [view], at)
            if count == 0:
                raise OSError(f"the file of offloaded buffers ends at byte {at}")
            view, at = view[count:], at + count
        return out


def write_at(fd: int, data: memoryview, at: int) -> int:
    """`os.pwrite`; tests replace this function by a full disk."""
    return os.pwrite(fd, data, at)


class OffloadedValue:
    """An array that is off its devices."""

    def __init__(self, array: jax.Array, store: _Store) -> None:
        self._shape, self._dtype, self._sharding = array.shape, array.dtype, array.sharding
        self._store = store
        self.nbytes = 0  # that it took on the devices
        self._shards: list[tuple[jax.Device, Any, tuple[int, ...]]] = []
        kept: dict[Any, Any] = {}
        for shard in array.addressable_shards:
            where = tuple((part.start, part.stop) for part in shard.index)
            if where not in kept:
                kept[where] = store.write(np.asarray(shard.data))
            self.nbytes += shard.data.nbytes
            self._shards.append((shard.device, kept[where], shard.data.shape))

    def restore(self) -> jax.Array:
        """Puts the array back on its devices and returns it."""
        shards = [
            jax.device_put(
                self._store.read(key, shape, self._dtype),
                SingleDeviceSharding(device, memory_kind=self._sharding.memory_kind),
            )
            for device, key, shape in self._shards
        ]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards)


def offload(values: Sequence[Any], directory: str | None, to_disk: bool) -> tuple[list[Any], int]:
    """Returns what replaces each value, and the bytes that leave the devices. An offloaded value stays offloaded.

    Raises:
        OSError, MemoryError: no room; nothing has changed.
    """
    store: _Store = _File(directory) if to_disk else _Memory()
    known: dict[int, Any] = {}  # by id(): a value that is there twice stays one value
    for value in values:
        if id(value) not in known:
            known[id(value)] = value if isinstance(value, OffloadedValue) else OffloadedValue(value, store)
    return [known[id(value)] for value in values], sum(each.nbytes for key, each in known.items() if id(each) != key)


def restore(values: Sequence[Any]) -> tuple[list[Any], int]:
    """Returns the restored values, when they are on their devices, and the bytes that came back."""
    known: dict[int, Any] = {}
    for value in values:
        if id(value) not in known:
            known[id(value)] = value.restore() if isinstance(value, OffloadedValue) else value
    came = [each for key, each in known.items() if id(each) != key]
    for each in came:
        each.block_until_ready()
    return [known[id(value)] for value in values], sum(
        shard.data.nbytes for each in came for shard in each.addressable_shards
    )
