"""Modules that were made for their devices elsewhere: compiled as they are, without a trace and without named axes.

A client that speaks XLA's own language sends them. Their shardings are XLA's: tiles, and which device has which of
them. `pathways/host/raw_computations.py` calls these functions; any thread may.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib._jax as xla
import numpy as np
from jax._src import core, dtypes, sharding_impls
from jaxlib import _hlo
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pathways._jaxlib.mlir_modules import (
    main_function,
    mlir_context,
    operations,
    parse,
    parse_portable,
    portable_bytecode,
    shape_and_dtype,
    tensor_type,
)

#: In the first line of a module's text: what outputs take the memory of which inputs.
_ALIASES = re.compile(r"input_output_alias=\{(.*?)\}(?:, [a-z_]+=|\s*$)")
_ALIASED = re.compile(r"\((\d+), \{")
#: Custom calls that have numbers or addresses of Python objects; and how bytecode begins.
_CALLS_PYTHON, _BYTECODE = re.compile(rb"InspectSharding|CustomSPMDPartitioning|xla_\w*callback"), b"ML\xefR"
#: The attribute of a parameter or a result of a module that says how it lies in memory.
_LAYOUT = "mhlo.layout_mode"


@dataclasses.dataclass(frozen=True)
class Form:
    """What XLA says of a compiled module. Shardings are serialized `OpSharding`s, () where XLA has none."""

    parameter_shardings: tuple[bytes, ...]
    output_shardings: tuple[bytes, ...]
    output_memory_kinds: tuple[str, ...]
    parameter_layouts: tuple[str, ...]
    output_layouts: tuple[str, ...]
    donated: tuple[int, ...]
    fingerprint: bytes
    text: str


def compile_raw(module: bytes, options: bytes, devices: Sequence[jax.Device]) -> Any:
    """Compiles a portable module for these devices. Its options name other ones, in the same order.

    Raises:
        RuntimeError, ValueError: XLA refused it.
        NotImplementedError: see `refuse_calls_of_python`.
    """
    refuse_calls_of_python(module)
    parsed = xla.CompileOptions.ParseFromString(options)
    count = parsed.num_replicas * parsed.num_partitions
    if count != len(devices):
        raise ValueError(f"a module for {count} devices, and {len(devices)} were given")
    numbers = np.array([device.id for device in devices], dtype=np.int64)
    parsed.device_assignment = xla.DeviceAssignment.create(numbers.reshape(parsed.num_replicas, parsed.num_partitions))
    _name_no_files(parsed)
    parsed.compile_portable_executable = False  # such a one runs where its arguments are, and has none perhaps
    return devices[0].client.compile_and_load(module, xla.DeviceList(tuple(devices)), parsed)


def _name_no_files(options: Any) -> None:
    """Takes out of a client's options what would make XLA write or read files of this machine."""
    debug = options.executable_build_options.debug_options
    debug.xla_enable_dumping = False
    for name in dir(debug):
        if name.startswith("xla_") and re.search(r"_(to|dir|file|from)$", name):
            setattr(debug, name, "")
    options.env_option_overrides = [
        (name, value) for name, value in options.env_option_overrides if not re.search(r"dump|dir|file|path|from", name)
    ]


def signature_of(module: bytes) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    """The name of a portable module, and shape and element type of each of its parameters and results.

    Raises:
        ValueError: it cannot be read, or takes or gives what is no array.
    """
    with mlir_context():
        parsed = _read(module)
        name = (
            ir.StringAttr(parsed.operation.attributes["sym_name"]).value
            if "sym_name" in parsed.operation.attributes
            else "main"
        )
        main = main_function(parsed).type
        try:
            parameters, results = (tuple(map(shape_and_dtype, types)) for types in (main.inputs, main.results))
        except (ValueError, KeyError) as error:
            raise ValueError(f"module {name!r} takes or gives what is no array: {error}") from None
    return name, parameters, results


