"""Programs of `jax.experimental.colocated_python`: a function in Python, for the hosts of its arrays.

The client's JAX has pickled the function, with trees and types of its arguments and results. The proxy does not read
that (`colocated_functions.py`); the client says beside it which arrays there are. At the first call of a function JAX
does not know yet what the results are. Then it asks for a function that tells this in a string, and keeps the results
where it runs, and for another one, which gives them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from pathways._jaxlib.proxy_messages import message
from pathways.compiler.ir import Tiling
from pathways.proxy import dtypes, host_arrays
from pathways.proxy.array_making import check_devices, known_sharding
from pathways.proxy.behind import Cut, Executable, Function
from pathways.proxy.colocated_functions import ColocatedFunction
from pathways.proxy.errors import Code, Refused, not_implemented
from pathways.proxy.late_strings import MakesStrings
from pathways.proxy.loaded import Loaded, LoadedResult
from pathways.proxy.packed_strings import MOST_BYTES
from pathways.proxy.shardings import cell_shape
from pathways.proxy.state import State
from pathways.quirks import quirks_of

TYPE = "jax_colocated_python_v0.0.1"
#: The longest function: hosts keep it, and the controller for those that start again.
MOST_FUNCTION_BYTES = 64 << 20
MOST_ARRAY_BYTES = 1 << 50  # more is nowhere


def parse(state: State, data: bytes) -> tuple[Function, list[LoadedResult]]:
    """A CustomCallProgram as a function, and what the client knows of its results.

    Raises:
        Refused: it is malformed, of another type, too long, for devices that cannot, or for arrays that it cannot have.
    """
    try:
        program = message("xla.ifrt.CustomCallProgramProto").FromString(data)
    except DecodeError:
        raise Refused(Code.INVALID_ARGUMENT, "what came is no custom call program") from None
    if program.type != TYPE:
        raise not_implemented(f"a custom call program of the type {program.type[:200]!r}; this proxy runs {TYPE}")
    name, devices = program.name[:200], tuple(program.devices.device_ids)
    _check_devices(state, name, devices)
    payload = program.serialized_program_text
    if len(payload) > MOST_FUNCTION_BYTES:
        raise Refused(
            Code.RESOURCE_EXHAUSTED,
            f"{name} takes {len(payload):,} bytes with what it closes over, expected at most "
            f"{MOST_FUNCTION_BYTES:,}: give it big arrays as arguments",
        )
    arguments = [_array(state, f"argument {n} of {name}", devices, s) for n, s in enumerate(program.input_specs)]
    results = [_array(state, f"result {n} of {name}", devices, s) for n, s in enumerate(program.output_specs)]
    if any(each.dtype.is_string for each in arguments):
        raise not_implemented(f"{name} takes strings; a colocated function can return them, and takes none here")
    hosts = {device.id: device.host for device in state.machine.devices}
    call = ColocatedFunction(payload, devices, hosts)
    return Function(name, call, devices, tuple(map(_cut, arguments)), tuple(map(_cut, results))), results


def loaded(state: State, function: Function, made: Executable, results: list[LoadedResult]) -> Loaded:
    """What the session keeps of a function that can be run."""
    shapes = [_shard_shape(result) if result.dtype.is_string else None for result in results]
    executable = MakesStrings(state.devices, made, shapes) if any(shape is not None for shape in shapes) else made
    layouts = [p.layout for p in made.metadata.parameters], [r.layout for r in made.metadata.results]
    return Loaded(executable, function.name, function.devices, tuple(results), frozenset(), layouts)


def _check_devices(state: State, name: str, devices: tuple[int, ...]) -> None:
    check_devices(state, devices)
    if not devices or len(set(devices)) != len(devices):
        raise Refused(Code.INVALID_ARGUMENT, f"{name} is for the devices {list(devices)[:16]}")
    kinds = {device.id: device.kind for device in state.machine.devices}
    if others := sorted({kinds[device] for device in devices if not quirks_of(kinds[device]).is_host_memory}):
        raise not_implemented(
            f"{name} is for devices of the kind {', '.join(others)}; this proxy runs functions of "
            "jax.experimental.colocated_python on CPU devices"
        )


def _array(state: State, what: str, devices: tuple[int, ...], spec: Any) -> LoadedResult:
    dtype, shape = dtypes.of_kind(spec.dtype.kind), host_arrays.shape_of(spec.shape)
    sharding = known_sharding(state, spec.sharding)
    if sharding.devices != devices:
        raise not_implemented(
            f"{what} lies on the devices {list(sharding.devices)[:16]}, but the function runs on {list(devices)[:16]}: "
            "all its arrays lie on the same devices, in the same order"
        )
    size = 1 if dtype.is_string else host_arrays.region_bytes(host_arrays.numpy_of(dtype), shape, None)
    if any(length < 0 for length in shape) or size > MOST_ARRAY_BYTES:
        raise Refused(Code.INVALID_ARGUMENT, f"{what} is {dtype.name}{list(shape)}")
    try:
        sharding.tiling(shape).check(shape, len(devices))
    except ValueError as error:
        raise not_implemented(f"{what}: {error}") from None
    return LoadedResult(dtype, shape, sharding, sharding)


def _shard_shape(array: LoadedResult) -> tuple[int, ...]:
    return cell_shape(array.shape, array.sharding.tiling(array.shape), 0)


def _cut(array: LoadedResult) -> Cut:
    """How hosts have it: strings are bytes there, `MOST_BYTES` on each device."""
    if not array.dtype.is_string:
        return Cut(array.shape, host_arrays.numpy_of(array.dtype), array.sharding.tiling(array.shape))
    count = len(array.sharding.devices)
    return Cut((count * MOST_BYTES,), np.dtype(np.uint8), Tiling((count,), tuple(range(count))))
