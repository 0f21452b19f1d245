"""Adds the gradients of the microbatches on the slices that make them, in the order in which they are made.

JAX writes the sum of a weight's gradients as a chain of additions in its own order. A gradient that is made early would
wait in memory for its turn, and if two slices use the weight, one gradient per microbatch would go from one slice to
the other. So each slice's gradients are added there, each one as soon as it exists, and then the slices' sums. What is
added to may be donated: the sum stays in place (MEM-4).

The order of the additions decides how the sum is rounded. It is the order of the microbatches. A loop with
`jax.value_and_grad` inside adds in that order, too, so its results have equal bits with and without a schedule.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pathways import _jaxlib
from pathways.compiler.flatten import FlatProgram, Step, StepKind
from pathways.compiler.ir import Label, MeshSpec, Phase
from pathways.compiler.schedule.labels import Pipeline
from pathways.compiler.schedule.orders import Unit


def sum_where_made(
    program: FlatProgram,
    pipeline: Pipeline,
    sequences: Sequence[Sequence[Unit]],
    homes: Mapping[Any, MeshSpec],
) -> None:
    """Replaces each chain of additions of gradients in `program`. `homes` has the slice of each argument."""
    _Sums(program, pipeline, sequences, homes).replace()


@dataclasses.dataclass
class _Leaf:
    """A value that is added. `mesh` and `label` are those of the labelled step that made it, else both are None."""

    value: Any
    mesh: MeshSpec | None
    label: Label | None


class _Sums:
    def __init__(
        self,
        program: FlatProgram,
        pipeline: Pipeline,
        sequences: Sequence[Sequence[Unit]],
        homes: Mapping[Any, MeshSpec],
    ) -> None:
        self.program = program
        self.homes = homes
        self.place = {
            (mesh, unit): n for mesh, stage in pipeline.stages.items() for n, unit in enumerate(sequences[stage])
        }
        self.stages = pipeline.stages
        self.made = {v: step for step in program.steps for v in step.outputs}
        self.readers: dict[Any, list[Step]] = {}
        for step in program.steps:
            for v in step.reads:
                self.readers.setdefault(v, []).append(step)
        self.returned = {v for v in program.outvars if not isinstance(v, _jaxlib.Literal)}
        self.meshes = self._meshes()
        self.arguments = self._arguments()

    def replace(self) -> None:
        """Finds the last addition of each chain, and puts the new chain into its place."""
        steps: list[Step] = []
        gone: set[int] = set()
        chains: dict[int, list[Step]] = {}
        for step in self.program.steps:
            if _is_sum(step) and not self._is_inner(step.outputs[0]):
                inner: list[Step] = []
                leaves = list(self._leaves(step, inner))
                if _are_gradients(leaves, step.outputs[0].aval.shape):
                    gone.update(map(id, inner))
                    chains[id(step)] = self._chain(step, leaves, inner)
        for step in self.program.steps:
            steps += chains.get(id(step), [] if id(step) in gone else [step])
        self.program.steps = steps

    def _meshes(self) -> dict[int, MeshSpec]:
        """The slice of each labelled step; a plain step is where the first labelled step behind it is."""
        meshes: dict[int, MeshSpec] = {}
        for step in self.program.steps:
            if step.label is not None:
                makers = (meshes.get(id(self.made[v])) for v in step.reads if v in self.made)
                mesh = step.mesh or next((mesh for mesh in makers if mesh is not None), None)
                if mesh is not None:
                    meshes[id(step)] = mesh
        return meshes

    def _arguments(self) -> dict[MeshSpec, set[Any]]:
        """The program's arguments that the placed calls on each slice read."""
        read: dict[MeshSpec, set[Any]] = {}
        for step in self.program.steps:
            if step.kind is StepKind.PLACED and step.mesh is not None:
                read.setdefault(step.mesh, set()).update(v for v in step.reads if v in self.homes)
        return read

    def _is_inner(self, v: Any) -> bool:
        """True if the only use of a sum is to be added to."""
        readers = self.readers.get(v, [])
        return len(readers) == 1 and v not in self.returned and _is_sum(readers[0]) and not self._is_leaf(readers[0])

    def _is_leaf(self, step: Step) -> bool:
        """True for an addition within one microbatch and one slice: it is part of making the gradient."""
        makers = [self.made.get(v) for v in step.reads]
        places = {self.meshes.get(id(maker)) for maker in makers if maker is not None and maker.label is not None}
        return step.label is not None and len(places) <= 1

    def _leaves(self, step: Step, inner: list[Step]) -> Iterator[_Leaf]:
        """The values that a tree of additions adds, in the order of the text. `inner` gets its additions."""
        stack: list[Any] = [step]
        while stack:
            item = stack.pop()
            if isinstance(item, Step):
                inner.append(item)
                stack += reversed(item.inputs)
                continue
            maker = None if isinstance(item, _jaxlib.Literal) else self.made.get(item)
            if maker is not None and _is_sum(maker) and not self._is_leaf(maker) and self._is_inner(item):
                stack.append(maker)
            elif maker is None:
                yield _Leaf(item, None, None)
            else:
                mesh = self.meshes.get(id(maker))
                yield _Leaf(item, mesh, maker.label if mesh is not None else None)

    def _chain(self, root: Step, leaves: Sequence[_Leaf], inner: Sequence[Step]) -> list[Step]:
        """The additions in their new order; the last one makes what `root` made."""
        by_mesh: dict[MeshSpec | None, list[_Leaf]] = {}
        for leaf in leaves:
            by_mesh.setdefault(leaf.mesh, []).append(leaf)
        first = by_mesh.pop(None, [])  # what needs no microbatch: zeros, or gradients of an earlier call
        meshes = sorted(by_mesh, key=lambda mesh: self.stages.get(mesh, 0) if mesh is not None else 0)
        home = self._home(root.outputs[0].aval, [mesh for mesh in meshes if mesh is not None])
        meshes.sort(key=lambda mesh: mesh != home)
        equations = iter(reversed(inner))
        chain: list[Step] = []

        def add(a: Any, b: Any, label: Label | None) -> Any:
            step = next(equations)
            last = len(chain) == len(inner) - 1
            result = root.outputs[0] if last else _jaxlib.new_var(root.outputs[0].aval)
            chain.append(dataclasses.replace(step, inputs=[a, b], outputs=[result], label=label))
            return result

        total: Any = None
        for mesh in meshes:
            mine = sorted(by_mesh[mesh], key=lambda leaf: self._turn(mesh, leaf))
            subtotal: Any = None
            for leaf in [*first, *mine]:
                assert leaf.label is None or leaf.mesh is not None
                label = None if leaf.label is None else dataclasses.replace(leaf.label, phase=Phase.SUM)
                subtotal = leaf.value if subtotal is None else add(subtotal, leaf.value, label)
            first = []
            total = subtotal if total is None else add(total, subtotal, None)
        return chain

    def _turn(self, mesh: MeshSpec | None, leaf: _Leaf) -> int:
        assert mesh is not None and leaf.label is not None
        return self.place.get((mesh, (Phase.BACKWARD, leaf.label.microbatch)), 0)

    def _home(self, aval: Any, meshes: Sequence[MeshSpec]) -> MeshSpec | None:
        """The slice of the argument that could have this gradient: all these slices read it, and its type fits."""
        shared = set.intersection(*(self.arguments.get(mesh, set()) for mesh in meshes)) if meshes else set()
        homes = [
            mesh
            for v, mesh in self.homes.items()
            if v in shared and mesh in meshes and (v.aval.shape, v.aval.dtype) == (aval.shape, aval.dtype)
        ]
        return homes[0] if homes else None


def _are_gradients(leaves: Sequence[_Leaf], shape: tuple[int, ...]) -> bool:
    """True if microbatches made two of the leaves or more, as gradients, and any order of additions has this shape."""
    made = [leaf.label for leaf in leaves if leaf.label is not None]
    scalars = [leaf for leaf in leaves if leaf.value.aval.shape != shape]
    return len(made) >= 2 and len(scalars) <= 1 and all(label.phase is Phase.BACKWARD for label in made)


def _is_sum(step: Step) -> bool:
    return step.kind is StepKind.PLAIN and step.eqn.primitive.name in ("add", "add_any") and not step.demands