def _read(module: bytes) -> ir.Module:
    try:
        return parse_portable(module)
    except Exception:  # not portable: text, or plain bytecode
        try:
            return parse(module)
        except Exception as error:
            raise ValueError(f"a module that cannot be read: {error}") from None


def refuse_calls_of_python(module: bytes) -> None:
    """Refuses a module whose custom calls name Python objects by numbers or addresses: XLA would look for them in the
    process that compiles or runs it, which is not the one that has them (TRUST-1).

    Raises:
        NotImplementedError: it has such a call.
        ValueError: it cannot be read.
    """
    if module.startswith(_BYTECODE) and not _CALLS_PYTHON.search(module):
        return  # bytecode has names as they are; text may have them otherwise
    with mlir_context():
        for op in operations(_read(module).body):
            if op.operation.name != "stablehlo.custom_call":
                continue
            target = ir.StringAttr(op.attributes["call_target_name"]).value
            if _CALLS_PYTHON.search(target.encode()):
                raise NotImplementedError(
                    f"a program that calls a Python function as it is compiled or runs ({target}; custom_partitioning, "
                    "inspect_array_sharding, callbacks) cannot run in another process, which does not have the function"
                )


def by_default_layouts(module: bytes) -> tuple[bytes, tuple[str, ...], tuple[str, ...]]:
    """A module whose arrays lie in memory as their devices have them by default; and XLA's text of the layout that each
    parameter and each result had in `module`, "" for one that had none.

    Raises:
        ValueError: it cannot be read.
    """
    if _LAYOUT.encode() not in module:
        return module, (), ()
    with mlir_context():
        parsed = _read(module)
        main = main_function(parsed)
        parameters, results = (_take_layouts(main, name) for name in ("arg_attrs", "res_attrs"))
        return portable_bytecode(parsed), parameters, results


def _take_layouts(main: Any, name: str) -> tuple[str, ...]:
    if name not in main.attributes:
        return ()
    found, kept = [], []
    for each in map(ir.DictAttr, ir.ArrayAttr(main.attributes[name])):
        mode = ir.StringAttr(each[_LAYOUT]).value if _LAYOUT in each else ""
        found.append(mode if mode.startswith("{") else "")  # else "default", or "auto": as the compiler likes
        kept.append(ir.DictAttr.get({own.name: own.attr for own in each if own.name != _LAYOUT}))
    main.attributes[name] = ir.ArrayAttr.get(kept)
    return tuple(found)


def without_tokens(module: bytes) -> bytes:
    """A module whose main function has empty arrays for the tokens that it takes or gives. JAX passes one for a token,
    too. Within the module, tokens order effects as before; between modules, the order of runs does.

    Raises:
        ValueError: it cannot be read.
    """
    with mlir_context():
        parsed = _read(module)
        main = main_function(parsed)
        token, empty = stablehlo.TokenType.get(), tensor_type((0,), np.dtype(np.bool_))
        kind = main.type
        if token not in (*kind.inputs, *kind.results):
            return module
        block = main.entry_block
        with main.operation.location, ir.InsertionPoint.at_block_begin(block):
            none = stablehlo.ConstantOp(ir.Attribute.parse(f"dense<> : {empty}"))
            for argument in block.arguments:
                if argument.type == token:
                    argument.replace_all_uses_with(stablehlo.CreateTokenOp().result)
                    argument.set_type(empty)
        given = list(block.operations)[-1].operation
        for number, value in enumerate(given.operands):
            if value.type == token:
                given.operands[number] = none.result
        for name, types in (("arg_attrs", kind.inputs), ("res_attrs", kind.results)):
            if name in main.attributes:  # the sharding of a token is not one of an array
                attributes = zip(ir.ArrayAttr(main.attributes[name]), types, strict=True)
                main.attributes[name] = ir.ArrayAttr.get(
                    [ir.DictAttr.get({}) if type == token else each for each, type in attributes]
                )
        inputs, results = (
            [empty if each == token else each for each in types] for types in (kind.inputs, kind.results)
        )
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))
        return portable_bytecode(parsed)


