"""Logical dtypes, and the physical form in which a computation takes and gives their arrays.

A PRNG key array crosses as its uint32 words, a complex array as its real and imaginary parts. The API and the hosts
convert values; the compiler converts the ends of a computation (`cross_physically`). Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core, dtypes
from jax._src.lax import lax

from pathways._jaxlib.jaxprs import new_var
from pathways._jaxlib.user_settings import no_user_settings


def physical(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of an array as a computation takes or gives it.

    A PRNG key array becomes its uint32 words. A complex array becomes its real and imaginary parts, in one more
    dimension at the end, because complex types kill jaxlib's partitioner.
    """
    aval = core.physical_aval(aval)
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    return ((*shape, 2), _part(dtype)) if dtype.kind == "c" else (shape, dtype)


def _part(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32 if dtype == np.complex64 else np.float64)


def is_complex(dtype: Any) -> bool:
    """True for complex64 and complex128."""
    return not is_key(dtype) and np.dtype(dtype).kind == "c"


def logical_dtype(logical: Any, parts: np.dtype) -> Any:
    """The dtype of an array that was asked for as `logical` (in any x64 mode) and has the physical dtype `parts`."""
    if is_key(logical):
        return logical
    return np.result_type(parts, np.complex64) if np.dtype(logical).kind == "c" else parts


def to_physical(value: Any, dtype: Any) -> Any:
    """A host value of logical dtype `dtype`, in the physical form that computations take and give."""
    if is_key(dtype):
        with no_user_settings():
            return jax.random.key_data(value)
    if is_complex(dtype):
        array = np.asarray(value, dtype, order="C")
        return array.reshape(-1).view(_part(np.dtype(dtype))).reshape(*array.shape, 2)
    return value


def from_physical(value: Any, dtype: Any) -> Any:
    """The inverse of `to_physical`: a JAX key array, or a NumPy array on the same memory."""
    if is_key(dtype):
        with no_user_settings():
            return jax.random.wrap_key_data(jax.numpy.asarray(value), impl=key_name(dtype))
    if is_complex(dtype):
        array = np.asarray(value, order="C")
        logical = array.reshape(-1).view(np.dtype(dtype)).reshape(array.shape[:-1])
        logical.flags.writeable = array.flags.writeable
        return logical
    return value


@functools.cache
def _conversion(shape: tuple[int, ...], dtype: np.dtype, joins: bool) -> Any:
    """The equation that makes a complex array from its parts (`joins`), or the parts from the array."""

    def join(parts: jax.Array) -> jax.Array:
        return lax.complex(parts[..., 0], parts[..., 1])

    def split(value: jax.Array) -> jax.Array:
        return jax.numpy.stack([lax.real(value), lax.imag(value)], axis=-1)

    with jax.enable_x64(True):
        if joins:
            return jax.make_jaxpr(jax.jit(join))(jax.ShapeDtypeStruct((*shape, 2), _part(dtype))).eqns[0]
        return jax.make_jaxpr(jax.jit(split))(jax.ShapeDtypeStruct(shape, dtype)).eqns[0]


def cross_physically(
    inputs: Sequence[core.Var], outputs: Sequence[core.Var], eqns: Sequence[Any]
) -> tuple[list[core.Var], list[core.Var], list[Any]]:
    """Adds equations so that complex inputs and outputs are passed as parts: new inputs, outputs and equations."""

    def convert(v: core.Var, joins: bool) -> tuple[core.Var, list[Any]]:
        if not is_complex(v.aval.dtype):
            return v, []
        like = _conversion(tuple(v.aval.shape), np.dtype(v.aval.dtype), joins)
        parts = new_var((like.invars if joins else like.outvars)[0].aval)
        ends = ([parts], [v]) if joins else ([v], [parts])
        return parts, [like.replace(invars=ends[0], outvars=ends[1])]

    before = [convert(v, True) for v in inputs]
    after = [convert(v, False) for v in outputs]
    return (
        [v for v, _ in before],
        [v for v, _ in after],
        [*(eqn for _, made in before for eqn in made), *eqns, *(eqn for _, made in after for eqn in made)],
    )


def is_key(dtype: Any) -> bool:
    """True for the dtype of PRNG key arrays."""
    return dtype is not None and dtypes.issubdtype(dtype, dtypes.prng_key)


def key_name(dtype: Any) -> str:
    """The name of a key dtype's PRNG implementation, as `jax.random.key(impl=)` takes it."""
    return str(dtype._impl.name)


def physical_struct(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    """`physical` of an array of this logical shape and dtype."""
    return physical(core.ShapedArray(shape, dtype))


def is_sub_byte(dtype: np.dtype) -> bool:
    """True for integers and floats of 2 or 4 bits."""
    return bool(dtypes.itemsize_bits(dtype) < 8) if np.dtype(dtype) != np.bool_ else False
