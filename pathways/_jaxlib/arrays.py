"""Values that JAX takes as arrays: which they are, their abstract values, their shards, and JAX's methods of them.

The API describes its arrays by these functions, the compiler its constants; hosts take arrays apart into the shards of
this process and put them together again. Pure, but for `assemble`, which may copy to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib._jax as xla
from jax._src import array, core
from jax._src.numpy import array_methods
from jax.experimental import layout

#: The type of JAX's own arrays of numbers.
ARRAY_TYPE: type = array.ArrayImpl


def is_concrete(value: Any) -> bool:
    """True for JAX's own arrays of numbers; not for tracers, keys, or other objects that JAX takes as an array."""
    return type(value) is ARRAY_TYPE


def is_tracer(value: Any) -> bool:
    """True for a value under trace."""
    return isinstance(value, core.Tracer)


def valid_jaxtype(value: Any) -> bool:
    """True for what JAX takes as an array: arrays, NumPy arrays, Python and NumPy scalars."""
    return bool(core.valid_jaxtype(value))


def shaped_array(shape: tuple[int, ...], dtype: Any, weak_type: bool, sharding: Any = None) -> Any:
    """The abstract value of an array. `sharding`: what explicit axes of its mesh make of its type."""
    return core.ShapedArray(shape, dtype, weak_type=weak_type, sharding=sharding)


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    """A type as a `jax.ShapeDtypeStruct`, with its sharding if that is over explicit axes."""
    sharding = getattr(aval, "sharding", None)
    sharding = sharding if sharding is not None and sharding.mesh.explicit_axes else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False), sharding=sharding)


def abstract_value(value: Any) -> Any:
    """The abstract value of anything JAX takes as an array."""
    return core.shaped_abstractify(value)


def array_format(ndim: int, sharding: Any) -> Any:
    """The format of an array whose dimensions are in memory in their own order (C order)."""
    return layout.Format(layout.Layout(tuple(range(ndim))), sharding)


def array_operators() -> dict[str, Callable[..., Any]]:
    """By name, the operators that JAX gives its arrays, as functions of the array: `__add__`, `__getitem__`, ..."""
    return {f"__{name}__": fun for name, fun in array_methods._array_operators.items()}


def array_attributes() -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[[Any], Any]]]:
    """By name, the methods and the properties that JAX gives its arrays, as functions of the array."""
    return dict(array_methods._array_methods), dict(array_methods._array_properties)


def shards_of(array: jax.Array) -> list[jax.Array]:
    """This process's shards as arrays of one device each, in the order of the sharding's devices; takes 0.4 us."""
    return list(array._arrays)  # type: ignore[attr-defined]


def address_of(shard: jax.Array) -> int:
    """The address of the bytes, in C order, of a ready array on one CPU device. Not for types of less than a byte."""
    return int(shard.unsafe_buffer_pointer())


def assemble(aval: Any, sharding: Any, parts: Sequence[Any], devices: Sequence[jax.Device]) -> jax.Array:
    """Makes a global array of one part per local device. Does not wait for the parts. Takes 3 us for one part.

    A part that is an array on its device is used as it is; an array on another device is copied. Host memory is used as
    it is if the device can do so (on CPU, if aligned), and is copied otherwise.
    """
    return xla.batched_device_put(aval, sharding, parts, devices, True)
