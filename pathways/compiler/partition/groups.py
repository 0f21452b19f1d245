"""Chooses the slice of each plain operation, and groups plain operations into computations, each on one slice.

jaxlib's compiler infers meshes too, but it cannot be used for this. It refuses a program in which an inferred operation
has no neighbour to merge into (an optimiser update after the last placed call). And merging would make equal calls
unequal. So every operation goes to the compiler with a slice. The slice is chosen by votes, weighted by bytes: what the
operation reads votes for its own slice, and the placed calls and transfers that read its results vote for theirs. Cheap
operations on constants only (zeros, iotas, the 1.0 that a gradient starts from) are repeated inside each computation
that reads them, and never transferred.

Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pathways import _jaxlib
from pathways.compiler.flatten import FlatProgram, Step, StepKind
from pathways.compiler.ir import Label, MeshSpec, Phase
from pathways.compiler.partition.meshes import check
from pathways.compiler.parts import Cut, cut_of, is_cut
from pathways.compiler.trace import Argument

#: Constant expressions of more operations than this run once, on the slice that first reads them.
_CHEAP_OPERATIONS = 8


@dataclasses.dataclass
class Group:
    """Steps that become one computation: one placed call, one transfer, or a run of plain operations.

    `steps` starts with the cheap constant operations that the group repeats. A transfer that the user did not write has
    no steps. `inputs` and `outputs` are the steps' variables. `reads[i]` is the variable that input i reads on this
    mesh: the input itself, or a transferred copy of it.
    """

    kind: StepKind
    steps: list[Step]
    mesh: MeshSpec
    inputs: list[Any]
    outputs: list[Any]
    reads: list[Any]
    cut: Cut | None = None  # what it does, if it is nothing else


@dataclasses.dataclass
class Grouped:
    """A program as groups in a valid order.

    `homes` maps each variable to its slice. `outvars` are the program's results; a result that a placed function only
    passes through is replaced by the function's input.
    """

    groups: list[Group]
    homes: dict[Any, MeshSpec]
    outvars: list[Any]


def group(program: FlatProgram, arguments: Sequence[Argument], default: MeshSpec) -> Grouped:
    """Groups a program. If a value is read on another slice than its own, one transfer per slice moves it there."""
    homes = {v: a.mesh for v, a in zip(program.invars, arguments, strict=True) if a.mesh is not None}
    moved: dict[tuple[Any, MeshSpec], Any] = {}
    passed: dict[Any, Any] = {}
    out: list[Group] = []
    for g in _groups(program, arguments, default):
        for number, v in enumerate(g.reads):
            v = g.reads[number] = passed.get(v, v)
            home = homes.setdefault(v, g.mesh)  # an argument without a slice goes to the slice that reads it first
            if home != g.mesh and g.kind is not StepKind.TRANSFER:
                here = moved.get((v, g.mesh))
                if here is None:
                    here = moved[v, g.mesh] = _jaxlib.new_var(v.aval)
                    out.append(Group(StepKind.TRANSFER, [], g.mesh, [v], [here], [v]))
                    homes[here] = g.mesh
                g.reads[number] = here
        if g.kind is StepKind.PLACED:
            passes = _passed_through(g)
            passed.update(passes)
            g.outputs = [v for v in g.outputs if v not in passes]
        if g.outputs:
            homes.update((v, g.mesh) for v in g.outputs)
            out.append(g)
    outvars = [v if isinstance(v, _jaxlib.Literal) else passed.get(v, v) for v in program.outvars]
    return Grouped(out, homes, outvars)


def plain_slices(program: FlatProgram, arguments: Sequence[Argument], default: MeshSpec) -> dict[int, MeshSpec]:
    """The slice of each plain operation, by the step's id; without cheap operations on constants only."""
    return _infer(program, arguments, default, cheap_constants(program))


def _passed_through(g: Group) -> dict[Any, Any]:
    """The outputs of a placed call that are inputs of it, each with the variable that the input reads."""
    step = g.steps[-1]
    jaxpr = step.eqn.params["jaxpr"].jaxpr
    reads = dict(zip(g.inputs, g.reads, strict=True))
    given = {
        inner: reads[v]
        for inner, v in zip(jaxpr.invars, step.inputs, strict=True)
        if not isinstance(v, _jaxlib.Literal) and v in reads
    }
    return {
        v: given[inner]
        for inner, v in zip(jaxpr.outvars, step.outputs, strict=True)
        if not isinstance(inner, _jaxlib.Literal) and inner in given and v in g.outputs
    }


