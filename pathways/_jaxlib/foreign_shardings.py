"""Teaches JAX shardings of ours: a value that is put to one, or made with one, goes to functions of the API.

`accept_shardings` replaces functions of JAX for the whole process. The API calls it once, when the first cluster is
connected. The functions that it puts there run on whatever thread calls JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import array, dispatch, pjit
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lax import lax

from pathways import errors
from pathways._jaxlib.lowering import is_lowering_for_slices


def accept_shardings(
    is_ours: Callable[[Any], bool],
    put: Callable[[Any, Any], Any],
    full: Callable[[Any, Any, Any, Any], Any],
    iota: Callable[[Any, Any, int, Any], Any],
    from_callback: Callable[[Any, Any, Callable[[Any], Any], Any], Any],
    refuse_put: Callable[[], NoReturn],
) -> None:
    """Teaches JAX shardings of ours: to put a value to one, or to make an array with one, JAX calls these functions.

    `jax.device_put`, and what ends in it, calls `put(value, sharding)`; where it is lowered to run in this process, it
    calls `refuse_put()`. `lax.full`, in which `jnp.zeros(device=)` ends, and `lax.empty` call
    `full(shape, value, dtype, sharding)`.
    `lax.broadcasted_iota`, in which `jnp.arange(device=)` ends, calls `iota(dtype, shape, dimension, sharding)`.
    `jax.make_array_from_callback` calls `from_callback(shape, sharding, callback, dtype or None)`.
    `jax.make_array_from_process_local_data` takes the whole array, and `jax.make_array_from_single_device_arrays` is
    refused.
    """
    plain_put, plain_full, plain_iota = dispatch._batched_device_put_impl, lax.full, lax.broadcasted_iota
    plain_empty = lax.empty
    plain_convert, plain_constraint = lax._convert_element_type, pjit.sharding_constraint_p.impl
    put_lowering = jax_mlir._lowerings[dispatch.device_put_p].rule
    plain_callback, plain_local = array.make_array_from_callback, array.make_array_from_process_local_data
    plain_single = array.make_array_from_single_device_arrays

    def put_all(*xs: Any, devices: Any, srcs: Any, copy_semantics: Any, dst_avals: Any) -> list[Any]:
        shardings = [getattr(device, "sharding", device) for device in devices]  # of a jax.experimental.layout.Format
        here = [n for n, sharding in enumerate(shardings) if not is_ours(sharding)]
        each = devices, srcs, copy_semantics, dst_avals
        names = "devices", "srcs", "copy_semantics", "dst_avals"
        if len(here) == len(xs):
            return list(plain_put(*xs, **dict(zip(names, each, strict=True))))
        out: list[Any] = [None] * len(xs)
        chosen = [[values[n] for n in here] for values in each]
        for n, y in zip(here, plain_put(*(xs[n] for n in here), **dict(zip(names, chosen, strict=True))), strict=True):
            out[n] = y
        for n in set(range(len(xs))) - set(here):
            x, semantics = xs[n], copy_semantics[n]
            if semantics is dispatch.ArrayCopySemantics.REUSE_INPUT and getattr(x, "sharding", None) == shardings[n]:
                out[n] = x
                continue
            out[n] = put(x, shardings[n])
            if semantics is dispatch.ArrayCopySemantics.DONATE_INPUT and hasattr(x, "delete"):
                x.delete()
        return out

    @functools.wraps(plain_convert)
    def convert_there(
        operand: Any, new_dtype: Any = None, weak_type: bool = False, sharding: Any = None, **options: Any
    ) -> Any:
        if is_ours(sharding):
            return put(plain_convert(operand, new_dtype, weak_type, **options), sharding)
        return plain_convert(operand, new_dtype, weak_type, sharding, **options)

    @functools.wraps(plain_full)
    def full_there(shape: Any, fill_value: Any, dtype: Any = None, *, sharding: Any = None) -> Any:
        if is_ours(sharding):
            return full(shape, fill_value, dtype, sharding)
        return plain_full(shape, fill_value, dtype, sharding=sharding)

    @functools.wraps(plain_empty)
    def empty_there(shape: Any, dtype: Any, *, out_sharding: Any = None) -> Any:
        if is_ours(out_sharding):
            return full(shape, 0, dtype, out_sharding)
        return plain_empty(shape, dtype, out_sharding=out_sharding)

    @functools.wraps(plain_iota)
    def iota_there(dtype: Any, shape: Any, dimension: int, *, out_sharding: Any = None) -> Any:
        if is_ours(out_sharding):
            return iota(dtype, shape, dimension, out_sharding)
        return plain_iota(dtype, shape, dimension, out_sharding=out_sharding)

    @functools.wraps(plain_callback)
    def callback_there(shape: Any, sharding: Any, data_callback: Any, dtype: Any = None) -> Any:
        target = getattr(sharding, "sharding", sharding)
        if is_ours(target):
            return from_callback(shape, target, data_callback, dtype)
        return plain_callback(shape, sharding, data_callback, dtype)

    @functools.wraps(plain_local)
    def local_there(sharding: Any, local_data: Any, global_shape: Any = None) -> Any:
        if not any(map(is_ours, jax.tree.leaves(sharding))):
            return plain_local(sharding, local_data, global_shape)
        if global_shape is not None:
            shapes = jax.tree.map(np.shape, local_data)
            if jax.tree.map(lambda _, given: tuple(given), local_data, global_shape) != shapes:
                raise errors.ShardingError(
                    "the client of a cluster is its only process: what it gives to a slice must be the whole array, of "
                    f"shape {global_shape}, got {shapes}"
                )
        return jax.device_put(local_data, sharding)

    @functools.wraps(plain_single)
    def single_there(shape: Any, sharding: Any, arrays: Any, **options: Any) -> Any:
        if is_ours(sharding):
            raise errors.ShardingError(
                "make_array_from_single_device_arrays takes arrays that lie on the devices of its sharding, but those "
                "of a slice hold none of this process's. Use jax.make_array_from_callback or jax.device_put"
            )
        return plain_single(shape, sharding, arrays, **options)

    def put_rule(ctx: Any, *args: Any, devices: Any, **params: Any) -> Any:
        if any(is_ours(getattr(device, "sharding", device)) for device in devices) and not is_lowering_for_slices():
            refuse_put()
        return put_lowering(ctx, *args, devices=devices, **params)

    def constrain(x: Any, sharding: Any, **params: Any) -> Any:
        if is_ours(sharding) or is_ours(getattr(x, "sharding", None)):
            return put(x, sharding)
        return plain_constraint(x, sharding=sharding, **params)

    jax_mlir.register_lowering(dispatch.device_put_p, put_rule)
    pjit.sharding_constraint_p.def_impl(constrain)
    dispatch._batched_device_put_impl = put_all
    lax._convert_element_type = convert_there
    lax.full = jax.lax.full = full_there
    lax.empty = jax.lax.empty = empty_there
    lax.broadcasted_iota = jax.lax.broadcasted_iota = iota_there
    array.make_array_from_callback = jax.make_array_from_callback = callback_there
    array.make_array_from_process_local_data = jax.make_array_from_process_local_data = local_there
    array.make_array_from_single_device_arrays = jax.make_array_from_single_device_arrays = single_there
