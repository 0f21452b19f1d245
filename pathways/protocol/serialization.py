"""Turns a `LogicalProgram` into bytes and back, by protobuf. A client sends the bytes once, and the hosts read them.

`load_program` checks only what the bytes alone can show: known dtypes, numbers in range. The binder and the plan's
validator check that the program is correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError

from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, MeshSpec, Node, NodeKind
from pathways.errors import PlanError
from pathways.protocol import program_pb2 as pb

# Protobuf refuses longer messages.
MAX_PROGRAM_BYTES = 2**31 - 1

_KINDS = {NodeKind.CALL: pb.Node.CALL, NodeKind.TRANSFER: pb.Node.TRANSFER}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}


def dump_program(program: LogicalProgram, texts: bool = True) -> bytes:
    """The program as bytes; `texts=False` leaves out the IR texts, which only people read.

    Raises:
        PlanError: it is too long for one message.
    """
    message = pb.LogicalProgram(
        name=program.name,
        meshes=[
            pb.MeshSpec(name=mesh.name, axes=[pb.Axis(name=name, size=size) for name, size in mesh.axes])
            for mesh in program.meshes
        ],
        values=_dump_types(program.values),
        nodes=[
            pb.Node(
                kind=_KINDS[node.kind],
                name=node.name,
                computation=node.computation,
                inputs=node.inputs,
                outputs=node.outputs,
                origin=node.origin,
                transposes=node.transposes,
                donates=node.donates,
            )
            for node in program.nodes
        ],
        arguments=program.arguments,
        results=program.results,
        donated_arguments=program.donated_arguments,
        mpmd_text=program.mpmd_text if texts else "",
        ifrt_text=program.ifrt_text if texts else "",
    )
    for computation in program.computations:
        message.computations.add(
            name=computation.name,
            module=computation.module,
            fingerprint=computation.fingerprint,
            mesh=computation.mesh,
            inputs=_dump_types(computation.inputs),
            outputs=_dump_types(computation.outputs),
            donated=computation.donated,
            callbacks=computation.callbacks,
        )
    modules = sum(len(computation.module) for computation in program.computations)
    if modules > MAX_PROGRAM_BYTES or message.ByteSize() > MAX_PROGRAM_BYTES:
        raise PlanError(
            f"program {program.name!r} takes {max(modules, MAX_PROGRAM_BYTES + 1):,} bytes or more, but at most "
            f"{MAX_PROGRAM_BYTES:,} can be sent: pass big constants as arguments instead of closing over them"
        )
    return message.SerializeToString(deterministic=True)


def load_program(data: bytes) -> LogicalProgram:
    """The program that `dump_program` wrote.

    Raises:
        PlanError: the bytes are no program; the message says what is wrong with them.
    """
    try:
        message = pb.LogicalProgram.FromString(data)
    except DecodeError as error:
        raise PlanError(f"{len(data)} bytes that should be a program cannot be read: {error}") from error
    meshes = tuple(MeshSpec(mesh.name, tuple((axis.name, axis.size) for axis in mesh.axes)) for mesh in message.meshes)
    values = _load_types(message.values, len(meshes))
    computations = tuple(
        Computation(
            name=computation.name,
            module=computation.module,
            fingerprint=computation.fingerprint,
            mesh=_index("mesh", computation.mesh, len(meshes)),
            inputs=_load_types(computation.inputs, len(meshes)),
            outputs=_load_types(computation.outputs, len(meshes)),
            donated=tuple(computation.donated),
            callbacks=tuple(computation.callbacks),
        )
        for computation in message.computations
    )
    return LogicalProgram(
        name=message.name,
        meshes=meshes,
        values=values,
        computations=computations,
        nodes=tuple(_load_node(node, len(values), len(computations)) for node in message.nodes),
        arguments=_indices("value", message.arguments, len(values)),
        results=_indices("value", message.results, len(values)),
        donated_arguments=tuple(message.donated_arguments),
        mpmd_text=message.mpmd_text,
        ifrt_text=message.ifrt_text,
    )


def load_dtype(name: str) -> np.dtype:
    """The element type that NumPy or ml_dtypes gives this name.

    Raises:
        PlanError: no element type has this name.
    """
    try:
        extended = getattr(ml_dtypes, name, None)
        dtype = np.dtype(name if extended is None else extended)
    except TypeError as error:
        raise PlanError(f"unknown element type {name!r}") from error
    if dtype.name != name or dtype.hasobject:
        raise PlanError(f"{name!r} is no element type of arrays on devices")
    return dtype


def _dump_types(types: Sequence[ArrayType]) -> list[pb.ArrayType]:
    return [
        pb.ArrayType(
            shape=each.shape,
            dtype=np.dtype(each.dtype).name,
            mesh=each.mesh,
            spec=[pb.DimSpec(axes=axes) for axes in each.spec],
        )
        for each in types
    ]


def _load_types(types: Iterable[pb.ArrayType], meshes: int) -> tuple[ArrayType, ...]:
    loaded = []
    for each in types:
        if len(each.spec) != len(each.shape):
            raise PlanError(f"an array of {len(each.shape)} dimensions has a spec for {len(each.spec)}")
        if any(size < 0 for size in each.shape):
            raise PlanError(f"an array has the shape {tuple(each.shape)}")
        spec = tuple(tuple(dimension.axes) for dimension in each.spec)
        loaded.append(ArrayType(tuple(each.shape), load_dtype(each.dtype), _index("mesh", each.mesh, meshes), spec))
    return tuple(loaded)


def _load_node(node: pb.Node, values: int, computations: int) -> Node:
    kind = _KINDS_BACK.get(node.kind)
    if kind is None:
        raise PlanError(f"node {node.name!r} is of unknown kind {node.kind}")
    if kind is NodeKind.CALL:
        _index("computation", node.computation, computations)
    return Node(
        kind=kind,
        name=node.name,
        computation=node.computation,
        inputs=_indices("value", node.inputs, values),
        outputs=_indices("value", node.outputs, values),
        origin=node.origin,
        transposes=node.transposes,
        donates=tuple(node.donates),
    )


def _index(what: str, number: int, count: int) -> int:
    if not 0 <= number < count:
        raise PlanError(f"no {what} {number}: the program has {count}")
    return number


def _indices(what: str, numbers: Iterable[int], count: int) -> tuple[int, ...]:
    return tuple(_index(what, number, count) for number in numbers)
