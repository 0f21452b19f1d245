"""Turns dataclasses into protobuf messages and back: a field goes into the message's field of the same name.

A field that the message lacks stays in its process. Where a dataclass has a tuple and the message has a message, the
tuple's items are the message's fields, in order; or all items are its only field. A client sends a `LogicalProgram` as
bytes once, and the hosts read them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import typing
from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from pathways.compiler.ir import (
    MOST_CASES,
    MOST_NESTED,
    ArrayType,
    Computation,
    LogicalProgram,
    Memory,
    Node,
    NodeKind,
    Tiling,
)
from pathways.errors import PlanError
from pathways.protocol import payloads
from pathways.protocol import program_pb2 as pb

#: A client may have programs of so many bytes in all (pathways/controller/program_manager.py).
MAX_PROGRAM_BYTES = 1 << 30

_PLAIN = (int, bool, float, str, bytes)

_T = TypeVar("_T")
_Message = TypeVar("_Message", bound=Message)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def dump(value: Any, kind: type[_Message]) -> _Message:
    """A dataclass as a message of this kind."""
    return kind(**_fields(value, kind.DESCRIPTOR))


def _fields(value: Any, kind: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: _dumped(getattr(value, field.name), field) for field in kind.fields}
    items = [value] if len(kind.fields) == 1 else value
    return {field.name: _dumped(item, field) for field, item in zip(kind.fields, items, strict=True)}


@functools.lru_cache(maxsize=4096)
def _type_message(type: ArrayType) -> pb.ArrayType:
    """A program has many values of few types."""
    return dump(type, pb.ArrayType)


#: The fields of a program but for its values, whose types are sent once each.
_OTHER_FIELDS = [field for field in pb.LogicalProgram.DESCRIPTOR.fields if field.name not in ("types", "values")]

#: What this process remembers of what others sent is bounded: types of more bytes are read each time.
_MOST_REMEMBERED = 1 << 10


@functools.lru_cache(maxsize=4096)
def _read_type(data: bytes) -> ArrayType:
    return load(pb.ArrayType.FromString(data), ArrayType)


def _dumped(item: Any, field: Any) -> Any:
    if field.message_type is pb.ArrayType.DESCRIPTOR:
        return [_type_message(each) for each in item]
    if field.message_type is not None and field.has_presence:
        return None if item is None else _fields(item, field.message_type)
    if field.message_type is not None:
        return [_fields(each, field.message_type) for each in item]
    return item.name if isinstance(item, np.dtype | enum.Enum) else item


def load(message: Message, kind: type[_T]) -> _T:
    """The dataclass that `dump` was given.

    Raises:
        PlanError: an element type or a member of an enum is unknown.
    """
    hints = _hints(typing.cast("Any", kind))
    return kind(
        **{field.name: _loaded(message, field, hints[field.name]) for field in message.DESCRIPTOR.fields},
    )


def _loaded(message: Any, field: Any, hint: Any) -> Any:
    if field.has_presence:
        if not message.HasField(field.name):
            return None
        hint = next(each for each in typing.get_args(hint) or (hint,) if each is not type(None))
    item = getattr(message, field.name)
    if field.enum_type is None:
        return _value(item, hint)
    known = field.enum_type.values_by_number.get(item)
    if known is None or known.name not in hint.__members__:
        which = f" {message.name!r}" if "name" in message.DESCRIPTOR.fields_by_name else ""
        raise PlanError(f"{message.DESCRIPTOR.name.lower()}{which} is of unknown {field.name} {item}")
    return hint[known.name]


def _value(item: Any, hint: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if kinds[-1] is Ellipsis:
            items = getattr(item, item.DESCRIPTOR.fields[0].name) if isinstance(item, Message) else item
            return tuple(items) if kinds[0] in _PLAIN else tuple([_value(each, kinds[0]) for each in items])
        return tuple(_loaded(item, field, each) for field, each in zip(item.DESCRIPTOR.fields, kinds, strict=True))
    if hint is np.dtype:
        return load_dtype(item)
    if hint is ArrayType and len(data := item.SerializeToString()) <= _MOST_REMEMBERED:
        return _read_type(data)
    return load(item, hint) if isinstance(item, Message) else item


def dump_program(program: LogicalProgram, texts: bool = True) -> bytes:
    """The program as bytes; `texts=False` leaves out the IR texts, which only people read.

    Raises:
        PlanError: it is too long for one message, or has loops, which no host runs.
    """
    if program.loops:
        raise PlanError(f"program {program.name!r} has loops: its plans are sent one by one")
    modules = sum(len(computation.module) for computation in program.computations)
    if modules <= MAX_PROGRAM_BYTES:
        numbers = {type: number for number, type in enumerate(dict.fromkeys(program.values))}
        message = pb.LogicalProgram(
            types=map(_type_message, numbers),
            values=map(numbers.__getitem__, program.values),
            **{field.name: _dumped(getattr(program, field.name), field) for field in _OTHER_FIELDS},
        )
        if not texts:
            message.mpmd_text = message.ifrt_text = ""
        if message.ByteSize() <= MAX_PROGRAM_BYTES:
            return message.SerializeToString(deterministic=True)
    raise PlanError(
        f"program {program.name!r} takes {max(modules, MAX_PROGRAM_BYTES + 1):,} bytes or more, but at most "
        f"{MAX_PROGRAM_BYTES:,} can be sent: pass big constants as arguments instead of closing over them"
    )


def load_program(data: bytes) -> LogicalProgram:
    """The program that `dump_program` wrote.

    Checks only what the bytes alone can show: known dtypes, numbers in range. The binder and the plan's validator check
    that the program is correct.

    Raises:
        PlanError: the bytes are no program; the message says what is wrong with them.
    """
    try:
        message = pb.LogicalProgram.FromString(data)
    except DecodeError as error:
        raise PlanError(f"{len(data)} bytes that should be a program cannot be read: {error}") from error
    types: tuple[ArrayType, ...] = _value(message.types, tuple[ArrayType, ...])
    _check("type", message.values, len(types))
    hints = _hints(LogicalProgram)
    others = {field.name: _loaded(message, field, hints[field.name]) for field in _OTHER_FIELDS}
    program = LogicalProgram(values=tuple(map(types.__getitem__, message.values)), **others)
    called = itertools.chain.from_iterable((*each.inputs, *each.outputs) for each in program.computations)
    for array in (*types, *called):
        if len(array.spec) != len(array.shape):
            raise PlanError(f"an array of {len(array.shape)} dimensions has a spec for {len(array.spec)}")
        if any(size < 0 for size in array.shape):
            raise PlanError(f"an array has the shape {array.shape}")
        _check("mesh", [array.mesh], len(program.meshes))
        if array.tiling is not None:
            _check_tiling(array.tiling, array, program.meshes[array.mesh].size)
    _check("mesh", [computation.mesh for computation in program.computations], len(program.meshes))
    is_offloaded = any(type.memory is Memory.HOST for type in types)
    for computation in program.computations:
        _check_move(computation)
        _check_views(computation, program)
        _check_host_call(computation, program)
    for node in program.nodes:
        if node.kind is NodeKind.CALL:
            _check("computation", [node.computation], len(program.computations))
        _check("value", (*node.inputs, *node.outputs), len(program.values))
        _check_node_types(program, node)
        if is_offloaded or (node.kind is NodeKind.CALL and program.computations[node.computation].is_move):
            _check_offloaded(program, node)
        _check_exchange(program, node)
        if node.predicate != -1:
            _check("predicate", [node.predicate], len(program.predicates))
        if node.kind is NodeKind.SELECT and (len(node.inputs) < 2 or len(node.outputs) != 1):
            raise PlanError(f"a select has {len(node.inputs)} inputs and {len(node.outputs)} outputs")
    depths: list[int] = []
    for number, predicate in enumerate(program.predicates):
        _check("value", [predicate.value], len(program.values))
        _check("case", [predicate.case], MOST_CASES)
        if predicate.parent != -1:
            _check("predicate", [predicate.parent], number)  # outer ones come first
        depths.append(1 + (depths[predicate.parent] if predicate.parent != -1 else 0))
        if depths[-1] > MOST_NESTED:
            raise PlanError(f"program {program.name!r} has branches that are nested more than {MOST_NESTED} deep")
    _check("value", (*program.arguments, *program.results), len(program.values))
    if program.decides != -1:
        _check("value", [program.decides], len(program.values))
    return program


def _check_tiling(tiling: Tiling, array: ArrayType, devices: int) -> None:
    try:
        tiling.check(array.shape, devices)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if any(array.spec):
        raise PlanError(f"an array is cut by a tiling, and by the axes {array.spec}")


def _check_views(computation: Computation, program: LogicalProgram) -> None:
    """Views show shards that their inputs have; who has views, or options, is nothing else."""
    views, what = computation.views, f"computation {computation.name!r}"
    if (views or computation.options) and (computation.callbacks or computation.is_move):
        raise PlanError(f"{what} has views or options, and callbacks or a move")
    if not views:
        return
    if computation.module or computation.options or any(computation.donated) or len(views) != len(computation.outputs):
        raise PlanError(f"{what} shows {len(views)} views as {len(computation.outputs)} outputs, or does more")
    for view in views:
        if len({len(view.inputs), len(view.shards), program.meshes[computation.mesh].size}) != 1:
            raise PlanError(f"{what} has a view of {len(view.inputs)} shards on another number of devices")
        _check("input", view.inputs, len(computation.inputs))
        for number, shard in zip(view.inputs, view.shards, strict=True):
            _check("shard", [shard], program.meshes[computation.inputs[number].mesh].size)


def _check_node_types(program: LogicalProgram, node: Node) -> None:
    """A node of views, or of a call of a host function, has the arrays of its computation: hosts take their bytes."""
    called = program.computations[node.computation] if node.kind is NodeKind.CALL else None
    if called is None or not (called.views or called.is_host_call):
        return
    inputs, outputs = (tuple(program.values[value] for value in each) for each in (node.inputs, node.outputs))
    if (inputs, outputs) != (called.inputs, called.outputs):
        raise PlanError(f"node {node.name!r} has arrays of other types than its computation")


def _check_host_call(computation: Computation, program: LogicalProgram) -> None:
    """A call of a host function has one, which the program brings, and arrays on its own devices."""
    if not computation.is_host_call:
        return
    what = f"computation {computation.name!r}"
    if len(computation.callbacks) != 1 or any(computation.donated):
        raise PlanError(f"{what} calls {len(computation.callbacks)} host functions without a module, or donates")
    if computation.callbacks[0] not in {function.number for function in program.host_functions}:
        raise PlanError(f"{what} calls a host function that its program does not have")
    if any(type.mesh != computation.mesh for type in (*computation.inputs, *computation.outputs)):
        raise PlanError(f"{what} calls a host function with arrays on other devices than its own")


def _check_move(computation: Computation) -> None:
    """A computation whose types name host memory copies one array to another memory, and does nothing else."""
    if not computation.is_move:
        return
    types = (*computation.inputs, *computation.outputs)
    if len(types) != 2 or len({dataclasses.replace(type, memory=Memory.HOST) for type in types}) != 1:
        raise PlanError(f"computation {computation.name!r} moves an array to another memory, and its type changes")
    if computation.module or computation.callbacks or any(computation.donated):
        raise PlanError(f"computation {computation.name!r} moves an array to another memory, and has a module")


def _check_offloaded(program: LogicalProgram, node: Node) -> None:
    """Only moves make arrays in host memory, and only moves read them (MEM-1: an array is counted where it lies)."""
    values = tuple(program.values[v] for v in (*node.inputs, *node.outputs))
    called = program.computations[node.computation] if node.kind is NodeKind.CALL else None
    if called is not None and called.is_move:
        if values != (*called.inputs, *called.outputs):
            raise PlanError(f"node {node.name!r} moves arrays of other types than its computation")
    elif any(type.memory is Memory.HOST for type in values):
        raise PlanError(f"node {node.name!r} is no move, and reads or makes an array in host memory")


def _check_exchange(program: LogicalProgram, node: Node) -> None:
    """Of an exchange or a permute: its values are as many as it takes and gives, and have rows for all devices."""
    if node.kind not in (NodeKind.EXCHANGE, NodeKind.PERMUTE):
        return
    if node.kind is NodeKind.EXCHANGE:
        _check("exchange", [node.computation], len(program.exchanges))
    expected = (2, 5) if node.kind is NodeKind.EXCHANGE else (3, 1)
    if (len(node.inputs), len(node.outputs)) != expected:
        raise PlanError(f"{node.kind.value} has {len(node.inputs)} inputs and {len(node.outputs)} outputs")
    for value in (*node.inputs, *node.outputs):
        array = program.values[value]
        devices = math.prod(size for _, size in program.meshes[array.mesh].axes)
        if not array.shape or devices < 1 or array.shape[0] % devices:
            raise PlanError(f"{node.kind.value} of an array of shape {array.shape} on {devices} devices")


def load_dtype(name: str) -> np.dtype:
    """The element type that NumPy or ml_dtypes gives this name.

    Raises:
        PlanError: no element type has this name.
    """
    try:
        dtype = payloads.dtype_of(name)
    except ValueError as error:
        raise PlanError(f"unknown element type {name!r}") from error
    if dtype.name != name:
        raise PlanError(f"{name!r} is no element type of arrays on devices")
    return dtype


def _check(what: str, numbers: Collection[int], count: int) -> None:
    if numbers and not (min(numbers) >= 0 and max(numbers) < count):
        number = next(number for number in numbers if not 0 <= number < count)
        raise PlanError(f"no {what} {number}: the program has {count}")
