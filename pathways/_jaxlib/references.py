"""References to mutable arrays (`jax.new_ref`): as values in traced programs, and what one of this process holds.

JAX "discharges" references before it lowers a function: what is read and written becomes values that equations take and
give. `discharged` does so for a whole traced program, with its loops, branches and placed functions.

A reference holds its value in an object of JAX's, which JAX asks for a `jax.Array` (`_buf`) whenever it uses the
reference in this process. `hold` puts an object of ours in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core, effects
from jax._src.state import discharge, primitives, types

from pathways._jaxlib.jaxprs import new_jaxpr, opened

_EFFECTS = (types.RefEffect, core.InternalMutableArrayEffect)


def is_reference(value: Any) -> bool:
    """Whether it is a reference of this process, and no traced one."""
    return type(value) is core.Ref


def is_traced_reference(value: Any) -> bool:
    """Whether it is a reference in a trace, or one of this process."""
    return isinstance(value, core.Ref)


def reference_type(reference: Any) -> Any:
    """The type of the array that a reference refers to."""
    return reference.aval.inner_aval


def abstract_reference(aval: Any) -> Any:
    """A reference without a value to an array of that type, to trace a function with."""
    return core.Ref(types.AbstractRef(aval), None)


@dataclasses.dataclass(frozen=True)
class Discharged:
    """A traced program without references: `jaxpr`, closed.

    Each argument that was a reference is its value, and the values of `closed_over`, which the program closed over, are
    its last arguments. Its last results are the new values of the references in `written`: a number counts the
    arguments that were references, then `closed_over`.
    """

    jaxpr: Any
    closed_over: tuple[Any, ...] = ()
    written: tuple[int, ...] = ()


def discharged(closed: Any) -> Discharged:
    """The program without references.

    Raises:
        NotImplementedError: JAX cannot discharge a reference that goes into some primitive; its text names the
            primitive, if JAX names it.
        ValueError: a reference is used after `jax.freeze`, or is frozen though it was made outside.
    """
    jaxpr, values = opened(closed)
    inside = [(v, value) for v, value in zip(jaxpr.constvars, values, strict=True) if is_reference(value)]
    is_stateful = any(isinstance(effect, _EFFECTS) for effect in jaxpr.effects)
    if not inside and not is_stateful and not any(_is_reference_type(v) for v in jaxpr.invars):
        return Discharged(closed)
    kept = {v: value for v, value in zip(jaxpr.constvars, values, strict=True) if not is_reference(value)}
    invars = [*jaxpr.invars, *(v for v, _ in inside)]
    references = [v for v in invars if _is_reference_type(v)]
    changes = (types.WriteEffect, types.AccumEffect)
    changed = {effect.input for effect in jaxpr.effects if isinstance(effect, changes)}
    written = tuple(number for number, v in enumerate(references) if v in changed)
    whole = new_jaxpr(kept, invars, jaxpr.outvars, jaxpr.eqns, like=jaxpr, effects=jaxpr.effects)
    try:
        pure = discharge.discharge_state(whole)
    except KeyError as error:  # JAX forgets a reference that is frozen, and then does not find it
        raise ValueError("a reference is used after jax.freeze or jax.free_ref") from error
    inner, constants = opened(pure)
    results = list(inner.outvars)
    if len(results) != len(jaxpr.outvars) + len(references):
        raise ValueError("jax.freeze or jax.free_ref of a reference that was made outside of the program")
    outvars = [*results[: len(jaxpr.outvars)], *(results[len(jaxpr.outvars) + number] for number in written)]
    new = new_jaxpr(
        dict(zip(inner.constvars, constants, strict=True)),
        inner.invars,
        outvars,
        inner.eqns,
        like=jaxpr,
        effects=inner.effects,
    )
    return Discharged(new, tuple(value for _, value in inside), written)


def effects_at(closed: Any, positions: Sequence[int]) -> set[Any]:
    """The effects of a primitive that runs a closed jaxpr. `positions`: of its arguments among the operands."""
    return {
        effect.replace(positions[effect.input]) if isinstance(effect, effects.JaxprInputEffect) else effect
        for effect in core.positional_effects(closed)
    }


def is_reference_type(aval: Any) -> bool:
    """Whether it is the type of a reference."""
    return isinstance(aval, types.AbstractRef)


def discharge_by(primitive: Any, rule: Callable[..., tuple[list[Any], list[Any]]]) -> None:
    """From now on equations of a primitive of ours are discharged by `rule(operands, which of them were references,
    parameters)`: it gives the new values of these, and the results."""

    def discharge_rule(context: Any, *operands: Any, **params: Any) -> tuple[list[Any], list[Any]]:
        if not hasattr(context, "in_avals"):  # older JAX: the types of operands, then of results
            operands = operands[1:]
        were = [is_reference_type(aval) for aval in getattr(context, "in_avals", context)]
        values, results = rule(operands, were, params)
        new = iter(values)
        return [next(new) if was else None for was in were], results

    discharge.register_discharge_rule(primitive)(discharge_rule)


def _is_reference_type(v: Any) -> bool:
    return is_reference_type(v.aval)


def holder_of(reference: Any) -> Any:
    """The object in which a reference has its value: one of JAX's, or ours."""
    return reference._refs


def hold(reference: Any, holder: Any) -> None:
    """From now on the reference has its value in `holder`, which JAX asks for `_buf` and `_aval`."""
    holder._aval = reference._refs._aval
    reference._refs = holder


def plain_holder(aval: Any, value: Any) -> Any:
    """What holds the value of a reference of this type, as JAX makes it."""
    return core.ArrayRefImpl(aval, own_copy(value))


def own_copy(value: Any) -> Any:
    """A `jax.Array` of this process that nobody else has, so that JAX may write into it."""
    with jax.ensure_compile_time_eval():
        return jax.new_ref(value)._refs._buf


def accept_references(
    made: Callable[[Any], None], read: Callable[[Any, bool], Any], write: Callable[[Any, Any], Any]
) -> None:
    """Lets ours answer when a reference is made, or the whole of it read or written, in this process and in no trace.

    `made(reference)` is called when one is made, perhaps of an array of ours, which JAX then has in its place.
    `read(reference, is_whole)` gives the value, and `write(reference, value)` gives the old one; `NotImplemented`: JAX
    does it, with the `jax.Array` that the holder gives. Of a part of a reference, JAX reads from what `read` gives.
    """
    plain_new, plain_get, plain_swap = core.ref_p.impl, primitives.get_p.impl, primitives.swap_p.impl

    def new(value: Any, **params: Any) -> Any:
        reference = plain_new(value, **params)
        made(reference)
        return reference

    def is_whole(index: Sequence[Any], tree: Any) -> bool:
        return not jax.tree_util.tree_unflatten(tree, index)

    def get(reference: Any, *index: Any, tree: Any) -> Any:
        whole = is_whole(index, tree)
        value = read(reference, whole) if is_reference(reference) else NotImplemented
        if value is not NotImplemented and whole:
            return value
        if value is not NotImplemented:
            reference = core.Ref(reference.aval, plain_holder(reference.aval, value))
        return plain_get(reference, *index, tree=tree)

    def swap(reference: Any, value: Any, *index: Any, tree: Any) -> Any:
        if is_reference(reference) and is_whole(index, tree):
            kind = core.typeof(value)
            if (kind.shape, kind.dtype) == (reference.shape, reference.dtype):
                old = write(reference, value)
                if old is not NotImplemented:
                    return old
        return plain_swap(reference, value, *index, tree=tree)

    core.ref_p.def_impl(new)
    primitives.get_p.def_impl(get)
    primitives.swap_p.def_impl(swap)
