"""What a program makes arguments of: `ClosesOver`, which `Program` gives to the trace."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from pathways import _jaxlib
from pathways.api.arrays import references, variables
from pathways.api.arrays.array import Array
from pathways.api.programs import snapshots
from pathways.api.programs.signature import abstractify
from pathways.api.programs.tracing import remember
from pathways.api.session import Session
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler.closures import ClosedOver, Place
from pathways.compiler.trace import Argument, as_argument


class ClosesOver:
    """Which values that a program closes over become arguments: arrays of its cluster, and big ones of this process."""

    def __init__(self, cluster: Session | None, home: Slice | None) -> None:
        """`home`: the slice of a placed function that is called alone. It has what it closes over moved there."""
        self._cluster, self._home = cluster, home

    def stands_in(self, value: Any) -> ClosedOver | None:
        """What becomes an argument in place of a value; None: it stays a constant."""
        if type(value) is not Array:
            return snapshots.stands_in(value)
        if value.raw_handle == 0:
            variables.check_lives(value, self._cluster)
        elif self._cluster is not None and value.layout.slice.cluster is not self._cluster:
            return None
        return ClosedOver(value)

    def argument(self, closed_over: ClosedOver) -> Argument:
        """The argument that it becomes. An array of this process is whole on each device of the slices that read it."""
        value, place = closed_over.value, closed_over.place
        if type(value) is Array:
            return self._at_home(value)
        if _jaxlib.is_reference(value):
            argument = as_argument(value, "a reference that the function closes over")
            array = references.array_of(value)
            if array is None or (self._cluster is not None and array.layout.slice.cluster is not self._cluster):
                return argument
            there = self._at_home(array)
            return dataclasses.replace(argument, mesh=there.mesh, spec=there.spec)
        if self._home is not None:
            place = Place(self._home.mesh_spec)
        if place is None:
            return cast(Argument, value.argument)
        spec = place.spec if place.spec is not None else ((),) * len(value.argument.shape)
        return dataclasses.replace(value.argument, mesh=place.mesh, spec=spec)

    def _at_home(self, value: Array) -> Argument:
        remember(value.layout.slice)
        argument = abstractify(value, "", value.layout.slice.cluster)
        if self._home is None or value.layout.slice is self._home:
            return argument
        return dataclasses.replace(argument, mesh=self._home.mesh_spec, spec=((),) * len(argument.shape))
