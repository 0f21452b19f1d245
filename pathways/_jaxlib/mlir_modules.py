"""MLIR modules: parsed, written, walked.

The compiler writes portable modules, and the hosts read them. Most functions need the context that `mlir_context`
enters, for the calling thread.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jaxlib._jax as xla
import numpy as np
from jax._src import dtypes
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import mpmd, sdy, stablehlo

from pathways import errors


class _Parsed(threading.local):
    """What the calling thread has parsed in the context that it has entered."""

    bytes = 0


_parsed = _Parsed()
_spare: list[tuple[ir.Context, int]] = []  # a context, and the bytes of the modules that were parsed in it
_MOST_PARSED = 1 << 20  # a context keeps the constants of all its modules; this bounds what a spare one holds


def _new_context() -> ir.Context:
    """A context that nobody else uses. Newer JAX also has contexts that it reuses itself, one for each thread."""
    make: Callable[[], ir.Context] = getattr(jax_mlir, "_create_ir_context", jax_mlir.make_ir_context)
    return make()


@contextlib.contextmanager
def mlir_context() -> Iterator[ir.Context]:
    """Enters an MLIR context with JAX's dialects and `mpmd`.

    To make one takes 2 ms, so one is kept for the next caller: no thread is in it, no error left it, and less than
    `_MOST_PARSED` bytes of modules were parsed in it.
    """
    try:
        context, before = _spare.pop()
    except IndexError:
        context, before = _new_context(), 0
        mpmd.register_dialect(context)
        sdy.register_dialect(context)
    outer, _parsed.bytes = _parsed.bytes, before
    try:
        with context, ir.Location.unknown(context):
            yield context
        if _parsed.bytes < _MOST_PARSED and not _spare:
            _spare.append((context, _parsed.bytes))
    finally:
        _parsed.bytes = outer


def parse(module: bytes | str) -> ir.Module:
    """Parses a module in the context that is entered."""
    _parsed.bytes += len(module)
    return ir.Module.parse(module)


def tensor_type(shape: Sequence[int], dtype: np.dtype) -> ir.Type:
    """The builtin tensor type of a physical shape and dtype, in the context that is entered."""
    return ir.RankedTensorType.get(list(shape), jax_mlir.dtype_to_ir_type(np.dtype(dtype)))


def shape_and_dtype(tensor: ir.Type) -> tuple[tuple[int, ...], np.dtype]:
    """The inverse of `tensor_type`.

    Raises:
        ValueError, KeyError: it is no tensor type, or its elements are of no type that JAX has.
    """
    tensor = ir.RankedTensorType(tensor)
    return tuple(tensor.shape), _element_types()[str(tensor.element_type)]


@functools.cache
def _element_types() -> dict[str, np.dtype]:
    with jax_mlir.make_ir_context():
        known = {str(jax_mlir.dtype_to_ir_type(np.dtype(each))): np.dtype(each) for each in dtypes._jax_types}
        return {**known, "i1": np.dtype(np.bool_)}


def portable_bytecode(module: ir.Module) -> bytes:
    """StableHLO (with `sdy`) as portable bytecode, which any supported jaxlib can read, on any machine."""
    version = stablehlo.get_version_from_compatibility_requirement(stablehlo.StablehloCompatibilityRequirement.WEEK_4)
    return bytes(xla.mlir.serialize_portable_artifact(module, version, True))


def standalone(op: Any) -> bytes:
    """A nested module as bytecode that `parse` reads as a module of its own."""
    buffer = io.BytesIO()
    op.operation.write_bytecode(buffer)
    return buffer.getvalue()


def strip_locations(module: ir.Module) -> None:
    """Drops source locations, in place."""
    passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)


def parse_portable(module: bytes) -> ir.Module:
    """Parses what `portable_bytecode` wrote, in the context that is entered."""
    _parsed.bytes += len(module)
    return xla.mlir.deserialize_portable_artifact(module)


def main_function(module: ir.Module) -> Any:
    """The function `main` of a compiled module."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and ir.StringAttr(op.attributes["sym_name"]).value == "main":
            return op
    raise errors.CompileError("expected a function 'main' in a compiled module")


def drop_main_attributes(module: ir.Module) -> None:
    """Removes the shardings of `main`'s arguments and results: the caller that inlines the module gives them."""
    main = main_function(module)
    for name in ("arg_attrs", "res_attrs"):
        if name in main.attributes:
            del main.attributes[name]


def mesh_axes(module: ir.Module) -> tuple[tuple[str, int], ...]:
    """Axes of the first `sdy.mesh` that has any."""
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            axes = tuple(
                (axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(op.attributes["mesh"]).axes)
            )
            if axes:
                return axes
    return ()


def operations(block: Any) -> Iterator[Any]:
    """Every operation inside, outer ones first. The caller may erase an operation without regions when it gets it."""
    for op in list(block.operations):
        inside = [inner for region in op.operation.regions for inner in region.blocks]
        yield op
        for inner in inside:
            yield from operations(inner)
