"""Makes `pw.Array` an array to JAX: the operators, methods and properties that JAX gives its own, and its dispatch.

`install` runs once, when the first cluster is connected. What an operation does is JAX's own Python; where it runs is
`operators`. An operator on arrays and numbers seen before skips JAX's Python altogether (`Operations.shortcuts`).
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways import _jaxlib, errors
from pathways.api.arrays import creation, numpy_protocols, references
from pathways.api.arrays.array import Array
from pathways.api.arrays.indexing import At, getitem
from pathways.api.arrays.operators import constant, operations, run
from pathways.api.arrays.put import device_put
from pathways.api.programs import effects
from pathways.api.programs.compiled import copy
from pathways.api.programs.program import clear_caches
from pathways.api.programs.tracing import find_slice
from pathways.api.slices.virtual_devices import slice_of_mesh
from pathways.compiler import specs
from pathways.compiler.added_primitives import transfers
from pathways.compiler.inlining import holds_slice_tag, placed_meshes
from pathways.compiler.ir import MeshSpec, Spec
from pathways.compiler.placed import lookup, refuse_elsewhere

_NUMBERS = (int, float, bool, complex)


@functools.cache
def install() -> None:
    """Teaches JAX what a `pw.Array` is, and `pw.Array` what JAX's arrays can."""
    methods, properties = (
        {name: _jaxlib.outside_other_meshes(fun) for name, fun in some.items()} for some in _jaxlib.array_attributes()
    )
    attributes: dict[str, Any] = {
        name: property(functools.partial(At, otherwise=getter) if name == "at" else _memo(name, getter))
        for name, getter in properties.items()
    }
    attributes |= methods
    attributes |= {
        name: _operator(name, _jaxlib.outside_other_meshes(fun)) for name, fun in _jaxlib.array_operators().items()
    }
    for name in attributes.keys() - vars(Array).keys():
        setattr(Array, name, attributes[name])
    setattr(Array, "__array_ufunc__", numpy_protocols.array_ufunc)  # noqa: B010 - the stubs of Array do not name it
    setattr(Array, "__array_function__", numpy_protocols.array_function)  # noqa: B010
    _jaxlib.accept_arrays(Array, Array._value, run, full_like, _elsewhere, _pulled, _placed_inside)
    _jaxlib.accept_shardings(
        creation.is_over_slice,
        creation.put,
        creation.full,
        creation.iota,
        creation.from_callback,
        transfers.refuse_here,
    )
    _jaxlib.accept_references(references.made, references.read, functools.partial(references.write, copy))
    _jaxlib.accept_slice_meshes(_run_under_mesh)
    _jaxlib.guard_lowering(refuse_elsewhere)
    _jaxlib.clear_also(clear_caches)
    _jaxlib.wait_for_effects_also(effects.wait_for_all)
    _jaxlib.keep_filter_answers()
    transfers.transfer_p.def_impl(_transfer)


def _elsewhere(name: str) -> Callable[[Any, Any], Any] | None:
    """How a jit of this name runs, if it is a placed function of a live slice."""
    placement = lookup(name)
    home = None if placement is None else find_slice(placement.mesh)
    if placement is None or home is None:
        return None
    return lambda closed, args: run(closed, placement.name, args, home=home)


def _placed_inside(name: str, closed: Any) -> Callable[[Any, Sequence[Any]], Sequence[Any]] | None:
    """How a loop or a branch runs that JAX runs by itself, if it has calls of placed functions inside."""
    if not holds_slice_tag(closed.jaxpr):
        return None
    home = next(filter(None, map(find_slice, placed_meshes(closed))), None)
    return None if home is None else lambda closed, args: run(closed, name, args, home=home, is_free=True)


def _run_under_mesh(name: str, closed: Any, params: dict[str, Any], args: Sequence[Any]) -> Sequence[Any]:
    """A `jax.jit` under the mesh of a slice, which is set: it runs there."""
    return run(closed, params["name"], args, home=slice_of_mesh(name), jit=params)


_warned: set[tuple[str, str]] = set()  # functions of which `_pulled` has spoken


