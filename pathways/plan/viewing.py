"""A host's part of a computation of views: which shards it shows where. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pathways.compiler.ir import Computation
from pathways.errors import PlanError


@dataclasses.dataclass(frozen=True)
class ViewedHere:
    """What one host shows. `inputs` are the inputs of which it needs shards, ascending. `shown` has, for each output
    and for each of the host's devices in the mesh's order, the place of an input in `inputs`, and the number of the
    shard among those that the host has of that input.
    """

    inputs: tuple[int, ...]
    shown: tuple[tuple[tuple[int, int], ...], ...]


def viewed_here(
    computation: Computation, bindings: Sequence[Sequence[int]], devices_per_host: int, host: int
) -> ViewedHere:
    """The part of `host`. `bindings`: per mesh of the program, its devices.

    Raises:
        PlanError: a shard lies on another device than the one that should show it.
    """
    each = devices_per_host
    wanted: list[list[tuple[int, int]]] = []
    for view in computation.views:
        here: list[tuple[int, int]] = []
        for device, number, shard in zip(bindings[computation.mesh], view.inputs, view.shards, strict=True):
            source = bindings[computation.inputs[number].mesh]
            if source[shard] != device:
                raise PlanError(
                    f"computation {computation.name!r} shows on device {device} a shard that lies on {source[shard]}"
                )
            if device // each == host:
                here.append((number, sum(other // each == host for other in source[:shard])))
        wanted.append(here)
    inputs = tuple(sorted({number for here in wanted for number, _ in here}))
    place = {number: at for at, number in enumerate(inputs)}
    return ViewedHere(inputs, tuple(tuple((place[n], shard) for n, shard in here) for here in wanted))
