"""From a traced jaxpr to a flat list of steps: placed calls, transfers, and plain operations between them.

A plain jit, custom derivative, remat or closed call is inlined if it has placed calls inside. Placed calls inside
loops, branches and shard_maps are refused; the error names the construct. `Step.calls` says whether a step calls the
client back.

Pure: works on jaxprs only.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from typing import Any

from pathways import _jaxlib, errors
from pathways.compiler import meshes, placed
from pathways.compiler.ir import Label, MeshSpec, Spec
from pathways.compiler.primitives import as_transfers, transfer_p
from pathways.compiler.trace import Traced

#: `closed_call` is `eval_jaxpr` since JAX 0.12.
_INLINED = {"custom_jvp_call", "custom_vjp_call", "remat2", "closed_call", "eval_jaxpr"}
_CONTROL = {
    "scan": "jax.lax.scan",
    "while": "jax.lax.while_loop",
    "cond": "jax.lax.cond",
    "shard_map": "jax.shard_map",
    "custom_linear_solve": "jax.lax.custom_linear_solve",
}


class StepKind(enum.Enum):
    """What a step is."""

    PLACED = "placed"  # one call of a placed function
    TRANSFER = "transfer"  # one device_put
    PLAIN = "plain"  # an operation outside placed functions; the compiler chooses its mesh


@dataclasses.dataclass
class Step:
    """One step of a flat program. Inputs are variables or literals; outputs are variables, each written once."""

    kind: StepKind
    eqn: Any
    inputs: list[Any]
    outputs: list[Any]
    slice_tag: placed.SliceTag | None = None
    transposes: int = 0
    derivatives: int = 0  # how often reverse-mode differentiation was applied to make it, the calls around it included
    mesh: MeshSpec | None = None
    spec: Spec | None = None
    calls: _jaxlib.CallsBack = _jaxlib.CallsBack.NOTHING
    demands: tuple[meshes.Demand, ...] = ()  # what the operation needs of the slice that it runs on
    scope: _jaxlib.Scope | None = None  # the microbatch that the program's text gives it
    label: Label | None = None  # its place in a pipeline

    @property
    def reads(self) -> list[Any]:
        """The variables among the inputs."""
        return [v for v in self.inputs if not isinstance(v, _jaxlib.Literal)]


@dataclasses.dataclass
class FlatProgram:
    """A flat program.

    `constants` maps variables to the values that the program closes over. `declared` maps variables to the shardings
    that the user wrote for them. `before` is one more argument, of a program with ordered callbacks only: its first
    ordered callback comes after it.
    """

    invars: list[Any]
    constants: dict[Any, Any]
    steps: list[Step]
    outvars: list[Any]
    declared: dict[Any, Spec] = dataclasses.field(default_factory=dict)
    before: Any = None


def flatten(traced: Traced) -> FlatProgram:
    """The flat program of a traced program, without dead steps.

    Raises:
        CallbackError: a callback of a kind that hosts cannot make.
        TraceError: a traced value escaped from its function.
        ProgramError: a placed call or a device_put inside a loop, a branch or a shard_map.
    """
    closed = traced.jaxpr
    _refuse(closed, traced.name)
    program = FlatProgram(
        list(closed.jaxpr.invars), dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)), [], []
    )
    env: dict[Any, Any] = {}
    _inline(closed.jaxpr, env, program, traced.name, fresh=False)
    program.outvars = [_read(env, v) for v in closed.jaxpr.outvars]
    _drop_dead(program)
    callers: dict[int, _jaxlib.CallsBack] = {}
    for step in program.steps:
        step.calls = _jaxlib.calls_back(step.eqn, callers)
    memo: dict[int, list[Spec | None]] = {}
    demands: dict[int, tuple[meshes.Demand, ...]] = {}
    for step in program.steps:
        if step.kind is not StepKind.TRANSFER:
            step.demands = meshes.demands_of(step.eqn, demands)
        if step.kind is StepKind.PLACED:
            assert step.slice_tag is not None and step.mesh is not None
            meshes.check(step.demands, step.mesh, f"placed function {step.slice_tag.name!r} of program {traced.name!r}")
            if id(step.eqn.params["jaxpr"].jaxpr) not in memo:
                _refuse_other_slices(step.eqn.params["jaxpr"].jaxpr, step.slice_tag)
            specs = _declared(step.eqn.params["jaxpr"].jaxpr, memo)
            program.declared.update((v, spec) for v, spec in zip(step.outputs, specs, strict=True) if spec is not None)
    _send_cotangents_home(program, traced)
    if any(step.calls is _jaxlib.CallsBack.IN_ORDER for step in program.steps):
        program.before = _jaxlib.order_var()
        program.invars.insert(traced.given, program.before)
    return program


def holds_slice_tag(jaxpr: Any, memo: dict[int, bool] | None = None) -> bool:
    """True if a placed call or a device_put to a slice is anywhere inside."""
    memo = {} if memo is None else memo
    known = memo.get(id(jaxpr))
    if known is None:
        known = memo[id(jaxpr)] = any(
            any(each.primitive is transfer_p for each in as_transfers(eqn))
            or _slice_tag(eqn) is not None
            or any(holds_slice_tag(sub, memo) for sub in _jaxlib.sub_jaxprs(eqn.params))
            for eqn in jaxpr.eqns
        )
    return known


def _slice_tag(eqn: Any) -> placed.SliceTag | None:
    return placed.lookup(eqn.params["name"]) if eqn.primitive is _jaxlib.jit_p else None


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, _jaxlib.Literal) else env.get(atom, atom)


def _inline(
    jaxpr: Any,
    env: dict[Any, Any],
    program: FlatProgram,
    name: str,
    fresh: bool,
    around: int = 0,
    within: _jaxlib.Scope | None = None,
) -> None:
    """Appends the steps of `jaxpr`; `env` maps its variables to the flat program's.

    `fresh`: makes new variables, because `jaxpr` may be inlined more than once. `around` and `within`: the derivatives
    and the scope of the equation that has `jaxpr` inside.
    """
    memo: dict[int, bool] = {}
    for eqn in itertools.chain.from_iterable(map(as_transfers, jaxpr.eqns)):
        inputs = [_read(env, v) for v in eqn.invars]
        slice_tag = _slice_tag(eqn)
        derivatives = max(around, _jaxlib.transposed_times(eqn))
        scope = _jaxlib.scope_of(eqn) or within
        if slice_tag is None and any(holds_slice_tag(j, memo) for j in _jaxlib.sub_jaxprs(eqn.params)):
            _inline_equation(eqn, inputs, env, program, name, derivatives, scope)
            continue
        outputs = []
        for v in eqn.outvars:
            new = _jaxlib.new_var(v.aval) if fresh or isinstance(v, _jaxlib.DropVar) else v
            if not isinstance(v, _jaxlib.DropVar):
                env[v] = new
            outputs.append(new)
        if slice_tag is not None:
            program.steps.append(
                Step(
                    StepKind.PLACED,
                    eqn,
                    inputs,
                    outputs,
                    slice_tag=slice_tag,
                    mesh=slice_tag.mesh,
                    transposes=int(_jaxlib.is_transposed(eqn)),
                )
            )
        elif eqn.primitive is transfer_p:
            program.steps.append(
                Step(
                    StepKind.TRANSFER,
                    eqn,
                    inputs,
                    outputs,
                    mesh=eqn.params["mesh"],
                    spec=eqn.params["spec"],
                    transposes=int(eqn.params["back"]),
                )
            )
        else:
            program.steps.append(Step(StepKind.PLAIN, eqn, inputs, outputs))
        program.steps[-1].derivatives = derivatives
        program.steps[-1].scope = scope


def _inline_equation(
    eqn: Any,
    inputs: list[Any],
    env: dict[Any, Any],
    program: FlatProgram,
    name: str,
    derivatives: int,
    scope: _jaxlib.Scope | None,
) -> None:
    primitive = eqn.primitive.name
    if eqn.primitive is not _jaxlib.jit_p and primitive not in _INLINED:
        construct = _CONTROL.get(primitive, primitive)
        raise errors.ProgramError(
            f"program {name!r}: a placed function or device_put is called inside {construct}, which runs inside one "
            "computation. Call it from the program itself (a Python loop unrolls), or put the whole of it "
            "into one placed function"
        )
    inner, consts = _jaxlib.opened(next(_jaxlib.jaxprs_in(eqn.params)))
    inner_env = dict(zip(inner.invars, inputs, strict=True))
    inner_env.update((v, _constant(program, v, value)) for v, value in zip(inner.constvars, consts, strict=True))
    _inline(inner, inner_env, program, name, fresh=True, around=derivatives, within=scope)
    for v, result in zip(eqn.outvars, inner.outvars, strict=True):
        if not isinstance(v, _jaxlib.DropVar):
            env[v] = _read(inner_env, result)


def _refuse_other_slices(jaxpr: Any, outer: placed.SliceTag | None) -> None:
    """Refuses calls placed on another slice, and device_puts, inside a placed function: it runs on one slice only."""
    assert outer is not None
    for eqn in jaxpr.eqns:
        inner = _slice_tag(eqn)
        where = f"placed function {outer.name!r} on slice {outer.mesh.name!r}"
        if inner is not None and inner.mesh != outer.mesh:
            raise errors.ProgramError(
                f"{where} calls {inner.name!r}, which is placed on slice {inner.mesh.name!r}; call "
                "both from the program, one after the other"
            )
        if any(each.primitive is transfer_p for each in as_transfers(eqn)):
            raise errors.ProgramError(
                f"{where} calls device_put; use jax.lax.with_sharding_constraint inside, or call "
                "device_put from the program"
            )
        for sub in _jaxlib.sub_jaxprs(eqn.params):
            if holds_slice_tag(sub):
                _refuse_other_slices(sub, outer)


def _declared(jaxpr: Any, memo: dict[int, list[Spec | None]]) -> list[Spec | None]:
    """For each result of a placed function: its spec, if it is a sharding constraint of all dimensions; else None."""
    known = memo.get(id(jaxpr))
    if known is None:
        known = memo[id(jaxpr)] = []
        writers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for v in jaxpr.outvars:
            eqn = writers.get(v) if not isinstance(v, _jaxlib.Literal) else None
            known.append(None)
            if eqn is not None and eqn.primitive.name == "sharding_constraint" and not eqn.params["unconstrained_dims"]:
                rank = len(v.aval.shape)
                entries = (*eqn.params["sharding"].spec, *(None,) * rank)[:rank]
                known[-1] = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
    return known


def _constant(program: FlatProgram, v: Any, value: Any) -> Any:
    for known, other in program.constants.items():
        if other is value:
            return known
    new = _jaxlib.new_var(v.aval)
    program.constants[new] = value
    return new


def _drop_dead(program: FlatProgram) -> None:
    live = {v for v in program.outvars if not isinstance(v, _jaxlib.Literal)}
    kept = []
    for step in reversed(program.steps):
        if any(v in live for v in step.outputs) or _jaxlib.has_effects(step.eqn):
            kept.append(step)
            live.update(step.reads)
    program.steps = kept[::-1]


def _send_cotangents_home(program: FlatProgram, traced: Traced) -> None:
    """Points each transposed transfer back to the mesh and sharding that its forward transfer read from."""
    home: dict[Any, tuple[MeshSpec, Spec]] = {}
    for v, argument in zip(program.invars, traced.arguments, strict=True):
        if argument.mesh is not None and argument.spec is not None:
            home[v] = (argument.mesh, argument.spec)
    sources: dict[int, tuple[MeshSpec, Spec]] = {}
    kept: list[Step] = []
    renamed: dict[Any, Any] = {}
    for step in program.steps:
        step.inputs = [_read(renamed, v) for v in step.inputs]
        if step.kind is StepKind.PLACED:
            for v in step.outputs:
                assert step.mesh is not None
                home[v] = (step.mesh, program.declared.get(v, ((),) * len(v.aval.shape)))
        elif step.kind is StepKind.TRANSFER:
            (source,), (result,), uid = step.inputs, step.outputs, step.eqn.params["uid"]
            if step.eqn.params["back"]:
                target = sources.get(uid)
                if target is None:  # the compiler chose where the value came from, so it also chooses where this goes
                    renamed[result] = source
                    continue
                step.mesh = target[0]
                step.spec = target[1] if len(target[1]) == len(step.spec or ()) else ((),) * len(step.spec or ())
            elif not isinstance(source, _jaxlib.Literal) and source in home:
                sources[uid] = home[source]
            assert step.mesh is not None and step.spec is not None
            home[result] = (step.mesh, step.spec)
            program.declared[result] = step.spec
        kept.append(step)
    program.steps = kept
    program.outvars = [_read(renamed, v) for v in program.outvars]


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
        slice_tag = _slice_tag(eqn)
        for sub in _jaxlib.jaxprs_in(eqn.params):
            _refuse(sub, name, slice_tag.name if slice_tag else where, seen)
