"""One value of this process as an array of a slice: checked against the layout, then sent."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pathways import _core, _jaxlib, errors
from pathways.api.arrays import transfer_guard
from pathways.api.arrays.array import Array
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler.ir import ArrayType


def physical(shape: tuple[int, ...], dtype: Any, slice_: Slice, spec: Any) -> ArrayType:
    """The physical type of an array: PRNG keys are their words, complex numbers their parts."""
    full, words = _jaxlib.physical_struct(shape, dtype)
    return ArrayType(full, words, 0, (*spec, *((),) * (len(full) - len(shape))))


def put_leaf(leaf: Any, layout: _core.Layout, what: object, *, is_explicit: bool = False) -> Array:
    """One host value as an array of `layout`. The bytes are copied, once, before this returns: on CPU the devices then
    show that copy as it is. `is_explicit`: the user has asked for just this transfer."""
    if isinstance(leaf, Array):
        if leaf.layout is layout:
            return leaf
        raise errors.ProgramError(
            f"{what}: expected {layout.dtype}{list(layout.shape)} on {layout.slice!r} with spec={layout.cache.spec}, "
            f"got {leaf!r}; pw.device_put moves it, and cuts it in another way"
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise errors.ProgramError(
            f"{what} is {leaf!r}, which has a shape and a dtype but no value; give an array (`lower` takes it)"
        )
    transfer_guard.check("host-to-device", what, leaf, is_explicit=is_explicit)
    return put_physical(_jaxlib.to_physical(leaf, layout.dtype), layout, what)


def put_physical(leaf: Any, layout: _core.Layout, what: object) -> Array:
    """`put_leaf` of a host value in its physical form."""
    kind: ArrayType = layout.cache
    cluster = layout.slice.cluster
    client = cluster.native
    if not isinstance(leaf, (np.ndarray, jax.Array)):
        leaf = np.asarray(leaf, dtype=kind.dtype)
    if leaf.shape != kind.shape:
        raise errors.ProgramError(f"{what}: expected shape {kind.shape}, got {leaf.shape}")
    client.enter()  # a slice that moves changes who holds the array
    try:
        array: Array = client.new_array(layout)
        cluster.transfer.put(array, leaf, cluster.placement(layout), what)
        return array
    finally:
        client.leave()
