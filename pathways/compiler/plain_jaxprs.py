"""Jaxprs of placed functions for who has no cluster: to look at, and for `jax.export` to make derivatives of. Pure."""

from __future__ import annotations

from typing import Any

from pathways import _jaxlib
from pathways.compiler.added_primitives.transfers import targets_of
from pathways.compiler.placed import lookup


def untagged(closed: Any, *, keep_shardings: bool = True) -> Any:
    """A closed jaxpr in which placed functions are plain ones, which JAX may lower for whoever runs it.

    `keep_shardings`: what says only where parts of a value lie stays. Without it, the jaxpr is for any number of
    devices.
    """

    def of_parameter(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(of_parameter, value))
        return untagged(value, keep_shardings=keep_shardings) if _jaxlib.is_jaxpr(value) else value

    def now(var: Any) -> Any:
        return var if isinstance(var, _jaxlib.Literal) else same.get(var, var)

    jaxpr, constants = _jaxlib.opened(closed)
    same: dict[Any, Any] = {}  # by result of an equation that is left out: its argument
    eqns = []
    for eqn in jaxpr.eqns:
        if not keep_shardings and _says_where(eqn):
            same.update((y, now(x)) for x, y in zip(eqn.invars, eqn.outvars, strict=True))
            continue
        params = {key: of_parameter(value) for key, value in eqn.params.items()}
        if eqn.primitive is _jaxlib.jit_p and (slice_tag := lookup(params["name"])) is not None:
            params["name"] = slice_tag.name
        eqns.append(eqn.replace(invars=list(map(now, eqn.invars)), params=params))
    plain = jaxpr.replace(eqns=eqns, outvars=list(map(now, jaxpr.outvars)))
    return plain if closed is jaxpr else _jaxlib.closed_jaxpr(plain, constants)


def _says_where(eqn: Any) -> bool:
    """Whether an equation gives its arguments as they are, over the devices of a slice in a certain way."""
    return eqn.primitive.name == "sharding_constraint" or bool(targets_of(eqn))
