"""Appends what a jaxpr does to a flat program, step by step.

What only groups equations (a plain jit, a custom derivative or batching rule, a linear solve, remat) is opened if it
has placed calls inside. So are a scan of few iterations (`control.unrolling`) and a branch that is known to be taken.
Other loops and branches with placed calls inside become control steps, whose bodies are flat programs of their own.

Pure: works on jaxprs only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pathways import _jaxlib, errors
from pathways.compiler import placed
from pathways.compiler.added_primitives.exchange import PRIMITIVES
from pathways.compiler.added_primitives.fan_out import fan_out_p
from pathways.compiler.added_primitives.loops import loop_p
from pathways.compiler.added_primitives.loops import opened as opened_loop
from pathways.compiler.added_primitives.transfers import as_transfers, targets_of, transfer_p
from pathways.compiler.control.folding import Folder, literals
from pathways.compiler.control.unrolling import Joined, Scan, Stacked, check_copies, join, operations, piece, row, stack
from pathways.compiler.ir import MeshSpec
from pathways.compiler.pipeline_spec import iteration_name
from pathways.compiler.steps import Control, ControlKind, FlatProgram, Step, StepKind

#: `closed_call` is `eval_jaxpr` since JAX 0.12.
_INLINED = {
    *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "linear_call", "composite"),
    *("remat2", "closed_call", "eval_jaxpr"),
}
_REFUSED = {"shard_map": "jax.shard_map"}


def holds_slice_tag(jaxpr: Any, memo: dict[int, bool] | None = None) -> bool:
    """True if a placed call, a device_put to a slice or a pw.exchange is anywhere inside."""
    memo = {} if memo is None else memo
    known = memo.get(id(jaxpr))
    if known is None:
        known = memo[id(jaxpr)] = any(
            bool(targets_of(eqn))
            or slice_tag_of(eqn) is not None
            or eqn.primitive in PRIMITIVES
            or any(holds_slice_tag(sub, memo) for sub in _jaxlib.sub_jaxprs(eqn.params))
            for eqn in jaxpr.eqns
        )
    return known


def leaves_slice(jaxpr: Any, mesh: MeshSpec) -> bool:
    """True if anything inside is placed on another slice than `mesh`, or put there, or is a pw.exchange."""
    return any(
        any(target != mesh for target in targets_of(eqn))
        or eqn.primitive in PRIMITIVES
        or ((tag := slice_tag_of(eqn)) is not None and tag.mesh != mesh)
        or any(leaves_slice(sub, mesh) for sub in _jaxlib.sub_jaxprs(eqn.params) if holds_slice_tag(sub))
        for eqn in jaxpr.eqns
    )


def slice_tag_of(eqn: Any) -> placed.SliceTag | None:
    """The slice tag of an equation that calls a placed function; None for any other."""
    return placed.lookup(eqn.params["name"]) if eqn.primitive is _jaxlib.jit_p else None


def placed_meshes(jaxpr: Any) -> Iterator[MeshSpec]:
    """The slices of the placed calls in a jaxpr, in the order of the text."""
    for eqn in _jaxlib.opened(jaxpr)[0].eqns:
        tag = slice_tag_of(eqn)
        if tag is not None:
            yield tag.mesh
            continue
        for sub in _jaxlib.sub_jaxprs(eqn.params):
            yield from placed_meshes(sub)


def read(env: dict[Any, Any], atom: Any) -> Any:
    """What an environment has for a variable; a variable that it does not have, and a literal, stand for themselves."""
    return atom if isinstance(atom, _jaxlib.Literal) else env.get(atom, atom)


class Inliner:
    """Appends the steps of jaxprs to a program. An environment maps a jaxpr's variables to the program's.

    An environment may have a literal, or what a scan has stacked, in the place of a variable. A step reads variables
    and literals only.
    """

    def __init__(self, program: FlatProgram, name: str, unroll: int, rows: Sequence[int] = (), chunks: int = 1) -> None:
        self.program = program
        self.name = name
        self.unroll = unroll
        self._chunks = chunks  # into so many loops is a scan cut that is not unrolled, but not those in bodies
        #: What is stacked as one array, by the id of the `Stacked` or `Joined`.
        self._whole: dict[int, tuple[Stacked | Joined, Any]] = {}
        self._parts: dict[tuple[Any, int], Any] = {}  # rows of arrays
        self._holds: dict[int, bool] = {}  # by id()
        self._opened: list[Any] = []  # what `_holds` knows must not go
        self._folder = Folder()
        for v, value in program.constants.items():
            self._folder.know(v, value)
        self._rows = [*rows]  # of the unrolled scans around: which rows the iteration reads
        self._copies: list[int] = []  # of the unrolled scans around: how many iterations
        self._scope: _jaxlib.Scope | None = None  # that of the equation around

    def inline(self, jaxpr: Any, env: dict[Any, Any], *, fresh: bool, around: int = 0, base: int = 0) -> None:
        """Appends the steps of `jaxpr`; `env` maps its arguments and gets its other variables.

        `fresh`: makes new variables, because `jaxpr` may be inlined more than once. `around`: the derivatives of the
        equation that has `jaxpr` inside. `base`: those of the scans around, in whose bodies JAX counts from 0.
        """
        for eqn in itertools.chain.from_iterable(map(as_transfers, jaxpr.eqns)):
            inputs = [read(env, v) for v in eqn.invars]
            if eqn.primitive is fan_out_p:
                copies = zip(eqn.outvars, inputs * eqn.params["count"], strict=True)
                env.update((v, value) for v, value in copies if type(v) is not _jaxlib.DropVar)
                continue
            slice_tag = slice_tag_of(eqn)
            derivatives = max(around, base + _jaxlib.transposed_times(eqn))
            known: list[Any] | None = None
            if slice_tag is None:
                if any(holds_slice_tag(j, self._holds) for j in _jaxlib.sub_jaxprs(eqn.params)):
                    self._open(eqn, inputs, env, derivatives, base)
                    continue
                known = self._folder.fold(eqn, inputs)
                if known is not None and (numbers := literals(eqn, known)) is not None:
                    env.update(zip(eqn.outvars, numbers, strict=True))
                    continue
            inputs = [self.whole(v) for v in inputs]
            outputs = []
            for v in eqn.outvars:
                new = _jaxlib.new_var(v.aval) if fresh or isinstance(v, _jaxlib.DropVar) else v
                if not isinstance(v, _jaxlib.DropVar):
                    env[v] = new
                outputs.append(new)
            step = Step(StepKind.PLAIN, eqn, inputs, outputs, derivatives=derivatives, scope=self._scope_of(eqn))
            if slice_tag is not None:
                step.kind, step.slice_tag, step.mesh = StepKind.PLACED, slice_tag, slice_tag.mesh
                step.transposes = int(base > 0 or _jaxlib.is_transposed(eqn))
            elif eqn.primitive is transfer_p:
                step.kind, step.mesh, step.spec = StepKind.TRANSFER, eqn.params["mesh"], eqn.params["spec"]
                step.transposes = int(eqn.params["back"])
                if self._rows:  # an iteration's cotangent goes back to where that iteration's value came from
                    step.eqn = eqn.replace(params={**eqn.params, "uid": (eqn.params["uid"], *self._rows)})
            elif eqn.primitive in PRIMITIVES:
                step.kind, step.mesh = StepKind.EXCHANGE, eqn.params.get("mesh")
            self.program.steps.append(step)
            for v, value in zip(outputs, known or (), strict=False):
                self._folder.know(v, value)

    def whole(self, value: Any) -> Any:
        """`value` as a variable or a literal."""
        if not isinstance(value, Stacked | Joined):
            return value
        if id(value) not in self._whole:
            if isinstance(value, Stacked):
                (whole,) = self.operate(stack([v.aval for v in value.rows], value.aval), value.rows)
            else:
                (whole,) = self.operate(join([v.aval for v in value.pieces]), value.pieces)
            self._whole[id(value)] = value, whole
        return self._whole[id(value)][1]

    def _row(self, array: Any, position: int) -> Any:
        """Row `position` of an array; the backward scan of a gradient reads the rows that the forward scan has made."""
        if isinstance(array, Stacked):
            return array.rows[position]
        array = self.whole(array)
        key = (array, position)
        if isinstance(array, _jaxlib.Literal) or key not in self._parts:
            (part,) = self.operate(row(array.aval, position), [array])
            if isinstance(array, _jaxlib.Literal):
                return part
            self._parts[key] = part
        return self._parts[key]

    def operate(self, closed: Any, inputs: Sequence[Any]) -> list[Any]:
        """Appends the steps of a small jaxpr of plain operations; returns its results."""
        return self._inlined(closed, inputs, 0, 0)

    def _open(self, eqn: Any, inputs: list[Any], env: dict[Any, Any], derivatives: int, base: int) -> None:
        """Appends the steps of an equation that has placed calls inside."""
        before = self._scope
        self._scope = self._scope_of(eqn)
        results = self._results(eqn, inputs, derivatives, base)
        env.update((v, r) for v, r in zip(eqn.outvars, results, strict=True) if type(v) is not _jaxlib.DropVar)
        self._scope = before

    def _scope_of(self, eqn: Any) -> _jaxlib.Scope | None:
        """The scope of an equation. Each iteration of a scan has pipelines of its own."""
        scope = _jaxlib.scope_of(eqn)
        if scope is not None and scope.microbatch is None:
            return self._scope and dataclasses.replace(self._scope, stage=scope.stage)
        if scope is not None and self._rows:
            return dataclasses.replace(scope, pipeline=iteration_name(scope.pipeline, self._rows))
        return scope or self._scope

    def _results(self, eqn: Any, inputs: list[Any], derivatives: int, base: int) -> list[Any]:
        primitive = eqn.primitive.name
        if primitive == "scan":
            scan = Scan.of(eqn)
            if scan.length <= self.unroll:
                return self._unrolled(scan, eqn, inputs, derivatives)
            if self._chunks > 1:
                return self._cut(scan, eqn, inputs, derivatives)
            return self._loop(scan, eqn, [self.whole(v) for v in inputs], derivatives)
        if eqn.primitive is loop_p:
            self._opened.append(opened_loop(eqn))
            return self._inlined(self._opened[-1], [self.whole(v) for v in inputs], derivatives, derivatives)
        if primitive == "while":
            return self._while(eqn, [self.whole(v) for v in inputs], derivatives)
        if primitive == "cond":
            branches = eqn.params["branches"]
            if isinstance(inputs[0], _jaxlib.Literal):  # it is known which branch is taken
                known = min(max(int(inputs[0].val), 0), len(branches) - 1)
                return self._inlined(branches[known], inputs[1:], derivatives, derivatives)
            return self._branch(eqn, [self.whole(v) for v in inputs], derivatives)
        if eqn.primitive is _jaxlib.jit_p or primitive in _INLINED:
            return self._inlined(next(_jaxlib.jaxprs_in(eqn.params)), inputs, derivatives, base)
        if primitive == "custom_linear_solve":  # its derivatives were taken before, so what is left is its solver
            return self._inlined(*_jaxlib.solver_of(eqn, inputs), derivatives, base)
        construct = _REFUSED.get(primitive, primitive)
        raise errors.ProgramError(
            f"program {self.name!r}: a placed function, device_put or pw.exchange is called inside {construct}, which "
            "runs inside one computation. Call it from the program itself (a Python loop unrolls), or put the whole of "
            "it into one placed function"
        )

    def _branch(self, eqn: Any, inputs: list[Any], derivatives: int) -> list[Any]:
        bodies = []
        for branch in eqn.params["branches"]:
            nested, arguments = self._nested(inputs[1:])
            bodies.append(nested._body(nested._inlined(branch, arguments, derivatives, derivatives)))
        if any(map(_has_runs, bodies)):
            return self._branch_of_runs(eqn, inputs, derivatives)
        control = Control(ControlKind.BRANCH, "jax.lax.cond", bodies)
        return self._control(eqn, control, [inputs[0], *_variables(inputs[1:])], derivatives)

    def _branch_of_runs(self, eqn: Any, inputs: list[Any], derivatives: int) -> list[Any]:
        """A branch whose cases are runs of their own: per case a loop of at most one iteration that gives the results.

        A node of a plan can be in a branch, but a loop and an exchange cannot.
        """
        which, *operands = inputs
        last = len(eqn.params["branches"]) - 1
        types = [v.aval for v in eqn.outvars]
        results = self.operate(operations(lambda: tuple(jax.lax.full(t.shape, 0, t.dtype) for t in types), []), [])
        for case, branch in enumerate(eqn.params["branches"]):
            taken = operations(lambda i, case=case: jnp.clip(i, 0, last) == case, [which.aval])
            (go,) = self.operate(taken, [which])
            nested, arguments = self._nested(operands, types)
            made = nested._inlined(branch, arguments[: len(operands)], derivatives, derivatives)
            body = nested._body([_jaxlib.new_literal(np.bool_(False), go.aval), *made])
            fixed = _variables(operands)
            control = Control(ControlKind.WHILE, "jax.lax.cond", [body], len(fixed), len(types))
            results = self._control(eqn, control, [go, *fixed, *results], derivatives)
        return results

    def _while(self, eqn: Any, inputs: list[Any], derivatives: int) -> list[Any]:
        """A loop whose test stands before it, for the first iteration, and at the end of its body, for the next one.

        If `jax.vmap` has batched the test, the loop goes on while the test of any element holds, and carries the tests:
        an element whose test does not hold stays as it is.
        """
        test, once = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        tested = eqn.params["cond_nconsts"]
        constants = inputs[: tested + eqn.params["body_nconsts"]]
        carry = inputs[len(constants) :]
        tests = self._inlined(test, [*constants[:tested], *carry], derivatives, derivatives)
        go = tests[0]
        if go.aval.shape:
            (go,) = self.operate(operations(jnp.any, [go.aval]), tests)
        else:
            tests = []
        if isinstance(go, _jaxlib.Literal) and not go.val:
            return carry
        nested, arguments = self._nested(constants, [v.aval for v in (*carry, *tests)])
        given = arguments[len(constants) : len(constants) + len(carry)]
        results = nested._inlined(once, [*arguments[tested : len(constants)], *given], derivatives, derivatives)
        if tests:
            results = [
                nested.operate(operations(_if_each, [arguments[-1].aval, v.aval, v.aval]), [arguments[-1], new, v])[0]
                for new, v in zip(map(nested.whole, results), given, strict=True)
            ]
        again = nested._inlined(test, [*arguments[:tested], *results], derivatives, derivatives)
        if tests:
            results += again
            again = nested.operate(operations(jnp.any, [again[0].aval]), again)
        fixed = _variables(constants)
        body = nested._body([*again, *results])
        control = Control(ControlKind.WHILE, "jax.lax.while_loop", [body], len(fixed), len(results))
        types = [v.aval for v in (*carry, *tests)]
        return self._control(eqn, control, [go, *fixed, *carry, *tests], derivatives, types)[: len(carry)]

    def _cut(self, scan: Scan, eqn: Any, inputs: list[Any], derivatives: int) -> list[Any]:
        """A scan as several loops, one after the other. What it stacks is `Joined`, so that a piece can be offloaded
        while the others are made. The backward scan of a gradient is cut alike, and reads the pieces.
        """
        constants = [self.whole(v) for v in inputs[: scan.consts]]
        carry = [self.whole(v) for v in inputs[scan.consts : scan.consts + scan.carry]]
        arrays = inputs[scan.consts + scan.carry :]
        length = -(-scan.length // self._chunks)
        starts = tuple(range(0, scan.length, length))
        stacked: list[list[Any]] = [[None] * len(starts) for _ in eqn.outvars[scan.carry :]]
        for number in range(len(starts))[:: -1 if scan.reverse else 1]:
            part = dataclasses.replace(scan, length=min(length, scan.length - starts[number]))
            rows = [self._piece(array, starts, number, part.length) for array in arrays]
            results = self._loop(part, eqn, [*constants, *carry, *rows], derivatives)
            carry = results[: scan.carry]
            for pieces, value in zip(stacked, results[scan.carry :], strict=True):
                pieces[number] = value
        outvars = eqn.outvars[scan.carry :]
        return [*carry, *(Joined(tuple(p), starts, v.aval) for p, v in zip(stacked, outvars, strict=True))]

    def _piece(self, array: Any, starts: tuple[int, ...], number: int, length: int) -> Any:
        """A piece of an array that a cut scan reads."""
        if isinstance(array, Joined) and array.starts == starts:
            return array.pieces[number]
        array = self.whole(array)
        return self.operate(piece(array.aval, starts[number], length), [array])[0]

    def _loop(self, scan: Scan, eqn: Any, inputs: list[Any], derivatives: int) -> list[Any]:
        avals = [v.aval for v in _jaxlib.opened(scan.body)[0].invars[scan.consts :]]
        nested, arguments = self._nested(inputs[: scan.consts], avals)
        body = nested._body(nested._inlined(scan.body, arguments, derivatives, derivatives))
        fixed = _variables(inputs[: scan.consts])
        control = Control(
            ControlKind.FOR,
            f"jax.lax.scan (or map, fori_loop) of {scan.length} iterations",
            [body],
            len(fixed),
            scan.carry,
            scan.length,
            scan.reverse,
        )
        stacks = [v.aval.update(shape=(scan.length, *v.aval.shape[1:])) for v in eqn.outvars[scan.carry :]]
        results = [*(v.aval for v in eqn.outvars[: scan.carry]), *stacks]
        return self._control(eqn, control, [*fixed, *inputs[scan.consts :]], derivatives, results)

    def _nested(self, inputs: Sequence[Any], avals: Sequence[Any] = ()) -> tuple[Inliner, list[Any]]:
        """An inliner of a body, and the body's arguments: those for `inputs`, then those of types `avals`.

        A literal among `inputs` is no argument; the body reads it itself.
        """
        arguments = [v if isinstance(v, _jaxlib.Literal) else _jaxlib.new_var(v.aval) for v in inputs]
        arguments += map(_jaxlib.new_var, avals)
        nested = Inliner(FlatProgram(_variables(arguments), {}, [], []), self.name, self.unroll, self._rows)
        nested._copies = [*self._copies]
        for outer, inner in zip(inputs, arguments, strict=False):
            if (value := self._folder.known(outer)) is not None:
                nested._folder.know(inner, value)
        # The control step has the scope: no call inside has a place in its pipeline.
        return nested, arguments

    def _body(self, results: Sequence[Any]) -> FlatProgram:
        self.program.outvars = [self.whole(v) for v in results]
        return self.program

    def _control(
        self, eqn: Any, control: Control, inputs: list[Any], derivatives: int, results: Sequence[Any] | None = None
    ) -> list[Any]:
        """Appends a control step. `results`: the types of its results, if they are not those of the equation."""
        outputs = [_jaxlib.new_var(v) for v in results or [v.aval for v in eqn.outvars]]
        step = Step(StepKind.CONTROL, eqn, inputs, outputs, derivatives=derivatives, scope=self._scope, control=control)
        self.program.steps.append(step)
        return outputs

    def _inlined(self, closed: Any, inputs: Sequence[Any], around: int, base: int) -> list[Any]:
        inner, consts = _jaxlib.opened(closed)
        env = dict(zip(inner.invars, inputs, strict=True))
        for v, value in zip(inner.constvars, consts, strict=True):
            env[v] = _constant(self.program, v, value)
            self._folder.know(env[v], value)
        self.inline(inner, env, fresh=True, around=around, base=base)
        return [read(env, v) for v in inner.outvars]

    def _unrolled(self, scan: Scan, eqn: Any, inputs: Sequence[Any], derivatives: int) -> list[Any]:
        """Appends the iterations of a scan one after the other; returns its results."""
        constants = list(inputs[: scan.consts])
        carry = list(inputs[scan.consts : scan.consts + scan.carry])
        arrays = inputs[scan.consts + scan.carry :]
        stacked: list[list[Any]] = [[None] * scan.length for _ in eqn.outvars[scan.carry :]]
        self._copies.append(scan.length)
        check_copies(self.name, self._copies)
        for position in scan.positions:
            rows = [self._row(array, position) for array in arrays]
            self._rows.append(position)
            results = self._inlined(scan.body, [*constants, *carry, *rows], derivatives, derivatives)
            self._rows.pop()
            carry = results[: scan.carry]
            for list_, value in zip(stacked, results[scan.carry :], strict=True):
                list_[position] = self.whole(value)
        self._copies.pop()
        outvars = eqn.outvars[scan.carry :]
        return [*carry, *(Stacked(tuple(list_), v.aval) for list_, v in zip(stacked, outvars, strict=True))]


def _if_each(tests: Any, new: Any, old: Any) -> Any:
    """Of each element of a batch: the new value if its test holds, else the old one."""
    return jax.lax.select_n(jax.lax.broadcast_in_dim(tests, old.shape, range(tests.ndim)), old, new)


def _has_runs(body: FlatProgram) -> bool:
    """Whether a body has a loop or an exchange."""
    controls = [step.control for step in body.steps if step.control is not None]
    return any(step.kind is StepKind.EXCHANGE for step in body.steps) or any(
        control.kind is not ControlKind.BRANCH or any(map(_has_runs, control.bodies)) for control in controls
    )


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, _jaxlib.Literal)]


def _constant(program: FlatProgram, v: Any, value: Any) -> Any:
    for known, other in program.constants.items():
        if other is value:
            return known
    new = _jaxlib.new_var(v.aval)
    program.constants[new] = value
    return new