def _groups(program: FlatProgram, arguments: Sequence[Argument], default: MeshSpec) -> list[Group]:
    cheap = cheap_constants(program)
    meshes = _infer(program, arguments, default, cheap)
    readers = _readers(program, cheap)
    runs: list[list[Step]] = []
    for step in program.steps:
        if step.kind is StepKind.PLAIN:
            if any(v in cheap for v in step.outputs):
                continue
            if runs and runs[-1][0].kind is StepKind.PLAIN:
                runs[-1].append(step)
                continue
        runs.append([step])
    groups: list[Group] = []
    for run in runs:
        if run[0].kind is StepKind.PLAIN:
            for steps in _split_by_mesh(run, meshes):
                for step in steps:
                    check(step.demands, meshes[id(step)], "the program, outside of placed functions,")
                groups.append(_make(StepKind.PLAIN, steps, meshes[id(steps[0])], cheap, program, readers))
        else:
            assert run[0].mesh is not None
            groups.append(_make(run[0].kind, run, run[0].mesh, cheap, program, readers))
    returned = list(dict.fromkeys(v for v in program.outvars if not isinstance(v, _jaxlib.Literal) and v in cheap))
    if returned:
        steps = ancestors(returned, cheap)
        groups.append(Group(StepKind.PLAIN, steps, default, [], returned, []))
    return groups


def _make(
    kind: StepKind,
    steps: list[Step],
    mesh: MeshSpec,
    cheap: Mapping[Any, Step],
    program: FlatProgram,
    readers: Mapping[Any, set[int]],
) -> Group:
    read = [v for step in steps for v in step.reads]
    repeated = [] if kind is StepKind.TRANSFER else ancestors(read, cheap)
    written = {v for step in (*repeated, *steps) for v in step.outputs}
    inputs = [v for v in dict.fromkeys(read) if v not in written and v not in program.constants]
    inside = {id(step) for step in steps}
    outputs = [
        v for step in steps for v in step.outputs if kind is not StepKind.PLAIN or readers.get(v, set()) - inside
    ]
    steps = [*repeated, *steps]
    return Group(kind, steps, mesh, inputs, outputs, list(inputs), cut_of(steps, outputs))


def _readers(program: FlatProgram, cheap: Mapping[Any, Step]) -> dict[Any, set[int]]:
    """For each variable, the ids of the steps that read it; 0 stands for the program's results."""
    readers: dict[Any, set[int]] = {}
    for step in program.steps:
        for v in step.reads:
            readers.setdefault(v, set()).add(id(step))
    for v in program.outvars:
        if not isinstance(v, _jaxlib.Literal):
            readers.setdefault(v, set()).add(0)
    return readers


def cheap_constants(program: FlatProgram) -> dict[Any, Step]:
    """Variables made from constants by few plain operations, and the step that writes each.

    Variables that the user transfers are left out: such a value is made once, on the slice that it goes to.
    """
    cheap: dict[Any, Step] = {}
    cost: dict[Any, int] = {}
    sent = {v for step in program.steps if step.kind is StepKind.TRANSFER for v in step.reads}
    for step in program.steps:
        if step.kind is not StepKind.PLAIN or step.demands or not sent.isdisjoint(step.outputs) or is_cut(step):
            continue
        if step.calls is not _jaxlib.CallsBack.NOTHING or list(_jaxlib.jaxprs_in(step.eqn.params)):
            continue
        if all(v in cheap or v in program.constants for v in step.reads):
            total = 1 + sum(cost.get(v, 0) for v in step.reads)
            if total <= _CHEAP_OPERATIONS:
                for v in step.outputs:
                    cheap[v], cost[v] = step, total
    return cheap


def ancestors(variables: Iterable[Any], cheap: Mapping[Any, Step]) -> list[Step]:
    """The cheap steps behind those variables, in order."""
    found: dict[int, Step] = {}

    def visit(v: Any) -> None:
        step = cheap.get(v)
        if step is not None and id(step) not in found:
            for other in step.reads:
                visit(other)
            found[id(step)] = step

    for v in variables:
        visit(v)
    return list(found.values())


