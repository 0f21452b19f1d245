"""From a traced jaxpr to a flat list of steps: placed calls, transfers, and plain operations between them.

A plain jit, custom derivative, remat or closed call is inlined if it has placed calls inside. So are a scan of few
iterations, and the branch that is taken if that is known. Placed calls inside other loops and branches, and inside
shard_maps, are refused; the error names the construct. `Step.calls` says whether a step calls the client back.

Pure: works on jaxprs only.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence
from typing import Any

from pathways import _jaxlib, errors
from pathways.compiler import meshes, placed
from pathways.compiler.control.folding import fold
from pathways.compiler.control.unrolling import Scan, Stacked, row, stack
from pathways.compiler.ir import Label, MeshSpec, Spec
from pathways.compiler.options import UNROLL
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
    label: Label | None = None  # its place in a pipeline, if the program has a schedule

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


def flatten(traced: Traced, unroll: int = UNROLL) -> FlatProgram:
    """The flat program of a traced program, without dead steps.

    A scan with placed calls inside is unrolled if it has at most `unroll` iterations.

    Raises:
        CallbackError: a callback of a kind that hosts cannot make.
        TraceError: a traced value escaped from its function.
        ProgramError: a placed call or a device_put inside a longer loop, a branch or a shard_map.
    """
    closed = traced.jaxpr
    _refuse(closed, traced.name)
    program = FlatProgram(
        list(closed.jaxpr.invars), dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)), [], []
    )
    env: dict[Any, Any] = {}
    inliner = _Inliner(program, traced.name, unroll)
    inliner.inline(closed.jaxpr, env, fresh=False)
    program.outvars = [inliner.whole(_read(env, v)) for v in closed.jaxpr.outvars]
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


class _Inliner:
    """Appends the steps of jaxprs to a program. An environment maps a jaxpr's variables to the program's.

    An environment may have a literal, or what a scan has stacked, in the place of a variable. A step reads variables
    and literals only.
    """

    def __init__(self, program: FlatProgram, name: str, unroll: int) -> None:
        self.program = program
        self.name = name
        self.unroll = unroll
        self._whole: dict[int, tuple[Stacked, Any]] = {}  # what is stacked as one array, by the id of the `Stacked`
        self._parts: dict[tuple[Any, int], Any] = {}  # rows of arrays
        self._holds: dict[int, bool] = {}
        self._rows: list[int] = []  # of the unrolled scans around: which rows the iteration reads

    def inline(self, jaxpr: Any, env: dict[Any, Any], *, fresh: bool, around: int = 0, base: int = 0) -> None:
        """Appends the steps of `jaxpr`; `env` maps its arguments and gets its other variables.

        `fresh`: makes new variables, because `jaxpr` may be inlined more than once. `around`: the derivatives of the
        equation that has `jaxpr` inside. `base`: those of the scans around, in whose bodies JAX counts from 0.
        """
        for eqn in itertools.chain.from_iterable(map(as_transfers, jaxpr.eqns)):
            inputs = [_read(env, v) for v in eqn.invars]
            slice_tag = _slice_tag(eqn)
            derivatives = max(around, base + _jaxlib.transposed_times(eqn))
            if slice_tag is None:
                if any(holds_slice_tag(j, self._holds) for j in _jaxlib.sub_jaxprs(eqn.params)):
                    self._open(eqn, inputs, env, derivatives, base)
                    continue
                known = fold(eqn, inputs)
                if known is not None:
                    env.update(zip(eqn.outvars, known, strict=True))
                    continue
            inputs = [self.whole(v) for v in inputs]
            outputs = []
            for v in eqn.outvars:
                new = _jaxlib.new_var(v.aval) if fresh or isinstance(v, _jaxlib.DropVar) else v
                if not isinstance(v, _jaxlib.DropVar):
                    env[v] = new
                outputs.append(new)
            step = Step(StepKind.PLAIN, eqn, inputs, outputs, derivatives=derivatives)
            if slice_tag is not None:
                step.kind, step.slice_tag, step.mesh = StepKind.PLACED, slice_tag, slice_tag.mesh
                step.transposes = int(base > 0 or _jaxlib.is_transposed(eqn))
            elif eqn.primitive is transfer_p:
                step.kind, step.mesh, step.spec = StepKind.TRANSFER, eqn.params["mesh"], eqn.params["spec"]
                step.transposes = int(eqn.params["back"])
                if self._rows:  # an iteration's cotangent goes back to where that iteration's value came from
                    step.eqn = eqn.replace(params={**eqn.params, "uid": (eqn.params["uid"], *self._rows)})
            self.program.steps.append(step)

    def whole(self, value: Any) -> Any:
        """`value` as a variable or a literal."""
        if not isinstance(value, Stacked):
            return value
        if id(value) not in self._whole:
            (whole,) = self._operate(stack([v.aval for v in value.rows], value.aval), value.rows)
            self._whole[id(value)] = value, whole
        return self._whole[id(value)][1]

    def _row(self, array: Any, position: int) -> Any:
        """Row `position` of an array; the backward scan of a gradient reads the rows that the forward scan has made."""
        if isinstance(array, Stacked):
            return array.rows[position]
        key = (array, position)
        if isinstance(array, _jaxlib.Literal) or key not in self._parts:
            (part,) = self._operate(row(array.aval, position), [array])
            if isinstance(array, _jaxlib.Literal):
                return part
            self._parts[key] = part
        return self._parts[key]

    def _operate(self, closed: Any, inputs: Sequence[Any]) -> list[Any]:
        """Appends the steps of a small jaxpr of plain operations; returns its results."""
        inner, consts = _jaxlib.opened(closed)
        env = dict(zip(inner.invars, inputs, strict=True))
        env.update((v, _constant(self.program, v, value)) for v, value in zip(inner.constvars, consts, strict=True))
        self.inline(inner, env, fresh=True)
        return [_read(env, v) for v in inner.outvars]

    def _open(self, eqn: Any, inputs: list[Any], env: dict[Any, Any], derivatives: int, base: int) -> None:
        """Appends the steps of an equation that has placed calls inside."""
        primitive = eqn.primitive.name
        if primitive == "scan":
            scan = Scan.of(eqn)
            if scan.length <= self.unroll:
                results = self._unrolled(scan, eqn, inputs, derivatives)
                env.update((v, r) for v, r in zip(eqn.outvars, results, strict=True) if type(v) is not _jaxlib.DropVar)
                return
        inner = next(_jaxlib.jaxprs_in(eqn.params))
        if primitive == "cond" and isinstance(inputs[0], _jaxlib.Literal):  # it is known which branch is taken
            branches = eqn.params["branches"]
            inner = branches[min(max(int(inputs[0].val), 0), len(branches) - 1)]
            inputs = inputs[1:]
            base = derivatives
        elif eqn.primitive is not _jaxlib.jit_p and primitive not in _INLINED:
            raise self._refusal(eqn)
        results = self._inlined(inner, inputs, derivatives, base)
        env.update((v, r) for v, r in zip(eqn.outvars, results, strict=True) if type(v) is not _jaxlib.DropVar)

    def _inlined(self, closed: Any, inputs: Sequence[Any], around: int, base: int) -> list[Any]:
        inner, consts = _jaxlib.opened(closed)
        env = dict(zip(inner.invars, inputs, strict=True))
        env.update((v, _constant(self.program, v, value)) for v, value in zip(inner.constvars, consts, strict=True))
        self.inline(inner, env, fresh=True, around=around, base=base)
        return [_read(env, v) for v in inner.outvars]

    def _unrolled(self, scan: Scan, eqn: Any, inputs: Sequence[Any], derivatives: int) -> list[Any]:
        """Appends the iterations of a scan one after the other; returns its results."""
        constants = list(inputs[: scan.consts])
        carry = list(inputs[scan.consts : scan.consts + scan.carry])
        arrays = inputs[scan.consts + scan.carry :]
        stacked: list[list[Any]] = [[None] * scan.length for _ in eqn.outvars[scan.carry :]]
        for position in scan.positions:
            rows = [self._row(array, position) for array in arrays]
            self._rows.append(position)
            results = self._inlined(scan.body, [*constants, *carry, *rows], derivatives, derivatives)
            self._rows.pop()
            carry = results[: scan.carry]
            for list_, value in zip(stacked, results[scan.carry :], strict=True):
                list_[position] = self.whole(value)
        outvars = eqn.outvars[scan.carry :]
        return [*carry, *(Stacked(tuple(list_), v.aval) for list_, v in zip(stacked, outvars, strict=True))]

    def _refusal(self, eqn: Any) -> errors.ProgramError:
        primitive = eqn.primitive.name
        construct = _CONTROL.get(primitive, primitive)
        what = f"program {self.name!r}: a placed function or device_put is called inside {construct}"
        if primitive == "scan":
            length = eqn.params["length"]
            return errors.ProgramError(
                f"{what} (or map, fori_loop) of {length} iterations. Such a loop is unrolled into the program if it "
                f"has at most {self.unroll} iterations; a longer one is not built yet. Give the program "
                f"unroll={length}, or put the whole loop into one placed function"
            )
        return errors.ProgramError(
            f"{what}, which runs inside one computation. Call it from the program itself (a Python loop unrolls), or "
            "put the whole of it into one placed function"
        )


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
