"""How a loop with a bound (`loops`) is differentiated and batched. Each rule makes such loops again, so JAX may apply
them any number of times, in either mode.

- Forward: the loop also saves what the derivative of its body reads of the carry, one row per iteration. A second loop
  carries the tangents. It has as many iterations as the first, and reads the rows that were saved; from them it
  computes the body's derivative again.
- Reverse: the second loop is linear in its tangents. Its transpose is a loop from the last iteration to the first; it
  carries the cotangents of the carry, and the sums of those of the constants.
- A batch whose elements have iterations of their own ends with the last of them; what is over keeps its carry.

The method is that of `jax.lax.scan`, except that the number of iterations is data and that the body is computed again.

Pure: works on jaxprs only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from pathways import _jaxlib, errors
from pathways.compiler.added_primitives.loops import Form, arguments_of, bounded, loop_p, reached, results_of, traced

_KEPT = 512  # derivatives of bodies; then JAX finds the loops made of them again, and does not compile them anew


def is_real(aval: Any) -> bool:
    """Whether values of a type have derivatives."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is known to be zero, before any value is."""
    return type(tangent) is ad.Zero or jax.typeof(tangent).dtype == jax.dtypes.float0


def _zeros(aval: Any) -> Any:
    return jax.lax.full(aval.shape, 0, aval.dtype)


def _fixpoint(form: Form, moves: Sequence[bool], real: bool) -> tuple[list[bool], list[bool]]:
    """Which of the body's arguments move, and which of its results, if those of the first iteration move as given.

    `real`: only what has derivatives can move.
    """
    moves = list(moves)
    types = results_of(form.body)
    while True:
        results = [
            moved and (is_real(aval) or not real) for moved, aval in zip(reached(form.body, moves), types, strict=True)
        ]
        carried = moves[form.fixed : form.fixed + form.carried]
        after = [a or b for a, b in zip(carried, results[: form.carried], strict=True)]
        if after == carried:
            return moves, [*after, *results[form.carried :]]
        moves[form.fixed : form.fixed + form.carried] = after


# Forward mode.


@functools.lru_cache(_KEPT)
def derivative_of(body: Any, moves: tuple[bool, ...], results: tuple[bool, ...]) -> tuple[Any, tuple[bool, ...]]:
    """The derivative of a body: from the arguments, then the tangents of those that move, to the tangents of the
    results that move. And which of the arguments it reads.
    """
    types = arguments_of(body)
    fun = _jaxlib.as_function(body)
    moving = [n for n, moved in enumerate(moves) if moved]

    def derivative(*flat: Any) -> list[Any]:
        values, tangents = flat[: len(types)], flat[len(types) :]

        def part(*some: Any) -> list[Any]:
            whole = list(values)
            for n, value in zip(moving, some, strict=True):
                whole[n] = value
            return [result for result, moved in zip(fun(*whole), results, strict=True) if moved]

        return list(jax.jvp(part, tuple(values[n] for n in moving), tuple(tangents))[1])

    closed, reads = _jaxlib.live(traced(derivative, [*types, *(types[n].to_tangent_aval() for n in moving)]))
    return closed, tuple(reads[: len(types)])


@functools.lru_cache(_KEPT)
def _saving(body: Any, saved: tuple[int, ...]) -> Any:
    """The body, which also gives some of its arguments as rows."""
    jaxpr, consts = _jaxlib.opened(body)
    outvars = [*jaxpr.outvars, *(jaxpr.invars[n] for n in saved)]
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    return _jaxlib.new_jaxpr(values, jaxpr.invars, outvars, jaxpr.eqns, jaxpr, jaxpr.effects)


