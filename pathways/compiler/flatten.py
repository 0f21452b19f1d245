"""From a traced jaxpr to a flat list of steps: placed calls, transfers, and plain operations between them.

`inlining` makes the steps; loops and branches with placed calls inside become control steps (`control.assembling`).
Here the steps are checked, and get what later parts ask for. `Step.calls` says whether a step calls the client back;
`callback_chains` puts such steps in order.

Pure: works on jaxprs only.
"""

from __future__ import annotations

from typing import Any

from pathways import _jaxlib, errors
from pathways.compiler import placed, specs
from pathways.compiler.added_primitives.exchange import PRIMITIVES
from pathways.compiler.added_primitives.transfers import targets_of
from pathways.compiler.callback_chains import thread
from pathways.compiler.inlining import Inliner, holds_slice_tag, read, slice_tag_of
from pathways.compiler.ir import MeshSpec, Spec
from pathways.compiler.options import UNROLL
from pathways.compiler.partition import meshes
from pathways.compiler.steps import FlatProgram as FlatProgram
from pathways.compiler.steps import Step as Step
from pathways.compiler.steps import StepKind as StepKind
from pathways.compiler.trace import Traced


def flatten(traced: Traced, unroll: int = UNROLL, chunks: int = 1) -> FlatProgram:
    """The flat program of a traced program, without dead steps.

    A scan with placed calls inside is unrolled if it has at most `unroll` iterations. Other loops and branches with
    placed calls inside are control steps. An outermost such scan is cut into `chunks` loops.

    Raises:
        CallbackError: a callback of a kind that hosts cannot make.
        EffectError: another effect that we do not run.
        TraceError: a traced value escaped from its function.
        ProgramError: a placed call or a device_put inside a shard_map, say, which is one computation.
    """
    closed = traced.jaxpr
    _refuse(closed, traced.name)
    _refuse_unknown_effects(closed, traced.name)
    program = FlatProgram(
        list(closed.jaxpr.invars), dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)), [], []
    )
    env: dict[Any, Any] = {}
    inliner = Inliner(program, traced.name, unroll, chunks=chunks)
    inliner.inline(closed.jaxpr, env, fresh=False)
    program.outvars = [inliner.whole(read(env, v)) for v in closed.jaxpr.outvars]
    _finish(program, traced.name, {})
    home = {
        v: (argument.mesh, argument.spec)
        for v, argument in zip(program.invars, traced.arguments, strict=True)
        if argument.mesh is not None and argument.spec is not None
    }
    _send_cotangents_home(program, home, {})
    thread(program, traced.given)
    return program


def _finish(program: FlatProgram, name: str, memo: dict[int, list[Spec | None]]) -> None:
    """Drops dead steps of a program and of the bodies in it, checks the others, and fills in what they need."""
    for step in program.steps:
        for body in step.control.bodies if step.control is not None else ():
            _finish(body, name, memo)
    _drop_dead(program)
    callers: dict[int, _jaxlib.CallsBack] = {}
    demands: dict[int, tuple[meshes.Demand, ...]] = {}
    for step in program.steps:
        step.calls = _jaxlib.calls_back(step.eqn, callers)
        if step.kind in (StepKind.PLACED, StepKind.PLAIN):
            step.demands = meshes.demands_of(step.eqn, demands)
        if step.kind is StepKind.PLAIN:
            step.demands = (*step.demands, *meshes.demands_of_types(step.eqn))
        if step.kind is StepKind.PLACED:
            assert step.slice_tag is not None and step.mesh is not None
            meshes.check(step.demands, step.mesh, f"placed function {step.slice_tag.name!r} of program {name!r}")
            if id(step.eqn.params["jaxpr"].jaxpr) not in memo:
                _refuse_other_slices(step.eqn.params["jaxpr"].jaxpr, step.slice_tag)
            declared = _declared(step.eqn.params["jaxpr"].jaxpr, step.mesh, memo)
            program.declared.update(
                (v, spec) for v, spec in zip(step.outputs, declared, strict=True) if spec is not None
            )


