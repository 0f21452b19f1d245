"""Which buffers there are on a cluster: their kinds, and where they lie.

A buffer is an array of the cluster on a list of devices, cut by a tiling. A kind says all of it but the value.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence

import numpy as np

from pathways import _core
from pathways.api.programs.tracing import remember
from pathways.api.session import Session
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler.ir import ArrayType, Tiling
from pathways.proxy.islands import Islands

DeviceList = tuple[int, ...]  # numbers of devices in the cluster, in the client's order


@dataclasses.dataclass(frozen=True)
class Kind:
    """Shape of the whole array, element type and tiling, on which devices. `is_alike`: devices of one part hold the
    same; only of scalars they may not.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    devices: DeviceList
    tiling: Tiling
    is_alike: bool = True

    @functools.cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of each shard."""
        return tuple(size // parts for size, parts in zip(self.shape, self.tiling.grid, strict=True))

    def type(self, mesh: int = 0) -> ArrayType:
        """The same as the type of a program's value."""
        return ArrayType(self.shape, self.dtype, mesh, ((),) * len(self.shape), tiling=self.tiling)


def stacked(shard_shape: Sequence[int], dtype: np.dtype, devices: DeviceList, cells: Sequence[int]) -> Kind | None:
    """The kind of a buffer of so many shards that need not be parts of one array: they lie behind each other along the
    first dimension. `cells[i]`: the number of the shard that device i holds. None: there is no such kind, because the
    shards are scalars that differ, or some lie on more devices than others.
    """
    count = max(cells) + 1
    if count > 1 and not shard_shape:
        return None
    shape = (count * shard_shape[0], *shard_shape[1:]) if shard_shape else ()
    tiling = Tiling((count, *(1 for _ in shard_shape[1:])) if shard_shape else (), tuple(cells))
    try:
        tiling.check(shape, len(devices))
    except ValueError:
        return None
    return Kind(shape, dtype, devices, tiling)


def apart(shard_shape: Sequence[int], dtype: np.dtype, devices: DeviceList) -> Kind:
    """The kind of a buffer that has a shard of its own on each device."""
    found = stacked(shard_shape, dtype, devices, range(len(devices)))
    return found or Kind((), dtype, devices, Tiling((), (0,) * len(devices)), is_alike=False)


def tiled(shape: tuple[int, ...], dtype: np.dtype, devices: DeviceList, tiling: Tiling, is_alike: bool = True) -> Kind:
    """The kind of an array that XLA has cut by this tiling. Where that does not divide a dimension, XLA has padded the
    last parts, and the shards lie behind each other. So they do unless the devices of one cell hold the same.
    """
    is_even = all(size % parts == 0 for size, parts in zip(shape, tiling.grid, strict=True))
    if is_even and is_alike:
        return Kind(shape, dtype, devices, tiling)
    padded = tuple(-(-size // parts) for size, parts in zip(shape, tiling.grid, strict=True))
    found = stacked(padded, dtype, devices, tiling.cells if is_alike else range(len(devices)))
    return found or Kind(shape, dtype, devices, tiling, is_alike=False)


class Places:
    """The slices of a session: one for each list of devices, for as long as the session lives."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.islands = Islands(session)
        self._slices: dict[DeviceList, Slice] = {}
        self._layouts: dict[Kind, _core.Layout] = {}
        self._lock = threading.Lock()

    def check(self, devices: DeviceList) -> None:
        """Raises `HostLostError` when devices are on an island that is down."""
        known = self._slices.get(devices)
        self.islands.check(devices if known is None else known.binding.devices)

    def slice_of(self, devices: DeviceList) -> Slice:
        """The slice of these devices.

        Raises:
            SliceError: there are no such devices now, or they lie on several islands.
        """
        known = self._slices.get(devices)
        if known is None:
            with self._lock:
                known = self._slices.get(devices)
                if known is None:
                    control = self.session.control()
                    binding = control.allocate_slice((len(devices),), ("devices",), devices=devices)
                    known = self._slices[devices] = Slice(self.session, binding)
                    remember(known)
        return known

    def layout(self, kind: Kind) -> _core.Layout:
        """The layout of buffers of a kind."""
        known = self._layouts.get(kind)
        if known is None:
            known = self._layouts[kind] = self.session.layout(kind.type(), self.slice_of(kind.devices))
        return known
