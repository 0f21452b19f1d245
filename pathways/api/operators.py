"""Ordinary use of arrays outside programs: each operation is a small program on the array's own slice."""

from __future__ import annotations

from typing import Any

from pathways.api.array import Array
from pathways.api.slices import Slice
from pathways.compiler import device_put, specs

_moves: dict[Any, Any] = {}


def move(array: Array, devices: Slice, spec: Any) -> Array:
    """The array on another slice, or sharded otherwise: a program of one transfer."""
    from pathways.api.program import Program, remember

    remember(devices)
    key = (devices.mesh_spec.name, spec)
    known = _moves.get(key)
    if known is None:
        target = specs.to_partition_spec(spec)
        known = _moves[key] = Program(lambda x: device_put(x, devices.mesh_spec, target), name="device_put",
                                      home=devices)
    moved: Array = known(array)
    return moved