@functools.lru_cache(_KEPT)
def _tangent_body(
    body: Any, moves: tuple[bool, ...], results: tuple[bool, ...], fixed: int, carried: int
) -> tuple[Any, tuple[bool, ...]]:
    """The body of the loop of tangents: (read constants, tangents of constants, tangents of the carry, read rows of the
    carry, read rows of arrays, tangents of rows) to the tangents of the results that move. And what it reads.
    """
    closed, reads = derivative_of(body, moves, results)
    jaxpr, consts = _jaxlib.opened(closed)
    count = len(moves)
    tangents = iter(jaxpr.invars[count:])
    tangent = {n: next(tangents) for n, moved in enumerate(moves) if moved}
    groups = [range(fixed), range(fixed, fixed + carried), range(fixed + carried, count)]
    read = [[jaxpr.invars[n] for n in group if reads[n]] for group in groups]
    moving = [[tangent[n] for n in group if moves[n]] for group in groups]
    invars = [*read[0], *moving[0], *moving[1], *read[1], *read[2], *moving[2]]
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    return _jaxlib.new_jaxpr(values, invars, jaxpr.outvars, jaxpr.eqns, jaxpr, jaxpr.effects), reads


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    form = Form(**params)
    before, *inner = form.parts(primals)
    values = [value for group in inner for value in group]
    given = [value for group in form.parts(tangents)[1:] for value in group]
    moves, results = _fixpoint(form, [not is_zero(tangent) for tangent in given], real=True)
    if not any(moves):
        out = form.bind(*primals)
        return out, [no_tangent(x) for x in out]
    refuse_references(form.body, "a derivative of pw.while_loop")
    moving = [
        tangent if not is_zero(tangent) else _zeros(jax.typeof(value).to_tangent_aval())
        for tangent, value, moved in zip(given, values, moves, strict=True)
        if moved
    ]
    if form.most is None:
        out, derivatives = _together(form, before, values, moving, moves, results)
    else:
        out, derivatives = _one_after_the_other(form, before, values, moving, moves, results)
    some = iter(derivatives)
    return out, [
        *map(no_tangent, out[: form.given]),
        *(next(some) if moved else no_tangent(x) for x, moved in zip(out[form.given :], results, strict=True)),
    ]


def refuse_references(body: Any, what: str) -> None:
    """Refuses a body that uses a reference from outside, where it would run more often than its loop says (EFF-1).

    Raises:
        EffectError: it does.
    """
    if any(map(_jaxlib.is_reference_type, arguments_of(body))):
        raise errors.EffectError(
            f"{what} uses a reference (jax.new_ref) inside, and would write to it once more. Carry the value instead"
        )


