"""Finds the chunks of the slices of a pipeline: the parts of the model between which a microbatch is on another slice.

A forward step is of chunk 0 of its slice if its microbatch comes there for the first time, and of chunk c + 1 if
it has left the slice behind a step of chunk c. What a step reads decides this. So a value that skips stages changes
nothing. Microbatches that visit slices in another way than the schedule defines are refused (SCHED-1).

Pure.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pathways.compiler.flatten import Step
from pathways.compiler.ir import MeshSpec
from pathways.compiler.schedule.doubts import Doubt

Chunk = tuple[MeshSpec, int]


@dataclasses.dataclass
class _Behind:
    """What is behind a value: the highest chunk of each slice, and the highest one that the microbatch has left.

    `nearest` has the nearest chunks behind the value.
    """

    reached: dict[MeshSpec, int] = dataclasses.field(default_factory=dict)
    left: dict[MeshSpec, int] = dataclasses.field(default_factory=dict)
    nearest: set[Chunk] = dataclasses.field(default_factory=set)

    def merge(self, other: _Behind) -> None:
        for mine, its in ((self.reached, other.reached), (self.left, other.left)):
            for mesh, chunk in its.items():
                mine[mesh] = max(mine.get(mesh, 0), chunk)
        self.nearest |= other.nearest


class Chunks:
    """The chunks of a pipeline. `members` has the ids of its forward steps.

    `of` has the chunk of each forward step, by the step's id. `before` has for each chunk of a slice those from which
    it reads, other than itself, in the order of the text.
    """

    def __init__(self, steps: Sequence[Step], members: Collection[int]) -> None:
        self.of: dict[int, int] = {}
        self.before: dict[Chunk, set[Chunk]] = {}
        ways: dict[Any, _Behind] = {}
        for step in steps:
            way = _Behind()
            for v in step.reads:
                if v in ways:
                    way.merge(ways[v])
            mesh = step.mesh
            if id(step) in members and mesh is not None:
                chunk = max(way.left.get(mesh, -1) + 1, way.reached.get(mesh, 0))
                self.of[id(step)] = chunk
                self.before.setdefault((mesh, chunk), set()).update(way.nearest - {(mesh, chunk)})
                left = {other: c for other, c in way.reached.items() if other != mesh}
                if mesh in way.left:
                    left[mesh] = way.left[mesh]
                way = _Behind(way.reached | {mesh: chunk}, left, {(mesh, chunk)})
            if way.reached:
                ways.update((v, way) for v in step.outputs)

    @property
    def count(self) -> int:
        """How many chunks the slice with the most has."""
        return 1 + max(chunk for _, chunk in self.before)

    def stages_in_turn(self) -> dict[MeshSpec, int]:
        """The stage of each slice, if microbatches visit all slices in turn, each equally often.

        Raises:
            Doubt: they do not.
        """
        depth = _depths(self.before)
        visits = collections.Counter(mesh for mesh, _ in self.before)
        stages = {mesh: depth.get((mesh, 0), 0) for mesh in visits}
        chunks = [(mesh, chunk) for chunk in range(self.count) for mesh in visits]
        if depth != {(mesh, chunk): chunk * len(visits) + stages[mesh] for mesh, chunk in chunks}:
            way = [mesh.name for mesh, _ in sorted(depth, key=lambda item: depth[item])]
            raise Doubt(
                f"microbatches visit slices in the order {way}; expected each of the {len(visits)} slices in turn, the "
                "same number of times. Place the chunks of the model on the slices in turn"
            )
        return stages


def _depths(before: Mapping[Any, Iterable[Any]]) -> dict[Any, int]:
    """For each item, the longest way to it. Without the items on a cycle and behind one."""
    depth: dict[Any, int] = {}
    while ready := [n for n in before if n not in depth and all(a in depth for a in before[n])]:
        depth.update({n: 1 + max((depth[a] for a in before[n]), default=-1) for n in ready})
    return depth