def _pulled(name: str, where: str, arrays: Sequence[Array]) -> None:
    """Warns, once per function, that a `jax.jit` of the user's takes arrays off their slice."""
    coming = [array for array in arrays if not isinstance(array.cached, np.ndarray)]
    if not coming or (name, where) in _warned:
        return
    _warned.add((name, where))
    nbytes = sum(array.nbytes for array in coming)
    warnings.warn(
        f"jax.jit compiled {where} for this process, so {nbytes} bytes of {len(coming)} pw.Array(s) are fetched from "
        f"{coming[0].slice!r} to run it here, at this call and whenever it gets arrays of a slice. To leave them "
        f"there, place the function: pw.jit({name}, devices=array.slice). If it is meant, fetch them yourself "
        "(jax.device_get), or filter pw.errors.FetchWarning. Each function is named once",
        errors.FetchWarning,
        stacklevel=_jaxlib.users_level(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))),
    )


def _transfer(x: Any, *, mesh: MeshSpec, spec: Spec | None, uid: int, back: bool, sharding: Any) -> Any:
    """An eager transfer. On its way back a value stays where it is: whoever uses it moves it."""
    del uid, sharding
    home = None if back or spec is None else find_slice(mesh)
    return x if home is None or spec is None else device_put(x, home, specs.to_partition_spec(spec))


@_jaxlib.outside_meshes
def full_like(array: Array, fill_value: Any, dtype: Any = None) -> Any:
    """An array of `array`'s shape and sharding, full of one value, beside it on its slice; `jnp.zeros_like`."""
    wanted = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    aval = _jaxlib.abstract_value(fill_value)
    closed = _filling(array.aval, aval, wanted, _jaxlib.trace_modes())
    return run(closed, "full_like", [array, fill_value], like=array)[0]


@functools.lru_cache(maxsize=512)
def _filling(array: Any, fill_value: Any, dtype: Any, settings: Any) -> Any:
    def filling(array: Any, fill_value: Any) -> Any:
        return jax.lax.full_like(array, fill_value, dtype)

    return jax.make_jaxpr(filling)(_jaxlib.struct(array), _jaxlib.struct(fill_value))


def _operator(name: str, fun: Callable[..., Any]) -> Callable[..., Any]:
    if name == "__getitem__":
        return lambda self, index: getitem(self, index, fun)
    if name not in _BINARY:
        return _memo(name, fun) if name in _UNARY else fun

    @functools.wraps(fun)
    def method(self: Array, other: Any) -> Any:
        layout = self.layout
        kind = type(other)
        key: Any
        if kind is Array and other is not self:
            key = (name, layout, other.layout)
        elif kind in _NUMBERS:
            key = (name, layout, constant(other))
        else:
            return fun(self, other)
        table = operations(layout.slice.cluster)
        known = table.shortcuts.get(key)
        if known is not None:
            settings, call, places = known
            if settings == _jaxlib.trace_modes() and _jaxlib.is_top_level():
                result = call([self] if len(places) == 1 else [self, other] if places[0] == 0 else [other, self])
                if type(result) is list:
                    return result[0]
        elif not _jaxlib.is_top_level():
            return fun(self, other)
        return table.learn(key, fun, (self, other))

    return method


def _memo(name: str, fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`fun` of an array alone, with a shortcut."""

    @functools.wraps(fun)
    def method(self: Array) -> Any:
        layout = self.layout
        table = operations(layout.slice.cluster)
        key = (name, layout)
        known = table.shortcuts.get(key)
        if known is not None and known[0] == _jaxlib.trace_modes() and _jaxlib.is_top_level():
            result = known[1]([self])
            if type(result) is list:
                return result[0]
        if not _jaxlib.is_top_level():
            return fun(self)
        return table.learn(key, fun, (self,))

    return method


_UNARY = frozenset(("__neg__", "__pos__", "__abs__", "__invert__"))
_BINARY = frozenset(
    f"__{reflected}{name}__"
    for reflected in ("", "r")
    for name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
) | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
