"""Reads MLIR's types and shardings, as text, into `ir` terms. Pure; used by `lower`."""

from __future__ import annotations

import dataclasses
import functools
import re

import ml_dtypes
import numpy as np

from pathways import errors
from pathways.compiler.ir import Spec

_DTYPES: dict[str, np.dtype] = {
    "i1": np.dtype(np.bool_),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "complex<f32>": np.dtype(np.complex64),
    "complex<f64>": np.dtype(np.complex128),
    **{f"i{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"ui{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    **{
        text: np.dtype(getattr(ml_dtypes, name))
        for text, name in (
            ("i2", "int2"),
            ("i4", "int4"),
            ("ui2", "uint2"),
            ("ui4", "uint4"),
            ("f4E2M1FN", "float4_e2m1fn"),
            ("f8E3M4", "float8_e3m4"),
            ("f8E4M3", "float8_e4m3"),
            ("f8E4M3FN", "float8_e4m3fn"),
            ("f8E4M3FNUZ", "float8_e4m3fnuz"),
            ("f8E4M3B11FNUZ", "float8_e4m3b11fnuz"),
            ("f8E5M2", "float8_e5m2"),
            ("f8E5M2FNUZ", "float8_e5m2fnuz"),
            ("f8E8M0FNU", "float8_e8m0fnu"),
        )
        if hasattr(ml_dtypes, name)
    },
}
_DIM = re.compile(r"\{([^{}]*)\}")
_AXIS = re.compile(r'"([^"]*)"(:\(\d+\)\d+)?')


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
    """Parses `!mpmd.mesh_tensor<"m0", tensor<4x8xf32>, sharding=<@m0, [{"x"}, {}]>>`."""
    mesh = re.match(r'!mpmd\.mesh_tensor<"([^"]*)"', text)
    tensor = re.search(r"tensor<((?:\d+x)*)((?:complex<\w+>)|\w+)>", text[mesh.end() :] if mesh else text)
    if mesh is None or tensor is None or tensor[2] not in _DTYPES:
        raise errors.CompileError(f"expected the type of an array on a mesh, got {text}")
    shape = tuple(int(n) for n in tensor[1].split("x")[:-1])
    sharding = re.search(r"sharding=<@([\w$.]+), (.*)>>$", text)
    spec, split = sharding_text(sharding[2], len(shape)) if sharding else (((),) * len(shape), False)
    of = sharding[1] if sharding and any(spec) else mesh[1]
    return TensorOnMesh(shape, _DTYPES[tensor[2]], mesh[1], spec, split, of)


def sharding_text(text: str, rank: int) -> tuple[Spec, bool]:
    """Parses `[{"x"}, {"y", ?}], replicated={...}`: the spec, and whether part of an axis cuts some dimension."""
    if "unreduced=" in text:
        raise errors.ShardingError(
            f"a value crosses computations as unreduced partial sums ({text}), which is not "
            "supported; reduce it inside the function that makes it"
        )
    dims = _DIM.findall(text[: text.index("]")] if "]" in text else text)
    if len(dims) != rank:
        raise errors.CompileError(f"expected a sharding of {rank} dimensions, got {text}")
    spec: list[tuple[str, ...]] = []
    split = False
    for dim in dims:
        axes: list[str] = []
        for axis, part in _AXIS.findall(dim):
            if part:
                split = True
                break
            axes.append(axis)
        spec.append(tuple(axes))
    return tuple(spec), split
