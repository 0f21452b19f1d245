"""A loop with a bound: the one primitive behind `pw.while_loop`, and what it computes.

`loop_p` has two forms. Both carry values, as a `jax.lax.while_loop` does, and give rows, as a `jax.lax.scan` does.
- With a `test`, the loop goes on while the test of what it carries holds, for at most `most` iterations. It takes the
  test's constants, the body's constants and the first carry. It gives how many iterations there were (int32), whether
  the test still held (bool), the last carry and the stacks.
- Without, the number of iterations is its first operand: int32, at most `most`. Then come the body's constants, the
  first carry and arrays of `most` rows, one row per iteration. It gives the last carry and the stacks. With `reverse`
  it begins at the row of the last iteration, as in a `jax.lax.scan`.

The body goes from (constants, carry, a row of each array) to (carry, a row of each stack). A stack has `most` rows;
those of iterations that there were not are zero. `loop_rules` has the derivatives.

`inlining` makes control steps of a loop that has placed calls inside: it opens `run`. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import mlir

from pathways import _jaxlib
from pathways.compiler.control.unrolling import empty, operations

loop_p = jex.core.Primitive("pathways_loop")
loop_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Form:
    """The parameters of a `loop_p`. `tested` and `fixed` count the constants of the test and of the body, `carried`
    the values that it carries.
    """

    test: Any
    body: Any
    most: int | None
    reverse: bool
    tested: int
    fixed: int
    carried: int

    def bind(self, *operands: Any) -> list[Any]:
        """Calls the loop, in one of JAX's traces or at once."""
        params = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return list(loop_p.bind(*operands, **params))

    @property
    def before(self) -> int:
        """How many operands stand before the body's constants: the test's constants, or the number of iterations."""
        return 1 if self.test is None else self.tested

    @property
    def given(self) -> int:
        """How many results stand before the carry."""
        return 0 if self.test is None else 2

    def parts(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """The operands: those before, the body's constants, the carry, the arrays."""
        ends = [self.before, self.before + self.fixed, self.before + self.fixed + self.carried]
        return (
            [*operands[: ends[0]]],
            [*operands[ends[0] : ends[1]]],
            [*operands[ends[1] : ends[2]]],
            [*operands[ends[2] :]],
        )


def results_of(closed: Any) -> list[Any]:
    """The types of the results of a closed jaxpr."""
    return [v.aval for v in _jaxlib.opened(closed)[0].outvars]


def arguments_of(closed: Any) -> list[Any]:
    """The types of the arguments of a closed jaxpr."""
    return [v.aval for v in _jaxlib.opened(closed)[0].invars]


def traced(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Any:
    """The closed jaxpr of a function of values of those types. Unlike `operations` it keeps the mesh that is set."""
    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval in avals
    ]
    with jax.disable_jit(False):
        return jax.make_jaxpr(fun)(*structs)


def reached(closed: Any, moves: Sequence[bool]) -> list[bool]:
    """Which results may depend on the arguments that move."""
    jaxpr = _jaxlib.opened(closed)[0]
    moving = {v for v, moved in zip(jaxpr.invars, moves, strict=True) if moved}
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, _jaxlib.Literal) and v in moving for v in eqn.invars):
            moving.update(eqn.outvars)
    return [not isinstance(v, _jaxlib.Literal) and v in moving for v in jaxpr.outvars]


def run(*operands: Any, apart: bool = False, **params: Any) -> list[Any]:
    """What a loop computes, as a `jax.lax.while_loop`.

    `apart`: each array and each stack has a counter of its own. Then no counter is sent between slices.
    """
    form = Form(**params)
    stacks = [_stack(form, aval) for aval in results_of(form.body)[form.carried :]]
    return (_run_counted if form.test is None else _run_tested)(form, operands, stacks, apart)


