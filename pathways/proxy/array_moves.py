"""Requests that move arrays: copies to other devices or memories, other shardings, other types of the same bytes.

What need not move is viewed, unless the client wants a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pathways.proxy import dtypes, host_arrays
from pathways.proxy.array_making import check_devices, known_sharding
from pathways.proxy.array_views import ALWAYS_COPY, give, usable
from pathways.proxy.arrays import Array, StringBuffer, of_buffer, of_parts
from pathways.proxy.behind import Buffer
from pathways.proxy.calls import Call, Kind, many
from pathways.proxy.errors import Code, Refused, not_implemented
from pathways.proxy.late_strings import LateStrings
from pathways.proxy.replies import Fill
from pathways.proxy.shardings import Sharding
from pathways.proxy.state import State


def copy(state: State, call: Call) -> Fill:
    """The i-th shard of each array onto the i-th device."""
    check_devices(state, call.body.device_ids)
    return _moved(state, call, _copied_as_asked, [call.body] * len(call.body.array_handles))


def reshard(state: State, call: Call) -> Fill:
    """Arrays cut anew, over other devices."""
    return _moved(state, call, _resharded, call.body.array_specs)


def bitcast(state: State, call: Call) -> Fill:
    """The same bytes as arrays of another type, shape or sharding. No shard changes its device."""
    return _moved(state, call, _bitcast, call.body.array_specs)


def _moved(state: State, call: Call, move: Callable[[State, Call, Array, Any], Array], targets: Sequence[Any]) -> Fill:
    """What each of these requests does: `move` makes an array of each, as its target says."""
    body = call.body
    arrays = usable(state, body.array_handles)
    if len(arrays) != len(targets):
        raise Refused(Code.INVALID_ARGUMENT, f"{len(arrays)} arrays, but {len(targets)} specs")
    made = [move(state, call, array, target) for array, target in zip(arrays, targets, strict=True)]
    handles = state.arrays.add(body.result_handles, made)
    give(body, arrays)
    return lambda response: response.array_handles.extend(handles)


def _copied_as_asked(state: State, call: Call, array: Array, body: Any) -> Array:
    devices = tuple(body.device_ids) or array.devices
    memory_kind = body.memory_kind if body.HasField("memory_kind") else array.sharding.memory_kind
    return _copied(state, call, array, array.sharding.with_devices(devices, memory_kind))


def _copied(state: State, call: Call, array: Array, sharding: Sharding) -> Array:
    """`array` by `sharding`, which cuts it in the same way."""
    is_there = (sharding.devices, sharding.memory_kind) == (array.devices, array.sharding.memory_kind)
    if is_there and call.body.copy_semantics != ALWAYS_COPY:
        return of_parts(array.dtype, array.shape, sharding, array.parts, call.context)
    buffer: Buffer
    if array.dtype.is_string:
        buffer = _strings(array, sharding)
    elif array.dtype.numpy is None:
        raise not_implemented("a token cannot be copied")
    else:
        buffer = state.devices.copy(array.shards(), sharding.devices, sharding.memory_kind)
    return of_buffer(buffer, "a copy", array.dtype, array.shape, sharding, call.context)


def _strings(array: Array, sharding: Sharding) -> StringBuffer:
    held = [(one.buffer, number) for one, number in array.parts]
    if any(isinstance(buffer, LateStrings) for buffer, _ in held):
        raise not_implemented("strings that a function on hosts has made cannot be copied; read them, and put them")
    values = tuple(buffer.values[number] for buffer, number in held if isinstance(buffer, StringBuffer))
    return StringBuffer(values, held[0][0].shape, sharding.devices, sharding.memory_kind)


def _resharded(state: State, call: Call, array: Array, spec: Any) -> Array:
    target = known_sharding(state, spec.sharding)
    if (spec.dtype.kind, host_arrays.shape_of(spec.shape)) != (array.dtype.kind, array.shape):
        raise Refused(Code.INVALID_ARGUMENT, f"{array.dtype.name}{list(array.shape)} cannot become another array")
    source_tiling, target_tiling = array.sharding.tiling(array.shape), target.tiling(array.shape)
    if source_tiling == target_tiling:
        return _copied(state, call, array, target)
    if array.dtype.numpy is None:
        raise not_implemented(f"an array of {array.dtype.name}s cannot be cut anew")
    buffer = state.devices.reshard(
        array.shards(), source_tiling, target.devices, target_tiling, array.shape, target.memory_kind
    )
    return of_buffer(buffer, "a reshard", array.dtype, array.shape, target, call.context)


def _bitcast(state: State, call: Call, array: Array, spec: Any) -> Array:
    dtype, shape = dtypes.of_kind(spec.dtype.kind), host_arrays.shape_of(spec.shape)
    sharding = known_sharding(state, spec.sharding)
    shard_shape = sharding.shard_shape(shape, 0)
    if shard_shape is None:
        raise not_implemented(f"a bitcast to a sharding that does not say the shape of shards: {sharding.type_name}")
    held = array.parts[0][0].buffer
    if (dtype, shard_shape) == (array.dtype, held.shape):
        return of_parts(dtype, shape, sharding, array.parts, call.context)
    numpy, own = host_arrays.numpy_of(dtype), host_arrays.numpy_of(array.dtype)
    if host_arrays.region_bytes(numpy, shard_shape, None) != host_arrays.region_bytes(own, held.shape, None):
        raise Refused(Code.INVALID_ARGUMENT, f"shards {own}{list(held.shape)} are not {numpy}{list(shard_shape)}")
    if sharding.devices != array.devices:
        raise Refused(Code.INVALID_ARGUMENT, "a bitcast does not move an array to other devices")
    buffer = state.devices.bitcast(array.shards(), numpy, shard_shape)
    return of_buffer(buffer, "a bitcast", dtype, shape, sharding, call.context)


REQUESTS = {
    "copy_arrays_request": Kind(copy, results=many("result_handles")),
    "reshard_arrays_request": Kind(reshard, results=many("result_handles")),
    "bitcast_arrays_request": Kind(bitcast, results=many("result_handles")),
}