def no_tangent(x: Any) -> Any:
    """The tangent of a value that does not move."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _one_after_the_other(
    form: Form,
    before: list[Any],
    values: list[Any],
    moving: list[Any],
    moves: Sequence[bool],
    results: Sequence[bool],
) -> tuple[list[Any], list[Any]]:
    """A loop that saves its carry, and a loop of tangents: the results, and the tangents of those that move."""
    fixed, carried = form.fixed, form.carried
    body, reads = _tangent_body(form.body, tuple(moves), tuple(results), fixed, carried)
    jaxpr = _jaxlib.opened(form.body)[0]
    wanted = [n for n in range(fixed, fixed + carried) if reads[n]]
    stacks = {id(v): n for n, v in enumerate(jaxpr.outvars[carried:])}  # the body may give a carried value as rows
    saved = [n for n in wanted if id(jaxpr.invars[n]) not in stacks]
    saving = dataclasses.replace(form, body=_saving(form.body, tuple(saved)))
    every = saving.bind(*before, *values)
    out = every[: len(every) - len(saved)]
    fresh = dict(zip(saved, every[len(out) :], strict=True))
    kept = [fresh[n] if n in fresh else out[form.given + carried + stacks[id(jaxpr.invars[n])]] for n in wanted]
    turns = before[0] if form.test is None else every[0]
    constants = [values[n] for n in range(fixed) if reads[n]]
    arrays = [values[n] for n in range(fixed + carried, len(values)) if reads[n]]
    ends = [sum(moves[:fixed]), sum(moves[: fixed + carried])]
    loop = Form(None, body, form.most, form.reverse, 0, len(constants) + ends[0], ends[1] - ends[0])
    operands = [*constants, *moving[: ends[1]], *kept, *arrays, *moving[ends[1] :]]
    return out, loop.bind(turns, *operands)


def _together(
    form: Form,
    before: list[Any],
    values: list[Any],
    moving: list[Any],
    moves: Sequence[bool],
    results: Sequence[bool],
) -> tuple[list[Any], list[Any]]:
    """One loop of values and tangents; it saves nothing, so it has no bound and is not transposed."""
    fixed = sum(moves[: form.fixed])
    loop = _doubled(form, tuple(moves), tuple(results))
    constants, carry = values[: form.fixed], values[form.fixed :]
    out = loop.bind(*before, *constants, *moving[:fixed], *carry, *moving[fixed:])
    ends = form.given + form.carried
    return out[:ends], out[ends:]


@functools.lru_cache(_KEPT)
def _doubled(form: Form, moves: tuple[bool, ...], results: tuple[bool, ...]) -> Form:
    types = arguments_of(form.body)
    fun = _jaxlib.as_function(form.body)
    derivative = _jaxlib.as_function(derivative_of(form.body, moves, results)[0])
    fixed, carried = form.fixed, form.carried
    moving = [n for n, moved in enumerate(moves) if moved]
    tangents = [types[n].to_tangent_aval() for n in moving]
    more = sum(moves[:fixed])

    def body(*flat: Any) -> list[Any]:
        values = [*flat[:fixed], *flat[fixed + more : fixed + more + carried]]
        there = [*flat[fixed : fixed + more], *flat[fixed + more + carried :]]
        return [*fun(*values), *derivative(*values, *there)]

    test = _jaxlib.as_function(form.test)
    own = arguments_of(form.test)
    return dataclasses.replace(
        form,
        test=traced(lambda *flat: test(*flat[: len(own)]), [*own, *tangents[more:]]),
        body=traced(body, [*types[:fixed], *tangents[:more], *types[fixed:], *tangents[more:]]),
        fixed=fixed + more,
        carried=carried + len(tangents) - more,
    )


# Reverse mode.


@functools.lru_cache(_KEPT)
def _transposed(form: Form, linear: tuple[bool, ...]) -> Form:
    """The loop that goes back. `linear` says which of the body's arguments are tangents; its carry is.

    Its operands: the constants that are no tangents; the cotangents of the carry, and sums for the other constants; the
    arrays that are no tangents, and the cotangents of the stacks. It gives the cotangents of the carry, of the
    constants and of the rows.
    """
    types = arguments_of(form.body)
    results = results_of(form.body)
    fun = _jaxlib.as_function(form.body)
    ends = (form.fixed, form.fixed + form.carried, len(types))
    known = [n for n in range(len(types)) if not linear[n]]
    unknown = [n for n in range(len(types)) if linear[n]]
    constants = [n for n in known if n < ends[0]]
    arrays = [n for n in known if n >= ends[1]]
    sums = [n for n in unknown if n < ends[0]]
    sources = [types[n].to_tangent_aval() for n in unknown]

    def body(*flat: Any) -> list[Any]:
        given = iter(flat)
        values = {n: next(given) for n in constants}
        cotangents = [next(given) for _ in range(form.carried)]
        totals = [next(given) for _ in sums]
        values |= {n: next(given) for n in arrays}
        cotangents += given

        def linear_part(*some: Any) -> list[Any]:
            whole = {**values, **dict(zip(unknown, some, strict=True))}
            return fun(*(whole[n] for n in range(len(types))))

        out = dict(zip(unknown, jax.linear_transpose(linear_part, *sources)(cotangents), strict=True))
        return [
            *(out[n] for n in range(*ends[:2])),
            *(total + out[n] for n, total in zip(sums, totals, strict=True)),
            *(out[n] for n in unknown if n >= ends[1]),
        ]

    carry = [*(types[n] for n in range(*ends[:2])), *(types[n] for n in sums)]
    rows = [*(types[n] for n in arrays), *results[form.carried :]]
    closed = traced(body, [*(types[n] for n in constants), *carry, *rows])
    return Form(None, closed, form.most, not form.reverse, 0, len(constants), len(carry))


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    form = Form(**params)
    assert form.test is None, "only a loop of tangents is linear"
    before, constants, carry, arrays = form.parts(operands)
    is_linear = [*map(ad.is_undefined_primal, constants), *[True] * len(carry), *map(ad.is_undefined_primal, arrays)]
    loop = _transposed(form, tuple(is_linear))
    types = [*results_of(form.body)[: form.carried], *map(_type_of, cotangents[form.carried :])]
    given = [_zeros(t) if type(c) is ad.Zero else c for c, t in zip(cotangents, types, strict=True)]
    sums = [_zeros(x.aval) for x in constants if ad.is_undefined_primal(x)]
    out = loop.bind(
        *before,
        *(x for x in constants if not ad.is_undefined_primal(x)),
        *given[: form.carried],
        *sums,
        *(x for x in arrays if not ad.is_undefined_primal(x)),
        *given[form.carried :],
    )
    of_carry, rest = out[: form.carried], iter(out[form.carried :])
    return [
        None,
        *(next(rest) if ad.is_undefined_primal(x) else None for x in constants),
        *(c if ad.is_undefined_primal(x) else None for x, c in zip(carry, of_carry, strict=True)),
        *(next(rest) if ad.is_undefined_primal(x) else None for x in arrays),
    ]


def _type_of(cotangent: Any) -> Any:
    return cotangent.aval if type(cotangent) is ad.Zero else jax.typeof(cotangent)


def _refuse_reverse(trace: Any, *operands: Any, **params: Any) -> Any:
    """Called when reverse mode needs the results of a loop before its tangents are known."""
    if params["most"] is not None:
        return trace.default_process_primitive(loop_p, operands, params)
    raise errors.ProgramError(
        "pw.while_loop is differentiated in reverse mode (jax.grad, jax.vjp, jax.linearize) and has no max_iterations: "
        "what the iterations carry must be saved, and nobody knows how many there will be. Give as max_iterations the "
        "largest number of iterations that there can be, or differentiate in forward mode (jax.jvp)"
    )


# Batches.


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[int | None]]:
    form = Form(**params)
    refuse_references(form.body, "jax.vmap of pw.while_loop")
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    fixed, carried = form.fixed, form.carried
    moved = [d is not None for d in dims]
    front = [jnp.moveaxis(x, d, 0) if m else x for x, d, m in zip(operands, dims, moved, strict=True)]
    before, *_ = form.parts(moved)
    moves, results = _fixpoint(form, moved[len(before) :], real=False)
    if form.test is None:
        is_apart = before[0]
    else:
        is_apart = any(before) or reached(form.test, [*before, *moves[fixed:]])[0]
    if is_apart:
        moves = [*moves[:fixed], *[True] * carried, *moves[fixed + carried :]]
        results = [True] * len(results)
    first, constants, carry, arrays = form.parts(front)
    carry = [
        x if is_there or not moves[fixed + n] else jnp.broadcast_to(x, (size, *jnp.shape(x)))
        for n, (x, is_there) in enumerate(zip(carry, form.parts(moved)[2], strict=True))
    ]
    arrays = [jnp.moveaxis(x, 0, 1) if m else x for x, m in zip(arrays, form.parts(moved)[3], strict=True)]
    ends = [0 if m else None for m in results[:carried]], [1 if m else None for m in results[carried:]]
    if not is_apart:
        out = _batched(form, tuple(moves), tuple(results), size).bind(*first, *constants, *carry, *arrays)
        return out, [*[None] * form.given, *ends[0], *ends[1]]
    if form.test is None:
        (turns,) = first
        loop = _masked(form, tuple(moves), size)
        out = loop.bind(jnp.max(turns), turns, *constants, *carry, *arrays, jnp.arange(form.most, dtype=jnp.int32))
        return out, [*ends[0], *ends[1]]
    loop = _tested_apart(form, tuple(before), tuple(moves), size)
    test = _over(form.test, [*before, *[True] * carried], size)
    more, counts = test(*first, *carry)[0], jnp.zeros((size,), jnp.int32)
    out = loop.bind(*first, *constants, more, counts, *carry)
    more, counts = out[2:4]
    return [counts, more, *out[4:]], [0, 0, *ends[0], *ends[1]]


def _over(closed: Any, moves: Sequence[bool], size: int, results: Sequence[bool] | None = None) -> Any:
    """A jaxpr as a function of a batch: of the arguments that move, and to the results that do (all if not given)."""
    out = [0 if m else None for m in results] if results is not None else 0
    return jax.vmap(_jaxlib.as_function(closed), [0 if m else None for m in moves], out, axis_size=size)


def _batch_types(avals: Sequence[Any], moves: Sequence[bool], size: int) -> list[Any]:
    return [
        jax.ShapeDtypeStruct((size, *v.shape) if m else v.shape, v.dtype, weak_type=getattr(v, "weak_type", False))
        for v, m in zip(avals, moves, strict=True)
    ]


@functools.lru_cache(_KEPT)
def _batched(form: Form, moves: tuple[bool, ...], results: tuple[bool, ...], size: int) -> Form:
    """The loop of a batch whose elements have as many iterations as each other."""
    types = _batch_types(arguments_of(form.body), moves, size)
    return dataclasses.replace(form, body=traced(_over(form.body, moves, size, results), types))


def _kept(going: Any, new: Any, old: Any) -> Any:
    """Of each element of a batch the new value if it goes on, else the old one."""
    return jnp.where(going.reshape(going.shape + (1,) * (new.ndim - 1)), new, old)


@functools.lru_cache(_KEPT)
def _masked(form: Form, moves: tuple[bool, ...], size: int) -> Form:
    """The loop of a batch whose elements have the iterations that its first constant says. Its last array numbers
    them.
    """
    types = _batch_types(arguments_of(form.body), moves, size)
    fun = _over(form.body, moves, size)
    numbers = jax.ShapeDtypeStruct((size,), jnp.int32)

    def body(turns: Any, *flat: Any) -> list[Any]:
        *values, number = flat
        going = number < turns
        old = values[form.fixed : form.fixed + form.carried]
        out = fun(*values)
        rows = [_kept(going, row, jnp.zeros_like(row)) for row in out[form.carried :]]
        return [*(_kept(going, x, y) for x, y in zip(out, old, strict=False)), *rows]

    closed = traced(body, [numbers, *types, jax.ShapeDtypeStruct((), jnp.int32)])
    return dataclasses.replace(form, body=closed, fixed=form.fixed + 1)


@functools.lru_cache(_KEPT)
def _tested_apart(form: Form, before: tuple[bool, ...], moves: tuple[bool, ...], size: int) -> Form:
    """The loop of a batch in which each element has a test of its own. It carries which elements go on, and how many
    iterations each had.
    """
    every = [True] * form.carried
    test = _over(form.test, [*before, *every], size)
    fun = _over(form.body, moves, size)
    types = _batch_types(arguments_of(form.body), moves, size)
    tests = _batch_types(arguments_of(form.test)[: form.tested], before, size)
    more, counts = jax.ShapeDtypeStruct((size,), jnp.bool_), jax.ShapeDtypeStruct((size,), jnp.int32)
    ends = (form.tested, form.tested + form.fixed)

    def body(*flat: Any) -> list[Any]:
        given, constants = flat[: ends[0]], flat[ends[0] : ends[1]]
        going, counts, *old = flat[ends[1] :]
        out = fun(*constants, *old)
        carry = [_kept(going, x, y) for x, y in zip(out, old, strict=False)]
        rows = [_kept(going, row, jnp.zeros_like(row)) for row in out[form.carried :]]
        return [going & test(*given, *carry)[0], counts + going, *carry, *rows]

    carried = types[form.fixed :]
    return dataclasses.replace(
        form,
        test=traced(lambda more, *_: [jnp.any(more)], [more, counts, *carried]),
        body=traced(body, [*tests, *types[: form.fixed], more, counts, *carried]),
        tested=0,
        fixed=form.tested + form.fixed,
        carried=form.carried + 2,
    )


ad.primitive_jvps[loop_p] = _jvp
pe.custom_partial_eval_rules[loop_p] = _refuse_reverse
ad.primitive_transposes[loop_p] = _transpose
batching.primitive_batchers[loop_p] = _batch


def while_loop(
    test: Callable[[Any], Any], body: Callable[[Any], Any], first: Any, most: int | None, every: int
) -> tuple[Any, Any, Any]:
    """`jax.lax.while_loop`, bounded as `loops.bounded` says: the number of iterations, whether the test still holds,
    and the last carry.

    Raises:
        TypeError: JAX's own, for a test or a body that does not fit.
    """
    leaves, tree = jax.tree.flatten(first)
    trees: list[Any] = []

    def whole(*leaves: Any) -> list[Any]:
        last = jax.lax.while_loop(test, body, tree.unflatten(leaves))
        trees.append(jax.tree.structure(last))
        return jax.tree.leaves(last)

    with jax.disable_jit(False):
        closed = jax.make_jaxpr(whole)(*leaves)
    jaxpr, consts = _jaxlib.opened(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *leaves), strict=True))
    status: list[Any] = []
    for eqn in jaxpr.eqns:  # JAX converts what is weakly typed before the loop
        values = [v.val if isinstance(v, _jaxlib.Literal) else env[v] for v in eqn.invars]
        if eqn.primitive.name == "while":
            out = bounded(eqn, values, most, every)
            status, results = out[:2], out[2:]
        else:
            results = _jaxlib.evaluated(eqn, values, jaxpr)
        env.update(zip(eqn.outvars, results, strict=True))
    last = [v.val if isinstance(v, _jaxlib.Literal) else env[v] for v in jaxpr.outvars]
    return status[0], status[1], trees[0].unflatten(last)
