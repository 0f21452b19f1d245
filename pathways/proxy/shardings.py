"""Shardings of clients: which device has which part of an array, as far as the door must know.

The door keeps a client's sharding as it came. It reads the devices, the memory kind and the shapes of shards, and, when
an array is cut anew, the tiling. Parsed shardings are kept, because a client names few of them many times.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pathways._jaxlib.proxy_messages import message
from pathways.compiler.ir import Tiling
from pathways.proxy.errors import Code, Refused, not_implemented

PREFIX = "xla::ifrt::"
SINGLE, HLO = f"{PREFIX}SingleDeviceSharding", f"{PREFIX}HloSharding"
CONCRETE, CONCRETE_EVEN = f"{PREFIX}ConcreteSharding", f"{PREFIX}ConcreteEvenSharding"
OPAQUE = f"{PREFIX}OpaqueSharding"
MESSAGES = {
    SINGLE: "xla.ifrt.SingleDeviceShardingProto",
    HLO: "xla.ifrt.HloShardingProto",
    CONCRETE: "xla.ifrt.ConcreteShardingProto",
    CONCRETE_EVEN: "xla.ifrt.ConcreteEvenShardingProto",
    OPAQUE: "xla.ifrt.OpaqueShardingProto",
}
# xla.OpSharding.Type
_REPLICATED, _MAXIMAL, _OTHER = 0, 1, 3
MOST_DEVICES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Sharding:
    """One sharding: its type and bytes as they crossed, and what they say."""

    type_name: str
    data: bytes
    devices: tuple[int, ...]
    memory_kind: str  # empty: the devices' default

    def shard_shape(self, shape: tuple[int, ...], number: int) -> tuple[int, ...] | None:
        """The shape of the shard on the `number`-th device; None when this kind of sharding does not say it."""
        parsed = _parsed(self.type_name, self.data)
        if self.type_name == SINGLE:
            return shape
        if self.type_name == CONCRETE_EVEN:
            return tuple(parsed.shard_shape.dims)
        if self.type_name == CONCRETE:
            return tuple(parsed.shard_shapes[number].dims) if number < len(parsed.shard_shapes) else None
        if self.type_name == HLO:
            return cell_shape(shape, self.tiling(shape), number)
        return None

    def tiling(self, shape: tuple[int, ...]) -> Tiling:
        """How an array of `shape` is cut. Raises `Refused` for a sharding that does not say it."""
        return _tiling(self.type_name, self.data, len(shape))

    def with_devices(self, devices: tuple[int, ...], memory_kind: str) -> Sharding:
        """The same cut, over other devices. Raises `Refused` when there are more or fewer of them."""
        if len(devices) != len(self.devices):
            raise Refused(
                Code.INVALID_ARGUMENT, f"an array on {len(self.devices)} devices cannot be copied to {len(devices)}"
            )
        changed = message(MESSAGES[self.type_name]).FromString(self.data)
        if self.type_name == SINGLE:
            changed.device_id = devices[0]
        else:
            changed.devices.device_ids[:] = devices
        changed.memory_kind = memory_kind
        return Sharding(self.type_name, changed.SerializeToString(), devices, memory_kind)

    def fill(self, proto: Any) -> None:
        """Writes a ShardingProto."""
        proto.serialized_sharding.type_name, proto.serialized_sharding.data = self.type_name, self.data


def parse(proto: Any) -> Sharding:
    """The sharding in a ShardingProto. Raises `Refused` for one that is unknown or malformed."""
    return _sharding(proto.serialized_sharding.type_name, proto.serialized_sharding.data)


def single(device: int, memory_kind: str) -> Sharding:
    """The whole array on one device."""
    return _single(device, memory_kind)


def by_hlo(op_sharding: bytes, devices: tuple[int, ...], memory_kind: str) -> Sharding:
    """A sharding from XLA's, over `devices`."""
    if len(devices) == 1:
        return _single(devices[0], memory_kind)
    made = message(MESSAGES[HLO])(memory_kind=memory_kind)
    made.devices.device_ids.extend(devices)
    made.xla_op_sharding.ParseFromString(op_sharding)
    return Sharding(HLO, made.SerializeToString(), devices, memory_kind)


def even(devices: tuple[int, ...], memory_kind: str, shape: tuple[int, ...], shard_shape: tuple[int, ...]) -> Sharding:
    """A sharding that says the shape of shards and no more. Every client can use it, whatever it knows of XLA's."""
    if len(devices) == 1:
        return _single(devices[0], memory_kind)
    made = message(MESSAGES[CONCRETE_EVEN])(memory_kind=memory_kind, is_fully_replicated=shape == shard_shape)
    made.devices.device_ids.extend(devices)
    made.shape.dims.extend(shape)
    made.shard_shape.dims.extend(shard_shape)
    return Sharding(CONCRETE_EVEN, made.SerializeToString(), devices, memory_kind)


def cell_shape(shape: tuple[int, ...], tiling: Tiling, number: int) -> tuple[int, ...]:
    """The shape of the shard on the `number`-th device."""
    cell = np.unravel_index(tiling.cells[number], tiling.grid) if tiling.grid else ()
    return tuple(
        max(0, min(size, (int(at) + 1) * part) - int(at) * part)
        for size, at, part in zip(shape, cell, _parts(shape, tiling), strict=True)
    )


