"""Requests that make arrays: from host buffers of the client, or as errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pathways.compiler.ir import Tiling
from pathways.proxy import dtypes, host_arrays, shardings
from pathways.proxy.arrays import Array, StringBuffer, of_buffer
from pathways.proxy.behind import Buffer
from pathways.proxy.calls import Call, Kind, many
from pathways.proxy.errors import Code, Refused, refusal_in
from pathways.proxy.replies import Fill
from pathways.proxy.shardings import Sharding
from pathways.proxy.state import State

#: What a host buffer is: NumPy's values, or strings.
Values = Any


def make_from_host_buffer(state: State, call: Call) -> Fill:
    """One array from one host buffer, which has the whole of it."""
    body = call.body
    data = state.buffers.take(body.host_buffer_handle)
    dtype, shape = dtypes.of_kind(body.dtype.kind), host_arrays.shape_of(body.shape)
    sharding = known_sharding(state, body.sharding)
    values = _values(data, dtype, shape, host_arrays.strides_of(body))
    if dtype.is_string or len(sharding.devices) == 1:
        shards: list[Values] = [values] * len(sharding.devices)
    else:
        tiling = sharding.tiling(shape)
        shards = [part_of(values, tiling, number) for number in range(len(sharding.devices))]
    buffer = put(state, dtype, sharding, shards, shards[0].shape if dtype.numpy else shape)
    made = of_buffer(buffer, "a put", dtype, shape, sharding, call.context)
    (handle,) = state.arrays.add(_given(body), [made])
    return lambda response: setattr(response, "array_handle", handle)


def make_from_shards(state: State, call: Call) -> Fill:
    """Several arrays; each has a host buffer for a shard or more."""
    body = call.body
    state.arrays.check_free(body.array_handles, len(body.specs))
    taken = {handle: state.buffers.take(handle) for handle in dict.fromkeys(_host_buffers_of_shards(body))}
    handles = state.arrays.add(body.array_handles, [_of_shards(state, call, spec, taken) for spec in body.specs])
    return lambda response: response.array_handles.extend(handles)


def make_errors(state: State, call: Call) -> Fill:
    """Arrays that are the client's own error."""
    error = refusal_in(call.body.error).within(call.context)
    handles = list(call.body.array_handles)
    state.arrays.check_free(handles, len(call.body.array_specs))
    state.arrays.fail(handles, error)
    handles = handles or [state.arrays.add_error(error) for _ in call.body.array_specs]
    return lambda response: response.array_handles.extend(handles)


def known_sharding(state: State, proto: Any) -> Sharding:
    """The sharding of a message. Raises `Refused` when it names devices that are not this cluster's."""
    sharding = shardings.parse(proto)
    check_devices(state, sharding.devices)
    return sharding


def check_devices(state: State, devices: Sequence[int]) -> None:
    """Raises `Refused` when some are not this cluster's."""
    if unknown := sorted(set(devices) - state.device_ids):
        raise Refused(
            Code.NOT_FOUND, f"unknown devices {unknown[:10]}; this cluster has {len(state.device_ids)} devices"
        )


def put(
    state: State, dtype: dtypes.DType, sharding: Sharding, shards: Sequence[Values], shape: tuple[int, ...]
) -> Buffer:
    """A buffer with `shards` of `shape` on the devices of `sharding`."""
    if dtype.is_string:
        return StringBuffer(tuple(shards), shape, sharding.devices, sharding.memory_kind)
    host_arrays.numpy_of(dtype)
    if len({values.shape for values in shards}) > 1:
        raise Refused(Code.UNIMPLEMENTED, f"shards of different shapes: {sorted({v.shape for v in shards})}")
    return state.devices.put(sharding.devices, sharding.memory_kind, shards)


def part_of(values: np.ndarray[Any, Any], tiling: Tiling, number: int) -> np.ndarray[Any, Any]:
    """The shard of the `number`-th device. Replicas are one and the same object only when nothing is cut."""
    if all(count == 1 for count in tiling.grid):
        return values
    cell = np.unravel_index(tiling.cells[number], tiling.grid)
    parts = [-(-size // count) for size, count in zip(values.shape, tiling.grid, strict=True)]
    return values[tuple(slice(int(at) * part, (int(at) + 1) * part) for at, part in zip(cell, parts, strict=True))]


def _values(data: host_arrays.Bytes, dtype: dtypes.DType, shape: tuple[int, ...], strides: Sequence[int] | None) -> Any:
    if dtype.is_string:
        return host_arrays.strings_from(data, shape)
    return host_arrays.from_bytes(data, host_arrays.numpy_of(dtype), shape, strides)


def _of_shards(state: State, call: Call, spec: Any, taken: dict[int, host_arrays.Bytes]) -> Array:
    """One array of MakeArraysFromHostBufferShards."""
    dtype, shape = dtypes.of_kind(spec.array_spec.dtype.kind), host_arrays.shape_of(spec.array_spec.shape)
    sharding = known_sharding(state, spec.array_spec.sharding)
    count = len(sharding.devices)
    if len(spec.addressable_shard_indices) != len(spec.host_buffers):
        raise Refused(Code.INVALID_ARGUMENT, "not as many lists of shards as host buffers")
    shards: list[Values | None] = [None] * count
    shard_shape: tuple[int, ...] = ()
    for indices, buffer in zip(spec.addressable_shard_indices, spec.host_buffers, strict=True):
        shard_shape = host_arrays.shape_of(buffer.shape)
        if buffer.dtype.kind != dtype.kind:
            raise Refused(Code.INVALID_ARGUMENT, f"a host buffer of another element type than {dtype.name}")
        values = _values(taken[buffer.host_buffer_handle], dtype, shard_shape, host_arrays.strides_of(buffer))
        for index in indices.indices:
            if not 0 <= index < count or shards[index] is not None:
                raise Refused(Code.INVALID_ARGUMENT, f"shard {index} of {count}: unknown, or named twice")
            if (expected := sharding.shard_shape(shape, index)) not in (None, shard_shape):
                raise Refused(Code.INVALID_ARGUMENT, f"shard {index} is {shard_shape}; its sharding says {expected}")
            shards[index] = values
    if missing := [index for index, values in enumerate(shards) if values is None]:
        raise Refused(Code.INVALID_ARGUMENT, f"no host buffer came for the shards {missing[:10]} of {count}")
    return of_buffer(put(state, dtype, sharding, shards, shard_shape), "a put", dtype, shape, sharding, call.context)


def _host_buffers_of_shards(body: Any) -> list[int]:
    return [buffer.host_buffer_handle for spec in body.specs for buffer in spec.host_buffers]


def _given(body: Any) -> list[int]:
    return [body.array_handle] if body.array_handle else []


def _has_come(state: State, call: Call) -> bool:
    return state.buffers.all_here([call.body.host_buffer_handle], state.wake)


def _have_come(state: State, call: Call) -> bool:
    return state.buffers.all_here(_host_buffers_of_shards(call.body), state.wake)


REQUESTS = {
    "make_array_from_host_buffer_request": Kind(make_from_host_buffer, results=_given, may_begin=_has_come),
    "make_arrays_from_host_buffer_shards_request": Kind(
        make_from_shards, results=many("array_handles"), may_begin=_have_come
    ),
    "make_error_arrays_request": Kind(make_errors, results=many("array_handles")),
}
