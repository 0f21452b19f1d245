"""The order of callbacks as data of a flat program: a value goes from call to call.

A *chain* is such a value. A step with callbacks reads the chain (`Step.before`) and makes it anew (`Step.after`), which
exists when the step's computation is over.
- Ordered callbacks are all on one chain, from the program's argument `FlatProgram.before` on.
- Other callbacks have no order. Outside of loops, such a step only makes a chain. In a loop, each such step has a chain
  of its own, from iteration to iteration. So the loop's last value exists when all iterations' calls are over, and
  fails if one fails. No chain ties two steps of one iteration together (ERR-1).

A loop carries the chains of its body, and a branch takes and gives those of its cases, as they do any other value. So
hosts need to know nothing of callbacks in them: an iteration or a case that is not taken launches nothing, so it calls
nobody, and hands its chains on.

`flatten` calls `thread` when no step is dead any more, so that no chain keeps a step alive. A schedule puts steps in
order without looking at chains. Behind it, `wired` makes them operands and results of the steps' equations.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from pathways import _jaxlib
from pathways.compiler.ir import Calls
from pathways.compiler.steps import Control, ControlKind, FlatProgram, Step, StepKind

#: The chain of all ordered callbacks. A step without an order has one by the identity of its equation, so that copies
#: of it in unrolled iterations are on one chain.
_ORDER: Hashable = "order"
_BEGIN = np.bool_(False)


def thread(program: FlatProgram, at: int) -> None:
    """Sets the chains of a program, which is a whole one. If it has ordered callbacks, its argument number `at` becomes
    `before`. Its results become more: see `Calls`.
    """
    effects: list[Any] = []
    pure: list[Any] = []
    order = None
    if _ORDER in _chains_of(program):
        order = program.before = _jaxlib.order_var()
        program.invars.insert(at, order)
    for step in program.steps:
        chains = _chains_of_step(step)
        values = {key: order if key == _ORDER else _begin() for key in chains}
        _thread_step(step, values)
        for key, has_effects in chains.items():
            if key == _ORDER:
                order = values[key]
            else:
                (effects if has_effects else pure).append(values[key])
    last = -1
    if program.before is not None:
        last = len(effects)
        effects.append(order)
    program.outvars = [*program.outvars, *effects, *pure]
    program.calls = Calls(len(effects) + len(pure), len(effects), last)


def _chains_of(program: FlatProgram) -> dict[Hashable, bool]:
    """The chains of a program's steps, and of the bodies in it: whether a callback on it has an effect."""
    return _merged(map(_chains_of_step, program.steps))


def _chains_of_step(step: Step) -> dict[Hashable, bool]:
    if step.control is not None:
        return _merged(_chains_of(body) for body in step.control.bodies)
    if step.calls is _jaxlib.CallsBack.NOTHING:
        return {}
    key = _ORDER if step.calls is _jaxlib.CallsBack.IN_ORDER else id(step.eqn)
    return {key: _jaxlib.has_effects(step.eqn)}


def _merged(parts: Iterable[dict[Hashable, bool]]) -> dict[Hashable, bool]:
    found: dict[Hashable, bool] = {}
    for part in parts:
        for key, has_effects in part.items():
            found[key] = found.get(key, False) or has_effects
    return found


def _thread_step(step: Step, values: dict[Hashable, Any]) -> None:
    """Puts a step on its chains; `values` has what each is before, and gets what it is behind the step."""
    keys = list(_chains_of_step(step))
    if not keys:
        return
    after = [_jaxlib.order_var() for _ in keys]
    if step.control is None:
        step.before, step.after = values[keys[0]], after[0]
    else:
        # A branch reads no literals; its cases do that themselves.
        is_branch = step.control.kind is ControlKind.BRANCH
        taken = [key for key in keys if not is_branch or not isinstance(values[key], _jaxlib.Literal)]
        for body in step.control.bodies:
            inside = {key: values[key] for key in keys} | {key: _jaxlib.order_var() for key in taken}
            arguments = [inside[key] for key in taken]
            for inner in body.steps:
                _thread_step(inner, inside)
            _extend_body(step.control, body, arguments, [inside[key] for key in keys])
        _extend_step(step, step.control, [values[key] for key in taken], after)
    values.update(zip(keys, after, strict=True))


def _extend_body(control: Control, body: FlatProgram, taken: list[Any], given: list[Any]) -> None:
    """A body takes and gives more values: behind its carry, or behind all if it is of a branch."""
    rows = 0
    if control.kind is ControlKind.FOR:
        rows = len(body.invars) - control.constants - control.carry
        stacks = len(body.outvars) - control.carry
        body.outvars = [*body.outvars[: control.carry], *given, *body.outvars[len(body.outvars) - stacks :]]
    else:
        body.outvars = [*body.outvars, *given]
    end = len(body.invars) - rows
    body.invars = [*body.invars[:end], *taken, *body.invars[end:]]


def _extend_step(step: Step, control: Control, before: list[Any], after: list[Any]) -> None:
    """The control step reads and gives what its bodies take and give in addition."""
    reads, gives = len(step.inputs), len(step.outputs)
    if control.kind is ControlKind.FOR:
        reads, gives = control.constants + control.carry, control.carry
    step.inputs = [*step.inputs[:reads], *before, *step.inputs[reads:]]
    step.outputs = [*step.outputs[:gives], *after, *step.outputs[gives:]]
    if control.kind is not ControlKind.BRANCH:
        control.carry += len(after)


def _begin() -> Any:
    return _jaxlib.new_literal(_BEGIN, _jaxlib.order_var().aval)


def wired(program: FlatProgram, like: Any) -> FlatProgram:
    """The program with its chains as operands and results of the steps' equations. It has no control steps.

    `like`: an open jaxpr, whose debug info new jaxprs have.
    """
    if all(step.after is None for step in program.steps):
        return program
    jaxprs: dict[tuple[int, bool], Any] = {}
    steps = [step if step.after is None else _wired(step, like, jaxprs) for step in program.steps]
    return dataclasses.replace(program, steps=steps)


def _wired(step: Step, like: Any, jaxprs: dict[tuple[int, bool], Any]) -> Step:
    ordered = step.calls is _jaxlib.CallsBack.IN_ORDER
    if step.kind is not StepKind.PLACED:
        eqn = step.eqn.replace(invars=step.inputs, outvars=step.outputs)
        eqn = _jaxlib.in_order([eqn], step.before, step.after, like)
        return dataclasses.replace(step, eqn=eqn, inputs=list(eqn.invars), outputs=list(eqn.outvars))
    closed = step.eqn.params["jaxpr"]
    key = id(_jaxlib.opened(closed)[0]), ordered
    if key not in jaxprs:
        jaxprs[key] = _jaxlib.jaxpr_in_order(closed, ordered)
    inputs, outputs = [*step.inputs, step.before], [*step.outputs, step.after]
    eqn = _jaxlib.jit_of(step.eqn, jaxprs[key], inputs, outputs)
    return dataclasses.replace(step, eqn=eqn, inputs=inputs, outputs=outputs)
