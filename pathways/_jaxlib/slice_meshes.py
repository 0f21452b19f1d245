"""The mesh of a slice as JAX sees it: an abstract mesh that knows which slice it is of, and that can be set.

`slice_mesh` makes it, `accept_slice_meshes` teaches JAX to set one: `jax.set_mesh(slice.mesh)`. While it is set, what
JAX itself would run in this process, by `jax.jit` or operation by operation, goes to the slice. Inside of a trace it is
what `jax.sharding.use_abstract_mesh` is.

Threading: a mesh is set for the calling thread. The table of meshes is guarded by a lock.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import api, core, pjit, shard_map, sharding_impls
from jax._src import mesh as mesh_lib
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pathways._jaxlib.user_settings import F, abstract_mesh_setting, concrete_mesh_setting, outside_meshes

_lock = threading.Lock()
_known: weakref.WeakValueDictionary[Any, SliceMesh] = weakref.WeakValueDictionary()  # guarded by _lock


class SliceMesh(AbstractMesh):
    """Made by `slice_mesh`. It is equal to each abstract mesh of the same axes, because code that was written for the
    mesh of one slice (`jax.shard_map(mesh=)`) may run on another. It is hashed as itself, so that JAX's caches seldom
    take it for another. Sometimes they do, because those in C++ also compare keys of different hashes. So a call, or an
    equation of what was traced, runs on the slice whose mesh is set, not on the one whose mesh it was traced with.
    With explicit axes, each type of a value says on which slice it is. So the mesh of such a slice is equal to itself
    alone.
    """

    slice_name: str
    slice_explicit: tuple[str, ...]  # the slice's own explicit axes; within a part of a function, others may be

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, AbstractMesh)
            and not self.slice_explicit
            and not slice_explicit(other)
            and other.abstract_device is None
            and other.shape_tuple == self.shape_tuple
            and other.axis_types == self.axis_types
        )

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __repr__(self) -> str:
        return super().__repr__() + (f" of slice {self.slice_name!r}" if self.slice_explicit else "")

    def update(
        self, axis_sizes: Any = None, axis_names: Any = None, axis_types: Any = None, **options: Any
    ) -> AbstractMesh:
        """With other types of axes it is a mesh of the same slice; with other axes, of none."""
        if axis_sizes is None and axis_names is None and not options:
            types = axis_types or self.axis_types
            return slice_mesh(self.slice_name, self.axis_names, self.axis_sizes, types, self.slice_explicit)
        return super().update(axis_sizes, axis_names, axis_types, **options)

    def __reduce__(self) -> Any:
        """A pickle has the axes alone: a slice belongs to its process."""
        return AbstractMesh, (self.axis_sizes, self.axis_names, self.axis_types)


def slice_mesh(
    name: str, axes: Sequence[str], sizes: Sequence[int], types: Sequence[AxisType], explicit: Sequence[str] = ()
) -> SliceMesh:
    """The mesh of the slice of that name; the same object for the same axes. `explicit`: the slice's own such axes."""
    key = name, tuple(axes), tuple(sizes), tuple(types), tuple(explicit)
    with _lock:
        mesh = _known.get(key)
        if mesh is None:
            mesh = object.__new__(SliceMesh)
            fields = {
                "axis_sizes": key[2],
                "axis_names": key[1],
                "axis_types": key[3],
                "abstract_device": None,
                "size": math.prod(sizes),
                "slice_name": name,
                "slice_explicit": key[4],
            }
            for field, value in fields.items():
                object.__setattr__(mesh, field, value)
            _known[key] = mesh
    return mesh


def slice_name(mesh: Any) -> str | None:
    """The name of the slice whose mesh it is; None: of none."""
    return mesh.slice_name if isinstance(mesh, SliceMesh) else None


def slice_explicit(mesh: Any) -> tuple[str, ...]:
    """The explicit axes of the slice whose mesh it is."""
    return mesh.slice_explicit if isinstance(mesh, SliceMesh) else ()


def is_of_set_mesh(value: Any) -> bool:
    """Whether it is an array of a slice with explicit axes whose mesh is set for this thread."""
    mesh = abstract_mesh_setting.value
    if not isinstance(mesh, SliceMesh) or not mesh.explicit_axes:
        return False
    return getattr(getattr(getattr(value, "aval", None), "sharding", None), "mesh", None) is mesh


