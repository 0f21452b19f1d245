"""Two primitives for parameters that each microbatch reads: `fan_out` and, for their gradients, `add_many`.

JAX adds the cotangents of a value that is read several times with one equation per array and reading. A model of 100
arrays in 256 microbatches would have 25,000 of them, and each costs time in every part of the compiler. `fan_out` gives
each microbatch parameters of its own, and its transpose adds all gradients of two microbatches with one equation.

`fan_out` is the identity, and no step of a flat program (`inlining`). Its derivative leaves the values themselves as
they are, so no loop keeps copies of them for its backward steps. `schedule.sums` orders the additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend as jex
from jax.interpreters import ad, batching, mlir

from pathways import _jaxlib

fan_out_p = jex.core.Primitive("pathways_fan_out")
fan_out_p.multiple_results = True
add_many_p = jex.core.Primitive("pathways_add_many")
add_many_p.multiple_results = True


def fan_out(tree: Any, count: int) -> list[Any]:
    """`count` pytrees equal to `tree`, whose cotangents are added together."""
    leaves, structure = jax.tree.flatten(tree)
    traced = [n for n, leaf in enumerate(leaves) if _jaxlib.is_tracer(leaf) and not _jaxlib.is_traced_reference(leaf)]
    if count == 1 or not traced:
        return [tree] * count
    out = fan_out_p.bind(*(leaves[n] for n in traced), count=count)
    trees = []
    for copy in range(count):
        of_copy = dict(zip(traced, out[copy * len(traced) :], strict=False))
        trees.append(structure.unflatten(of_copy.get(n, leaf) for n, leaf in enumerate(leaves)))
    return trees


def add_many(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """The sums of values that have equal types in pairs; only under trace."""
    return list(add_many_p.bind(*a, *b))


def _fan_out_jvp(values: Sequence[Any], tangents: Sequence[Any], *, count: int) -> tuple[list[Any], list[Any]]:
    given = [n for n, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    out = list(tangents) * count
    fanned = fan_out_p.bind(*(tangents[n] for n in given), count=count) if given else []
    for place, tangent in enumerate(fanned):
        copy, n = divmod(place, len(given))
        out[copy * len(tangents) + given[n]] = tangent
    return list(values) * count, out


def _fan_out_transpose(cotangents: Sequence[Any], *operands: Any, count: int) -> list[Any]:
    out: list[Any] = [ad.Zero(operand.aval.to_ct_aval()) for operand in operands]
    alike: dict[tuple[int, ...], list[int]] = {}  # values by the copies whose cotangents are not zero
    for n in range(len(operands)):
        of_copies = cotangents[n :: len(operands)]
        alike.setdefault(tuple(c for c, each in enumerate(of_copies) if type(each) is not ad.Zero), []).append(n)
    for copies, values in alike.items():
        if copies:
            each = ([cotangents[copy * len(operands) + n] for n in values] for copy in copies)
            totals = next(each)
            for more in each:
                totals = add_many(totals, more)
            for n, total in zip(values, totals, strict=True):
                out[n] = total
    return out


def _fan_out_batch(args: Any, dims: Any, *, count: int) -> tuple[Any, Any]:
    return fan_out_p.bind(*args, count=count), list(dims) * count


def _add_many_transpose(cotangents: Sequence[Any], *operands: Any) -> list[Any]:
    del operands
    return [*cotangents, *cotangents]


def _add_many_batch(args: Any, dims: Any) -> tuple[Any, Any]:
    half = len(args) // 2
    if dims[:half] == dims[half:]:
        return add_many_p.bind(*args), dims[:half]
    sums, places = [], []
    for a, b, m, n in zip(args[:half], args[half:], dims[:half], dims[half:], strict=True):
        is_batched = m is not None or n is not None
        sums.append(jax.vmap(jax.lax.add, (m, n))(a, b) if is_batched else jax.lax.add(a, b))
        places.append(0 if is_batched else None)
    return sums, places


def _sums(*values: Any) -> list[Any]:
    half = len(values) // 2
    return [jax.lax.add(a, b) for a, b in zip(values[:half], values[half:], strict=True)]


fan_out_p.def_abstract_eval(lambda *avals, count: list(avals) * count)
ad.primitive_jvps[fan_out_p] = _fan_out_jvp
ad.primitive_transposes[fan_out_p] = _fan_out_transpose
batching.primitive_batchers[fan_out_p] = _fan_out_batch
mlir.register_lowering(fan_out_p, lambda ctx, *values, count: list(values) * count)

add_many_p.def_abstract_eval(lambda *avals: list(avals[: len(avals) // 2]))
ad.deflinear2(add_many_p, _add_many_transpose)
batching.primitive_batchers[add_many_p] = _add_many_batch
mlir.register_lowering(add_many_p, mlir.lower_fun(_sums, multiple_results=True))
