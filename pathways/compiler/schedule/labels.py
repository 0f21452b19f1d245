"""Labels the steps of pipelines: their stage, their microbatch and their phase.

A placed call belongs to the microbatch of its scope (`compiler/pipeline_spec.py`), whatever it reads, or, in a program
without scopes, to that of its part (`parts`) (SCHED-1). It is a backward step if differentiation made it, or if it
reads a result of a backward step of its microbatch. A plain operation belongs to the one microbatch from which it
reads, or that reads it. Other placed calls belong to none, so they must not stand between calls of a pipeline.

A program may have several pipelines. Each is an order of its own.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pathways import _jaxlib, errors
from pathways.compiler import pipeline_spec
from pathways.compiler.flatten import Step, StepKind
from pathways.compiler.ir import Label, MeshSpec, Phase, PipelineInfo
from pathways.compiler.lengths import Lengths
from pathways.compiler.orders import Unit
from pathways.compiler.pipeline_spec import PipelineSpec
from pathways.compiler.schedule.doubts import describe
from pathways.compiler.schedule.parts import Parts


@dataclasses.dataclass
class Pipeline:
    """The pipeline of a program.

    `stages` gives the stage of each slice; slices that work side by side have one stage. `depth` is the number of
    stages, `chunks` the number of parts of the model that each stage has. `feeds` has the ids of labelled steps that
    need no result of the pipeline, such as the slicing of a batch into microbatches: they run just before their first
    reader.

    `number` is the pipeline's number on its level, `key` its name; "" if it has no scopes. `title` begins each error.
    `sequences` has the order of the units on each stage; if not `ordered`, it is the order of the text, and the steps
    stay where they are. `schedule`, `is_searched` and `lengths` are those of `PipelineInfo`.
    """

    stages: dict[MeshSpec, int]
    depth: int
    microbatches: int
    chunks: int
    feeds: set[int]
    number: int = 0
    key: str = ""
    title: str = ""
    sequences: list[Sequence[Unit]] = dataclasses.field(default_factory=list)
    ordered: bool = True
    schedule: str = "none"
    is_searched: bool = False
    lengths: tuple[Lengths, ...] = ()

    def info(self) -> PipelineInfo:
        """What the compiled program knows of the pipeline."""
        return PipelineInfo(self.title, self.schedule, self.is_searched, self.lengths, self.key)


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


def label(
    steps: Sequence[Step], title: str, without: Collection[str] = (), parts: Parts | None = None
) -> list[Pipeline]:
    """Sets the labels of steps with scopes and of what belongs to them; the pipelines in the order of the text.

    `title` begins each error. The scopes of the pipelines `without` do not count. `parts` is instead of scopes.

    Raises:
        ScheduleError: a pipeline that lacks a microbatch, one that visits a slice twice, or a placed call without a
            scope between calls of a pipeline.
    """
    if parts is not None:
        scopes = {step: _jaxlib.Scope("", microbatch, chunk) for step, (microbatch, chunk) in parts.units.items()}
    else:
        scoped = (step for step in steps if step.kind is StepKind.PLACED)
        scopes = {id(step): step.scope for step in scoped if step.scope and step.scope.pipeline not in without}
    if not scopes:
        return []
    labeller = _Labeller(steps, title, scopes, parts)
    labeller.label_calls()
    found = []
    for name, number in labeller.numbers.items():
        spec = pipeline_spec.find(name)
        stages = labeller.stages(number, spec)
        count, chunks = labeller.count(name, spec), 1 + max((c for _, c in labeller.places[number]), default=0)
        found.append(Pipeline(stages, 1 + max(stages.values()), count, chunks, set(), number, name))
    labeller.label_feeds({pipeline.number: pipeline.feeds for pipeline in found})
    for step in steps:
        if step.label is not None:
            stages = found[step.label.pipeline].stages
            mesh = labeller.meshes[step.label.pipeline][step.label.stage]
            step.label = dataclasses.replace(step.label, stage=stages[mesh])
    return found


def check_plain_stages(steps: Sequence[Step], pipeline: Pipeline, slices: Mapping[int, MeshSpec]) -> None:
    """Finds plain operations of the pipeline on a slice that has no placed function of it. All labels are set.

    They would be a stage that follows no schedule. Operations behind which there is no placed call of the pipeline,
    such as metrics, may run anywhere. `slices` has the slices of plain operations, by the step's id.

    Raises:
        ScheduleError: such an operation.
    """
    needed: set[Any] = set()
    for step in reversed(steps):
        mine = step.label is not None and step.label.pipeline == pipeline.number
        if (step.kind is StepKind.PLACED and mine) or not needed.isdisjoint(step.outputs):
            needed.update(step.reads)
            mesh = slices.get(id(step))
            if mesh is None or mesh in pipeline.stages or step.label is None or not mine or id(step) in pipeline.feeds:
                continue
            if step.kind is StepKind.PLAIN and step.label.phase is Phase.FORWARD:
                raise errors.ScheduleError(
                    f"{pipeline.title}: microbatch {step.label.microbatch} has the operation {step.eqn.primitive.name} "
                    f"on slice {mesh.name!r}, which calls no placed function for each microbatch; expected each stage "
                    f"to be made of placed functions. Put the operations on slice {mesh.name!r} into a placed function"
                )


class _Labeller:
    """One labelling. Until the stages are known, the stage in a label is a number of a slice in `meshes`."""

    def __init__(
        self, steps: Sequence[Step], title: str, scopes: Mapping[int, _jaxlib.Scope], parts: Parts | None
    ) -> None:
        self.steps = steps
        self.title = title
        self.scopes = scopes  # by the step's id
        self.parts = parts
        names = list(dict.fromkeys(scopes[id(step)].pipeline for step in steps if id(step) in scopes))
        self.numbers = {name: n for n, name in enumerate(names)}
        self.origins: dict[Any, _Origin] = {}
        self.meshes: list[list[MeshSpec]] = [[] for _ in names]  # per pipeline, its slices as they appear
        # From slice to slice in forward direction: of forward steps, and what backward steps say of it.
        self.edges: list[set[tuple[MeshSpec, MeshSpec]]] = [set() for _ in names]
        self.returns: list[set[tuple[MeshSpec, MeshSpec]]] = [set() for _ in names]
        self.is_forward = [False for _ in names]  # whether there is a forward step
        # Per pipeline, the stage and the chunk of each stage that a scope may name; () if the calls say it.
        unnamed = [(0, chunk) for chunk in range(parts.chunks)] if parts is not None else []
        self.places = [spec.places() if (spec := pipeline_spec.find(name)) else unnamed for name in names]

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
        scope = self.scopes.get(id(step))
        if scope is None:
            origin.late = {**{n: step for n, _ in origin.units}, **origin.late}
            return origin
        number, microbatch = self.numbers[scope.pipeline], scope.microbatch
        assert step.mesh is not None and microbatch is not None
        # One loss of all microbatches is in no part, and its gradient goes to all. The dataflow says if that may be.
        if number in origin.late and (self.parts is None or not step.derivatives):
            raise self.refuse(
                f"{describe(origin.late[number])} reads a result of a microbatch and is read by microbatch "
                f"{microbatch} of the same pipeline, but it has no scope; expected each placed call between two calls "
                f"of a pipeline to be in the scope of its microbatch (jax.named_scope"
                f'("{pipeline_spec.scope_name(scope.pipeline or "p0", microbatch)}"))'
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
            visit = scope.stage
            if visit is None or visit >= len(self.places[number]):
                raise self.refuse(
                    f"{describe(step)} is in a scope {scope.pipeline!r} of a pw.pipeline, but is no stage of it; "
                    "expected another name in a scope of your own"
                )
            chunk = self.places[number][visit][1]
        step.label = Label(stage, microbatch, Phase.BACKWARD if backward else Phase.FORWARD, chunk, pipeline=number)
        return _Origin({(number, microbatch): backward}, {(number, step.mesh)}, stage, chunk)

    def count(self, name: str, spec: PipelineSpec | None) -> int:
        """The number of microbatches."""
        found = {scope.microbatch or 0 for scope in self.scopes.values() if scope.pipeline == name}
        count = spec.microbatches if spec is not None else 1 + max(found)
        if missing := sorted(set(range(count)) - found):
            raise self.refuse(
                f"no placed call has the scope of microbatches {missing[:8]} of {count} of pipeline {name!r}; expected "
                f"calls for each microbatch from 0, in scopes such as {pipeline_spec.scope_name(name, 0)!r}"
            )
        return count

    def stages(self, number: int, spec: PipelineSpec | None) -> dict[MeshSpec, int]:
        """The stage of each slice: what the pipeline says, or the longest way to it through other slices."""
        if spec is not None and spec.meshes:
            return spec.stages()
        if self.parts is not None and self.parts.stages:
            return dict(self.parts.stages)
        edges = self.edges[number] if self.is_forward[number] else self.returns[number]
        before = {mesh: {a for a, b in edges if b == mesh} for mesh in self.meshes[number]}
        stage: dict[MeshSpec, int] = {}
        while len(stage) < len(before):
            ready = [mesh for mesh in before if mesh not in stage and before[mesh] <= stage.keys()]
            if not ready:
                circle = [mesh.name for mesh in before if mesh not in stage]
                raise self.refuse(
                    f"microbatches visit slices {circle} more than once; expected one stage per slice. Give each "
                    "stage a slice, or use Interleaved1F1B or Circular and pw.pipeline, where a slice may have several "
                    "chunks of the model"
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
