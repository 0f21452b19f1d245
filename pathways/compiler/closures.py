"""Makes arguments of closed-over arrays that are on a slice already, so that they are not constants in the module.

JAX keeps the values that a function closes over as constants of the traced jaxpr, and of each `jax.jit` equation inside
at any depth (a placed function is such an equation). `lift` takes the wanted constants out and passes them down as
arguments. JAX already makes operands of the constants of other constructs (loops, branches). A `jax.jit` within the
body of such a construct keeps its own constants.

Pure: works on jaxprs only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathways import _jaxlib


def lift(
    closed: Any, is_wanted: Callable[[Any], bool], memo: dict[int, tuple[Any, list[Any]]] | None = None
) -> tuple[Any, list[Any]]:
    """Turns the wanted constants of `closed` into its last arguments. Returns the new jaxpr and these values.

    `memo` has the same of the jaxprs inside, by id().
    """
    memo = {} if memo is None else memo
    values: list[Any] = []
    variables: dict[int, Any] = {}  # by id() of a value: the argument that replaces it

    def argument(value: Any, aval: Any) -> Any:
        variable = variables.get(id(value))
        if variable is None:
            values.append(value)
            variable = variables[id(value)] = _jaxlib.new_var(aval)
        return variable

    kept: dict[Any, Any] = {}
    renamed: dict[Any, Any] = {}
    for v, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if is_wanted(value):
            renamed[v] = argument(value, v.aval)
        else:
            kept[v] = value

    def read(atom: Any) -> Any:
        if isinstance(atom, _jaxlib.Literal):
            return argument(atom.val, atom.aval) if is_wanted(atom.val) else atom
        return renamed.get(atom, atom)

    eqns = []
    for eqn in closed.jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if eqn.primitive is _jaxlib.jit_p:
            inner = eqn.params["jaxpr"]
            if id(inner) not in memo:  # equal calls share one jaxpr, and must still share one afterwards
                memo[id(inner)] = lift(inner, is_wanted, memo)
            lifted, inside = memo[id(inner)]
            if inside:
                more = [argument(value, v.aval) for value, v in zip(inside, _last(lifted, len(inside)), strict=True)]
                eqns.append(_jaxlib.extend_jit(eqn, inputs, more, lifted))
                continue
        eqns.append(eqn if inputs == list(eqn.invars) else eqn.replace(invars=inputs))
    outvars = [read(v) for v in closed.jaxpr.outvars]
    if not values:
        return closed, []
    arguments, jaxpr = [*closed.jaxpr.invars, *variables.values()], closed.jaxpr
    return _jaxlib.new_jaxpr(kept, arguments, outvars, eqns, like=jaxpr, effects=jaxpr.effects), values


def _last(closed: Any, count: int) -> list[Any]:
    return list(closed.jaxpr.invars[len(closed.jaxpr.invars) - count :])
