"""Labels the steps whose scopes say to which microbatch they belong (`compiler/pipeline_spec.py`).

Nothing is guessed here (SCHED-1). A placed call belongs to the microbatch of its scope, whatever it reads. It is a
backward step if differentiation made it, or if it reads a result of a backward step of its microbatch. What has no
scope is as in `labels`: a plain operation belongs to the one microbatch from which it reads, or that reads it. A placed
call without a scope belongs to none, so it must not stand between calls of a pipeline.

A program may have several pipelines. Each is an order of its own.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pathways import errors
from pathways.compiler import pipeline_spec
from pathways.compiler.flatten import Step, StepKind
from pathways.compiler.ir import Label, MeshSpec, Phase
from pathways.compiler.pipeline_spec import PipelineSpec
from pathways.compiler.schedule.labels import Pipeline
from pathways.compiler.schedule.roles import describe


@dataclasses.dataclass
class Scoped:
    """A pipeline that scopes name. `spec` is None if the scopes are the user's own."""

    name: str
    spec: PipelineSpec | None
    pipeline: Pipeline


@dataclasses.dataclass
class _Origin:
    """Where a value comes from: the nearest labelled steps behind it.

    `units` has their pipelines and microbatches, each with whether one of them is a backward step; `slices` has their
    pipelines and slices. `late` has, by pipeline, a placed
    call without a scope that stands between those steps and the value.
    """

    units: dict[tuple[int, int], bool] = dataclasses.field(default_factory=dict)
    slices: set[tuple[int, MeshSpec]] = dataclasses.field(default_factory=set)
    stage: int = 0
    chunk: int = 0
    late: dict[int, Step] = dataclasses.field(default_factory=dict)

    def merge(self, other: _Origin) -> None:
        if not self.units:
            self.stage, self.chunk = other.stage, other.chunk
        for unit, backward in other.units.items():
            self.units[unit] = backward or self.units.get(unit, False)
        self.slices |= other.slices
        self.late = {**other.late, **self.late}


def label(steps: Sequence[Step], title: str, without: Collection[str] = ()) -> list[Scoped]:
    """Sets the labels of steps with scopes and of what belongs to them; the pipelines in the order of the text.

    `title` begins each error. The scopes of the pipelines `without` do not count.

    Raises:
        ScheduleError: a pipeline that lacks a microbatch, one that visits a slice twice, or a
            placed call without a scope between calls of a pipeline.
    """
    scopes = (step.scope for step in steps if step.kind is StepKind.PLACED)
    names = [name for name in dict.fromkeys(scope.pipeline for scope in scopes if scope) if name not in without]
    if not names:
        return []
    labeller = _Labeller(steps, names, title)
    labeller.label_calls()
    found = []
    for number, name in enumerate(names):
        spec = pipeline_spec.find(name)
        stages = labeller.stages(number, spec)
        count, chunks = labeller.count(number, spec), 1 + max((c for _, c in labeller.places[number]), default=0)
        pipeline = Pipeline(stages, 1 + max(stages.values()), count, chunks, set(), number, name)
        found.append(Scoped(name, spec, pipeline))
    labeller.label_feeds({one.pipeline.number: one.pipeline.feeds for one in found})
    for step in steps:
        if step.label is not None:
            scoped = found[step.label.pipeline]
            mesh = labeller.meshes[step.label.pipeline][step.label.stage]
            step.label = dataclasses.replace(step.label, stage=scoped.pipeline.stages[mesh])
    return found


