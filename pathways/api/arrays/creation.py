"""Arrays made on a slice by JAX's own makers: `jnp.zeros(shape, device=slice.sharding(spec))` and the like.

What has no data is made where it lives, by a small placed function per shape, dtype and sharding; no byte passes the
client. `_jaxlib.accept_shardings` says which of JAX's functions end here. Inside a trace the value is made as ever, and
then transferred.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from pathways import _jaxlib, errors
from pathways.api.arrays.operators import KEPT, operations
from pathways.api.arrays.put import device_put
from pathways.api.programs.placed import PlacedFunction, jit
from pathways.api.slices.virtual_devices import SliceSharding, slice_sharding


def is_over_slice(sharding: Any) -> bool:
    """Whether a sharding says that a value is to be on a slice.

    In a trace, the types of a slice's values have shardings over the slice's mesh, which JAX hands on.
    """
    return isinstance(sharding, SliceSharding) or (
        isinstance(sharding, NamedSharding) and _jaxlib.slice_name(sharding.mesh) is not None and _jaxlib.is_top_level()
    )


def put(x: Any, sharding: Any) -> Any:
    """`x` by a sharding over a slice, or over a mesh like that of the slice it lies on."""
    if not is_over_slice(sharding):
        sharding = x.slice.sharding(sharding.spec)
    return device_put(x, sharding)


def full(shape: Any, fill_value: Any, dtype: Any, sharding: NamedSharding) -> Any:
    """`jax.lax.full`, on the sharding's slice."""

    def make(value: Any) -> Any:
        return jax.lax.full(shape, value, dtype)

    if not _jaxlib.is_top_level():
        return device_put(make(fill_value), sharding)
    with _jaxlib.unguarded():  # a number is no array of the user's
        return _maker("full", make, (shape, dtype), sharding)(fill_value)


def iota(dtype: Any, shape: Any, dimension: int, sharding: NamedSharding) -> Any:
    """`jax.lax.broadcasted_iota`, on the sharding's slice."""

    def make() -> Any:
        return jax.lax.broadcasted_iota(dtype, shape, dimension)

    if not _jaxlib.is_top_level():
        return device_put(make(), sharding)
    return _maker("iota", make, (dtype, shape, dimension), sharding)()


def _maker(name: str, make: Callable[..., Any], what: Sequence[Any], over: NamedSharding) -> PlacedFunction[..., Any]:
    sharding = slice_sharding(over)
    assert sharding is not None
    made = operations(sharding.slice.cluster).makers
    key: Hashable = (name, *(tuple(x) if isinstance(x, Sequence) else x for x in what), sharding.slice, sharding.spec)
    known: PlacedFunction[..., Any] | None = made.get(key)
    if known is None:
        while len(made) >= KEPT:
            made.pop(next(iter(made)), None)
        known = made[key] = jit(make, devices=sharding.slice, out_shardings=sharding.spec, name=name)
    return known


def from_callback(shape: Any, over: NamedSharding, callback: Callable[[Any], Any], dtype: Any) -> Any:
    """`jax.make_array_from_callback`: each distinct part is asked for once."""
    sharding = slice_sharding(over)
    assert sharding is not None
    shape = tuple(shape)
    parts: dict[Any, Any] = {}
    for index in sharding.devices_indices_map(shape).values():
        key = tuple((part.start, part.stop) for part in index)
        if key not in parts:
            part = callback(index)
            parts[key] = index, part if _jaxlib.is_key(getattr(part, "dtype", None)) else np.asarray(part)
    kinds = {part.dtype for _, part in parts.values()}
    if len(kinds) > 1:
        raise errors.ShardingError(f"the parts that a callback gave have different dtypes: {sorted(map(str, kinds))}")
    wanted = sharding.shard_shape(shape)
    kind = next(iter(kinds))
    is_key = _jaxlib.is_key(kind)
    if dtype is not None and (is_key or _jaxlib.is_key(dtype)) and dtype != kind:
        raise errors.ShardingError(f"the callback was to give parts of dtype {dtype}, but gave dtype {kind}")
    words = _jaxlib.physical_struct(shape, kind)  # of a key array
    value = np.empty(*words) if is_key else np.empty(shape, kind if dtype is None else dtype)
    for index, part in parts.values():
        if part.shape != wanted:
            raise errors.ShardingError(
                f"the callback was asked for {index} of an array of shape {shape}, which has shape {wanted}, but gave "
                f"shape {part.shape}"
            )
        value[index] = np.asarray(_jaxlib.to_physical(part, kind)) if is_key else part
    return device_put(_jaxlib.from_physical(value, kind) if is_key else value, sharding)