def _refuse_other_slices(jaxpr: Any, outer: placed.SliceTag | None) -> None:
    """Refuses calls placed on another slice, and device_puts to one, inside a placed function: it runs on one only."""
    assert outer is not None
    for eqn in jaxpr.eqns:
        inner = slice_tag_of(eqn)
        where = f"placed function {outer.name!r} on slice {outer.mesh.name!r}"
        if inner is not None and inner.mesh != outer.mesh:
            raise errors.ProgramError(
                f"{where} calls {inner.name!r}, which is placed on slice {inner.mesh.name!r}; call "
                "both from the program, one after the other"
            )
        for target in targets_of(eqn):
            if target != outer.mesh:
                raise errors.ProgramError(
                    f"{where} calls device_put to slice {target.name!r}; call device_put from the program"
                )
        if eqn.primitive in PRIMITIVES:
            raise errors.ProgramError(f"{where} calls pw.exchange; call it from the program, before or after")
        for sub in _jaxlib.sub_jaxprs(eqn.params):
            if holds_slice_tag(sub):
                _refuse_other_slices(sub, outer)


def _declared(jaxpr: Any, mesh: MeshSpec, memo: dict[int, list[Spec | None]]) -> list[Spec | None]:
    """For each result of a placed function: its spec, if its type says how all axes of the slice cut it, or if it is a
    sharding constraint of all dimensions; else None."""
    known = memo.get(id(jaxpr))
    if known is None:
        known = memo[id(jaxpr)] = []
        writers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for v in jaxpr.outvars:
            eqn = writers.get(v) if not isinstance(v, _jaxlib.Literal) else None
            typed = specs.spec_of_type(v.aval)
            if typed is not None and typed[0] != mesh:  # a cotangent, of a type of the slice that the value came from
                typed = None
            known.append(typed[1] if typed is not None and len(mesh.explicit) == len(mesh.axes) else None)
            if eqn is not None and eqn.primitive.name == "sharding_constraint" and not eqn.params["unconstrained_dims"]:
                spec = specs.entries_of(eqn.params["sharding"].spec, len(v.aval.shape))
                if typed is not None:  # the constraint is one of the automatic axes
                    spec = tuple((*explicit, *auto) for explicit, auto in zip(typed[1], spec, strict=True))
                known[-1] = spec
    return known


def _drop_dead(program: FlatProgram) -> None:
    """Drops the steps whose results nobody reads, unless they have an effect (EFF-1)."""
    live = {v for v in program.outvars if not isinstance(v, _jaxlib.Literal)}
    kept = []
    for step in reversed(program.steps):
        if any(v in live for v in step.outputs) or _jaxlib.has_effects(step.eqn):
            kept.append(step)
            live.update(step.reads)
    program.steps = kept[::-1]


def _send_cotangents_home(
    program: FlatProgram, home: dict[Any, tuple[MeshSpec, Spec]], sources: dict[Any, tuple[MeshSpec, Spec]]
) -> None:
    """Points each transposed transfer back to the mesh and sharding that its forward transfer read from.

    `home` has where arguments are; `sources`, where forward transfers in other bodies read from. When JAX has moved a
    forward transfer out of a loop, because no iteration changes the value, the iterations' cotangents go to where that
    one reads.
    """
    kept: list[Step] = []
    renamed: dict[Any, Any] = {}
    for step in program.steps:
        step.inputs = [read(renamed, v) for v in step.inputs]
        if step.kind is StepKind.PLACED:
            for v in step.outputs:
                assert step.mesh is not None
                home[v] = (step.mesh, program.declared.get(v, ((),) * len(v.aval.shape)))
        elif step.kind is StepKind.TRANSFER:
            (source,), (result,), uid = step.inputs, step.outputs, step.eqn.params["uid"]
            if step.eqn.params["back"]:
                target = sources.get(uid, sources.get(_base(uid)))
                if target is None:  # the compiler chose where the value came from, so it also chooses where this goes
                    renamed[result] = source
                    continue
                step.mesh = target[0]
                step.spec = target[1] if len(target[1]) == len(step.spec or ()) else ((),) * len(step.spec or ())
            elif not isinstance(source, _jaxlib.Literal) and source in home:
                sources[uid] = home[source]
                sources.setdefault(_base(uid), home[source])
            assert step.mesh is not None and step.spec is not None
            home[result] = (step.mesh, step.spec)
            program.declared[result] = step.spec
        elif step.kind is StepKind.EXCHANGE:
            _find_exchanged(step, home)
        elif step.control is not None:
            for body in step.control.bodies:
                _send_cotangents_home(body, {}, sources)
        kept.append(step)
    program.steps = kept
    program.outvars = [read(renamed, v) for v in program.outvars]