def _run_tested(form: Form, operands: Sequence[Any], stacks: list[Any], apart: bool) -> list[Any]:
    before, constants, carry, _ = form.parts(operands)
    test, body = _jaxlib.as_function(form.test), _jaxlib.as_function(form.body)
    zero = jnp.int32(0)

    def goes_on(state: Any) -> Any:
        count, more, *_ = state
        return more if form.most is None else more & (count < form.most)

    def turn(state: Any) -> Any:
        count, _, carry, stacks, places = state
        results = body(*constants, *carry)
        carry, rows = results[: form.carried], results[form.carried :]
        stacks = [_written(x, y, at) for x, y, at in zip(stacks, rows, places or [count] * len(rows), strict=True)]
        return count + 1, test(*before, *carry)[0], carry, stacks, [at + 1 for at in places]

    places = [zero] * len(stacks) if apart else []
    state = zero, test(*before, *carry)[0], carry, stacks, places
    count, more, carry, stacks, _ = jax.lax.while_loop(goes_on, turn, state)
    return [count, more, *carry, *stacks]


def _run_counted(form: Form, operands: Sequence[Any], stacks: list[Any], apart: bool) -> list[Any]:
    (turns,), constants, carry, arrays = form.parts(operands)
    body = _jaxlib.as_function(form.body)
    zero = jnp.int32(0)

    def at(count: Any) -> Any:
        return turns - 1 - count if form.reverse else count

    def turn(state: Any) -> Any:
        count, carry, stacks, places = state
        now = [at(place) for place in places] if places else [at(count)] * (len(arrays) + len(stacks))
        rows = [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x, i in zip(arrays, now, strict=False)]
        results = body(*constants, *carry, *rows)
        carry, rows = results[: form.carried], results[form.carried :]
        stacks = [_written(x, y, i) for x, y, i in zip(stacks, rows, now[len(arrays) :], strict=True)]
        return count + 1, carry, stacks, [place + 1 for place in places]

    places = [zero] * (len(arrays) + len(stacks)) if apart else []
    state = zero, carry, stacks, places
    _, carry, stacks, _ = jax.lax.while_loop(lambda state: state[0] < turns, turn, state)
    return [*carry, *stacks]


def _stack(form: Form, aval: Any) -> Any:
    return empty(_stack_type(form, aval))


def _stack_type(form: Form, aval: Any) -> Any:
    assert form.most is not None, "a loop without a bound gives no rows"
    return _jaxlib.shaped_array((form.most, *aval.shape), aval.dtype, False)


