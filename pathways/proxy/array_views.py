"""Requests that make arrays of the shards of others. PROXY-2: no byte moves, and nobody behind the door is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pathways.proxy import dtypes, host_arrays, shardings
from pathways.proxy.array_making import known_sharding
from pathways.proxy.arrays import Array, Held, of_parts
from pathways.proxy.calls import Call, Kind, many, one
from pathways.proxy.errors import Code, Refused
from pathways.proxy.replies import Fill
from pathways.proxy.state import State

# ArrayCopySemantics
ALWAYS_COPY, DONATE_INPUT = 1, 3
Part = tuple[Held, int]


def assemble(state: State, call: Call) -> Fill:
    """One array of arrays on one device each."""
    body = call.body
    arrays = usable(state, body.single_device_array_handles)
    if body.HasField("dtype") and body.dtype.kind:
        dtype = dtypes.of_kind(body.dtype.kind)
    elif arrays:
        dtype = arrays[0].dtype
    else:
        raise Refused(Code.INVALID_ARGUMENT, "an array of no arrays, without an element type")
    parts = [part for array in arrays for part in array.parts]
    shape, sharding = host_arrays.shape_of(body.shape), known_sharding(state, body.sharding)
    for number, (held, _) in enumerate(parts):
        if sharding.shard_shape(shape, number) not in (None, held.buffer.shape):
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"shard {number} is {held.buffer.shape}; the sharding of {shape} says "
                f"{sharding.shard_shape(shape, number)}",
            )
    made = of_parts(dtype, shape, sharding, parts, call.context)
    (handle,) = state.arrays.add(one("result_handle")(body), [made])
    give(body, arrays)
    return lambda response: setattr(response, "array_handle", handle)


def disassemble(state: State, call: Call) -> Fill:
    """An array for each shard."""
    body = call.body
    (array,) = usable(state, [body.array_handle])
    made = [_alone(array, number, call) for number in range(len(array.parts))]
    handles = state.arrays.add(body.result_handles, made)
    give(body, [array])
    return lambda response: response.array_handles.extend(handles)


def fully_replicated_shard(state: State, call: Call) -> Fill:
    """The shard on the first device, which is the whole array."""
    body = call.body
    (array,) = usable(state, [body.array_handle])
    if array.parts[0][0].buffer.shape != array.shape:
        raise Refused(Code.INVALID_ARGUMENT, f"an array of shape {array.shape} that is not replicated")
    (handle,) = state.arrays.add(one("result_handle")(body), [_alone(array, 0, call)])
    give(body, [array])
    return lambda response: setattr(response, "array_handle", handle)


def remap(state: State, call: Call) -> Fill:
    """Arrays that are made of shards of several others, by a plan."""
    body, plan = call.body, call.body.plan
    arrays = usable(state, body.array_handles)
    if len(arrays) != len(plan.input_specs):
        raise Refused(Code.INVALID_ARGUMENT, f"{len(arrays)} arrays for a plan of {len(plan.input_specs)}")
    targets = [known_sharding(state, spec.sharding) for spec in plan.output_specs]
    parts: list[list[Part | None]] = [[None] * len(sharding.devices) for sharding in targets]
    for mapping in plan.mappings:
        _map(mapping, _at(arrays, mapping.in_array).parts, _at(parts, mapping.out_array))
    for output in plan.input_devices_for_output:
        target = _at(targets, output.out_array).devices
        for source in output.input_devices:
            _map_devices(_at(arrays, source.in_array), source.device_list.device_ids, target, parts[output.out_array])
    made = []
    for spec, sharding, own in zip(plan.output_specs, targets, parts, strict=True):
        whole = [part for part in own if part is not None]
        if len(whole) != len(own):
            raise Refused(Code.INVALID_ARGUMENT, "the plan leaves shards of a result without a source")
        dtype, shape = dtypes.of_kind(spec.dtype.kind), host_arrays.shape_of(spec.shape)
        made.append(of_parts(dtype, shape, sharding, whole, call.context))
    handles = state.arrays.add(body.result_handles, made)
    give(body, arrays)
    return lambda response: response.array_handles.extend(handles)


def usable(state: State, handles: Sequence[int]) -> list[Array]:
    """The arrays of `handles`. Raises `Refused` when one is unknown, an error, or deleted."""
    arrays = state.arrays.find_all(handles)
    for array in arrays:
        array.check_usable()
    return arrays


def give(body: Any, arrays: Sequence[Array]) -> None:
    """After a request that may take its inputs: if it does, nobody has them any more."""
    if body.copy_semantics == DONATE_INPUT:
        for array in arrays:
            array.give()


def _alone(array: Array, number: int, call: Call) -> Array:
    held, shard = array.parts[number]
    sharding = shardings.single(array.devices[number], array.sharding.memory_kind)
    return Array(array.dtype, held.buffer.shape, sharding, call.context, None, ((held, shard),))


def _at(things: Sequence[Any], index: int) -> Any:
    if not 0 <= index < len(things):
        raise Refused(Code.INVALID_ARGUMENT, f"the plan names array {index} of {len(things)}")
    return things[index]


def _map(mapping: Any, source: Sequence[Part], target: list[Part | None]) -> None:
    """Intervals of shards."""
    for numbers in zip(
        mapping.from_start,
        mapping.from_end,
        mapping.from_step,
        mapping.to_start,
        mapping.to_end,
        mapping.to_step,
        strict=True,
    ):
        if numbers[2] <= 0 or numbers[5] <= 0:
            raise Refused(Code.INVALID_ARGUMENT, f"the plan has the intervals {numbers}")
        taken, filled = range(*numbers[:3]), range(*numbers[3:])
        if len(taken) != len(filled) or not (_within(taken, len(source)) and _within(filled, len(target))):
            raise Refused(
                Code.INVALID_ARGUMENT, f"the plan maps {taken} of {len(source)} shards to {filled} of {len(target)}"
            )
        for origin, place in zip(taken, filled, strict=True):
            target[place] = source[origin]


def _within(numbers: range, count: int) -> bool:
    return not numbers or (numbers[0] >= 0 and numbers[-1] < count)


def _map_devices(array: Array, devices: Sequence[int], target: Sequence[int], parts: list[Part | None]) -> None:
    """Whole devices: the shard on each of `devices` goes to its place in the result."""
    sources, places = ({device: number for number, device in enumerate(each)} for each in (array.devices, target))
    for device in devices:
        if device not in sources or device not in places:
            raise Refused(Code.INVALID_ARGUMENT, f"the plan names device {device}, which an array has not")
        parts[places[device]] = array.parts[sources[device]]


REQUESTS = {
    "assemble_array_from_single_device_arrays_request": Kind(assemble, results=one("result_handle")),
    "disassemble_into_single_device_arrays_request": Kind(disassemble, results=many("result_handles")),
    "fully_replicated_shard_request": Kind(fully_replicated_shard, results=one("result_handle")),
    "remap_arrays_request": Kind(remap, results=many("result_handles")),
}
