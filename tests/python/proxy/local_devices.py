"""What lies behind the door in these tests: the JAX of the server's own process, with eight CPU devices.

A buffer is a list of JAX arrays on one device each. Whatever takes time is done by a thread, so that the door sees
callbacks of other threads.
"""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax._src import core
from jax._src.interpreters import mlir as jax_mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxlib import _jax, lapack
from jaxlib.mlir import ir

from pathways import errors
from pathways.compiler.ir import Tiling
from pathways.proxy.array_making import part_of
from pathways.proxy.behind import (
    AllShards,
    Buffer,
    DeviceInfo,
    ExecutableMetadata,
    Function,
    Graph,
    Machine,
    Parameter,
    Part,
    Result,
    Shard,
)

DTYPES = {
    "i1": "bool", "ui4": "uint4", "i4": "int4", "ui2": "uint2", "i2": "int2", "bf16": "bfloat16", "f16": "float16",
    "f32": "float32", "f64": "float64", "complex<f32>": "complex64", "complex<f64>": "complex128",
    "f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2",
    "f8E4M3": "float8_e4m3", "f8E3M4": "float8_e3m4", "f4E2M1FN": "float4_e2m1fn",
}  # fmt: skip
for bits in (8, 16, 32, 64):
    DTYPES |= {f"i{bits}": f"int{bits}", f"ui{bits}": f"uint{bits}"}
