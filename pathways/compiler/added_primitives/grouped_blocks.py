"""A function of blocks that lie in groups, as the rows of a mixture's experts do: one primitive, and its derivatives.

`over_blocks` calls a function once per block, with what the block's group has. JAX would differentiate a scan over the
blocks, too, but its reverse pass adds arrays of the size of all groups for each block. Here it adds arrays of the size
of one group, and writes each group's sum once.

What the function reads and makes is of three kinds, and a cotangent has the kind of its value:

    kind     as an operand                        as a result
    WHOLE    the same for each block              the sum over all blocks
    GROUP    a row per group                      per group the sum over its blocks; 0 for a group without blocks
    BLOCK    a row per block                      a row per block; 0 beyond the last group's end

So the derivative of such a call is such a call, and so is its transpose. JAX may apply the rules any number of times,
in either mode. Nothing is saved except the operands: a derivative computes the function again.

`pathways.api.nn.mixture` calls this, in the code of one device. Pure.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from pathways import _jaxlib, errors
from pathways.compiler.added_primitives.loop_rules import derivative_of, is_real, is_zero, no_tangent
from pathways.compiler.added_primitives.loops import arguments_of, reached, results_of, traced
from pathways.compiler.control.unrolling import empty

_KEPT = 512  # transposes; then JAX finds the calls made of them again, and does not compile them anew

blocks_p = jex.core.Primitive("pathways_over_blocks")
blocks_p.multiple_results = True


class Kind(enum.Enum):
    """To what a row of an operand or of a result belongs."""

    WHOLE = "whole"
    GROUP = "group"
    BLOCK = "block"


@dataclasses.dataclass(frozen=True)
class Form:
    """The parameters of a `blocks_p`. Its operands are `ends`, int32[groups], then what the body reads.

    `ends[g]` is the number of blocks of all groups up to g, at most `most`.
    """

    body: Any
    """A closed jaxpr: from one row of each operand to what is added to each result, or is its row."""
    most: int
    """Rows of the operands and results of blocks."""
    reads: tuple[Kind, ...]
    makes: tuple[Kind, ...]

    def bind(self, *operands: Any) -> list[Any]:
        """Calls the primitive, in one of JAX's traces or at once."""
        params = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return list(blocks_p.bind(*operands, **params))

    def results(self, groups: int) -> list[Any]:
        """The types of the results."""
        rows: dict[Kind, tuple[int, ...]] = {Kind.WHOLE: (), Kind.GROUP: (groups,), Kind.BLOCK: (self.most,)}
        return [
            _jaxlib.shaped_array((*rows[kind], *aval.shape), aval.dtype, False)
            for kind, aval in zip(self.makes, results_of(self.body), strict=True)
        ]


def over_blocks(fun: Callable[[Any, Any], Any], ends: Any, groups: Any, blocks: Any) -> Any:
    """`fun(row of groups, row of blocks)` for each block of each group, stacked; 0 in the rows behind the last end.

    `groups` and `blocks` are pytrees of arrays, `groups` with a row per group. The blocks of a group lie together, in
    the order of the groups: those of group g end before row `ends[g]`. `ends`: int32[groups], at most the rows of
    `blocks`.
    """
    leaves, tree = jax.tree.flatten((groups, blocks))
    trees: list[Any] = []

    def flat(*rows: Any) -> list[Any]:
        out = fun(*tree.unflatten(rows))
        trees.append(jax.tree.structure(out))
        return jax.tree.leaves(out)

    closed = traced(flat, [_jaxlib.shaped_array(x.shape[1:], x.dtype, False) for x in leaves])
    jaxpr, constants = _jaxlib.opened(closed)
    if any(_jaxlib.is_reference_type(v.aval) for v in jaxpr.constvars):
        raise errors.EffectError(
            "an expert of a mixture uses a reference (jax.new_ref) from outside, which experts write in no order. "
            "Return the value instead"
        )
    jaxpr, constants = _jaxlib.opened(_jaxlib.discharged(closed).jaxpr)
    body = _jaxlib.new_jaxpr({}, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, jaxpr, jaxpr.effects)
    first = len(jax.tree.leaves(groups))
    reads = [Kind.WHOLE] * len(constants) + [Kind.GROUP] * first + [Kind.BLOCK] * (len(leaves) - first)
    form = Form(body, leaves[-1].shape[0], tuple(reads), (Kind.BLOCK,) * len(jaxpr.outvars))
    return trees[0].unflatten(form.bind(ends, *constants, *leaves))