def _written(stack: Any, row: Any, at: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(stack, row, at, 0)


def opened(eqn: Any) -> Any:
    """The closed jaxpr of what an equation of `loop_p` computes; its loop is a `jax.lax.while_loop`."""
    return operations(functools.partial(run, apart=True, **eqn.params), [v.aval for v in eqn.invars])


def _types(*_: Any, **params: Any) -> tuple[list[Any], Any]:
    form = Form(**params)
    results = results_of(form.body)
    scalars = [_jaxlib.shaped_array((), jnp.dtype(dtype), False) for dtype in ("int32", "bool")]
    stacks = [_stack_type(form, aval) for aval in results[form.carried :]]
    places = [*range(form.before, form.before + len(arguments_of(form.body)))]
    effects = _jaxlib.effects_at(form.body, places)
    if form.test is not None:
        effects |= _jaxlib.effects_at(form.test, [*range(form.tested), *places[form.fixed :]])
    return [*scalars[: form.given], *results[: form.carried], *stacks], effects


def _discharge(operands: Sequence[Any], were: Sequence[bool], params: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """A loop whose body uses references: it carries their values."""
    form = Form(**params)
    before, constants, carry, arrays = form.parts(operands)
    places = [n for n, was in enumerate(form.parts(were)[1]) if was]
    if sum(were) > len(places):
        raise NotImplementedError(
            "the test of pw.while_loop reads one, or its body gets one in another way than a closed-over variable"
        )
    states = [constants[n] for n in places]
    out = _with_states(form, tuple(places)).bind(
        *before, *(x for n, x in enumerate(constants) if n not in places), *states, *carry, *arrays
    )
    first = form.given + len(states)
    return out[form.given : first], [*out[: form.given], *out[first:]]


@functools.lru_cache(512)
def _with_states(form: Form, places: tuple[int, ...]) -> Form:
    """The loop, which carries the values of the references among its body's constants before the other values."""
    body = _jaxlib.discharged(form.body)
    types, fixed, states = arguments_of(body.jaxpr), form.fixed - len(places), len(places)
    run = _jaxlib.as_function(body.jaxpr)
    rest = [n for n in range(form.fixed) if n not in places]
    order = [*rest, *places, *range(form.fixed, len(types))]
    count = len(results_of(form.body))

    def turn(*flat: Any) -> list[Any]:
        given = [x for _, x in sorted(zip(order, flat, strict=True), key=lambda pair: pair[0])]
        results = run(*given)
        new = dict(zip(body.written, results[count:], strict=True))
        return [*(new.get(n, flat[fixed + n]) for n in range(states)), *results[:count]]

    test = form.test
    if test is not None:
        goes_on, tested = _jaxlib.as_function(test), form.tested
        kinds = [*arguments_of(test)[:tested], *(types[n] for n in places), *arguments_of(test)[tested:]]
        test = traced(lambda *flat: goes_on(*flat[:tested], *flat[tested + states :]), kinds)
    new_body = traced(turn, [types[n] for n in order])
    return dataclasses.replace(form, test=test, body=new_body, fixed=fixed, carried=states + form.carried)


def _pass_down(eqn: Any, inputs: Sequence[Any], inside: Sequence[tuple[Any, Sequence[Any]]]) -> Any:
    """A loop whose test and body take more constants; see `_jaxlib.pass_down`."""
    form = Form(**eqn.params)
    before, constants, carry, arrays = form.parts(inputs)
    names = [name for name, value in eqn.params.items() if _jaxlib.is_jaxpr(value)]
    wider = dict(zip(names, inside, strict=True))
    body, more = wider["body"]
    constants += more
    form = dataclasses.replace(
        form, body=_jaxlib.put_last_at(body, len(more), form.fixed), fixed=form.fixed + len(more)
    )
    if form.test is not None:
        test, more = wider["test"]
        before += more
        form = dataclasses.replace(
            form, test=_jaxlib.put_last_at(test, len(more), form.tested), tested=form.tested + len(more)
        )
    params = {field.name: getattr(form, field.name) for field in dataclasses.fields(form)}
    return eqn.replace(invars=[*before, *constants, *carry, *arrays], params=params)


_jaxlib.run_alone(loop_p)
_jaxlib.discharge_by(loop_p, _discharge)
_jaxlib.teach_pass_down(loop_p, _pass_down)
loop_p.def_effectful_abstract_eval(_types)
mlir.register_lowering(loop_p, mlir.lower_fun(run, multiple_results=True))


def bounded(loop: Any, operands: Sequence[Any], most: int | None, every: int) -> list[Any]:
    """The loop of an equation of JAX's `while`, for at most `most` iterations: how many there were, whether its test
    still holds, and the last carry.

    `every`: of so many iterations one is saved for derivatives; the others are computed again.
    """
    params = loop.params
    tested, fixed = params["cond_nconsts"], params["body_nconsts"]
    carried = len(operands) - tested - fixed
    form = Form(params["cond_jaxpr"], params["body_jaxpr"], most, False, tested, fixed, carried)
    if most is None or every == 1:
        return form.bind(*operands)
    before, constants, carry, _ = form.parts(operands)
    more = _jaxlib.as_function(form.test)(*before, *carry)[0]
    return _in_parts(form, every).bind(*before, *constants, jnp.int32(0), more, *carry)[2:]


@functools.lru_cache(512)
def _in_parts(form: Form, every: int) -> Form:
    """A loop of loops of `every` iterations; it also carries the number of iterations, and whether the test holds."""
    assert form.most is not None
    most = form.most
    test, body = _jaxlib.as_function(form.test), _jaxlib.as_function(form.body)
    scalars = [_jaxlib.shaped_array((), jnp.dtype(dtype), False) for dtype in ("int32", "bool")]
    types = arguments_of(form.body)
    carry = [*scalars, *types[form.fixed :]]
    constants = [*arguments_of(form.test)[: form.tested], *types[: form.fixed]]
    fixed = len(constants)

    def turn(*flat: Any) -> list[Any]:
        count, _, *carry = flat[fixed:]
        carry = body(*flat[form.tested : fixed], *carry)
        return [count + 1, test(*flat[: form.tested], *carry)[0], *carry]

    goes_on = traced(lambda count, more, *_: [more & (count < most)], carry)
    inner = Form(goes_on, traced(turn, [*constants, *carry]), every, False, 0, fixed, len(carry))
    outer = traced(lambda *flat: inner.bind(*flat)[2:], [*constants, *carry])
    return dataclasses.replace(inner, body=outer, most=-(-most // every))