def outside_other_meshes(function: F) -> F:
    """Runs `function` as if no mesh were set for its thread, unless its first argument `is_of_set_mesh`: a
    `PartitionSpec` alone is then one on that slice."""
    outside = outside_meshes(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (function if args and is_of_set_mesh(args[0]) else outside)(*args, **kwargs)

    return run  # type: ignore[return-value]


def accept_slice_meshes(run: Callable[[str, Any, dict[str, Any], Sequence[Any]], Sequence[Any]]) -> None:
    """Lets a slice's mesh be set. While one is set, a `jax.jit` at the top level calls `run(slice's name, closed jaxpr,
    parameters, arguments)`. A `PartitionSpec` alone is one on that slice."""
    plain_set, plain_context, plain_spec = sharding_impls.set_mesh, pjit.get_ctx_mesh, api.pspec_to_sharding
    plain_call, plain_auto, plain_map = pjit._pjit_call_impl_python, pjit._auto_axes, shard_map._shard_map

    class set_mesh(plain_set):  # type: ignore[misc, valid-type]
        """`jax.set_mesh`, which also takes the mesh of a slice (`slice.mesh`)."""

        __doc__ = plain_set.__doc__

        def __init__(self, mesh: Any) -> None:
            if not isinstance(mesh, SliceMesh):
                super().__init__(mesh)
                return
            self.prev_abstract_mesh = abstract_mesh_setting.swap_local(mesh)
            self.prev_mesh = concrete_mesh_setting.swap_local(mesh_lib.empty_concrete_mesh)

    def context(use_resource_env: bool) -> Any:
        mesh = abstract_mesh_setting.value
        if isinstance(mesh, SliceMesh) and not use_resource_env and core.trace_state_clean():
            return mesh
        return plain_context(use_resource_env)

    def spec_on(name: str, value: Any) -> Any:
        mesh = abstract_mesh_setting.value
        if isinstance(value, PartitionSpec) and isinstance(mesh, SliceMesh):
            return NamedSharding(mesh, value)
        return plain_spec(name, value)

    def call(*args: Any, **params: Any) -> Any:
        if isinstance(traced := params["ctx_mesh"], SliceMesh):
            now = abstract_mesh_setting.value
            mesh = now if isinstance(now, SliceMesh) and now == traced else traced
            return list(run(mesh.slice_name, params["jaxpr"], params, args)), None, None, []
        return plain_call(*args, **params)

    enter = core.JaxprEqnContextManager.__enter__

    def enter_equation(self: Any) -> None:
        """The mesh under which an equation was traced is set while it is evaluated, as in a gradient."""
        enter(self)
        set_before = self.prev_abstract_mesh
        if isinstance(set_before, SliceMesh) and set_before == self.context.cur_abstract_mesh:
            abstract_mesh_setting.set_local(set_before)

    core.JaxprEqnContextManager.__enter__ = enter_equation

    enter_mesh = mesh_lib.use_abstract_mesh.__enter__

    def enter_mesh_of_any_size(self: Any) -> None:
        """In a placed function JAX sets the mesh of a value's type, for example to make zeros like it. The value may
        come from a slice of another size."""
        if isinstance(self.mesh, SliceMesh) and isinstance(abstract_mesh_setting.value, SliceMesh):
            self.prev = abstract_mesh_setting.swap_local(self.mesh)
        else:
            enter_mesh(self)

    mesh_lib.use_abstract_mesh.__enter__ = enter_mesh_of_any_size

    def at_once(plain: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
        """As `plain`, but what it makes of a function runs on the slice whose mesh is set, as one `jax.jit`, when it is
        called outside of a trace. Step by step it could not: its values have types that no array of a slice has."""

        def make(function: Any, **options: Any) -> Any:
            made = plain(function, **options)

            @functools.wraps(made)
            def call_at_once(*args: Any, **kwargs: Any) -> Any:
                mesh = abstract_mesh_setting.value if core.trace_state_clean() else None
                if not isinstance(mesh, SliceMesh):
                    return made(*args, **kwargs)
                fixed = {name: kwargs.pop(name) for name in ("out_sharding",) if name in kwargs}
                return jax.jit(functools.partial(made, **fixed))(*args, **kwargs)

            return call_at_once

        return make

    pjit._pjit_call_impl_python = call
    pjit._auto_axes, shard_map._shard_map = at_once(plain_auto), at_once(plain_map)
    jax.set_mesh = sharding_impls.set_mesh = jax.sharding.set_mesh = set_mesh
    pjit.get_ctx_mesh = context
    api.pspec_to_sharding = spec_on