MEMORY = (
    "generated_code_size_in_bytes",
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def memories_of(device: Any) -> tuple[str, ...]:
    default = device.default_memory().kind
    return (default, *(memory.kind for memory in device.addressable_memories() if memory.kind != default))


class LocalBuffer:
    """See `pathways.proxy.behind.Buffer`."""

    def __init__(
        self, owner: LocalDevices, arrays: Sequence[Any], devices: tuple[int, ...], memory_kind: str, is_token: bool
    ) -> None:
        self.owner, self.arrays, self.devices, self.memory_kind = owner, list(arrays), devices, memory_kind
        self.shape = () if is_token else tuple(arrays[0].shape)
        self.dtype = None if is_token else np.dtype(arrays[0].dtype)
        owner.alive += 1

    def __del__(self) -> None:
        self.owner.alive -= 1

    def when_ready(self, then: Callable[[BaseException | None], None]) -> None:
        arrays = list(self.arrays)

        def wait() -> None:
            try:
                for array in arrays:
                    array.block_until_ready()
            except Exception as error:
                then(error)
            else:
                then(None)

        self.owner.pool.submit(wait)

    def delete(self) -> None:
        for array in self.arrays:
            array.delete()


class LocalDevices:
    """See `pathways.proxy.behind.Devices`. `room` is what a device has for buffers, in bytes; None: no limit."""

    def __init__(self, room: int | None = None) -> None:
        lapack._lapack.initialize()
        jax.config.update("jax_enable_x64", True)  # the client has said which types it means
        self.client = jax.devices()[0].client
        self.by_id = {device.id: device for device in self.client.devices()}
        self.pool = concurrent.futures.ThreadPoolExecutor(8)
        self.alive = 0
        self.calls: list[str] = []  # what the door has asked for
        self.is_closed = False
        self.room = room

    def describe(self) -> Machine:
        return Machine(
            self.client.platform,
            self.client.platform_version,
            tuple(
                DeviceInfo(
                    device.id,
                    device.device_kind,
                    0,
                    device.id // 2,
                    memories_of(device),
                    {"core": device.id},
                )
                for device in self.by_id.values()
            ),
        )

    def _place(self, device: int, memory_kind: str) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.by_id[device], memory_kind=memory_kind or None)

    def _buffer(self, arrays: Sequence[Any], devices: tuple[int, ...], memory_kind: str) -> LocalBuffer:
        return LocalBuffer(self, arrays, devices, memory_kind, False)

    def _onto(self, value: Any, device: int, memory_kind: str) -> Any:
        aval = core.ShapedArray(value.shape, value.dtype)
        place = self._place(device, memory_kind)
        return _jax.batched_device_put(aval, place, [value], [self.by_id[device]], True)

    def put(self, devices: tuple[int, ...], memory_kind: str, shards: Sequence[np.ndarray[Any, Any]]) -> LocalBuffer:
        self.calls.append("put")
        if self.room is not None and sum(shard.nbytes for shard in shards) > self.room:
            raise errors.ResourceExhaustedError(f"a put of {sum(s.nbytes for s in shards)} bytes; room is {self.room}")
        return self._buffer(
            [self._onto(np.array(shard), device, memory_kind) for shard, device in zip(shards, devices, strict=True)],
            devices,
            memory_kind,
        )

    def fetch(self, shard: Shard, then: Callable[[Any], None]) -> None:
        self.calls.append("fetch")
        array = shard.buffer.arrays[shard.number]  # type: ignore[attr-defined]

        def read() -> None:
            try:
                values = np.asarray(array)
            except Exception as error:
                then(error)
            else:
                then(values)

        self.pool.submit(read)

    def copy(self, shards: Sequence[Shard], devices: tuple[int, ...], memory_kind: str) -> LocalBuffer:
        self.calls.append("copy")
        arrays = [shard.buffer.arrays[shard.number] for shard in shards]  # type: ignore[attr-defined]
        return self._buffer(
            [self._onto(array, device, memory_kind) for array, device in zip(arrays, devices, strict=True)],
            devices,
            memory_kind,
        )

    def reshard(
        self,
        shards: Sequence[Shard],
        source: Tiling,
        devices: tuple[int, ...],
        target: Tiling,
        shape: tuple[int, ...],
        memory_kind: str,
    ) -> LocalBuffer:
        self.calls.append("reshard")
        whole = np.empty(shape, shards[0].buffer.dtype)
        for number, shard in enumerate(shards):
            part_of_whole(whole, source, number)[...] = np.asarray(shard.buffer.arrays[shard.number])  # type: ignore[attr-defined]
        parts = [np.ascontiguousarray(part_of(whole, target, number)) for number in range(len(devices))]
        return self.put(devices, memory_kind, parts)

    def bitcast(self, shards: Sequence[Shard], dtype: np.dtype[Any], shape: tuple[int, ...]) -> LocalBuffer:
        self.calls.append("bitcast")
        values = [np.asarray(shard.buffer.arrays[shard.number]).view(dtype).reshape(shape) for shard in shards]  # type: ignore[attr-defined]
        return self.put(tuple(shard.device for shard in shards), shards[0].buffer.memory_kind, values)

    def compile(self, part: Part, then: Callable[[Any], None]) -> None:
        self.calls.append("compile")

        def work() -> None:
            try:
                made = LocalExecutable(self, part.module.data, part.options, part.devices)
            except Exception as error:
                then(error)
            else:
                then(made)

        self.pool.submit(work)

    def default_layout(self, dtype: np.dtype[Any], shape: tuple[int, ...], device: int, memory_kind: str) -> str:
        return "{" + ",".join(map(str, reversed(range(len(shape))))) + "}"

    def join(self, graph: Graph, then: Callable[[Any], None]) -> None:
        then(NotImplementedError("these devices join no programs"))

    def load(self, function: Function, then: Callable[[Any], None]) -> None:
        then(NotImplementedError("these devices call no functions"))

    def tidy(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
        self.pool.shutdown(wait=False)


def part_of_whole(whole: np.ndarray[Any, Any], tiling: Tiling, number: int) -> np.ndarray[Any, Any]:
    """A view, also of what is not cut."""
    return part_of(whole, tiling, number)


class LocalExecutable:
    """See `pathways.proxy.behind.Executable`."""

    def __init__(self, owner: LocalDevices, module: bytes, options: bytes, devices: tuple[int, ...]) -> None:
        self.owner, self.devices = owner, devices
        self.ran: list[Any] = []
        device_list = _jax.DeviceList(tuple(owner.by_id[device] for device in devices))
        parsed = _jax.CompileOptions.ParseFromString(options)
        name, types = results_of(module)
        self.loaded = owner.client.compile_and_load(module, device_list, parsed)
        self.metadata = metadata_of(self.loaded, name, types)
        self.mesh = NamedSharding(Mesh(np.array([owner.by_id[d] for d in devices]), "x"), PartitionSpec())

    def execute(self, arguments: Sequence[Sequence[Shard]], kept: Collection[int]) -> list[LocalBuffer]:
        self.owner.calls.append("execute")
        self.ran = [(shards[0].buffer.shape, shards[0].buffer.dtype) for shards in arguments]
        arrays = []
        for number, shards in enumerate(arguments):
            parts = [shard.buffer.arrays[shard.number] for shard in shards]  # type: ignore[attr-defined]
            if number in kept and number in self.metadata.donated:
                parts = [self.owner._onto(np.asarray(part), d, "") for part, d in zip(parts, self.devices, strict=True)]
            arrays.append(self._joined(parts))
        outcome = self.loaded.execute_sharded(arrays).disassemble_into_single_device_arrays()
        return [
            LocalBuffer(self.owner, parts, self.devices, result.memory_kind, result.dtype == "token")
            for parts, result in zip(outcome, self.metadata.results, strict=True)
        ]

    def run_again(self, arguments: Sequence[Buffer]) -> list[LocalBuffer] | None:
        if [(each.shape, each.dtype) for each in arguments] != self.ran:
            return None
        return self.execute([AllShards(each) for each in arguments], ())

    def _joined(self, parts: list[Any]) -> Any:
        if len(parts) == 1:
            return parts[0]
        aval = core.ShapedArray(parts[0].shape, parts[0].dtype)
        return _jax.ArrayImpl(aval, self.mesh, parts, True, _skip_checks=True)


def results_of(module: bytes) -> tuple[str, list[tuple[tuple[int, ...], str]]]:
    """The name of a module, and the shapes and types of its main function's results."""
    with jax_mlir.make_ir_context():
        parsed = _jax.mlir.deserialize_portable_artifact(module)
        if not isinstance(parsed, ir.Module):
            parsed = ir.Module.parse(parsed)
        name = ir.StringAttr(parsed.operation.attributes["sym_name"]).value
        main = next(op for op in parsed.body.operations if "main" in str(op.attributes["sym_name"]))
        types = []
        for each in main.type.results:
            if "token" in str(each):
                types.append(((), "token"))
            else:
                tensor = ir.RankedTensorType(each)
                types.append((tuple(tensor.shape), DTYPES[str(tensor.element_type)]))
        return name, types


def metadata_of(loaded: Any, name: str, types: Sequence[tuple[tuple[int, ...], str]]) -> ExecutableMetadata:
    text = loaded.hlo_modules()[0].to_string()
    head = text.split("\n", 1)[0]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, (entry|buffer)", head)
    donated = sorted({int(n) for n in re.findall(r"\((\d+), \{", aliases[1])}) if aliases else []
    shard_shapes = [tuple(shape.dimensions()) if shape.is_array() else () for shape in result_shapes(loaded)]
    stats = loaded.get_compiled_memory_stats()
    layouts = [str(each) for each in loaded.get_parameter_layouts()]
    shardings = loaded.get_parameter_shardings() or [None] * len(layouts)
    results = zip(
        types,
        shard_shapes,
        loaded.get_output_shardings() or [None] * len(types),
        loaded.get_output_layouts(),
        loaded.get_output_memory_kinds()[0],
        strict=True,
    )
    return ExecutableMetadata(
        name=name,
        fingerprint=loaded.fingerprint or b"",
        parameters=tuple(
            Parameter(None if sharding is None else sharding.SerializeToString(), layout)
            for sharding, layout in zip(shardings, layouts, strict=True)
        ),
        results=tuple(
            Result(shape, dtype, shard, None if sharding is None else sharding.SerializeToString(), str(layout), memory)
            for (shape, dtype), shard, sharding, layout, memory in results
        ),
        donated=tuple(donated),
        memory={name: getattr(stats, name) for name in MEMORY if hasattr(stats, name)},
        code_bytes=loaded.size_of_generated_code_in_bytes(),
        cost={key: value for key, value in loaded.cost_analysis().items() if isinstance(value, int | float | str)},
        text=text,
    )


def result_shapes(loaded: Any) -> list[Any]:
    """XLA's shapes of the results of one partition."""
    shape = _hlo_result(loaded)
    return list(shape.tuple_shapes()) if shape.is_tuple() else [shape]


def _hlo_result(loaded: Any) -> Any:
    from jaxlib import _hlo

    module = loaded.hlo_modules()[0]
    return _hlo.XlaComputation(module.as_serialized_hlo_module_proto()).program_shape().result_shape()