class _Labeller:
    """One labelling. Until the stages are known, the stage in a label is a number of a slice in `meshes`."""

    def __init__(self, steps: Sequence[Step], names: Sequence[str], title: str) -> None:
        self.steps = steps
        self.numbers = {name: n for n, name in enumerate(names)}
        self.title = title
        self.origins: dict[Any, _Origin] = {}
        self.meshes: list[list[MeshSpec]] = [[] for _ in names]  # per pipeline, its slices as they appear
        # From slice to slice in forward direction: of forward steps, and what backward steps say of it.
        self.edges: list[set[tuple[MeshSpec, MeshSpec]]] = [set() for _ in names]
        self.returns: list[set[tuple[MeshSpec, MeshSpec]]] = [set() for _ in names]
        self.is_forward = [False for _ in names]  # whether there is a forward step
        # Per pipeline, the stage and the chunk of each stage that a scope may name; () if the calls say it.
        self.places = [spec.places() if (spec := pipeline_spec.find(name)) else [] for name in names]

    def refuse(self, why: str) -> errors.ScheduleError:
        return errors.ScheduleError(f"{self.title}: {why}")

    def label_calls(self) -> None:
        """Labels the placed calls, and the plain steps that read results of one microbatch."""
        for step in self.steps:
            origin = _Origin()
            behind = [self.origins[v] for v in step.reads if v in self.origins]
            for other in {id(each): each for each in behind}.values():  # all results of a step have one
                origin.merge(other)
            if step.kind in (StepKind.PLACED, StepKind.CONTROL):
                origin = self._call(step, origin)
            elif step.kind is StepKind.PLAIN and len(origin.units) == 1 and not origin.late:
                (((number, microbatch), backward),) = origin.units.items()
                backward |= step.derivatives > 0
                origin.units = {(number, microbatch): backward}
                phase = Phase.BACKWARD if backward else Phase.FORWARD
                step.label = Label(origin.stage, microbatch, phase, origin.chunk, pipeline=number)
            for v in step.outputs:
                self.origins[v] = origin

    def _call(self, step: Step, origin: _Origin) -> _Origin:
        if step.scope is None or step.scope.pipeline not in self.numbers:
            origin.late = {**{n: step for n, _ in origin.units}, **origin.late}
            return origin
        number, microbatch = self.numbers[step.scope.pipeline], step.scope.microbatch
        assert step.mesh is not None and microbatch is not None
        if number in origin.late:
            raise self.refuse(
                f"{describe(origin.late[number])} reads a result of a microbatch and is read by microbatch "
                f"{microbatch} of the same pipeline, but it has no scope; expected each placed call between two calls "
                f"of a pipeline to be in the scope of its microbatch (jax.named_scope"
                f'("{pipeline_spec.scope_name(step.scope.pipeline, microbatch)}"))'
            )
        backward = step.derivatives > 0 or origin.units.get((number, microbatch), False)
        meshes = self.meshes[number]
        if step.mesh not in meshes:
            meshes.append(step.mesh)
        before = {m for n, m in origin.slices if n == number and m != step.mesh}
        self.is_forward[number] |= not backward
        if backward:
            self.returns[number] |= {(step.mesh, m) for m in before}
        else:
            self.edges[number] |= {(m, step.mesh) for m in before}
        stage = meshes.index(step.mesh)
        chunk = 0
        if self.places[number]:
            visit = step.scope.stage
            if visit is None or visit >= len(self.places[number]):
                raise self.refuse(
                    f"{describe(step)} is in a scope {step.scope.pipeline!r} of a pw.pipeline, but is no stage of it; "
                    "expected another name in a scope of your own"
                )
            chunk = self.places[number][visit][1]
        step.label = Label(stage, microbatch, Phase.BACKWARD if backward else Phase.FORWARD, chunk, pipeline=number)
        return _Origin({(number, microbatch): backward}, {(number, step.mesh)}, stage, chunk)

    def count(self, number: int, spec: PipelineSpec | None) -> int:
        """The number of microbatches."""
        found = {
            step.label.microbatch for step in self.steps if step.label is not None and step.label.pipeline == number
        }
        count = spec.microbatches if spec is not None else 1 + max(found)
        if missing := sorted(set(range(count)) - found):
            name = next(name for name, n in self.numbers.items() if n == number)
            raise self.refuse(
                f"no placed call has the scope of microbatches {missing[:8]} of {count} of pipeline {name!r}; expected "
                f"calls for each microbatch from 0, in scopes such as {pipeline_spec.scope_name(name, 0)!r}"
            )
        return count

    def stages(self, number: int, spec: PipelineSpec | None) -> dict[MeshSpec, int]:
        """The stage of each slice: what the pipeline says, or the longest way to it through other slices."""
        if spec is not None and spec.meshes:
            return spec.stages()
        edges = self.edges[number] if self.is_forward[number] else self.returns[number]
        before = {mesh: {a for a, b in edges if b == mesh} for mesh in self.meshes[number]}
        stage: dict[MeshSpec, int] = {}
        while len(stage) < len(before):
            ready = [mesh for mesh in before if mesh not in stage and before[mesh] <= stage.keys()]
            if not ready:
                circle = [mesh.name for mesh in before if mesh not in stage]
                raise self.refuse(
                    f"microbatches visit slices {circle} more than once; expected one stage per slice. Give each "
                    "stage a slice, or use pw.pipeline, where a slice may have several chunks of the model"
                )
            stage.update({mesh: 1 + max((stage[a] for a in before[mesh]), default=-1) for mesh in ready})
        return stage

    def label_feeds(self, feeds: Mapping[int, set[int]]) -> None:
        """Labels steps that read no result of a pipeline and are read by one microbatch. It fills `feeds`."""
        readers: dict[Any, list[Label | None]] = {}
        for step in reversed(self.steps):
            if step.label is None and step.kind is not StepKind.PLACED and not self._reads_results(step.reads):
                labels = [label for v in step.outputs for label in readers.get(v, [])]
                known = [label for label in labels if label is not None]
                if known and len(known) == len(labels) and len({(one.pipeline, one.microbatch) for one in known}) == 1:
                    step.label = known[-1]
                    feeds[step.label.pipeline].add(id(step))
            for v in step.reads:
                readers.setdefault(v, []).append(step.label)

    def _reads_results(self, reads: Iterable[Any]) -> bool:
        return any(v in self.origins and self.origins[v].units for v in reads)