def _find_exchanged(step: Step, home: dict[Any, tuple[MeshSpec, Spec]]) -> None:
    """Notes where the results of an exchange or a permute live."""
    beside = home.get(step.inputs[2 if step.mesh is None else 0])  # the last result of an exchange is with its values
    for v in step.outputs:
        mesh = step.mesh
        if beside is not None and (mesh is None or v is step.outputs[-1]):
            mesh = beside[0]
        if mesh is not None:
            home[v] = (mesh, (tuple(name for name, _ in mesh.axes), *((),) * (len(v.aval.shape) - 1)))


def _base(uid: Any) -> Any:
    """The number of a transfer, whatever iterations of unrolled loops it is in."""
    return uid[0] if isinstance(uid, tuple) else uid


#: What to do instead of an effect that we do not run, by what JAX calls it.
_CURES = {
    "ErrorEffect": "Make it a result: checkify.checkify(function), and throw the error where the result is",
    "BoxEffect": "Pass the value in and return it",
}


def _refuse_unknown_effects(closed: Any, name: str) -> None:
    """Refuses what has an effect that we do not run, by name (EFF-1)."""
    found = _jaxlib.unknown_effect(closed)
    if found is None:
        return
    effect, eqn = _jaxlib.effect_name(found[0]), found[1]
    cure = _CURES.get(
        effect.partition("(")[0], "Compute that part outside of the cluster, with jax.jit, and pass it on"
    )
    raise errors.EffectError(
        f"program {name!r} has the effect {effect} of {eqn.primitive.name}{_jaxlib.source_of(eqn)}, which hosts do not "
        f"run: {cure}"
    )


#: Callbacks that hosts cannot make: they are private to JAX, or ask for something that a host does not know.
_UNKNOWN_CALLBACKS = {
    "buffer_callback": "buffer_callback",
    "inspect_sharding": "jax.debug.inspect_array_sharding",
}


def _refuse(jaxpr: Any, name: str, where: str = "", seen: set[tuple[int, str]] | None = None) -> None:
    """Refuses callbacks that hosts cannot make, and a traced value that escaped by a Python side effect: it is then a
    constant of some jaxpr. `where` is the placed function that has the jaxpr inside.
    """
    seen = set() if seen is None else seen
    if (id(jaxpr), where) in seen:
        return
    seen.add((id(jaxpr), where))
    place = f"placed function {where!r} of program {name!r}" if where else f"program {name!r}"
    inner, constants = _jaxlib.opened(jaxpr)
    for value in constants:
        if _jaxlib.is_tracer(value):
            raise errors.TraceError(
                f"{place} uses a traced value of another function ({value.aval}), which escaped from it by a Python "
                "side effect, such as appending to a list or setting an attribute. Return it as a result instead"
            )
    for eqn in inner.eqns:
        kind = _UNKNOWN_CALLBACKS.get(eqn.primitive.name)
        if kind is not None:
            raise errors.CallbackError(
                f"{place} calls {kind} ({_jaxlib.callback_name(eqn)}), with which a host cannot reach this process's "
                "Python. Use jax.pure_callback, jax.experimental.io_callback or jax.debug.callback"
            )
        slice_tag = slice_tag_of(eqn)
        for sub in _jaxlib.jaxprs_in(eqn.params):
            _refuse(sub, name, slice_tag.name if slice_tag else where, seen)
