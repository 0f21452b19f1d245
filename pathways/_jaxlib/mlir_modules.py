"""MLIR modules: parsed, written, walked.

The compiler writes portable modules, and the hosts read them. Most functions need the context that `mlir_context`
enters, for the calling thread.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator, Sequence
from typing import Any

import jaxlib._jax as xla
import numpy as np
from jax._src import dtypes
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import mpmd, sdy, stablehlo

from pathways import errors


@contextlib.contextmanager
def mlir_context() -> Iterator[ir.Context]:
    """Enters an MLIR context with JAX's dialects and `mpmd`."""
    with jax_mlir.make_ir_context() as context, ir.Location.unknown(context):
        mpmd.register_dialect(context)
        sdy.register_dialect(context)
        yield context


def parse(module: bytes | str) -> ir.Module:
    """Parses a module in the context that is entered."""
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