def _nbytes(v: Any) -> int:
    shape, dtype = _jaxlib.physical(v.aval)
    return math.prod(shape) * dtype.itemsize


def _infer(
    program: FlatProgram, arguments: Sequence[Argument], default: MeshSpec, cheap: Mapping[Any, Step]
) -> dict[int, MeshSpec]:
    """The mesh of each plain step, by the step's id."""
    known = {v: a.mesh for v, a in zip(program.invars, arguments, strict=True) if a.mesh is not None}
    wanted: dict[Any, dict[MeshSpec, int]] = {}
    sizes: dict[int, int] = {}  # by the id of a type, because many values share one

    def nbytes(v: Any) -> int:
        known_size = sizes.get(id(v.aval))
        if known_size is None:
            known_size = sizes[id(v.aval)] = _nbytes(v)
        return known_size

    for step in program.steps:
        if step.kind is not StepKind.PLAIN and step.mesh is not None:  # not known: of a loop, a branch
            known.update((v, step.mesh) for v in step.outputs)
            for v in step.reads:
                votes = wanted.setdefault(v, {})
                votes[step.mesh] = votes.get(step.mesh, 0) + nbytes(v)
    meshes: dict[int, MeshSpec] = {}
    all_meshes = list(dict.fromkeys([*known.values(), default]))
    plain = [
        step for step in program.steps if step.kind is StepKind.PLAIN and not any(v in cheap for v in step.outputs)
    ]
    for step in plain:
        votes = {}
        for v in step.reads:
            if v in known:
                votes[known[v]] = votes.get(known[v], 0) + nbytes(v)
        if votes:
            for v in step.outputs:
                for mesh, weight in wanted.get(v, {}).items():
                    votes[mesh] = votes.get(mesh, 0) + weight
            meshes[id(step)] = _fitting(step, max(votes, key=votes.__getitem__), all_meshes)
            known.update((v, meshes[id(step)]) for v in step.outputs)
    for step in reversed(plain):  # a step that reads nothing placed runs on the slice of its first reader
        if id(step) not in meshes:
            readers = [mesh for v in step.outputs for mesh in wanted.get(v, {})]
            meshes[id(step)] = _fitting(step, readers[-1] if readers else default, all_meshes)
        for v in step.reads:
            if v not in known:
                votes = wanted.setdefault(v, {})
                votes.pop(meshes[id(step)], None)
                votes[meshes[id(step)]] = nbytes(v)
    return meshes


def _fitting(step: Step, mesh: MeshSpec, others: Sequence[MeshSpec]) -> MeshSpec:
    """`mesh`; or, if `mesh` lacks axes that the step names: the slice of its sharding, or the only slice that fits."""
    if all(demand.fits(mesh) for demand in step.demands):
        return mesh
    named = [demand.home for demand in step.demands if demand.home is not None]
    for candidates in (named, others):
        fitting = [other for other in dict.fromkeys(candidates) if all(demand.fits(other) for demand in step.demands)]
        if len(fitting) == 1:
            return fitting[0]
    return mesh


def _unit(label: Label) -> tuple[int, int, int, Phase]:
    return label.pipeline, label.microbatch, label.chunk, label.phase


def _split_by_mesh(run: Sequence[Step], meshes: Mapping[int, MeshSpec]) -> list[list[Step]]:
    """Splits a run of plain steps into few parts, each on one mesh, and each of one microbatch if there is a schedule.

    The parts are in an order in which each reads only earlier parts. A cut (`parts`) is a part of its own.
    """
    places = {
        id(step): (meshes[id(step)], step.label and _unit(step.label), id(step) if is_cut(step) else None)
        for step in run
    }
    level: dict[Any, tuple[int, Any]] = {}
    pieces: dict[tuple[int, Any], list[Step]] = {}
    for step in run:
        place = places[id(step)]
        depth = 0
        for v in step.reads:
            if v in level:
                before, other = level[v]
                depth = max(depth, before if other == place else before + 1)
        level.update((v, (depth, place)) for v in step.outputs)
        pieces.setdefault((depth, place), []).append(step)
    return [pieces[key] for key in sorted(pieces, key=lambda key: key[0])]
