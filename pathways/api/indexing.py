"""`x[1]`, `x[8:16]`, `x[..., None]`: where an index starts is an argument, so that one program serves every position.

JAX compiles such an index in, which would mean a program per row or per batch of a loop. An index of anything but
integers, slices, None and Ellipsis is JAX's own affair.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pathways import _jaxlib
from pathways.api.array import Array
from pathways.api.operators import run


@dataclasses.dataclass(frozen=True)
class Shape:
    """A basic index without its positions.

    `sizes` is how much is taken of each dimension, or None if the whole is; `rest` is applied to what was taken.
    """

    sizes: tuple[int | None, ...]
    rest: tuple[Any, ...]


def getitem(array: Array, index: Any, otherwise: Callable[[Array, Any], Any]) -> Any:
    """`array[index]`; `otherwise` is JAX's way to do it."""
    if not _jaxlib.is_top_level():
        return otherwise(array, index)
    basic = split(array.shape, index)
    if basic is None:
        return otherwise(array, index)
    shape, starts = basic
    if not any(size is not None for size in shape.sizes) and all(entry == slice(None) for entry in shape.rest):
        return array
    closed = _indexing(array.aval, shape.sizes, tuple(map(_frozen, shape.rest)), _jaxlib.trace_modes())
    return run(closed, "getitem", [array, np.asarray(starts, np.int32)] if starts else [array])[0]


def split(extents: tuple[int, ...], index: Any) -> tuple[Shape, list[int]] | None:
    """A basic index as its shape and its positions, in bounds; None for any other index.

    Raises:
        IndexError: more indices than dimensions.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    for entry in entries:
        if not (entry is None or entry is Ellipsis or _is_integer(entry) or (
                isinstance(entry, slice) and all(part is None or _is_integer(part)
                                                 for part in (entry.start, entry.stop, entry.step)))):
            return None
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if used > len(extents) or sum(entry is Ellipsis for entry in entries) > 1 or max(extents, default=0) >= 2**31:
        return None  # JAX has the words for it
    if Ellipsis not in entries:
        entries.append(Ellipsis)
    sizes: list[int | None] = []
    rest: list[Any] = []
    starts: list[int] = []
    for entry in entries:
        if entry is None:
            rest.append(None)
        elif entry is Ellipsis:
            whole = len(extents) - used
            sizes += [None] * whole
            rest += [slice(None)] * whole
        elif isinstance(entry, slice):
            extent = extents[len(sizes)]
            start, stop, step = entry.indices(extent)
            taken = len(range(start, stop, step))
            if step == 1 and 0 < taken < extent:
                sizes.append(taken)
                starts.append(start)
                rest.append(slice(None))
            else:
                sizes.append(None)
                rest.append(slice(None) if taken == extent and step == 1 else entry)
        else:
            extent = extents[len(sizes)]
            if extent == 0:
                return None
            at = int(entry) + (extent if entry < 0 else 0)
            sizes.append(1)
            starts.append(min(max(at, 0), extent - 1))  # as JAX: out of bounds means the edge
            rest.append(0)
    return Shape(tuple(sizes), tuple(rest)), starts


def _is_integer(entry: Any) -> bool:
    return isinstance(entry, (int, np.integer)) and not isinstance(entry, bool)


def _frozen(entry: Any) -> Any:
    """Slices are not hashable before Python 3.12."""
    return ("slice", entry.start, entry.stop, entry.step) if isinstance(entry, slice) else entry


@functools.lru_cache(maxsize=1024)
def _indexing(array: Any, sizes: tuple[int | None, ...], rest: tuple[Any, ...], settings: Any) -> Any:
    entries = tuple(slice(*entry[1:]) if isinstance(entry, tuple) else entry for entry in rest)
    moving = [n for n, size in enumerate(sizes) if size is not None]

    def indexing(x: Any, *starts: Any) -> Any:
        if moving:
            at: list[Any] = [0] * x.ndim
            for place, n in enumerate(moving):
                at[n] = starts[0][place]
            x = jax.lax.dynamic_slice(x, at, [x.shape[n] if size is None else size for n, size in enumerate(sizes)])
        return x[entries]

    starts = [jax.ShapeDtypeStruct((len(moving),), np.int32)] if moving else []
    return jax.make_jaxpr(indexing)(jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=array.weak_type), *starts)