def _run(ends: Any, *operands: Any, **params: Any) -> list[Any]:
    """A loop over the groups that have blocks, and in it a loop over their blocks: a group's rows are read once."""
    form = Form(**params)
    body = _jaxlib.as_function(form.body)
    types = results_of(form.body)

    def visit(state: Any) -> Any:
        n, results = state
        group = jnp.sum(ends <= n, dtype=jnp.int32)
        given = [_row(x, group) if kind is Kind.GROUP else x for kind, x in zip(form.reads, operands, strict=True)]

        def step(state: Any) -> Any:
            n, results = state
            made = body(*(_row(x, n) if kind is Kind.BLOCK else x for kind, x in zip(form.reads, given, strict=True)))
            return n + 1, [
                _written(result, x, n) if kind is Kind.BLOCK else result + x
                for kind, result, x in zip(form.makes, results, made, strict=True)
            ]

        first = [
            empty(aval) if kind is Kind.GROUP else x for kind, aval, x in zip(form.makes, types, results, strict=True)
        ]
        n, made = jax.lax.while_loop(lambda state: state[0] < ends[group], step, (n, first))
        return n, [
            _written(result, x, group) if kind is Kind.GROUP else x
            for kind, result, x in zip(form.makes, results, made, strict=True)
        ]

    first = [empty(aval) for aval in form.results(ends.shape[0])]
    return list(jax.lax.while_loop(lambda state: state[0] < ends[-1], visit, (jnp.int32(0), first))[1])


def _row(x: Any, at: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(x, at, keepdims=False)


def _written(x: Any, row: Any, at: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(x, row, at, 0)


def _types(ends: Any, *_: Any, **params: Any) -> tuple[list[Any], Any]:
    form = Form(**params)
    return form.results(ends.shape[0]), _jaxlib.opened(form.body)[0].effects


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    form = Form(**params)
    ends, *values = primals
    out = form.bind(*primals)
    moves = [not is_zero(tangent) for tangent in tangents[1:]]
    types = results_of(form.body)
    results = [moved and is_real(aval) for moved, aval in zip(reached(form.body, moves), types, strict=True)]
    if not any(results):
        return out, [no_tangent(x) for x in out]
    body, reads = derivative_of(form.body, tuple(moves), tuple(results))
    read = [n for n, is_read in enumerate(reads) if is_read]
    moving = [n for n, moved in enumerate(moves) if moved]
    tangent = Form(
        _without(body, [n for n, is_read in enumerate(reads) if not is_read]),
        form.most,
        tuple(form.reads[n] for n in (*read, *moving)),
        tuple(kind for kind, moved in zip(form.makes, results, strict=True) if moved),
    )
    derivatives = iter(tangent.bind(ends, *(values[n] for n in read), *(tangents[1 + n] for n in moving)))
    return out, [next(derivatives) if moved else no_tangent(x) for x, moved in zip(out, results, strict=True)]


def _without(closed: Any, unread: Sequence[int]) -> Any:
    """A closed jaxpr without the arguments of these numbers, which it does not read."""
    jaxpr, constants = _jaxlib.opened(closed)
    invars = [v for n, v in enumerate(jaxpr.invars) if n not in unread]
    values = dict(zip(jaxpr.constvars, constants, strict=True))
    return _jaxlib.new_jaxpr(values, invars, jaxpr.outvars, jaxpr.eqns, jaxpr, jaxpr.effects)


@functools.lru_cache(_KEPT)
def _transposed(form: Form, linear: tuple[bool, ...]) -> Form:
    """From the operands that are not linear, then the cotangents of the results, to those of the linear operands."""
    types = arguments_of(form.body)
    fun = _jaxlib.as_function(form.body)
    known = [n for n, is_linear in enumerate(linear) if not is_linear]
    unknown = [n for n, is_linear in enumerate(linear) if is_linear]

    def body(*flat: Any) -> Any:
        values = dict(zip(known, flat, strict=False))

        def linear_part(*some: Any) -> list[Any]:
            whole = {**values, **dict(zip(unknown, some, strict=True))}
            return fun(*(whole[n] for n in range(len(types))))

        return jax.linear_transpose(linear_part, *(types[n] for n in unknown))([*flat[len(known) :]])

    closed = traced(body, [*(types[n] for n in known), *results_of(form.body)])
    reads = *(form.reads[n] for n in known), *form.makes
    return Form(closed, form.most, reads, tuple(form.reads[n] for n in unknown))


def _transpose(cotangents: Sequence[Any], ends: Any, *operands: Any, **params: Any) -> list[Any]:
    form = Form(**params)
    is_linear = tuple(map(ad.is_undefined_primal, operands))
    given = [empty(c.aval) if type(c) is ad.Zero else c for c in cotangents]
    known = [x for x in operands if not ad.is_undefined_primal(x)]
    made = iter(_transposed(form, is_linear).bind(ends, *known, *given))
    return [None, *(next(made) if linear else None for linear in is_linear)]


def _pass_down(eqn: Any, inputs: Sequence[Any], inside: Sequence[tuple[Any, Sequence[Any]]]) -> Any:
    """Blocks whose body takes more that is the same for each; see `_jaxlib.pass_down`."""
    ((body, more),) = inside
    reads = (*eqn.params["reads"], *(Kind.WHOLE for _ in more))
    return eqn.replace(invars=[*inputs, *more], params={**eqn.params, "body": body, "reads": reads})


_jaxlib.run_alone(blocks_p)
_jaxlib.teach_pass_down(blocks_p, _pass_down)
blocks_p.def_effectful_abstract_eval(_types)
mlir.register_lowering(blocks_p, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[blocks_p] = _jvp
ad.primitive_transposes[blocks_p] = _transpose
