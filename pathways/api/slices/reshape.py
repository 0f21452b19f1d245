"""Another shape for a slice: what changes in this process when `Slice.resize` moves arrays to another mesh (MOVE-1).

A mesh of another shape is another mesh to JAX and to the compiler, so it has another name. Every array on the slice
gets a layout over the new mesh. Placed functions are made anew, and what was compiled for the old mesh is outdated: the
next call traces and compiles again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pathways import _core
from pathways.api.arrays.array import Array
from pathways.api.programs.tracing import remember
from pathways.api.session import Session, layout_key, make_layout
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler import specs
from pathways.plan.topology import SliceBinding


class NewShape:
    """The shape that a slice is to get. `_core.Client.moving` is true from before `check` until after `take`."""

    def __init__(self, cluster: Session, slice_: Slice, binding: SliceBinding) -> None:
        self._cluster = cluster
        self._slice = slice_
        self._binding = binding
        self.mesh = slice_.next_mesh(binding.shape)
        self._layouts: dict[Any, _core.Layout] = {}  # by key: several may become one, if an axis now has one device

    def check(self) -> None:
        """Refuses a shape over which an array on the slice cannot be cut as it is now.

        Raises:
            ShardingError: a dimension does not divide; names the array or the variable.
        """
        for compiled in self._users():
            compiled.constants.forget()  # they need not move
        variables = self._variables()
        names = {id(variable._array): f"variable {variable.name!r}, " for variable in variables}
        arrays: list[Array] = [*self._cluster.native.arrays_on(self._slice)]
        for array in (*arrays, *(variable._array for variable in variables)):
            layout = array.layout
            dims = ",".join(map(str, layout.shape))
            what = (
                f"{self._slice!r} cannot get the shape {self._binding.shape}: {names.get(id(array), '')}"
                f"{layout.dtype}[{dims}]"
            )
            specs.normalize(specs.to_partition_spec(layout.spec[: len(layout.shape)]), layout.shape, self.mesh, what)

    def layout(self, old: _core.Layout) -> _core.Layout:
        """A layout as it will be."""
        key, kind = layout_key(old.cache, self.mesh, old.dtype, old.shape, old.weak_type)
        known = self._layouts.get(key)
        if known is None:
            known = self._layouts[key] = make_layout(key, kind, self._slice, self.mesh, self._binding)
        return known

    def take(self, moved: Sequence[tuple[Array, Array]]) -> None:
        """From now on the slice has the shape. `moved`: its arrays, and those whose buffers they have got.
        `Session.steady` is held.
        """
        cluster, slice_ = self._cluster, self._slice
        users = self._users()  # by the name of the old mesh
        cluster.reshape_layouts(slice_, self._binding, self.mesh, self._layouts)
        remember(slice_)
        for array, fresh in moved:
            array._lie_as(fresh.layout)
        for compiled in users:
            compiled.outdate()
        for function in list(slice_.functions):
            function.place()
        for variable in self._variables():
            variable.lie_again()
        cluster.variables.changed()

    def _users(self) -> list[Any]:
        with self._cluster.steady:  # other threads compile
            return [compiled for compiled in list(self._cluster.compiled) if compiled.uses(self._slice)]

    def _variables(self) -> list[Any]:
        return [variable for variable in self._cluster.variables.living() if variable.slice is self._slice]