def _parts(shape: Sequence[int], tiling: Tiling) -> list[int]:
    return [-(-size // count) for size, count in zip(shape, tiling.grid, strict=True)]


@functools.lru_cache(4096)
def _single(device: int, memory_kind: str) -> Sharding:
    made = message(MESSAGES[SINGLE])(device_id=device, memory_kind=memory_kind)
    return Sharding(SINGLE, made.SerializeToString(), (device,), memory_kind)


@functools.lru_cache(4096)
def _parsed(type_name: str, data: bytes) -> Any:
    if type_name not in MESSAGES:
        raise not_implemented(f"a sharding of the type {type_name!r}; this proxy knows {', '.join(sorted(MESSAGES))}")
    return message(MESSAGES[type_name]).FromString(data)


@functools.lru_cache(4096)
def _sharding(type_name: str, data: bytes) -> Sharding:
    parsed = _parsed(type_name, data)
    devices = (parsed.device_id,) if type_name == SINGLE else tuple(parsed.devices.device_ids)
    if not 0 < len(devices) <= MOST_DEVICES:
        raise Refused(Code.INVALID_ARGUMENT, f"a sharding over {len(devices)} devices")
    return Sharding(type_name, data, devices, parsed.memory_kind if parsed.HasField("memory_kind") else "")


@functools.lru_cache(4096)
def _tiling(type_name: str, data: bytes, rank: int) -> Tiling:
    parsed = _parsed(type_name, data)
    if type_name == SINGLE:
        return Tiling((1,) * rank, (0,))
    if type_name == HLO:
        return hlo_tiling(parsed.xla_op_sharding, len(parsed.devices.device_ids), rank)
    if type_name == CONCRETE_EVEN and parsed.is_fully_replicated:
        return Tiling((1,) * rank, (0,) * len(parsed.devices.device_ids))
    raise not_implemented(f"an array whose sharding is a {type_name} does not say where its parts lie")


def hlo_tiling(op_sharding: Any, devices: int, rank: int) -> Tiling:
    """The tiling of an xla.OpSharding over `devices` devices of an array of `rank` dimensions.

    The tile assignment is an array of device numbers; its first `rank` dimensions are the grid, the others hold
    replicas. It is written out, or it is an iota that is reshaped, transposed and reshaped. Newer ones name the axes of
    a mesh instead.
    """
    if op_sharding.HasField("named_sharding"):
        return _named_tiling(op_sharding.named_sharding, devices, rank)
    if op_sharding.type == _REPLICATED:
        return Tiling((1,) * rank, (0,) * devices)
    if op_sharding.type == _MAXIMAL and devices == 1:
        return Tiling((1,) * rank, (0,))
    if op_sharding.type != _OTHER:
        raise not_implemented(f"an XLA sharding of type {op_sharding.type} does not say where an array's parts lie")
    sizes = tuple(op_sharding.tile_assignment_dimensions)
    assigned = _assigned(
        op_sharding.tile_assignment_devices, op_sharding.iota_reshape_dims, op_sharding.iota_transpose_perm, sizes
    )
    _check_assigned(assigned, sizes, devices, rank, len(sizes))
    replicas = math.prod(sizes[rank:])
    cells = [0] * devices
    for place, device in enumerate(assigned):
        cells[device] = place // replicas
    return Tiling(sizes[:rank], tuple(cells))


def _named_tiling(named: Any, devices: int, rank: int) -> Tiling:
    """The tiling of an xla.NamedShardingProto: each dimension is cut along axes of a mesh, the major one first. An axis
    may be a part of one: its digits from `pre_size` on, `size` of them.
    """
    sizes = tuple(axis.size for axis in named.mesh.axes)
    iota = named.mesh.iota_transform
    assigned = _assigned(named.mesh.device_ids, iota.reshape_dims, iota.transpose_perm, sizes)
    _check_assigned(assigned, sizes, devices, rank, len(named.dim_shardings))
    cuts = [[_digits(axis, sizes) for axis in dimension.axes] for dimension in named.dim_shardings[:rank]]
    grid = tuple(math.prod(size for _, _, size in cut) for cut in cuts)
    cells = [0] * devices
    for place, device in enumerate(assigned):
        coordinates = np.unravel_index(place, sizes) if sizes else ()
        cell = 0
        for count, cut in zip(grid, cuts, strict=True):
            part = 0
            for axis, below, size in cut:
                part = part * size + int(coordinates[axis]) // below % size
            cell = cell * count + part
        cells[device] = cell
    return Tiling(grid, tuple(cells))


def _digits(axis: Any, sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """Of an AxisRefProto: the axis, the product of the sizes below its digits, and how many digits there are."""
    index, size, pre_size = axis.mesh_axis_index, 0, 1
    if 0 <= index < len(sizes):
        size = sizes[index]
        if axis.HasField("sub_axis_info"):
            pre_size, size = axis.sub_axis_info.pre_size, axis.sub_axis_info.size
    if size <= 0 or pre_size <= 0 or sizes[index] % (pre_size * size):
        raise Refused(Code.INVALID_ARGUMENT, f"a sharding along the axis {index} of a mesh {sizes}")
    return index, sizes[index] // (pre_size * size), size


def _assigned(
    written: Sequence[int], reshaped: Sequence[int], permuted: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    """Device numbers in the order of tiles: those written, or an iota that is reshaped and transposed."""
    if written:
        return list(written)
    shape = tuple(reshaped) or tuple(sizes)
    order = tuple(permuted) or tuple(range(len(shape)))
    if (
        not 0 < math.prod(shape) <= MOST_DEVICES
        or min(shape, default=1) < 1
        or sorted(order) != list(range(len(shape)))
    ):
        raise Refused(Code.INVALID_ARGUMENT, f"devices in the order of {shape[:16]} by {order[:16]}")
    return [int(n) for n in np.arange(math.prod(shape)).reshape(shape).transpose(order).ravel()]


def _check_assigned(assigned: list[int], sizes: tuple[int, ...], devices: int, rank: int, cut: int) -> None:
    if cut < rank or math.prod(sizes) != devices or sorted(assigned) != list(range(devices)):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"tiles {sizes[:16]} do not fit an array of {rank} dimensions on {devices} devices",
        )
