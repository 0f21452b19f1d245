"""Reads MLIR's types and shardings into `ir` terms, in the MLIR context that is entered; used by `lower`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import numpy as np

from pathways import _jaxlib, errors
from pathways._jaxlib import ir, sdy
from pathways.compiler.ir import Spec


@dataclasses.dataclass(frozen=True)
class TensorOnMesh:
    """One value's type. `mesh` is the compiler's symbol of its mesh, `of` the symbol of the mesh whose axes cut it.

    `split` is true if the value is cut by part of an axis, which no `Spec` can express. In `spec`, such a dimension
    then has only the axes before that part.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    mesh: str
    spec: Spec
    split: bool = False
    of: str = ""


@functools.lru_cache(maxsize=4096)
def mesh_tensor(text: str) -> TensorOnMesh:
    """Reads `!mpmd.mesh_tensor<"m0", tensor<4x8xf32>, sharding=<@m0, [{"x"}, {}]>>`."""
    found = re.match(r'!mpmd\.mesh_tensor<"([^"]*)", (tensor<[^,]*>)(?:.*, sharding=(<.*>))?.*>$', text)
    try:
        mesh, tensor, sharding = found.groups()  # type: ignore[union-attr]
        shape, dtype = _jaxlib.shape_and_dtype(ir.Type.parse(tensor))
    except (AttributeError, ValueError, KeyError, ir.MLIRError) as error:
        raise errors.CompileError(f"expected the type of an array on a mesh, got {text}") from error
    if sharding is None:
        return TensorOnMesh(shape, dtype, mesh, ((),) * len(shape), of=mesh)
    cut = sdy.TensorShardingAttr(ir.Attribute.parse(f"#sdy.sharding{sharding}"))
    if len(cut.unreduced_axes):
        words = sharding[sharding.index("[") : -1]
        raise errors.ShardingError(
            f"a value crosses computations as unreduced partial sums ({words}), which is not "
            "supported; reduce it inside the function that makes it"
        )
    dimensions = [
        [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(each).axes] for each in cut.dimension_shardings
    ]
    whole = [list(itertools.takewhile(lambda axis: axis.sub_axis_info is None, axes)) for axes in dimensions]
    spec = tuple(tuple(axis.name for axis in axes) for axes in whole)
    of = ir.FlatSymbolRefAttr(cut.mesh_or_ref).value if any(spec) else mesh
    return TensorOnMesh(shape, dtype, mesh, spec, whole != dimensions, of)