def bitcast_module(
    shape: tuple[int, ...], dtype: np.dtype, made_shape: tuple[int, ...], made_dtype: np.dtype, devices: int
) -> tuple[bytes, bytes]:
    """A portable module by which each of so many devices takes an array, and makes one of the same bytes of it; and
    options to compile it with.

    Raises:
        NotImplementedError: XLA does not say which bytes they are: of complex numbers, booleans, and numbers of less
            than a byte.
    """
    bits, made_bits = (0 if dtype == made_dtype else _bits(each) for each in (dtype, made_dtype))
    count = math.prod(made_shape)
    ratio = max(bits, made_bits) // min(bits, made_bits) if bits else 1
    flat = (count * made_bits // bits,) if bits > made_bits else (count,)
    # XLA puts parts that make one element, or are made of one, in the last dimension.
    taken = flat if bits >= made_bits else (count, ratio)
    given = flat if bits <= made_bits else (*flat, ratio)
    with mlir_context():
        types = [
            tensor_type(*each)
            for each in ((shape, dtype), (taken, dtype), (given, made_dtype), (made_shape, made_dtype))
        ]
        cast = "stablehlo.bitcast_convert" if bits else "stablehlo.reshape"
        lines = [f"module @bitcast {{ func.func public @main(%0: {types[0]}) -> {types[3]} {{"]
        for number, what in enumerate(("stablehlo.reshape", cast, "stablehlo.reshape")):
            lines.append(f"%{number + 1} = {what} %{number} : ({types[number]}) -> {types[number + 1]}")
        module = portable_bytecode(parse("\n".join((*lines, f"return %3 : {types[3]} }} }}"))))
    options = xla.CompileOptions()
    options.num_replicas = devices
    return module, options.SerializeAsString()


def _bits(dtype: np.dtype) -> int:
    bits = dtypes.itemsize_bits(dtype)
    if dtype.kind in "bc" or bits % 8:
        raise NotImplementedError(f"the bytes of an array of {dtype} as those of another type")
    return bits


def form_of(executable: Any) -> Form:
    """What XLA says of an executable."""
    text = "\n\n".join(module.to_string() for module in executable.hlo_modules())
    aliases = _ALIASES.search(text.split("\n", 1)[0])
    donated = {int(number) for number in _ALIASED.findall(aliases[1])} if aliases else set()
    kinds = executable.get_output_memory_kinds()
    return Form(
        tuple(each.SerializeToString() for each in executable.get_parameter_shardings() or ()),
        tuple(each.SerializeToString() for each in executable.get_output_shardings() or ()),
        tuple(kinds[0]) if kinds else (),
        tuple(map(str, executable.get_parameter_layouts())),
        tuple(map(str, executable.get_output_layouts())),
        tuple(sorted(donated)),
        executable.fingerprint or b"",
        text,
    )


def raw_call(
    executable: Any,
    outputs: Sequence[tuple[tuple[int, ...], np.dtype, Any]],
    copied: Sequence[int],
    moved: Sequence[int] = (),
) -> Callable[..., Any]:
    """A call of an executable: arrays in, a list of arrays out.

    Args:
        executable: as `compile_raw` gives it.
        outputs: shape, element type and sharding of each.
        copied: the inputs of which it gets copies, because it donates them and the caller keeps them.
        moved: the outputs that it makes in another memory of the device, and that are moved to the default one.
    """
    handlers = [_result_handler(core.ShapedArray(shape, dtype), sharding) for shape, dtype, sharding in outputs]
    execute = executable.execute_sharded

    def call(*arrays: Any) -> Any:
        return execute(arrays).consume_with_handlers(handlers)

    def call_on_copies(*arrays: Any) -> Any:
        given = list(arrays)
        for number in copied:
            given[number] = _copy(given[number])
        made = execute(given).consume_with_handlers(handlers)
        for number in moved:
            made[number] = _in_default_memory(made[number])
        return made

    return call_on_copies if copied or moved else call


def _result_handler(aval: Any, sharding: Any) -> Any:
    """What makes a result of an executable an array, without a check."""
    try:
        return xla.array_result_handler(aval, sharding, True, True)
    except TypeError:  # jaxlib 0.12.0.1 never checks
        return xla.array_result_handler(aval, sharding, True)


def _in_default_memory(array: Any) -> Any:
    """An array that lies in the devices' default memory, shard by shard."""
    shards, places, targets = array._arrays, [], []
    for shard in shards:
        (device,) = shard.devices()
        places.append(xla.DeviceList((device,)))
        targets.append(sharding_impls.SingleDeviceSharding(device, memory_kind=device.default_memory().kind))
    semantics = [xla.ArrayCopySemantics.ALWAYS_COPY] * len(shards)
    moved = xla.batched_copy_array_to_devices_with_sharding(shards, places, targets, semantics)
    return shown(array.aval, array.sharding, moved)


def _copy(array: Any) -> Any:
    """An array with memory of its own, shard by shard: other processes need not take part."""
    shards = [shard.copy() for shard in array._arrays]
    return shown(array.aval, array.sharding, shards)


def shown(aval: Any, sharding: Any, shards: Sequence[Any]) -> Any:
    """An array that consists of these local arrays of one device each, in the order of the sharding's local devices."""
    return xla.ArrayImpl(aval, sharding, list(shards), True, True)


def tiled_sharding(devices: Sequence[jax.Device], grid: Sequence[int], cells: Sequence[int]) -> Any:
    """The sharding by which devices[i] holds part `cells[i]` of an array that is cut into `grid` parts per dimension.
    Each part lies on equally many devices.
    """
    return sharding_impls.GSPMDSharding(tuple(devices), _hlo.HloSharding.from_proto(_op_sharding(grid, cells)))


def op_sharding(grid: Sequence[int], cells: Sequence[int]) -> bytes:
    """The same as a serialized `OpSharding`."""
    return bytes(_op_sharding(grid, cells).SerializeToString())


def _op_sharding(grid: Sequence[int], cells: Sequence[int]) -> Any:
    op = _hlo.OpSharding()
    count = math.prod(grid)
    if count == 1:
        op.type = _hlo.OpSharding.Type.REPLICATED
        return op
    replicas = len(cells) // count
    op.type = _hlo.OpSharding.Type.OTHER
    op.tile_assignment_dimensions = [*grid, replicas] if replicas > 1 else list(grid)
    op.tile_assignment_devices = sorted(range(len(cells)), key=lambda number: cells[number])
    op.replicate_on_last_tile_dim = replicas > 1
    return op


def tiles_of(sharding: bytes, dimensions: int, devices: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """What a serialized `OpSharding` says for an array of so many dimensions on so many devices: the grid, the cells
    (see `tiled_sharding`), and whether devices of one cell hold the same. Otherwise each has a part of a sum, or what a
    program by hand has given it.

    Raises:
        ValueError: it does not cut into whole tiles.
    """
    op = _hlo.OpSharding()
    op.ParseFromString(sharding)
    found = _hlo.HloSharding.from_proto(op)
    if found.is_replicated() or found.is_maximal():
        return (1,) * dimensions, (0,) * devices, True
    if found.is_unreduced() or found.is_manual():
        return (1,) * dimensions, (0,) * devices, False
    if not found.is_tiled():
        raise ValueError(f"a sharding that does not cut an array into tiles: {found}")
    sizes = list(found.tile_assignment_dimensions())
    replicas = math.prod(sizes[dimensions:])
    order = list(found.tile_assignment_devices())
    if len(order) != devices or len(sizes) < dimensions:
        raise ValueError(f"a sharding for {len(order)} devices and {len(sizes)} dimensions: {found}")
    cells = [0] * devices
    for place, number in enumerate(order):
        cells[number] = place // replicas
    alike = all(kind == _hlo.OpSharding.Type.REPLICATED for kind in found.subgroup_types())
    return tuple(sizes[:dimensions]), tuple(cells), alike
