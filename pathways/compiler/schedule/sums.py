"""Adds the gradients of the microbatches on the slices that make them, in the order in which they are made.

JAX writes the sum of a weight's gradients as a chain of additions in its own order. A gradient that is made early would
wait in memory for its turn, and if two slices use the weight, one gradient per microbatch would go from one slice to
the other. So each slice's gradients are added there, each one as soon as it exists, and then the slices' sums. What is
added to may be donated: the sum stays in place (MEM-4).

The order of the additions decides how the sum is rounded. It is the order of the microbatches, also without a schedule
(`weave.in_turn`). What is no gradient is
added first if the text adds it to the first gradient (zeros, an accumulator), and last if the text adds it to a sum of
gradients (weight decay) or if it needs results of the pipeline. A loop with `jax.value_and_grad` inside adds in this
order, too. So a sum of what backward steps return has equal bits with and without a schedule, if one slice makes it.
Other sums may differ within rounding: the gradient of a weight that several slices use, gradients that are clipped or
scaled before they are added, and other loops.

Pure.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

from pathways import _jaxlib
from pathways.compiler.added_primitives.fan_out import add_many_p
from pathways.compiler.flatten import FlatProgram, Step, StepKind
from pathways.compiler.ir import Label, MeshSpec, Phase
from pathways.compiler.orders import Unit
from pathways.compiler.schedule.labels import Pipeline


def sum_where_made(
    program: FlatProgram, pipelines: Sequence[Pipeline], homes: Mapping[Any, MeshSpec], *, at_once: bool = False
) -> None:
    """Replaces each chain of additions of gradients in `program`. `homes` has the slice of each argument.

    With `at_once`, each new addition stands behind what it adds; else where the last one of its chain stood.
    """
    _Sums(program, pipelines, homes).replace(at_once)


@dataclasses.dataclass
class _Leaf:
    """What is added: a value, or one value of each of several sums that are made alike.

    `mesh` and `label` are those of the labelled step that made it, else both are None. A transfer has the label of the
    step that made its value. `last` means that it is added behind the gradients.
    """

    values: list[Any]
    mesh: MeshSpec | None
    label: Label | None
    last: bool = False


class _Sums:
    def __init__(
        self,
        program: FlatProgram,
        pipelines: Sequence[Pipeline],
        homes: Mapping[Any, MeshSpec],
    ) -> None:
        self.program = program
        self.homes = homes
        self.place = {
            (pipeline.number, mesh, unit): n
            for pipeline in pipelines
            for mesh, stage in pipeline.stages.items()
            for n, unit in enumerate(pipeline.sequences[stage])
        }
        self.stages = {pipeline.number: pipeline.stages for pipeline in pipelines}
        self.made = {v: step for step in program.steps for v in step.outputs}
        self.readers: dict[Any, list[Step]] = {}
        for step in program.steps:
            for v in step.reads:
                self.readers.setdefault(v, []).append(step)
        self.returned = {v for v in program.outvars if not isinstance(v, _jaxlib.Literal)}
        self.labels: dict[int, Label | None] = {}  # by the step's id
        self.meshes = self._meshes()
        self.behind = self._behind()
        self.arguments = self._arguments()

    def replace(self, at_once: bool) -> None:
        """Finds the last addition of each chain, and puts the new chain into its place."""
        chains: dict[int, list[Step]] = {}
        taken: dict[int, set[int]] = {}  # by the step's id: which of its sums are made by a new chain
        for step in self.program.steps:
            if not _is_sum(step):
                continue
            alike: dict[Any, list[tuple[int, list[_Leaf], list[Step]]]] = {}
            for place, v in enumerate(step.outputs):
                if not self._is_inner(v):
                    inner: list[tuple[Step, int]] = []
                    leaves = self._leaves(step, place, inner)
                    if _are_gradients(leaves, v.aval.shape):
                        for addition, at in inner:
                            taken.setdefault(id(addition), set()).add(at)
                        additions = [addition for addition, _ in inner]
                        alike.setdefault(self._way(v, leaves, additions), []).append((place, leaves, additions))
            for sums in alike.values():
                outputs = [step.outputs[place] for place, _, _ in sums]
                merged = [
                    dataclasses.replace(row[0], values=[leaf.values[0] for leaf in row])
                    for row in zip(*(leaves for _, leaves, _ in sums), strict=True)
                ]
                chains.setdefault(id(step), []).extend(self._chain(outputs, merged, sums[0][2]))
        steps: list[Step] = []
        for step in self.program.steps:
            if id(step) in taken:
                steps += _left(step, taken[id(step)])
            else:
                steps.append(step)
            steps += chains.get(id(step), ())
        if at_once:
            moved = {id(step) for chain in chains.values() for step in chain}
            steps = _behind_what_they_read(steps, moved)
        self.program.steps = steps

    def _way(self, v: Any, leaves: Sequence[_Leaf], inner: Sequence[Step]) -> Any:
        """What sums share that one step may make together: the way in which each is made."""
        places = {leaf.mesh for leaf in leaves if leaf.mesh is not None}
        home = self._home(v.aval, list(places)) if len(places) > 1 else None
        return home, tuple(map(id, inner)), tuple((leaf.mesh, leaf.label, leaf.last) for leaf in leaves)

    def _meshes(self) -> dict[int, MeshSpec]:
        """The slice of each labelled step; a plain step is where the first labelled step behind it is.

        It fills `labels`. A transfer of a labelled step's value counts as labelled.
        """
        meshes: dict[int, MeshSpec] = {}
        for step in self.program.steps:
            label = step.label
            if step.kind is StepKind.TRANSFER and label is None and step.mesh is not None:
                label = next((self.labels[id(self.made[v])] for v in step.reads if v in self.made), None)
                stages = self.stages[label.pipeline] if label is not None else {}
                label = label and (dataclasses.replace(label, stage=stages[step.mesh]) if step.mesh in stages else None)
            self.labels[id(step)] = label
            if label is not None:
                makers = (meshes.get(id(self.made[v])) for v in step.reads if v in self.made)
                mesh = step.mesh or next((mesh for mesh in makers if mesh is not None), None)
                if mesh is not None:
                    meshes[id(step)] = mesh
        return meshes

    def _behind(self) -> set[Any]:
        """The variables behind which there is a labelled step."""
        behind: set[Any] = set()
        for step in self.program.steps:
            if step.label is not None or any(v in behind for v in step.reads):
                behind.update(step.outputs)
        return behind

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
        if step.label is None:
            return False
        makers = [self.made.get(v) for v in step.reads]
        places = {self.meshes.get(id(maker)) for maker in makers if maker is not None and self.labels[id(maker)]}
        return len(places) <= 1

    def _leaves(self, step: Step, place: int, inner: list[tuple[Step, int]]) -> list[_Leaf]:
        """The values that a tree of additions adds, in the order of the text, for sum number `place` of the step.

        `inner` gets its additions, each with the number of the sum.
        """
        stack: list[tuple[Step, int, Any]] = [(step, place, None)]
        leaves: list[_Leaf] = []
        adding: list[Any] = []  # per leaf: the sum that reads it
        while stack:
            addition, at, item = stack.pop()
            if item is not None:
                leaves.append(self._leaf(item))
                adding.append(addition.outputs[at])
                continue
            inner.append((addition, at))
            for item in reversed(_terms(addition, at)):
                maker = None if isinstance(item, _jaxlib.Literal) else self.made.get(item)
                if maker is not None and _is_sum(maker) and not self._is_leaf(maker) and self._is_inner(item):
                    stack.append((maker, maker.outputs.index(item), None))
                else:
                    stack.append((addition, at, item))
        count: collections.Counter[Any] = collections.Counter()  # how many gradients are in a sum
        own: collections.Counter[Any] = collections.Counter()  # of which an addition reads so many itself
        for leaf, total in zip(leaves, adding, strict=True):
            own[total] += leaf.label is not None
        for addition, at in reversed(inner):
            total = addition.outputs[at]
            terms = [v for v in _terms(addition, at) if not isinstance(v, _jaxlib.Literal)]
            count[total] = own[total] + sum(count[v] for v in terms)
        for leaf, total in zip(leaves, adding, strict=True):
            if leaf.label is None:
                (value,) = leaf.values
                late = not isinstance(value, _jaxlib.Literal) and value in self.behind
                leaf.last = late or count[total] > 1
        return leaves

    def _leaf(self, value: Any) -> _Leaf:
        maker = None if isinstance(value, _jaxlib.Literal) else self.made.get(value)
        mesh = None if maker is None else self.meshes.get(id(maker))
        return _Leaf([value], mesh, self.labels[id(maker)] if maker is not None and mesh is not None else None)

    def _chain(self, results: Sequence[Any], leaves: Sequence[_Leaf], inner: Sequence[Step]) -> list[Step]:
        """The additions in their new order; the last one makes `results`."""
        others = [leaf for leaf in leaves if leaf.label is None]
        by_place: dict[tuple[int, MeshSpec], list[_Leaf]] = {}  # by pipeline and slice
        for leaf in leaves:
            if leaf.label is not None:
                assert leaf.mesh is not None
                by_place.setdefault((leaf.label.pipeline, leaf.mesh), []).append(leaf)
        first = [leaf for leaf in others if not leaf.last]
        places = sorted(by_place, key=lambda place: (place[0], self.stages[place[0]].get(place[1], 0)))
        home = self._home(results[0].aval, [mesh for _, mesh in places])
        places.sort(key=lambda place: place[1] != home)
        equations = iter(reversed(inner))
        chain: list[Step] = []

        def add(a: Sequence[Any], b: Sequence[Any], label: Label | None) -> Sequence[Any]:
            step = next(equations)
            is_last = len(chain) == len(inner) - 1
            sums = list(results) if is_last else [_jaxlib.new_var(v.aval) for v in results]
            chain.append(dataclasses.replace(step, inputs=[*a, *b], outputs=sums, label=label))
            return sums

        total: Sequence[Any] | None = None
        for place in places:
            mine = sorted(by_place[place], key=self._turn)
            subtotal: Sequence[Any] | None = None
            for leaf in [*first, *mine]:
                label = None if leaf.label is None else dataclasses.replace(leaf.label, phase=Phase.SUM)
                subtotal = leaf.values if subtotal is None else add(subtotal, leaf.values, label)
            first = []
            assert subtotal is not None
            total = subtotal if total is None else add(total, subtotal, None)
        for leaf in others:
            if leaf.last:
                assert total is not None
                total = add(total, leaf.values, None)
        return chain

    def _turn(self, leaf: _Leaf) -> int:
        assert leaf.mesh is not None and leaf.label is not None
        unit = Unit(leaf.label.phase, leaf.label.microbatch, leaf.label.chunk)
        return self.place.get((leaf.label.pipeline, leaf.mesh, unit), 0)

    def _home(self, aval: Any, meshes: Sequence[MeshSpec]) -> MeshSpec | None:
        """The slice of the argument that could have this gradient: all these slices read it, and its type fits."""
        shared = set.intersection(*(self.arguments.get(mesh, set()) for mesh in meshes)) if meshes else set()
        homes = [
            mesh
            for v, mesh in self.homes.items()
            if v in shared and mesh in meshes and (v.aval.shape, v.aval.dtype) == (aval.shape, aval.dtype)
        ]
        return homes[0] if homes else None


def _behind_what_they_read(steps: Sequence[Step], moved: set[int]) -> list[Step]:
    """The steps, with those in `moved` (ids) directly behind the last step whose result they read."""
    made: dict[Any, int] = {}
    places: list[tuple[int, int]] = []
    for n, step in enumerate(steps):
        place = max((made[v] for v in step.reads if v in made), default=-1) if id(step) in moved else n
        made.update((v, place) for v in step.outputs)
        places.append((place, n))
    return [steps[n] for _, n in sorted(places)]


def _are_gradients(leaves: Sequence[_Leaf], shape: tuple[int, ...]) -> bool:
    """True if microbatches made two of the leaves or more, as gradients, and any order of additions has this shape."""
    made = [leaf.label for leaf in leaves if leaf.label is not None]
    scalars = [leaf for leaf in leaves if leaf.values[0].aval.shape != shape]
    phases = {label.phase for label in made}
    return len(made) >= 2 and len(scalars) <= 1 and phases <= {Phase.BACKWARD, Phase.WEIGHTS}


def _is_sum(step: Step) -> bool:
    is_addition = step.eqn.primitive is add_many_p or step.eqn.primitive.name in ("add", "add_any")
    return step.kind is StepKind.PLAIN and is_addition and not step.demands


def _terms(addition: Step, at: int) -> tuple[Any, Any]:
    """What sum number `at` of an addition adds."""
    return addition.inputs[at], addition.inputs[len(addition.outputs) + at]


def _left(addition: Step, taken: Set[int]) -> list[Step]:
    """The addition without the sums `taken`; nothing if none is left."""
    left = [at for at in range(len(addition.outputs)) if at not in taken]
    terms = [_terms(addition, at) for at in left]
    if not left:
        return []
    inputs = [*(a for a, _ in terms), *(b for _, b in terms)]
    return [dataclasses.replace(addition, inputs=inputs, outputs=[addition.outputs[at] for at in left])]
